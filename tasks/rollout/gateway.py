"""One HTTP address for all servers of the fleet, and for orders to the fleet itself.

`/muster/...` is the gateway's own; every other path goes to a server that accepts requests.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket

from aiohttp import web

from tasks.rollout.access import Access
from tasks.rollout.forwarding import Forwarder, Limits, refused
from tasks.rollout.orders import PREFIX, FleetFacade, Orders
from tasks.rollout.refusals import nobody

_log = logging.getLogger(__name__)

_STOPPING = "the rollout fleet is being stopped"
#: Connections that clients may have waiting to be taken.
_BACKLOG = 4096
#: Open files that are enough: a request takes one for its client and one for its server.
_OPEN_FILES = 65536
#: For what is cut when the gateway stops, in seconds.
_CUT_WITHIN_S = 2.0


class Gateway:
    """Listens for requests from `start` to `stop`, on the loop that called `start`.

    Args:
        host: other than loopback only with a token.
        port: 0: any free one.
        sock: bound by the caller, instead of host and port; closed by `stop`.
        token: what each request has to bring as `Authorization: Bearer TOKEN`.

    Raises: ValueError, for a host that others reach without a token.
    """

    def __init__(
        self,
        fleet: FleetFacade,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sock: socket.socket | None = None,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        if sock is not None:
            host, port = sock.getsockname()[:2]
        self._access = Access(host, token)
        self._orders = Orders(fleet, self._access)
        self._fleet = fleet
        self._host, self._port, self._sock = host, port, sock
        self._limits = limits or Limits()
        self._listener: asyncio.Server | None = None
        self._connections: web.Server | None = None
        self._forwarder: Forwarder | None = None
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def url(self) -> str:
        """`http://host:port`, known once it has started."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def waiting(self) -> int:
        """Requests for which no server has room."""
        return len(self._forwarder.line) if self._forwarder else 0

    async def start(self) -> None:
        """Returns once it listens.

        Raises: OSError, when its address is taken. RuntimeError, when it was started before.
        """
        if self._forwarder is not None:
            raise RuntimeError("the gateway was started before")
        _allow_connections()
        self._forwarder = Forwarder(
            self._fleet.router,
            self._fleet,
            limits=self._limits,
            is_token_own=self._access.needs_token,
        )
        self._connections = web.Server(
            self._handle,
            handler_cancellation=True,  # a client that leaves ends its request
            access_log=None,
            auto_decompress=False,
            max_line_size=65536,
            max_field_size=65536,
        )
        loop = asyncio.get_running_loop()
        try:
            if self._sock is not None:
                self._listener = await loop.create_server(
                    self._connections, sock=self._sock, backlog=_BACKLOG
                )
            else:
                self._listener = await loop.create_server(
                    self._connections, self._host, self._port, backlog=_BACKLOG
                )
        except BaseException:
            await self._forwarder.close()
            raise
        self._port = self._listener.sockets[0].getsockname()[1]

    async def stop(self, grace_s: float) -> None:
        """Take no more requests, let those under way end within the grace period, cut the rest.

        Returns within the grace period and a few seconds. Safe before `start` and twice.
        """
        forwarder, connections, listener = self._forwarder, self._connections, self._listener
        self._listener = None
        if forwarder is None or connections is None or listener is None:
            return
        forwarder.is_over = _STOPPING
        listener.close()
        connections.pre_shutdown()  # no request is under way there, or no other follows
        try:
            if self._under_way:
                await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            _log.warning("%d requests are cut: the grace period is over", self._under_way)
        finally:
            forwarder.flights.abort_all()
            await self._orders.stop()
            await connections.shutdown(_CUT_WITHIN_S)
            await forwarder.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._forwarder is not None
        path = request.raw_path
        if path.startswith(PREFIX) and path[len(PREFIX) : len(PREFIX) + 1] in ("", "/", "?"):
            return await self._orders.answer(request)
        if (refusal := self._access.refusal(request.headers)) is not None:
            return refused(refusal)
        if self._forwarder.is_over is not None:
            answer = refused(nobody(self._forwarder.is_over, is_draining=True))
            answer.force_close()
            return answer
        self._under_way += 1
        self._idle.clear()
        try:
            return await self._forwarder.forward(request)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()


def _allow_connections() -> None:
    """Raise the limit of open files, often 1,024, as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
