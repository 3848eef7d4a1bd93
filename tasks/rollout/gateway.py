"""One HTTP address for all servers of the fleet, and for orders to the fleet itself.

`/muster/...` is the gateway's own: the orders of the run's programs, each carried out to its end
once it was taken, even if its client leaves before; so is `/metrics`. What generates goes to a
server that accepts requests. Whoever has the token may use it; without one, on loopback alone, the
programs of its own user.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Annotated, Any

from multidict import CIMultiDict, MultiMapping
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.rollout.admission import Admission, expire_connections
from tasks.rollout.backends import Ask
from tasks.rollout.clock import now_s
from tasks.rollout.fleet import Fleet
from tasks.rollout.forwarding import Forwarder, answered, bad, nobody, refusal, unreadable
from tasks.rollout.http1 import Answer, HttpRequest, Malformed, ServerConnection
from tasks.rollout.metrics import Metrics
from tasks.rollout.ownership import EngineListenerCheck
from tasks.rollout.sync import InFlight, NoSuchSync
from tasks.rollout.topology import gateway_url, is_loopback
from tasks.spec.errors import MusterError
from tasks.spec.formatting import join_commas

#: A `Host`, or the rest of an `Origin`: a name or an address, and a port.
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\\\s]+)(?::([0-9]{1,5}))?")
#: What a browser says of a request that the page of another origin has caused.
_OF_OTHER_PAGES = frozenset({"cross-site", "same-site"})


class Access:
    """Judges requests by their headers, and by who has opened their connection.

    Without a token, only processes of this user may ask, and no page in a browser: neither one of
    another origin, nor one whose name was made to resolve to this machine (DNS rebinding).

    Args:
        host: that the gateway listens on.
        token: that each request brings; None: none is needed.
        order_token: that an order brings; None: the token of requests.
    """

    def __init__(self, host: str, token: str | None, order_token: str | None = None) -> None:
        if token is None and not is_loopback(host):
            raise ValueError(f"a gateway on {host} can be reached from elsewhere: it needs a token")
        self._token = None if token is None else token.encode()
        self._order_token = self._token if order_token is None else order_token.encode()
        #: The gateway's own; None until it is known: any.
        self.port: int | None = None

    def refusal(
        self,
        headers: MultiMapping[str] | Mapping[str, str],
        *,
        is_order: bool = False,
        is_own: bool = True,
        unknown_because: str = "",
    ) -> Answer | None:
        """Why a request with these headers is refused; None if it is not.

        Args:
            is_order: it would change the fleet.
            is_own: the kernel says that a process of this user has opened the connection.
            unknown_because: why the kernel does not say who has.
        """
        if self._token is not None:
            return self._token_refusal(headers, self._token, is_order=is_order)
        if not is_own and unknown_because:
            message = (
                f"the user of this connection is unknown ({unknown_because}): try again, or write "
                "`require_token: true` into components.rollout"
            )
            return refusal(503, "unknown_user", message, is_retryable=True)
        if not is_own:
            message = (
                f"only processes of user {os.geteuid()} may connect: write "
                "`require_token: true` into components.rollout to allow other users"
            )
            return refusal(403, "forbidden", message)
        return self.page_refusal(headers)

    def page_refusal(self, headers: MultiMapping[str] | Mapping[str, str]) -> Answer | None:
        """Why a request is refused that a page in a browser may have caused; None if it is not.

        With a token nothing is refused here: no page has the token.
        """
        if self._token is not None:
            return None
        # HTTP/1.0 has no Host, and no browser speaks it.
        host = headers.get("Host")
        if host is not None and not _is_own_address(host, self.port):
            return self._foreign_page("Host", host)
        origin = headers.get("Origin")
        if origin is not None and not (
            origin.startswith("http://")
            and _is_own_address(origin.removeprefix("http://"), self.port)
        ):
            return self._foreign_page("Origin", origin)
        site = headers.get("Sec-Fetch-Site")
        if site is not None and site.strip().lower() in _OF_OTHER_PAGES:
            return self._foreign_page("Sec-Fetch-Site", site)
        return None

    def _token_refusal(
        self, headers: MultiMapping[str] | Mapping[str, str], token: bytes, *, is_order: bool
    ) -> Answer | None:
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        found = given.strip().encode(errors="surrogateescape")
        is_bearer = scheme.lower() == "bearer"
        if is_bearer and hmac.compare_digest(found, self._order_token or b""):
            return None
        if is_bearer and hmac.compare_digest(found, token):
            if not is_order:
                return None
            message = "this token is for requests: the trainer's MUSTER_ROLLOUT_TOKEN orders"
            return refusal(403, "forbidden", message)
        message = "send the token: `Authorization: Bearer TOKEN`, api_key of OpenAI's client"
        return refusal(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})

    def _foreign_page(self, header: str, value: str) -> Answer:
        port = "" if self.port is None else f":{self.port}"
        message = (
            f"the header {header} is {value[:100]!r}: without a token, only programs that ask "
            f"127.0.0.1{port} are answered, and no pages of a browser"
        )
        return refusal(403, "forbidden", message)


@lru_cache(maxsize=256)
def _is_own_address(authority: str, port: int | None) -> bool:
    """Whether a host and port of a URL are a gateway's on loopback.

    Args:
        port: the gateway's; None: any. A program may leave it out, and a browser never does.
    """
    found = _AUTHORITY.fullmatch(authority)
    if found is None or not is_loopback(found[1]):
        return False
    return found[2] is None or port is None or int(found[2]) == port


_log = logging.getLogger(__name__)

PREFIX = "/muster"
#: Of an order, in seconds and in bytes.
_LONGEST_S, _LONGEST_ORDER = 86_400.0, 1024 * 1024


class _Order(BaseModel):
    """A body. Unknown keys are refused: a misspelt one would order something else."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


Timeout = Annotated[float, Field(gt=0, le=_LONGEST_S, allow_inf_nan=False)]


class _Begin(_Order):
    timeout_s: Timeout = 600.0
    in_flight: InFlight = InFlight.WAIT


class _Broadcast(_Order):
    method: Annotated[str, Field(pattern="^[A-Z]+$")] = "POST"
    path: Annotated[str, Field(pattern="^/")]
    body: dict[str, Any] | None = None
    timeout_s: Timeout = 60.0


class _Commit(_Order):
    version: int = Field(ge=0)
    epochs: dict[int, int]
    force: bool = False


class _AddWorker(_Order):
    """As clients of sglang-router have it."""

    model_config = ConfigDict(extra="ignore")

    url: str


async def _broadcast(fleet: Fleet, id: str, body: _Broadcast) -> Mapping[str, Any]:
    ask = Ask(method=body.method, path=body.path, body=body.body)
    return await fleet.syncs.broadcast(id, ask, body.timeout_s)


async def _commit(fleet: Fleet, id: str, body: _Commit) -> Mapping[str, Any]:
    return await fleet.syncs.commit(id, body.version, body.epochs, force=body.force)


async def _restart(fleet: Fleet, id: str, body: _Order) -> Mapping[str, Any]:
    return await fleet.restart(_number(id, "engine"))


def _number(id: str, what: str) -> int:
    if not id.isdecimal():
        raise KeyError(f"the fleet has no {what} {id!r}: they are numbers, from 0")
    return int(id)


Obey = Callable[[Fleet, str, Any], Coroutine[Any, Any, Mapping[str, Any]]]
_ROLLOUT = f"{PREFIX}/rollout"
#: As sglang-router has it.
WORKERS = "/workers"
#: By the path, in which ID stands for that of a sync, an engine or a worker: the method, the body,
#: and what is done.
_ORDERS: Mapping[str, tuple[str, type[_Order], Obey]] = {
    f"{_ROLLOUT}/check": ("POST", _Order, lambda fleet, _id, _: fleet.check()),
    f"{_ROLLOUT}/sync": ("POST", _Begin, lambda fleet, _id, body: fleet.begin_sync(**dict(body))),
    f"{_ROLLOUT}/sync/ID/broadcast": ("POST", _Broadcast, _broadcast),
    f"{_ROLLOUT}/sync/ID/commit": ("POST", _Commit, _commit),
    f"{_ROLLOUT}/sync/ID": ("DELETE", _Order, lambda fleet, id, _: fleet.syncs.give_up(id)),
    f"{_ROLLOUT}/engines/ID/restart": ("POST", _Order, _restart),
    WORKERS: ("POST", _AddWorker, lambda fleet, _id, body: fleet.add(body.url)),
    f"{WORKERS}/ID": ("DELETE", _Order, lambda fleet, id, _: fleet.retire(_number(id, "worker"))),
}
_WITH_ID = re.compile(f"((?:{_ROLLOUT}/sync|{_ROLLOUT}/engines|{WORKERS})/)([^/]+)(.*)")


def _faults(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}"
        for fault in error.errors(include_url=False)
    )


_OWN = re.compile(f"({PREFIX}|{WORKERS})([/?]|$)")
_STOPPING = "the rollout fleet is being stopped"
#: Connections that clients may have waiting to be taken.
_BACKLOG = 4096
#: The status of a request whose client has left, as nginx has it.
_CLIENT_LEFT = 499
#: For what is cut when the gateway stops, in seconds.
_CUT_WITHIN_S = 2.0
#: Statuses of a refusal after which the connection is closed.
_NOT_LET_IN = frozenset({401, 403})


class Gateway:
    """Listens for requests from `start` to `stop`, on the loop that called `start`.

    Args:
        host: other than loopback only with a token.
        port: 0: any free one.
        token: what each request has to bring as `Authorization: Bearer TOKEN`; None: nothing, but
            it has to come from this user.
        order_token: what an order has to bring, with which requests may be made, too; None: that
            of requests.
        listeners: tells whose server a connection has reached; None: any server is right.
        servers: of the fleet, for whose processes and probes open files are kept.

    Raises: ValueError, for a gateway that everybody could use.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        order_token: str | None = None,
        listeners: EngineListenerCheck | None = None,
        servers: int = 0,
    ) -> None:
        self._fleet = fleet
        self._access = Access(host, token, order_token)
        #: That are being carried out, kept from the garbage collector.
        self._orders: set[asyncio.Task[Mapping[str, Any]]] = set()
        self._is_token_own = token is not None
        self._host, self._port = host, port
        self._listener: asyncio.Server | None = None
        self._connections: set[ServerConnection] = set()
        self._admission = Admission(may_be_let_in=token is not None, servers=servers)
        #: Closes connections that are late or idle.
        self._expiring: asyncio.Task[None] | None = None
        self._forwarder = Forwarder(fleet, is_token_own=self._is_token_own, listeners=listeners)
        self.metrics = Metrics(fleet, pieces=self._forwarder.tokens)

    @property
    def url(self) -> str:
        """`http://host:port`, known once it has started."""
        return gateway_url(self._host, self._port)

    async def start(self) -> None:
        """Returns once it listens. Raises: OSError, when its address is taken."""
        self._admission.open()
        self._listener = await asyncio.get_running_loop().create_server(
            self._connection, self._host, self._port, backlog=_BACKLOG
        )
        self._port = self._access.port = self._listener.sockets[0].getsockname()[1]
        self._expiring = asyncio.create_task(
            expire_connections(lambda: tuple(self._connections)), name="gateway-expiring"
        )

    def _connection(self) -> ServerConnection:
        return ServerConnection(
            self._handle,
            _refused,
            self._connections,
            enter=self._admission.enter,
            leave=self._admission.leave,
        )

    async def stop(self, grace_s: float) -> None:
        """Take no more requests, let those under way end within the grace period, cut the rest.

        Returns within the grace period and a few seconds. Safe before `start` and twice.
        """
        forwarder, listener, self._listener = self._forwarder, self._listener, None
        if listener is None:
            return
        forwarder.is_over = _STOPPING
        listener.close()
        if self._expiring is not None:
            self._expiring.cancel()
        for connection in tuple(self._connections):
            connection.finish()
        under_way = [one.task for one in self._connections if one.task is not None]
        try:
            if late := await _not_ended(under_way, grace_s):
                _log.warning("%d requests are cut: the grace period is over", len(late))
        finally:
            forwarder.abort([*forwarder.flights])
            # No order is left half done by us: what is under way is told to end, and waited for.
            for order in tuple(self._orders):
                order.cancel()
            await asyncio.gather(*self._orders, return_exceptions=True)
            late = await _not_ended(under_way, _CUT_WITHIN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            for connection in tuple(self._connections):
                connection.transport.close()
            forwarder.client.close()
            self._admission.close()

    async def _handle(self, request: HttpRequest) -> None:
        answer = await self._own_answer(request)
        if answer is not None:
            if answer.status in _NOT_LET_IN:
                request.is_kept = False
            request.send(answer)
            return
        status, began_s = _CLIENT_LEFT, now_s()
        try:
            status = await self._forwarder.forward(request)
        finally:
            self.metrics.ended(status, now_s() - began_s)

    async def _own_answer(self, request: HttpRequest) -> Answer | None:
        """None: it is for a server."""
        path = request.target
        if _OWN.match(path):
            return await self._answer_order(request)
        if path.partition("?")[0] == "/health" and request.method in ("GET", "HEAD"):
            # Clients of one server ask it, as Atropos' do: the fleet is well if any of it serves.
            # Anybody is told, but no page in a browser.
            if (refused := self._access.page_refusal(request.headers)) is not None:
                return refused
            router = self._forwarder.router
            is_well = router.entrypoints or router.is_closed
            return answered({"status": "ok"}) if is_well else nobody("no engine serves")
        if (refused := self._refusal(request)) is not None:
            return refused
        if self._forwarder.is_over is not None:
            return nobody(self._forwarder.is_over, "stopping")
        if path == "/metrics" and request.method == "GET":
            kind = CIMultiDict({"Content-Type": CONTENT_TYPE_LATEST})
            return Answer(200, self.metrics.text(), kind)
        return None

    def _refusal(self, request: HttpRequest, *, is_order: bool = False) -> Answer | None:
        """Why a request is refused; None if it is not: then its connection is let in."""
        connection = request.wire
        refused = self._access.refusal(
            request.headers,
            is_order=is_order,
            is_own=connection.is_own,
            unknown_because=connection.unknown_because,
        )
        if refused is None and not connection.is_let_in:
            self._admission.let_in(connection)
        return refused

    async def _answer_order(self, request: HttpRequest) -> Answer:
        path = request.target.partition("?")[0].rstrip("/")
        if path == f"{PREFIX}/health" and request.method in ("GET", "HEAD"):
            # Anybody is told: a supervisor, who asks whether a component lives, has no token.
            if (refused := self._access.page_refusal(request.headers)) is not None:
                return refused
            return answered({"ok": True, "ready": self._fleet.has_started})
        id = ""
        if named := _WITH_ID.fullmatch(path):
            id, path = named[2], f"{named[1]}ID{named[3]}"
        is_asked = request.method in ("GET", "HEAD") and path in (_ROLLOUT, WORKERS)
        is_order = not is_asked and path in _ORDERS
        if (refused := self._refusal(request, is_order=is_order)) is not None:
            return refused
        if is_asked:
            return answered(self._fleet.workers() if path == WORKERS else self._fleet.snapshot())
        known = {path: order[0] for path, order in _ORDERS.items()}
        known = {f"{PREFIX}/health": "GET", _ROLLOUT: "GET", **known}
        if path not in known:
            return refusal(404, "not_found", f"there is no {path}; there are {join_commas(known)}")
        if request.method != known[path] or not is_order:
            return refusal(405, "bad_request", f"{path} takes {known[path]} only")
        return await self._obey(path, request, id)

    async def _obey(self, path: str, request: HttpRequest, id: str) -> Answer:
        _method, model, obey = _ORDERS[path]
        try:
            body, is_whole = await request.upto(_LONGEST_ORDER)
            if not is_whole:
                return bad(f"an order has at most {_LONGEST_ORDER} bytes")
            order = model.model_validate_json(body.strip() or b"{}")
        except Malformed as error:
            return unreadable(error)
        except ValidationError as error:
            return refusal(422, "bad_request", _faults(error))
        try:
            task = asyncio.create_task(obey(self._fleet, id, order))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)
            status = 202 if path.startswith(WORKERS) else 200
            return answered(await asyncio.shield(task), status)
        except KeyError as error:
            return refusal(422, "bad_request", str(error.args[0]))
        except NoSuchSync as error:
            return refusal(404, "not_found", str(error))
        except MusterError as error:
            return refusal(409, "refused", str(error))
        except asyncio.CancelledError:
            if not task.done():
                _log.warning("the client of %s has left; the order goes on", request.target)
            elif task.cancelled():
                return refusal(503, "stopping", "the fleet is being stopped")
            raise
        except Exception as error:
            _log.exception("the order %s failed", request.target)
            message = f"{type(error).__name__}: {error}; the fleet's log has the details"
            return refusal(500, "failed", message)


async def _not_ended(
    tasks: Collection[asyncio.Task[None]], timeout_s: float
) -> set[asyncio.Task[None]]:
    return (await asyncio.wait(tasks, timeout=timeout_s))[1] if tasks else set()


def _refused(status: int, why: str) -> Answer:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return nobody(why, "overloaded")
    return refusal(status, "failed" if status == 500 else "bad_request", why)
