"""HTTP/1.1 on one connection: message heads are checked, and bodies are read in pieces.

The parser is llhttp, through the package `httptools`. It accepts only messages that the standard
allows. If the standard leaves a point open, so that two parsers could read the same bytes
differently, this module refuses the message.

If one end of a connection reads slowly, this module stops reading from the other end.
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

#: Largest size in bytes of a message head: the first line and all headers.
LONGEST_HEAD = 64 * 1024
#: Largest number of headers in a message head.
MOST_HEADERS = 256
#: Bytes that each header occupies in addition to its name and value: a colon, a CR and an LF.
_HEADER_OVERHEAD = 3
#: Seconds that may pass between the first and the last byte of a message head.
HEAD_WITHIN_S = 10.0
#: Seconds that a connection may wait for a request while no request on it has been authorized.
SILENT_AT_MOST_S = 10.0
#: Seconds that a connection may wait for the next request after an authorized request.
IDLE_AT_MOST_S = 600.0
#: Seconds that may pass between two pieces of a request body.
BODY_PIECE_WITHIN_S = 60.0
#: Largest number of bytes of a message body that were received, but that the message handler has
#: not read. Above this limit, the connection receives nothing until the handler has read the bytes.
_MOST_UNREAD = 256 * 1024
#: Largest number of requests that wait on one connection. At this number, the connection reads no
#: further request. Before the first authorized request on the connection, the number is 1.
_MOST_AHEAD = 8
#: Seconds that a client gets to read the end of a response before the gateway cuts the connection.
_LINGER_S = 5.0
#: Encoding and error handler for the text of message heads. With `surrogateescape`, bytes that are
#: not valid UTF-8 survive decoding and encoding unchanged.
TEXT_CODEC = ("utf-8", "surrogateescape")
#: Standard reason phrase of each HTTP status, such as `Not Found` for 404.
_REASONS = {status.value: status.phrase for status in HTTPStatus}
#: Statuses of responses that never have a body, even if their headers announce a body.
#: Source: RFC 9110, section 6.4.1.
STATUSES_WITHOUT_BODY = frozenset({204, 304})

_log = logging.getLogger(__name__)


class Malformed(Exception):
    """The received bytes are not valid HTTP/1.1, or two parsers could understand them differently.

    Args:
        why: Reason why the bytes are refused. The client gets this text.
        status: HTTP status of the error response, if the bytes are a request.
    """

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


def encode_head(first_line: str, headers: CIMultiDict[str]) -> bytes:
    """Return the bytes of an HTTP message head, with the empty line that ends the head.

    Args:
        first_line: Request line or status line of the message, without a line break.
        headers: Headers of the message, written in their order.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{first_line}\r\n{lines}\r\n".encode(*TEXT_CODEC)


def encode_chunk(piece: bytes) -> bytes:
    """Return a piece of a body as one chunk of the chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


#: The bytes that end a body in the chunked transfer coding.
LAST_CHUNK = b"0\r\n\r\n"


class Body:
    """The received bytes of one message body.

    If more than 256 KiB are unread, the connection stops reading from the sender until the handler
    of the message has read these bytes.
    """

    __slots__ = ("_error", "_is_held", "_pieces", "_reader", "_size", "_wire", "is_complete")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_held = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        #: True if the whole body has been received.
        self.is_complete = False

    def feed(self, piece: bytes) -> None:
        """Add a received piece to the unread bytes of the body."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > _MOST_UNREAD and not self._is_held:
            self._is_held = True
            self._wire.hold_reading()
        self._wake_reader()

    def end(self, error: Exception | None = None) -> None:
        """Mark the end of the body.

        Args:
            error: Reason why the rest of the body will not arrive. None if the body is complete.
        """
        self._error = error
        self.is_complete = error is None
        self._wake_reader()

    @property
    def is_waiting(self) -> bool:
        """True if the body is incomplete and has no unread bytes."""
        return not (self._pieces or self.is_complete)

    async def read_available(self) -> bytes:
        """Wait for bytes of the body and return all unread bytes, or empty bytes at the end of the
        body.

        Raises:
            Exception: The error that was passed to the method `end`, because the rest of the body
                will not arrive. All bytes that arrived before the error are returned first.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.is_complete:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self.take_unread()

    def take_unread(self) -> bytes:
        """Return the unread bytes of the body without waiting, and mark the bytes as read."""
        pieces = self._pieces
        unread = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        self._size = 0
        if self._is_held:
            self._is_held = False
            self._wire.release_reading()
        return unread

    async def read_up_to(
        self, most: int, *, piece_within_s: float | None = None
    ) -> tuple[bytes, bool]:
        """Read the body to its end. Stop earlier if more than `most` bytes were read.

        Args:
            most: Largest size in bytes of a body that is read as a whole.
            piece_within_s: Seconds to wait for each piece of the body. None to wait without limit.

        Returns:
            The bytes that were read, and True if they are the whole body.

        Raises:
            TimeoutError: A piece did not arrive in time.
            Exception: The rest of the body will not arrive. The exception is the error that was
                passed to the method `end`.
        """
        pieces: list[bytes] = []
        size = 0
        while not self.is_complete and size <= most:
            if self.is_waiting and self._error is None:
                async with asyncio.timeout(piece_within_s):
                    pieces.append(await self.read_available())
            else:
                pieces.append(await self.read_available())
            size += len(pieces[-1])
        if size <= most:
            pieces.append(self.take_unread())
            size += len(pieces[-1])
        return b"".join(pieces), size <= most

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Wire(asyncio.Protocol):
    """Base class of the server end and the client end of an HTTP connection."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        #: Number of calls of `hold_reading` minus the number of calls of `release_reading`.
        self._holds = 0
        self._may_write = asyncio.Event()
        self._may_write.set()
        #: True while the head of an HTTP message is being received.
        self._is_in_head = False
        #: Path and query of the request that is being received, or reason phrase of the response
        #: that is being received.
        self._line = b""
        self._headers: list[tuple[bytes, bytes]] = []
        #: Size in bytes of the parsed part of the current message head.
        self._parsed_head_bytes = 0
        #: Number of received bytes of the current message head, parsed or not.
        self._received_head_bytes = 0
        #: Number of complete message heads that this connection has received.
        self._complete_heads = 0
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
        """Wait until the connection accepts more data to write.

        Raises:
            ConnectionResetError: The connection is closed.
        """
        if not self._may_write.is_set():
            await self._may_write.wait()
        if self.transport.is_closing():
            raise ConnectionResetError("the connection is closed")

    def write(self, data: bytes) -> None:
        """Send data to the other end of the connection.

        If the connection is closed, the data is discarded, and the next call of `drain` raises
        `ConnectionResetError`.
        """
        if not self.transport.is_closing():
            self.transport.write(data)

    def hold_reading(self) -> None:
        """Stop reading from the connection.

        Reading resumes when `release_reading` has been called as often as this method.
        """
        self._holds += 1
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def release_reading(self) -> None:
        """Undo one call of `hold_reading`. Reading resumes after the last call has been undone."""
        self._holds -= 1
        if not self._holds and not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse(self, parser: Any, data: bytes) -> Malformed | None:
        """Pass received bytes to the HTTP parser of the connection.

        Args:
            parser: A parser of `httptools`, which calls the `on_...` methods of this class.
            data: The received bytes.

        Returns:
            The error if the bytes are malformed, or None.
        """
        heads_before = self._complete_heads
        begins_with_head = self._is_in_head or not self._is_in_message
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # The parser replaces an exception of a callback by its own exception. The exception of
            # the callback is then the context of the parser's exception.
            raised_by_callback = error.__context__
            if isinstance(raised_by_callback, Malformed):
                return raised_by_callback
            return Malformed(str(error))
        # The parser reports a header only when its line is complete. So count the received bytes,
        # to limit the size of a head with an endless line. Do not count `data` if it also contains
        # bytes of an earlier message.
        if self._is_in_head and begins_with_head and self._complete_heads == heads_before:
            self._received_head_bytes += len(data)
            if self._received_head_bytes > LONGEST_HEAD:
                return _make_head_size_error()
        return None

    def on_message_begin(self) -> None:
        self._is_in_message = True
        self._is_in_head = True
        self._line = b""
        self._headers = []
        self._parsed_head_bytes = 0
        self._received_head_bytes = 0

    def on_message_complete(self) -> None:
        self._is_in_message = False

    def on_url(self, piece: bytes) -> None:
        self._parsed_head_bytes += len(piece)
        if self._parsed_head_bytes > LONGEST_HEAD:
            raise _make_head_size_error()
        self._line += piece

    on_status = on_url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed_head_bytes += len(name) + len(value) + _HEADER_OVERHEAD
        if self._parsed_head_bytes > LONGEST_HEAD or len(self._headers) >= MOST_HEADERS:
            raise _make_head_size_error()
        # The parser also reports trailers, which follow a chunked body. Trailers are discarded.
        if self._is_in_head:
            self._headers.append((name, value))

    def _finish_head(self) -> tuple[CIMultiDict[str], int | None]:
        """Mark the head of the current message as complete.

        Returns:
            The headers, and the value of the header `Content-Length` in bytes. The second value is
            None if this header is missing.

        Raises:
            Malformed: The body has a transfer coding other than `chunked`.
        """
        self._is_in_head = False
        self._complete_heads += 1
        encoding, errors = TEXT_CODEC
        headers = CIMultiDict(
            [
                (name.decode(encoding, errors), value.strip(b" \t").decode(encoding, errors))
                for name, value in self._headers
            ]
        )
        if "Transfer-Encoding" in headers and headers["Transfer-Encoding"].lower() != "chunked":
            raise Malformed("the header Transfer-Encoding may only be `chunked`", 501)
        length = headers.get("Content-Length")
        return headers, None if length is None else int(length)


def _make_head_size_error() -> Malformed:
    why = (
        f"the head of the HTTP message has more than {LONGEST_HEAD} bytes or {MOST_HEADERS} headers"
    )
    return Malformed(why, 431)


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete HTTP response, with its whole body in memory."""

    #: HTTP status, such as 200.
    status: int
    #: Body of the response; empty if the response has no body.
    body: bytes = b""
    #: Headers of the response.
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    #: Reason phrase of the status line, or None for the standard phrase of the status.
    reason: str | None = None

    @property
    def text(self) -> str:
        """Body of the response, decoded as UTF-8."""
        return self.body.decode()


@dataclass(slots=True, eq=False, kw_only=True)
class HttpRequest:
    """One HTTP request of a client, with the methods that send the response to the client."""

    #: Connection from the client. The response is sent on the same connection.
    wire: ServerConnection
    #: Body of the request, which may still be arriving.
    content: Body
    #: HTTP method in upper case, such as `POST`.
    method: str = "GET"
    #: Path and query of the requested URL, such as `/v1/models?limit=1`.
    target: str = "/"
    #: Headers of the request.
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    #: Size of the request body in bytes, or None if the head does not state the size.
    length: int | None = None
    #: True if the client speaks HTTP/1.0 instead of HTTP/1.1.
    is_http_1_0: bool = False
    #: True if the connection stays open for another request after the response.
    is_kept: bool = True
    #: Error in the request's head, or None. A request with an error is refused.
    fault: Malformed | None = None
    #: True once the head of a response has been prepared or sent.
    is_begun: bool = False
    _is_chunked: bool = False
    #: True if the end of the response is marked only by the end of the connection.
    _is_open_ended: bool = False
    #: Encoded head of the response. Empty after the head has been sent.
    _unsent_head: bytes = b""

    async def read_up_to(self, most: int) -> tuple[bytes, bool]:
        """Read the request body to its end. Stop earlier if more than `most` bytes were read.

        A client may wait for the interim response 100 before sending the body. If so, this response
        is sent first.

        Args:
            most: Largest size in bytes of a body that is read as a whole.

        Returns:
            The bytes that were read, and True if they are the whole body.

        Raises:
            Malformed: The body is malformed, or its next piece did not arrive in time.
        """
        if (self.length or 0) > most:
            return b"", False
        expected = self.headers.pop("Expect", "").lower()
        if expected == "100-continue" and not self.is_http_1_0 and self.content.is_waiting:
            self.wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            return await self.content.read_up_to(most, piece_within_s=BODY_PIECE_WITHIN_S)
        except TimeoutError:
            why = (
                f"the next part of the request body did not arrive within {BODY_PIECE_WITHIN_S:g} s"
            )
            raise Malformed(why, 408) from None

    def send(self, answer: Answer) -> int:
        """Send a complete response and return the HTTP status of the response."""
        has_body = self.method != "HEAD" and answer.status not in STATUSES_WITHOUT_BODY
        if has_body:
            answer.headers["Content-Length"] = str(len(answer.body))
        self._prepare_head(answer.status, answer.reason, answer.headers)
        self._send_after_head(answer.body if has_body else b"")
        return answer.status

    def begin(self, status: int, reason: str | None, headers: CIMultiDict[str]) -> None:
        """Prepare a response whose body is sent in pieces by `write` and finished by `end`.

        The head is sent together with the first piece of the body, or earlier by `flush`.

        Args:
            status: HTTP status of the response.
            reason: Reason phrase of the status line, or None for the standard phrase.
            headers: Headers of the response. The headers that frame the body are added to them.
        """
        if "Content-Length" not in headers:
            self._is_chunked = not self.is_http_1_0
            # The length of the body is unknown, so the body is sent in chunks. HTTP/1.0 has no
            # chunks: there, the end of the connection marks the end of the body.
            self._is_open_ended = self.is_http_1_0
            self.is_kept &= self._is_chunked
            if self._is_chunked:
                headers["Transfer-Encoding"] = "chunked"
        self._prepare_head(status, reason, headers)

    def flush(self) -> None:
        """Send the head of the response now, if the head has not been sent yet."""
        self._send_after_head(b"")

    async def write(self, piece: bytes) -> None:
        """Send a piece of the response body and wait until the connection accepts more data.

        Raises:
            ConnectionResetError: The client has closed the connection.
        """
        self._send_after_head(encode_chunk(piece) if self._is_chunked else piece)
        await self.wire.drain()

    def end(self, last: bytes = b"") -> None:
        """Send the last piece of a response body, and mark the end of the response.

        Args:
            last: The last piece; may be empty.
        """
        if self._is_chunked:
            last = (encode_chunk(last) if last else b"") + LAST_CHUNK
        self._send_after_head(last)

    async def cut(self, words: bytes = b"") -> None:
        """Close the connection so that the client can see that the response is incomplete.

        Args:
            words: Last piece of the response body, which is sent before the connection is closed.
        """
        transport = self.wire.transport
        try:
            self.flush()
            if words:
                await self.write(words)
        finally:
            if self._is_open_ended:
                # Make the kernel reset the connection, with a linger time of 0. To the client, a
                # normal close would look like the regular end of the response.
                connection: socket.socket = transport.get_extra_info("socket")
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                transport.abort()
            else:
                transport.close()
                asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)

    def _prepare_head(self, status: int, reason: str | None, headers: CIMultiDict[str]) -> None:
        # Close the connection after this response if the request body has not arrived completely.
        # Otherwise, the rest of the body would be parsed as the next request.
        self.is_kept &= self.content.is_complete and not self.wire.is_finishing
        if not self.is_kept:
            headers["Connection"] = "close"
        elif self.is_http_1_0:
            headers["Connection"] = "keep-alive"
        phrase = _REASONS.get(status, "") if reason is None else reason
        self._unsent_head = encode_head(f"HTTP/1.1 {status} {phrase}", headers)
        self.is_begun = True

    def _send_after_head(self, data: bytes) -> None:
        """Send bytes of a response body. If the response's head is still unsent, send it first."""
        if self._unsent_head or data:
            self.wire.write(self._unsent_head + data)
        self._unsent_head = b""


class ServerConnection(Wire):
    """The server end of a client's connection.

    Requests are answered one after the other, in the order in which the client has sent them. If
    the connection is lost, the task of the current request is cancelled.

    Args:
        handle: Coroutine function that is called for each request, and answers the request.
        make_refusal: Function that makes the response to a refused request from an HTTP status
            and a reason.
        peers: Set of all connections that are open or have a running task. The new connection
            adds itself to the set, and removes itself at its end.
        enter: Called when the connection is opened. The function sets the attributes that identify
            the client, and returns False to close the connection.
        leave: Called when the connection is closed, even if `enter` has returned False.
    """

    def __init__(
        self,
        handle: Callable[[HttpRequest], Awaitable[None]],
        make_refusal: Callable[[int, str], Answer],
        peers: set[ServerConnection],
        enter: Callable[[ServerConnection], bool],
        leave: Callable[[ServerConnection], None],
    ) -> None:
        super().__init__()
        self._handle = handle
        self._make_refusal = make_refusal
        self._peers = peers
        self._enter = enter
        self._leave = leave
        self._parser = httptools.HttpRequestParser(self)
        #: Requests that were received and wait until the current request is answered.
        self._queued_requests: deque[HttpRequest] = deque()
        #: Request whose body is being received, or None.
        self._incoming_request: HttpRequest | None = None
        #: True if all further received bytes are discarded.
        self._ignores_input = False
        self._is_held = False
        #: True if the connection is closed after the current request.
        self.is_finishing = False
        #: Task that answers the current request, or None.
        self.task: asyncio.Task[None] | None = None
        #: Key under which the connections of the client are counted: a user of this machine, or a
        #: network address.
        self.client = ""
        #: True if the client is a process of root or of the same user as this process.
        self.is_own = False
        #: Reason why the user who opened the connection is unknown. Empty if the user is known.
        self.unknown_because = ""
        #: True if `is_own` is True, or if a request on the connection was authorized.
        self.is_let_in = False
        #: Start of the current wait, in seconds of the event loop's clock. A wait starts when the
        #: connection opens, when a request has been answered, and when a request begins to arrive.
        self._waiting_since_s = 0.0
        #: Timer that cuts the connection some seconds after the last response, or None.
        self._abort_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._peers.add(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._loop = asyncio.get_running_loop()
        self._waiting_since_s = self._loop.time()
        if self._enter(self):
            return
        if self.is_let_in:
            why = "too many connections are open: send fewer requests at once"
            self._queue_request(self._make_rejected_request(Malformed(why, 503)))
            self._ignores_input = True
        else:
            self.transport.abort()

    def let_in(self) -> None:
        """Record that a request was authorized, so that the connection reads further requests."""
        self.is_let_in = True
        self._resume_reading_ahead()

    def expire(self, now_s: float) -> None:
        """Close the connection if no complete message head has arrived in time.

        Args:
            now_s: Current time by the event loop's clock, in seconds.
        """
        if self.task is not None or self._ignores_input or self.transport.is_closing():
            return
        waited_s = now_s - self._waiting_since_s
        if self._is_in_head:
            if waited_s > HEAD_WITHIN_S:
                self._ignores_input = True
                why = f"the head of the request was not complete after {HEAD_WITHIN_S:g} s"
                self._queue_request(self._make_rejected_request(Malformed(why, 408)))
        elif waited_s > (IDLE_AT_MOST_S if self.is_let_in else SILENT_AT_MOST_S):
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave(self)
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._queued_requests.clear()
        if self.task is None:
            self._peers.discard(self)
        else:
            self.task.add_done_callback(lambda task: self._peers.discard(self))
            self.task.cancel()

    def finish(self) -> None:
        """Close the connection after the current request, or at once if no request is running."""
        self.is_finishing = True
        if self.task is None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        fault = self._parse(self._parser, data)
        # If `data` contains the end of the last request on this connection, `_parse` has set
        # `_ignores_input`. Later bytes are ignored, so a fault in these bytes is ignored, too.
        if fault is None or self._ignores_input:
            return
        self._ignores_input = True
        request = self._incoming_request
        self._incoming_request = None
        if request is not None:
            request.content.end(fault)
        else:
            self._queue_request(self._make_rejected_request(fault))

    def _make_rejected_request(self, fault: Malformed) -> HttpRequest:
        """Return a request that takes the place of a rejected request in the queue of requests.

        After the responses to the earlier requests, the client gets an error response for the
        rejected request, and the connection is closed.
        """
        return HttpRequest(wire=self, content=Body(self), is_kept=False, fault=fault)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._waiting_since_s = self._loop.time()

    def on_headers_complete(self) -> None:
        headers, length = self._finish_head()
        parser = self._parser
        target = self._line.decode(*TEXT_CODEC)
        version = parser.get_http_version()
        method = parser.get_method().decode()
        if version not in ("1.0", "1.1"):
            raise Malformed(f"HTTP/{version} is not supported: use HTTP/1.1", 505)
        if parser.should_upgrade():
            raise Malformed("protocol upgrades are not supported", 501)
        if not target.startswith("/") or "#" in target:
            raise Malformed(
                f"the target {target!r} of the request is not a path that begins with /"
            )
        host_count = len(headers.getall("Host", ()))
        is_http_1_0 = version == "1.0"
        if host_count > 1 or not (host_count or is_http_1_0):
            raise Malformed("the request must have exactly one header Host")
        if is_http_1_0 and "Transfer-Encoding" in headers:
            raise Malformed("HTTP/1.0 does not allow the header Transfer-Encoding")
        self._incoming_request = HttpRequest(
            wire=self,
            content=Body(self),
            method=method,
            target=target,
            headers=headers,
            length=length,
            is_http_1_0=is_http_1_0,
            is_kept=parser.should_keep_alive(),
        )
        self._queue_request(self._incoming_request)

    def on_body(self, piece: bytes) -> None:
        if self._incoming_request is not None:
            self._incoming_request.content.feed(piece)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._incoming_request is not None:
            self._incoming_request.content.end()
            self._ignores_input = not self._incoming_request.is_kept
            self._incoming_request = None

    def _queue_request(self, request: HttpRequest) -> None:
        """Queue a request, and start to answer it if no other request is being answered."""
        self._queued_requests.append(request)
        if self.task is None:
            self._start_next_request()
        elif len(self._queued_requests) >= self._max_queued and not self._is_held:
            self._is_held = True
            self.hold_reading()

    @property
    def _max_queued(self) -> int:
        """Number of queued requests at which the connection stops reading."""
        return _MOST_AHEAD if self.is_let_in else 1

    def _start_next_request(self) -> None:
        self.task = self._loop.create_task(self._serve(self._queued_requests.popleft()))
        self._resume_reading_ahead()

    def _resume_reading_ahead(self) -> None:
        if self._is_held and len(self._queued_requests) < self._max_queued:
            self._is_held = False
            self.release_reading()

    async def _serve(self, request: HttpRequest) -> None:
        """Answer a request, then start the next queued request or close the connection."""
        try:
            if (fault := request.fault) is not None:
                request.send(self._make_refusal(fault.status, str(fault)))
            else:
                await self._handle(request)
            await self.drain()
        except ConnectionError:
            # The client has closed the connection, so no response can be sent. Free the connection.
            self.transport.abort()
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except Exception:
            _log.exception("a request for %s failed", request.target)
            if request.is_begun:
                self.transport.abort()
            else:
                request.send(
                    self._make_refusal(
                        500, "the request failed. The log of the component rollout has the details"
                    )
                )
        self.task = None
        self._waiting_since_s = self._loop.time()
        # Discard the unread part of the request body. Otherwise, the connection would not read the
        # next request while much of this body is unread.
        request.content.take_unread()
        if self.transport.is_closing():
            return
        if not request.is_kept or self.is_finishing:
            self._close_after_response()
        elif self._queued_requests:
            self._start_next_request()

    def _close_after_response(self) -> None:
        """Close the sending side of the connection, and cut the connection after 5 seconds.

        Until then, the connection reads and discards input. Unread input would make the kernel
        reset the connection, and the client could lose the response.
        """
        self._ignores_input = True
        self._queued_requests.clear()
        # `hold_reading` may have been called several times. Undo all these calls at once, so that
        # reading resumes.
        self._holds = 1
        self.release_reading()
        with suppress(OSError):  # This call fails if the client has closed the connection.
            self.transport.write_eof()
        self._abort_timer = self._loop.call_later(_LINGER_S, self.transport.abort)
