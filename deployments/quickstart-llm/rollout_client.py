"""The trainer's side of a fleet of vLLM servers: asks for answers, and brings weights into step.

Both go through the gateway of the fleet. Weights go there in a transaction, `POST
/muster/rollout/sync`: while one is open no engine answers, and when it ends only those engines
serve that its commit has named. A server reads the weights from a folder, so it must see the same
files as the trainer.
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

#: The gateway refuses nothing for longer than an engine takes to come back.
ANSWER_WITHIN_S = 300.0
_RETRY_EVERY_S = 0.5
#: For orders that the gateway answers by itself.
_ORDER_WITHIN_S = 30.0
#: A gateway that can't be reached for this long is considered gone; in seconds.
_GONE_AFTER_S = 10.0
#: Longer than the gateway itself waits for an engine.
_MARGIN_S = 15.0


class FleetError(Exception):
    """The gateway is gone or refuses. No engine would receive further weights."""


class SyncLost(Exception):
    """A sync could not begin, or ended before it was committed; the next one may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sampled answer, and the engine that gave it."""

    #: The tokens after the prompt
    tokens: tuple[int, ...]
    #: Log-probability of each token in nats, as the engine reported it
    log_probs: tuple[float, ...]
    engine: int
    #: Epoch of the engine: the number of its incarnation
    epoch: int
    #: Version of the weights that sampled the answer, as the gateway reported it
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """Result of one sync."""

    version: int
    #: Engines that serve the committed weights
    serving: tuple[int, ...]
    #: `left_out[engine]`: reason why the engine was not committed
    left_out: Mapping[int, str]
    #: From its begin to its commit, in which nobody answered
    took_s: float


class RolloutClient:
    """The fleet behind one gateway. `complete` may be called from any thread."""

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
            url: of the gateway.
            model: the name under which the engines serve it.
            token: that the gateway asks for; empty: none.
        """
        self._url = url.rstrip("/")
        self._model = model
        self._token = token
        self._clock = clock
        self._sleep = sleep
        #: Number of requests that were sent again, by their HTTP status; 0 if there was no answer.
        self.failures: Counter[int] = Counter()
        # Ignore the proxy of the environment variables: both processes run on this host.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def complete(self, prompt: str, *, count: int, max_tokens: int) -> list[Answer]:
        """`count` answers to a prompt, sampled at temperature 1 by one engine.

        Asked again where the fleet says so, or where an engine died with the request.

        Raises: FleetError, where there is none within `ANSWER_WITHIN_S`.
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
                return _answers(headers, content)
            except urllib.error.HTTPError as error:
                status, why = error.code, f"{error.code} {error.read(500)!r}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                status, why = 0, str(error) or type(error).__name__
            if 400 <= status < 500 or self._clock() >= deadline:
                raise FleetError(f"no answer from {self._url}: {why}")
            self.failures[status] += 1
            self._sleep(_RETRY_EVERY_S)

    def engines(self) -> list[Mapping[str, Any]]:
        """Every engine of the fleet at one moment. Raises: FleetError."""
        found: list[Mapping[str, Any]] = self._order("GET", "/muster/rollout")["engines"]
        return found

    def sync(
        self,
        folder: str,
        *,
        version: int,
        in_flight: str = "wait",
        timeout_s: float = 60.0,
        broadcast_s: float = 20.0,
    ) -> Synced:
        """Have every engine load the weights in a folder, and commit those that did.

        Args:
            folder: absolute, as the servers see it; `${engine.index}` in it is filled in for each.
            version: of the weights.
            in_flight: what becomes of requests under way: wait, abort or interrupt.
            timeout_s: for all of it.
            broadcast_s: for an engine to load them; one that takes longer is left out.

        Raises:
            SyncLost: no engine has the weights, or the sync could not begin or ended too early.
            FleetError: the gateway is gone or refuses.
        """
        began = self._clock()
        order = {"timeout_s": timeout_s, "in_flight": in_flight}
        begun = self._order("POST", "/muster/rollout/sync", order, within_s=timeout_s + _MARGIN_S)
        path = f"/muster/rollout/sync/{begun['sync']}"
        targets = {int(one["engine"]): int(one["epoch"]) for one in begun["targets"]}
        load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        left_out: dict[int, str] = {}
        # The prefix caches of the engines were computed with the old weights.
        for asked, body in (("/collective_rpc", load), ("/reset_prefix_cache", None)):
            left_out = self._broadcast(path, asked, body, broadcast_s) | left_out
        epochs = {engine: epoch for engine, epoch in targets.items() if engine not in left_out}
        if not epochs:
            self._order("DELETE", path)
            raise SyncLost(f"no engine took version {version}: {left_out or 'there is none'}")
        ended = self._order("POST", f"{path}/commit", {"version": version, "epochs": epochs})
        return Synced(
            version=version,
            serving=tuple(int(one) for one in ended["serving"]),
            left_out=left_out,
            took_s=self._clock() - began,
        )

    def _broadcast(
        self, path: str, asked: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[int, str]:
        """Why an engine did not do it, for those that did not."""
        order = {"method": "POST", "path": asked, "body": body, "timeout_s": timeout_s}
        answers = self._order("POST", f"{path}/broadcast", order, within_s=timeout_s + _MARGIN_S)[
            "answers"
        ]
        return {
            int(one["engine"]): f"{asked}: {one['status']} {str(one['body'])[:200]}"
            for one in answers
            if one["status"] != 200
        }

    def _order(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        within_s: float = _ORDER_WITHIN_S,
    ) -> Mapping[str, Any]:
        """The answer to an order, which is never sent twice once it may have arrived."""
        deadline = self._clock() + _GONE_AFTER_S
        while True:
            try:
                return self._send(method, path, body, within_s=within_s)[1]
            except urllib.error.HTTPError as error:
                why = f"{method} {self._url}{path}: {error.code} {error.read(500)!r}"
                # 409: requests were under way for too long. 404: its deadline has passed.
                if error.code in (404, 409):
                    raise SyncLost(why) from error
                raise FleetError(why) from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = f"the fleet went away: {method} {self._url}{path}: {error}"
                is_unsent = isinstance(getattr(error, "reason", None), ConnectionRefusedError)
                if not is_unsent or self._clock() >= deadline:
                    raise FleetError(why) from error
            self._sleep(_RETRY_EVERY_S)

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, within_s: float
    ) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        with self._opener.open(request, timeout=within_s) as answer:
            content = json.load(answer)
        if not isinstance(content, dict):
            raise ValueError(f"not a JSON object: {content!r}")
        return answer.headers, content


def _answers(headers: Mapping[str, str], content: Mapping[str, Any]) -> list[Answer]:
    """Raises: ValueError, where something is missing that vLLM and the gateway always say."""
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
        raise ValueError(f"an answer without {error}: {str(content)[:300]}") from error
