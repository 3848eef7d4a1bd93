"""One question over HTTP to servers that answer, refuse, hang and talk nonsense."""

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
    """A server that reads a request and answers with that, whatever it is."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text.encode())
        writer.close()

    return handle


def http(status: str, body: str = "") -> Handler:
    return answers(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}")


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[str]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def asked(handle: Handler, timeout_s: float = 20.0) -> str | None:
    async with serving(handle) as url:
        return await HttpProber().ask(url, HEALTH, timeout_s)


def test_200_is_a_yes_whatever_its_text() -> None:
    assert asyncio.run(asked(http("200 OK", "{}"))) is None


@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        # the text of an answer is what says why
        (http("503 Busy", '{"detail":\n "Scheduler is dead"}'), r'503 \{"detail": "Scheduler is'),
        (http("500 Error"), r"500$"),
        # health is not somewhere else
        (http("302 Found"), r"302$"),
        (http("404 Not Found", "x" * 9999), r"404 x{300}$"),
        (answers("SSH-2.0-OpenSSH\r\n"), r"an answer that is not HTTP"),
    ],
)
def test_any_other_answer_is_a_no_with_its_text(handle: Handler, reason: str) -> None:
    no = asyncio.run(asked(handle))

    assert no is not None and not isinstance(no, NoReply)
    assert re.match(f"GET /health: {reason}", no), no


@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        (hangs, "no answer within 0.05 s"),
        # an answer that never ends is none
        (answers("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"), "an answer that is not HTTP"),
    ],
)
def test_an_answer_that_does_not_come_in_time_is_a_silence(handle: Handler, reason: str) -> None:
    no = asyncio.run(asked(handle, timeout_s=0.05))

    assert no is not None and reason in no
    assert isinstance(no, NoReply) is (handle is hangs)


def test_a_refused_connection_is_a_silence() -> None:
    async def ask_nobody() -> str | None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{held.getsockname()[1]}"
            return await HttpProber().ask(url, HEALTH, 20.0)

    no = asyncio.run(ask_nobody())

    assert isinstance(no, NoReply)
    assert "Connect call failed" in no


def test_the_question_is_sent_as_it_is_with_its_body() -> None:
    seen: list[bytes] = []

    async def listens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b'"x": 1}'))
        await http("200 OK")(_read(b"\r\n\r\n"), writer)

    async def ask() -> str | None:
        async with serving(listens) as url:
            question = Ask(method="POST", path="/generate?a=%20 b\r\n", body={"x": 1})
            return await HttpProber().ask(url, question, 20.0)

    assert asyncio.run(ask()) is None
    assert seen[0].startswith(b"POST /generate?a=%20%20b%0D%0A HTTP/1.1\r\n")


def _read(text: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(text)
    return reader


def test_a_call_returns_the_answer_whatever_it_is_and_a_reason_where_there_is_none() -> None:
    async def calls() -> tuple[int | None, str, int | None]:
        prober = HttpProber()
        async with serving(http("418 Teapot", "short and stout")) as url:
            reply = await prober.call(url, HEALTH, 20.0)
        async with serving(hangs) as url:
            silence = await prober.call(url, HEALTH, 0.05)
        return reply.status, reply.body, silence.status

    assert asyncio.run(calls()) == (418, "short and stout", None)


def test_hung_servers_delay_no_other_question() -> None:
    async def ask_all() -> list[str | None]:
        prober = HttpProber()
        async with serving(hangs) as hung, serving(http("200 OK")) as well:
            waiting = [asyncio.create_task(prober.ask(hung, HEALTH, 60.0)) for _ in range(300)]
            answers = [await prober.ask(well, HEALTH, 60.0) for _ in range(3)]
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
        return answers

    assert asyncio.run(ask_all()) == [None, None, None]
