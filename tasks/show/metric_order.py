"""Sort the metrics of a training by their meaning, so that a short list has the useful ones."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

#: Patterns for the names of metrics, one for each meaning. The most useful meaning is first.
_MEANINGS = (
    re.compile(r"reward|score|return|accura|\bacc\b|pass@|win_rate"),
    re.compile(r"loss|perplexity"),
    re.compile(r"entropy"),
    re.compile(r"(?<![a-z])kl(?![a-z])"),
    re.compile(r"grad.*norm"),
    re.compile(r"length|tokens"),
    re.compile(r"(?<![a-z])lr(?![a-z])|learning_rate"),
)
#: Matches the name of a statistic that is less useful than the mean of the same metric.
_LESS_USEFUL = re.compile(r"std|min|max|clip|frac|ratio")


def sort_by_meaning(names: Iterable[str]) -> list[str]:
    """Return the names of metrics, the most useful first.

    The list begins with the best name of each meaning: a reward, a loss, an entropy and so on. The
    second-best name of each meaning follows. So the first few names have different meanings.
    """
    names_by_meaning: dict[int, list[str]] = defaultdict(list)
    for name in names:
        names_by_meaning[_find_meaning(name)].append(name)

    ranked = []
    for meaning, same_names in names_by_meaning.items():
        for position, name in enumerate(sorted(same_names, key=_usefulness)):
            ranked.append((position, meaning, name))
    return [name for _, _, name in sorted(ranked)]


def _find_meaning(name: str) -> int:
    """Return the index of the first pattern in `_MEANINGS` that matches the name of a metric.

    For an unknown metric, the result is larger than all indexes.
    """
    lower_name = name.lower()
    for index, pattern in enumerate(_MEANINGS):
        if pattern.search(lower_name):
            return index
    return len(_MEANINGS)


def _usefulness(name: str) -> tuple[bool, int, str]:
    """Return a key that sorts the names of similar metrics, the most useful name first.

    A mean comes before other statistics such as a maximum, and a short name before a long name.
    """
    return _LESS_USEFUL.search(name.lower()) is not None, len(name), name
