"""HTTP load generator that needs little CPU time itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Load:
    """Measured values of the requests that the load generator has sent."""

    #: Latency of each answered request in milliseconds, in the order of the answers.
    latencies_ms: list[float] = field(default_factory=list)
    #: Time from the first request to the last answer, in seconds.
    took_s: float = 0.0
    #: Number of lost connections plus the number of answers whose status is not 200.
    failures: int = 0

    @property
    def per_second(self) -> float:
        """Number of answered requests per second."""
        return len(self.latencies_ms) / self.took_s


async def load(
    addresses: Sequence[tuple[str, int]], body: bytes, *, connections: int, for_s: float
) -> Load:
    """Send requests over several connections for some time, and return the measured values.

    Each connection sends its next request as soon as the answer to the previous request has
    arrived.

    Args:
        addresses: Hosts and ports. The connections are distributed evenly among these addresses.
        body: Body of each request.
        connections: Number of connections.
        for_s: Duration of the load in seconds. No request is sent later.
    """
    loop = asyncio.get_running_loop()
    result = Load()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    began = time.perf_counter()
    until = began + for_s
    clients = [_Client(request, until, result) for _ in range(connections)]
    for number, client in enumerate(clients):
        host, port = addresses[number % len(addresses)]
        await loop.create_connection(lambda client=client: client, host, port)  # type: ignore[misc]
    await asyncio.wait_for(asyncio.gather(*(client.ended for client in clients)), for_s + 30)
    result.took_s = time.perf_counter() - began
    return result


class _Client(asyncio.Protocol):
    """Connection that sends one request after the other, until the duration of the load is over."""

    def __init__(self, request: bytes, until: float, result: Load) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request
        self._until = until
        self._result = result
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self._result.failures += 1
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if not _is_complete(self._buffer):
            return
        now = time.perf_counter()
        if self._buffer.startswith(b"HTTP/1.1 200 "):
            self._result.latencies_ms.append(1000 * (now - self._sent))
        else:
            self._result.failures += 1
        self._buffer = b""
        if now < self._until:
            self._send()
        else:
            self.ended.set_result(None)
            self._transport.close()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._request)


def _is_complete(answer: bytes) -> bool:
    """Return True if the bytes are one complete HTTP answer."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = answer[:end].lower()
    at = head.find(b"content-length:")
    if at < 0:
        return answer.endswith(b"0\r\n\r\n")
    return len(answer) >= end + 4 + int(head[at + 15 :].partition(b"\r")[0])
