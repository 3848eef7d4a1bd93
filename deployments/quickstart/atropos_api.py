"""A trainer's client for the Atropos API, which converts the received batches to arrays."""

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
from policy import take_context

#: In the list `masks` of an answer, this value marks a token that the policy did not generate.
NOT_GENERATED = -100


class ApiError(Exception):
    """The Atropos API process refused a request, failed or ended. The training cannot continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The JSON body of POST /register, which registers a trainer at the Atropos API.

    The names of the fields are those of the Atropos API.
    """

    #: Number of token sequences in a batch.
    batch_size: int
    #: Limit of the sequence length, in tokens. Environments drop a group of answers if one of its
    #: sequences has this length or is longer.
    max_token_len: int
    #: Folder in which environments may write checkpoints.
    checkpoint_dir: str
    #: Number of steps between two checkpoints.
    save_checkpoint_interval: int
    #: Number of steps that were trained before the trainer registered with this server.
    starting_step: int
    #: Number of the last step of the training.
    num_steps: int
    wandb_group: str = "quickstart"
    wandb_project: str = "quickstart"


class AtroposApi:
    """Client of an Atropos API process. Each call sends one request on a new connection."""

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        # Ignore proxies in environment variables, because the API runs on this host.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def register(self, registration: Registration) -> None:
        """Register this process as the trainer of the Atropos API.

        Each attempt of a run needs its own API process. An API process ignores a second
        registration, so a second trainer would get the remaining batches of the first trainer.

        Raises:
            ApiError: The API cannot be reached, or it already has a trainer.
        """
        if self._call("GET", "/info").get("batch_size") != -1:
            raise ApiError(
                f"another trainer has already registered with the Atropos API at {self.url}. Start "
                "a new API for each attempt"
            )
        if "uuid" not in (answer := self._call("POST", "/register", asdict(registration))):
            raise ApiError(f"the Atropos API at {self.url} refused the registration: {answer}")

    def next_groups(self) -> list[Mapping[str, Any]] | None:
        """Fetch the next batch as a list of groups of scored answers.

        Return None if no batch is complete yet.

        The API returns each batch only once. Environments can register only after the first call of
        this method.

        Raises:
            ApiError: The API cannot be reached, or it was restarted and lost the registration.
        """
        answer = self._call("GET", "/batch")
        if answer.get("status") == "error" or answer.get("batch", []) == []:
            raise ApiError(
                f"the Atropos API at {self.url} returned no batch: {answer.get('message', answer)}"
            )
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
        request_line = f"{method} {self.url}{path}"
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise ApiError(f"{request_line}: {error.code} {error.read(500)!r}") from error
        except TimeoutError as error:
            raise ApiError(
                f"the Atropos API did not answer within {self._timeout_s:g} s: {request_line}"
            ) from error
        except urllib.error.URLError as error:
            raise ApiError(
                f"the Atropos API no longer answers: {request_line}: {error.reason}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(
                f"the Atropos API no longer answers: {request_line}: {error!r}"
            ) from error
        except ValueError as error:
            raise ApiError(f"{request_line}: not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise ApiError(f"{request_line}: the answer is not a JSON object: {answer!r}")
        return answer


def build_batch(groups: Sequence[Mapping[str, Any]], *, group_size: int) -> Batch:
    """Convert groups of scored answers, as environments send them, to a batch for one step.

    Args:
        groups: The groups.
        group_size: Number of answers that each group must have.

    Raises:
        ApiError: A group does not have `group_size` answers, or has no log-probabilities.
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
                f"the environment sent a group of {len(answers)} answers instead of {group_size}. "
                "Set the group_size of the environment to the value of the trainer's --group-size"
            )
        if not group.get("inference_logprobs"):
            raise ApiError(
                "the environment sent a group of answers without inference_logprobs, which the "
                "trainer needs"
            )
        rewards.extend(group["scores"])
        for tokens, mask, log_probs, advantage in zip(
            answers,
            group["masks"],
            group["inference_logprobs"],
            group_advantages(np.array(group["scores"], dtype=np.float64)),
            strict=True,
        ):
            for position, (token, label) in enumerate(zip(tokens, mask, strict=True)):
                if label == NOT_GENERATED:
                    continue
                contexts.append(take_context(tokens[:position]))
                actions.append(token)
                old_log_probs.append(log_probs[position])
                advantages.append(float(advantage))
    return Batch(
        contexts=np.array(contexts, dtype=np.int64),
        actions=np.array(actions, dtype=np.int64),
        old_log_probs=np.array(old_log_probs, dtype=np.float64),
        advantages=np.array(advantages, dtype=np.float64),
        mean_reward=float(np.mean(rewards)),
    )
