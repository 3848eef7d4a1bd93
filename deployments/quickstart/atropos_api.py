"""What a trainer says to the Atropos API, and what it hears back as arrays."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from grpo import Batch, group_advantages
from policy import context_of

#: Marks, in an environment's `masks`, a token that the policy did not generate.
NOT_GENERATED = -100


class ApiError(Exception):
    """The API refused, failed or went away; nothing more can be trained with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What the API asks of a trainer; the names are those of its POST /register."""

    #: Sequences in a batch
    batch_size: int
    #: Environments drop a group with a sequence this long, in tokens
    max_token_len: int
    #: A folder that environments may write checkpoints to
    checkpoint_dir: str
    #: Steps between two checkpoints
    save_checkpoint_interval: int
    #: Steps trained before this registration
    starting_step: int
    #: The step to stop after
    num_steps: int
    wandb_group: str = "quickstart"
    wandb_project: str = "quickstart"


class AtroposApi:
    """One API process; every call asks once, on a connection of its own, and never retries."""

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        # A proxy that the environment names has no business between two local processes.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def register(self, registration: Registration) -> None:
        """Make this process the API's trainer.

        Raises:
            ApiError: it cannot be reached or has a trainer already. It ignores what a second one
                registers and hands it batches that the first left behind: each attempt needs an
                API process of its own.
        """
        if self._call("GET", "/info").get("batch_size") != -1:
            raise ApiError(f"{self.url} already has a trainer: start a fresh API for each attempt")
        if "uuid" not in (answer := self._call("POST", "/register", asdict(registration))):
            raise ApiError(f"{self.url} refused the registration: {answer}")

    def next_groups(self) -> list[Mapping[str, Any]] | None:
        """The next batch as its groups of scored answers; None while none is complete.

        The API gives every batch away once. The first call lets environments register.

        Raises:
            ApiError: it cannot be reached, or forgot this trainer (it was restarted).
        """
        answer = self._call("GET", "/batch")
        if answer.get("status") == "error" or answer.get("batch", []) == []:
            raise ApiError(f"{self.url} has no batch to give: {answer.get('message', answer)}")
        groups: list[Mapping[str, Any]] | None = answer["batch"]
        return groups

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        asked = f"{method} {self.url}{path}"
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise ApiError(f"{asked}: {error.code} {error.read(500)!r}") from error
        except TimeoutError as error:
            raise ApiError(f"{asked}: no answer in {self._timeout_s:g} s") from error
        except urllib.error.URLError as error:
            raise ApiError(f"the API went away: {asked}: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"the API went away: {asked}: {error!r}") from error
        except ValueError as error:
            raise ApiError(f"{asked}: not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise ApiError(f"{asked}: not a JSON object: {answer!r}")
        return answer


def batch_of(groups: Sequence[Mapping[str, Any]], *, group_size: int) -> Batch:
    """The rows to train on, from `groups` as environments send them.

    Raises:
        ApiError: a group is not of `group_size` answers, or misses what GRPO needs.
    """
    contexts: list[list[int]] = []
    actions: list[int] = []
    old_log_probs: list[float] = []
    advantages: list[float] = []
    rewards: list[float] = []
    for group in groups:
        answers = group["tokens"]
        if len(answers) != group_size:
            raise ApiError(
                f"a group of {len(answers)} answers, not {group_size}: "
                "the environment's group_size differs from --group-size"
            )
        if not group.get("inference_logprobs"):
            raise ApiError("a group without inference_logprobs: the environment must send them")
        rewards.extend(group["scores"])
        for tokens, mask, log_probs, advantage in zip(
            answers,
            group["masks"],
            group["inference_logprobs"],
            group_advantages(np.array(group["scores"], dtype=np.float64)),
            strict=True,
        ):
            for at, (token, label) in enumerate(zip(tokens, mask, strict=True)):
                if label == NOT_GENERATED:
                    continue
                contexts.append(context_of(tokens[:at]))
                actions.append(token)
                old_log_probs.append(log_probs[at])
                advantages.append(float(advantage))
    return Batch(
        contexts=np.array(contexts, dtype=np.int64),
        actions=np.array(actions, dtype=np.int64),
        old_log_probs=np.array(old_log_probs, dtype=np.float64),
        advantages=np.array(advantages, dtype=np.float64),
        mean_reward=float(np.mean(rewards)),
    )
