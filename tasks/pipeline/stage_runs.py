"""The runs of a pipeline's stages on their Prefect server, which is the only one to keep them.

Each is a flow run of the flow `train`, created through a deployment and so queued as any other, and
a subflow of the pipeline's flow run: its task run there has the states of the run. Key and task run
are made of pipeline, stage and number alone, so that what was created and not noted is found again.

What a pipeline does next, decided from what its Prefect server knows and nothing else: whoever
asks, and however often, gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Failed, Pending, Scheduled

from tasks.record.states import RunState
from tasks.server.flow_runs import flow_runs_of, refusal_of
from tasks.spec.errors import MusterError
from tasks.spec.pipeline import STAGE_DEPLOYMENT, Stage
from tasks.spec.run import LIVE


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
    #: Its final state, FAILED also where its process was lost; None while it waits or runs.
    ending: RunState | None
    #: Aware; None while it has not ended.
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Create a run of the stage."""

    stage: str
    #: Which try at the stage.
    number: int


def next_step(
    stages: Sequence[str], runs: Sequence[StageRun], asked_at: datetime
) -> Begin | StageRun | None:
    """The next step of a pipeline: a run that is to begin, or one that is on its way, to be waited
    for; or else its end: the run that ended it, or None where all stages have completed.

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
            return under_way[-1]
        if any(run.ending is RunState.COMPLETED for run in tries):
            continue
        last = tries[-1]
        if last.ended_at is not None and last.ended_at < asked_at:
            return Begin(stage=stage, number=last.number + 1)
        return last
    return None


def completed_run(stage: str, runs: Iterable[StageRun]) -> StageRun | None:
    """The run whose checkpoint a stage hands on: the last one that completed."""
    tries = [run for run in runs if run.stage == stage and run.ending is RunState.COMPLETED]
    return max(tries, key=lambda run: run.number, default=None)


def last_asked(states: Sequence[tuple[datetime, bool]]) -> datetime:
    """When somebody last asked for a flow run: at its creation, or as it left a final state, which
    one whose process is lost and started again by itself has not.

    Args:
        states: When each state of the flow run began, aware, and whether it is a final one; at
            least one.
    """
    ordered = sorted(states)
    ends = [index for index, (_at, is_final) in enumerate(ordered) if is_final]
    first = min(ends[-1] + 1, len(ordered) - 1) if ends else 0
    return ordered[first][0]


def idempotency_key(pipeline: str, stage: str, number: int) -> str:
    """Of the flow run of a try at a stage: however often it is created, there is one."""
    return f"{pipeline}-{stage}-{number}"


def parsed_key(pipeline: str, key: str) -> tuple[str, int] | None:
    """Stage and number of a flow run's key; None for one of something else."""
    stage, _, number = key.removeprefix(f"{pipeline}-").rpartition("-")
    if not key.startswith(f"{pipeline}-") or not stage or not number.isdecimal():
        return None
    return stage, int(number)


class CannotBegin(MusterError):
    """A stage can't be begun, however often it is tried: mend the pipeline, or the server."""


def runs_of(client: SyncPrefectClient, pipeline: UUID) -> list[StageRun]:
    """All runs that the stages of a pipeline have had, by the id of its flow run."""
    children = {"parent_flow_run_id": {"any_": [pipeline]}}
    return [
        _stage_run(*place, run)
        for run in flow_runs_of(client, children)
        if (place := parsed_key(str(pipeline), run.idempotency_key or "")) is not None
    ]


def spec_of_deployment(client: SyncPrefectClient, name: str) -> Mapping[str, Any]:
    """The run spec that a deployment has as its parameter. Raises: CannotBegin."""
    found = deployment_named(client, name).parameters.get("spec")
    if not isinstance(found, Mapping):
        raise CannotBegin(f"the deployment {name} has no spec: write spec: FILE.yaml beside it")
    return found


def create_stage_run(
    client: SyncPrefectClient,
    pipeline: UUID,
    stage: Stage,
    number: int,
    *,
    spec: Mapping[str, Any],
    tags: Iterable[str],
) -> StageRun:
    """The run of a try at a stage, started with the spec: a new one, or the one that was created
    before.

    Raises: CannotBegin.
    """
    name = stage.deployment or STAGE_DEPLOYMENT
    deployment = deployment_named(client, name)
    task: Task[..., Any] = Task(fn=_nothing, name=stage.name)
    task.task_key = f"stage-{stage.name}"
    task_run = client.create_task_run(
        task,
        flow_run_id=pipeline,
        dynamic_key=str(number),
        name=stage.name if number == 1 else f"{stage.name}, try {number}",
        state=Pending(),
    )
    is_kept = spec.get("code") not in (None, LIVE)
    try:
        run = client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"spec": dict(spec)},
            state=Scheduled(),
            tags=tags,
            # What a deployment of its own says stays as it is, and a code is taken to any folder.
            job_variables=None if stage.deployment or is_kept else {"working_dir": str(Path.cwd())},
            idempotency_key=idempotency_key(str(pipeline), stage.name, number),
            parent_task_run_id=task_run.id,
        )
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            raise
        message = f"{name} refuses it: {refusal_of(error.response)}"
        client.set_task_run_state(task_run.id, Failed(message=message), force=True)
        raise CannotBegin(message) from error
    return _stage_run(stage.name, number, run)


def cancel_stage_run(client: SyncPrefectClient, run: StageRun) -> None:
    """Ask for its cancel, as the button of the UI does; one that has ended stays as it is."""
    client.set_flow_run_state(
        UUID(run.flow_run_id), Cancelling(message="its pipeline is cancelled")
    )


def read_stage_run(client: SyncPrefectClient, run: StageRun) -> StageRun:
    """The run as it is now."""
    return _stage_run(run.stage, run.number, client.read_flow_run(UUID(run.flow_run_id)))


def _stage_run(stage: str, number: int, run: FlowRun) -> StageRun:
    state = run.state
    return StageRun(
        stage=stage,
        number=number,
        flow_run_id=str(run.id),
        name=run.name,
        state=(state.name if state else None) or "Pending",
        message=(state.message if state else None) or "",
        ending=_ENDINGS[state.type] if state is not None and state.is_final() else None,
        ended_at=state.timestamp if state is not None and state.is_final() else None,
    )


_ENDINGS = {
    StateType.COMPLETED: RunState.COMPLETED,
    StateType.CANCELLED: RunState.CANCELLED,
    StateType.FAILED: RunState.FAILED,
    StateType.CRASHED: RunState.FAILED,
}


def deployment_named(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    """Raises: CannotBegin."""
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        raise CannotBegin(
            f"the Prefect server has no deployment {name}: Muster's own are made by `muster up` or "
            "`python -m deployments.stack.setup`, one of a spec of yours by `muster deploy SPEC`"
        ) from None


def _nothing() -> None:
    """Never called: it stands for a stage's run in its pipeline's flow run."""
