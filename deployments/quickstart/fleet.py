"""The trainer's side of a fleet of inference servers: brings them the weights, over HTTP.

Who serves is for the fleet's gateway to say, `GET /muster/rollout`, and what it is told by `POST
/muster/rollout/weights` decides who may serve: a server that missed a push gets no requests until
it has got a later one.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from policy import Policy
from weights import Weights

#: Between two looks for servers that came back.
LOOK_EVERY_S = 0.5
#: A gateway that is away for so long is gone.
GONE_AFTER_S = 10.0
RETRY_EVERY_S = 0.2
#: Servers that are brought the weights at once.
AT_ONCE = 16


class FleetError(Exception):
    """The gateway is gone or refuses: nobody would serve what is trained from now on."""


class Fleet:
    """The servers behind one gateway. Belongs to one thread."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            url: of the gateway.
            token: that it asks for; empty: none.
            timeout_s: for each answer.
        """
        self._url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        # A proxy that the environment names has no business between two local processes.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="weights")
        self._pushed: Weights | None = None
        self._looked_at = clock()

    def push(self, policy: Policy, *, step: int) -> tuple[int, ...]:
        """Bring the weights of a step to every server that runs.

        A server that fails meanwhile is left out.

        Returns: the ranks of those that have them. Raises: FleetError.
        """
        self._pushed = Weights(policy=policy, step=step)
        return self._bring(self._pushed, self._look())

    def catch_up(self) -> tuple[int, ...]:
        """Bring the last weights to servers that came back since, if it is time to look again.

        Returns: the ranks of those that have got them now. Raises: FleetError.
        """
        if self._pushed is None or self._clock() - self._looked_at < LOOK_EVERY_S:
            return ()
        fleet = self._look()
        step = self._pushed.step
        behind = {one["rank"] for one in fleet["servers"] if one["version"] != step}
        return self._bring(self._pushed, fleet, only=behind) if behind else ()

    def _look(self) -> Mapping[str, Any]:
        self._looked_at = self._clock()
        return self._ask("GET", "/muster/rollout")

    def _bring(
        self, weights: Weights, fleet: Mapping[str, Any], only: Collection[int] | None = None
    ) -> tuple[int, ...]:
        training = fleet["training"]
        urls = {int(rank): url for rank, url in training["urls"].items()}
        asked = [rank for rank in urls if only is None or rank in only]
        if only is not None and not asked:
            return ()
        content = weights.as_bytes()
        done = self._pool.map(lambda rank: self._post_weights(urls[rank], content), asked)
        have = [rank for rank, is_done in zip(asked, done, strict=True) if is_done]
        body = {
            "version": weights.step,
            "ranks": [one for rank in have for one in training["weight_ranks"][str(rank)]],
            # A server that was started anew since it was looked up has lost them again.
            "epochs": {str(rank): training["epochs"][str(rank)] for rank in have},
        }
        self._ask("POST", "/muster/rollout/weights", body)
        return tuple(have)

    def _post_weights(self, url: str, content: bytes) -> bool:
        request = urllib.request.Request(f"{url}/weights", method="POST", data=content)
        request.add_header("Content-Type", "application/octet-stream")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException) as error:
            print(f"{url} did not take the weights: {error}", flush=True)
            return False

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        deadline = self._clock() + GONE_AFTER_S
        while True:
            try:
                return self._ask_once(method, path, body)
            except urllib.error.HTTPError as error:
                raise FleetError(
                    f"{method} {self._url}{path}: {error.code} {error.read(500)!r}"
                ) from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                if self._clock() >= deadline:
                    raise FleetError(
                        f"the fleet went away: {method} {self._url}{path}: {error}"
                    ) from error
            self._sleep(RETRY_EVERY_S)

    def _ask_once(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        with self._opener.open(request, timeout=self._timeout_s) as answer:
            content = json.load(answer)
        if not isinstance(content, dict):
            raise ValueError(f"not a JSON object: {content!r}")
        return content
