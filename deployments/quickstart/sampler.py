"""Sample answers from the policy in any thread; its weights can be replaced at any time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from copy_task import EOS, VOCABULARY
from policy import Floats, Policy, Tokens, context_of, forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer."""

    #: The tokens after the prompt, including `<eos>` if it was sampled
    tokens: tuple[int, ...]
    #: Log-probability of each token in nats, at temperature 1
    log_probs: tuple[float, ...]
    #: `stop` after `<eos>`, `length` when the token limit came first
    finish_reason: str


class Sampler:
    """Owner of the served weights and of the random generator for sampling."""

    def __init__(self, policy: Policy, *, step: int, rng: np.random.Generator) -> None:
        self._serving = (policy, step)
        self._rng = rng
        self._rng_lock = threading.Lock()

    @property
    def step(self) -> int:
        """The training step whose weights are served."""
        return self._serving[1]

    def load(self, policy: Policy, *, step: int) -> None:
        """Use `policy` for later requests. Requests in progress keep the old weights."""
        self._serving = (policy, step)

    def rng_state(self) -> Mapping[str, Any]:
        """The generator's state, as `np.random.Generator.bit_generator.state` takes it."""
        with self._rng_lock:
            return self._rng.bit_generator.state

    def sample(
        self, prompt: Sequence[int], *, count: int, max_tokens: int, temperature: float = 1.0
    ) -> list[Completion]:
        """Sample `count` answers to `prompt`, all from the same weights.

        Args:
            prompt: tokens, each an index into `VOCABULARY`.
            count: at least 1.
            max_tokens: at least 1.
            temperature: 0 always takes the likeliest token.
        """
        policy, _ = self._serving
        with self._rng_lock:
            draws = self._rng.random((max_tokens, count))

        answers: list[list[int]] = [[] for _ in range(count)]
        log_probs: list[list[float]] = [[] for _ in range(count)]
        open_rows = list(range(count))
        for position in range(max_tokens):
            contexts = [context_of([*prompt, *answers[row]]) for row in open_rows]
            scores = forward(policy, np.array(contexts, dtype=np.int64)).log_probs
            chosen = _choose(scores, draws[position, open_rows], temperature)
            for row, token, score in zip(open_rows, chosen, scores, strict=True):
                answers[row].append(int(token))
                log_probs[row].append(float(score[token]))
            open_rows = [row for row in open_rows if answers[row][-1] != EOS]
            if not open_rows:
                break
        return [
            Completion(
                tokens=tuple(tokens),
                log_probs=tuple(scores),
                finish_reason="stop" if tokens[-1] == EOS else "length",
            )
            for tokens, scores in zip(answers, log_probs, strict=True)
        ]


def _choose(log_probs: Floats, draws: Floats, temperature: float) -> Tokens:
    """Choose a token per row: the cumulative distribution inverted at `draws`, [row] in 0 to 1."""
    if temperature == 0:
        likeliest: Tokens = log_probs.argmax(axis=1)
        return likeliest
    scaled = log_probs / temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    cumulative = weights.cumsum(axis=1)
    below: Tokens = (cumulative <= draws[:, None] * cumulative[:, -1:]).sum(axis=1)
    return np.minimum(below, len(VOCABULARY) - 1)
