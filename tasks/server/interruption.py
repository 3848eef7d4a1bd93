"""End a run or pipeline after a signal, or after a change of its flow run on the server.

One cancellation may arrive several times. If a user cancels a run in the Prefect UI, the run's
process reads the new state from the server, and the worker sends SIGTERM to the process. A stack
that stops may send SIGTERM again. All of these requests have the same effect: the run ends, with
all grace periods.

Only two requests shorten the grace periods. The first is a second Ctrl-C in the terminal of a run
that was started without a worker. The second is `muster cancel --now`, which gives the flow run the
state CANCELLING_NOW.

Users can also set any other state of a flow run, or delete the flow run, while its process runs.
The process reads its flow run every two seconds, and reacts to each of these changes:

- The flow run has ended, for example it is Completed: the run ends as cancelled. The process first
  sets the state Cancelling, so that the queue counts the run's GPUs until they are free.
- The flow run was set back, for example to Scheduled: the process sets the state Running again, and
  the run continues. Otherwise, a worker would start a second process of the same run.
- The flow run was deleted: the run ends as cancelled.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Running

from tasks.processes.signals import CtrlC, receive_signals
from tasks.server.events import override_client_settings
from tasks.server.flow_process import find_worker_flow_run
from tasks.server.flow_runs import CANCELLING_NOW, is_flow_run_missing, make_context_thread

_log = logging.getLogger(__name__)
_POLL_EVERY_S = 2.0
_JOIN_TIMEOUT_S = 5.0
#: Number of consecutive answers "the flow run does not exist" after which the flow run counts as
#: deleted. A single answer may come from a server whose database is being restored.
_MISSING_ANSWERS = 4
_CANCELLED = "cancelled from Prefect"
#: If a signal ends a run or pipeline, the recorded reason begins with these words.
INTERRUPTED_BY = "interrupted by"
_DELETED = "cancelled, because its flow run was deleted on the Prefect server"
_AFTER_HANGUP = (
    "interrupted by SIGHUP: the terminal was closed. To let a run continue without a terminal, "
    "use `nohup muster train SPEC &` or `muster submit SPEC`"
)


class Change(Enum):
    """Change of a flow run on the Prefect server that was made outside the flow run's process."""

    #: The flow run is running, or its state is unknown.
    NONE = "none"
    #: A user has cancelled the flow run. The processes of the run get their grace periods.
    CANCELLED = "cancelled"
    #: A user has cancelled the flow run. The processes of the run are killed at once.
    CANCELLED_NOW = "cancelled now"
    #: A user has set a final state other than Cancelled, although the process of the flow run is
    #: still running.
    ENDED = "ended"
    #: A user has set a state such as Scheduled or Paused, although the process of the flow run is
    #: still running.
    SET_BACK = "set back"
    #: The flow run does not exist any more.
    DELETED = "deleted"

    @staticmethod
    def of_state(state: State[Any] | None) -> Change:
        """Return the `Change` that led to a flow run's state.

        Call this only while the process of the flow run is running.

        Args:
            state: state of the flow run, or None if the state is unknown.
        """
        if state is None or state.is_running():
            return Change.NONE
        if state.is_cancelling() or state.is_cancelled():
            return Change.CANCELLED_NOW if state.name == CANCELLING_NOW else Change.CANCELLED
        return Change.ENDED if state.is_final() else Change.SET_BACK


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFlowRun:
    """State of a flow run on the Prefect server, and the `Change` that led to this state."""

    change: Change
    #: State of the flow run. None if the state is unknown, or if the flow run does not exist any
    #: more.
    state: State[Any] | None = None

    def describe_cancellation(self) -> str:
        """Return the reason of a cancellation, such as `cancelled by root with ...`.

        Returns: An empty string if the flow run is not cancelled.
        """
        if self.change not in (Change.CANCELLED, Change.CANCELLED_NOW):
            return ""
        message = self.state.message if self.state is not None else ""
        if not message:
            return _CANCELLED
        return message if message.startswith("cancelled") else f"{_CANCELLED}: {message}"


def observe_flow_run(flow_run_id: UUID) -> ObservedFlowRun:
    """Return a flow run's state on the Prefect server, and the `Change` that led to this state.

    If the server does not answer, the state is None and the change is `Change.NONE`.
    """
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
        return ObservedFlowRun(change=Change.of_state(state), state=state)
    except ObjectNotFound as error:
        if is_flow_run_missing(error):
            return ObservedFlowRun(change=Change.DELETED)
        _log.debug("Flow run %s could not be read: %r", flow_run_id, error.http_exc)
    except Exception as error:
        _log.debug("Muster could not read the state of flow run %s: %r", flow_run_id, error)
    return ObservedFlowRun(change=Change.NONE)


def correct_state(flow_run_id: UUID, observed: State[Any], corrected: State[Any]) -> None:
    """Replace a state that a user has set by hand, unless the state has changed again.

    The change is forced, because the server's rules may not allow it. If the server does not
    answer, nothing is changed, and the caller repeats the call later.

    Args:
        flow_run_id: id of the flow run.
        observed: state that the user has set.
        corrected: state that replaces it.
    """
    try:
        with get_client(sync_client=True) as client:
            present = client.read_flow_run(flow_run_id).state
            if present is not None and present.id == observed.id:
                client.set_flow_run_state(flow_run_id, corrected, force=True)
                _log.warning("Flow run %s: %s", flow_run_id, corrected.message)
    except Exception as error:
        _log.debug("Muster could not correct the state of flow run %s: %r", flow_run_id, error)


class Interruptible(Protocol):
    """A run, or a pipeline of runs, that can be ended from another thread.

    Every method returns at once and may be called in any thread. A repeated call has no effect.
    """

    @property
    def is_handing_over(self) -> bool:
        """True if this process is handing the run or pipeline over to the next flow process.

        During the handover, the handing process sets a waiting state. The caller must not replace
        this waiting state.
        """

    def interrupt(self, why: str) -> None:
        """Request that the run or pipeline ends as cancelled. Components get their grace periods.

        Args:
            why: reason of the cancellation, for the run's record.
        """

    def hurry(self) -> None:
        """Skip the remaining grace periods of the components. Call this only after `interrupt`."""

    def hand_over(self, why: str) -> None:
        """Request that this process ends and the next flow process continues the run or pipeline.

        Args:
            why: reason of the handover, for the run's record.
        """


class ForwardedRequests:
    """Lets a run or pipeline react to signals, and to changes of its flow run on the server."""

    def __init__(self, session: Interruptible, flow_run_id: UUID, *, may_be_left: bool) -> None:
        """
        Args:
            session: the run or pipeline that this process executes.
            flow_run_id: id of the flow run of the run or pipeline.
            may_be_left: True if a worker can later continue the run or pipeline. SIGTERM from a
                worker then ends only this process, unless the flow run was cancelled. False if
                every SIGTERM ends the run or pipeline.
        """
        self._session = session
        self._flow_run_id = flow_run_id
        self._is_direct = find_worker_flow_run() is None
        #: Number of consecutive requests to which the server answered that the flow run does not
        #: exist.
        self._missing_answers = 0
        self._may_be_left = may_be_left and not self._is_direct
        self._ctrl_c = CtrlC()

    def take_signal(self, signum: int, at_s: float) -> None:
        """React to a signal: end the run or pipeline, or end only this process.

        SIGTERM ends only this process if a later process can continue the run or pipeline, and if
        the flow run was not cancelled, deleted or set to a final state. For example, a worker sends
        SIGTERM when the worker is stopped. In all other cases, the signal ends the run or pipeline.
        A second Ctrl-C skips the grace periods.

        Args:
            signum: number of the signal.
            at_s: time at which the signal arrived, in CLOCK_MONOTONIC seconds.
        """
        if signum == signal.SIGTERM and self._may_be_left:
            # Read the flow run's state in another thread, because the server may take long to
            # answer.
            make_context_thread("on-term", self._leave_unless_ended).start()
            return
        if signum == signal.SIGHUP and self._is_direct:
            self._session.interrupt(_AFTER_HANGUP)
            return
        self._session.interrupt(f"{INTERRUPTED_BY} {signal.Signals(signum).name}")
        if signum == signal.SIGINT and self._ctrl_c.is_second(at_s) and self._is_direct:
            self._session.hurry()

    def take_observation(self, observed: ObservedFlowRun) -> None:
        """React to a change of the flow run on the Prefect server.

        If the flow run was cancelled, deleted or set to a final state such as Completed, end the
        run or pipeline.

        Also correct the state on the server, because this process still runs: replace a final state
        with Cancelling, and a state such as Scheduled with Running.
        """
        state = observed.state
        self._missing_answers += 1
        if observed.change is not Change.DELETED:
            self._missing_answers = 0

        match observed.change:
            case Change.CANCELLED | Change.CANCELLED_NOW:
                self._session.interrupt(observed.describe_cancellation())
                if observed.change is Change.CANCELLED_NOW:
                    self._session.hurry()
                if state is not None and state.is_final():
                    self._set_cancelling(state, "cancelled; its processes are being ended")
            case Change.ENDED if state is not None:
                message = (
                    f"a user set the flow run to {state.name} while its process was still running"
                )
                self._session.interrupt(f"cancelled, because {message}")
                self._set_cancelling(state, f"{message}; its processes are being ended")
            case Change.SET_BACK if state is not None and not self._session.is_handing_over:
                message = (
                    f"a user set the state {state.name}, but the process of the flow run is still "
                    "running, so Muster set the state back to Running"
                )
                remedy = "To end the run, cancel the flow run."
                running: State[Any] = Running(message=f"{message}. {remedy}")
                correct_state(self._flow_run_id, state, running)
            case Change.DELETED if self._missing_answers >= _MISSING_ANSWERS:
                self._session.interrupt(_DELETED)

    def _set_cancelling(self, observed: State[Any], message: str) -> None:
        """Replace a final state of the flow run with Cancelling, because its process still runs."""
        if not self._session.is_handing_over:
            cancelling: State[Any] = Cancelling(message=message)
            correct_state(self._flow_run_id, observed, cancelling)

    def _leave_unless_ended(self) -> None:
        """End this process so that a later process can continue the run or pipeline.

        If the flow run was cancelled, deleted or set to another final state, the run or pipeline is
        ended instead.
        """
        observed = observe_flow_run(self._flow_run_id)
        if observed.change is Change.DELETED:
            self._session.interrupt(_DELETED)
        elif observed.change in (Change.NONE, Change.SET_BACK):
            self._session.hand_over("its flow process was ended by SIGTERM")
        else:
            self.take_observation(observed)


@contextmanager
def end_on_request(
    session: Interruptible, flow_run_id: UUID, *, may_be_left: bool
) -> Iterator[None]:
    """End a run or pipeline if SIGINT, SIGTERM or SIGHUP arrives, or if its flow run ends.

    The signals and the flow run are watched in the `with` block.

    A signal neither ends this process nor raises an exception. Another thread receives the signal
    and starts to end the run or pipeline; the caller waits for the end. If the caller is not in the
    main thread, signals have no effect.

    Args:
        session: the run or pipeline that this process executes.
        flow_run_id: id of the flow run of the run or pipeline.
        may_be_left: True if a worker can later continue the run or pipeline. SIGTERM from a worker
            then ends only this process, unless the flow run was cancelled. A worker sends SIGTERM
            when the flow run is cancelled, and when the worker itself is stopped.
    """
    wishes = ForwardedRequests(session, flow_run_id, may_be_left=may_be_left)
    is_over = threading.Event()

    def watch_server() -> None:
        # Continue the loop after a cancellation, because `muster cancel --now` may follow. Turn off
        # the retries of the client, which would delay the end of the run during an outage of the
        # server.
        with override_client_settings(retries=0):
            while not is_over.wait(_POLL_EVERY_S):
                observed = observe_flow_run(flow_run_id)
                # If the run or pipeline has ended during the request, ignore the answer. The
                # answer may contain the final state that this process itself has set.
                # `take_observation` would treat this state as a request of a user.
                if not is_over.is_set():
                    wishes.take_observation(observed)

    watcher = make_context_thread("server-watch", watch_server)
    watcher.start()
    try:
        with receive_signals(wishes.take_signal):
            yield
    finally:
        is_over.set()
        # Limit the wait for the thread, because its request to a hung server may take long.
        watcher.join(_JOIN_TIMEOUT_S)
