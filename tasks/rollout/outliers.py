"""Which servers answer questions and fail requests, unlike the others of their fleet. Pure.

What a client sends may fail wherever it is sent: that is no server's fault. One whose requests all
fail while those to the others are answered is sick, whatever it says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Fewer failed requests in a row say nothing.
REQUESTS_AT_LEAST = 5


@dataclass(slots=True)
class _Requests:
    """What became of the requests to one incarnation of a server."""

    #: In a row, to the last one that ended.
    failed: int = 0
    #: When the first of those did, in monotonic seconds.
    since_s: float = 0.0
    #: When a request was last answered there.
    answered_s: float = float("-inf")


class Outliers:
    """Counts the requests of the servers that are watched."""

    def __init__(self, *, for_s: float) -> None:
        """
        Args:
            for_s: how long the requests to a server must have failed.
        """
        self._for_s = for_s
        self._of: dict[int, _Requests] = {}

    def begin(self, rank: int) -> None:
        """A new incarnation of it serves, of which nothing is known."""
        self._of[rank] = _Requests()

    def forget(self, rank: int) -> None:
        """It serves no more."""
        self._of.pop(rank, None)

    def answered(self, rank: int, now_s: float) -> None:
        if (requests := self._of.get(rank)) is not None:
            requests.failed = 0
            requests.answered_s = now_s

    def failed(self, rank: int, now_s: float) -> str:
        """One more request failed there.

        Returns: why the server is sick; empty: it is not known to be.
        """
        requests = self._of.get(rank)
        if requests is None:
            return ""
        if not requests.failed:
            requests.since_s = now_s
        requests.failed += 1
        lasts_s = now_s - requests.since_s
        if requests.failed < REQUESTS_AT_LEAST or lasts_s < self._for_s:
            return ""
        others = [other for at, other in self._of.items() if at != rank]
        well = [one for one in others if not one.failed and one.answered_s >= requests.since_s]
        if not others or 2 * len(well) <= len(others):
            return ""
        return (
            f"its last {requests.failed} requests failed, for {lasts_s:.0f} s, "
            f"while {len(well)} of {len(others)} others answer theirs"
        )
