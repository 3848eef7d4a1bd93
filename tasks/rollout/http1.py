"""HTTP/1.1 on a connection: heads are judged, and bodies flow at the pace of the slower end.

llhttp (httptools) parses, and takes nothing but what the standard allows. What it leaves open, and
two parsers may read in two ways, is refused here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import httptools
from multidict import CIMultiDict

#: Of a head, with its first line, in bytes; and in headers.
LONGEST_HEAD, MOST_HEADERS = 64 * 1024, 256
#: What each header takes at least beside its name and value: a colon, CR and LF.
_HEADER_OVERHEAD = 3
#: Seconds from a head's first byte to its last.
HEAD_WITHIN_S = 10.0
#: Seconds in which a client that was not let in yet has to begin a request.
SILENT_AT_MOST_S = 10.0
#: Seconds between two requests of a client that was let in.
IDLE_AT_MOST_S = 600.0
#: Seconds between two pieces of a request's body.
BODY_PIECE_WITHIN_S = 60.0
#: That may lie unread before the other end has to wait, in bytes.
_MOST_UNREAD = 256 * 1024
#: Requests that a client may send ahead before it has to wait; one that was not let in yet, none.
_MOST_AHEAD = 8
#: For a client to read the last of an answer before its connection is cut, in seconds.
_LINGER_S = 5.0
#: Bytes that are no UTF-8 come out as they went in.
TEXT = ("utf-8", "surrogateescape")
_REASONS = {one.value: one.phrase for one in HTTPStatus}
#: Have no body, whatever their head says. Source: RFC 9110, section 6.4.1.
BARE = frozenset({204, 304})

_log = logging.getLogger(__name__)


class Malformed(Exception):
    """What came is no message of HTTP/1.1, or one that could be read in two ways.

    Args:
        status: with which a request is refused.
    """

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


def head_of(first: str, headers: CIMultiDict[str]) -> bytes:
    """A message's head, with the empty line after it.

    Args:
        first: its first line.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{first}\r\n{lines}\r\n".encode(*TEXT)


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


LAST_CHUNK = b"0\r\n\r\n"


class Body:
    """What arrives of a message's body; while too much lies unread, nothing more is read."""

    __slots__ = ("_error", "_is_held", "_pieces", "_reader", "_size", "_wire", "is_complete")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_held = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        #: All of it has arrived.
        self.is_complete = False

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > _MOST_UNREAD and not self._is_held:
            self._is_held = True
            self._wire.hold()
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Nothing more comes; with an error, it is not complete."""
        self._error = error
        self.is_complete = error is None
        self._wake()

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is there to be read, nor its end."""
        return not (self._pieces or self.is_complete)

    async def readany(self) -> bytes:
        """What has arrived, empty at the end. Raises: that of `end`, after what came before."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.is_complete:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self.take()

    def take(self) -> bytes:
        """What lies unread."""
        pieces = self._pieces
        found = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces, self._size = [], 0
        if self._is_held:
            self._is_held = False
            self._wire.release()
        return found

    async def upto(self, most: int, *, piece_within_s: float | None = None) -> tuple[bytes, bool]:
        """What comes until it is more than so many bytes, and whether it is all.

        Args:
            piece_within_s: seconds to wait for each piece; None: for ever.

        Raises: TimeoutError, and what `end` was given.
        """
        pieces, size = [], 0
        while not self.is_complete and size <= most:
            if self.is_waiting and self._error is None:
                async with asyncio.timeout(piece_within_s):
                    pieces.append(await self.readany())
            else:
                pieces.append(await self.readany())
            size += len(pieces[-1])
        if size <= most:
            pieces.append(self.take())
            size += len(pieces[-1])
        return b"".join(pieces), size <= most

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Wire(asyncio.Protocol):
    """One end of a connection: what a server's and a client's have in common."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._holds = 0
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_in_head = False
        self._line = b""
        self._headers: list[tuple[bytes, bytes]] = []
        #: Bytes of the head, by what was parsed and by what has come.
        self._parsed = self._came = 0
        #: Heads that were complete.
        self._heads = 0
        self._is_in_message = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def drain(self) -> None:
        """Returns once more may be written. Raises: ConnectionResetError, when nobody reads it."""
        if not self._may_write.is_set():
            await self._may_write.wait()
        if self.transport.is_closing():
            raise ConnectionResetError("the connection is closed")

    def write(self, data: bytes) -> None:
        """What nobody reads any more is left out; `drain` tells."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def hold(self) -> None:
        """Read nothing until `release`."""
        self._holds += 1
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def release(self) -> None:
        self._holds -= 1
        if not self._holds and not self.transport.is_closing():
            self.transport.resume_reading()

    def _feed(self, parser: Any, data: bytes) -> Malformed | None:
        """Have it parsed. Returns: what is wrong with it."""
        heads_before = self._heads
        begins_with_head = self._is_in_head or not self._is_in_message
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            own = error.__context__
            return own if isinstance(own, Malformed) else Malformed(str(error))
        # Else nobody knows where in these bytes the head begins.
        if self._is_in_head and begins_with_head and self._heads == heads_before:
            self._came += len(data)
            if self._came > LONGEST_HEAD:
                return _too_long()
        return None

    def on_message_begin(self) -> None:
        self._is_in_message = self._is_in_head = True
        self._line, self._headers = b"", []
        self._parsed = self._came = 0

    def on_message_complete(self) -> None:
        self._is_in_message = False

    def on_url(self, piece: bytes) -> None:
        self._parsed += len(piece)
        if self._parsed > LONGEST_HEAD:
            raise _too_long()
        self._line += piece

    on_status = on_url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed += len(name) + len(value) + _HEADER_OVERHEAD
        if self._parsed > LONGEST_HEAD or len(self._headers) >= MOST_HEADERS:
            raise _too_long()
        if self._is_in_head:  # what comes after a body is for this connection only
            self._headers.append((name, value))

    def _framed(self) -> tuple[CIMultiDict[str], int | None]:
        """Of a head that is complete: its headers, and the length of the body where it says so."""
        self._is_in_head = False
        self._heads += 1
        coding, errors = TEXT
        headers = CIMultiDict(
            [
                (name.decode(coding, errors), value.strip(b" \t").decode(coding, errors))
                for name, value in self._headers
            ]
        )
        if "Transfer-Encoding" in headers and headers["Transfer-Encoding"].lower() != "chunked":
            raise Malformed("its Transfer-Encoding is not chunked", 501)
        length = headers.get("Content-Length")
        return headers, None if length is None else int(length)


def _too_long() -> Malformed:
    why = f"its head has more than {LONGEST_HEAD} bytes or {MOST_HEADERS} headers"
    return Malformed(why, 431)


@dataclass(frozen=True, slots=True)
class Answer:
    """To a request, as a whole."""

    status: int
    body: bytes = b""
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    reason: str | None = None

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(slots=True, eq=False, kw_only=True)
class HttpRequest:
    """One request, and the way back to its client."""

    wire: ServerConnection
    content: Body
    method: str = "GET"
    #: The path, with its query.
    target: str = "/"
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    #: Of the body, in bytes; None: it shows at its end.
    length: int | None = None
    #: Its client speaks HTTP/1.0.
    is_old: bool = False
    #: Another request may follow.
    is_kept: bool = True
    #: Why it is refused before anybody looks at it.
    fault: Malformed | None = None
    #: Anything of an answer was sent.
    is_begun: bool = False
    _is_chunked: bool = False
    #: The answer ends with the connection.
    _is_open_ended: bool = False
    _unsent: bytes = b""

    async def upto(self, most: int) -> tuple[bytes, bool]:
        """See `Body.upto`; a client that waits for a word to send it gets it.

        Raises: Malformed, for a body that is none, or of which no more comes.
        """
        if (self.length or 0) > most:
            return b"", False
        expected = self.headers.pop("Expect", "").lower()
        if expected == "100-continue" and not self.is_old and self.content.is_waiting:
            self.wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            return await self.content.upto(most, piece_within_s=BODY_PIECE_WITHIN_S)
        except TimeoutError:
            why = f"no more of it came within {BODY_PIECE_WITHIN_S:g} s"
            raise Malformed(why, 408) from None

    def send(self, answer: Answer) -> int:
        """The whole answer, at once. Returns: its status."""
        has_body = self.method != "HEAD" and answer.status not in BARE
        if has_body:
            answer.headers["Content-Length"] = str(len(answer.body))
        self._begin(answer.status, answer.reason, answer.headers)
        self._put(answer.body if has_body else b"")
        return answer.status

    def begin(self, status: int, reason: str | None, headers: CIMultiDict[str]) -> None:
        """An answer whose body follows by `write`, up to `end`; its head leaves with the first of
        them, or by `flush`."""
        if "Content-Length" not in headers:
            self._is_chunked, self._is_open_ended = not self.is_old, self.is_old
            self.is_kept &= self._is_chunked
            if self._is_chunked:
                headers["Transfer-Encoding"] = "chunked"
        self._begin(status, reason, headers)

    def flush(self) -> None:
        self._put(b"")

    async def write(self, piece: bytes) -> None:
        """Raises: ConnectionResetError, when the client has left."""
        self._put(chunk(piece) if self._is_chunked else piece)
        await self.wire.drain()

    def end(self, last: bytes = b"") -> None:
        if self._is_chunked:
            last = (chunk(last) if last else b"") + LAST_CHUNK
        self._put(last)

    async def cut(self, words: bytes = b"") -> None:
        """End an answer that is not complete, so that its client sees that; the words come last."""
        transport = self.wire.transport
        try:
            self.flush()
            if words:
                await self.write(words)
        finally:
            if self._is_open_ended:  # only a reset tells that this is not all
                connection: socket.socket = transport.get_extra_info("socket")
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                transport.abort()
            else:
                transport.close()
                asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)

    def _begin(self, status: int, reason: str | None, headers: CIMultiDict[str]) -> None:
        # What it has not sent yet would be taken for the next request.
        self.is_kept &= self.content.is_complete and not self.wire.is_last
        if not self.is_kept:
            headers["Connection"] = "close"
        elif self.is_old:
            headers["Connection"] = "keep-alive"
        said = _REASONS.get(status, "") if reason is None else reason
        self._unsent = head_of(f"HTTP/1.1 {status} {said}", headers)
        self.is_begun = True

    def _put(self, data: bytes) -> None:
        if self._unsent or data:
            self.wire.write(self._unsent + data)
        self._unsent = b""


class ServerConnection(Wire):
    """A client's connection: its requests are answered one after the other, in their order. When
    it is lost, what is under way is cancelled.

    Args:
        handle: answers a request.
        refused: makes the answer to a malformed one.
        peers: all that are open, or have a task that is not done.
        enter: says who has opened the connection, and whether it may stay.
        leave: told its end, after `enter`.
    """

    def __init__(
        self,
        handle: Callable[[HttpRequest], Awaitable[None]],
        refused: Callable[[int, str], Answer],
        peers: set[ServerConnection],
        enter: Callable[[ServerConnection], bool],
        leave: Callable[[ServerConnection], None],
    ) -> None:
        super().__init__()
        self._handle, self._refused, self._peers = handle, refused, peers
        self._enter, self._leave = enter, leave
        self._parser = httptools.HttpRequestParser(self)
        self._ahead: deque[HttpRequest] = deque()
        #: That is being received.
        self._incoming: HttpRequest | None = None
        #: What comes is not looked at any more.
        self._is_deaf = False
        self._is_held = False
        #: No request is taken after the one that is under way.
        self.is_last = False
        #: Of the request under way.
        self.task: asyncio.Task[None] | None = None
        #: Its client, for counting: a user of this machine, or an address.
        self.client = ""
        #: The kernel says that a process of this user, or of root, has opened it.
        self.is_own = False
        #: Why the kernel does not say whose it is; empty if it does.
        self.unknown_because = ""
        #: It is this user's, or a request on it was authorised.
        self.is_let_in = False
        #: When it was opened, or its last request ended, or the head that comes now began.
        self._since_s = 0.0
        self._lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._peers.add(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        if self._enter(self):
            return
        if self.is_let_in:
            why = "too many connections are open: send fewer requests at once"
            self._take(self._unread(Malformed(why, 503)))
            self._is_deaf = True
        else:
            self.transport.abort()

    def let_in(self) -> None:
        """A request on it was authorised: more may be sent ahead."""
        self.is_let_in = True
        self._resume_reading_ahead()

    def expire(self, now_s: float) -> None:
        """Close it, if it is late with a head, or has been silent or idle for too long."""
        if self.task is not None or self._is_deaf or self.transport.is_closing():
            return
        waited_s = now_s - self._since_s
        if self._is_in_head:
            if waited_s > HEAD_WITHIN_S:
                self._is_deaf = True
                why = f"its head was not complete after {HEAD_WITHIN_S:g} s"
                self._take(self._unread(Malformed(why, 408)))
        elif waited_s > (IDLE_AT_MOST_S if self.is_let_in else SILENT_AT_MOST_S):
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave(self)
        if self._lingering is not None:
            self._lingering.cancel()
        self._ahead.clear()
        if self.task is None:
            self._peers.discard(self)
        else:
            self.task.add_done_callback(lambda task: self._peers.discard(self))
            self.task.cancel()

    def finish(self) -> None:
        """Close it, after the request that is under way."""
        self.is_last = True
        if self.task is None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        fault = self._feed(self._parser, data)
        if fault is None or self._is_deaf:  # what follows the last request is nobody's
            return
        self._is_deaf = True
        found, self._incoming = self._incoming, None
        if found is not None:
            found.content.end(fault)
        else:
            self._take(self._unread(fault))

    def _unread(self, fault: Malformed) -> HttpRequest:
        """A request of which nothing is known but why it is refused. It is the last one."""
        return HttpRequest(wire=self, content=Body(self), is_kept=False, fault=fault)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._since_s = self._loop.time()

    def on_headers_complete(self) -> None:
        headers, length = self._framed()
        parser, target = self._parser, self._line.decode(*TEXT)
        version, method = parser.get_http_version(), parser.get_method().decode()
        if version not in ("1.0", "1.1"):
            raise Malformed(f"HTTP/{version} is not spoken here", 505)
        if parser.should_upgrade():
            raise Malformed("no other protocol is spoken here", 501)
        if not target.startswith("/") or "#" in target:
            raise Malformed(f"the target {target!r} is no path")
        hosts, is_old = len(headers.getall("Host", ())), version == "1.0"
        if hosts > 1 or not (hosts or is_old):
            raise Malformed("it has to have one header Host")
        if is_old and "Transfer-Encoding" in headers:
            raise Malformed("HTTP/1.0 has no Transfer-Encoding")
        self._incoming = HttpRequest(
            wire=self,
            content=Body(self),
            method=method,
            target=target,
            headers=headers,
            length=length,
            is_old=is_old,
            is_kept=parser.should_keep_alive(),
        )
        self._take(self._incoming)

    def on_body(self, piece: bytes) -> None:
        if self._incoming is not None:
            self._incoming.content.feed(piece)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._incoming is not None:
            self._incoming.content.end()
            self._is_deaf = not self._incoming.is_kept
            self._incoming = None

    def _take(self, request: HttpRequest) -> None:
        self._ahead.append(request)
        if self.task is None:
            self._next()
        elif len(self._ahead) >= self._most_ahead and not self._is_held:
            self._is_held = True
            self.hold()

    @property
    def _most_ahead(self) -> int:
        return _MOST_AHEAD if self.is_let_in else 1

    def _next(self) -> None:
        self.task = self._loop.create_task(self._serve(self._ahead.popleft()))
        self._resume_reading_ahead()

    def _resume_reading_ahead(self) -> None:
        if self._is_held and len(self._ahead) < self._most_ahead:
            self._is_held = False
            self.release()

    async def _serve(self, request: HttpRequest) -> None:
        try:
            if (fault := request.fault) is not None:
                request.send(self._refused(fault.status, str(fault)))
            else:
                await self._handle(request)
            await self.drain()
        except ConnectionError:
            self.transport.abort()  # the client has left
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except Exception:
            _log.exception("a request for %s failed", request.target)
            if request.is_begun:
                self.transport.abort()
            else:
                request.send(self._refused(500, "the fleet's log has the details"))
        self.task = None
        self._since_s = self._loop.time()
        request.content.take()  # what nobody asked for
        if self.transport.is_closing():
            return
        if not request.is_kept or self.is_last:
            self._part()
        elif self._ahead:
            self._next()

    def _part(self) -> None:
        """Close it, not before its client had time to read: what came unread would take the answer
        with it."""
        self._is_deaf = True
        self._ahead.clear()
        self._holds = 1
        self.release()
        with suppress(OSError):  # which it has been for its client
            self.transport.write_eof()
        self._lingering = self._loop.call_later(_LINGER_S, self.transport.abort)
