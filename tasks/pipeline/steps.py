"""What a pipeline does next, decided from what its Prefect server knows and nothing else: whoever
asks, and however often, gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum


class Ending(Enum):
    """How a run, or a pipeline, came to its end."""

    COMPLETED = "completed"
    #: Also where its process was lost.
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One run of a stage, as the server has it."""

    stage: str
    #: From 1: which try at the stage it is.
    number: int
    flow_run_id: str
    #: The run id, once it has begun.
    name: str
    #: The name of its state, and what it says.
    state: str
    message: str
    #: None while it waits or runs.
    ending: Ending | None
    #: Aware; None while it has not ended.
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Create a run of the stage."""

    stage: str
    #: Which try at the stage.
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Wait for the end of a run that is on its way."""

    run: StageRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclude:
    """Nothing is left to be done."""

    ending: Ending
    #: Of the stage that ended the pipeline; None where all have completed.
    run: StageRun | None = None


Step = Begin | Follow | Conclude


def next_step(stages: Sequence[str], runs: Sequence[StageRun], asked_at: datetime) -> Step:
    """The next step of a pipeline.

    Never two runs of a stage at once: there is no other one while any of them waits or runs. A
    stage that failed is tried anew where somebody has asked for the pipeline again since; a failure
    since then is that of the pipeline.

    Args:
        stages: All, in order.
        runs: All that they have had.
        asked_at: When somebody last asked for the pipeline; see `last_asked`.
    """
    for stage in stages:
        tries = sorted((run for run in runs if run.stage == stage), key=lambda run: run.number)
        if not tries:
            return Begin(stage=stage, number=1)
        if under_way := [run for run in tries if run.ending is None]:
            return Follow(run=under_way[-1])
        if any(run.ending is Ending.COMPLETED for run in tries):
            continue
        last = tries[-1]
        if last.ended_at is not None and last.ended_at < asked_at:
            return Begin(stage=stage, number=last.number + 1)
        return Conclude(ending=last.ending or Ending.FAILED, run=last)
    return Conclude(ending=Ending.COMPLETED)


def completed_run(stage: str, runs: Iterable[StageRun]) -> StageRun | None:
    """The run whose checkpoint a stage hands on: the last one that completed."""
    tries = [run for run in runs if run.stage == stage and run.ending is Ending.COMPLETED]
    return max(tries, key=lambda run: run.number, default=None)


def last_asked(states: Sequence[tuple[datetime, bool]]) -> datetime:
    """When somebody last asked for a flow run: at its creation, or as it left a final state.

    A process that is lost and started again by itself leaves none.

    Args:
        states: When each state of the flow run began, aware, and whether it is a final one; at
            least one.
    """
    ordered = sorted(states)
    ends = [index for index, (_at, is_final) in enumerate(ordered) if is_final]
    first = min(ends[-1] + 1, len(ordered) - 1) if ends else 0
    return ordered[first][0]


def idempotency_key(pipeline: str, stage: str, number: int) -> str:
    """Of the flow run of a try at a stage: however often it is created, there is one.

    Args:
        pipeline: The id of the pipeline's flow run.
    """
    return f"{pipeline}-{stage}-{number}"


def parsed_key(pipeline: str, key: str) -> tuple[str, int] | None:
    """Stage and number of a flow run's key; None for one of something else."""
    stage, _, number = key.removeprefix(f"{pipeline}-").rpartition("-")
    if not key.startswith(f"{pipeline}-") or not stage or not number.isdecimal():
        return None
    return stage, int(number)
