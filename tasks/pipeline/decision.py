"""Decide which runs of a pipeline begin next, from the runs that its stages have had.

The decision depends only on the function arguments. So every process of the pipeline makes the same
decision for the same runs.

A stage has one run, or one run for each combination of parameters in its matrix. These are the
*units* of the stage. If a user starts a failed pipeline again, a unit can have several runs, which
are its *tries*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from tasks.record.states import RunState

#: Largest number of runs of a stage that wait for their GPUs at the same time. The pipeline creates
#: further runs when these runs have started. Otherwise the creation of hundreds of runs would keep
#: the Prefect server busy for minutes, while the first runs end and need the server.
WAITING_AT_MOST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One run of a pipeline's stage, as the Prefect server describes it."""

    #: Name of the stage. If the stage has a matrix, the name is `NAME.N`. N is the number of the
    #: combination of parameters.
    stage: str
    #: Number of the run among all runs with the same value of `stage`, from 1.
    number: int
    #: Prefect id of the run's flow run.
    flow_run_id: str
    #: Name of the flow run. After the run has begun, the name is the run id.
    name: str
    #: Name of the flow run's state, such as "Running".
    state: str
    #: Message of the flow run's state, or an empty string.
    message: str
    #: Final state of the run. FAILED if the process of the run was lost. None if the run has not
    #: ended.
    ending: RunState | None
    #: Time with time zone at which the run ended. None if the run has not ended.
    ended_at: datetime | None
    #: True if the run waits for its GPUs, or for a worker.
    is_waiting: bool = False
    #: True if a cancellation was requested, and the run has not ended.
    is_cancelling: bool = False
    #: Reason why the pipeline has stopped the run early, or an empty string.
    stop_reason: str = ""
    #: True if the run has completed, but evaluations of its checkpoints have not ended. The
    #: results of the evaluations decide which run of the stage is best.
    awaits_evaluations: bool = False

    @property
    def is_stopped_early(self) -> bool:
        """True if the pipeline has cancelled the run early, and the run has ended."""
        return bool(self.stop_reason) and self.ending is RunState.CANCELLED

    @property
    def stage_name(self) -> str:
        """Name of the stage, for example `sweep` for the run `sweep.3`."""
        return self.stage.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Request to create a new run of a stage."""

    #: Name of the stage. If the stage has a matrix, the name is `NAME.N`. N is the number of the
    #: combination of parameters.
    stage: str
    #: Number of the new run among all runs with the same value of `stage`, from 1.
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Properties of a stage that decide when Muster starts the runs of the stage."""

    name: str
    #: Names of the stages that must have ended before this stage begins.
    needs: tuple[str, ...]
    #: Names for the runs of the stage. Without a matrix, this is only the name of the stage. With a
    #: matrix, there is a name `NAME.N` for each combination of parameters.
    units: tuple[str, ...]
    #: Largest number of active runs of the stage, or None if there is no limit.
    at_most: int | None = None
    #: True if the pipeline continues after a failure of this stage.
    continues: bool = False


class StageState(Enum):
    """State of a stage of a pipeline."""

    #: A stage that this stage needs has not ended, or the pipeline stops before this stage.
    WAITING = "waiting"
    #: The stage has begun and has not ended. The stage is also active after the end of its runs,
    #: while the pipeline waits for evaluations of a run.
    ACTIVE = "active"
    #: All runs of the stage have completed or were stopped early. A stage with a matrix has one run
    #: for each combination of parameters.
    COMPLETED = "completed"
    #: All runs of the stage have ended, and one of them has failed or was cancelled.
    FAILED = "failed"
    #: The condition of the stage is false, or the stage uses a value that does not exist.
    SKIPPED = "skipped"


#: States in which a stage has ended.
ENDED = (StageState.COMPLETED, StageState.FAILED, StageState.SKIPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDecision:
    """Next actions of a pipeline, and the state of each of its stages."""

    #: Runs to create, in the order of the stages.
    begins: tuple[Begin, ...]
    #: Runs that have not ended, in the order of the stages.
    active: tuple[StageRun, ...]
    #: Completed runs whose evaluations have not ended, in the order of the stages. The pipeline
    #: waits for these evaluations.
    evaluated: tuple[StageRun, ...]
    #: Mapping from the name of each stage to its state.
    states: Mapping[str, StageState]
    #: Mapping from the name of a skipped stage to the reason.
    skipped: Mapping[str, str]
    #: Failed or cancelled run that ends the pipeline, so that no further run begins. None if no run
    #: ends the pipeline.
    ended_by: StageRun | None

    @property
    def is_over(self) -> bool:
        """True if the pipeline has ended: no run is active, and no further run is needed."""
        return not self.begins and not self.active and not self.evaluated


def decide(
    stages: Sequence[StagePlan],
    runs: Sequence[StageRun],
    requested_at: datetime,
    find_skip_reason: Callable[[str, Mapping[str, StageState]], str] = lambda _name, _states: "",
) -> PipelineDecision:
    """Return the next actions of a pipeline.

    A unit is a stage without a matrix, or one combination of parameters in a stage's matrix. A unit
    never has two active runs.

    - After a failed or cancelled run, the unit is run again only if a user has restarted the
      pipeline since then. Otherwise the pipeline creates no further runs, unless `continues` of
      the stage is True.
    - A run that the pipeline has stopped early is no failure, and its unit is never run again.

    Args:
        stages: All stages, in the order of the pipeline file.
        runs: All runs that the stages have had, in any order.
        requested_at: Time with time zone at which a user last started or retried the pipeline. See
            `find_last_request`.
        find_skip_reason: Function that returns the reason for skipping a stage, or an empty string.
            Its arguments are the name of the stage and the states of all earlier stages. The
            function is called for a stage without runs after all stages that it needs have ended.
    """
    tries_of_unit: dict[str, list[StageRun]] = {}
    for run in sorted(runs, key=lambda run: run.number):
        tries_of_unit.setdefault(run.stage, []).append(run)

    states: dict[str, StageState] = {}
    skipped: dict[str, str] = {}
    failures: list[StageRun] = []
    active: list[StageRun] = []
    evaluated: list[StageRun] = []
    begins: list[Begin] = []
    for plan in sort_by_needs(stages):
        tries = [tries_of_unit.get(unit, []) for unit in plan.units]
        may_begin = all(states[need] in ENDED for need in plan.needs)
        if not any(tries):
            reason = find_skip_reason(plan.name, states) if may_begin else ""
            if not may_begin or reason:
                states[plan.name] = StageState.SKIPPED if reason else StageState.WAITING
                skipped |= {plan.name: reason} if reason else {}
                continue

        stage_active = [*filter(None, map(_find_active, tries))]
        stage_evaluated = [run for unit in tries for run in unit if run.awaits_evaluations]
        stage_failures = [*filter(None, (_find_failure(unit, requested_at) for unit in tries))]
        missing = [
            Begin(stage=unit, number=_next_number(unit_tries))
            for unit, unit_tries in zip(plan.units, tries, strict=True)
            if _must_begin(unit_tries, requested_at)
        ]
        active += stage_active
        evaluated += stage_evaluated
        if stage_failures and not plan.continues:
            failures += stage_failures
        elif may_begin:
            free = WAITING_AT_MOST - sum(run.is_waiting for run in stage_active)
            if plan.at_most is not None:
                free = min(free, plan.at_most - len(stage_active))
            begins += missing[: max(0, free)]

        is_unfinished = missing and not (stage_failures and not plan.continues)
        if stage_active or stage_evaluated or is_unfinished:
            states[plan.name] = StageState.ACTIVE
        else:
            states[plan.name] = StageState.FAILED if stage_failures else StageState.COMPLETED

    first_failure = min(failures, key=_end_order, default=None)
    return PipelineDecision(
        begins=tuple(begins) if first_failure is None else (),
        active=tuple(active),
        evaluated=tuple(evaluated) if first_failure is None else (),
        states={plan.name: states[plan.name] for plan in stages},
        skipped=skipped,
        ended_by=first_failure,
    )


def sort_by_needs(stages: Sequence[StagePlan]) -> list[StagePlan]:
    """Return the stages, sorted so that each stage comes after the stages that it needs.

    Otherwise, the order of `stages` is kept.

    Raises:
        ValueError: Stages need each other in a cycle, or a stage needs an unknown stage.
    """
    ordered: list[StagePlan] = []
    waiting = [*stages]
    while waiting:
        names = {plan.name for plan in ordered}
        ready = next((plan for plan in waiting if names.issuperset(plan.needs)), None)
        if ready is None:
            raise ValueError(
                "the key `needs` of these stages contains a cycle or an unknown stage: "
                f"{[plan.name for plan in waiting]}"
            )
        ordered.append(ready)
        waiting.remove(ready)
    return ordered


def _end_order(run: StageRun) -> tuple[bool, float]:
    """Return the sort key of a run: runs that ended earlier come first."""
    return run.ended_at is None, run.ended_at.timestamp() if run.ended_at is not None else 0.0


def _next_number(tries: Sequence[StageRun]) -> int:
    """Return the number of the next run after the runs in `tries`. The first number is 1."""
    return tries[-1].number + 1 if tries else 1


def _find_active(tries: Sequence[StageRun]) -> StageRun | None:
    """Return the last run that has not ended, or None."""
    return next((run for run in reversed(tries) if run.ending is None), None)


def _find_failure(tries: Sequence[StageRun], requested_at: datetime) -> StageRun | None:
    """Return the failed or cancelled run that makes its stage fail, or None.

    Args:
        tries: All runs of the stage with the same parameters, oldest first.
        requested_at: Time at which a user last started or retried the pipeline.

    Returns:
        The last run, if it has failed or was cancelled. None in these cases:
        - There is no run yet.
        - A run is active, has completed or was stopped early.
        - A user has restarted the pipeline since the end of the last run.
    """
    if not tries or _needs_no_run(tries):
        return None
    last_try = tries[-1]
    is_outdated = last_try.ended_at is not None and last_try.ended_at < requested_at
    return None if is_outdated else last_try


def _must_begin(tries: Sequence[StageRun], requested_at: datetime) -> bool:
    """Return True if a new run must be created after the runs in `tries`.

    The result is True in two cases:

    - There is no run yet.
    - All runs have failed or were cancelled, and a user has started or retried the pipeline after
      the last run. A run that was stopped early does not count as cancelled.
    """
    return not _needs_no_run(tries) and _find_failure(tries, requested_at) is None


def _needs_no_run(tries: Sequence[StageRun]) -> bool:
    """Return True if one of the runs is active, has completed, or was stopped early."""
    return any(run.ending in (None, RunState.COMPLETED) or run.is_stopped_early for run in tries)


def list_last_runs(units: Sequence[str], runs: Iterable[StageRun]) -> dict[str, StageRun]:
    """Return a mapping from each name in `units` to the last run with this name.

    The result has the order of `units`. Names without runs are left out.

    Args:
        units: Names of stages. If a stage has a matrix, the names are `STAGE.N` for each
            combination of parameters.
        runs: All runs of the stages, in any order.
    """
    last_runs = {run.stage: run for run in sorted(runs, key=lambda run: run.number)}
    return {unit: last_runs[unit] for unit in units if unit in last_runs}


def completed_run(stage: str, runs: Iterable[StageRun]) -> StageRun | None:
    """Return the last completed run of a stage. Later stages use the results of this run.

    Args:
        stage: Name of the stage, or `STAGE.N` for one combination of parameters in its matrix.
        runs: All runs of the stages, in any order.

    Returns:
        The run, or None if no run has completed.
    """
    completed = [run for run in runs if run.stage == stage and run.ending is RunState.COMPLETED]
    return max(completed, key=lambda run: run.number, default=None)


def find_last_request(states: Sequence[tuple[datetime, bool]]) -> datetime:
    """Return the time at which a user last started or retried a flow run.

    If the flow run has had no final state, the result is the time of its first state. Otherwise,
    the result is the time of the first state after its last final state. If a process of the flow
    run is lost and another process continues, the flow run gets no final state in between, and the
    result stays the same.

    Args:
        states: A pair for each state that the flow run has had, in any order: the time of the state
            (with time zone), and True if the state is final. At least one pair is required.
    """
    ordered = sorted(states)
    final_indexes = [index for index, (_, is_final) in enumerate(ordered) if is_final]
    if not final_indexes:
        return ordered[0][0]
    next_index = min(final_indexes[-1] + 1, len(ordered) - 1)
    return ordered[next_index][0]
