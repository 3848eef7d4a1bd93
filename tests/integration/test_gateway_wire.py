"""What the gateway makes of bytes: of clients and of servers that keep to HTTP/1.1, or don't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.faults.gateway_fuzz import fuzz
from tests.integration.test_gateway import Scene, connected, event_loop_policy, exchange, scene

pytestmark = pytest.mark.asyncio
__all__ = ("event_loop_policy",)  # a fixture

_GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        # two lengths, of which two readers may take another
        (400, _POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (400, _POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
        (400, _POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
        (400, _POST + b"Content-Length: +3\r\n\r\nabc"),
        (501, _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        (501, _POST + b"Transfer-Encoding: identity\r\n\r\n"),
        (400, b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        # lines and names that two readers may end elsewhere
        (400, b"GET /x HTTP/1.1\nHost: me\n\n"),
        (400, _GET + b"X: a\n\r\n"),
        (400, _GET + b"X: a\r\n b\r\n\r\n"),
        (400, _GET + b"X : a\r\n\r\n"),
        (400, _GET + b"X: a\x00b\r\n\r\n"),
        (400, _GET + b"Host: another\r\n\r\n"),
        (400, b"GET /x HTTP/1.1\r\n\r\n"),
        # no path of this server, or no HTTP/1.1
        (400, b"GET http://other/x HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (400, b"GET other:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (501, b"CONNECT other:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (501, _GET + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"),
        (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        (505, b"GET /x HTTP/2.0\r\nHost: localhost\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        # larger than it may be
        (431, _GET + b"X: " + b"a" * 200_000 + b"\r\n\r\n"),
        (431, b"GET /" + b"a" * 500_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (431, _GET + b"X: a\r\n" * 1000 + b"\r\n"),
        # chunks
        (400, _CHUNKED + b"3\nabc\r\n0\r\n\r\n"),
        (400, _CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n"),
        (400, _CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n"),
        (400, _CHUNKED + b"10000000000000003\r\nabc\r\n0\r\n\r\n"),
        (400, _CHUNKED + b"0\r\nX : 1\r\n\r\n"),
    ],
)
async def test_what_two_readers_may_read_in_two_ways_is_refused_and_nothing_follows(
    status: int, request_: bytes
) -> None:
    async with scene(1) as at:
        reader, writer = await connected(at.gateway)
        writer.write(request_ + _GET + b"\r\n")
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"Connection: close\r\n" in answer and answer.count(b"HTTP/1.1 ") == 1
        assert not at.servers[0].counts.total


async def test_requests_that_were_sent_ahead_are_answered_in_their_order() -> None:
    async with scene(2) as at:
        reader, writer = await connected(at.gateway)
        ahead = range(200)
        writer.write(
            b"".join(b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % one for one in ahead)
        )
        for one in ahead:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            assert b'"target": "/%d"' % one in await reader.readexactly(length)
        writer.close()


@pytest.mark.parametrize(
    ("version", "connection", "is_kept"),
    [("1.1", "", True), ("1.1", "close", False), ("1.0", "", False), ("1.0", "keep-alive", True)],
)
async def test_a_connection_is_kept_as_its_client_asks(
    version: str, connection: str, is_kept: bool
) -> None:
    async with scene(1) as at:
        reader, writer = await connected(at.gateway)
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

        assert at.servers[0].counts.total == 1 + is_kept


async def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    async with scene(1, token="secret") as at:
        reader, writer = await connected(at.gateway)
        writer.write(_POST + b"Content-Length: 100000000\r\n\r\n")
        for _ in range(100):
            writer.write(bytes(10_000))
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 401 ") and answer.endswith(b"}}")


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(raw: bytes, answer: Answer | None = None) -> AsyncIterator[Scene]:
    """A gateway before a server that answers with these bytes and closes, or as `answer` does."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    server = await asyncio.start_server(answer or once, "127.0.0.1", 0)
    async with scene(1) as at:
        at.servers[0].port, own = server.sockets[0].getsockname()[1], at.servers[0].port
        at.fleet.serve(at.servers[0], epoch=2)
        try:
            yield at
        finally:
            at.servers[0].port = own
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
async def test_an_answer_that_is_none_is_a_servers_fault(raw: bytes) -> None:
    async with answering(raw) as at, at.ask() as answer:
        error = (await answer.json())["error"]

        assert (answer.status, error["type"], error["retryable"]) == (502, "server_lost", True)
        assert {one[:2] for one in at.fleet.failures} == {(0, 2)}


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (b"HTTP/1.1 103 Hints\r\nLink: a\r\n\r\n" + _OK + b"Content-Length: 1\r\n\r\na", 200, b"a"),
        (_OK + b"\r\nup to the end", 200, b"up to the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", 200, b"old"),
        (_OK + b"Transfer-Encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\nX: 1\r\n\r\n", 200, b"a"),
        (b"HTTP/1.1 204 None\r\nContent-Length: 3\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Same\r\nContent-Length: 3\r\n\r\n", 304, b""),
        # what nobody asked for
        (_OK + b"Content-Length: 1\r\n\r\na" + _OK + b"Content-Length: 1\r\n\r\nb", 200, b"a"),
    ],
)
async def test_an_answer_ends_where_its_head_says(raw: bytes, status: int, body: bytes) -> None:
    async with answering(raw) as at, at.ask() as answer:
        assert (answer.status, await answer.read()) == (status, body)


async def test_the_length_of_what_a_head_alone_was_asked_of_is_passed_on() -> None:
    async with answering(_OK + b"Content-Length: 30000000\r\n\r\n") as at:
        head, _ = await exchange_head(at)

    assert "Content-Length: 30000000" in head


async def exchange_head(at: Scene) -> tuple[str, bytes]:
    reader, writer = await connected(at.gateway)
    writer.write(b"HEAD /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head, _, rest = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head, rest.encode()


async def test_a_connection_whose_answer_was_more_than_one_is_not_used_again() -> None:
    async with answering(_OK + b"Content-Length: 1\r\n\r\na" + _OK) as at:
        for _ in range(3):
            _, body = await exchange(at.gateway, _GET + b"\r\n")
            assert body == b"a"


async def test_a_kept_connection_that_its_server_closes_just_then_loses_no_request() -> None:
    """By then the request is on its way, as one is that another thread of the server overtakes."""
    seen = list[int]()

    async def one_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        await reader.readexactly(seen[-1])
        writer.write(_OK + b"Content-Length: 2\r\n\r\nok")
        await reader.read(1)
        writer.transport.abort()

    async with answering(b"", one_each) as at:
        for length in (1, 10):
            request = _POST + b"Content-Length: %d\r\n\r\n%b" % (length, bytes(length))
            head, body = await exchange(at.gateway, request)
            assert (head[:12], body) == ("HTTP/1.1 200", b"ok")

    assert seen == [1, 10]


async def test_between_peers_that_lie_everybody_gets_what_is_theirs_and_nothing_else() -> None:
    world = await fuzz(7, rounds=2)

    assert world.findings == []
    assert world.ends["answered"] > 50 and world.ends["refused"] > 20
