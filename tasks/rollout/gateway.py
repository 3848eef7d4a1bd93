"""One HTTP address for all servers of the fleet, and for orders to the fleet itself.

`/muster/...` is the gateway's own: the orders of the run's programs, each carried out to its end
once it was taken, even if its client leaves before. Every other path goes to a server that accepts
requests. Everybody on the gateway's machine may use it, elsewhere whoever has the token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import resource
import socket
from collections.abc import Coroutine, Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.rollout.forwarding import (
    Forwarder,
    Refusal,
    RequestLimits,
    RequestWitness,
    bad,
    nobody,
    refused,
)
from tasks.rollout.router import Router
from tasks.rollout.topology import Ask
from tasks.spec.errors import MusterError

_SCHEME = "bearer "


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name; any other name counts as elsewhere."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare.lower() == "localhost":
        return True
    try:
        return ip_address(bare).is_loopback
    except ValueError:
        return False


class Access:
    """Judges requests by their headers.

    Args:
        host: where the gateway listens.
        token: what each request has to bring, as OpenAI's clients do with their `api_key`;
            None: nothing, which is refused unless `host` is loopback.

    Raises: ValueError, for a gateway that everybody could use, or a token that no header can hold.
    """

    def __init__(self, host: str, token: str | None) -> None:
        if token is None and not is_loopback(host):
            raise ValueError(
                f"a gateway on {host} can be reached from other machines, so it needs a token; "
                "give it one, or let it listen on 127.0.0.1"
            )
        if token is not None and (not token or not token.isascii() or not token.isprintable()):
            raise ValueError("the gateway's token must be printable ASCII and not empty")
        self._token = None if token is None else token.encode()

    @property
    def needs_token(self) -> bool:
        return self._token is not None

    def refusal(self, headers: Mapping[str, str], *, is_order: bool = False) -> Refusal | None:
        """Why a request with these headers is refused; None: it is not.

        Args:
            is_order: it would change the fleet. Without a token, a browser on this machine that
                shows a foreign page must not be able to send it: neither across origins nor by a
                foreign name that resolves to this machine.
        """
        if self._token is not None:
            return None if self._has_token(headers) else _UNAUTHORIZED
        if is_order:
            for name, found in (
                ("Origin", _host_of(headers.get("Origin", "http://localhost"))),
                ("Host", _host_of("//" + headers.get("Host", "localhost"))),
            ):
                if not is_loopback(found):
                    return _foreign(name, found)
        return None

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        assert self._token is not None
        found = headers.get("Authorization", "")
        if found[: len(_SCHEME)].lower() != _SCHEME:
            return False
        given = found[len(_SCHEME) :].strip().encode(errors="surrogateescape")
        return hmac.compare_digest(given, self._token)


_UNAUTHORIZED = Refusal(
    status=401,
    type="unauthorized",
    message="this gateway needs its token: send the header `Authorization: Bearer TOKEN`, "
    "with an OpenAI client as its api_key",
)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _foreign(name: str, found: str) -> Refusal:
    return Refusal(
        status=403,
        type="forbidden",
        message=f"the header {name} names {found or 'nobody'}: without a token, orders are taken "
        "from this machine only; use the gateway's URL with 127.0.0.1, or give it a token",
    )


_log = logging.getLogger(__name__)

PREFIX = "/muster"
_BODY_BYTES = 1024 * 1024


class FleetFacade(RequestWitness, Protocol):
    """What the gateway needs of the fleet. Each answer is JSON."""

    @property
    def router(self) -> Router: ...
    def snapshot(self) -> dict[str, Any]: ...
    async def barrier(self) -> dict[str, Any]: ...
    async def restore(self) -> dict[str, Any]: ...
    def weights(
        self,
        version: int,
        ranks: tuple[int, ...] | None = None,
        epochs: Mapping[int, int] | None = None,
    ) -> dict[str, Any]: ...
    async def drain(self, timeout_s: float) -> dict[str, Any]: ...
    async def broadcast(self, ask: Ask, timeout_s: float) -> dict[Any, Any]: ...


class _Order(BaseModel):
    """A body. Unknown keys are refused: a misspelt one would order something else."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    async def obey(self, fleet: FleetFacade) -> Mapping[Any, Any]:
        raise NotImplementedError


class _Barrier(_Order):
    async def obey(self, fleet: FleetFacade) -> Mapping[Any, Any]:
        return await fleet.barrier()


class _Restore(_Order):
    async def obey(self, fleet: FleetFacade) -> Mapping[Any, Any]:
        return await fleet.restore()


class _Weights(_Order):
    version: int = Field(ge=0)
    ranks: tuple[int, ...] | None = None
    epochs: dict[int, int] | None = None

    async def obey(self, fleet: FleetFacade) -> Mapping[Any, Any]:
        return fleet.weights(self.version, self.ranks, self.epochs)


class _Drain(_Order):
    timeout_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)

    async def obey(self, fleet: FleetFacade) -> Mapping[Any, Any]:
        return await fleet.drain(self.timeout_s)


class _Broadcast(_Order):
    method: Annotated[str, Field(pattern="^[A-Z]+$")] = "POST"
    path: Annotated[str, Field(pattern="^/")]
    body: dict[str, Any] | None = None
    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)

    async def obey(self, fleet: FleetFacade) -> Mapping[Any, Any]:
        ask = Ask(method=self.method, path=self.path, body=self.body)
        return await fleet.broadcast(ask, self.timeout_s)


_ORDERS: Mapping[str, type[_Order]] = {
    f"{PREFIX}/rollout/barrier": _Barrier,
    f"{PREFIX}/rollout/restore": _Restore,
    f"{PREFIX}/rollout/weights": _Weights,
    f"{PREFIX}/rollout/drain": _Drain,
    f"{PREFIX}/rollout/broadcast": _Broadcast,
}


class _Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Orders:
    """Answers the requests below `/muster`."""

    def __init__(self, fleet: FleetFacade, access: Access) -> None:
        self._fleet = fleet
        self._access = access
        #: Orders that are being carried out, kept from the garbage collector.
        self._under_way: set[asyncio.Task[Mapping[Any, Any]]] = set()

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """An answer to any request whose path begins with `/muster`."""
        path = request.raw_path.partition("?")[0].rstrip("/")
        if path == f"{PREFIX}/health" and request.method in ("GET", "HEAD"):
            # To anybody: who asks whether a component lives, as a supervisor does, has no token,
            # and this tells nothing else.
            return _json({"ok": True, "ready": self._fleet.snapshot().get("ready", False)})
        order = _ORDERS.get(path)
        if refusal := self._access.refusal(request.headers, is_order=order is not None):
            return refused(refusal)
        if order is not None:
            if request.method != "POST":
                return _wrong_method(path, "POST")
            return await self._obey(order, request)
        if path not in (f"{PREFIX}/health", f"{PREFIX}/rollout"):
            known = ", ".join([f"{PREFIX}/health", f"{PREFIX}/rollout", *_ORDERS])
            message = f"there is no {path}; there are {known}"
            return refused(Refusal(status=404, type="not_found", message=message))
        if request.method not in ("GET", "HEAD"):
            return _wrong_method(path, "GET")
        return _json(self._fleet.snapshot())

    async def stop(self) -> None:
        """Leave no order half done by us: what is under way is told to end, and waited for."""
        for task in tuple(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _obey(self, model: type[_Order], request: web.BaseRequest) -> web.Response:
        if (request.content_length or 0) > _BODY_BYTES:
            return refused(bad(f"an order has at most {_BODY_BYTES} bytes"))
        body = b""
        while piece := await request.content.readany():
            body += piece
            if len(body) > _BODY_BYTES:
                return refused(bad(f"an order has at most {_BODY_BYTES} bytes"))
        try:
            order = _read(model, body)
        except _Refused as error:
            return refused(error.refusal)
        carried_out: Coroutine[Any, Any, Mapping[Any, Any]] = order.obey(self._fleet)
        task = asyncio.create_task(carried_out, name=request.raw_path)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            return _json(await asyncio.shield(task))
        except KeyError as error:
            return refused(bad(str(error.args[0]) if error.args else "unknown key"))
        except ValueError as error:
            return refused(bad(str(error)))
        except MusterError as error:
            return refused(Refusal(status=409, type="refused", message=str(error)))
        except asyncio.CancelledError:
            if not task.done():
                _log.warning("the client of %s has left; the order goes on", request.raw_path)
                task.add_done_callback(_log_end)
            elif task.cancelled():
                message = "the fleet is being stopped"
                return refused(Refusal(status=503, type="stopping", message=message))
            raise
        except Exception as error:
            _log.exception("the order %s failed", request.raw_path)
            message = f"{type(error).__name__}: {error}; the fleet's log has the details"
            return refused(Refusal(status=500, type="failed", message=message))


def _read(model: type[_Order], body: bytes) -> _Order:
    try:
        return model.model_validate_json(body.strip() or b"{}")
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        )
        takes = ", ".join(
            f"{name} (needed)" if field.is_required() else name
            for name, field in model.model_fields.items()
        )
        raise _Refused(bad(f"{faults}. It takes a JSON object: {takes or 'empty'}")) from error


def _log_end(task: asyncio.Task[Mapping[Any, Any]]) -> None:
    """Of an order whose client has left, so that nobody else hears of it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the order %s, whose client has left, failed", task.get_name(), exc_info=error)


def _wrong_method(path: str, right: str) -> web.Response:
    return refused(Refusal(status=405, type="bad_request", message=f"{path} takes {right} only"))


def _json(content: Mapping[Any, Any]) -> web.Response:
    return web.Response(
        body=json.dumps(content).encode(), headers={"Content-Type": "application/json"}
    )


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
        limits: RequestLimits | None = None,
    ) -> None:
        if sock is not None:
            host, port = sock.getsockname()[:2]
        self._access = Access(host, token)
        self._orders = Orders(fleet, self._access)
        self._fleet = fleet
        self._host, self._port, self._sock = host, port, sock
        self._limits = limits or RequestLimits()
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
