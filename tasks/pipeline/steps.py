"""The rule that decides the next step of a pipeline from the runs that its stages have had.

The rule has no memory. Whoever asks for the next step, and however often, gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from tasks.record.states import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One run of a stage, as the Prefect server describes it."""

    stage: str
    #: Number of this try at the stage, from 1.
    number: int
    flow_run_id: str
    #: Name of the flow run. It is the run id once the run has begun.
    name: str
    #: Name of the flow run's state.
    state: str
    #: Message of the flow run's state.
    message: str
    #: How the run ended; FAILED also if its process was lost. None while it waits or runs.
    ending: RunState | None
    #: End of the run, with its time zone. None while it waits or runs.
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The step that creates a run of a stage."""

    stage: str
    #: Number of this try at the stage, from 1.
    number: int


def next_step(
    stages: Sequence[str], runs: Sequence[StageRun], asked_at: datetime
) -> Begin | StageRun | None:
    """Return the next step of a pipeline.

    A stage never has two runs at once: no run begins while another run of the stage waits or runs.
    A stage that failed is tried again if somebody has asked for the pipeline after the failure.
    Otherwise the failure ends the pipeline.

    Args:
        stages: Names of all stages, in order.
        runs: All runs that the stages have had, in any order.
        asked_at: Time at which somebody last asked for the pipeline; see `last_asked`.

    Returns:
        - `Begin`: Create a run.
        - A run that has not ended: Wait for it.
        - A run that has ended: It ended the pipeline.
        - None: All stages are complete.
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
        if last_try.ended_at is not None and last_try.ended_at < asked_at:
            return Begin(stage=stage, number=last_try.number + 1)
        return last_try
    return None


def completed_run(stage: str, runs: Iterable[StageRun]) -> StageRun | None:
    """Return the last completed run of a stage. Later stages get the checkpoint of this run."""
    completed = [run for run in runs if run.stage == stage and run.ending is RunState.COMPLETED]
    return max(completed, key=lambda run: run.number, default=None)


def last_asked(states: Sequence[tuple[datetime, bool]]) -> datetime:
    """Return the time at which somebody last asked for a flow run.

    Somebody asks for a flow run by creating it, and by retrying it after a final state. A flow run
    that lost its process and was started again by Muster had no final state in between.

    Args:
        states: For each state of the flow run, its time (with time zone) and whether it is final.
            At least one state.
    """
    ordered = sorted(states)
    final_indexes = [index for index, (_, is_final) in enumerate(ordered) if is_final]
    if not final_indexes:
        return ordered[0][0]
    next_index = min(final_indexes[-1] + 1, len(ordered) - 1)
    return ordered[next_index][0]
