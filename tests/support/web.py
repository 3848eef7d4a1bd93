"""A server of a test's own, that answers as the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: From method, path and body of a request: the status, and what is sent as JSON; None: nothing is.
Answer = Callable[[str, str, bytes], tuple[int, object]]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Its URL, on loopback, until the end."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, content = answer(self.command, self.path, body)
            sent = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_PATCH = answer

        def log_message(self, *_: object) -> None:
            """Nothing is said on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
