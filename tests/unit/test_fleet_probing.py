"""Tests of HTTP probes of servers that answer, refuse, hang or do not speak HTTP."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tasks.rollout.backends import Ask
from tasks.rollout.probing import HttpProber, NoReply

HEALTH = Ask(method="GET", path="/health")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def answers(text: str) -> Handler:
    """Return the handler of a server that answers each request with this text."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text.encode())
        writer.close()

    return handle


def http(status: str, body: str = "") -> Handler:
    return answers(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}")


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[str]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def ask_server(handle: Handler, timeout_s: float = 20.0) -> str | None:
    async with serving(handle) as url:
        return await HttpProber().ask(url, HEALTH, timeout_s)


def test_probe_succeeds_with_status_200() -> None:
    assert asyncio.run(ask_server(http("200 OK", "{}"))) is None


@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        # The reported reason quotes the text of the server's answer.
        (http("503 Busy", '{"detail":\n "Scheduler is dead"}'), r'503 \{"detail": "Scheduler is'),
        (http("500 Error"), r"500$"),
        # A redirect is not followed.
        (http("302 Found"), r"302$"),
        (http("404 Not Found", "x" * 9999), r"404 x{300}$"),
        (answers("SSH-2.0-OpenSSH\r\n"), r"the answer is not HTTP"),
    ],
)
def test_probe_fails_with_any_other_answer_and_quotes_the_answer(
    handle: Handler, reason: str
) -> None:
    problem = asyncio.run(ask_server(handle))

    assert problem is not None and not isinstance(problem, NoReply)
    assert re.match(f"GET /health: {reason}", problem), problem


@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        (hang, "no answer within 0.05 s"),
        # The answer ends before its body is complete, so the answer counts as invalid.
        (answers("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"), "the answer is not HTTP"),
    ],
)
def test_timeout_is_distinguished_from_an_invalid_answer(handle: Handler, reason: str) -> None:
    problem = asyncio.run(ask_server(handle, timeout_s=0.05))

    assert problem is not None and reason in problem
    assert isinstance(problem, NoReply) is (handle is hang)


def test_refused_connection_counts_as_no_reply() -> None:
    async def ask_closed_port() -> str | None:
        # The socket is bound but does not listen.
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            return await HttpProber().ask(url, HEALTH, 20.0)

    problem = asyncio.run(ask_closed_port())

    assert isinstance(problem, NoReply)
    assert "Connect call failed" in problem


def test_request_of_a_probe_is_sent_with_its_body_and_a_quoted_path() -> None:
    requests: list[bytes] = []

    async def record_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b'"x": 1}'))
        await http("200 OK")(_reader_of(b"\r\n\r\n"), writer)

    async def ask() -> str | None:
        async with serving(record_request) as url:
            question = Ask(method="POST", path="/generate?a=%20 b\r\n", body={"x": 1})
            return await HttpProber().ask(url, question, 20.0)

    assert asyncio.run(ask()) is None
    assert requests[0].startswith(b"POST /generate?a=%20%20b%0D%0A HTTP/1.1\r\n")


def _reader_of(text: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(text)
    return reader


def test_call_returns_any_answer_or_reports_a_missing_answer() -> None:
    async def call_both() -> tuple[int | None, str, int | None]:
        prober = HttpProber()
        async with serving(http("418 Teapot", "short and stout")) as url:
            reply = await prober.call(url, HEALTH, 20.0)
        async with serving(hang) as url:
            no_reply = await prober.call(url, HEALTH, 0.05)
        return reply.status, reply.body, no_reply.status

    assert asyncio.run(call_both()) == (418, "short and stout", None)


def test_hung_servers_do_not_delay_other_questions() -> None:
    async def ask_all() -> list[str | None]:
        prober = HttpProber()
        async with serving(hang) as hung_url, serving(http("200 OK")) as url:
            waiting = [asyncio.create_task(prober.ask(hung_url, HEALTH, 60.0)) for _ in range(300)]
            answers = [await prober.ask(url, HEALTH, 60.0) for _ in range(3)]
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
        return answers

    assert asyncio.run(ask_all()) == [None, None, None]
