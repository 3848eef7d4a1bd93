"""Forward a client's request to an inference server, and stream the response back to the client.

If a server fails before its response has begun, the request is sent to another server. Once a
response has begun, the request is never sent again, so that no client gets two responses. Each
error response of the gateway itself says whether the client may send the request again.

The forwarder knows which requests each server is answering, and cancels these requests when the
server ends.
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

#: Names of HTTP headers that concern a single connection and are therefore never forwarded.
#: Source: RFC 9110, section 7.6.1, and RFC 2616, section 13.5.1.
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
#: Names of request headers that are not forwarded to a server. `host` names the gateway, and the
#: gateway itself answers `expect` with the response 100.
_NOT_FOR_SERVERS = _HOP_BY_HOP | {"host", "expect"}
#: Headers that contain the session of a request: Muster's own header, and that of sglang-router.
_SESSION_HEADERS = ("X-Session-Id", "X-SMG-Routing-Key")
#: Largest size in bytes of a request body that is searched for a session. Parsing a larger body
#: takes too long.
SESSION_BODY_BYTES = 1024 * 1024
#: Matches a request body that may have the JSON key `session_id` or `user`. Other bodies are not
#: parsed. The value `"user"` of the key `role` in a chat message does not match.
_SESSION_KEY = re.compile(rb'"(?:session_id|user)"\s*:')


def read_session(
    headers: MultiMapping[str], body: bytes | None, *, by_user: bool = False
) -> str | None:
    """Return the session id of a request, or None if the request has no session.

    The session id is in a header, or in the JSON body if no header contains it.

    Args:
        headers: Headers of the request.
        body: Body of the request, or None.
        by_user: True to use the key `user` of OpenAI's API as the session id. Then all requests
            with the same `user` go to the same server.
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
        # The body is not valid JSON, so it names no session. The server that gets the request
        # reports the mistake to the client.
        return None
    if isinstance(content, dict):
        for key in ("session_id", "user") if by_user else ("session_id",):
            value = content.get(key)
            if isinstance(value, (str, int)) and value != "":
                return str(value)
    return None


#: Paths of requests that generate tokens, in the APIs of OpenAI, SGLang and LMDeploy.
_GENERATION_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/v1/chat/interactive",
    }
)
#: Paths of requests for a list or a description of the served models.
_MODEL_LIST_PATHS = frozenset({"/v1/models", "/get_model_info", "/model_info"})
#: Start of the path of a request for a single model. The name of the model follows.
_MODEL_PREFIX = "/v1/models/"
#: Matches a decoded model name that has no special characters. Servers and proxies may interpret
#: special characters in different ways.
_PLAIN_NAME = re.compile(r"[ !$&'()*+,\-./0-9:=@A-Z_a-z~\[\]]+")
#: Largest number of times that a model name is percent-decoded. Decoding stops earlier if it no
#: longer changes the name.
_DECODED_AT_MOST = 4


def is_generation(method: str, target: str, paths: Collection[str] = ()) -> bool:
    """Return True if a request generates tokens.

    Args:
        method: HTTP method in upper case.
        target: Path and query of the request.
        paths: Further paths that generate tokens. With `ANY_PATH`, each path generates tokens.
    """
    return method == "POST" and _is_generation_path(target.partition("?")[0], paths)


def asks_for_models(method: str, target: str) -> bool:
    """Return True if a request asks for the list of served models, or for a single model.

    Args:
        method: HTTP method in upper case.
        target: Path and query of the request.
    """
    if method not in ("GET", "HEAD"):
        return False
    path = target.partition("?")[0]
    if path in _MODEL_LIST_PATHS:
        return True
    return path.startswith(_MODEL_PREFIX) and _is_model_name(path.removeprefix(_MODEL_PREFIX))


def _is_model_name(text: str) -> bool:
    """Return True if the last part of a URL path is a model name and nothing else.

    The text is percent-decoded several times before the check, because each proxy and server may
    decode it once more. A model name has no segment `.` or `..`, no parameters, and no character
    that ends a path.
    """
    for _ in range(_DECODED_AT_MOST):
        decoded = unquote(text, errors="surrogateescape")
        if decoded == text:
            break
        text = decoded
    if _PLAIN_NAME.fullmatch(text) is None:
        return False
    return not {".", ".."}.intersection(text.split("/"))


def _is_generation_path(path: str, paths: Collection[str]) -> bool:
    return path in _GENERATION_PATHS or path in paths or ANY_PATH in paths


def _drop_headers(headers: MultiMapping[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    """Return headers without those in `dropped` and those that the header `Connection` lists.

    Args:
        headers: Headers of a request or a response.
        dropped: Names of the headers to drop, in lower case.
    """
    if "Connection" in headers:
        listed = ",".join(headers.getall("Connection"))
        connection_headers = {name.strip().lower() for name in listed.split(",")}
        # Keep the header Content-Length even if the header Connection lists it. Otherwise, the
        # receiver would not find the end of the body.
        dropped |= connection_headers - {"content-length"}
    return CIMultiDict([pair for pair in headers.items() if pair[0].lower() not in dropped])


def make_error(
    status: int,
    kind: str,
    message: str,
    *,
    is_retryable: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Return an error response of the gateway in the form of OpenAI's errors.

    Args:
        status: HTTP status.
        kind: Name of the error for programs, such as `no_active_server`, `overloaded`,
            `server_lost` or `bad_request`.
        message: Description of the error and of the remedy, for a person.
        is_retryable: True if the client may send the same request again.
        headers: Further headers of the response. `Content-Type` is added to them.
    """
    error = {"type": kind, "message": message, "retryable": is_retryable}
    return make_json_answer({"error": error}, status, headers)


def make_json_answer(
    content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Answer:
    """Return a response with a JSON body.

    Args:
        content: Content of the body.
        status: HTTP status.
        headers: Further headers of the response. `Content-Type` is added to them.
    """
    all_headers = CIMultiDict(headers or {})
    all_headers["Content-Type"] = "application/json"
    return Answer(status, json.dumps(content).encode(), all_headers)


def make_unavailable_error(reason: str, kind: str = "no_active_server") -> Answer:
    """Return the error response for a request that no server can take at the moment."""
    return make_error(503, kind, reason, is_retryable=True, headers=_RETRY_SOON)


def make_server_lost_error(message: str) -> Answer:
    """Return the error response for a request that a server did not answer completely."""
    return make_error(502, "server_lost", message, is_retryable=True)


def make_bad_request_error(message: str) -> Answer:
    """Return the error response for a request that the client has to correct."""
    return make_error(400, "bad_request", message)


_log = logging.getLogger(__name__)

#: Entry in a list of paths that stands for every path.
ANY_PATH = "*"
#: Response header that asks the client to send the request again after one second.
_RETRY_SOON = {"Retry-After": "1"}
_NOT_PASSED_ON = (
    "is not forwarded, because it would reach only one server. The gateway forwards only requests "
    "that generate tokens, /v1/models, and the paths in components.rollout.paths. To send new "
    "weights to all engines, use POST /muster/rollout/sync, then POST "
    "/muster/rollout/sync/ID/broadcast"
)
#: Largest size in bytes of a response that is received completely before it is sent to the client.
_WHOLE_BYTES = 64 * 1024
#: If a server is lost during a response, the client gets this number of seconds to read the data
#: that was already sent. Then the gateway closes the client's connection.
_LAST_WORDS_S = 5.0
#: Largest number of servers that are tried, one after another, for the same request.
_TRIES = 3
#: Time limit for further attempts to answer a request, in seconds after the first failed attempt.
_RETRY_FOR_S = 30.0
#: Seconds that opening a connection to a server may take.
_CONNECT_S = 5.0
#: Largest size in bytes of a request body. The gateway keeps the body in memory until the request
#: is answered, to send it again after a failed attempt.
_LONGEST_BODY = 256 * 1024 * 1024


class _NotBegun(Exception):
    """A server refused a request without working on it, so the request may go to another server."""


class Forwarder:
    """Forwards all requests of one gateway to the servers of the fleet.

    All methods have to be called in the thread of one asyncio event loop.

    Args:
        fleet: The fleet whose servers get the requests.
        is_token_own: True if the header `Authorization` holds the gateway's own token. The header
            is then removed from forwarded requests.
        listeners: Object that checks whether a process of the engine has accepted a connection to
            a server. None to skip this check.
    """

    def __init__(
        self, fleet: Fleet, *, is_token_own: bool, listeners: EngineListenerCheck | None = None
    ) -> None:
        self.fleet = fleet
        self.router = fleet.router
        settings = fleet.settings
        #: Tasks of the requests that each entrypoint is answering. A key of this mapping is the
        #: rank and the epoch of the entrypoint. The epoch counts the starts of the entrypoint.
        self.running_requests: defaultdict[tuple[int, int], set[asyncio.Task[Any]]] = defaultdict(
            set
        )
        token = settings.health.token
        # The health check `token` makes a server generate a token. If this check is a POST request,
        # clients can use the same path to generate tokens. So add this path to `paths`.
        token_paths = [token.path] if token is not None and token.json_ is not None else []
        #: Further paths whose requests are forwarded. `ANY_PATH` stands for every path. A POST
        #: request to one of these paths counts as a request that generates tokens.
        self.paths = frozenset([*(settings.paths or ()), *token_paths])
        #: True if the key `user` of OpenAI's API is used as the session id.
        self.by_user = settings.session_by_user
        #: Names of the request headers that are not forwarded, in lower case.
        self.dropped_headers = _NOT_FOR_SERVERS | ({"authorization"} if is_token_own else set())
        #: Reason why the gateway stops, or None while the gateway is open. If a reason is set,
        #: failed requests are not retried.
        self.stop_reason: str | None = None
        #: Number of response pieces that each entrypoint has sent. A key of this mapping is the
        #: rank and the epoch of the entrypoint. The epoch counts the starts of the entrypoint.
        self.generated_pieces: Counter[tuple[int, int]] = Counter()
        self.client = Upstreams(_CONNECT_S, listeners)
        fleet.router.listen(self._abort_entrypoints)

    async def forward(self, request: HttpRequest) -> int:
        """Answer a request with a server's response or an error. Return the HTTP status."""
        return await _ForwardedRequest(self, request).run()

    def note_generated_piece(self, entrypoint: Entrypoint) -> None:
        """Count one response piece that an entrypoint has generated. Report the count to the fleet.

        The report shows that the entrypoint's engine does not hang.
        """
        key = entrypoint.key
        count = self.generated_pieces[key] + 1
        self.generated_pieces[key] = count
        self.fleet.note_tokens(*key, count)

    def note_failure(self, entrypoint: Entrypoint, reason: str) -> None:
        """Log and report that a server failed to answer a request.

        The report may make the fleet end the server and cancel all requests to the server.
        """
        _log.info("rank %d, epoch %d: %s", *entrypoint.key, reason)
        self.fleet.note_failure(*entrypoint.key, reason)

    def abort(self, keys: Iterable[tuple[int, int]]) -> None:
        """Cancel all running requests to some entrypoints.

        Args:
            keys: Rank and epoch of each entrypoint. The epoch counts the starts of the entrypoint.
        """
        task_sets = [self.running_requests.pop(key, set()) for key in keys]
        for tasks in task_sets:
            for task in tasks:
                task.cancel()
            # Remove the tasks from the set. `_try_entrypoint` then knows that this method has
            # cancelled them. If a client disconnects, the task of its request is cancelled, too,
            # but stays in the set.
            tasks.clear()

    def _abort_entrypoints(self, entrypoints: Iterable[Entrypoint]) -> None:
        self.abort(entrypoint.key for entrypoint in entrypoints)


class _ForwardedRequest:
    """One request of a client during all attempts to answer it.

    Args:
        shared: The forwarder of the gateway.
        request: The request of the client.
    """

    def __init__(self, shared: Forwarder, request: HttpRequest) -> None:
        self._shared = shared
        self._request = request
        self._target = request.target
        self._is_generation = is_generation(request.method, self._target, shared.paths)
        self._headers = _drop_headers(request.headers, shared.dropped_headers)
        self._body = b""
        #: Ranks of the servers that failed to answer this request in an earlier attempt.
        self._tried_ranks: set[int] = set()
        #: True if a response with status 503 was discarded and another server was asked. This
        #: happens at most once for each request.
        self._was_busy_retried = False
        self._is_last_try = False
        #: True if a server's response has begun. From then on, no other server may be asked.
        self._has_head = False
        #: True if the response is a stream of server-sent events. If the server is lost during the
        #: stream, the gateway appends an event with the error.
        self._is_event_stream = False
        #: HTTP status of the server's response if the status is 500 or more, and so counts as a
        #: failure of the server. Otherwise 0.
        self._error_status = 0

    async def run(self) -> int:
        """Forward the request or refuse it, and return the HTTP status of the response."""
        shared = self._shared
        request = self._request
        path = self._target.partition("?")[0]
        if not (
            self._is_generation
            or _is_generation_path(path, shared.paths)
            or asks_for_models(request.method, self._target)
        ):
            return request.send(make_error(404, "not_found", f"{path} {_NOT_PASSED_ON}"))
        try:
            self._body, is_whole = await request.read_up_to(_LONGEST_BODY)
        except Malformed as error:
            return request.send(make_unreadable_body_error(error))
        if not is_whole:
            message = (
                f"the request body is larger than {_LONGEST_BODY} bytes, which is the limit of the "
                "gateway"
            )
            return request.send(make_error(413, "bad_request", message))
        session = read_session(request.headers, self._body, by_user=shared.by_user)
        give_up_at_s: float | None = None
        failure = ""
        tries = 0
        while tries < _TRIES:
            tries += 1
            self._is_last_try = tries == _TRIES
            try:
                entrypoint = await self._take_entrypoint(session)
            except NoEntrypoint as error:
                kind = "overloaded" if isinstance(error, LineFull) else "no_active_server"
                reason = f"{error}; earlier failure: {failure}" if failure else str(error)
                return request.send(make_unavailable_error(reason, kind))
            try:
                status_or_failure = await self._try_entrypoint(entrypoint)
            finally:
                shared.router.done(entrypoint)
            if isinstance(status_or_failure, int):
                return status_or_failure
            failure = status_or_failure
            give_up_at_s = give_up_at_s or now_s() + _RETRY_FOR_S
            if shared.stop_reason is not None:
                return request.send(make_unavailable_error(shared.stop_reason, "stopping"))
            if now_s() > give_up_at_s:
                break
            self._tried_ranks.add(entrypoint.rank)
        message = (
            f"no server answered the request in {tries} tries (at most {_TRIES} are allowed); last "
            f"failure: {failure}"
        )
        return request.send(make_server_lost_error(message))

    async def _take_entrypoint(self, session: str | None) -> Entrypoint:
        """Return the entrypoint for the next attempt. The caller has to call `Router.done`.

        Args:
            session: Name of the request's session, or None.

        Raises:
            NoEntrypoint: No entrypoint can take the request.
        """
        router = self._shared.router
        generates = self._is_generation
        while True:
            try:
                entrypoint = await router.take(
                    session, self._tried_ranks.copy(), generates=generates
                )
            except LineFull:
                raise
            except NoEntrypoint:
                # The request has failed on every available server. Allow all servers again: perhaps
                # only a connection was lost, and the server still works.
                if not self._tried_ranks or not router.entrypoints:
                    raise
                self._tried_ranks.clear()
                continue
            if not (generates and router.is_closed):
                return entrypoint
            # A weight sync has begun after the router chose the entrypoint. Release the entrypoint.
            # The next iteration waits until the sync has ended.
            router.done(entrypoint)

    async def _try_entrypoint(self, entrypoint: Entrypoint) -> int | str:
        """Send the request to an entrypoint once, and forward the response to the client.

        Returns:
            The HTTP status of the response that the client received. If the attempt failed before a
            response began, the reason as text.
        """
        task = asyncio.current_task()
        assert task is not None
        shared = self._shared
        tasks_of_entrypoint = shared.running_requests[entrypoint.key]
        is_aborted = False
        tasks_of_entrypoint.add(task)
        try:
            try:
                status = await self._request_once(entrypoint)
            finally:
                # A task that is missing in this set was cancelled by `Forwarder.abort`.
                is_aborted = task not in tasks_of_entrypoint
                if is_aborted:
                    task.uncancel()
                tasks_of_entrypoint.discard(task)
        except asyncio.CancelledError:
            if not is_aborted or task.cancelling():
                # The task was cancelled because the client has closed its connection.
                raise
            failure = (
                f"the gateway no longer sends requests to the server of rank {entrypoint.rank}"
            )
        except Unconnected as error:
            if error.is_own_fault:
                remedy = "try again"
                if error.is_shortage:
                    remedy = (
                        "send fewer requests at once, or raise the limit of open files (ulimit -n)"
                    )
                answer = make_unavailable_error(f"{error}: {remedy}", "overloaded")
                return self._request.send(answer)
            reason = f"no connection: {error}"
            failure = reason if error.is_impostor else NoReply(reason)
        except BrokenOff as error:
            phase = "the server's answer broke off" if self._has_head else "no answer"
            failure = NoReply(f"{phase}: {error}")
        except Malformed as error:
            failure = f"the server's answer is not HTTP: {error}"
        except _NotBegun as error:
            failure = str(error)
        else:
            if self._error_status:
                shared.note_failure(entrypoint, f"the server answered {self._error_status}")
            return status
        if not is_aborted:
            shared.note_failure(entrypoint, failure)
        return await self._end_response(failure) if self._has_head else failure

    async def _request_once(self, entrypoint: Entrypoint) -> int:
        """Send the request to a server, and forward the server's response to the client.

        Returns:
            The HTTP status of the response.

        Raises:
            Unconnected, BrokenOff, Malformed: The server did not answer; see `Upstreams.request`.
            _NotBegun: The server has refused the request before working on it.
        """
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
                self._was_busy_retried = True
                raise _NotBegun("the server answered 503")
            # Status 500 may mean that only this request fails, or that the engine has died and its
            # HTTP server still runs for a moment. If the engine has died, ask another server.
            may_be_dying = server.status == 500 and self._may_ask_another(entrypoint)
            if may_be_dying and not await self._shared.fleet.stays_ready(entrypoint.url):
                raise _NotBegun("the server answered with HTTP status 500, and is no longer ready")
            self._has_head = True
            self._error_status = server.status if server.status >= 500 else 0
            return await self._send_response(server, entrypoint)
        finally:
            server.close()

    async def _send_response(self, server: ServedConnection, entrypoint: Entrypoint) -> int:
        """Send a server's response to the client and return the HTTP status."""
        request = self._request
        content = server.content
        headers = _drop_headers(server.headers, _HOP_BY_HOP)
        headers["X-Muster-Rank"] = str(entrypoint.rank)
        headers["X-Muster-Engine"] = str(entrypoint.engine)
        headers["X-Muster-Epoch"] = str(entrypoint.epoch)
        headers["X-Muster-Version"] = str(entrypoint.version)
        # Only a generated response proves that the engine works. If the engine hangs, its HTTP
        # server still sends error responses and model lists.
        is_generated = self._is_generation and server.status < 400
        length = server.content_length
        if length is not None and length <= _WHOLE_BYTES:
            body, _ = await content.read_up_to(_WHOLE_BYTES)
            if body and is_generated:
                self._shared.note_generated_piece(entrypoint)
            return request.send(Answer(server.status, body, headers, server.reason))
        media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self._is_event_stream = length is None and media_type == "text/event-stream"
        try:
            request.begin(server.status, server.reason, headers)
            if content.is_waiting:
                request.flush()
            last_piece = b""
            while piece := await content.read_available():
                # Do not count comments, which are lines of an event stream that begin with a colon.
                # Servers send them to keep the connection open, even if the engine hangs.
                if is_generated and not piece.startswith(b":"):
                    self._shared.note_generated_piece(entrypoint)
                if content.is_complete:
                    last_piece = piece
                    break
                await request.write(piece)
            if self._is_event_stream:
                # Append the current weight version to the event stream, as a comment that clients
                # ignore. A weight sync may have changed the version during the response.
                version = self._shared.fleet.version_of(entrypoint.engine)
                last_piece += f": X-Muster-Version: {version}\n\n".encode()
            request.end(last_piece)
        except ConnectionError:
            # The client has closed its connection, so nobody would read an error response.
            pass
        return server.status

    def _may_ask_another(self, entrypoint: Entrypoint) -> bool:
        """Return True if another server may be asked after a server has sent an error response."""
        if self._was_busy_retried or self._is_last_try:
            return False
        tried_ranks = {*self._tried_ranks, entrypoint.rank}
        return any(other.rank not in tried_ranks for other in self._shared.router.entrypoints)

    async def _end_response(self, reason: str) -> int:
        """End the response to the client after the connection to the server was lost.

        The end of the response depends on the data that the client has received:

        - no data: an error response is sent;
        - a part of an event stream: a last event with the error is sent;
        - a part of another response: the connection is closed, so that the client sees an
          incomplete response.

        Args:
            reason: Reason for the loss of the connection.

        Returns:
            The status code of the HTTP response that the client received.
        """
        request = self._request
        if not request.is_begun:
            return request.send(make_server_lost_error(reason))
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                # Begin with an empty line, which ends the server's last event even if that event is
                # incomplete.
                error_text = make_server_lost_error(reason).text
                last_event = f"\n\nevent: error\ndata: {error_text}\n\n".encode()
                await request.cut(last_event if self._is_event_stream else b"")
        return 200


def make_unreadable_body_error(error: Malformed) -> Answer:
    """Return the error response for a request whose body is malformed or did not arrive."""
    return make_error(error.status, "bad_request", f"the request body can't be read: {error}")
