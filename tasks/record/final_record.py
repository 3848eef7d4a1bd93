"""Write the final state of a run whose flow process was killed.

`write_final_record` may be called only after all processes and Ray jobs of the run have ended.
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
from tasks.record.states import RunState, find_recovery_transitions
from tasks.spec.failure_kinds import FailureKind

_log = logging.getLogger(__name__)

#: Value of `Failure.rule` for an attempt whose flow process was killed. The attempt had no other
#: failure.
FLOW_LOST = "flow-lost"
_WAITING = (RunState.QUEUED, RunState.PENDING_RESOURCES)
#: Reason why Muster does not retry a run after its flow process was killed.
_NO_RETRY_AFTER_LOSS = "the flow process was lost, and Muster does not start it again"
#: Advice to the user after the flow process was killed. `{retry}` is replaced by the possible ways
#: to retry the run.
_ADVICE_AFTER_LOSS = "To continue the run: {retry}."


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLoss:
    """Facts about a run whose flow process was killed, and the results of `muster reconcile`."""

    #: Process id of the killed flow process, or 0 if it is unknown.
    pid: int
    #: True if the flow run is cancelled, or is being cancelled, on the Prefect server.
    is_cancelled: bool = False
    #: True if the flow run is scheduled again on the Prefect server. None if the server did not
    #: answer. In both cases, Muster does not change the `run.json` of a run that already waits.
    is_waiting: bool | None = False
    #: Name of the worker on another host that continued the run, or an empty string. The run may
    #: already have ended on that host.
    elsewhere: str = ""
    #: Process ids of the leftover processes that Muster has ended.
    killed: tuple[int, ...] = ()
    #: Leftover files and directories that Muster has deleted.
    removed: tuple[Path, ...] = ()
    #: Last training step in the event log or the metrics file of the run's last attempt. `run.json`
    #: may have an earlier step or no step, because the flow process was killed before it read the
    #: end of the metrics file. None if unknown.
    last_step: float | None = None
    #: Submission ids of the leftover Ray jobs that Muster has ended.
    jobs: tuple[str, ...] = ()
    #: Phrase that lists the Ray jobs that still run or have an unknown state. Empty if there are
    #: none.
    jobs_left: str = ""
    #: Text that lists the nodes on which Muster could not search for leftover processes of the Ray
    #: jobs. Empty if all nodes were searched.
    unseen: str = ""
    #: Final record that the killed flow process could not write to `run.json`, or None. The record
    #: contains only the last attempt, without components.
    end: RunJson | None = None

    @property
    def cause(self) -> str:
        """Text for the user about the killed flow process and the clean-up."""
        ended = [f"pids {', '.join(map(str, self.killed))}"] if self.killed else []
        ended += [f"job {job}" for job in self.jobs]
        if ended:
            cleanup = f"Muster ended leftover processes and jobs of the run ({'; '.join(ended)})"
        else:
            cleanup = "the run had no leftover processes"
        if self.jobs_left:
            cleanup = f"{cleanup}; {self.jobs_left}. Muster checks again each minute"
        if self.unseen:
            cleanup = (
                f"{cleanup}; leftover processes may still be running on nodes that were not "
                f"checked ({self.unseen})"
            )
        pid = f" (pid {self.pid})" if self.pid else ""
        return f"the flow process{pid} of this run was killed or lost; {cleanup}"

    def make_failure(self, record: RunJson) -> Failure:
        """Return the failure of the attempt during which the flow process was killed."""
        retry = f"muster retry {record.run_id}"
        # Prefect shows its button Retry only for runs of a deployment, so mention the button only
        # for these runs. A run without a deployment has the path of a spec file in its record.
        if "spec_file" not in (record.provenance or {}):
            retry += ", or choose Retry on its page in the Prefect UI"
        hint = _ADVICE_AFTER_LOSS.format(retry=retry)
        return Failure(kind=FailureKind.UNKNOWN, message=self.cause, rule=FLOW_LOST, hint=hint)


def describe_cleanup_after_loss(
    run_id: str, *, is_adopted: bool = False, next_attempt: str = ""
) -> str:
    """Return a text for the user about the steps that Muster takes after a flow process was killed.

    Args:
        run_id: Id of the run.
        is_adopted: True if the Ray jobs of the run continue, and a new flow process will supervise
            them.
        next_attempt: Sentence about the start of the next attempt, without a full stop. Empty if
            unknown. Ignored if `is_adopted` is True.
    """
    if is_adopted:
        return (
            "The Ray jobs of the run continue. Within a minute, Muster starts a new flow process "
            "that takes them over. To start this process at once: muster reconcile"
        )
    start = f"{next_attempt}. " if next_attempt else ""
    return (
        "Within a minute, a worker or the upkeep process of Muster ends the remaining processes of "
        "the run and completes its record. If this host has no worker and no upkeep process, run "
        f"`muster reconcile`. {start}To continue the run after this cleanup: muster retry {run_id}"
    )


def has_failed_by_loss(record: RunJson) -> bool:
    """Return True if a run failed only because its flow process was killed."""
    failure = record.attempt.failure if record.attempt else None
    # If the flow process was killed during an attempt, the attempt has a failure with the rule
    # FLOW_LOST. If a failed run has no attempt, the flow process was killed before the first
    # attempt, because any other failure is recorded in an attempt.
    is_lost = record.attempt is None or (failure is not None and failure.rule == FLOW_LOST)
    return record.state is RunState.FAILED and is_lost


def write_final_record(
    directory: Path, loss: FlowLoss, clock: Callable[[], float] = time.time
) -> tuple[RunJson | None, bool]:
    """Write the final state of a run into its `run.json`, and add events to its event log.

    If the recorded state is already final, no file is changed.

    Args:
        directory: Directory of the run.
        loss: Facts about the run, whose flow process was killed.
        clock: Function that returns the current time in UTC epoch seconds.

    Returns:
        - The record, or None if it cannot be read.
        - True if the record was changed.

    Raises:
        OSError: The record or the event log cannot be accessed.
    """
    place = RunPlace(directory=directory)
    try:
        before = RunJson.read(place.record)
    except (FileNotFoundError, ValueError) as error:
        _log.warning(
            "The file %s is not a valid run record, so Muster leaves it unchanged: %s",
            place.record,
            error,
        )
        return None, False
    after = finalize_record(before, loss, clock())
    if after != before:
        write_json(place.record, after.as_json(), durable=True)
        _log_events(place, before, after, loss, clock)
    return after, after != before


def finalize_record(record: RunJson, loss: FlowLoss, now: float) -> RunJson:
    """Return the record with the final state of a run whose flow process was killed.

    The state of the last attempt is determined first:

    - A recorded final state is kept.
    - The state is CANCELLED if the run was cancelled on the Prefect server.
    - Otherwise the state is FAILED.

    The run gets the same state. But if the Prefect server has scheduled the run again, or another
    host has continued the run, the run waits for its next attempt.

    Args:
        record: The record before the change. A record with a final state is returned unchanged.
        loss: Facts about the run, whose flow process was killed.
        now: End time for the record, in UTC epoch seconds.

    Raises:
        IllegalTransition: The recorded state cannot change to the new state.
    """
    if record.state.is_final:
        return record
    if loss.end is not None and loss.end.state.is_final:
        return _merge_unwritten_end(record, loss.end, now)
    if loss.is_waiting is not False and record.state in _WAITING:
        return record

    if (attempt := record.attempt) is not None:
        attempt = attempt.with_changes(components=_end_components(attempt, now))
        if not attempt.state.is_final and loss.last_step is not None:
            attempt = attempt.reached(loss.last_step)
        if not attempt.state.is_final and loss.is_cancelled:
            attempt = attempt.with_changes(state=RunState.CANCELLED, ended_at=now)
        elif not attempt.state.is_final:
            attempt = attempt.ended(RunState.FAILED, now, loss.make_failure(record))
        record = record.with_last(attempt)

    state, message = _decide_state(record, loss)
    # The result is not needed. The call raises an error if the transition is illegal.
    find_recovery_transitions(record.state, state)
    record = record.with_changes(state=state, message=message)
    if state.is_final:
        record = record.with_changes(ended_at=now)
    return _add_decision(record, loss)


def _add_decision(record: RunJson, loss: FlowLoss) -> RunJson:
    """Return the record with the decision whether the run is retried after its last attempt.

    Usually, the flow process adds this decision before it ends. An existing decision is kept.
    """
    attempt = record.attempt
    if attempt is None or attempt.decision is not None:
        return record
    if record.state is RunState.FAILED:
        decision = f"final: {_NO_RETRY_AFTER_LOSS}"
    elif record.state.is_final:
        decision = f"final: {record.state.value}"
    elif loss.elsewhere:
        decision = f"retried: {loss.elsewhere} continues the run"
    else:
        decision = "retried: a new flow process continues the run"
    return record.with_last(attempt.with_changes(decision=decision))


def _merge_unwritten_end(record: RunJson, end: RunJson, now: float) -> RunJson:
    """Return the record with the final state that the flow process could not write to the disk.

    Args:
        record: The record in `run.json`.
        end: Record with the final state. This record contains only the last attempt.
        now: Current time in UTC epoch seconds.
    """
    if (last := end.attempt) is not None:
        attempts = [attempt for attempt in record.attempts if attempt.number < last.number]
        recorded = record.attempt
        if recorded is not None and recorded.number == last.number:
            last = last.with_changes(components=_end_components(recorded, last.ended_at or now))
        record = record.with_changes(attempts=(*attempts, last))
    record = record.with_changes(state=end.state, message=end.message, ended_at=end.ended_at)
    return record.decided()


def _end_components(attempt: AttemptRecord, at: float) -> dict[str, ComponentRecord]:
    """Return the component records of an attempt, in which missing end times are set to `at`.

    Exit codes and signals stay unknown, because no process observed the end of the components.
    """
    return {
        name: component if component.ended_at is not None else component.with_changes(ended_at=at)
        for name, component in attempt.components.items()
    }


def _decide_state(record: RunJson, loss: FlowLoss) -> tuple[RunState, str]:
    """Return the new state of a run whose flow process was killed, and a message for the user.

    Args:
        record: Record of the run, in which the last attempt already has its final state.
        loss: State of the flow run on the Prefect server, and the results of the clean-up.
    """
    attempt = record.attempt
    if loss.elsewhere:
        return RunState.PENDING_RESOURCES, f"taken over by {loss.elsewhere}: {loss.cause}"
    if loss.is_waiting:
        return RunState.PENDING_RESOURCES, f"waiting for its next attempt: {loss.cause}"
    if attempt is not None and attempt.state is RunState.COMPLETED:
        return RunState.COMPLETED, f"completed; {loss.cause}"

    # A run that was cancelled between two attempts is CANCELLED, although its last attempt failed.
    # If a run was cancelled during an attempt, the run gets the state of the attempt.
    was_waiting = attempt is None or record.state in _WAITING
    is_attempt_cancelled = attempt is not None and attempt.state is RunState.CANCELLED
    if (loss.is_cancelled and was_waiting) or is_attempt_cancelled:
        return RunState.CANCELLED, f"cancelled; {loss.cause}"

    failure = attempt.failure if attempt is not None else None
    return RunState.FAILED, str(failure or loss.make_failure(record))


def _log_events(
    place: RunPlace, before: RunJson, after: RunJson, loss: FlowLoss, clock: Callable[[], float]
) -> None:
    """Write events about the clean-up and the new states to the event log of the last attempt.

    Args:
        place: Directory of the run.
        before: The record before the clean-up.
        after: The record after the clean-up.
        loss: Facts about the run, and the results of the clean-up.
        clock: Function that returns the current time in UTC epoch seconds.
    """
    if after.attempt is None:
        return
    events = EventLog(place.attempt(after.attempt.number).events, clock=clock)
    removed = [str(path) for path in loss.removed]
    events.emit("reconcile.ended", flow_pid=loss.pid, killed=loss.killed, removed=removed)
    for state in find_recovery_transitions(before.state, after.state):
        events.emit("run.state", state=state.value, message=after.message)
