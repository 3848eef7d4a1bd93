"""The task: the policy repeats four digits and then ends the sequence.

A token is an index into `VOCABULARY`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

#: The words of the vocabulary. The index of a word is its token id. tokenizer/tokenizer.json has
#: the same words and ids.
VOCABULARY: tuple[str, ...] = (*"0123456789", "=", "<eos>", "<pad>", "<unk>")
#: Token ids of the digits. The token id of a digit is the digit itself.
DIGITS = range(10)
#: Token at the end of a prompt.
PROMPT_END = VOCABULARY.index("=")
#: Token at the end of an answer.
EOS = VOCABULARY.index("<eos>")
#: Token that fills up a sequence.
PAD = VOCABULARY.index("<pad>")
#: Token of a word that is not in the vocabulary.
UNKNOWN = VOCABULARY.index("<unk>")

#: Number of digits in a prompt.
DIGITS_PER_PROMPT = 4
#: Number of tokens of a right answer: the digits and `<eos>`.
ANSWER_TOKENS = DIGITS_PER_PROMPT + 1
#: Separator between the words of a text.
SEPARATOR = "."


def draw_digits(rng: random.Random) -> tuple[int, ...]:
    """Draw the digits of one prompt. All digits are equally likely."""
    return tuple(rng.choices(DIGITS, k=DIGITS_PER_PROMPT))


def build_prompt(digits: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt: the digits and `=`."""
    return [*digits, PROMPT_END]


def compute_reward(digits: Sequence[int], answer: Sequence[int]) -> float:
    """Return the fraction, from 0 to 1, of positions at which `answer` has the right token.

    A missing token counts as wrong. Tokens after the end of the right answer are ignored.
    """
    expected = [*digits, EOS]
    correct = sum(want == token for want, token in zip(expected, answer, strict=False))
    return correct / len(expected)


def format_tokens(tokens: Sequence[int]) -> str:
    """Return the text of `tokens` as the tokenizer writes it, e.g. `7.0.4.2.=`."""
    return SEPARATOR.join(VOCABULARY[token] for token in tokens)


def parse_tokens(text: str) -> list[int]:
    """Return the tokens of `text`. A word outside the vocabulary becomes `<unk>`."""
    words = [word for word in text.split(SEPARATOR) if word]
    return [VOCABULARY.index(word) if word in VOCABULARY else UNKNOWN for word in words]
