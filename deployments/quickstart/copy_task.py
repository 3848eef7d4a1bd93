"""The task: repeat four digits, then end the sequence. A token is an index into `VOCABULARY`."""

from __future__ import annotations

import random
from collections.abc import Sequence

#: The same words, under the same ids, stand in tokenizer/tokenizer.json.
VOCABULARY: tuple[str, ...] = (*"0123456789", "=", "<eos>", "<pad>", "<unk>")
DIGITS = range(10)
PROMPT_END = VOCABULARY.index("=")
EOS = VOCABULARY.index("<eos>")
PAD = VOCABULARY.index("<pad>")
UNKNOWN = VOCABULARY.index("<unk>")

DIGITS_PER_PROMPT = 4
#: What a correct answer takes: the digits and `<eos>`.
ANSWER_TOKENS = DIGITS_PER_PROMPT + 1
#: Stands between two words of a text, as the tokenizer splits them.
SEPARATOR = "."


def draw_digits(rng: random.Random) -> tuple[int, ...]:
    """The digits of one prompt, each drawn evenly."""
    return tuple(rng.choices(DIGITS, k=DIGITS_PER_PROMPT))


def prompt_of(digits: Sequence[int]) -> list[int]:
    """The tokens a policy is asked to go on from: the digits and `=`."""
    return [*digits, PROMPT_END]


def reward_of(digits: Sequence[int], answer: Sequence[int]) -> float:
    """The share, 0 to 1, of positions at which `answer` holds the right token.

    A missing token is a wrong one, and what follows the last position counts for nothing.
    """
    wanted = [*digits, EOS]
    right = sum(want == got for want, got in zip(wanted, answer, strict=False))
    return right / len(wanted)


def text_of(tokens: Sequence[int]) -> str:
    """`tokens` as the tokenizer spells them, e.g. `7.0.4.2.=`."""
    return SEPARATOR.join(VOCABULARY[token] for token in tokens)


def tokens_of(text: str) -> list[int]:
    """`text` as tokens; a word outside the vocabulary becomes `<unk>`."""
    words = [word for word in text.split(SEPARATOR) if word]
    return [VOCABULARY.index(word) if word in VOCABULARY else UNKNOWN for word in words]
