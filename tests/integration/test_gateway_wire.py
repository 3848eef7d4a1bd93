"""The gateway with clients and servers that follow HTTP/1.1, and with others that violate it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.faults.gateway_fuzz import fuzz
from tests.integration.test_gateway import (
    GatewaySetup,
    connected,
    event_loop_policy,
    exchange,
    gateway_setup,
)

pytestmark = pytest.mark.asyncio
# Only pytest uses the fixture `event_loop_policy`. Without this list, the linter would report the
# import of the fixture as unused.
__all__ = ("event_loop_policy",)

_GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        # The gateway refuses a request with two lengths, because two HTTP parsers could find
        # different ends of the body.
        (400, _POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (400, _POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
        (400, _POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
        (400, _POST + b"Content-Length: +3\r\n\r\nabc"),
        (501, _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        (501, _POST + b"Transfer-Encoding: identity\r\n\r\n"),
        (400, b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        # The gateway refuses a request if two HTTP parsers could find different ends of a line or
        # of a header name.
        (400, b"GET /x HTTP/1.1\nHost: me\n\n"),
        (400, _GET + b"X: a\n\r\n"),
        (400, _GET + b"X: a\r\n b\r\n\r\n"),
        (400, _GET + b"X : a\r\n\r\n"),
        (400, _GET + b"X: a\x00b\r\n\r\n"),
        (400, _GET + b"Host: another\r\n\r\n"),
        (400, b"GET /x HTTP/1.1\r\n\r\n"),
        # The gateway refuses a request if its target is not a path of this server, or if its
        # protocol is not HTTP/1.1.
        (400, b"GET http://other/x HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (400, b"GET other:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (501, b"CONNECT other:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (501, _GET + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"),
        (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        (505, b"GET /x HTTP/2.0\r\nHost: localhost\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        # Request heads above the size limit are refused.
        (431, _GET + b"X: " + b"a" * 200_000 + b"\r\n\r\n"),
        (431, b"GET /" + b"a" * 500_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (431, _GET + b"X: a\r\n" * 1000 + b"\r\n"),
        # Bodies with invalid chunks are refused.
        (400, _CHUNKED + b"3\nabc\r\n0\r\n\r\n"),
        (400, _CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n"),
        (400, _CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n"),
        (400, _CHUNKED + b"10000000000000003\r\nabc\r\n0\r\n\r\n"),
        (400, _CHUNKED + b"0\r\nX : 1\r\n\r\n"),
    ],
)
async def test_ambiguous_requests_are_rejected_and_the_connection_is_closed(
    status: int, request_: bytes
) -> None:
    async with gateway_setup(1) as setup:
        reader, writer = await connected(setup.gateway)
        writer.write(request_ + _GET + b"\r\n")
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"Connection: close\r\n" in answer and answer.count(b"HTTP/1.1 ") == 1
        assert not setup.servers[0].counts.total


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with gateway_setup(2) as setup:
        reader, writer = await connected(setup.gateway)
        numbers = range(200)
        writer.write(
            b"".join(b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % number for number in numbers)
        )
        for number in numbers:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            assert b'"target": "/%d"' % number in await reader.readexactly(length)
        writer.close()


@pytest.mark.parametrize(
    ("version", "connection", "is_kept"),
    [("1.1", "", True), ("1.1", "close", False), ("1.0", "", False), ("1.0", "keep-alive", True)],
)
async def test_connection_is_kept_open_if_the_client_asks_for_it(
    version: str, connection: str, is_kept: bool
) -> None:
    async with gateway_setup(1) as setup:
        reader, writer = await connected(setup.gateway)
        line = f"Connection: {connection}\r\n" if connection else ""
        request = f"GET /v1/models HTTP/{version}\r\nHost: localhost\r\n{line}\r\n".encode()
        for _ in range(2):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            await reader.readexactly(length)
            if not is_kept:
                assert await reader.read() == b""
                break
        writer.close()

        assert setup.servers[0].counts.total == 1 + is_kept


async def test_client_that_is_still_sending_gets_the_refusal() -> None:
    async with gateway_setup(1, token="secret") as setup:
        reader, writer = await connected(setup.gateway)
        writer.write(_POST + b"Content-Length: 100000000\r\n\r\n")
        for _ in range(100):
            writer.write(bytes(10_000))
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 401 ") and answer.endswith(b"}}")


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def start_answering_server(
    raw: bytes, answer: Answer | None = None
) -> AsyncIterator[GatewaySetup]:
    """Yield a gateway in front of a server that sends the bytes `raw` and closes the connection.

    The function `answer`, if given, handles the connections of the server instead.
    """

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    server = await asyncio.start_server(answer or answer_once, "127.0.0.1", 0)
    async with gateway_setup(1) as setup:
        setup.servers[0].port, own_port = server.sockets[0].getsockname()[1], setup.servers[0].port
        setup.fleet.serve(setup.servers[0], epoch=2)
        try:
            yield setup
        finally:
            setup.servers[0].port = own_port
            server.close()


_OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        _OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        _OK + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabcde",
        _OK + b"Transfer-Encoding: gzip\r\n\r\nabc",
        _OK + b"Content-Length: 5\r\n\r\nabc",
        _OK + b"X: a\r\n b\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        _OK + b"X: " + b"a" * 300_000 + b"\r\n\r\n",
        b"",
    ],
)
async def test_invalid_response_counts_as_a_failure_of_the_server(raw: bytes) -> None:
    async with start_answering_server(raw) as setup, setup.ask() as answer:
        error = (await answer.json())["error"]

        assert (answer.status, error["type"], error["retryable"]) == (502, "server_lost", True)
        assert {failure[:2] for failure in setup.fleet.failures} == {(0, 2)}


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (b"HTTP/1.1 103 Hints\r\nLink: a\r\n\r\n" + _OK + b"Content-Length: 1\r\n\r\na", 200, b"a"),
        (_OK + b"\r\nup to the end", 200, b"up to the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", 200, b"old"),
        (_OK + b"Transfer-Encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\nX: 1\r\n\r\n", 200, b"a"),
        (b"HTTP/1.1 204 None\r\nContent-Length: 3\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Same\r\nContent-Length: 3\r\n\r\n", 304, b""),
        # The server sends a second response that was not requested. The client gets only the first
        # response.
        (_OK + b"Content-Length: 1\r\n\r\na" + _OK + b"Content-Length: 1\r\n\r\nb", 200, b"a"),
    ],
)
async def test_response_ends_as_its_head_declares(raw: bytes, status: int, body: bytes) -> None:
    async with start_answering_server(raw) as setup, setup.ask() as answer:
        assert (answer.status, await answer.read()) == (status, body)


async def test_content_length_of_a_response_to_head_is_forwarded() -> None:
    async with start_answering_server(_OK + b"Content-Length: 30000000\r\n\r\n") as setup:
        head, _ = await request_head(setup)

    assert "Content-Length: 30000000" in head


async def request_head(setup: GatewaySetup) -> tuple[str, bytes]:
    """Send a HEAD request; return the head of the response and all bytes after the head."""
    reader, writer = await connected(setup.gateway)
    writer.write(b"HEAD /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head, _, rest = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head, rest.encode()


async def test_connection_with_surplus_bytes_after_a_response_is_not_reused() -> None:
    async with start_answering_server(_OK + b"Content-Length: 1\r\n\r\na" + _OK) as setup:
        for _ in range(3):
            _, body = await exchange(setup.gateway, _GET + b"\r\n")
            assert body == b"a"


async def test_request_on_a_connection_that_the_server_closes_is_not_lost() -> None:
    """The server closes its kept-alive connection when the second request begins to arrive.

    The gateway must then send the whole second request again, on a new connection.
    """
    received_lengths = list[int]()

    async def answer_one_request(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        received_lengths.append(
            int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        )
        await reader.readexactly(received_lengths[-1])
        writer.write(_OK + b"Content-Length: 2\r\n\r\nok")
        await reader.read(1)
        writer.transport.abort()

    async with start_answering_server(b"", answer_one_request) as setup:
        for length in (1, 10):
            request = _POST + b"Content-Length: %d\r\n\r\n%b" % (length, bytes(length))
            head, body = await exchange(setup.gateway, request)
            assert (head[:12], body) == ("HTTP/1.1 200", b"ok")

    assert received_lengths == [1, 10]


async def test_each_client_gets_only_its_own_response_among_hostile_clients_and_servers() -> None:
    fuzz_result = await fuzz(7, rounds=2)

    assert fuzz_result.findings == []
    assert fuzz_result.ends["answered"] > 50 and fuzz_result.ends["refused"] > 20
