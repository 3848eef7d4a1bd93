"""Decide the next step of a pipeline from the runs that its stages have had.

The decision depends only on the function arguments. So every process of the pipeline decides on the
same next step for the same runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from tasks.record.states import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One run of a pipeline's stage, as the Prefect server describes it."""

    #: Name of the stage.
    stage: str
    #: Number of the run among the runs of the stage, from 1.
    number: int
    #: Prefect id of the run's flow run.
    flow_run_id: str
    #: Name of the flow run. After the run has begun, the name is the run id.
    name: str
    #: Name of the flow run's state, such as "Running".
    state: str
    #: Message of the flow run's state, or an empty string.
    message: str
    #: Final state of the run. A run whose process was lost is FAILED. None if the run has not
    #: ended.
    ending: RunState | None
    #: Time with time zone at which the run ended. None if the run has not ended.
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Step of a pipeline that creates a new run of a stage."""

    #: Name of the stage.
    stage: str
    #: Number of the new run among the runs of the stage, from 1.
    number: int


def next_step(
    stages: Sequence[str], runs: Sequence[StageRun], requested_at: datetime
) -> Begin | StageRun | None:
    """Return the next step of a pipeline.

    A stage never has two runs at once. If the last run of a stage failed or was cancelled, there
    are two cases. If a user has started the pipeline again after the end of that run, the stage is
    run again. Otherwise, that run ends the pipeline.

    Args:
        stages: Names of all stages, in order.
        runs: All runs that the stages have had, in any order.
        requested_at: Time with time zone at which a user last started or retried the pipeline. See
            `find_last_request`.

    Returns:
        - A `Begin` if a new run must be created.
        - A run that has not ended if the pipeline must wait for this run.
        - A run that has ended if this run ended the pipeline.
        - None if all stages are complete.
    """
    for stage in stages:
        tries = sorted((run for run in runs if run.stage == stage), key=lambda run: run.number)
        if not tries:
            return Begin(stage=stage, number=1)
        if active_tries := [run for run in tries if run.ending is None]:
            return active_tries[-1]
        if any(run.ending is RunState.COMPLETED for run in tries):
            continue
        last_try = tries[-1]
        if last_try.ended_at is not None and last_try.ended_at < requested_at:
            return Begin(stage=stage, number=last_try.number + 1)
        return last_try
    return None


def completed_run(stage: str, runs: Iterable[StageRun]) -> StageRun | None:
    """Return the last completed run of a stage. Later stages use the checkpoint of this run.

    Returns:
        The run, or None if no run of the stage has completed.
    """
    completed = [run for run in runs if run.stage == stage and run.ending is RunState.COMPLETED]
    return max(completed, key=lambda run: run.number, default=None)


def find_last_request(states: Sequence[tuple[datetime, bool]]) -> datetime:
    """Return the time at which a user last started or retried a flow run.

    The result is the time of the first state after the last final state. If the flow run never had
    a final state, the result is the time of its first state. If a process was lost and Muster
    starts a new process, the result does not change, because Muster then sets no final state.

    Args:
        states: One pair for each state that the flow run has had, in any order. A pair is the time
            of the state (with time zone), and True if the state is final. At least one pair is
            required.
    """
    ordered = sorted(states)
    final_indexes = [index for index, (_, is_final) in enumerate(ordered) if is_final]
    if not final_indexes:
        return ordered[0][0]
    next_index = min(final_indexes[-1] + 1, len(ordered) - 1)
    return ordered[next_index][0]
