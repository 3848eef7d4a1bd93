"""The runs of a pipeline's stages on their Prefect server, which is the only one to keep them.

Each is a flow run of the flow `train`, created through a deployment and so queued as any other, and
a subflow of the pipeline's flow run: its task run there has the states of the run. Key and task run
are made of pipeline, stage and number alone, so that what was created and not noted is found again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Failed, Pending, Scheduled

from tasks.pipeline.steps import Ending, StageRun, idempotency_key, parsed_key
from tasks.spec.errors import MusterError
from tasks.spec.pipeline import STAGE_DEPLOYMENT, Stage

_PAGE = 200


class CannotBegin(MusterError):
    """A stage can't be begun, however often it is tried: mend the pipeline, or the server."""


def stage_runs(client: SyncPrefectClient, pipeline: UUID) -> list[StageRun]:
    """All runs that the stages of a pipeline have had.

    Args:
        pipeline: The id of its flow run.
    """
    children = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[pipeline]))
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(flow_run_filter=children, limit=_PAGE, offset=len(found))
        found += page
        if len(page) < _PAGE:
            break
    known = [(parsed_key(str(pipeline), run.idempotency_key or ""), run) for run in found]
    return [_stage_run(*place, run) for place, run in known if place is not None]


def spec_of_deployment(client: SyncPrefectClient, name: str) -> Mapping[str, Any]:
    """The run spec that a deployment has as its parameter.

    Raises: CannotBegin.
    """
    found = _deployment(client, name).parameters.get("spec")
    if not isinstance(found, Mapping):
        raise CannotBegin(f"the deployment {name} has no spec: write spec: FILE.yaml beside it")
    return found


def spec_of_run(client: SyncPrefectClient, run: StageRun) -> object:
    """The run spec with which a run was started."""
    return client.read_flow_run(UUID(run.flow_run_id)).parameters.get("spec")


def create_stage_run(
    client: SyncPrefectClient,
    pipeline: UUID,
    stage: Stage,
    number: int,
    *,
    spec: Mapping[str, Any],
    tags: Iterable[str],
) -> StageRun:
    """The run of a try at a stage: a new one, or the one that was created before.

    Args:
        pipeline: The id of the pipeline's flow run.
        number: Which try at the stage.
        spec: What it is started with.

    Raises: CannotBegin.
    """
    name = stage.deployment or STAGE_DEPLOYMENT
    deployment = _deployment(client, name)
    task: Task[..., Any] = Task(fn=_nothing, name=stage.name)
    task.task_key = f"stage-{stage.name}"
    task_run = client.create_task_run(
        task,
        flow_run_id=pipeline,
        dynamic_key=str(number),
        name=stage.name if number == 1 else f"{stage.name}, try {number}",
        state=Pending(),
    )
    try:
        run = client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"spec": dict(spec)},
            state=Scheduled(),
            tags=tags,
            idempotency_key=idempotency_key(str(pipeline), stage.name, number),
            parent_task_run_id=task_run.id,
        )
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            raise
        message = f"{name} refuses it: {_reason(error.response)}"
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
        ending=_ending(state),
        ended_at=state.timestamp if state is not None and state.is_final() else None,
    )


def _ending(state: State[Any] | None) -> Ending | None:
    if state is None or not state.is_final():
        return None
    if state.is_completed():
        return Ending.COMPLETED
    return Ending.CANCELLED if state.is_cancelled() else Ending.FAILED


def _deployment(client: SyncPrefectClient, name: str) -> Any:
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        raise CannotBegin(
            f"the Prefect server has no deployment {name}: apply those of the project by `make up` "
            "or `prefect --no-prompt deploy --all`, or name another one"
        ) from None


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def _nothing() -> None:
    """What stands for a stage's run in its pipeline's flow run is never called."""
