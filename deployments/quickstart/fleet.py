"""The trainer's client for a fleet of inference servers, which gets new weights over HTTP.

Each call of `push` is a transaction with the fleet's gateway. `POST /muster/rollout/sync` opens the
transaction, and the gateway then holds back the environments' requests. A broadcast lets each
server read the weights from a file. The commit names the servers that succeeded. All other servers
get no requests until a later push succeeds.
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
CHECK_EVERY_S = 0.5
#: Number of seconds without an answer after which a gateway counts as gone.
GONE_AFTER_S = 10.0
#: Seconds between two tries of a request.
RETRY_EVERY_S = 0.2
#: Longest time, in seconds, that one call of `push` may take to bring new weights to the servers.
PUSH_WITHIN_S = 30.0
#: Longest time, in seconds, that one server may take to read the weights. This time is shorter than
#: the limit of `push`, so that one slow server does not use up the whole time.
READ_WITHIN_S = 5.0


class FleetError(Exception):
    """The gateway cannot be reached or refuses a request, so the servers cannot get new weights."""


class Fleet:
    """Client of the inference servers behind one gateway. Only one thread may use an instance."""

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
            token: Access token of the gateway, or an empty string if the gateway needs no token.
            clock: Returns the time in seconds.
            sleep: Waits for a number of seconds.
        """
        self._url = url.rstrip("/")
        self._path = folder.absolute() / "weights.npz"
        self._token = token
        self._clock = clock
        self._sleep = sleep
        # Ignore proxies in environment variables, because the gateway runs on this host.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        #: Step of the last weights that were pushed, or None before the first push.
        self._pushed_step: int | None = None
        self._checked_at = clock()

    def push(self, policy: Policy, *, step: int) -> tuple[int, ...]:
        """Send the weights of a step to every running server. Servers that fail are skipped.

        Returns:
            The indices of the engines that serve the weights.

        Raises:
            FleetError: The gateway is gone or refuses a request.
            OSError: The file of the weights cannot be written.
        """
        replace_file(self._path, Weights(policy=policy, step=step).as_bytes())
        self._pushed_step = step
        return self._sync(step)

    def catch_up(self) -> tuple[int, ...]:
        """Send the last weights again if a server was restarted.

        The method looks for restarted servers at most every 0.5 s. If called more often, it does
        nothing.

        Returns:
            The indices of the engines that serve the weights, or an empty tuple if no weights were
            sent.

        Raises:
            FleetError: The gateway is gone or refuses a request.
        """
        if self._pushed_step is None or self._clock() - self._checked_at < CHECK_EVERY_S:
            return ()
        self._checked_at = self._clock()
        engines = self._send("GET", "/muster/rollout")["engines"]
        has_stale = any(engine["state"] == "stale" for engine in engines)
        return self._sync(self._pushed_step) if has_stale else ()

    def _sync(self, step: int) -> tuple[int, ...]:
        """Let all servers read the weights file in one transaction.

        Args:
            step: Step of the weights in the file.

        Returns:
            The indices of the engines that serve the weights.
        """
        begin = self._send("POST", "/muster/rollout/sync", {"timeout_s": PUSH_WITHIN_S})
        sync = f"/muster/rollout/sync/{begin['sync']}"
        broadcast = {
            "path": "/update_weights_from_disk",
            "body": {"model_path": str(self._path)},
            "timeout_s": READ_WITHIN_S,
        }
        answers = self._send("POST", f"{sync}/broadcast", broadcast)["answers"]
        for answer in answers:
            if answer["status"] != 200:
                print(
                    f"engine {answer['engine']} did not load the weights of step {step}: {answer}",
                    flush=True,
                )
        # Send the epoch of each engine. The epoch counts the starts of the engine. A changed epoch
        # shows the gateway that the engine was restarted during the weight sync and has lost the
        # weights.
        epochs = {
            str(answer["engine"]): answer["epoch"] for answer in answers if answer["status"] == 200
        }
        commit = self._send("POST", f"{sync}/commit", {"version": step, "epochs": epochs})
        return tuple(commit["serving"])

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Send the gateway a request, and return the JSON object of the response.

        The request is repeated while the gateway does not answer.

        Raises:
            FleetError: The gateway refuses the request, or the gateway is gone.
        """
        deadline = self._clock() + GONE_AFTER_S
        while True:
            try:
                return self._send_once(method, path, body)
            except urllib.error.HTTPError as error:
                raise FleetError(
                    f"the gateway answered {method} {self._url}{path} with HTTP status "
                    f"{error.code}: {error.read(500)!r}"
                ) from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                if self._clock() >= deadline:
                    raise FleetError(
                        f"the gateway no longer answers: {method} {self._url}{path}: {error}"
                    ) from error
            self._sleep(RETRY_EVERY_S)

    def _send_once(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        """Send the gateway a request once, and return the JSON object of the response."""
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        with self._opener.open(request, timeout=PUSH_WITHIN_S) as response:
            content = json.load(response)
        if not isinstance(content, dict):
            raise ValueError(f"the answer is not a JSON object: {content!r}")
        return content
