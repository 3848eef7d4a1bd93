"""Client of a fleet of vLLM servers for a trainer: requests answers, and updates the weights.

All requests go through the gateway of the fleet. The trainer updates the weights in a transaction
(`POST /muster/rollout/sync`), called a sync. While the sync is open, no engine answers. After its
commit, only the engines that the commit named receive requests. The servers read the weights from a
folder, so they must see the same files as the trainer.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: Longest time, in seconds, from a prompt to its answers. This time must be longer than the restart
#: of an engine, so that a restart does not end the training.
ANSWER_WITHIN_S = 300.0
#: Time, in seconds, between two tries of a request.
_RETRY_EVERY_S = 0.5
#: Longest time, in seconds, until the fleet's gateway answers a request that it does not forward to
#: an inference engine.
_ORDER_WITHIN_S = 30.0
#: Number of seconds without a connection after which a gateway counts as gone.
_GONE_AFTER_S = 10.0
#: This client waits for the gateway this number of seconds longer than the gateway waits for the
#: engines. So if an engine does not answer in time, the client receives the gateway's report.
_MARGIN_S = 15.0


class FleetError(Exception):
    """The gateway is gone or refuses requests. The training cannot continue."""


class SyncLost(Exception):
    """A weight sync could not begin, or it ended before its commit. The next sync may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sampled answer, and the engine that sampled it."""

    #: Tokens of the answer, without the tokens of the prompt.
    tokens: tuple[int, ...]
    #: Log-probability of each token in nats, as the engine reported it.
    log_probs: tuple[float, ...]
    #: Index of the inference engine in the fleet.
    engine: int
    #: Epoch of the engine: 1 after the first start, 2 after the second start, and so on.
    epoch: int
    #: Version of the weights that sampled the answer, as the gateway reported it.
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """Result of one weight sync, a transaction that brings new weights to the engines."""

    #: Version of the weights that the weight sync has committed.
    version: int
    #: Indices of the engines that serve the committed weights.
    serving: tuple[int, ...]
    #: Engines that did not get the weights: mapping from the index of the engine to the reason.
    left_out: Mapping[int, str]
    #: Seconds from the start of the weight sync to its commit. During this time, the engines
    #: generate no answers.
    took_s: float


class RolloutClient:
    """Client of a fleet: a group of inference servers behind one gateway.

    `complete` may be called from any thread.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            url: URL of the gateway.
            model: Name of the model in requests to the engines.
            token: Bearer token that the gateway requires, or an empty string.
            clock: Returns the time in seconds.
            sleep: Waits for a number of seconds.
        """
        self._url = url.rstrip("/")
        self._model = model
        self._token = token
        self._clock = clock
        self._sleep = sleep
        #: Mapping from the HTTP status of a failed response to the number of requests that were
        #: sent again. The status 0 stands for a missing response.
        self.failures: Counter[int] = Counter()
        # Ignore proxies in environment variables, because the gateway runs on this host.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def complete(self, prompt: str, *, count: int, max_tokens: int) -> list[Answer]:
        """Return answers to a prompt, sampled at temperature 1 by one engine.

        The request is sent again if the fleet has no free engine, or if the engine died.

        Args:
            prompt: The prompt.
            count: Number of answers.
            max_tokens: Largest number of tokens of an answer.

        Raises:
            FleetError: There was no answer within `ANSWER_WITHIN_S`, or the request is wrong.
        """
        body = {
            "model": self._model,
            "prompt": prompt,
            "n": count,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        deadline = self._clock() + ANSWER_WITHIN_S
        while True:
            try:
                headers, content = self._send(
                    "POST", "/v1/completions", body, within_s=ANSWER_WITHIN_S
                )
                return _parse_answers(headers, content)
            except urllib.error.HTTPError as error:
                status = error.code
                reason = f"{error.code} {error.read(500)!r}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                status = 0
                reason = str(error) or type(error).__name__
            if 400 <= status < 500 or self._clock() >= deadline:
                raise FleetError(f"the request to the gateway at {self._url} failed: {reason}")
            self.failures[status] += 1
            self._sleep(_RETRY_EVERY_S)

    def engines(self) -> list[Mapping[str, Any]]:
        """Return the current state of each engine of the fleet.

        Raises:
            FleetError: The gateway is gone or refuses the request.
        """
        engines: list[Mapping[str, Any]] = self._order("GET", "/muster/rollout")["engines"]
        return engines

    def sync(
        self,
        folder: str,
        *,
        version: int,
        in_flight: str = "wait",
        timeout_s: float = 60.0,
        broadcast_s: float = 20.0,
    ) -> Synced:
        """Bring the weights in a folder to all engines in one weight sync.

        An engine that fails during the sync receives no requests after the sync.

        Args:
            folder: Absolute path of the folder, as the servers see it. `${engine.index}` in the
                path is replaced by the index of each engine.
            version: Version of the weights.
            in_flight: Treatment of running requests: `wait` for their end, `abort` them, or
                `interrupt` them and later continue them with the new weights.
            timeout_s: Longest duration of the whole weight sync, in seconds.
            broadcast_s: Longest time, in seconds, that an engine may take to load the weights. The
                commit leaves out slower engines.

        Raises:
            SyncLost: No engine has the weights, or the sync could not begin or ended too early.
            FleetError: The gateway is gone or refuses the request.
        """
        began_at = self._clock()
        limits = {"timeout_s": timeout_s, "in_flight": in_flight}
        sync = self._order("POST", "/muster/rollout/sync", limits, within_s=timeout_s + _MARGIN_S)
        path = f"/muster/rollout/sync/{sync['sync']}"
        targets = {int(target["engine"]): int(target["epoch"]) for target in sync["targets"]}

        load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        failures = self._broadcast(path, "/collective_rpc", load, broadcast_s)
        # Clear the prefix caches of the engines. The caches were computed with the old weights.
        cache_failures = self._broadcast(path, "/reset_prefix_cache", None, broadcast_s)
        left_out = cache_failures | failures

        epochs = {engine: epoch for engine, epoch in targets.items() if engine not in left_out}
        if not epochs:
            self._order("DELETE", path)
            raise SyncLost(
                f"no inference engine loaded the weights of version {version}: "
                f"{left_out or 'no engine was running'}"
            )
        commit = self._order("POST", f"{path}/commit", {"version": version, "epochs": epochs})
        return Synced(
            version=version,
            serving=tuple(int(engine) for engine in commit["serving"]),
            left_out=left_out,
            took_s=self._clock() - began_at,
        )

    def _broadcast(
        self, path: str, engine_path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[int, str]:
        """Let the gateway send a POST request to every engine that takes part in a weight sync.

        Args:
            path: URL path of the weight sync on the gateway.
            engine_path: URL path of the POST request on each engine.
            body: JSON body of the request, or None.
            timeout_s: Longest time, in seconds, until an engine answers.

        Returns:
            Mapping from each engine that failed to the reason why the request failed.
        """
        broadcast = {"method": "POST", "path": engine_path, "body": body, "timeout_s": timeout_s}
        within_s = timeout_s + _MARGIN_S
        response = self._order("POST", f"{path}/broadcast", broadcast, within_s=within_s)
        return {
            int(answer["engine"]): f"{engine_path}: {answer['status']} {str(answer['body'])[:200]}"
            for answer in response["answers"]
            if answer["status"] != 200
        }

    def _order(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        within_s: float = _ORDER_WITHIN_S,
    ) -> Mapping[str, Any]:
        """Send the gateway a request that must not be executed twice, and return the JSON response.

        The request is sent again only if the connection was refused.

        Args:
            method: HTTP method.
            path: Path of the request.
            body: JSON body of the request, or None.
            within_s: Longest time until the response, in seconds.

        Raises:
            SyncLost: The gateway has ended the weight sync, or could not begin it.
            FleetError: The gateway is gone or refuses the request.
        """
        deadline = self._clock() + _GONE_AFTER_S
        while True:
            try:
                return self._send(method, path, body, within_s=within_s)[1]
            except urllib.error.HTTPError as error:
                reason = (
                    f"the gateway answered {method} {self._url}{path} with HTTP status "
                    f"{error.code}: {error.read(500)!r}"
                )
                # Status 409 means that running requests did not end in time. Status 404 means that
                # the time limit of the weight sync has passed, so the gateway has ended the sync.
                if error.code in (404, 409):
                    raise SyncLost(reason) from error
                raise FleetError(reason) from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = f"the gateway no longer answers: {method} {self._url}{path}: {error}"
                is_unsent = isinstance(getattr(error, "reason", None), ConnectionRefusedError)
                if not is_unsent or self._clock() >= deadline:
                    raise FleetError(reason) from error
            self._sleep(_RETRY_EVERY_S)

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, within_s: float
    ) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """Send the gateway one request, and return the headers and the JSON object of the response.

        Args:
            method: HTTP method.
            path: Path of the request.
            body: JSON body of the request, or None.
            within_s: Longest time until the response, in seconds.

        Raises:
            urllib.error.HTTPError: The response is not a success.
            OSError, http.client.HTTPException: No response came.
            ValueError: The response is not a JSON object.
        """
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        with self._opener.open(request, timeout=within_s) as response:
            content = json.load(response)
        if not isinstance(content, dict):
            raise ValueError(f"the answer is not a JSON object: {content!r}")
        return response.headers, content


def _parse_answers(headers: Mapping[str, str], content: Mapping[str, Any]) -> list[Answer]:
    """Return the answers of a completion.

    Args:
        headers: Headers of the response. The gateway sends the index of the engine, the epoch of
            the engine, and the version of the weights in the headers.
        content: JSON object of the response, as vLLM writes it.

    Raises:
        ValueError: A field or a header is missing.
    """
    try:
        return [
            Answer(
                tokens=tuple(choice["token_ids"]),
                log_probs=tuple(choice["logprobs"]["token_logprobs"]),
                engine=int(headers["X-Muster-Engine"]),
                epoch=int(headers["X-Muster-Epoch"]),
                version=int(headers["X-Muster-Version"]),
            )
            for choice in content["choices"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the answer of the gateway has an unexpected form ({error!r}): {str(content)[:300]}"
        ) from error
