"""Closing the record of a run whose flow process is gone, as that process would have done it.

`close_record` is for whoever has taken down what the run had left, and for nobody else: nothing of
the run may live, or be about to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tasks.record.disk import write_json
from tasks.record.events import EventLog
from tasks.record.outcome import Failure
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, ComponentRecord, RunJson
from tasks.record.states import RunState, moves_of_recovery
from tasks.spec.failure_kinds import FailureKind

_log = logging.getLogger(__name__)

#: The rule of a failure that names the loss of the flow process, and nothing of the run's own.
FLOW_LOST = "flow-lost"
_WAITING = (RunState.QUEUED, RunState.PENDING_RESOURCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """That a run has lost its flow process, and what finishing it came to."""

    #: Of the flow process.
    pid: int
    #: On its server the flow run is being cancelled, or is cancelled.
    is_cancelled: bool = False
    #: On its server the flow run waits for its next process, so that the run goes on; None: nobody
    #: can say, and a run that waits by its own record is left to do so.
    is_waiting: bool | None = False
    #: The worker of another host that was given the run since, so that it goes on, or has ended,
    #: there; empty where none was.
    elsewhere: str = ""
    #: Processes that the run had left, and that were ended.
    killed: tuple[int, ...] = ()
    #: Files and directories that it had left.
    removed: tuple[Path, ...] = ()
    #: Jobs on a cluster that it had left, and that were ended.
    jobs: tuple[str, ...] = ()
    #: What of its jobs is left, or not known, in words.
    jobs_left: str = ""
    #: The nodes that were not seen after the end of its jobs, in words.
    unseen: str = ""
    #: How the run had ended before, where its record could not be written: of its attempts the
    #: last, without the components.
    end: RunJson | None = None

    @property
    def cause(self) -> str:
        """What happened, in a sentence."""
        ended = [f"pids {', '.join(map(str, self.killed))}"] if self.killed else []
        ended += [f"job {job}" for job in self.jobs]
        if ended:
            left = f"reconcile ended what it had left ({'; '.join(ended)})"
        else:
            left = "none of its processes was left"
        if self.jobs_left:
            left = f"{left}; {self.jobs_left}, and is asked about again each minute"
        if self.unseen:
            left = f"{left}; not every node was seen to be free ({self.unseen})"
        return f"the flow process (pid {self.pid}) of this run was killed or lost; {left}"

    @property
    def failure(self) -> Failure:
        return Failure(kind=FailureKind.UNKNOWN, message=self.cause, rule=FLOW_LOST)


def is_by_loss(record: RunJson) -> bool:
    """It failed by the loss of its flow process, not by anything that was seen before."""
    failure = record.attempt.failure if record.attempt else None
    # Without an attempt there is no place for it in the file: only the loss can be the reason.
    by_loss = record.attempt is None or (failure is not None and failure.rule == FLOW_LOST)
    return record.state is RunState.FAILED and by_loss


def close_record(
    directory: Path, loss: Loss, clock: Callable[[], float] = time.time
) -> tuple[RunJson | None, bool]:
    """Give a lost run the state that is true of it, and note in its events what was done.

    A run that has its final state is left as it is, byte for byte, so a second call does nothing.

    Returns: the record, None where there is none that could be closed; whether it was changed.
    Raises: OSError.
    """
    place = RunPlace(directory=directory)
    try:
        before = RunJson.read(place.record)
    except (FileNotFoundError, ValueError) as error:
        _log.warning("%s is no record of a run, and is left as it is: %s", place.record, error)
        return None, False
    after = closed(before, loss, clock())
    if after != before:
        write_json(place.record, after.as_json())
        _tell(place, before, after, loss, clock)
    return after, after != before


def closed(record: RunJson, loss: Loss, now: float) -> RunJson:
    """The record once the run is closed; equal to what was given where it is.

    An attempt that had its verdict keeps it, and the run takes it over. Any other was cancelled
    where the server says so, and failed by the loss where not. A run that goes on waits for its
    next attempt.

    Raises: IllegalTransition.
    """
    if record.state.is_final:
        return record
    if loss.end is not None and loss.end.state.is_final:
        return _ended(record, loss.end, now)
    if loss.is_waiting is not False and record.state in _WAITING:
        return record
    if (attempt := record.attempt) is not None:
        attempt = attempt.but(components=_ended_components(attempt, now))
        if not attempt.state.is_final and loss.is_cancelled:
            attempt = attempt.but(state=RunState.CANCELLED, ended_at=now)
        elif not attempt.state.is_final:
            attempt = attempt.ended(RunState.FAILED, now, loss.failure)
        record = record.with_last(attempt)
    state, message = _outcome(record, loss)
    # Raises where no legal moves lead there.
    moves_of_recovery(record.state, state)
    record = record.but(state=state, message=message)
    return record.but(ended_at=now) if state.is_final else record


def _ended(record: RunJson, end: RunJson, now: float) -> RunJson:
    """The record of a run that had ended, which was not written."""
    if (last := end.attempt) is not None:
        attempts = [attempt for attempt in record.attempts if attempt.number < last.number]
        if (before := record.attempt) is not None and before.number == last.number:
            components = _ended_components(before, last.ended_at or now)
            last = last.but(components=components)
        record = record.but(attempts=(*attempts, last))
    return record.but(state=end.state, message=end.message, ended_at=end.ended_at)


def _ended_components(attempt: AttemptRecord, at: float) -> dict[str, ComponentRecord]:
    return {
        # Nobody saw its end, so the exit code and the signal stay unknown.
        name: component if component.ended_at is not None else component.but(ended_at=at)
        for name, component in attempt.components.items()
    }


def _outcome(record: RunJson, loss: Loss) -> tuple[RunState, str]:
    """The state that is true of the run, and its message."""
    attempt = record.attempt
    cancelled = RunState.CANCELLED, f"cancelled; {loss.cause}"
    if loss.elsewhere:
        return RunState.PENDING_RESOURCES, f"given to {loss.elsewhere} since: {loss.cause}"
    if loss.is_waiting:
        return RunState.PENDING_RESOURCES, f"waits for its next attempt: {loss.cause}"
    if attempt is not None and attempt.state is RunState.COMPLETED:
        return RunState.COMPLETED, f"completed; {loss.cause}"
    # One that waits was to be tried again, and that was cancelled.
    ends = attempt is None or record.state in _WAITING
    if (loss.is_cancelled and ends) or (attempt and attempt.state is RunState.CANCELLED):
        return cancelled
    failure = attempt.failure if attempt is not None else None
    return RunState.FAILED, str(failure or loss.failure)


def _tell(
    place: RunPlace, before: RunJson, after: RunJson, loss: Loss, clock: Callable[[], float]
) -> None:
    """Add to the events of the last attempt."""
    if after.attempt is None:
        return
    events = EventLog(place.attempt(after.attempt.number).events, clock=clock)
    removed = [str(path) for path in loss.removed]
    events.emit("reconcile.ended", flow_pid=loss.pid, killed=loss.killed, removed=removed)
    for state in moves_of_recovery(before.state, after.state):
        events.emit("run.state", state=state.value, message=after.message)
