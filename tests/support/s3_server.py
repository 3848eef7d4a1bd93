"""An S3 server on the loopback address, which can stop, become slow, or check credentials."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

#: Environment variables with the credentials and the region of a client.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


class _QuietHandler(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class S3Server:
    """moto's S3 server in a thread of this process. Stored objects survive `stop` and `start`."""

    def __init__(self) -> None:
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self._port = 0
        #: Function that is called before each answer to a request. The arguments are the method and
        #: the path of the request.
        self.before_request: Callable[[str, str], None] = lambda method, path: None
        #: Set when the server stops, so that delayed requests end.
        self._is_stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": self.url}

    def start(self) -> None:
        """Start the server, at the same port as before."""
        self._is_stopping.clear()
        self._server = make_server(
            "127.0.0.1", self._port, self._answer, threaded=True, request_handler=_QuietHandler
        )
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Stop the server, so that connections are refused."""
        self._is_stopping.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @property
    def is_running(self) -> bool:
        return self._server is not None

    def check_credentials(self, is_checked: bool) -> None:
        """Set whether the server checks credentials.

        Args:
            is_checked: True to refuse requests with unknown credentials. False to accept all.
        """
        # Number of requests, from now on, that moto accepts without a check of the credentials.
        count = b"0" if is_checked else b"inf"
        request = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth",
            data=count,
            headers={"Content-Type": "text/plain"},
            method="POST",
        )
        urllib.request.urlopen(request, timeout=10).close()

    def delay(self, delay_s: float) -> None:
        """From now on, answer each request only after `delay_s` seconds."""
        self.before_request = lambda method, path: ignore_message(self._is_stopping.wait(delay_s))

    def client(self) -> Any:
        """Return a boto3 client of the server, with its address and its credentials."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            config=Config(retries={"max_attempts": 1}),
        )

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self.before_request(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        answer: Iterable[bytes] = self._application(environ, start_response)
        return answer


def ignore_message(_: object) -> None:
    """Ignore the argument, and return None.

    Lambdas that must return None use this function: `lambda: ignore_message(event.wait())`.
    """


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """Run an S3 server until the context ends."""
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()
