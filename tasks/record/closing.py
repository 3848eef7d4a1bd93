"""Closing the record of a run whose flow process is gone, as that process would have done it.

`close_record` is for whoever has taken down what the run had left, and for nobody else: nothing of
the run may live, or be about to.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.record.events import EventLog
from tasks.record.outcome import Failure
from tasks.record.places import RunPlace
from tasks.record.run_json import write_json
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
        return f"the flow process (pid {self.pid}) of this run was killed or lost; {left}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What the record of a run says, now that it is closed."""

    state: RunState
    message: str
    #: It failed by the loss of its flow process, not by anything that was seen before.
    by_loss: bool
    #: Whether the record had to be changed.
    is_changed: bool


def close_record(
    directory: Path, loss: Loss, clock: Callable[[], float] = time.time
) -> Closed | None:
    """Give a lost run the state that is true of it, and note in its events what was done.

    A run that has its final state is left as it is, byte for byte, so a second call does nothing.

    Args:
        directory: The run's own.
        clock: UTC epoch seconds.

    Returns: None where there is no record that could be closed.

    Raises: OSError, when it can't be written; it is as it was then.
    """
    place = RunPlace(directory=directory)
    try:
        before = json.loads(place.record.read_text(encoding="utf-8"))
        after = closed(before, loss, clock())
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("%s is no record of a run, and is left as it is: %r", place.record, error)
        return None
    if after != before:
        write_json(place.record, after)
        _tell(place, before, after, loss, clock)
    failure = _failure(after)
    return Closed(
        state=RunState(after["state"]),
        message=after.get("message", ""),
        by_loss=failure.get("rule") == FLOW_LOST,
        is_changed=after != before,
    )


def closed(content: dict[str, Any], loss: Loss, now: float) -> dict[str, Any]:
    """The content of `run.json` once the run is closed; equal to what was given where it is.

    An attempt that had its verdict keeps it, and the run takes it over. Any other was cancelled
    where the server says so, and failed by the loss where not. A run that goes on waits for its
    next attempt.

    Args:
        now: UTC epoch seconds.

    Raises: IllegalTransition.
    """
    state = RunState(content["state"])
    if state.is_final or (loss.is_waiting is not False and state in _WAITING):
        return content
    content = copy.deepcopy(content)
    attempt = content["attempts"][-1] if content["attempts"] else None
    if attempt is not None:
        _close_attempt(attempt, loss, now)
    after, message = _fate(content, loss)
    for move in moves_of_recovery(state, after):
        content["state"] = move.value
    content["message"] = message
    if after.is_final:
        content["ended_at"] = now
    return content


def _close_attempt(attempt: dict[str, Any], loss: Loss, now: float) -> None:
    for component in attempt["components"].values():
        if component["ended_at"] is None:
            # Nobody saw its end, so the exit code and the signal stay unknown.
            component["ended_at"] = now
    if RunState(attempt["state"]).is_final:
        return
    attempt["ended_at"] = now
    if loss.is_cancelled:
        attempt["state"] = RunState.CANCELLED.value
    else:
        attempt["state"] = RunState.FAILED.value
        attempt["failure"] = _lost(loss).as_json()


def _lost(loss: Loss) -> Failure:
    return Failure(kind=FailureKind.UNKNOWN, message=loss.cause, rule=FLOW_LOST)


def _fate(content: dict[str, Any], loss: Loss) -> tuple[RunState, str]:
    attempt = content["attempts"][-1] if content["attempts"] else None
    cancelled = RunState.CANCELLED, f"cancelled; {loss.cause}"
    if loss.elsewhere:
        return RunState.PENDING_RESOURCES, f"given to {loss.elsewhere} since: {loss.cause}"
    if loss.is_waiting:
        return RunState.PENDING_RESOURCES, f"waits for its next attempt: {loss.cause}"
    if attempt is None:
        failed = RunState.FAILED, f"{FailureKind.UNKNOWN.value}: {loss.cause}"
        return cancelled if loss.is_cancelled else failed
    match RunState(attempt["state"]):
        case RunState.COMPLETED:
            return RunState.COMPLETED, f"completed; {loss.cause}"
        case RunState.CANCELLED:
            return cancelled
        case _ if loss.is_cancelled and RunState(content["state"]) in _WAITING:
            # It was to be tried again, and that was cancelled.
            return cancelled
        case _:
            failure = attempt["failure"] or _lost(loss).as_json()
            return RunState.FAILED, f"{failure['kind']}: {failure['message']}"


def _failure(content: dict[str, Any]) -> dict[str, Any]:
    """Why the run failed; empty where it did not."""
    if content["state"] != RunState.FAILED.value:
        return {}
    if not content["attempts"]:
        # There is no place for it in the file, so only the loss can have been the reason.
        return {"rule": FLOW_LOST}
    return content["attempts"][-1]["failure"] or {}


def _tell(
    place: RunPlace,
    before: dict[str, Any],
    after: dict[str, Any],
    loss: Loss,
    clock: Callable[[], float],
) -> None:
    """Add to the events of the last attempt."""
    if not after["attempts"]:
        return
    events = EventLog(place.attempt(after["attempts"][-1]["number"]).events, clock=clock)
    events.emit(
        "reconcile.ended", flow_pid=loss.pid, killed=loss.killed, removed=_texts(loss.removed)
    )
    for state in moves_of_recovery(RunState(before["state"]), RunState(after["state"])):
        events.emit("run.state", state=state.value, message=after["message"])


def _texts(paths: Sequence[Path]) -> list[str]:
    return [str(path) for path in paths]
