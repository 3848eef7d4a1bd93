"""GPUs per tag: what the gangs with a tag hold of the limit that an operator set for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Quota:
    """What is used of each limit."""

    def __init__(self, limits: Mapping[str, int], used: Mapping[str, int] | None = None) -> None:
        """
        Args:
            limits: `limits[tag]` GPUs at once; a tag that is not there has no limit.
        """
        self._limits = dict(limits)
        self._used = dict.fromkeys(limits, 0) | dict(used or {})

    def copy(self) -> Quota:
        return Quota(self._limits, self._used)

    def exceeded(self, tags: Iterable[str], gpus: int) -> str:
        """The tag that would go over its limit with so many more, the first by name; or empty."""
        over = (
            tag for tag in self._limits.keys() & tags if self._used[tag] + gpus > self._limits[tag]
        )
        return min(over, default="")

    def take(self, tags: Iterable[str], gpus: int) -> None:
        """Count so many more; with less than 0, so many fewer."""
        for tag in self._limits.keys() & tags:
            self._used[tag] += gpus
