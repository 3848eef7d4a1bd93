"""HTTP server of a fleet: one address for all inference servers and for orders to the fleet.

- The paths under `/muster/` and `/workers` accept orders: requests that change the fleet. An order
  is carried out completely even if the client closes its connection before the end.
- `/health` and `/metrics` are answered by the gateway itself.
- All other requests are forwarded to an inference server, or refused.

Clients need the gateway's token. A gateway without a token listens on loopback only, and answers
only processes of the gateway's user and of root.
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
from tasks.rollout.forwarding import (
    Forwarder,
    make_bad_request_error,
    make_error,
    make_json_answer,
    make_unavailable_error,
    make_unreadable_body_error,
)
from tasks.rollout.http1 import Answer, HttpRequest, Malformed, ServerConnection
from tasks.rollout.metrics import Metrics
from tasks.rollout.ownership import EngineListenerCheck
from tasks.rollout.sync import InFlight, NoSuchSync
from tasks.rollout.topology import gateway_url, is_loopback
from tasks.spec.errors import MusterError
from tasks.spec.formatting import join_commas

#: Matches the value of the header `Host`, or of `Origin` without its scheme: a host name or an
#: address, and an optional port.
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\\\s]+)(?::([0-9]{1,5}))?")
#: Values of the header `Sec-Fetch-Site` in requests from a page of another website.
_OF_OTHER_PAGES = frozenset({"cross-site", "same-site"})


class Access:
    """Decides whether a client's request may use the gateway.

    Without a token, only root and the user of this process may use the gateway. The gateway then
    also refuses requests that a web page sends from a browser of this user, even if DNS rebinding
    has redirected the page's host name to this machine.

    Args:
        host: Name or address of the interface that the gateway listens on.
        token: Token that each request has to bring, or None if no token is needed.
        order_token: Token that each request to change the fleet has to bring. None if `token` is
            enough for such a request.

    Raises:
        ValueError: There is no token, and other machines can reach the gateway.
    """

    def __init__(self, host: str, token: str | None, order_token: str | None = None) -> None:
        if token is None and not is_loopback(host):
            raise ValueError(
                f"the gateway needs a token, because other machines can reach the address {host}. "
                "Write `require_token: true` into components.rollout"
            )
        self._token = None if token is None else token.encode()
        self._order_token = self._token if order_token is None else order_token.encode()
        #: Port that the gateway listens on, or None before the gateway has started. With None,
        #: every port in the headers Host and Origin is accepted.
        self.port: int | None = None

    def find_refusal(
        self,
        headers: MultiMapping[str] | Mapping[str, str],
        *,
        is_order: bool = False,
        is_own: bool = True,
        unknown_because: str = "",
    ) -> Answer | None:
        """Return the error response for a request that is refused, or None if it is accepted.

        Args:
            headers: Headers of the request.
            is_order: True if the request would change the fleet.
            is_own: True if the client is a process of root or of the same user as this process.
            unknown_because: Reason why the user who opened the connection is unknown. Empty if the
                user is known.
        """
        if self._token is not None:
            return self._find_token_refusal(headers, self._token, is_order=is_order)
        if not is_own and unknown_because:
            message = (
                "the gateway could not find out which user opened this connection "
                f"({unknown_because}). Try again, or write `require_token: true` into "
                "components.rollout"
            )
            return make_error(503, "unknown_user", message, is_retryable=True)
        if not is_own:
            message = (
                f"only processes of user {os.geteuid()} may connect. To allow other users, write "
                "`require_token: true` into components.rollout"
            )
            return make_error(403, "forbidden", message)
        return self.find_page_refusal(headers)

    def find_page_refusal(self, headers: MultiMapping[str] | Mapping[str, str]) -> Answer | None:
        """Return an error response if a web page may have sent the request, else None.

        If the gateway has a token, the result is always None, because no web page knows the token.

        Args:
            headers: Headers of the request.
        """
        if self._token is not None:
            return None
        # A request without Host is an HTTP/1.0 request. Browsers do not use HTTP/1.0, so no web
        # page has sent such a request.
        host = headers.get("Host")
        if host is not None and not _is_own_address(host, self.port):
            return self._make_page_refusal("Host", host)
        origin = headers.get("Origin")
        if origin is not None and not (
            origin.startswith("http://")
            and _is_own_address(origin.removeprefix("http://"), self.port)
        ):
            return self._make_page_refusal("Origin", origin)
        site = headers.get("Sec-Fetch-Site")
        if site is not None and site.strip().lower() in _OF_OTHER_PAGES:
            return self._make_page_refusal("Sec-Fetch-Site", site)
        return None

    def _find_token_refusal(
        self, headers: MultiMapping[str] | Mapping[str, str], token: bytes, *, is_order: bool
    ) -> Answer | None:
        """Return the error response for a wrong or missing token, or None if the token is right.

        Args:
            headers: Headers of the request.
            token: The ordinary token, which allows all requests that do not change the fleet.
            is_order: True if the request would change the fleet. Only the order token allows
                requests that change the fleet.
        """
        scheme, _, credentials = headers.get("Authorization", "").partition(" ")
        sent_token = credentials.strip().encode(errors="surrogateescape")
        is_bearer = scheme.lower() == "bearer"
        if is_bearer and hmac.compare_digest(sent_token, self._order_token or b""):
            return None
        if is_bearer and hmac.compare_digest(sent_token, token):
            if not is_order:
                return None
            message = (
                "this token does not allow changes of the inference servers. Use the token in the "
                "trainer's MUSTER_ROLLOUT_TOKEN"
            )
            return make_error(403, "forbidden", message)
        message = (
            "the token of the gateway is missing or wrong. Send the header `Authorization: Bearer "
            "TOKEN`, or pass the token as api_key to OpenAI's client"
        )
        return make_error(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})

    def _make_page_refusal(self, header: str, value: str) -> Answer:
        port = "" if self.port is None else f":{self.port}"
        message = (
            f"the gateway rejects this request because of the value of its header {header}: "
            f"{value[:100]!r}. Without a token, the gateway accepts only requests to "
            f"127.0.0.1{port}, and none from web pages. To use a token, write "
            "`require_token: true` into components.rollout"
        )
        return make_error(403, "forbidden", message)


@lru_cache(maxsize=256)
def _is_own_address(authority: str, port: int | None) -> bool:
    """Return True if a host and a port are an address of this gateway on this machine.

    Args:
        authority: Host and optional port of a URL, such as `localhost:8000`.
        port: Port of the gateway, or None to accept every port. A host without a port is
            accepted, too: only requests of web pages must be refused, and browsers send the port.
    """
    match = _AUTHORITY.fullmatch(authority)
    if match is None or not is_loopback(match[1]):
        return False
    return match[2] is None or port is None or int(match[2]) == port


_log = logging.getLogger(__name__)

PREFIX = "/muster"
#: Largest timeout in seconds that a request to change the fleet may contain.
_LONGEST_S = 86_400.0
#: Largest size in bytes of the body of a request to change the fleet.
_LONGEST_ORDER = 1024 * 1024


class _Order(BaseModel):
    """JSON body of a request to change the fleet.

    Unknown keys are refused, so that a misspelt key causes an error.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


Timeout = Annotated[float, Field(gt=0, le=_LONGEST_S, allow_inf_nan=False)]


class _Begin(_Order):
    """Body of the request to begin a weight sync."""

    timeout_s: Timeout = 600.0
    in_flight: InFlight = InFlight.WAIT


class _Broadcast(_Order):
    """An HTTP request that the gateway sends to each engine that takes part in a weight sync."""

    method: Annotated[str, Field(pattern="^[A-Z]+$")] = "POST"
    path: Annotated[str, Field(pattern="^/")]
    body: dict[str, Any] | None = None
    timeout_s: Timeout = 60.0


class _Commit(_Order):
    """Body of the request to commit a weight sync."""

    version: int = Field(ge=0)
    epochs: dict[int, int]
    force: bool = False


class _AddWorker(_Order):
    """Body of the request to add a server.

    Further keys are ignored, because clients of sglang-router may send them.
    """

    model_config = ConfigDict(extra="ignore")

    url: str


async def _broadcast(fleet: Fleet, id: str, body: _Broadcast) -> Mapping[str, Any]:
    ask = Ask(method=body.method, path=body.path, body=body.body)
    return await fleet.syncs.broadcast(id, ask, body.timeout_s)


async def _commit(fleet: Fleet, id: str, body: _Commit) -> Mapping[str, Any]:
    return await fleet.syncs.commit(id, body.version, body.epochs, force=body.force)


async def _restart(fleet: Fleet, id: str, body: _Order) -> Mapping[str, Any]:
    return await fleet.restart(_parse_number(id, "engine"))


def _parse_number(id: str, kind: str) -> int:
    """Return the number of an engine or worker that a request's path contains.

    Args:
        id: The part of the path that should be the number.
        kind: `engine` or `worker`, for the error message.

    Raises:
        KeyError: This part is not a number.
    """
    if not id.isdecimal():
        raise KeyError(f"there is no {kind} {id!r}: write the number of the {kind}, 0 or more")
    return int(id)


#: Function that carries out a request to change the fleet. Its arguments are the fleet, the id from
#: the path, and the parsed body. It returns the JSON content of the response.
CarryOut = Callable[[Fleet, str, Any], Coroutine[Any, Any, Mapping[str, Any]]]
_ROLLOUT = f"{PREFIX}/rollout"
#: Path of the list of servers. The path and the requests to it are the same as in sglang-router.
WORKERS = "/workers"
#: Mapping from the path of a request to the HTTP method, the type of the body, and the function
#: that carries out the request. ID in a path stands for the id of a weight sync, engine or worker.
_ORDERS: Mapping[str, tuple[str, type[_Order], CarryOut]] = {
    f"{_ROLLOUT}/check": ("POST", _Order, lambda fleet, _id, _: fleet.check()),
    f"{_ROLLOUT}/sync": ("POST", _Begin, lambda fleet, _id, body: fleet.begin_sync(**dict(body))),
    f"{_ROLLOUT}/sync/ID/broadcast": ("POST", _Broadcast, _broadcast),
    f"{_ROLLOUT}/sync/ID/commit": ("POST", _Commit, _commit),
    f"{_ROLLOUT}/sync/ID": ("DELETE", _Order, lambda fleet, id, _: fleet.syncs.give_up(id)),
    f"{_ROLLOUT}/engines/ID/restart": ("POST", _Order, _restart),
    WORKERS: ("POST", _AddWorker, lambda fleet, _id, body: fleet.add(body.url)),
    f"{WORKERS}/ID": (
        "DELETE",
        _Order,
        lambda fleet, id, _: fleet.retire(_parse_number(id, "worker")),
    ),
}
#: Matches a path that contains an id. The groups are the part before the id, the id, and the rest.
_WITH_ID = re.compile(f"((?:{_ROLLOUT}/sync|{_ROLLOUT}/engines|{WORKERS})/)([^/]+)(.*)")


def _describe_faults(error: ValidationError) -> str:
    """Return a text that lists each fault in the JSON body of a request, with its key."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}"
        for fault in error.errors(include_url=False)
    )


#: Matches the paths of requests that the gateway itself answers. These requests read or change the
#: state of the fleet.
_OWN = re.compile(f"({PREFIX}|{WORKERS})([/?]|$)")
_STOPPING = "the rollout fleet is being stopped"
#: Number of connections that the kernel holds until the gateway accepts them.
_BACKLOG = 4096
#: HTTP status in the metrics if the client closes the connection before the response. Nginx uses
#: the same status.
_CLIENT_LEFT = 499
#: Seconds that the gateway may take to send error responses to the clients of cancelled requests.
#: When the gateway stops, it cancels all running requests.
_CUT_WITHIN_S = 2.0
#: HTTP statuses of responses to unauthorized requests. After such a response, the gateway closes
#: the connection.
_NOT_LET_IN = frozenset({401, 403})


class Gateway:
    """Answers the requests of clients from `start` to `stop`.

    All methods have to be called in the asyncio event loop that `start` was called in.

    Args:
        fleet: The fleet whose servers get the requests.
        host: Name or address of the interface to listen on. Without a token, it has to be a
            loopback address.
        port: Port to listen on, or 0 for any free port.
        token: Token that each request has to bring as `Authorization: Bearer TOKEN`. None to accept
            requests without a token, from processes of this user and of root.
        order_token: Token that each request to change the fleet has to bring. None if `token` is
            enough. Other requests may bring either token.
        listeners: Checks that a process of the engine has accepted each connection to a server.
            None to skip this check.
        servers: Number of servers in the fleet. The gateway keeps some open files free for each
            server.

    Raises:
        ValueError: There is no token, and other machines can reach the gateway.
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
        #: Tasks that carry out requests to change the fleet. The set keeps a reference to each
        #: task, so that the task is not garbage-collected.
        self._orders: set[asyncio.Task[Mapping[str, Any]]] = set()
        self._host = host
        self._port = port
        self._listener: asyncio.Server | None = None
        self._connections: set[ServerConnection] = set()
        self._admission = Admission(may_be_let_in=token is not None, servers=servers)
        #: Task that closes connections that are idle or whose request does not arrive in time. None
        #: before `start`.
        self._expiry_task: asyncio.Task[None] | None = None
        self._forwarder = Forwarder(fleet, is_token_own=token is not None, listeners=listeners)
        self.metrics = Metrics(fleet, pieces=self._forwarder.generated_pieces)

    @property
    def url(self) -> str:
        """Address of the gateway for clients, as `http://host:port`.

        If the constructor got port 0, the address is valid only after `start`.
        """
        return gateway_url(self._host, self._port)

    async def start(self) -> None:
        """Start to listen for connections.

        Raises:
            OSError: The gateway cannot listen on its address, for example because the address is in
                use.
        """
        self._admission.open()
        self._listener = await asyncio.get_running_loop().create_server(
            self._make_connection, self._host, self._port, backlog=_BACKLOG
        )
        port = self._listener.sockets[0].getsockname()[1]
        self._port = port
        self._access.port = port
        self._expiry_task = asyncio.create_task(
            expire_connections(lambda: tuple(self._connections)), name="gateway-expiring"
        )

    def _make_connection(self) -> ServerConnection:
        return ServerConnection(
            self._handle,
            _make_connection_error,
            self._connections,
            enter=self._admission.enter,
            leave=self._admission.leave,
        )

    async def stop(self, grace_s: float) -> None:
        """Stop listening, wait for the running requests, and cancel them after the grace period.

        The call takes at most the grace period and a few seconds. It does nothing if the gateway
        does not run.

        Args:
            grace_s: Seconds that running requests get to end.
        """
        forwarder = self._forwarder
        listener = self._listener
        self._listener = None
        if listener is None:
            return
        forwarder.stop_reason = _STOPPING
        listener.close()
        if self._expiry_task is not None:
            self._expiry_task.cancel()
        for connection in tuple(self._connections):
            connection.finish()
        running_tasks = [
            connection.task for connection in self._connections if connection.task is not None
        ]
        try:
            if late_tasks := await _wait_for_end(running_tasks, grace_s):
                _log.warning(
                    "the gateway aborts %d requests, because its grace period for the "
                    "shutdown is over",
                    len(late_tasks),
                )
        finally:
            forwarder.abort([*forwarder.running_requests])
            # A cancelled task still undoes or completes its work. So wait for the end of the tasks.
            for order in tuple(self._orders):
                order.cancel()
            await asyncio.gather(*self._orders, return_exceptions=True)
            late_tasks = await _wait_for_end(running_tasks, _CUT_WITHIN_S)
            for task in late_tasks:
                task.cancel()
            await asyncio.gather(*late_tasks, return_exceptions=True)
            for connection in tuple(self._connections):
                connection.transport.close()
            forwarder.client.close()
            self._admission.close()

    async def _handle(self, request: HttpRequest) -> None:
        """Answer a request, or forward the request to a server."""
        answer = await self._answer_by_gateway(request)
        if answer is not None:
            if answer.status in _NOT_LET_IN:
                request.is_kept = False
            request.send(answer)
            return
        status = _CLIENT_LEFT
        began_s = now_s()
        try:
            status = await self._forwarder.forward(request)
        finally:
            self.metrics.ended(status, now_s() - began_s)

    async def _answer_by_gateway(self, request: HttpRequest) -> Answer | None:
        """Return the gateway's response, or None if the request has to be forwarded to a server."""
        path = request.target
        if _OWN.match(path):
            return await self._answer_order(request)
        if path.partition("?")[0] == "/health" and request.method in ("GET", "HEAD"):
            # Some clients, such as Atropos, use this path to check the health of an inference
            # server. The request needs no token. Requests from web pages are refused.
            if (error := self._access.find_page_refusal(request.headers)) is not None:
                return error
            router = self._forwarder.router
            if router.entrypoints or router.is_closed:
                return make_json_answer({"status": "ok"})
            return make_unavailable_error("no engine serves")
        if (error := self._find_refusal(request)) is not None:
            return error
        if self._forwarder.stop_reason is not None:
            return make_unavailable_error(self._forwarder.stop_reason, "stopping")
        if path == "/metrics" and request.method == "GET":
            headers = CIMultiDict({"Content-Type": CONTENT_TYPE_LATEST})
            return Answer(200, self.metrics.text(), headers)
        return None

    def _find_refusal(self, request: HttpRequest, *, is_order: bool = False) -> Answer | None:
        """Return the error response for a request that is refused, or None if it is accepted.

        After an accepted request, the connection no longer counts as unauthorized.
        """
        connection = request.wire
        error = self._access.find_refusal(
            request.headers,
            is_order=is_order,
            is_own=connection.is_own,
            unknown_because=connection.unknown_because,
        )
        if error is None and not connection.is_let_in:
            self._admission.let_in(connection)
        return error

    async def _answer_order(self, request: HttpRequest) -> Answer:
        """Return the response to a request for a path under `/muster` or `/workers`."""
        path = request.target.partition("?")[0].rstrip("/")
        if path == f"{PREFIX}/health" and request.method in ("GET", "HEAD"):
            # Do not check the token, because the supervisor of the run sends this request without a
            # token.
            if (error := self._access.find_page_refusal(request.headers)) is not None:
                return error
            return make_json_answer({"ok": True, "ready": self._fleet.has_started})
        id = ""
        if match := _WITH_ID.fullmatch(path):
            id = match[2]
            path = f"{match[1]}ID{match[3]}"
        is_query = request.method in ("GET", "HEAD") and path in (_ROLLOUT, WORKERS)
        is_order = not is_query and path in _ORDERS
        if (error := self._find_refusal(request, is_order=is_order)) is not None:
            return error
        if is_query:
            return make_json_answer(
                self._fleet.workers() if path == WORKERS else self._fleet.snapshot()
            )
        methods = {f"{PREFIX}/health": "GET", _ROLLOUT: "GET"}
        methods.update({path: order[0] for path, order in _ORDERS.items()})
        if path not in methods:
            message = f"there is no path {path}; the paths are {join_commas(methods)}"
            return make_error(404, "not_found", message)
        if request.method != methods[path] or not is_order:
            return make_error(405, "bad_request", f"{path} accepts only {methods[path]}")
        return await self._carry_out_order(path, request, id)

    async def _carry_out_order(self, path: str, request: HttpRequest, id: str) -> Answer:
        """Carry out a request to change the fleet, and return the response.

        Args:
            path: Path of the request, as a key of `_ORDERS`.
            request: The request.
            id: Id of the weight sync, engine or worker in the requested path, or an empty string.
        """
        _method, model, carry_out = _ORDERS[path]
        try:
            body, is_whole = await request.read_up_to(_LONGEST_ORDER)
            if not is_whole:
                message = (
                    f"the request body is larger than {_LONGEST_ORDER} bytes, which is the limit "
                    "for this path"
                )
                return make_bad_request_error(message)
            order = model.model_validate_json(body.strip() or b"{}")
        except Malformed as error:
            return make_unreadable_body_error(error)
        except ValidationError as error:
            return make_error(422, "bad_request", _describe_faults(error))
        try:
            task = asyncio.create_task(carry_out(self._fleet, id, order))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)
            status = 202 if path.startswith(WORKERS) else 200
            return make_json_answer(await asyncio.shield(task), status)
        except KeyError as error:
            return make_error(422, "bad_request", str(error.args[0]))
        except NoSuchSync as error:
            return make_error(404, "not_found", str(error))
        except MusterError as error:
            return make_error(409, "refused", str(error))
        except asyncio.CancelledError:
            if not task.done():
                _log.warning(
                    "the client of the request %s closed its connection, but Muster still "
                    "carries out the request",
                    request.target,
                )
            elif task.cancelled():
                return make_error(503, "stopping", "the fleet is being stopped")
            raise
        except Exception as error:
            _log.exception("the request %s failed", request.target)
            message = (
                f"{type(error).__name__}: {error}. The log of the component rollout has the details"
            )
            return make_error(500, "failed", message)


async def _wait_for_end(
    tasks: Collection[asyncio.Task[None]], timeout_s: float
) -> set[asyncio.Task[None]]:
    """Wait for the end of tasks, and return the tasks that still run after `timeout_s` seconds."""
    if not tasks:
        return set()
    _, running_tasks = await asyncio.wait(tasks, timeout=timeout_s)
    return running_tasks


def _make_connection_error(status: int, reason: str) -> Answer:
    """Return the error response for a request that is not valid HTTP or caused an exception."""
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return make_unavailable_error(reason, "overloaded")
    return make_error(status, "failed" if status == 500 else "bad_request", reason)
