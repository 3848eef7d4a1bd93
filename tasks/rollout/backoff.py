"""How long to wait before the next try."""

from __future__ import annotations

from random import Random


def pause_s(count: int, *, first_s: float, longest_s: float, random: Random) -> float:
    """Twice as long each time, less up to a half, so that those that failed together spread.

    Args:
        count: pauses before this one, in a row.
        first_s: the first pause, at its longest.
        longest_s: no pause is longer.
    """
    # Past 2 ** 30 only the bound matters, and a float has no room for ever.
    longest = min(longest_s, first_s * 2.0 ** min(count, 30))
    return longest * random.uniform(0.5, 1.0)
