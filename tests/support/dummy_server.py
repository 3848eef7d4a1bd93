"""A fake inference server: `python tests/support/dummy_server.py --port P --rank R`.

It answers the requests that SGLang and vLLM answer, and counts requests by their ids. On request,
it misbehaves. The server uses only the standard library and needs little CPU time, because
benchmarks of Muster's router send requests to it.

| request | answer |
| --- | --- |
| `GET /health`, `/health_generate` | 200 after the start-up time, 503 before |
| `POST /generate`, `/v1/completions`, `/v1/chat/completions` | the requested number of tokens |
| `POST /weights {"version": 3}` | sets the weight version; 500 if `broken_for` lists the rank |
| `POST /misbehave {"kind": ...}` | sets a fault, see `Fault` |
| `POST /step {"n": 1}` | releases `n` pieces of an answer under the fault `step` |
| `GET /counts` | the counters, see `Counts`; the id of a request is its header `X-Request-Id` |
| `GET /large?bytes=N` | N bytes |
| all other requests | method, path, headers, size and SHA-256 of the body of the request |

A generation is one JSON object, or a stream of events if the request has `"stream": true`. Each
piece names the rank of the server and its weight version. With port 0, the server listens on any
free port. As soon as the server listens, it prints its port as the first line on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

#: Paths of requests that generate text.
GENERATING = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
#: Paths of health checks.
HEALTH = frozenset({"/health", "/health_generate"})
#: Paths with which a test controls the server. Requests to these paths are never counted, and
#: faults do not affect them.
_CONTROL_PATHS = frozenset({"/misbehave", "/step", "/counts", "/weights"})
#: Block of zero bytes. `send_large` sends this block repeatedly.
_LARGE_PIECE = bytes(64 * 1024)


@dataclass(kw_only=True)
class Fault:
    """A fault that a test switches on in the fake server, for example unanswered requests."""

    #: Name of the fault:
    #: - `ok`: no fault. A test sets this kind to end the current fault, and hanging requests are
    #:   then answered.
    #: - `hang`: the server accepts the request and does not answer.
    #: - `slow`: the server waits `delay_s` before the answer and before each further token.
    #: - `status`: the server answers with the HTTP status `status`.
    #: - `garbage`: the server answers with bytes that are not HTTP.
    #: - `reset`: the server resets the connection at once.
    #: - `die_mid_stream`: the server closes the connection after `after` tokens.
    #: - `step`: each token of a stream, and each plain answer, waits for a `POST /step`.
    #: - `exit`: the process exits at once with the exit code `status`.
    kind: str = "ok"
    #: HTTP status of the fault `status`; exit code of the fault `exit`.
    status: int = 503
    #: Delay of the fault `slow` before the answer and before each further token, in seconds.
    delay_s: float = 1.0
    #: Number of tokens that the fault `die_mid_stream` lets through.
    after: int = 1
    #: Number of requests that the fault affects. None if the fault does not end by itself.
    times: int | None = None
    #: True if the fault also affects health checks.
    health: bool = False


@dataclass(kw_only=True)
class Counts:
    """Counters of the requests that a server has received."""

    #: Number of requests that arrived.
    total: int = 0
    #: Number of requests that the server is answering now.
    now: int = 0
    #: Largest number of requests that the server answered at the same time.
    peak: int = 0
    #: Number of bytes that the server has sent.
    bytes_sent: int = 0
    #: Mapping from a request id to the number of requests that arrived with this id.
    begun: Counter[str] = field(default_factory=Counter)
    #: Mapping from a request id to the number of requests that were answered completely.
    finished: Counter[str] = field(default_factory=Counter)
    #: Mapping from a request id to the number of requests whose client disconnected before the
    #: answer was complete.
    cancelled: Counter[str] = field(default_factory=Counter)


@dataclass(kw_only=True)
class Request:
    """An HTTP request that the server has received."""

    method: str
    #: Path and query of the request line.
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def header(self, name: str, default: str = "") -> str:
        """Return the value of the first header with this lower-case name, or the default."""
        return next((value for key, value in self.headers if key.lower() == name), default)

    def json(self) -> dict[str, Any]:
        """Return the JSON object of the body, or an empty dict if the body is something else."""
        content = json.loads(self.body or b"{}")
        return content if isinstance(content, dict) else {}


class DummyServer:
    """A fake inference server. The object has the state that all connections share."""

    def __init__(
        self, rank: int = 0, *, version: int = 0, token_s: float = 0.0, up_after_s: float = 0.0
    ) -> None:
        """
        Args:
            rank: Rank of the server, which the server includes in its answers.
            version: Weight version that the server has at first.
            token_s: Time that the server needs for each token, in seconds.
            up_after_s: Time from the start of the server until health checks succeed, in seconds.
        """
        self.rank = rank
        self.version = version
        self.counts = Counts()
        self.fault = Fault()
        self.port = 0
        self._token_s = token_s
        self._up_after_s = up_after_s
        #: Time from which health checks succeed, on the clock of the event loop.
        self._up_at = 0.0
        #: Set when the current fault ends.
        self._fault_over = asyncio.Event()
        #: Counts the pieces that the server may still send during the fault `step`. A piece is one
        #: token of a streamed answer, or a whole answer that is not streamed.
        self._steps = asyncio.Semaphore(0)
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen on a TCP port, or on any free port if `port` is 0.

        Afterwards, the attribute `port` contains the number of the port.
        """
        loop = asyncio.get_running_loop()
        self._up_at = loop.time() + self._up_after_s
        self._server = await loop.create_server(lambda: _Connection(self), host, port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and reset every connection, like a process that was killed."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.cut()
        if self._server is not None:
            await self._server.wait_closed()

    def misbehave(self, **order: Any) -> None:
        """Set a fault, with the fields of `Fault` as arguments.

        Requests that hang because of the previous fault are then answered.
        """
        self._fault_over.set()
        self._fault_over = asyncio.Event()
        self.fault = Fault(**order)

    def step(self, n: int = 1) -> None:
        """During the fault `step`, let the server send `n` more pieces of answers.

        A piece is one token of a streamed answer, or a complete answer that is not streamed. The
        server waits for a call of this method before it sends a piece.
        """
        for _ in range(n):
            self._steps.release()

    async def answer(self, request: Request, connection: _Connection) -> None:
        """Answer a request normally, or with the fault that the test has set for this server."""
        path = request.path
        if path in _CONTROL_PATHS:
            is_broken = path == "/weights" and self.rank in request.json().get("broken_for", ())
            connection.send_json(500 if is_broken else 200, self._obey(request))
            return

        is_health = path in HEALTH
        if is_health and asyncio.get_running_loop().time() < self._up_at:
            connection.send_json(503, {"error": "loading"})
            return

        fault = self._take_fault(is_health=is_health)
        if fault.kind != "ok" and await self._show_fault(fault, connection):
            return

        if path in GENERATING and request.method == "POST":
            await self._generate(request, connection, fault)
        elif path == "/large":
            await connection.send_large(int(request.target.partition("bytes=")[2] or "1000000"))
        elif is_health:
            connection.send_json(200, {"rank": self.rank, "version": self.version})
        elif path == "/v1/models":
            connection.send_json(200, {"object": "list", "data": [{"id": "dummy"}]})
        else:
            connection.send_json(200, self._echo(request), extra_headers=_ECHO_HEADERS)

    def _take_fault(self, *, is_health: bool) -> Fault:
        """Return the fault that affects this request.

        If the fault affects only a limited number of requests, this method counts the request, and
        ends the fault after the last request.

        Args:
            is_health: True for a health check, which only some faults affect.
        """
        fault = self.fault
        if fault.kind == "ok" or (is_health and not fault.health):
            return _NO_FAULT
        if fault.times is not None:
            fault.times -= 1
            if fault.times <= 0:
                self.fault = Fault()
        return fault

    async def _show_fault(self, fault: Fault, connection: _Connection) -> bool:
        """Apply a fault to a request. For example, send an answer with HTTP status 503.

        Returns:
            False if the server must still send the normal answer, for example after a delay.
            Otherwise True.
        """
        if fault.kind == "hang":
            await self._fault_over.wait()
        elif fault.kind == "slow":
            await asyncio.sleep(fault.delay_s)
        elif fault.kind == "status":
            connection.send_json(fault.status, {"error": f"told to answer {fault.status}"})
            return True
        elif fault.kind == "garbage":
            connection.send(b"\x00\xffthis is not HTTP\r\n\r\n" * 4)
            connection.cut(gently=True)
            return True
        elif fault.kind == "reset":
            connection.cut()
            return True
        elif fault.kind == "exit":
            os._exit(fault.status)
        return False

    async def _generate(self, request: Request, connection: _Connection, fault: Fault) -> None:
        """Answer a request for text. The text has the requested number of tokens, by default 4."""
        body = request.json()
        parameters = body.get("sampling_params") or {}
        tokens = int(body.get("max_tokens") or parameters.get("max_new_tokens") or 4)
        is_stream = bool(body.get("stream"))

        if is_stream:
            connection.begin_stream()
        for number in range(tokens):
            if fault.kind == "die_mid_stream" and number >= fault.after:
                connection.cut(gently=True)
                return
            if fault.kind == "step" and (is_stream or not number):
                await self._steps.acquire()
            elif fault.kind == "slow" and number:
                await asyncio.sleep(fault.delay_s)
            elif self._token_s:
                await asyncio.sleep(self._token_s)
            if is_stream:
                piece = self._piece(request.path, request, "a ", is_stream=True)
                connection.send_event(json.dumps(piece).encode())

        if is_stream:
            connection.send_event(b"[DONE]")
            connection.end_stream()
        else:
            piece = self._piece(request.path, request, "a " * tokens, is_stream=False)
            connection.send_json(200, piece)

    def _piece(self, path: str, request: Request, text: str, *, is_stream: bool) -> dict[str, Any]:
        """Return the JSON content of an answer with `text`. The URL path decides the format."""
        about = {"id": request.header("x-request-id"), "rank": self.rank, "version": self.version}
        if path == "/generate":
            return {"text": text, "meta_info": about}
        choice: dict[str, Any] = {"index": 0, "finish_reason": None if is_stream else "stop"}
        if path == "/v1/completions":
            choice["text"] = text
        else:
            choice["delta" if is_stream else "message"] = {"role": "assistant", "content": text}
        return {**about, "object": "completion", "choices": [choice]}

    def _obey(self, request: Request) -> dict[str, Any]:
        """Execute a control request of the test, and return the counters of the server."""
        order = request.json()
        if request.path == "/misbehave":
            self.misbehave(**order)
            if self.fault.kind == "exit":
                asyncio.get_running_loop().call_later(0.01, os._exit, self.fault.status)
        elif request.path == "/step":
            self.step(int(order.get("n", 1)))
        elif request.path == "/weights":
            self.version = int(order["version"])
        return {"rank": self.rank, "version": self.version, **vars(self.counts)}

    def _echo(self, request: Request) -> dict[str, Any]:
        """Return the answer to a request: a JSON description of the request itself."""
        return {
            "rank": self.rank,
            "method": request.method,
            "target": request.target,
            "headers": request.headers,
            "bytes": len(request.body),
            "sha256": hashlib.sha256(request.body).hexdigest(),
        }


_NO_FAULT = Fault()
#: Two headers that each occur twice in an echo answer. A test checks that a proxy forwards all four
#: lines.
_ECHO_HEADERS = "X-Twice: one\r\nX-Twice: two\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"


class _Connection(asyncio.Protocol):
    """An HTTP/1.1 connection with keep-alive, chunked request bodies and 100-continue.

    The connection expects well-formed requests, and answers them one after the other.
    """

    def __init__(self, server: DummyServer) -> None:
        self._server = server
        #: Received bytes of requests that are not parsed yet.
        self._buffer = bytearray()
        #: Task that answers the current request. None between two requests.
        self._task: asyncio.Task[None] | None = None
        #: The request that was parsed last. None before the first request.
        self._request: Request | None = None
        #: Set while the write buffer of the transport has room.
        self._may_write = asyncio.Event()
        self._may_write.set()
        #: True if the server has sent `100 Continue` for the current request.
        self._continued = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server._connections.discard(self)
        self._may_write.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._begin_next_request()

    def _begin_next_request(self) -> None:
        request = self._parse()
        if request is not None:
            self._task = asyncio.get_running_loop().create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        """Answer a request, update the counters, and begin the next request of the connection."""
        counts = self._server.counts
        request_id = request.header("x-request-id")
        is_control = request.path in _CONTROL_PATHS
        if not is_control:
            counts.total += 1
            counts.now += 1
            counts.peak = max(counts.peak, counts.now)
            if request_id:
                counts.begun[request_id] += 1
        self._request = request
        try:
            await self._server.answer(request, self)
        except asyncio.CancelledError:
            if request_id:
                counts.cancelled[request_id] += 1
            raise
        except Exception:
            self.cut()
            raise
        else:
            if request_id and not self._transport.is_closing():
                counts.finished[request_id] += 1
        finally:
            if not is_control:
                counts.now -= 1
        self._task = None
        if request.header("connection").lower() == "close":
            self._transport.close()
        elif self._buffer:
            self._begin_next_request()

    def _parse(self) -> Request | None:
        """Remove and return the next request in the buffer, or return None if it is incomplete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        if line.count(" ") < 2 or line.startswith("PRI "):
            # The client speaks another protocol, for example HTTP/2.
            self.cut()
            return None

        method, target, _ = line.split(" ", 2)
        headers = []
        for header_line in lines:
            name, _, value = header_line.partition(":")
            headers.append((name, value.strip()))
        request = Request(method=method, target=target, headers=headers, body=b"")

        body_and_end = self._read_body(request, end + 4)
        if body_and_end is None:
            if not self._continued and request.header("expect"):
                self._continued = True
                self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            return None
        request.body, body_end = body_and_end
        self._continued = False
        del self._buffer[:body_end]
        return request

    def _read_body(self, request: Request, start: int) -> tuple[bytes, int] | None:
        """Return the body of a request and the end position of the body in the buffer.

        Return None if the body is not complete.

        Args:
            request: The request, with its headers.
            start: Position in the buffer where the body starts.
        """
        if request.header("transfer-encoding").lower() != "chunked":
            end = start + int(request.header("content-length", "0"))
            if len(self._buffer) < end:
                return None
            return bytes(self._buffer[start:end]), end

        chunks = []
        position = start
        while (line_end := self._buffer.find(b"\r\n", position)) >= 0:
            size = int(bytes(self._buffer[position:line_end]).partition(b";")[0], 16)
            position = line_end + 2
            if len(self._buffer) < position + size + 2:
                return None
            chunks.append(bytes(self._buffer[position : position + size]))
            position += size + 2
            if not size:
                return b"".join(chunks), position
        return None

    def send(self, data: bytes) -> None:
        self._server.counts.bytes_sent += len(data)
        self._transport.write(data)

    def send_json(self, status: int, content: Any, extra_headers: str = "") -> None:
        """Send a complete answer with a JSON body. For a HEAD request, send only the headers.

        Args:
            status: HTTP status of the answer.
            content: Content of the body.
            extra_headers: Further header lines, each with its `\\r\\n`.
        """
        body = json.dumps(content).encode()
        head = (
            f"HTTP/1.1 {status} As Told\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{extra_headers}\r\n"
        ).encode()
        is_head = self._request is not None and self._request.method == "HEAD"
        self.send(head if is_head else head + body)

    def begin_stream(self) -> None:
        self.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )

    def send_event(self, data: bytes) -> None:
        self.send(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def end_stream(self) -> None:
        self.send(b"0\r\n\r\n")

    async def send_large(self, size: int) -> None:
        """Send an answer with `size` zero bytes, not faster than the client reads."""
        self.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while size > 0:
            await self._may_write.wait()
            self.send(_LARGE_PIECE[: min(size, len(_LARGE_PIECE))])
            size -= len(_LARGE_PIECE)

    def cut(self, *, gently: bool = False) -> None:
        """End the connection.

        Args:
            gently: True to close the connection after all written bytes are sent. False to reset
                the connection at once.
        """
        if gently:
            self._transport.close()
        else:
            self._transport.abort()


async def _serve(options: argparse.Namespace) -> None:
    server = DummyServer(
        options.rank,
        version=options.version,
        token_s=options.token_s,
        up_after_s=options.up_after_s,
    )
    await server.start(options.port, options.host)
    print(server.port, flush=True)
    await asyncio.get_running_loop().create_future()


def main() -> None:
    parser = argparse.ArgumentParser(description="A fake inference server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--version", type=int, default=0, help="weight version")
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds per token")
    parser.add_argument("--up-after-s", type=float, default=0.0, help="seconds of start-up")
    options = parser.parse_args()
    try:
        asyncio.run(_serve(options))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
