"""HTTP client for the inference servers of a fleet.

A connection carries one request at a time. An unused connection is kept for a few seconds for the
next request to the same server.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from functools import partial

import httptools
from multidict import CIMultiDict

from tasks.processes.shortage import OWN_SHORTAGES
from tasks.rollout.http1 import (
    STATUSES_WITHOUT_BODY,
    TEXT_CODEC,
    Body,
    Malformed,
    Wire,
    encode_head,
)
from tasks.rollout.ownership import EngineListenerCheck, Impostor, UnknownListener, host_and_port

#: Seconds after which an unused connection is no longer used for requests. The limit is below 5 s,
#: because Uvicorn, the HTTP server in most inference engines, closes unused connections after 5 s.
_KEPT_S = 4.0
#: Largest number of interim responses (HTTP status below 200) that may precede a response.
_MOST_INTERIM = 16
#: HTTP methods whose requests have the header `Content-Length` even if the body is empty.
_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
#: Largest number of attempts to open a connection to a server. An attempt is repeated only if
#: the sockets that listen at the server's address changed during the attempt.
_MOST_CONNECTS = 3
#: Control characters, which must not occur in a status line.
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Unconnected(Exception):
    """No connection to the server could be opened, so no part of the request was sent.

    Args:
        error: The error of the connection attempt.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error) or type(error).__name__)
        #: True if the connection failed because this machine had no file descriptor, port or memory
        #: for it.
        self.is_shortage = isinstance(error, OSError) and error.errno in OWN_SHORTAGES
        #: True if the server did not cause the error. Either this machine lacked resources, or the
        #: process that listens at the server's address could not be identified.
        self.is_own_fault = self.is_shortage or isinstance(error, UnknownListener)
        #: True if a process outside the engine's process tree listens at the server's address.
        self.is_impostor = isinstance(error, Impostor)


class BrokenOff(Exception):
    """The connection to the server was lost before the response was complete."""


class Upstreams:
    """Sends requests to the servers of a fleet, and keeps unused connections for later requests.

    Args:
        connect_s: Seconds that opening a connection may take, or None for no limit.
        listeners: Object that checks whether a process of the engine has accepted a new
            connection. None to skip this check.
    """

    def __init__(
        self, connect_s: float | None, listeners: EngineListenerCheck | None = None
    ) -> None:
        self._connect_s = connect_s
        self._listeners = listeners
        #: Mapping from the URL of a server to the unused connections. The most recently used
        #: connection is the last.
        self._idle_connections: defaultdict[str, list[ServedConnection]] = defaultdict(list)

    async def request(
        self,
        method: str,
        url: str,
        target: str,
        *,
        headers: CIMultiDict[str],
        body: bytes = b"",
        is_last_try: bool = False,
    ) -> ServedConnection:
        """Send a request, wait for the head of the response, and return the connection.

        The caller must close the returned connection. If the call is cancelled, the connection is
        cut.

        Args:
            method: HTTP method in upper case.
            url: Address of the server, as `http://host:port`.
            target: Path and query of the request.
            headers: Headers of the request. `Host` and `Content-Length` are added to them.
            body: Body of the request.
            is_last_try: True to open a new connection. An unused connection might fail, because the
                server may be closing it at this moment.

        Raises:
            Unconnected: No connection could be opened, and nothing was sent.
            BrokenOff: The connection was lost before the head of the response was complete.
            Malformed: The response is not valid HTTP.
        """
        kept_connection = None if is_last_try else self._take_kept_connection(url)
        connection = kept_connection or await self._connect(url)
        try:
            await connection.ask(method, target, headers, body)
        except BaseException:
            connection.transport.abort()
            raise
        return connection

    def close(self) -> None:
        """Cut all unused connections. Call this method only when no request is running."""
        for connections in list(self._idle_connections.values()):
            for connection in list(connections):
                connection.transport.abort()

    def keep(self, connection: ServedConnection) -> None:
        """Store an unused connection for the next request to its server."""
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle_connections[connection.url].append(connection)

    def forget(self, connection: ServedConnection) -> None:
        """Remove a lost connection from the unused connections."""
        idle_connections = self._idle_connections[connection.url]
        if connection in idle_connections:
            idle_connections.remove(connection)

    def _take_kept_connection(self, url: str) -> ServedConnection | None:
        """Return an unused connection to a server, or None if there is none.

        Connections that have been unused for too long are cut.
        """
        idle_connections = self._idle_connections[url]
        oldest_s = asyncio.get_running_loop().time() - _KEPT_S
        while idle_connections:
            connection = idle_connections.pop()
            if connection.idle_since_s > oldest_s and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def _connect(self, url: str) -> ServedConnection:
        """Open a connection to a server, and return it.

        If a listener check was passed to the constructor, a process of the server's engine must
        accept the connection.

        Raises:
            Unconnected: No connection was opened.
        """
        try:
            async with asyncio.timeout(self._connect_s):
                if self._listeners is None:
                    return await self._open_connection(url)
                return await self._open_checked_connection(url, self._listeners)
        except (OSError, Impostor, UnknownListener) as error:
            raise Unconnected(error) from error

    async def _open_connection(self, url: str) -> ServedConnection:
        host, port = host_and_port(url)
        _, connection = await asyncio.get_running_loop().create_connection(
            partial(ServedConnection, self, url), host, port
        )
        return connection

    async def _open_checked_connection(
        self, url: str, listeners: EngineListenerCheck
    ) -> ServedConnection:
        """Open a connection that a process of the engine's own process tree has accepted.

        The engine's listening sockets are listed before and after the connection is opened. If all
        sockets of the first list are also in the second list, no other process can have listened in
        between.

        Raises:
            ConnectionRefusedError: The listening sockets changed during each of three attempts.
            Impostor: A process outside the engine's process tree listens at the address.
            UnknownListener: The listening processes could not be identified.
        """
        for _ in range(_MOST_CONNECTS):
            sockets_before = listeners.known(url) or await listeners.verified(url)
            connection = await self._open_connection(url)
            try:
                sockets_after = await listeners.verified(url)
                if sockets_before and sockets_before <= sockets_after:
                    return connection
            except BaseException:
                connection.transport.abort()
                raise
            connection.transport.abort()
        raise ConnectionRefusedError(
            f"another process began to listen at {url} while the gateway connected"
        )


class ServedConnection(Wire):
    """A connection to one server, with the response to the latest request on the connection.

    Args:
        pool: The `Upstreams` that stores the connection after a complete response.
        url: Address of the server, as `http://host:port`.
    """

    def __init__(self, pool: Upstreams, url: str) -> None:
        super().__init__()
        self._pool = pool
        self.url = url
        self._host = url.removeprefix("http://")
        #: Time at which the connection became unused, by the event loop's clock in seconds.
        self.idle_since_s = 0.0
        #: HTTP status of the response.
        self.status = 0
        #: Reason phrase of the response's status line.
        self.reason = ""
        #: Headers of the response.
        self.headers: CIMultiDict[str] = CIMultiDict()
        #: Size of the response body in bytes, or None if the head does not state the size.
        self.content_length: int | None = None
        #: Body of the response, which may still be arriving.
        self.content = Body(self)
        #: Future that resolves when the response's head is complete. None if no request runs.
        self._head: asyncio.Future[None] | None = None
        #: True if the response's head is complete. Heads of interim responses do not count.
        self._has_head = False
        #: True if the request is a HEAD request, whose response has no body.
        self._is_bodyless = False
        #: True if the server marks the end of the response by closing the connection.
        self._ends_with_connection = False
        #: Number of interim responses that have come before the response.
        self._interim_count = 0
        #: True if the connection can carry another request after the response.
        self._is_kept = False

    async def ask(self, method: str, target: str, headers: CIMultiDict[str], body: bytes) -> None:
        """Send a request and wait for the head of the response.

        Args:
            method: HTTP method in upper case.
            target: Path and query of the request.
            headers: Headers of the request. `Host` and `Content-Length` are added to them.
            body: Body of the request; may be empty.

        Raises:
            BrokenOff: The connection was lost before the head was complete.
            Malformed: The response is not valid HTTP.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._is_bodyless = method == "HEAD"
        self._has_head = False
        self._interim_count = 0
        self._is_kept = False
        self.content = Body(self)
        self._head = asyncio.get_running_loop().create_future()
        headers["Host"] = self._host
        if body or "Content-Length" in headers or method in _METHODS_WITH_BODY:
            headers["Content-Length"] = str(len(body))
        self.write(encode_head(f"{method} {target} HTTP/1.1", headers) + body)
        await self._head

    def close(self) -> None:
        """Keep the connection for the next request, or cut it if the response is incomplete."""
        if self._is_kept and self.content.is_complete and not self._holds:
            self._pool.keep(self)
        else:
            self.transport.abort()
        self._head = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._head is None:
            self._pool.forget(self)
        elif exc is None and self._ends_with_connection and self._has_head:
            self.content.end()
        else:
            self._fail(BrokenOff(str(exc or "the server has closed the connection")))

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            # The server sent data without a request, so the connection cannot be used again.
            self.transport.abort()
        elif (fault := self._parse(self._parser, data)) is not None:
            self._is_kept = False
            self._fail(fault)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # The connection cannot be reused during a response. If the response is valid and the server
        # keeps the connection open, `on_headers_complete` sets `_is_kept` to True again.
        self._is_kept = False

    def on_headers_complete(self) -> None:
        headers, length = self._finish_head()
        status = self._parser.get_status_code()
        is_chunked = "Transfer-Encoding" in headers
        if self._has_head:
            raise Malformed("the server sent a second response to one request")
        if _CONTROL.search(self._line) is not None:
            raise Malformed("its status line contains a control character")
        if status < 200:
            self._interim_count += 1
            if status == 101 or length or is_chunked or self._interim_count > _MOST_INTERIM:
                raise Malformed(
                    f"the server sent an unexpected interim response with status {status}, or too "
                    "many interim responses"
                )
            return
        self._has_head = True
        has_no_body = self._is_bodyless or status in STATUSES_WITHOUT_BODY
        self._ends_with_connection = not (has_no_body or is_chunked) and length is None
        self._is_kept = self._parser.should_keep_alive() and not self._ends_with_connection
        self.status = status
        self.reason = self._line.decode(*TEXT_CODEC)
        self.headers = headers
        self.content_length = 0 if has_no_body else length
        if self._is_bodyless:
            self.content.end()
        if self._head is not None and not self._head.done():
            self._head.set_result(None)

    def on_body(self, piece: bytes) -> None:
        if self._is_bodyless:
            self._is_kept = False
        elif self._has_head:
            self.content.feed(piece)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._has_head:
            self.content.end()

    def _fail(self, error: Exception) -> None:
        """Raise an error in the task that waits for the response or reads its body."""
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        elif not self.content.is_complete:
            self.content.end(error)
