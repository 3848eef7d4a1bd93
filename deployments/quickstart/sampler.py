"""Sample answers from the policy. Any thread may sample, or replace the weights, at any time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from copy_task import EOS, VOCABULARY
from policy import Floats, Policy, Tokens, forward, take_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer."""

    #: The tokens after the prompt, including `<eos>` if it was sampled.
    tokens: tuple[int, ...]
    #: Log-probability of each token in nats, at temperature 1.
    log_probs: tuple[float, ...]
    #: `stop` if the answer ends with `<eos>`, `length` if it reached the limit of tokens.
    finish_reason: str


class Sampler:
    """Samples answers from the served weights, which can be replaced at any time."""

    def __init__(self, policy: Policy, *, step: int, rng: np.random.Generator) -> None:
        """
        Args:
            policy: The first weights to serve.
            step: Training step of these weights.
            rng: Random generator for sampling.
        """
        #: The served weights and their step. Because of the tuple, other threads never see new
        #: weights with an old step.
        self._serving = (policy, step)
        self._rng = rng
        self._rng_lock = threading.Lock()

    @property
    def step(self) -> int:
        """Training step of the served weights."""
        return self._serving[1]

    def load(self, policy: Policy, *, step: int) -> None:
        """Use `policy` for later requests. Requests in progress keep the old weights."""
        self._serving = (policy, step)

    def rng_state(self) -> Mapping[str, Any]:
        """Return the state of the random generator, in the form of numpy's
        `bit_generator.state`.
        """
        with self._rng_lock:
            return self._rng.bit_generator.state

    def sample(
        self, prompt: Sequence[int], *, count: int, max_tokens: int, temperature: float = 1.0
    ) -> list[Completion]:
        """Sample answers to a prompt, all from the same weights.

        Args:
            prompt: Tokens of the prompt, each an index into `VOCABULARY`.
            count: Number of answers, at least 1.
            max_tokens: Largest number of tokens of an answer, at least 1.
            temperature: Divisor of the log-probabilities. With 0, the most likely token is taken.
        """
        policy, _ = self._serving
        with self._rng_lock:
            draws = self._rng.random((max_tokens, count))

        answers: list[list[int]] = [[] for _ in range(count)]
        log_probs: list[list[float]] = [[] for _ in range(count)]
        open_rows = list(range(count))
        for position in range(max_tokens):
            contexts = [take_context([*prompt, *answers[row]]) for row in open_rows]
            scores = forward(policy, np.array(contexts, dtype=np.int64)).log_probs
            tokens = _choose_tokens(scores, draws[position, open_rows], temperature)
            for row, token, score in zip(open_rows, tokens, scores, strict=True):
                answers[row].append(int(token))
                log_probs[row].append(float(score[token]))
            open_rows = [row for row in open_rows if answers[row][-1] != EOS]
            if not open_rows:
                break
        return [
            Completion(
                tokens=tuple(answer),
                log_probs=tuple(answer_log_probs),
                finish_reason="stop" if answer[-1] == EOS else "length",
            )
            for answer, answer_log_probs in zip(answers, log_probs, strict=True)
        ]


def _choose_tokens(log_probs: Floats, draws: Floats, temperature: float) -> Tokens:
    """Sample a token for each row, by inversion of the cumulative distribution.

    Args:
        log_probs: Log-probabilities in nats. Shape: (rows, len(VOCABULARY)).
        draws: A random number from 0 to 1 for each row. Shape: (rows,).
        temperature: Divisor of the log-probabilities. With 0 the most likely token is taken.
    """
    if temperature == 0:
        most_likely: Tokens = log_probs.argmax(axis=1)
        return most_likely
    scaled = log_probs / temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    cumulative = weights.cumsum(axis=1)
    below: Tokens = (cumulative <= draws[:, None] * cumulative[:, -1:]).sum(axis=1)
    return np.minimum(below, len(VOCABULARY) - 1)
