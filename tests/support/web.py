"""An HTTP server for one test, which computes its answers with a function of the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: Function that answers a request. The arguments are the method, path and body of the request. The
#: function returns the HTTP status and the content of the answer. The content is sent as JSON; None
#: means no body.
Answer = Callable[[str, str, bytes], tuple[int, object]]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Run an HTTP server on 127.0.0.1 while the context is open, and yield its URL.

    Args:
        answer: Function that computes the answer to a request.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, content = answer(self.command, self.path, body)
            payload = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PATCH = answer

        def log_message(self, *_: object) -> None:
            """Print no log lines to stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
