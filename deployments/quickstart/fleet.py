"""The trainer's client for a fleet of inference servers: it sends them new weights over HTTP.

Each push is a transaction with the fleet's gateway: `POST /muster/rollout/sync` holds back the
environments' requests, a broadcast has each server read the weights from a file, and the commit
names those that did. A server that missed it gets no requests until it has got a later one.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atomic_file import replace_file
from policy import Policy
from weights import Weights

#: Seconds between two checks for restarted servers.
LOOK_EVERY_S = 0.5
#: A gateway that does not answer for this long is considered gone; in seconds.
GONE_AFTER_S = 10.0
RETRY_EVERY_S = 0.2
#: Deadline of a whole push, in seconds.
PUSH_WITHIN_S = 30.0
#: Deadline for each server to read the weights, in seconds.
READ_WITHIN_S = 5.0


class FleetError(Exception):
    """The gateway is gone or refuses. No server would receive further weights."""


class Fleet:
    """The servers behind one gateway. Belongs to one thread."""

    def __init__(
        self,
        url: str,
        *,
        folder: Path,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            url: URL of the gateway.
            folder: Folder of the weights file that the servers read.
            token: Access token of the gateway, or an empty string if it needs none.
        """
        self._url = url.rstrip("/")
        self._path = folder.absolute() / "weights.npz"
        self._token = token
        self._clock = clock
        self._sleep = sleep
        # Ignore the proxy of the environment variables: both processes run on this host.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._pushed: int | None = None
        self._looked_at = clock()

    def push(self, policy: Policy, *, step: int) -> tuple[int, ...]:
        """Bring the weights of a step to every server that runs.

        A server that fails meanwhile is left out.

        Returns: the engines that serve them. Raises: FleetError; OSError, when the weights can't
            be written.
        """
        replace_file(self._path, Weights(policy=policy, step=step).as_bytes())
        self._pushed = step
        return self._sync(step)

    def catch_up(self) -> tuple[int, ...]:
        """Send the last weights to restarted servers, if the next check is due.

        Returns: the engines that serve them now; none where nothing was to be done. Raises:
            FleetError.
        """
        if self._pushed is None or self._clock() - self._looked_at < LOOK_EVERY_S:
            return ()
        self._looked_at = self._clock()
        engines = self._ask("GET", "/muster/rollout")["engines"]
        has_stale = any(engine["state"] == "stale" for engine in engines)
        return self._sync(self._pushed) if has_stale else ()

    def _sync(self, step: int) -> tuple[int, ...]:
        begun = self._ask("POST", "/muster/rollout/sync", {"timeout_s": PUSH_WITHIN_S})
        sync = f"/muster/rollout/sync/{begun['sync']}"
        broadcast = {
            "path": "/update_weights_from_disk",
            "body": {"model_path": str(self._path)},
            "timeout_s": READ_WITHIN_S,
        }
        answers = self._ask("POST", f"{sync}/broadcast", broadcast)["answers"]
        for answer in answers:
            if answer["status"] != 200:
                print(
                    f"engine {answer['engine']} has no weights of step {step}: {answer}", flush=True
                )
        # A restarted engine has lost the weights. The gateway detects this by the engine's epoch.
        epochs = {
            str(answer["engine"]): answer["epoch"] for answer in answers if answer["status"] == 200
        }
        done = self._ask("POST", f"{sync}/commit", {"version": step, "epochs": epochs})
        return tuple(done["serving"])

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
        with self._opener.open(request, timeout=PUSH_WITHIN_S) as answer:
            content = json.load(answer)
        if not isinstance(content, dict):
            raise ValueError(f"not a JSON object: {content!r}")
        return content
