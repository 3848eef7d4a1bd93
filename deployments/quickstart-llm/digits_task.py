"""The task: answer a question with digits only. A token is a byte."""

from __future__ import annotations

import random
from collections.abc import Sequence

#: Longer than a block of an engine's KV cache, so that stale blocks would show in what follows.
_PROMPT = "Answer each question with digits only. Question {number}: "
_DIGITS = frozenset(b"0123456789")
#: What an answer may take.
ANSWER_TOKENS = 8


def draw_prompt(rng: random.Random) -> str:
    """A question; all are of one length."""
    return _PROMPT.format(number=rng.randint(100, 999))


def tokens_of(prompt: str) -> list[int]:
    """The prompt as the model's tokenizer reads it."""
    return list(prompt.encode())


def reward_of(answer: Sequence[int]) -> float:
    """The share, 0 to 1, of the allowed tokens that are digits; a missing one is none."""
    return sum(token in _DIGITS for token in answer) / ANSWER_TOKENS
