"""The request to end a run, or to let another process continue the run."""

from __future__ import annotations

import threading

from tasks.processes.supervisor import Supervisor
from tasks.record.states import RunState


class EndRequest:
    """A request to end one run, which may arrive at any time and in any thread.

    The request is passed to the supervisor of the current attempt. Before the first attempt, the
    request is kept for the supervisor of that attempt.
    """

    def __init__(self) -> None:
        #: Reason why the run must end as cancelled. Empty if there is no such reason.
        self.interrupt_reason = ""
        #: Reason why another process must continue the run. Empty if there is no such reason.
        self.handover_reason = ""
        #: True if components must be ended without waiting for their grace periods.
        self._is_hurried = False
        #: Set when `interrupt` or `hand_over` is called for the first time.
        self._has_arrived = threading.Event()
        #: Supervisor of the current attempt or of the last attempt. None before the first attempt.
        self._supervisor: Supervisor | None = None

    def __bool__(self) -> bool:
        """Return True if this process must end the run, or hand it over to another process."""
        return bool(self.interrupt_reason or self.handover_reason)

    def interrupt(self, reason: str) -> None:
        """End the run as cancelled. Components get their grace periods. Return at once.

        Only the first call sets the reason. Further calls are possible, because the same
        cancellation may arrive both as a signal and through the Prefect server.
        """
        self.interrupt_reason = self.interrupt_reason or reason
        self._has_arrived.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(self.interrupt_reason)

    def hurry(self) -> None:
        """End an interrupted run without its remaining grace periods. Return at once."""
        was_hurried = self._is_hurried
        self._is_hurried = True
        if self._supervisor is not None and not was_hurried:
            self._supervisor.hurry()

    def hand_over(self, reason: str) -> None:
        """End the run's work in this process, but let its Ray jobs continue. Return at once.

        Another process of the run will supervise the Ray jobs.
        """
        self.handover_reason = self.handover_reason or reason
        self._has_arrived.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(reason, RunState.RUNNING)

    def attach(self, supervisor: Supervisor) -> None:
        """Connect a new supervisor, which gets all later requests.

        If a request has already arrived, the supervisor gets it now.
        """
        self._supervisor = supervisor
        if self.interrupt_reason:
            supervisor.interrupt(self.interrupt_reason)
            if self._is_hurried:
                supervisor.hurry()
        elif self.handover_reason:
            supervisor.interrupt(self.handover_reason, RunState.RUNNING)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a request arrives. Return False if no request has arrived in time."""
        self._has_arrived.wait(timeout_s)
        return bool(self)
