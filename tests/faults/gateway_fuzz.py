"""The gateway between peers that lie: `python -m tests.faults.gateway_fuzz [--minutes 10]`.

Clients send well-formed, mutated and hostile requests over raw sockets, in random pieces, some of
them ahead of their answers; engines answer with well-formed, mutated and hostile bytes. A second
parser, written from RFC 9112 and knowing nothing of the gateway's, reads what each side sent. Then,
whatever was sent: an engine got nothing but what that parser finds in a client's bytes, unchanged
but for the headers of the connection; nothing that comes after what it refuses; each client got its
own answers in their order; an answer that broke off never looks complete; a client that leaves
takes its request with it; and the gateway has nothing left of it.

The seed is printed, and repeats what is sent; the machine's timing can't be repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from random import Random, SystemRandom
from threading import Thread
from typing import Any

import uvloop

from tasks.rollout.forwarding import ANY_PATH
from tasks.rollout.gateway import Gateway
from tasks.rollout.http1 import LONGEST_HEAD
from tasks.rollout.router import Entrypoint, Router
from tests.support.fleet_fakes import settings_of
from tests.support.help import HelpFormatter

_ENGINES, _CLIENTS = 2, 8
_ANSWER_WITHIN_S = 60.0
_LEFT_WITHIN_S = 20.0
#: For a line that no request begins with, to be refused or to go on.
_UNDECIDED_S = 3.0
_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade host expect content-length".split()
)
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(rb"/[\x21\x22\x24-\x7e]*")
#: An extension that lacks its name or value is one, for where it ends is not in doubt.
_SIZE = re.compile(
    rb"([0-9A-Fa-f]{1,16})(?:;(?:%b)?(?:=(?:%b|\"[\t\x20-\x21\x23-\x5b\x5d-\x7e\x80-\xff]*\")?)?)*"
    % (_TOKEN.pattern, _TOKEN.pattern)
)
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])( [\t\x20-\x7e\x80-\xff]*)?")
_METHODS = frozenset(b"GET HEAD POST PUT DELETE OPTIONS PATCH".split())


class Invalid(Exception):
    """What no recipient may take."""


class Incomplete(Exception):
    """More would have to come."""


@dataclass(slots=True, kw_only=True)
class Message:
    """As the second parser has read it."""

    first: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    #: Its body ends with the connection.
    is_open_ended: bool = False
    is_last: bool = False

    def get(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def id(self) -> bytes:
        """Empty, too, for what several may have: their scripts would be one."""
        id = self.get(b"x-fuzz-id") or b""
        return b"" if id == b"smuggled" else id

    @property
    def status(self) -> int:
        return int(self.first.split(b" ")[1])

    def passed_on(self) -> list[tuple[bytes, bytes]]:
        """The headers that another connection may see."""
        named = b",".join(value for key, value in self.headers if key.lower() == b"connection")
        dropped = _HOP | {one.strip().lower() for one in named.split(b",")}
        return [(key, value) for key, value in self.headers if key.lower() not in dropped]


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    end = data.find(b"\n", at)
    if end < 0:
        raise Incomplete
    if data[end - 1 : end] != b"\r" or end - 1 < at:
        raise Invalid("a line that ends with LF alone")
    return data[at : end - 1], end + 1


def _fields(data: bytes, at: int) -> tuple[list[tuple[bytes, bytes]], int]:
    found: list[tuple[bytes, bytes]] = []
    while True:
        line, at = _line(data, at)
        if not line:
            return found, at
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Invalid(f"the header {line!r}")
        found.append((name, value))


def _body(
    data: bytes, at: int, headers: list[tuple[bytes, bytes]], *, is_old: bool
) -> tuple[bytes, int, bool]:
    """The body, where it ends, and whether only the connection's end tells that."""
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    codings = [value for name, value in headers if name.lower() == b"transfer-encoding"]
    if len(lengths) > 1 or (lengths and codings) or (codings and is_old):
        raise Invalid("two lengths")
    if codings:
        if [one.lower() for one in codings] != [b"chunked"]:
            raise Invalid("a coding that is not chunked")
        parts = []
        while True:
            line, at = _line(data, at)
            if (size := _SIZE.fullmatch(line)) is None:
                raise Invalid(f"the chunk size {line[:40]!r}")
            count = int(size[1], 16)
            if count:
                if data[at + count : at + count + 2] != b"\r\n"[: max(0, len(data) - at - count)]:
                    raise Invalid("a chunk that goes on")
                if len(data) < at + count + 2:
                    raise Incomplete
                parts.append(data[at : at + count])
                at += count + 2
            else:
                _, at = _fields(data, at)
                return b"".join(parts), at, False
    if lengths:
        if not lengths[0].isdigit() or int(lengths[0]) >= 2**64:
            raise Invalid(f"the length {lengths[0]!r}")
        count = int(lengths[0])
        if len(data) < at + count:
            raise Incomplete
        return data[at : at + count], at + count, False
    return b"", at, True


def requests_in(data: bytes) -> tuple[list[Message], str]:
    """Those of a client's bytes, and why there is not another one: `end`, `incomplete`, `last`, or
    why the next one is refused."""
    found: list[Message] = []
    at = 0
    while True:
        while data[at : at + 1] in (b"\r", b"\n"):  # RFC 9112, section 2.2
            at += 1
        if at >= len(data):
            return found, "end"
        try:
            first, next_at = _line(data, at)
            parts = re.fullmatch(rb"([A-Z]+) +(\S+) +HTTP/1\.([01])", first)
            if parts is None or parts[1] not in _METHODS or not _TARGET.fullmatch(parts[2]):
                raise Invalid(f"the line {first[:80]!r}")
            headers, next_at = _fields(data, next_at)
            is_old = parts[3] == b"0"
            message = Message(first=first, headers=headers, body=b"")
            hosts = sum(name.lower() == b"host" for name, _ in headers)
            if hosts > 1 or (not hosts and not is_old):
                raise Invalid("hosts")
            said = [one.strip().lower() for one in (_joined(message, b"connection")).split(b",")]
            if b"upgrade" in said and message.get(b"upgrade") is not None:
                raise Invalid("an upgrade")
            message.is_last = b"close" in said or (is_old and b"keep-alive" not in said)
            message.body, at, _ = _body(data, next_at, headers, is_old=is_old)
        except Incomplete:
            return found, "incomplete"
        except Invalid as error:
            return found, str(error)
        message.first = b"%b %b" % (parts[1], parts[2])
        found.append(message)
        if message.is_last:
            return found, "last"


def _joined(message: Message, name: bytes) -> bytes:
    return b",".join(value for key, value in message.headers if key.lower() == name)


def answer_in(data: bytes, at: int, method: bytes, *, is_over: bool) -> tuple[Message, int]:
    """The next answer but for those below 200, and where it ends.

    Args:
        is_over: nothing more comes.

    Raises: Invalid, Incomplete.
    """
    while True:
        while data[at : at + 1] in (b"\r", b"\n"):  # as before a request
            at += 1
        first, next_at = _line(data, at)
        parts = _STATUS.fullmatch(first)
        if parts is None:
            raise Invalid(f"the line {first[:80]!r}")
        headers, next_at = _fields(data, next_at)
        status, message = int(parts[2]), Message(first=first, headers=headers, body=b"")
        if status >= 200:
            break
        framed = (message.get(b"content-length") or b"0").strip(b"0")
        if status == 101 or framed or message.get(b"transfer-encoding") is not None:
            raise Invalid("a switch")
        at = next_at
    if method == b"HEAD" or status in (204, 304):
        lengths = [value for name, value in headers if name.lower() == b"content-length"]
        codings = [value for name, value in headers if name.lower() == b"transfer-encoding"]
        if len(lengths) > 1 or (lengths and codings) or codings not in ([], [b"chunked"]):
            raise Invalid("two lengths")
        if not all(value.isdigit() for value in lengths):
            raise Invalid("no length")
        return message, next_at
    message.body, end, message.is_open_ended = _body(data, next_at, headers, is_old=False)
    if message.is_open_ended:
        if not is_over:
            raise Incomplete
        message.body, end = data[next_at:], len(data)
    return message, end


# What is sent


def _pieces(dice: Random, data: bytes) -> Iterator[bytes]:
    """The same bytes, cut at random."""
    if dice.random() < 0.3 or len(data) < 2:
        yield data
        return
    step = dice.choice((1, 7, 60, 1400, 70_000)) if len(data) < 3000 else 20_000
    while data:
        count = dice.randint(1, step)
        yield data[:count]
        data = data[count:]


def _content(dice: Random) -> bytes:
    kind = dice.random()
    if kind < 0.3:
        return b""
    if kind < 0.6:  # what a parser that lost count would take for a request or an answer
        inner = b"POST /smuggled HTTP/1.1\r\nHost: localhost\r\nX-Fuzz-Id: smuggled\r\n"
        return inner + b"Content-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    return dice.randbytes(dice.choice((1, 10, 1000, 70_000, 300_000)) if kind < 0.9 else 20)


def _chunked(dice: Random, body: bytes) -> bytes:
    out = []
    while body:
        count = dice.randint(1, max(1, len(body)))
        extension = dice.choice((b"", b"", b";a=b", b';q="x y"', b";n"))
        size = dice.choice((b"%x", b"%X", b"0%x")) % count
        out.append(size + extension + b"\r\n" + body[:count] + b"\r\n")
        body = body[count:]
    trailer = dice.choice((b"", b"", b"X-Trailer: 1\r\nX-Fuzz-Id: trailed\r\n"))
    return b"".join(out) + b"0\r\n" + trailer + b"\r\n"


#: In a request's head: what is ambiguous, or no HTTP/1.1.
_HOSTILE = (
    b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n",
    b"Content-Length: 3\r\nContent-Length: 4\r\n",
    b"Content-Length: 3\r\nContent-Length: 3\r\n",
    b"Content-Length: 3, 3\r\n",
    b"Content-Length: +3\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 0x3\r\n",
    b"Content-Length: 3 3\r\n",
    b"Content-Length: 18446744073709551619\r\n",
    b"Content-Length:\r\n",
    b"X-Fold: a\r\n b\r\n",
    b"X-Space : a\r\n",
    b" X-Lead: a\r\n",
    b"X-Bare: a\nX-Fuzz-Id: bare\r\n",
    b"X-Cr: a\rX-Fuzz-Id: cr\r\n",
    b"X-Nul: a\x00b\r\n",
    b"X-No-Colon\r\n",
    b": empty\r\n",
    b"X-\xff: a\r\n",
    b"Host: another\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
    b"X-Long: " + b"a" * 200_000 + b"\r\n",
    b"".join(b"X-%d: a\r\n" % number for number in range(1000)),
)
_FIRST_LINES = (
    b"GET http://evil/x HTTP/1.1",
    b"GET evil:80 HTTP/1.1",
    b"CONNECT evil:80 HTTP/1.1",
    b"OPTIONS * HTTP/1.1",
    b"GET /x HTTP/1.1 HTTP/1.1",
    b"GET /x y HTTP/1.1",
    b"GET /x\x00 HTTP/1.1",
    b"GET /x#y HTTP/1.1",
    b"GET /x\xe9 HTTP/1.1",
    b"GET /x HTTP/1.2",
    b"GET /x HTTP/2.0",
    b"GET /x HTTP/11",
    b"GET /x",
    b"get /x HTTP/1.1",
    b"G\tET /x HTTP/1.1",
    b"PRI * HTTP/2.0",
    b"GET /" + b"x" * 200_000 + b" HTTP/1.1",
    b"\x16\x03\x01\x02\x00\x01",
)
_BAD_CHUNKS = (
    b"3\nabc\r\n0\r\n\r\n",
    b"0x3\r\nabc\r\n0\r\n\r\n",
    b"3 \r\nabc\r\n0\r\n\r\n",
    b"-3\r\nabc\r\n0\r\n\r\n",
    b"3\r\nabcd\r\n0\r\n\r\n",
    b"3\r\nabc0\r\n\r\n",
    b"10000000000000003\r\nabc\r\n0\r\n\r\n",
    b"\r\nabc\r\n0\r\n\r\n",
    b"3;a=\x00\r\nabc\r\n0\r\n\r\n",
    b"3;\nGET /smuggled HTTP/1.1\r\nabc\r\n0\r\n\r\n",
    b"3\r\nabc\r\n0\r\nX-T : 1\r\n\r\n",
    b"3\r\nabc\r\n0\r\nX-T: 1\n\r\n",
)
#: Of engines: nothing that a client may take for an answer.
_HOSTILE_ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde",
    b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc",
    b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nX : a\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"a" * 100_000,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 400_000 + b"\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
    b"HTTP/1.1 101 Switching\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 100 + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 103 Hints\r\nContent-Length: 5\r\n\r\nabcdeHTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/3.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 abc OK\r\nContent-Length: 0\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x15\x03\x01\x00\x02\x02\x46",
    b"",
)


@dataclass(slots=True, kw_only=True)
class Script:
    """How an engine answers a request, each time it gets it."""

    raw: bytes
    #: It closes the connection then.
    closes: bool
    #: What a client may see of it; None: that it broke off, or a refusal of the gateway's.
    expected: Message | None
    #: It says nothing, and waits until the gateway leaves.
    hangs: bool = False
    #: From here on it is sent at once: what comes later than an answer's end is the next one.
    whole_from: int | None = None


@dataclass(slots=True, kw_only=True)
class World:
    """What both ends know of what was sent."""

    dice: Random
    scripts: dict[bytes, Script] = field(default_factory=dict)
    #: What the second parser finds in clients' bytes, by id.
    sent: dict[bytes, list[Message]] = field(default_factory=dict)
    arrived: Counter[bytes] = field(default_factory=Counter)
    #: Of requests that hang: that they are with an engine, and that the gateway has left.
    hung: dict[bytes, asyncio.Event] = field(default_factory=dict)
    gone: dict[bytes, asyncio.Event] = field(default_factory=dict)
    engines: set[asyncio.Task[None]] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    def find(self, what: str, *seen: object) -> None:
        self.findings.append(" | ".join([what, *(repr(one)[:600] for one in seen)]))
        print("FOUND", self.findings[-1], flush=True)


class Fleet:
    """Of engines that always serve."""

    def __init__(self) -> None:
        self.router = Router()
        self.settings = settings_of(paths=(ANY_PATH,))

    has_started = True

    def note_failure(self, rank: int, epoch: int, why: str) -> None:
        pass

    def note_tokens(self, rank: int, epoch: int, count: int) -> None:
        pass

    async def stays_ready(self, url: str) -> bool:
        return True

    def version_of(self, engine: int) -> int:
        return 7

    def snapshot(self) -> dict[str, object]:
        return {}


async def engine(world: World, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of an engine: what arrives is compared with what was sent."""
    data = b""
    task = asyncio.current_task()
    assert task is not None
    world.engines.add(task)
    try:
        while piece := await reader.read(1 << 20):
            data += piece
            found, why = requests_in(data)
            if why not in ("end", "incomplete", "last") or len(found) > 1:
                world.find(f"an engine got what is no request: {why}", data[:2000])
                return
            if not found:
                continue
            data = b""
            script = _arrived(world, found[0])
            if script.hangs:
                world.hung[found[0].id].set()
                if await reader.read(1):
                    world.find("more came while an answer was waited for")
                world.gone[found[0].id].set()
                return
            whole = script.raw[script.whole_from :] if script.whole_from is not None else b""
            first = script.raw[: len(script.raw) - len(whole)]
            for part in (*_pieces(world.dice, first), whole):
                if writer.is_closing():  # uvloop has no write to what is lost
                    raise ConnectionResetError
                writer.write(part)
                await writer.drain()
                if world.dice.random() < 0.05:
                    await asyncio.sleep(world.dice.random() * 0.003)
            if script.closes:
                return
        if data:  # of a client that left or was refused while its body arrived
            world.ends["cut at an engine"] += 1
    except ConnectionError:
        world.ends["cut at an engine"] += 1
    finally:
        writer.close()


def _arrived(world: World, got: Message) -> Script:
    world.arrived[got.id] += 1
    candidates = world.sent.get(got.id, [])
    if not candidates:
        world.find("an engine got a request that nobody sent", got)
    elif not any(
        got.first == one.first and got.body == one.body and got.passed_on() == one.passed_on()
        for one in candidates
    ):
        world.find("an engine got another request than was sent", got, candidates[0])
    if got.get(b"transfer-encoding") and got.get(b"content-length"):
        world.find("an engine got two lengths", got)
    return world.scripts.get(got.id) or _plain(got.id, b"default")


def _plain(id: bytes, body: bytes) -> Script:
    raw = b"HTTP/1.1 200 OK\r\nX-Fuzz-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        id,
        len(body),
        body,
    )
    return Script(raw=raw, closes=False, expected=answer_in(raw, 0, b"GET", is_over=False)[0])


def _script(dice: Random, id: bytes, method: bytes) -> Script:
    """An engine's answer, and what has to come of it."""
    kind = dice.random()
    if kind < 0.15:
        raw = dice.choice(_HOSTILE_ANSWERS)
    else:
        body = _content(dice)
        status = dice.choice((200, 200, 200, 201, 204, 304, 400, 404, 429, 500, 503))
        head = b"HTTP/1.1 %d Some Thing\r\nX-Fuzz-Id: %b\r\nX-Two: 1\r\nX-Two: 2\r\n" % (status, id)
        if dice.random() < 0.2:
            head = b"HTTP/1.1 100 Continue\r\nX-Fuzz-Id: interim\r\n\r\n" + head
        if dice.random() < 0.3:
            head += b"Content-Type: text/event-stream; charset=utf-8\r\n"
        if dice.random() < 0.2:
            head += b"Connection: %b\r\n" % dice.choice((b"close", b"keep-alive", b"X-Two"))
        framing, is_bare = dice.random(), method == b"HEAD" or status in (204, 304)
        if framing < 0.45:
            raw = head + b"Content-Length: %d\r\n\r\n" % len(body) + (b"" if is_bare else body)
        elif framing < 0.9:
            tail = b"" if is_bare else _chunked(dice, body)
            raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + tail
        else:
            raw = head + b"\r\n" + (b"" if is_bare else body)
        if dice.random() < 0.1:
            at = dice.randrange(len(raw))
            raw = raw[:at] + dice.choice((b"", b"\0", b"\r\n", b"\n", b":", b"x")) + raw[at + 1 :]
        elif dice.random() < 0.1:
            raw = raw[: dice.randrange(len(raw))]
        elif dice.random() < 0.1 and len(raw) < 10_000:
            raw += _plain(id, b"an answer that nobody asked for").raw
    closes, whole_from = dice.random() < 0.2, None
    if len(raw.partition(b"\r\n\r\n")[0]) > LONGEST_HEAD or raw.count(b" 100 ") > 16:
        return Script(raw=raw, closes=True, expected=None)
    try:
        expected, end = answer_in(raw, 0, method, is_over=False)
        closes |= end < len(raw)
        whole_from = max(0, end - 1) if end < len(raw) else None
    except Incomplete:
        closes = True
        with contextlib.suppress(Incomplete, Invalid):
            expected, _ = answer_in(raw, 0, method, is_over=True)
            return Script(raw=raw, closes=True, expected=expected)
        expected = None
    except Invalid:
        expected, closes = None, True
    return Script(raw=raw, closes=closes, expected=expected, whole_from=whole_from)


def _request(dice: Random, id: bytes) -> tuple[bytes, bool]:
    """One request's bytes, and whether they are well-formed."""
    method = dice.choice((b"POST", b"POST", b"POST", b"GET", b"HEAD", b"PUT", b"DELETE"))
    first = method + b" /fuzz/%b?a=%%20b HTTP/1.1" % id[:4]
    is_old = dice.random() < 0.1
    if is_old:
        first = first[:-1] + b"0"
    body = _content(dice)
    headers = [
        b"Host: localhost\r\n",
        b"X-Fuzz-Id: %b\r\n" % id,
        b"X-Two: 1\r\n",
        b"x-two: \xc3\xa9 2 \r\n",
    ]
    if dice.random() < 0.3:
        some = (b"close", b"keep-alive", b"X-Mine", b"X-Two, close", b"Content-Length")
        headers.append(b"Connection: %b\r\nX-Mine: 1\r\n" % dice.choice(some))
    if dice.random() < 0.2:
        headers.append(b"X-Session-Id: %d\r\n" % dice.randrange(3))
    if dice.random() < 0.1:
        headers.append(b"Expect: 100-continue\r\n")
    if dice.random() < 0.1:
        headers.append(b"TE: trailers\r\nTrailer: X\r\nKeep-Alive: 5\r\n")
    kind = dice.random()
    if kind < 0.12:
        headers.append(dice.choice(_HOSTILE))
        if dice.random() < 0.5:
            body = (
                b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: localhost\r\nX-Fuzz-Id: smuggled\r\n\r\n"
            )
        return first + b"\r\n" + b"".join(headers) + b"\r\n" + body, False
    if kind < 0.17:
        return dice.choice(_FIRST_LINES) + b"\r\n" + b"".join(headers) + b"\r\n", False
    if kind < 0.22:
        headers.append(b"Transfer-Encoding: chunked\r\n")
        raw = first + b"\r\n" + b"".join(headers) + b"\r\n" + dice.choice(_BAD_CHUNKS)
        return raw, False
    if body or dice.random() < 0.5:
        if dice.random() < 0.4 and not is_old:
            headers.append(b"Transfer-Encoding: %b\r\n" % dice.choice((b"chunked", b"Chunked")))
            body = _chunked(dice, body)
        else:
            headers.append(b"Content-Length: %b%d\r\n" % (dice.choice((b"", b"00")), len(body)))
    dice.shuffle(headers)
    raw = dice.choice((b"", b"", b"\r\n")) + first + b"\r\n" + b"".join(headers) + b"\r\n" + body
    if kind < 0.35:
        for _ in range(dice.randint(1, 3)):
            at, end = sorted(
                (dice.randrange(min(len(raw), 400)), dice.randrange(min(len(raw), 400)))
            )
            raw = (
                dice.choice(
                    (
                        raw[:at] + bytes([dice.randrange(256)]) + raw[at + 1 :],
                        raw[:at]
                        + dice.choice((b"\n", b"\r", b"\0", b" ", b":", b"\r\n"))
                        + raw[at:],
                        raw[:at] + raw[end:],
                        raw[:end] + raw[at:],
                    )
                )
                or b"x"
            )
        return raw, False
    return raw, True


async def client(world: World, port: int, seed: str) -> None:
    """One connection of a client."""
    dice = Random(seed)
    made = [_request(dice, b"%012x" % dice.getrandbits(48)) for _ in range(dice.randint(1, 5))]
    data = b"".join(raw for raw, _ in made)
    is_good = all(good for _, good in made)
    asked, why = requests_in(data)
    hangs = is_good and len(asked) == 1 and dice.random() < 0.1
    for one in asked:
        world.sent.setdefault(one.id, []).append(one)
        script = _script(dice, one.id, one.first.partition(b" ")[0])
        # Without an id it could be the script of any other that has lost its own.
        world.scripts.setdefault(one.id, script if one.id else _plain(b"", b"default"))
    if hangs:
        world.scripts[asked[-1].id] = Script(raw=b"", closes=False, expected=None, hangs=True)
        world.hung[asked[-1].id], world.gone[asked[-1].id] = asyncio.Event(), asyncio.Event()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    sending = asyncio.create_task(_send(dice, writer, data))
    leaves = not hangs and dice.random() < 0.05
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            if hangs:
                await world.hung[asked[-1].id].wait()
                writer.transport.abort() if dice.random() < 0.5 else writer.close()
                await world.gone[asked[-1].id].wait()
                world.ends["left, and cut at its engine"] += 1
                return
            if leaves:
                await asyncio.sleep(dice.random() * 0.01)
                writer.transport.abort()
                world.ends["left"] += 1
                return
            got = await _answers(reader, asked, wants_end=why not in ("end", "incomplete"))
    except TimeoutError:
        world.find(f"no end within {_ANSWER_WITHIN_S:g} s ({why}, {seed})", data[:3000])
        return
    except Invalid as error:
        world.find(f"a client got what is no answer ({seed})", error)
        return
    except ConnectionError:
        world.ends["reset"] += 1
        if is_good and all(world.scripts[one.id].expected for one in asked):
            world.find(f"a good client was reset ({seed})", data[:2000])
        return
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await sending
        writer.close()
    _judge(world, asked, why, got, is_good=is_good, seed=seed, data=data)


async def _send(dice: Random, writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        for piece in _pieces(dice, data):
            writer.write(piece)
            await writer.drain()
            if dice.random() < 0.03:
                await asyncio.sleep(dice.random() * 0.003)


async def _answers(
    reader: asyncio.StreamReader, asked: list[Message], *, wants_end: bool
) -> tuple[list[Message], bytes, bool]:
    """The answers that came, what is left of an incomplete one, and whether that is the end."""
    data, at, is_over = b"", 0, False
    found: list[Message] = []
    while True:
        while at < len(data) or is_over:
            method = (
                asked[len(found)].first.partition(b" ")[0] if len(found) < len(asked) else b"GET"
            )
            try:
                message, at = answer_in(data, at, method, is_over=is_over)
            except Incomplete:
                break
            found.append(message)
        if is_over or (len(found) == len(asked) and not wants_end):
            return found, data[at:], is_over
        is_refusal_due = len(found) == len(asked)
        try:
            async with asyncio.timeout(_UNDECIDED_S if is_refusal_due else None):
                piece = await reader.read(1 << 20)
        except TimeoutError:  # what it refuses may go on, as HTTP/0.9 does
            return found, data[at:], False
        is_over = not piece
        data += piece


def _judge(
    world: World,
    asked: list[Message],
    why: str,
    got: tuple[list[Message], bytes, bool],
    *,
    is_good: bool,
    seed: str,
    data: bytes,
) -> None:
    found, rest, _ = got
    for number, message in enumerate(found):
        refused = _refusal_of(message)
        if number >= len(asked):
            world.ends["refused"] += 1
            if refused is None or number > len(asked):
                world.find(f"an answer to nothing ({why}, {seed})", message, data[:2000])
            return
        if not asked[number].id:
            continue
        script = world.scripts[asked[number].id]
        if refused is not None:
            world.ends[f"refused {message.status}"] += 1
            is_the_engines = message.status in (502, 503)
            if is_good and not is_the_engines:
                world.find(f"a good request was refused ({seed})", message, data[:2000])
            if is_the_engines and script.expected is not None and is_good:
                world.find(f"a good answer was not passed on ({seed})", message, script)
            if not is_the_engines and number != len(found) - 1:
                world.find(f"something came after a refusal ({seed})", found)
            continue
        wanted = script.expected
        if wanted is None:
            world.find(f"a broken answer looks complete ({seed})", message, script)
            return
        _compare(world, asked[number], message, wanted, seed)
    is_closed = found and found[-1].is_open_ended  # of HTTP/1.0, without a length
    if len(found) < len(asked) and is_good and not is_closed:
        script = world.scripts[asked[len(found)].id]
        if script.expected is None:
            world.ends["cut"] += 1
        else:
            world.find(f"an answer is missing ({why}, {seed})", script, found[-1:], rest[:500])


def _refusal_of(message: Message) -> str | None:
    """The gateway's own word, where it is one."""
    if message.get(b"x-muster-rank") is not None or message.status < 400:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(message.body)["error"]["type"])
    # A HEAD has no body.
    return "head" if not message.body else None


def _compare(world: World, asked: Message, got: Message, wanted: Message, seed: str) -> None:
    world.ends["answered"] += 1
    body = wanted.body
    kind = (wanted.get(b"content-type") or b"").partition(b";")[0].strip() == b"text/event-stream"
    is_bare = asked.first.startswith(b"HEAD ") or wanted.status in (204, 304)
    if kind and not is_bare and wanted.get(b"content-length") is None:
        body += b": X-Muster-Version: 7\n\n"
    own = (b"x-muster-rank", b"x-muster-engine", b"x-muster-epoch", b"x-muster-version")
    headers = [pair for pair in got.passed_on() if pair[0].lower() not in own]
    if got.status != wanted.status or got.body != body or headers != wanted.passed_on():
        world.find(f"another answer than the engine's ({seed})", got, wanted)
    if got.id not in (b"", asked.id) and wanted.id == asked.id:
        world.find(f"the answer to another request ({seed})", got, asked)


@contextlib.asynccontextmanager
async def _scene(world: World) -> AsyncIterator[Gateway]:
    fleet = Fleet()
    servers = [
        await asyncio.start_server(lambda r, w: engine(world, r, w), "127.0.0.1", 0, limit=1 << 22)
        for _ in range(_ENGINES)
    ]
    fleet.router.set(
        Entrypoint(rank=rank, epoch=1, url=f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}")
        for rank, one in enumerate(servers)
    )
    gateway = Gateway(fleet)  # type: ignore[arg-type]
    loop = uvloop.new_event_loop()  # its own, as in the process of a fleet
    thread = Thread(target=loop.run_forever)
    thread.start()
    await _on(loop, gateway.start())
    try:
        yield gateway
        deadline = time.monotonic() + _LEFT_WITHIN_S
        while fleet.router.outstanding or gateway._connections:
            if time.monotonic() > deadline:
                left = fleet.router.outstanding, len(gateway._connections)
                world.find("left: requests with an engine, connections", left)
                break
            await asyncio.sleep(0.02)
    finally:
        await _on(loop, gateway.stop(0))
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()
        for one in servers:
            one.close()
    _, left_open = await asyncio.wait(world.engines, timeout=_LEFT_WITHIN_S)
    if left_open:
        world.find("left: connections to engines", len(left_open))


async def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class _Errors(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.find("an error was logged", self.format(record)[-1500:])


async def fuzz(seed: int, *, for_s: float = 0.0, rounds: int = 1) -> World:
    """As many rounds of connections, or as long.

    Returns: what was found, and how requests ended.
    """
    until, number = time.monotonic() + for_s, 0
    totals = World(dice=Random(seed))
    while number < rounds or time.monotonic() < until:
        number += 1
        world = World(dice=Random(f"{seed} {number}"), findings=totals.findings, ends=totals.ends)
        handler = _Errors(world)
        for name in ("tasks.rollout", "asyncio"):
            logging.getLogger(name).addHandler(handler)
        try:
            async with _scene(world) as gateway:
                port = int(gateway.url.rpartition(":")[2])
                for turn in range(10):
                    names = [f"{seed} {number} {turn} {one}" for one in range(_CLIENTS)]
                    await asyncio.gather(*(client(world, port, name) for name in names))
        finally:
            for name in ("tasks.rollout", "asyncio"):
                logging.getLogger(name).removeHandler(handler)
        totals.ends["connections"] += 10 * _CLIENTS
        totals.ends["arrived"] += world.arrived.total()
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.gateway_fuzz",
        description=__doc__,
        epilog="Exit: 0 no promise was broken; 1 one was; 2 the arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="under attack")
    parser.add_argument(
        "--seed",
        type=int,
        default=SystemRandom().randrange(10**6),
        help="of the draw; else a new one",
    )
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    world = asyncio.run(fuzz(options.seed, for_s=60 * options.minutes))
    print(", ".join(f"{what} {count:,}" for what, count in sorted(world.ends.items())))
    print(f"{len(world.findings)} findings")
    sys.exit(1 if world.findings else 0)


if __name__ == "__main__":
    main()
