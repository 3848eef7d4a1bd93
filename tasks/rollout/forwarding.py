"""Passes a request on to an entrypoint, and its answer back, piece by piece.

A try that ended before the server's answer began is made again elsewhere; once it has begun, never,
so that nobody gets an answer twice. A refusal of the gateway's own says whether the client may send
the request again. Requests under way are known by the entrypoint they are with, and end with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from multidict import CIMultiDict, MultiMapping
from pydantic_core import from_json

from tasks.rollout.clock import now_s
from tasks.rollout.fleet import Fleet
from tasks.rollout.http1 import Answer, HttpRequest, Malformed
from tasks.rollout.ownership import EngineListenerCheck
from tasks.rollout.probing import NoReply
from tasks.rollout.router import Entrypoint, LineFull, NoEntrypoint
from tasks.rollout.upstream import BrokenOff, ServedConnection, Unconnected, Upstreams

#: Concern one connection only. Source: RFC 9110, section 7.6.1, and the older Keep-Alive.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
#: The client speaks to the gateway, which has already said 100 where that was expected.
_NOT_FOR_SERVERS = _HOP_BY_HOP | {"host", "expect"}
#: Ours, and that of sglang-router's clients.
_SESSION_HEADERS = ("X-Session-Id", "X-SMG-Routing-Key")
#: A session of the body is looked for in bodies up to this size, in bytes: a parse takes time.
SESSION_BODY_BYTES = 1024 * 1024
#: Without one of these keys a body is not parsed. `"user"` as a role is no key.
_SESSION_KEY = re.compile(rb'"(?:session_id|user)"\s*:')


def session_of(
    headers: MultiMapping[str], body: bytes | None, *, by_user: bool = False
) -> str | None:
    """What requests of one session have in common: a header, else a key of their JSON body.

    Args:
        by_user: OpenAI's `user` makes a session. One name for all requests, as many clients send,
            would pin a whole fleet to one server.
    """
    for name in _SESSION_HEADERS:
        if (session := headers.get(name)) is not None:
            return session or None
    if not body or len(body) > SESSION_BODY_BYTES or _SESSION_KEY.search(body) is None:
        return None
    if "json" not in headers.get("Content-Type", "").lower() or "Content-Encoding" in headers:
        return None
    try:
        content = from_json(body)
    except ValueError:
        return None  # the server says what is wrong with it
    if isinstance(content, dict):
        for key in ("session_id", "user") if by_user else ("session_id",):
            found = content.get(key)
            if isinstance(found, (str, int)) and found != "":
                return str(found)
    return None


#: Where the APIs of OpenAI, SGLang and LMDeploy generate, and where they tell of their model.
_GENERATIONS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/v1/chat/interactive",
    }
)
_MODELS = frozenset({"/v1/models", "/get_model_info", "/model_info"})
#: Before the name of one model.
_MODEL = "/v1/models/"
#: Of the name of a model, once it is decoded: what servers and proxies read in one way only.
_PLAIN_NAME = re.compile(r"[ !$&'()*+,\-./0-9:=@A-Z_a-z~\[\]]+")
#: How often a name is decoded at most, until nothing of it changes any more.
_DECODED_AT_MOST = 4


def is_generation(method: str, target: str, paths: Collection[str] = ()) -> bool:
    """Whether a request is for tokens.

    Args:
        target: the path, with its query.
        paths: more of them; ANY_PATH: all.
    """
    return method == "POST" and _generates(target.partition("?")[0], paths)


def asks_for_models(method: str, target: str) -> bool:
    """Whether a request asks which models are served, or for one of them by its name."""
    if method not in ("GET", "HEAD"):
        return False
    path = target.partition("?")[0]
    return path in _MODELS or (path.startswith(_MODEL) and _is_name(path.removeprefix(_MODEL)))


def _is_name(text: str) -> bool:
    """Whether this end of a path is a name, however often a server decodes it.

    It has no segment `.` or `..`, no parameters, and no character that could end the path.
    """
    for _ in range(_DECODED_AT_MOST):
        decoded = unquote(text, errors="surrogateescape")
        if decoded == text:
            break
        text = decoded
    if _PLAIN_NAME.fullmatch(text) is None:
        return False
    return not {".", ".."}.intersection(text.split("/"))


def _generates(path: str, paths: Collection[str]) -> bool:
    return path in _GENERATIONS or path in paths or ANY_PATH in paths


def _without(headers: MultiMapping[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    if "Connection" in headers:
        listed = ",".join(headers.getall("Connection"))
        named = {name.strip().lower() for name in listed.split(",")}
        # What frames the body is no matter of the connection, whatever is said of it.
        dropped |= named - {"content-length"}
    return CIMultiDict([pair for pair in headers.items() if pair[0].lower() not in dropped])


def refusal(
    status: int,
    kind: str,
    message: str,
    *,
    is_retryable: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """An error answer of the gateway's own, in the form of OpenAI's errors, which its clients show.

    Args:
        kind: for programs: `no_active_server`, `overloaded`, `server_lost`, `bad_request`, ...
        message: what was found, and what to do.
        is_retryable: the same request may be sent again as it is: nothing of an answer is lost.
    """
    error = {"type": kind, "message": message, "retryable": is_retryable}
    return answered({"error": error}, status, headers)


def answered(
    content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Answer:
    """With JSON."""
    head = CIMultiDict(headers or {})
    head["Content-Type"] = "application/json"
    return Answer(status, json.dumps(content).encode(), head)


def nobody(reason: str, kind: str = "no_active_server") -> Answer:
    """There is no server to send a request to just now."""
    return refusal(503, kind, reason, is_retryable=True, headers=_SOON)


def lost(message: str) -> Answer:
    """A server took the request and did not answer it to the end."""
    return refusal(502, "server_lost", message, is_retryable=True)


def bad(message: str) -> Answer:
    """The request itself has to be mended."""
    return refusal(400, "bad_request", message)


_log = logging.getLogger(__name__)

#: Stands for all paths.
ANY_PATH = "*"
#: When a client may come again, in seconds.
_SOON = {"Retry-After": "1"}
_NOT_PASSED_ON = (
    "is not passed on: it would reach one server of many. Requests that generate are, and those "
    "for /v1/models; others where the spec's components.rollout.paths names them. To send "
    "something to every engine, such as new weights, begin a sync: POST /muster/rollout/sync, and "
    "then POST /muster/rollout/sync/ID/broadcast"
)
#: An answer of at most so many bytes is sent once it is there as a whole.
_WHOLE_BYTES = 64 * 1024
#: What a client that is cut off has not read by then is lost.
_LAST_WORDS_S = 5.0
#: Entrypoints that a request is sent to, one after the other, the first one included; and the
#: seconds after the first one failed in which a try may begin.
_TRIES, _RETRY_FOR_S = 3, 30.0
#: Until a connection to a server is made.
_CONNECT_S = 5.0
#: A larger body is refused: each is held, so that it can be sent to another server.
_LONGEST_BODY = 256 * 1024 * 1024


class _NotBegun(Exception):
    """A server has answered, and not to this request: another one may be asked."""


class Forwarder:
    """Everything that requests share. Lives in one asyncio loop.

    Args:
        is_token_own: Authorization headers hold the gateway's token, so servers don't get them.
        listeners: see `Upstreams`.
    """

    def __init__(
        self, fleet: Fleet, *, is_token_own: bool, listeners: EngineListenerCheck | None = None
    ) -> None:
        self.router, settings = fleet.router, fleet.settings
        #: By incarnation, the tasks of the requests that are with it.
        self.flights: defaultdict[tuple[int, int], set[asyncio.Task[Any]]] = defaultdict(set)
        token = settings.health.token
        # Where a token is generated, others may be.
        asked = [token.path] if token is not None and token.json_ is not None else []
        #: That are passed on beside those that are known, each POST as a generation; ANY_PATH: all.
        self.paths = frozenset([*(settings.paths or ()), *asked])
        self.by_user = settings.session_by_user
        self.not_passed_on = _NOT_FOR_SERVERS | ({"authorization"} if is_token_own else set())
        #: Why nothing is tried again any more; None: it is.
        self.is_over: str | None = None
        self.fleet = fleet
        #: By rank and epoch: pieces of what an incarnation has generated for requests.
        self.tokens: Counter[tuple[int, int]] = Counter()
        self.client = Upstreams(_CONNECT_S, listeners)
        fleet.router.listen(lambda gone: self.abort(one.key for one in gone))

    async def forward(self, request: HttpRequest) -> int:
        """Answer it by a server, or refuse it. Returns: the status."""
        return await _Passage(self, request).run()

    def good(self, entrypoint: Entrypoint) -> None:
        """A piece of a generation's answer came."""
        key = entrypoint.key
        self.tokens[key] = count = self.tokens[key] + 1
        self.fleet.note_tokens(*key, count)

    def failed(self, entrypoint: Entrypoint, why: str) -> None:
        """A server did not do its part. This may end the requests that are with it."""
        _log.info("rank %d, epoch %d: %s", *entrypoint.key, why)
        self.fleet.note_failure(*entrypoint.key, why)

    def abort(self, keys: Iterable[tuple[int, int]]) -> None:
        """End all that is with these entrypoints, at once."""
        for flights in [self.flights.pop(key, set()) for key in keys]:
            for task in flights:
                task.cancel()
            # By that a request knows whose cancel it was.
            flights.clear()


class _Passage:
    """One request on its way."""

    def __init__(self, shared: Forwarder, request: HttpRequest) -> None:
        self._shared = shared
        self._request = request
        self._target = request.target
        self._is_generation = is_generation(request.method, self._target, shared.paths)
        self._headers = _without(request.headers, shared.not_passed_on)
        self._body = b""
        self._tried: set[int] = set()
        self._is_busy_excused = self._is_last_try = False
        #: A server has begun to answer, so that nobody else may.
        self._has_head = False
        #: The client's answer is a stream of events, to which another may be added.
        self._is_events = False
        self._bad_status = 0

    async def run(self) -> int:
        shared, request = self._shared, self._request
        path = self._target.partition("?")[0]
        if not (
            self._is_generation
            or _generates(path, shared.paths)
            or asks_for_models(request.method, self._target)
        ):
            return request.send(refusal(404, "not_found", f"{path} {_NOT_PASSED_ON}"))
        try:
            self._body, is_whole = await request.upto(_LONGEST_BODY)
        except Malformed as error:
            return request.send(unreadable(error))
        if not is_whole:
            message = f"a body has at most {_LONGEST_BODY} bytes"
            return request.send(refusal(413, "bad_request", message))
        session = session_of(request.headers, self._body, by_user=shared.by_user)
        give_up_at, why, tries = None, "", 0
        while tries < _TRIES:
            tries += 1
            self._is_last_try = tries == _TRIES
            try:
                entrypoint = await self._take(session)
            except NoEntrypoint as error:
                kind = "overloaded" if isinstance(error, LineFull) else "no_active_server"
                return request.send(nobody(f"{error}; before: {why}" if why else str(error), kind))
            try:
                ended = await self._try(entrypoint)
            finally:
                shared.router.done(entrypoint)
            if isinstance(ended, int):
                return ended
            why = ended
            give_up_at = give_up_at or now_s() + _RETRY_FOR_S
            if shared.is_over is not None:
                return request.send(nobody(shared.is_over, "stopping"))
            if now_s() > give_up_at:
                break
            self._tried.add(entrypoint.rank)
        why = f"no answer, tries: {tries} of {_TRIES}, the last one: {why}"
        return request.send(lost(why))

    async def _take(self, session: str | None) -> Entrypoint:
        shared, generates = self._shared, self._is_generation
        while True:
            try:
                found = await shared.router.take(session, self._tried.copy(), generates=generates)
            except LineFull:
                raise
            except NoEntrypoint:
                # Those that were tried may have lost no more than a connection.
                if not self._tried or not shared.router.entrypoints:
                    raise
                self._tried.clear()
                continue
            if not (generates and shared.router.is_closed):
                return found
            # The routing was closed between its turn and now.
            shared.router.done(found)

    async def _try(self, entrypoint: Entrypoint) -> int | str:
        """The answer's status; without one, why, and another try may be made."""
        task = asyncio.current_task()
        assert task is not None
        shared, flights, is_gone = self._shared, self._shared.flights[entrypoint.key], False
        flights.add(task)
        try:
            try:
                status = await self._once(entrypoint)
            finally:
                if is_gone := task not in flights:
                    task.uncancel()
                flights.discard(task)
        except asyncio.CancelledError:
            if not is_gone or task.cancelling():
                raise  # the client has left
            why = f"rank {entrypoint.rank} has left the routing"
        except Unconnected as error:
            if error.is_own_fault:
                remedy = "try again"
                if error.is_shortage:
                    remedy = "send fewer at once, or raise its limit of open files (ulimit -n)"
                return self._request.send(nobody(f"{error}: {remedy}", "overloaded"))
            reason = f"no connection: {error}"
            why = reason if error.is_impostor else NoReply(reason)
        except BrokenOff as error:
            why = NoReply(f"{'its answer broke off' if self._has_head else 'no answer'}: {error}")
        except Malformed as error:
            why = f"its answer is not HTTP: {error}"
        except _NotBegun as error:
            why = str(error)
        else:
            if self._bad_status:
                shared.failed(entrypoint, f"it answered {self._bad_status}")
            return status
        if not is_gone:
            shared.failed(entrypoint, why)
        return await self._end(why) if self._has_head else why

    async def _once(self, entrypoint: Entrypoint) -> int:
        """Raises: Unconnected, BrokenOff, Malformed, of the server; _NotBegun."""
        server = await self._shared.client.request(
            self._request.method,
            entrypoint.url,
            self._target,
            headers=self._headers,
            body=self._body,
            is_last_try=self._is_last_try,
        )
        try:
            if server.status == 503 and self._may_ask_another(entrypoint):
                self._is_busy_excused = True
                raise _NotBegun("it answered 503")
            # An answer to this request, or the last words of a front end whose engine has died?
            may_be_dying = server.status == 500 and self._may_ask_another(entrypoint)
            if may_be_dying and not await self._shared.fleet.stays_ready(entrypoint.url):
                raise _NotBegun("it answered 500, and is not ready any more")
            self._has_head = True
            self._bad_status = server.status if server.status >= 500 else 0
            return await self._answer(server, entrypoint)
        finally:
            server.close()

    async def _answer(self, server: ServedConnection, entrypoint: Entrypoint) -> int:
        request, content = self._request, server.content
        headers = _without(server.headers, _HOP_BY_HOP)
        headers["X-Muster-Rank"] = str(entrypoint.rank)
        headers["X-Muster-Engine"] = str(entrypoint.engine)
        headers["X-Muster-Epoch"] = str(entrypoint.epoch)
        headers["X-Muster-Version"] = str(entrypoint.version)
        # Neither a head nor another answer needs the engine.
        is_generated = self._is_generation and server.status < 400
        if (length := server.content_length) is not None and length <= _WHOLE_BYTES:
            body, _ = await content.upto(_WHOLE_BYTES)
            if body and is_generated:
                self._shared.good(entrypoint)
            return request.send(Answer(server.status, body, headers, server.reason))
        media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self._is_events = length is None and media_type == "text/event-stream"
        try:
            request.begin(server.status, server.reason, headers)
            if content.is_waiting:
                request.flush()
            last = b""
            while piece := await content.read_available():
                # What begins with a colon is a comment that keeps an event stream open.
                if is_generated and not piece.startswith(b":"):
                    self._shared.good(entrypoint)
                if content.is_complete:
                    last = piece
                    break
                await request.write(piece)
            if self._is_events:
                # A comment, which readers of events leave out: a sync may have come in between.
                version = self._shared.fleet.version_of(entrypoint.engine)
                last += f": X-Muster-Version: {version}\n\n".encode()
            request.end(last)
        except ConnectionError:
            pass  # the client has left; there is nobody to tell
        return server.status

    def _may_ask_another(self, entrypoint: Entrypoint) -> bool:
        """503 says that a server did not begin to work on it, so that one other may be asked."""
        tried = {*self._tried, entrypoint.rank}
        return not (self._is_busy_excused or self._is_last_try) and any(
            one.rank not in tried for one in self._shared.router.entrypoints
        )

    async def _end(self, why: str) -> int:
        """The server's answer broke off: say so, or, where some of it was sent, cut the connection.

        A client sees an answer that is not complete, and a stream's last event says why.
        """
        request = self._request
        if not request.is_begun:
            return request.send(lost(why))
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                # The last event of the stream may be incomplete.
                last = f"\n\nevent: error\ndata: {lost(why).text}\n\n".encode()
                await request.cut(last if self._is_events else b"")
        return 200


def unreadable(error: Malformed) -> Answer:
    """The body of a request is none, or does not come."""
    return refusal(error.status, "bad_request", f"the body can't be read: {error}")
