"""The request to end a run, or to let another process continue the run."""

from __future__ import annotations

import threading

from tasks.processes.supervisor import Supervisor
from tasks.record.states import RunState


class EndRequest:
    """The request to end one run, which may arrive at any time and in any thread.

    The request is passed to the supervisor of the current attempt. If no attempt has begun, the
    request is kept and passed to the supervisor of the next attempt.
    """

    def __init__(self) -> None:
        #: Reason for ending the run as cancelled. Empty if the run was not interrupted.
        self.interrupt_reason = ""
        #: Reason why another process will continue the run. Empty if this process keeps the run.
        self.handover_reason = ""
        #: True if the remaining grace periods must be skipped.
        self._is_hurried = False
        #: Set when the first request arrives.
        self._has_arrived = threading.Event()
        #: Supervisor of the current attempt or of the last attempt. None before the first attempt.
        self._supervisor: Supervisor | None = None

    def __bool__(self) -> bool:
        """Return True if the run must end, or if another process will continue the run."""
        return bool(self.interrupt_reason or self.handover_reason)

    def interrupt(self, reason: str) -> None:
        """Request that the run ends as cancelled, with all grace periods. Return at once.

        The same cancellation may arrive as a signal and through the Prefect server, so this method
        may be called several times. Only the first call sets the reason.
        """
        self.interrupt_reason = self.interrupt_reason or reason
        self._has_arrived.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(self.interrupt_reason)

    def hurry(self) -> None:
        """Skip the remaining grace periods of an interrupted run. Return at once."""
        was_hurried = self._is_hurried
        self._is_hurried = True
        if self._supervisor is not None and not was_hurried:
            self._supervisor.hurry()

    def hand_over(self, reason: str) -> None:
        """End the run's work in this process, but let its Ray jobs run. Return at once.

        Another process of the run will continue the Ray jobs.
        """
        self.handover_reason = self.handover_reason or reason
        self._has_arrived.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(reason, RunState.RUNNING)

    def attach(self, supervisor: Supervisor) -> None:
        """Pass all later requests, and a request that has already arrived, to a new supervisor."""
        self._supervisor = supervisor
        if self.interrupt_reason:
            supervisor.interrupt(self.interrupt_reason)
            if self._is_hurried:
                supervisor.hurry()
        elif self.handover_reason:
            supervisor.interrupt(self.handover_reason, RunState.RUNNING)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a request arrives. Return False if none has arrived in time."""
        self._has_arrived.wait(timeout_s)
        return bool(self)
