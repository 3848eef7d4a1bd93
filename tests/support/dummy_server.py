"""Stands in for an inference server: `python tests/support/dummy_server.py --port P --rank R`.

It answers what SGLang and vLLM answer, counts what it got by the ids of the requests, and
misbehaves when it is told to. Only the standard library, and cheap: it is measured against too.

| request | answer |
| --- | --- |
| `GET /health`, `/health_generate` | 200 once it is up |
| `POST /generate`, `/v1/completions`, `/v1/chat/completions` | as many tokens as asked for |
| `POST /weights {"version": 3}` | has these weights now; 500 where `broken_for` has its rank |
| `POST /misbehave {"kind": ...}` | see `Fault` |
| `POST /step {"n": 1}` | lets so many pieces of an answer go on under the fault `step` |
| `GET /counts` | see `Counts`; requests are known by `X-Request-Id` |
| `GET /large?bytes=N` | so many bytes |
| anything else | what it got: method, path, headers, size and SHA-256 of the body |

A generation is plain, or events with `"stream": true`; each piece names the rank and the version of
the weights. A port of 0 is chosen freely. The first line on stdout is the port, once it listens.
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

GENERATING = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
HEALTH = frozenset({"/health", "/health_generate"})
#: Told to the server itself, so never counted and never a victim of a fault.
_ORDERS = frozenset({"/misbehave", "/step", "/counts", "/weights"})
_PIECE = bytes(64 * 1024)


@dataclass(kw_only=True)
class Fault:
    """What a server does instead of answering."""

    #: `ok`: nothing, which ends a fault and lets what hangs go on. `hang`: accepts and says
    #: nothing. `slow`: after `delay_s`, and each token too. `status`: answers `status`. `garbage`:
    #: bytes that are not HTTP. `reset`: cuts the connection at once. `die_mid_stream`: cuts it
    #: after `after` tokens. `step`: each token, and a plain answer, waits for `POST /step`.
    #: `exit`: the process ends at once with `status`.
    kind: str = "ok"
    status: int = 503
    delay_s: float = 1.0
    after: int = 1
    #: It ends after so many requests; None: it lasts.
    times: int | None = None
    #: Requests for health suffer from it too.
    health: bool = False


@dataclass(kw_only=True)
class Counts:
    """What a server got, and what became of it."""

    total: int = 0
    #: Requests in work, now and at most.
    now: int = 0
    peak: int = 0
    bytes_sent: int = 0
    #: By id: requests that arrived, were answered to the end, and whose client left before.
    begun: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)


@dataclass(kw_only=True)
class Request:
    method: str
    #: With its query.
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def header(self, name: str, default: str = "") -> str:
        return next((value for key, value in self.headers if key.lower() == name), default)

    def json(self) -> dict[str, Any]:
        content = json.loads(self.body or b"{}")
        return content if isinstance(content, dict) else {}


class DummyServer:
    """One server: its state, which all its connections share."""

    def __init__(
        self, rank: int = 0, *, version: int = 0, token_s: float = 0.0, up_after_s: float = 0.0
    ) -> None:
        self.rank = rank
        self.version = version
        self.counts = Counts()
        self.fault = Fault()
        self.port = 0
        self._token_s = token_s
        self._up_after_s = up_after_s
        self._up_at = 0.0
        self._fault_over = asyncio.Event()
        self._steps = asyncio.Semaphore(0)
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        loop = asyncio.get_running_loop()
        self._up_at = loop.time() + self._up_after_s
        self._server = await loop.create_server(lambda: _Connection(self), host, port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut every connection and listen no more, as a killed process does."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.cut()
        if self._server is not None:
            await self._server.wait_closed()

    def misbehave(self, **order: Any) -> None:
        """See `Fault`. What the fault before has stopped goes on."""
        self._fault_over.set()
        self._fault_over = asyncio.Event()
        self.fault = Fault(**order)

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self._steps.release()

    async def answer(self, request: Request, connection: _Connection) -> None:
        path = request.path
        if path in _ORDERS:
            is_broken = path == "/weights" and self.rank in request.json().get("broken_for", ())
            connection.send_json(500 if is_broken else 200, self._obey(request))
            return
        is_health = path in HEALTH
        if is_health and asyncio.get_running_loop().time() < self._up_at:
            connection.send_json(503, {"error": "loading"})
            return
        fault = self._fault_for(is_health=is_health)
        if fault.kind != "ok" and await self._misbehaves(fault, connection):
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
            connection.send_json(200, self._echo(request), more=_ECHO_HEADERS)

    def _fault_for(self, *, is_health: bool) -> Fault:
        fault = self.fault
        if fault.kind == "ok" or (is_health and not fault.health):
            return _NONE
        if fault.times is not None:
            fault.times -= 1
            if fault.times <= 0:
                self.fault = Fault()
        return fault

    async def _misbehaves(self, fault: Fault, connection: _Connection) -> bool:
        """Returns: whether that was the answer."""
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
        asked = request.json()
        parameters = asked.get("sampling_params") or {}
        tokens = int(asked.get("max_tokens") or parameters.get("max_new_tokens") or 4)
        is_stream = bool(asked.get("stream"))
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
        return {
            "rank": self.rank,
            "method": request.method,
            "target": request.target,
            "headers": request.headers,
            "bytes": len(request.body),
            "sha256": hashlib.sha256(request.body).hexdigest(),
        }


_NONE = Fault()
_ECHO_HEADERS = "X-Twice: one\r\nX-Twice: two\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"


class _Connection(asyncio.Protocol):
    """Enough of HTTP/1.1 for well-formed clients: keep-alive, chunked bodies, 100-continue."""

    def __init__(self, server: DummyServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
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
            self._next()

    def _next(self) -> None:
        request = self._parse()
        if request is not None:
            self._task = asyncio.get_running_loop().create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        counts, id = self._server.counts, request.header("x-request-id")
        is_order = request.path in _ORDERS
        if not is_order:
            counts.total += 1
            counts.now += 1
            counts.peak = max(counts.peak, counts.now)
            if id:
                counts.begun[id] += 1
        self._request = request
        try:
            await self._server.answer(request, self)
        except asyncio.CancelledError:
            if id:
                counts.cancelled[id] += 1
            raise
        except Exception:
            self.cut()
            raise
        else:
            if id and not self._transport.is_closing():
                counts.finished[id] += 1
        finally:
            if not is_order:
                counts.now -= 1
        self._task = None
        if request.header("connection").lower() == "close":
            self._transport.close()
        elif self._buffer:
            self._next()

    def _parse(self) -> Request | None:
        """The next request of the buffer, once all of it is there."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        if line.count(" ") < 2 or line.startswith("PRI "):
            self.cut()  # no request of HTTP/1.1: another protocol is tried
            return None
        method, target, _ = line.split(" ", 2)
        headers = [(name, value.strip()) for name, _, value in (at.partition(":") for at in lines)]
        request = Request(method=method, target=target, headers=headers, body=b"")
        found = self._body(request, end + 4)
        if found is None:
            if not self._continued and request.header("expect"):
                self._continued = True
                self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            return None
        request.body, after = found
        self._continued = False
        del self._buffer[:after]
        return request

    def _body(self, request: Request, at: int) -> tuple[bytes, int] | None:
        if request.header("transfer-encoding").lower() != "chunked":
            after = at + int(request.header("content-length", "0"))
            return (bytes(self._buffer[at:after]), after) if len(self._buffer) >= after else None
        parts = []
        while (line_end := self._buffer.find(b"\r\n", at)) >= 0:
            size = int(bytes(self._buffer[at:line_end]).partition(b";")[0], 16)
            at = line_end + 2
            if len(self._buffer) < at + size + 2:
                return None
            parts.append(bytes(self._buffer[at : at + size]))
            at += size + 2
            if not size:
                return b"".join(parts), at
        return None

    def send(self, data: bytes) -> None:
        self._server.counts.bytes_sent += len(data)
        self._transport.write(data)

    def send_json(self, status: int, content: Any, more: str = "") -> None:
        body = json.dumps(content).encode()
        head = (
            f"HTTP/1.1 {status} As Told\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{more}\r\n"
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
        self.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while size > 0:
            await self._may_write.wait()
            self.send(_PIECE[: min(size, len(_PIECE))])
            size -= len(_PIECE)

    def cut(self, *, gently: bool = False) -> None:
        """End the connection; gently: after what was sent has left."""
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
    parser = argparse.ArgumentParser(description="An inference server's stand-in.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--version", type=int, default=0, help="of its weights")
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds a token takes")
    parser.add_argument("--up-after-s", type=float, default=0.0, help="loads for so long")
    options = parser.parse_args()
    try:
        asyncio.run(_serve(options))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
