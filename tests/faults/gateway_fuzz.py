"""Fuzz the gateway from both sides: `python -m tests.faults.gateway_fuzz [--minutes 10]`.

Clients send valid, mutated and hostile requests over raw sockets, in pieces of random length, and
some requests before the previous answer. Engines answer with valid, mutated and hostile bytes. The
reference parser in this module is written from RFC 9112 and shares no code with the gateway. It
reads the bytes of both sides, to check that:

- engines receive only requests that the reference parser finds in a client's bytes, unchanged
  except for the headers that concern one connection;
- engines receive nothing that follows an invalid request on a connection;
- each client receives the answers to its own requests, in their order;
- a truncated answer never looks complete;
- if a client closes its connection, the gateway cancels the request at the engine;
- the gateway keeps no request and no connection at the end.

The seed is printed. The same seed sends the same bytes, but the timing of the machine differs.
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
from tests.support.fleet_fakes import make_settings
from tests.support.help import HelpFormatter

_ENGINES, _CLIENTS = 2, 8
#: Time limit on all answers of one client connection, in seconds.
_ANSWER_WITHIN_S = 60.0
#: Time limit, in seconds, for the gateway to close all connections after the last request.
_LEFT_WITHIN_S = 20.0
#: Seconds that a client waits until the gateway refuses an invalid request.
_UNDECIDED_S = 3.0
#: Headers that concern only one connection. A proxy must not forward these headers.
_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade host expect content-length".split()
)
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(rb"/[\x21\x22\x24-\x7e]*")
#: Pattern of a chunk size with its extensions. Unlike RFC 9112, the pattern allows an empty name or
#: value of an extension, because a parser can still find the end of the extension.
_SIZE = re.compile(
    rb"([0-9A-Fa-f]{1,16})(?:;(?:%b)?(?:=(?:%b|\"[\t\x20-\x21\x23-\x5b\x5d-\x7e\x80-\xff]*\")?)?)*"
    % (_TOKEN.pattern, _TOKEN.pattern)
)
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])( [\t\x20-\x7e\x80-\xff]*)?")
_METHODS = frozenset(b"GET HEAD POST PUT DELETE OPTIONS PATCH".split())


class Invalid(Exception):
    """The bytes are not valid HTTP/1.1. The message says which part is invalid."""


class Incomplete(Exception):
    """The bytes end before the end of the message."""


@dataclass(slots=True, kw_only=True)
class Message:
    """HTTP request or response, as the parser in this module has read it."""

    #: First line of the message. For a request, only the method and the target, separated by one
    #: space.
    first: bytes
    #: Names and values of the headers, in their order.
    headers: list[tuple[bytes, bytes]]
    #: Body of the message. If the body was sent in chunks, the chunk sizes are removed.
    body: bytes
    #: True if the headers do not say where the body ends. In this case, the body ends when the
    #: connection is closed.
    is_open_ended: bool = False
    #: True if the sender of this request expects that the connection is closed after the answer.
    is_last: bool = False

    def get(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this lower-case name, or None."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def id(self) -> bytes:
        """Id of the request, or empty bytes if the request has no unique id.

        The id "smuggled" does not count as unique, because many requests contain this id.
        """
        id = self.get(b"x-fuzz-id") or b""
        return b"" if id == b"smuggled" else id

    @property
    def status(self) -> int:
        """Status code of this response."""
        return int(self.first.split(b" ")[1])

    def passed_on(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that a proxy must forward.

        The result does not contain headers that concern only one connection.
        """
        connection_options = _joined(self, b"connection")
        dropped = _HOP | {option.strip().lower() for option in connection_options.split(b",")}
        return [(key, value) for key, value in self.headers if key.lower() not in dropped]


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the line that begins at the offset `at`, and the offset of the next line."""
    end = data.find(b"\n", at)
    if end < 0:
        raise Incomplete
    if data[end - 1 : end] != b"\r" or end - 1 < at:
        raise Invalid("a line that ends with LF alone")
    return data[at : end - 1], end + 1


def _fields(data: bytes, at: int) -> tuple[list[tuple[bytes, bytes]], int]:
    """Return the headers that begin at the offset `at`, and the offset of the body."""
    headers: list[tuple[bytes, bytes]] = []
    while True:
        line, at = _line(data, at)
        if not line:
            return headers, at
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Invalid(f"the header {line!r}")
        headers.append((name, value))


def _body(
    data: bytes, at: int, headers: list[tuple[bytes, bytes]], *, is_old: bool
) -> tuple[bytes, int, bool]:
    """Read the body of a message.

    Args:
        data: All bytes of the connection.
        at: Offset of the body.
        headers: Headers of the message.
        is_old: True for HTTP/1.0, which has no chunked framing.

    Returns:
        The body, the offset of its end, and a flag. The flag is True if the headers do not say
        where the body ends. In this case, the returned body is empty.
    """
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    codings = [value for name, value in headers if name.lower() == b"transfer-encoding"]
    if len(lengths) > 1 or (lengths and codings) or (codings and is_old):
        raise Invalid("two lengths")
    if codings:
        if [coding.lower() for coding in codings] != [b"chunked"]:
            raise Invalid("a coding that is not chunked")
        parts = []
        while True:
            line, at = _line(data, at)
            if (size := _SIZE.fullmatch(line)) is None:
                raise Invalid(f"the chunk size {line[:40]!r}")
            count = int(size[1], 16)
            if count:
                if data[at + count : at + count + 2] != b"\r\n"[: max(0, len(data) - at - count)]:
                    raise Invalid("a chunk that is longer than its size")
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
    """Parse the bytes of a client.

    Returns:
        The valid requests, and the reason why no further request follows: "end" (no more bytes),
        "incomplete" (a part of a request), "last" (the client wants the connection to be closed),
        or the error in the next request.
    """
    requests: list[Message] = []
    at = 0
    while True:
        # Empty lines before a request are skipped, as RFC 9112, section 2.2, requires.
        while data[at : at + 1] in (b"\r", b"\n"):
            at += 1
        if at >= len(data):
            return requests, "end"
        try:
            first, next_at = _line(data, at)
            parts = re.fullmatch(rb"([A-Z]+) +(\S+) +HTTP/1\.([01])", first)
            if parts is None or parts[1] not in _METHODS or not _TARGET.fullmatch(parts[2]):
                raise Invalid(f"the line {first[:80]!r}")
            headers, next_at = _fields(data, next_at)
            is_old = parts[3] == b"0"
            message = Message(first=first, headers=headers, body=b"")
            host_count = sum(name.lower() == b"host" for name, _ in headers)
            if host_count > 1 or (not host_count and not is_old):
                raise Invalid("hosts")
            options = [
                option.strip().lower() for option in _joined(message, b"connection").split(b",")
            ]
            if b"upgrade" in options and message.get(b"upgrade") is not None:
                raise Invalid("an upgrade")
            message.is_last = b"close" in options or (is_old and b"keep-alive" not in options)
            message.body, at, _ = _body(data, next_at, headers, is_old=is_old)
        except Incomplete:
            return requests, "incomplete"
        except Invalid as error:
            return requests, str(error)
        message.first = b"%b %b" % (parts[1], parts[2])
        requests.append(message)
        if message.is_last:
            return requests, "last"


def _joined(message: Message, name: bytes) -> bytes:
    """Return the values of all headers with this lower-case name, joined by commas."""
    return b",".join(value for key, value in message.headers if key.lower() == name)


def answer_in(data: bytes, at: int, method: bytes, *, is_over: bool) -> tuple[Message, int]:
    """Parse the next final answer of a server, and skip answers with a status below 200.

    Args:
        data: All bytes of the connection.
        at: Offset of the answer.
        method: Method of the request. The answer to HEAD has no body.
        is_over: True if the connection was closed after the bytes.

    Returns:
        The answer, and the offset of its end.

    Raises:
        Invalid: The bytes are not a valid answer.
        Incomplete: The bytes end before the end of the answer.
    """
    while True:
        # Empty lines before an answer are skipped. RFC 9112, section 2.2, requires this only for
        # requests.
        while data[at : at + 1] in (b"\r", b"\n"):
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


# Functions that generate requests and answers.


def _pieces(dice: Random, data: bytes) -> Iterator[bytes]:
    """Yield the bytes in pieces of random length."""
    if dice.random() < 0.3 or len(data) < 2:
        yield data
        return
    step = dice.choice((1, 7, 60, 1400, 70_000)) if len(data) < 3000 else 20_000
    while data:
        count = dice.randint(1, step)
        yield data[:count]
        data = data[count:]


def _content(dice: Random) -> bytes:
    """Return a body: no bytes, bytes that look like further messages, or random bytes."""
    kind = dice.random()
    if kind < 0.3:
        return b""
    if kind < 0.6:
        # A parser that does not know where the body ends would mistake these bytes for a request
        # and an answer.
        inner = b"POST /smuggled HTTP/1.1\r\nHost: localhost\r\nX-Fuzz-Id: smuggled\r\n"
        return inner + b"Content-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    return dice.randbytes(dice.choice((1, 10, 1000, 70_000, 300_000)) if kind < 0.9 else 20)


def _chunked(dice: Random, body: bytes) -> bytes:
    """Return the body in chunked framing, with random extensions and a random trailer."""
    chunks = []
    while body:
        count = dice.randint(1, max(1, len(body)))
        extension = dice.choice((b"", b"", b";a=b", b';q="x y"', b";n"))
        size = dice.choice((b"%x", b"%X", b"0%x")) % count
        chunks.append(size + extension + b"\r\n" + body[:count] + b"\r\n")
        body = body[count:]
    trailer = dice.choice((b"", b"", b"X-Trailer: 1\r\nX-Fuzz-Id: trailed\r\n"))
    return b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


#: Header lines of requests that are ambiguous or not valid HTTP/1.1.
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
#: First lines of HTTP requests that the gateway must refuse.
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
#: Bodies with invalid chunked framing.
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
#: Answers of engines, most of them invalid. A client of the gateway must receive no invalid answer.
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
    """Behaviour of an engine for one request id. A retried request gets the same answer."""

    #: Bytes that the engine sends.
    raw: bytes
    #: True if the engine closes the connection after it has sent `raw`.
    closes: bool
    #: Answer that the client should receive. None if the client should receive a truncated answer
    #: or an error of the gateway.
    expected: Message | None
    #: True if the engine does not answer and waits until the gateway closes the connection.
    hangs: bool = False
    #: Offset in `raw` from which all bytes are sent in one piece. None if all bytes are sent in
    #: random pieces. The offset is set if invalid bytes follow the answer, so that the gateway
    #: receives the end of the answer and the invalid bytes together.
    whole_from: int | None = None


@dataclass(slots=True, kw_only=True)
class World:
    """Shared state of the clients and engines of one round."""

    #: Random generator for all random decisions of the test.
    dice: Random
    #: Mapping from request id to the behaviour of the engines.
    scripts: dict[bytes, Script] = field(default_factory=dict)
    #: Mapping from request id to the valid requests that clients have sent with this id.
    sent: dict[bytes, list[Message]] = field(default_factory=dict)
    #: Mapping from request id to the number of times that engines have received the request.
    arrived: Counter[bytes] = field(default_factory=Counter)
    #: Mapping from request id to an event, for requests that no engine answers. The event is set
    #: when an engine has received the request.
    hung: dict[bytes, asyncio.Event] = field(default_factory=dict)
    #: Mapping from request id to an event, for requests that no engine answers. The event is set
    #: when the gateway has closed the connection of the request.
    gone: dict[bytes, asyncio.Event] = field(default_factory=dict)
    #: Tasks that serve the connections of the engines.
    engines: set[asyncio.Task[None]] = field(default_factory=set)
    #: Violated requirements, one text each.
    findings: list[str] = field(default_factory=list)
    #: Mapping from the name of a result to the number of requests with this result.
    ends: Counter[str] = field(default_factory=Counter)

    def find(self, problem: str, *details: object) -> None:
        """Record and print a violation of one of the requirements in the module's docstring.

        Args:
            problem: Description of the violation.
            details: Messages, scripts or bytes that show the violation.
        """
        self.findings.append(" | ".join([problem, *(repr(detail)[:600] for detail in details)]))
        print("FOUND", self.findings[-1], flush=True)


class Fleet:
    """Fake fleet whose engines are always ready, with weight version 7."""

    def __init__(self) -> None:
        self.router = Router()
        self.settings = make_settings(paths=(ANY_PATH,))

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
    """Serve one connection from the gateway to an engine.

    The engine checks that each request was sent by a client. Then the engine sends the answer in
    the `Script` that belongs to the id of the request.
    """
    data = b""
    task = asyncio.current_task()
    assert task is not None
    world.engines.add(task)
    try:
        while piece := await reader.read(1 << 20):
            data += piece
            requests, end_reason = requests_in(data)
            if end_reason not in ("end", "incomplete", "last") or len(requests) > 1:
                world.find(f"an engine got an invalid request: {end_reason}", data[:2000])
                return
            if not requests:
                continue
            data = b""
            script = _take_request(world, requests[0])
            if script.hangs:
                world.hung[requests[0].id].set()
                if await reader.read(1):
                    world.find("more came while an answer was waited for")
                world.gone[requests[0].id].set()
                return
            whole = script.raw[script.whole_from :] if script.whole_from is not None else b""
            first = script.raw[: len(script.raw) - len(whole)]
            for part in (*_pieces(world.dice, first), whole):
                # uvloop raises no error for a write to a closed connection.
                if writer.is_closing():
                    raise ConnectionResetError
                writer.write(part)
                await writer.drain()
                if world.dice.random() < 0.05:
                    await asyncio.sleep(world.dice.random() * 0.003)
            if script.closes:
                return
        # The gateway has sent only a part of the request's body, because the client closed its
        # connection, or because the gateway refused the rest of the body.
        if data:
            world.ends["cut at an engine"] += 1
    except ConnectionError:
        world.ends["cut at an engine"] += 1
    finally:
        writer.close()


def _take_request(world: World, received: Message) -> Script:
    """Check that a client sent the request that an engine received.

    Returns:
        The script with the engine's answer to the request.
    """
    world.arrived[received.id] += 1
    candidates = world.sent.get(received.id, [])
    if not candidates:
        world.find("an engine got a request that no client sent", received)
    elif not any(
        received.first == sent.first
        and received.body == sent.body
        and received.passed_on() == sent.passed_on()
        for sent in candidates
    ):
        world.find("an engine got another request than was sent", received, candidates[0])
    if received.get(b"transfer-encoding") and received.get(b"content-length"):
        world.find("an engine got two lengths", received)
    return world.scripts.get(received.id) or _plain(received.id, b"default")


def _plain(id: bytes, body: bytes) -> Script:
    """Return a valid HTTP answer of an engine: a `Script` with this request id and body."""
    raw = b"HTTP/1.1 200 OK\r\nX-Fuzz-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        id,
        len(body),
        body,
    )
    return Script(raw=raw, closes=False, expected=answer_in(raw, 0, b"GET", is_over=False)[0])


def _script(dice: Random, id: bytes, method: bytes) -> Script:
    """Return a random answer of an engine, and the answer that the client must receive."""
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
            raw += _plain(id, b"an answer that is not requested").raw
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
    """Return the bytes of a random request, and True if the request is valid."""
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
        options = (b"close", b"keep-alive", b"X-Mine", b"X-Two, close", b"Content-Length")
        headers.append(b"Connection: %b\r\nX-Mine: 1\r\n" % dice.choice(options))
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
    """Send up to five random requests on one connection, and check the answers.

    Args:
        world: Shared state of the round.
        port: Port of the gateway.
        seed: Seed of the client's draws.
    """
    dice = Random(seed)
    drawn = [_request(dice, b"%012x" % dice.getrandbits(48)) for _ in range(dice.randint(1, 5))]
    data = b"".join(raw for raw, _ in drawn)
    is_good = all(is_valid for _, is_valid in drawn)
    requests, end_reason = requests_in(data)
    hangs = is_good and len(requests) == 1 and dice.random() < 0.1
    for request in requests:
        world.sent.setdefault(request.id, []).append(request)
        script = _script(dice, request.id, request.first.partition(b" ")[0])
        # A fake engine finds its answer by the id of the request. So all requests without an id
        # share one answer, which must be valid for each of these requests.
        world.scripts.setdefault(request.id, script if request.id else _plain(b"", b"default"))
    if hangs:
        id = requests[-1].id
        world.scripts[id] = Script(raw=b"", closes=False, expected=None, hangs=True)
        world.hung[id] = asyncio.Event()
        world.gone[id] = asyncio.Event()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    sending = asyncio.create_task(_send(dice, writer, data))
    leaves = not hangs and dice.random() < 0.05
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            if hangs:
                await world.hung[requests[-1].id].wait()
                if dice.random() < 0.5:
                    writer.transport.abort()
                else:
                    writer.close()
                await world.gone[requests[-1].id].wait()
                world.ends["left, and cut at its engine"] += 1
                return
            if leaves:
                await asyncio.sleep(dice.random() * 0.01)
                writer.transport.abort()
                world.ends["left"] += 1
                return
            wants_end = end_reason not in ("end", "incomplete")
            answers = await _read_answers(reader, requests, wants_end=wants_end)
    except TimeoutError:
        world.find(f"no end within {_ANSWER_WITHIN_S:g} s ({end_reason}, {seed})", data[:3000])
        return
    except Invalid as error:
        world.find(f"a client got an invalid answer ({seed})", error)
        return
    except ConnectionError:
        world.ends["reset"] += 1
        if is_good and all(world.scripts[request.id].expected for request in requests):
            world.find(f"a good client was reset ({seed})", data[:2000])
        return
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await sending
        writer.close()
    _judge(world, requests, end_reason, answers, is_good=is_good, seed=seed, data=data)


async def _send(dice: Random, writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send the bytes in random pieces, until all are sent or the gateway closes the connection."""
    with contextlib.suppress(ConnectionError):
        for piece in _pieces(dice, data):
            writer.write(piece)
            await writer.drain()
            if dice.random() < 0.03:
                await asyncio.sleep(dice.random() * 0.003)


async def _read_answers(
    reader: asyncio.StreamReader, requests: list[Message], *, wants_end: bool
) -> tuple[list[Message], bytes, bool]:
    """Read the answers of the gateway to one client.

    Args:
        reader: Stream from the gateway.
        requests: Valid requests of the client.
        wants_end: True if the gateway should close the connection after the answers, because an
            invalid request follows or the last request asks for the close.

    Returns:
        The complete answers, the bytes of an incomplete answer, and True if the connection was
        closed.
    """
    data = b""
    at = 0
    is_over = False
    answers: list[Message] = []
    while True:
        while at < len(data) or is_over:
            has_request = len(answers) < len(requests)
            method = requests[len(answers)].first.partition(b" ")[0] if has_request else b"GET"
            try:
                message, at = answer_in(data, at, method, is_over=is_over)
            except Incomplete:
                break
            answers.append(message)
        if is_over or (len(answers) == len(requests) and not wants_end):
            return answers, data[at:], is_over
        is_refusal_due = len(answers) == len(requests)
        try:
            async with asyncio.timeout(_UNDECIDED_S if is_refusal_due else None):
                piece = await reader.read(1 << 20)
        except TimeoutError:
            # The client's last bytes may be the beginning of a line. In this case, the gateway
            # waits for the rest of the line, and does not refuse the request yet.
            return answers, data[at:], False
        is_over = not piece
        data += piece


def _judge(
    world: World,
    requests: list[Message],
    end_reason: str,
    received: tuple[list[Message], bytes, bool],
    *,
    is_good: bool,
    seed: str,
    data: bytes,
) -> None:
    """Compare the answers that a client received with the answers that the fake engines sent.

    Args:
        world: Shared state of the round, which records violated requirements.
        requests: Valid requests of the client.
        end_reason: Reason why no further valid request follows.
        received: Result of `_read_answers`.
        is_good: True if all requests are valid.
        seed: Seed of the client.
        data: All bytes of the client.
    """
    answers, rest, _ = received
    for number, message in enumerate(answers):
        error_type = _refusal_of(message)
        if number >= len(requests):
            world.ends["refused"] += 1
            if error_type is None or number > len(requests):
                world.find(f"an answer to nothing ({end_reason}, {seed})", message, data[:2000])
            return
        if not requests[number].id:
            continue
        script = world.scripts[requests[number].id]
        if error_type is not None:
            world.ends[f"refused {message.status}"] += 1
            is_failure_of_engine = message.status in (502, 503)
            if is_good and not is_failure_of_engine:
                world.find(f"a good request was refused ({seed})", message, data[:2000])
            if is_failure_of_engine and script.expected is not None and is_good:
                world.find(f"a good answer was not passed on ({seed})", message, script)
            if not is_failure_of_engine and number != len(answers) - 1:
                world.find(f"something came after a refusal ({seed})", answers)
            continue
        expected = script.expected
        if expected is None:
            world.find(f"a broken answer looks complete ({seed})", message, script)
            return
        _compare(world, requests[number], message, expected, seed)
    # The gateway must close the connection after an answer with neither a Content-Length nor
    # chunks, because only the end of the connection then marks the end of the answer.
    is_closed = answers and answers[-1].is_open_ended
    if len(answers) < len(requests) and is_good and not is_closed:
        script = world.scripts[requests[len(answers)].id]
        if script.expected is None:
            world.ends["cut"] += 1
        else:
            world.find(
                f"an answer is missing ({end_reason}, {seed})", script, answers[-1:], rest[:500]
            )


def _refusal_of(message: Message) -> str | None:
    """Return the error type of an answer that the gateway itself made, or None."""
    if message.get(b"x-muster-rank") is not None or message.status < 400:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(message.body)["error"]["type"])
    # The answer to a HEAD request has no body, and so does not contain the type of the error.
    return "head" if not message.body else None


def _compare(
    world: World, request: Message, received: Message, expected: Message, seed: str
) -> None:
    """Compare the answer that a client received with the answer that the engine sent.

    The headers that the gateway adds are not compared.
    """
    world.ends["answered"] += 1
    body = expected.body
    content_type = (expected.get(b"content-type") or b"").partition(b";")[0].strip()
    is_stream = content_type == b"text/event-stream"
    is_bare = request.first.startswith(b"HEAD ") or expected.status in (204, 304)
    if is_stream and not is_bare and expected.get(b"content-length") is None:
        # The gateway appends the weight version as a comment to a stream of server-sent events.
        body += b": X-Muster-Version: 7\n\n"
    own = (b"x-muster-rank", b"x-muster-engine", b"x-muster-epoch", b"x-muster-version")
    headers = [pair for pair in received.passed_on() if pair[0].lower() not in own]
    if (
        received.status != expected.status
        or received.body != body
        or headers != expected.passed_on()
    ):
        world.find(f"another answer than the engine's ({seed})", received, expected)
    if received.id not in (b"", request.id) and expected.id == request.id:
        world.find(f"the answer to another request ({seed})", received, request)


@contextlib.asynccontextmanager
async def _running_gateway(world: World) -> AsyncIterator[Gateway]:
    """Start the engines and the gateway.

    Check at the end that the gateway has closed all requests and connections.
    """
    fleet = Fleet()
    servers = [
        await asyncio.start_server(lambda r, w: engine(world, r, w), "127.0.0.1", 0, limit=1 << 22)
        for _ in range(_ENGINES)
    ]
    fleet.router.set(
        Entrypoint(rank=rank, epoch=1, url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for rank, server in enumerate(servers)
    )
    gateway = Gateway(fleet)  # type: ignore[arg-type]
    # The gateway runs on its own event loop, as in the fleet's process.
    loop = uvloop.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    await _run_on(loop, gateway.start())
    try:
        yield gateway
        deadline = time.monotonic() + _LEFT_WITHIN_S
        while fleet.router.outstanding or gateway._connections:
            if time.monotonic() > deadline:
                open_counts = fleet.router.outstanding, len(gateway._connections)
                world.find("left: requests with an engine, connections", open_counts)
                break
            await asyncio.sleep(0.02)
    finally:
        await _run_on(loop, gateway.stop(0))
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()
        for server in servers:
            server.close()
    _, open_connections = await asyncio.wait(world.engines, timeout=_LEFT_WITHIN_S)
    if open_connections:
        world.find("left: connections to engines", len(open_connections))


async def _run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on the event loop of another thread, and wait for its end."""
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class _Errors(logging.Handler):
    """Log handler that records each logged error as a violated requirement."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.find("an error was logged", self.format(record)[-1500:])


async def fuzz(seed: int, *, for_s: float = 0.0, rounds: int = 1) -> World:
    """Fuzz the gateway until both a number of rounds and a duration have been reached.

    Args:
        seed: Seed of all draws.
        for_s: Smallest duration, in seconds.
        rounds: Smallest number of rounds. Each round has a new gateway.

    Returns:
        The violated requirements, and the number of requests per result.
    """
    until = time.monotonic() + for_s
    number = 0
    totals = World(dice=Random(seed))
    while number < rounds or time.monotonic() < until:
        number += 1
        world = World(dice=Random(f"{seed} {number}"), findings=totals.findings, ends=totals.ends)
        handler = _Errors(world)
        for name in ("tasks.rollout", "asyncio"):
            logging.getLogger(name).addHandler(handler)
        try:
            async with _running_gateway(world) as gateway:
                port = int(gateway.url.rpartition(":")[2])
                for turn in range(10):
                    seeds = [f"{seed} {number} {turn} {index}" for index in range(_CLIENTS)]
                    await asyncio.gather(*(client(world, port, seed) for seed in seeds))
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
    print(", ".join(f"{result} {count:,}" for result, count in sorted(world.ends.items())))
    print(f"{len(world.findings)} findings")
    sys.exit(1 if world.findings else 0)


if __name__ == "__main__":
    main()
