"""End of a run or pipeline from outside its process: by signals, or by a cancel on the server.

One cancel may arrive in several ways. For a run under a worker, Cancel in the UI sets a state on
the server, which this process reads, and makes the worker send SIGTERM. A stack that stops may send
SIGTERM once more. All of these count as the same request: end the run, with every grace period.

Only two things shorten the grace periods: a second Ctrl-C in the terminal of a run that was started
directly, and `muster cancel --now`, which gives the flow run the state CANCELLING_NOW.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State

from tasks.processes.signals import CtrlC, receive_signals
from tasks.server.events import override_client_settings
from tasks.server.flow_process import find_worker_flow_run
from tasks.server.flow_runs import CANCELLING_NOW, make_context_thread

_log = logging.getLogger(__name__)
_POLL_EVERY_S = 2.0
_JOIN_TIMEOUT_S = 5.0
_CANCELLED = "cancelled from Prefect"
_AFTER_HANGUP = (
    "interrupted by SIGHUP: its terminal was closed. A run outlives its terminal if it is started "
    "by `nohup muster train SPEC &` or queued by `muster submit SPEC`"
)


class Cancel(Enum):
    """Kind of cancellation that the state of a flow run requests."""

    #: The flow run continues.
    NONE = "none"
    #: The flow run must end, with every grace period.
    GRACEFUL = "graceful"
    #: The flow run must end without grace periods.
    NOW = "now"

    @staticmethod
    def of_state(state: State[object] | None) -> Cancel:
        if state is None or not (state.is_cancelling() or state.is_cancelled()):
            return Cancel.NONE
        return Cancel.NOW if state.name == CANCELLING_NOW else Cancel.GRACEFUL


def read_cancel(flow_run_id: UUID) -> Cancel:
    """Read the requested cancellation from the server. Return NONE if the server does not answer.

    NONE is also the result if the server does not know the flow run. Its record is then lost, but
    the training should continue.
    """
    try:
        with get_client(sync_client=True) as client:
            return Cancel.of_state(client.read_flow_run(flow_run_id).state)
    except Exception as error:
        _log.debug("state of flow run %s not known: %r", flow_run_id, error)
        return Cancel.NONE


class Interruptible(Protocol):
    """A run, or a pipeline of runs. Every method returns at once, and is safe in any thread.

    Calling a method again changes nothing.
    """

    def interrupt(self, why: str) -> None:
        """End the run or pipeline as cancelled, with every grace period."""

    def hurry(self) -> None:
        """Cut the grace periods short. Called after `interrupt`."""

    def let_go(self, why: str) -> None:
        """End this process, and leave the run or pipeline to its next process."""


class ForwardedRequests:
    """Passes the requests of signals and of the server on to a session."""

    def __init__(self, session: Interruptible, flow_run_id: UUID, *, may_be_left: bool) -> None:
        """
        Args:
            may_be_left: SIGTERM of a worker that was not asked to cancel leaves the session to the
                next worker.
        """
        self._session = session
        self._flow_run_id = flow_run_id
        self._is_direct = find_worker_flow_run() is None
        self._may_be_left = may_be_left and not self._is_direct
        self._ctrl_c = CtrlC()

    def take_signal(self, signum: int, at_s: float) -> None:
        """
        Args:
            at_s: when the signal arrived, in CLOCK_MONOTONIC seconds.
        """
        if signum == signal.SIGTERM and self._may_be_left:
            # Ask the server in another thread, because it may take long to answer.
            make_context_thread("on-term", self._leave_unless_cancelled).start()
            return
        if signum == signal.SIGHUP and self._is_direct:
            self._session.interrupt(_AFTER_HANGUP)
            return
        self._session.interrupt(f"interrupted by {signal.Signals(signum).name}")
        if signum == signal.SIGINT and self._ctrl_c.is_second(at_s) and self._is_direct:
            self._session.hurry()

    def take_cancel(self, cancel: Cancel) -> None:
        if cancel is not Cancel.NONE:
            self._session.interrupt(_CANCELLED)
        if cancel is Cancel.NOW:
            self._session.hurry()

    def _leave_unless_cancelled(self) -> None:
        """Leave the session to the next worker, unless the server says that it is cancelled."""
        cancel = read_cancel(self._flow_run_id)
        if cancel is Cancel.NONE:
            self._session.let_go("its flow process was ended by SIGTERM")
        self.take_cancel(cancel)


@contextmanager
def end_on_request(
    session: Interruptible, flow_run_id: UUID, *, may_be_left: bool
) -> Iterator[None]:
    """While open, a cancel, SIGINT, SIGTERM and SIGHUP end the session instead of this process.

    A signal raises nothing in the main thread, which may hold any lock at that moment. A thread
    receives the signal and ends the session. The caller waits for that end and continues with the
    teardown. Outside the main thread, Python cannot handle signals, so only cancels have an effect.

    Args:
        may_be_left: SIGTERM of a worker that was not asked to cancel leaves the session to the next
            worker. A worker sends its flow runs SIGTERM both when one is cancelled and when it is
            itself stopped, for an upgrade for example; only the server knows which.
    """
    wishes = ForwardedRequests(session, flow_run_id, may_be_left=may_be_left)
    is_over = threading.Event()

    def watch_server() -> None:
        # This continues after a cancel, because `muster cancel --now` may follow. The client does
        # not retry: while the server is away, it would sleep for a minute and delay the run's end.
        with override_client_settings(retries=0):
            while not is_over.wait(_POLL_EVERY_S):
                wishes.take_cancel(read_cancel(flow_run_id))

    watcher = make_context_thread("cancel-watch", watch_server)
    watcher.start()
    try:
        with receive_signals(wishes.take_signal):
            yield
    finally:
        is_over.set()
        # A hung server may keep a request for long. Its answer does not matter any more.
        watcher.join(_JOIN_TIMEOUT_S)
