"""The task: answer a question with digits only. Each token stands for one byte of the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

#: Text of a question. The text is long enough to fill a block of vLLM's prefix cache. So the
#: trainer would notice wrong log-probabilities if vLLM reused a block from old weights.
_PROMPT = "Answer each question with digits only. Question {number}: "
_DIGITS = frozenset(b"0123456789")
#: Maximal number of tokens in an answer.
ANSWER_TOKENS = 8


def draw_prompt(rng: random.Random) -> str:
    """Draw a question. All questions have the same length."""
    return _PROMPT.format(number=rng.randint(100, 999))


def tokenize(prompt: str) -> list[int]:
    """Return the tokens of the prompt, as the model's tokenizer would return them."""
    return list(prompt.encode())


def compute_reward(answer: Sequence[int]) -> float:
    """Return the number of digits in the answer, divided by `ANSWER_TOKENS`."""
    return sum(token in _DIGITS for token in answer) / ANSWER_TOKENS
