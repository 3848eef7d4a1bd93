"""Decide when a run reports its expected end, which the queue uses to plan other runs."""

from __future__ import annotations

#: Number of reported steps before an expected end is computed. The first steps of a training are
#: often slow, for example because code is compiled.
_MIN_STEPS = 5
#: Seconds between two reports of the expected end.
_MIN_INTERVAL_S = 60.0
#: An expected end is reported again only if it has moved by more than this share of the remaining
#: time.
_TOLERANCE = 0.1


class ExpectedEnd:
    """The expected end of a run, computed from the speed of the training.

    The speed varies a little with each step. So a new expected end is reported only if it differs
    clearly from the last report. Otherwise, each step would cost a request to the server.
    """

    def __init__(self) -> None:
        self._step_count = 0
        #: Expected end of the run in the last report, in UTC epoch seconds. None if there was no
        #: report in the current attempt.
        self._reported: float | None = None
        #: Time of the last report in UTC epoch seconds.
        self._reported_at = 0.0

    def restart(self) -> None:
        """Forget the steps of earlier attempts, because a new attempt begins."""
        self._step_count = 0
        self._reported = None

    def take_step(self, at: float, remaining_s: float | None) -> float | None:
        """Record a training step. Return the expected end of the run if a report is due.

        Args:
            at: Time of the step in UTC epoch seconds.
            remaining_s: Estimated seconds from this step to the last step. None if unknown.

        Returns:
            The expected end of the run in UTC epoch seconds. None if no report is due.
        """
        self._step_count += 1
        if remaining_s is None or self._step_count < _MIN_STEPS:
            return None
        expected_end = at + remaining_s
        if self._reported is not None:
            has_moved = abs(expected_end - self._reported) > _TOLERANCE * remaining_s
            if not has_moved or at - self._reported_at < _MIN_INTERVAL_S:
                return None
        self._reported = expected_end
        self._reported_at = at
        return expected_end
