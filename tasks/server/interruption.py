"""End a run or pipeline if its process gets a signal or its flow run is cancelled on the server.

One cancellation may arrive several times. If a user cancels a run in the Prefect UI, the run's
process reads the new state from the server, and the worker sends SIGTERM to the process. A stack
that stops may send SIGTERM again. All of these requests have the same effect: the run ends, with
all grace periods.

Only two requests shorten the grace periods. The first is a second Ctrl-C in the terminal of a run
that was started without a worker. The second is `muster cancel --now`, which gives the flow run the
state CANCELLING_NOW.
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
    """Cancellation that a user has requested, according to the state of the flow run."""

    #: No cancellation is requested.
    NONE = "none"
    #: The run must end. Its processes have their grace periods.
    GRACEFUL = "graceful"
    #: The run must end. Its processes are killed without grace periods.
    NOW = "now"

    @staticmethod
    def of_state(state: State[object] | None) -> Cancel:
        """Return the cancellation that a flow run's state requests.

        Args:
            state: state of the flow run, or None if the state is unknown.
        """
        if state is None or not (state.is_cancelling() or state.is_cancelled()):
            return Cancel.NONE
        return Cancel.NOW if state.name == CANCELLING_NOW else Cancel.GRACEFUL


def read_cancel(flow_run_id: UUID) -> Cancel:
    """Return the cancellation that is requested for a flow run on the Prefect server.

    Returns: Cancel.NONE if the server does not answer. Also Cancel.NONE if the server does not know
        the flow run. A user has then deleted the flow run, but the training should continue.
    """
    try:
        with get_client(sync_client=True) as client:
            return Cancel.of_state(client.read_flow_run(flow_run_id).state)
    except Exception as error:
        _log.debug("The state of flow run %s could not be read: %r", flow_run_id, error)
        return Cancel.NONE


class Interruptible(Protocol):
    """A run, or a pipeline of runs, that can be ended from another thread.

    Every method returns at once and may be called in any thread. A repeated call has no effect.
    """

    def interrupt(self, why: str) -> None:
        """Start to end the run or pipeline as cancelled, with all grace periods.

        Args:
            why: reason of the cancellation, for the run's record.
        """

    def hurry(self) -> None:
        """Skip the remaining grace periods. `interrupt` must have been called before."""

    def let_go(self, why: str) -> None:
        """Start to end this process, and hand the run or pipeline over to its next process.

        Args:
            why: reason of the handover, for the run's record.
        """


class ForwardedRequests:
    """Calls methods of a run or pipeline when a signal or a cancellation on the server arrives."""

    def __init__(self, session: Interruptible, flow_run_id: UUID, *, may_be_left: bool) -> None:
        """
        Args:
            session: the run or pipeline that this process executes.
            flow_run_id: id of the flow run of the run or pipeline.
            may_be_left: True if a SIGTERM without a cancellation hands the session over to the next
                worker. False if every SIGTERM ends the session.
        """
        self._session = session
        self._flow_run_id = flow_run_id
        self._is_direct = find_worker_flow_run() is None
        self._may_be_left = may_be_left and not self._is_direct
        self._ctrl_c = CtrlC()

    def take_signal(self, signum: int, at_s: float) -> None:
        """End the session, skip its grace periods, or hand it over, as the signal requests.

        Args:
            signum: number of the signal.
            at_s: time at which the signal arrived, in CLOCK_MONOTONIC seconds.
        """
        if signum == signal.SIGTERM and self._may_be_left:
            # Read the flow run's state in another thread, because the server may take long to
            # answer.
            make_context_thread("on-term", self._leave_unless_cancelled).start()
            return
        if signum == signal.SIGHUP and self._is_direct:
            self._session.interrupt(_AFTER_HANGUP)
            return
        self._session.interrupt(f"interrupted by {signal.Signals(signum).name}")
        if signum == signal.SIGINT and self._ctrl_c.is_second(at_s) and self._is_direct:
            self._session.hurry()

    def take_cancel(self, cancel: Cancel) -> None:
        """End the session if a cancellation is requested on the server."""
        if cancel is not Cancel.NONE:
            self._session.interrupt(_CANCELLED)
        if cancel is Cancel.NOW:
            self._session.hurry()

    def _leave_unless_cancelled(self) -> None:
        """Hand the session over to the next worker, or end it if its flow run is cancelled."""
        cancel = read_cancel(self._flow_run_id)
        if cancel is Cancel.NONE:
            self._session.let_go("its flow process was ended by SIGTERM")
        self.take_cancel(cancel)


@contextmanager
def end_on_request(
    session: Interruptible, flow_run_id: UUID, *, may_be_left: bool
) -> Iterator[None]:
    """End the session if a cancellation, SIGINT, SIGTERM or SIGHUP arrives in the `with` block.

    A signal does not end this process, and raises no exception in the main thread, because the main
    thread may hold a lock. Another thread receives the signal and starts to end the session. The
    caller waits until the session has ended. If the caller is not in the main thread, Python cannot
    handle signals, and only cancellations have an effect.

    Args:
        session: the run or pipeline that this process executes.
        flow_run_id: id of the flow run of the run or pipeline.
        may_be_left: True if a SIGTERM without a cancellation hands the session over to the next
            worker. A worker sends SIGTERM when the flow run is cancelled, and also when the worker
            itself is stopped. Only in the first case, the flow run's state on the server is
            Cancelling or Cancelled.
    """
    wishes = ForwardedRequests(session, flow_run_id, may_be_left=may_be_left)
    is_over = threading.Event()

    def watch_server() -> None:
        # The loop continues after a cancellation, because `muster cancel --now` may follow. The
        # client must not retry: during a server outage, it would sleep for a minute and delay the
        # end of the run.
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
        # Limit the wait for the thread, because its request to a hung server may take long.
        watcher.join(_JOIN_TIMEOUT_S)
