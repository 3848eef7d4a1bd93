"""Connections to servers, kept for the next request, each with one answer under way."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from functools import partial

import httptools
from multidict import CIMultiDict

from tasks.processes.shortage import OWN_SHORTAGES
from tasks.rollout.http1 import BARE, TEXT, Body, Malformed, Wire, head_of
from tasks.rollout.ownership import EngineListenerCheck, Impostor, UnknownListener, host_and_port

#: Used again for so long: less than uvicorn keeps one, 5 s, so that it does not close one in use.
#: An older one is closed when it would be used, or by its server.
_KEPT_S = 4.0
#: Answers with a status below 200 that may come before the one that counts.
_MOST_INTERIM = 16
#: Say that theirs is empty.
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
#: Connections that are made, one after the other, while those who listen there change.
_MOST_CONNECTS = 3
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Unconnected(Exception):
    """There is no connection to a server, so that nothing of a request has left.

    Args:
        error: why.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error) or type(error).__name__)
        #: This machine has no open file, port or memory left.
        self.is_shortage = isinstance(error, OSError) and error.errno in OWN_SHORTAGES
        #: The same, or nobody can tell who listens: no fault of the server's.
        self.is_own_fault = self.is_shortage or isinstance(error, UnknownListener)
        #: A process that is not of the engine's tree has the server's address.
        self.is_impostor = isinstance(error, Impostor)


class BrokenOff(Exception):
    """The connection was lost before the answer was complete."""


class Upstreams:
    """Asks servers.

    Args:
        connect_s: until a connection is made; None: for as long as its request is waited for.
        listeners: tells whose server a new connection has reached; None: any server is right.
    """

    def __init__(
        self, connect_s: float | None, listeners: EngineListenerCheck | None = None
    ) -> None:
        self._connect_s = connect_s
        self._listeners = listeners
        #: By server, the one that was used last at the end.
        self._idle: defaultdict[str, list[ServedConnection]] = defaultdict(list)

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
        """The answer once its head has come; to be closed. A cancel cuts the connection.

        Args:
            url: `http://host:port`.
            headers: get the Host and what frames the body.
            is_last_try: over a new connection: the server may be closing a kept one just now.

        Raises: Unconnected, BrokenOff; Malformed, when the answer is not HTTP.
        """
        kept = None if is_last_try else self._kept(url)
        connection = kept or await self._connected(url)
        try:
            await connection.ask(method, target, headers, body)
        except BaseException:
            connection.transport.abort()
            raise
        return connection

    def close(self) -> None:
        """Once nothing is asked any more."""
        for connection in [one for kept in self._idle.values() for one in kept]:
            connection.transport.abort()

    def keep(self, connection: ServedConnection) -> None:
        """It is free for another request."""
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle[connection.url].append(connection)

    def forget(self, connection: ServedConnection) -> None:
        """It is lost."""
        if connection in (kept := self._idle[connection.url]):
            kept.remove(connection)

    def _kept(self, url: str) -> ServedConnection | None:
        kept = self._idle[url]
        oldest_s = asyncio.get_running_loop().time() - _KEPT_S
        while kept:
            connection = kept.pop()
            if connection.idle_since_s > oldest_s and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def _connected(self, url: str) -> ServedConnection:
        try:
            async with asyncio.timeout(self._connect_s):
                if self._listeners is None:
                    return await self._opened(url)
                return await self._checked(url, self._listeners)
        except (OSError, Impostor, UnknownListener) as error:
            raise Unconnected(error) from error

    async def _opened(self, url: str) -> ServedConnection:
        host, port = host_and_port(url)
        _, connection = await asyncio.get_running_loop().create_connection(
            partial(ServedConnection, self, url), host, port
        )
        return connection

    async def _checked(self, url: str, listeners: EngineListenerCheck) -> ServedConnection:
        """A connection to a server of the engine's own tree.

        The engine's sockets listened before the connection was made and still do after it. Nobody
        else can have listened at the same address in between.
        """
        for _ in range(_MOST_CONNECTS):
            before = listeners.known(url) or await listeners.verified(url)
            connection = await self._opened(url)
            try:
                after = await listeners.verified(url)
                if before and before <= after:
                    return connection
            except BaseException:
                connection.transport.abort()
                raise
            connection.transport.abort()
        raise ConnectionRefusedError(f"those who listen at {url} have changed meanwhile")


class ServedConnection(Wire):
    """To one server, and the answer on it, of which the head has come."""

    def __init__(self, pool: Upstreams, url: str) -> None:
        super().__init__()
        self._pool, self.url = pool, url
        self._host = url.removeprefix("http://")
        self.idle_since_s = 0.0
        self.status, self.reason = 0, ""
        self.headers: CIMultiDict[str] = CIMultiDict()
        #: Of the body, in bytes; None: it shows at its end.
        self.content_length: int | None = None
        self.content = Body(self)
        #: Resolves once the head has come; None: nothing is asked.
        self._head: asyncio.Future[None] | None = None
        self._has_head = self._is_bodyless = self._ends_with_connection = False
        self._interim = 0
        #: The next request may come.
        self._is_kept = False

    async def ask(self, method: str, target: str, headers: CIMultiDict[str], body: bytes) -> None:
        """See `Upstreams.request`."""
        self._parser = httptools.HttpResponseParser(self)
        self._is_bodyless = method == "HEAD"
        self._has_head, self._interim, self._is_kept = False, 0, False
        self.content, self._head = Body(self), asyncio.get_running_loop().create_future()
        headers["Host"] = self._host
        if body or "Content-Length" in headers or method in _WITH_BODY:
            headers["Content-Length"] = str(len(body))
        self.write(head_of(f"{method} {target} HTTP/1.1", headers) + body)
        await self._head

    def close(self) -> None:
        """Cut what is still to come of the answer; where nothing is, the next request may come."""
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
            self.transport.abort()  # nothing was asked
        elif (fault := self._feed(self._parser, data)) is not None:
            self._is_kept = False
            self._fail(fault)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_kept = False  # more than one answer came

    def on_headers_complete(self) -> None:
        headers, length = self._framed()
        status, is_chunked = self._parser.get_status_code(), "Transfer-Encoding" in headers
        if self._has_head:
            raise Malformed("a second answer came")
        if _CONTROL.search(self._line) is not None:
            raise Malformed("its status line holds a control character")
        if status < 200:
            self._interim += 1
            if status == 101 or length or is_chunked or self._interim > _MOST_INTERIM:
                raise Malformed(f"a {status} that nobody asked for, or too many")
            return
        self._has_head = True
        is_bare = self._is_bodyless or status in BARE
        self._ends_with_connection = not (is_bare or is_chunked) and length is None
        self._is_kept = self._parser.should_keep_alive() and not self._ends_with_connection
        self.status, self.reason, self.headers = status, self._line.decode(*TEXT), headers
        self.content_length = 0 if is_bare else length
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
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        elif not self.content.is_complete:
            self.content.end(error)
