"""List, create and cancel the runs of a pipeline's stages on the Prefect server.

The run of a stage is a flow run of the flow `train`. The flow run is created through a deployment,
so it is queued like any other run. It is also a subflow of the pipeline's flow run. As for every
subflow, a task run in the pipeline's flow run shows the states of the stage's run.

A user can start a pipeline again after a failure, so a stage can have several runs. They are
numbered from 1. The idempotency key and the task run of a stage's run depend only on the pipeline,
the stage and the number of the run. This helps if the flow process of a pipeline is killed just
after it has created a run: the next flow process finds the same run and creates no second run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed, Failed, Pending, Scheduled

from tasks.pipeline.decision import StageRun
from tasks.pipeline.stage_specs import CannotBegin, require_deployment
from tasks.record.states import RunState
from tasks.server import flow_runs
from tasks.server.flow_runs import read_flow_runs, read_refusal
from tasks.server.server import find_page_url
from tasks.spec.pipeline import STAGE_DEPLOYMENT, Stage
from tasks.spec.run import LIVE_CODE

#: Mapping from the type of a flow run's final Prefect state to the final state of Muster's run.
_ENDINGS = {
    StateType.COMPLETED: RunState.COMPLETED,
    StateType.CANCELLED: RunState.CANCELLED,
    StateType.FAILED: RunState.FAILED,
    StateType.CRASHED: RunState.FAILED,
}

#: Prefix of the Prefect tag for finding the cached result of a step. A hash of the step's inputs
#: follows the prefix, so runs with the same inputs have the same tag.
_CACHE_TAG = "cache:"
#: Prefix of the Prefect tag of a task run that reuses the result of an earlier flow run. The id of
#: that flow run follows the prefix.
_REUSED_TAG = "muster-cached:"
#: Prefect label of a stage's run that the pipeline stops early. The value is the reason.
STOP_REASON_LABEL = "muster.stopped_early"
#: State of a stage's run that was stopped early, as Muster shows it.
STOPPED_EARLY = "stopped early"
#: Number of task runs that are read with one request.
_PAGE = 200


def idempotency_key(pipeline: str, stage: str, number: int) -> str:
    """Return the Prefect idempotency key for one run of a pipeline's stage.

    For each key, the Prefect server creates only one flow run, even after a repeated request.

    Args:
        pipeline: Id of the pipeline's flow run.
        stage: Name of the stage.
        number: Number of the run among the runs of the stage, from 1.
    """
    return f"{pipeline}-{stage}-{number}"


def parse_key(pipeline: str, key: str) -> tuple[str, int] | None:
    """Return the name of the stage and the number of its run from an idempotency key.

    Args:
        pipeline: Id of the pipeline's flow run.
        key: The idempotency key of a flow run.

    Returns:
        The name and the number, or None if the key does not belong to the pipeline.
    """
    stage, _, number = key.removeprefix(f"{pipeline}-").rpartition("-")
    if not key.startswith(f"{pipeline}-") or not stage or not number.isdecimal():
        return None
    return stage, int(number)


def list_stage_runs(client: SyncPrefectClient, pipeline: UUID) -> list[StageRun]:
    """Return all runs that the stages of a pipeline have had so far, in any order.

    Args:
        client: Client of the Prefect server.
        pipeline: Id of the pipeline's flow run.
    """
    runs = []
    for flow_run in read_flow_runs(client, {"parent_flow_run_id": {"any_": [pipeline]}}):
        place = parse_key(str(pipeline), flow_run.idempotency_key or "")
        if place is not None:
            stage, number = place
            runs.append(describe_stage_run(stage, number, flow_run))
    return runs


def describe_stage_run(stage: str, number: int, flow_run: FlowRun) -> StageRun:
    """Return the `StageRun` that describes a flow run of a stage.

    A run that the pipeline has stopped early has the state `stopped early` instead of Cancelled.

    Args:
        stage: Name of the stage.
        number: Number of the run among the runs of the stage, from 1.
        flow_run: The flow run as the Prefect server returned it.
    """
    state = flow_run.state
    is_final = state is not None and state.is_final()
    run = StageRun(
        stage=stage,
        number=number,
        flow_run_id=str(flow_run.id),
        name=flow_run.name,
        state=(state.name if state else None) or "Pending",
        message=(state.message if state else None) or "",
        ending=_ENDINGS[state.type] if state is not None and is_final else None,
        ended_at=state.timestamp if state is not None and is_final else None,
        is_waiting=state is not None and state.is_scheduled(),
        is_cancelling=state is not None and state.is_cancelling(),
        stop_reason=str(flow_run.labels.get(STOP_REASON_LABEL) or ""),
    )
    if not run.is_stopped_early:
        return run
    return replace(run, state=STOPPED_EARLY, message=run.stop_reason)


def create_stage_run(
    client: SyncPrefectClient,
    pipeline: UUID,
    stage: Stage,
    unit: str,
    number: int,
    *,
    spec: Mapping[str, Any],
    tags: Iterable[str],
) -> StageRun:
    """Create the flow run for one run of a stage, or return an existing flow run.

    Args:
        client: Client of the Prefect server.
        pipeline: Id of the pipeline's flow run.
        stage: The stage of the pipeline's spec.
        unit: Name of the stage, or `NAME.N` for one combination of parameters in its matrix.
        number: Number of the run among the runs of the unit, from 1.
        spec: The run spec of the stage, in which all placeholders are replaced with their values.
        tags: Tags of the new flow run.

    Raises:
        CannotBegin: The stage's deployment does not exist or rejects the run.
    """
    flow_run = create_child_run(
        client,
        pipeline,
        unit,
        number,
        deployment_name=stage.deployment,
        spec=spec,
        tags=tags,
    )
    return describe_stage_run(unit, number, flow_run)


def create_child_run(
    client: SyncPrefectClient,
    parent: UUID,
    unit: str,
    number: int,
    *,
    deployment_name: str | None = None,
    spec: Mapping[str, Any],
    tags: Iterable[str],
) -> FlowRun:
    """Create a flow run as a subflow of another flow run, or return an existing subflow.

    Args:
        client: Client of the Prefect server.
        parent: Id of the parent's flow run.
        unit: Name of the task run that shows the subflow in the parent's flow run.
        number: Number of the subflow among the subflows with the same `unit`, from 1.
        deployment_name: Deployment that creates the flow run. None for Muster's own deployment.
        spec: The run spec, in which all placeholders for values of the parent are replaced with the
            values.
        tags: Tags of the new flow run.

    Raises:
        CannotBegin: The deployment does not exist or rejects the run.
    """
    has_own_deployment = deployment_name is None
    deployment_name = deployment_name or STAGE_DEPLOYMENT
    deployment = require_deployment(client, deployment_name)
    task_run = _create_task_run(client, parent, unit, number, Pending())

    # Start the run in the working directory of this process, so that the run finds its files there.
    # Omit the directory for a user's deployment, which sets its own working directory. Omit the
    # directory for a run with stored code, too, because the run uses the stored files instead.
    has_stored_code = spec.get("code") not in (None, LIVE_CODE)
    job_variables = None
    if has_own_deployment and not has_stored_code:
        job_variables = {"working_dir": str(Path.cwd())}
    try:
        return client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"spec": dict(spec)},
            state=Scheduled(),
            tags=tags,
            job_variables=job_variables,
            idempotency_key=idempotency_key(str(parent), unit, number),
            parent_task_run_id=task_run.id,
        )
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            raise
        message = (
            f"the Prefect server created no run of the deployment {deployment_name}: "
            f"{read_refusal(error.response)}"
        )
        client.set_task_run_state(task_run.id, Failed(message=message), force=True)
        raise CannotBegin(message) from error


def _create_task_run(
    client: SyncPrefectClient,
    pipeline: UUID,
    unit: str,
    number: int,
    state: State[Any],
    tags: Iterable[str] = (),
) -> TaskRun:
    """Create the task run that shows a run of a stage, or return an existing task run.

    Args:
        client: Client of the Prefect server.
        pipeline: Id of the pipeline's flow run.
        unit: Name of the stage, or `NAME.N` for one combination of parameters in its matrix.
        number: Number of the run among the runs of the unit, from 1. 0 for a skipped stage.
        state: First state of a new task run.
        tags: Tags of the task run.
    """
    task: Task[..., Any] = Task(fn=_placeholder_task, name=unit)
    task.task_key = f"stage-{unit}"
    return client.create_task_run(
        task,
        flow_run_id=pipeline,
        dynamic_key=str(number),
        name=unit if number <= 1 else f"{unit}, try {number}",
        extra_tags=tags,
        state=state,
    )


def show_skipped_stage(client: SyncPrefectClient, pipeline: UUID, stage: str, reason: str) -> None:
    """Show a skipped stage as a task run with the state `Skipped` in the pipeline's flow run.

    Args:
        client: Client of the Prefect server.
        pipeline: Id of the pipeline's flow run.
        stage: Name of the stage.
        reason: Reason for skipping the stage.
    """
    _create_task_run(client, pipeline, stage, 0, Completed(name="Skipped", message=reason))


def make_cache_tag(spec: Mapping[str, Any], *, with_code: bool) -> str:
    """Return a tag for the flow run of a step, made from a hash of the step's inputs.

    A step is a stage that runs a function or a command. Runs of steps with the same inputs have the
    same tag, so that a cached result can be found.

    Args:
        spec: The run spec of the step, in which the values of earlier stages are filled in.
        with_code: True if the files of the project are an input, too.
    """
    inputs = {key: spec.get(key) for key in ("components", "env", "cwd")}
    # Leave out the key `launcher` of each component. The key decides whether the step runs as a
    # process or as a Ray job, and does not change the result.
    inputs["components"] = {
        name: {key: value for key, value in component.items() if key != "launcher"}
        for name, component in spec["components"].items()
    }
    if with_code:
        inputs["code"] = spec.get("code")
    content = json.dumps(inputs, sort_keys=True)
    return f"{_CACHE_TAG}{hashlib.sha256(content.encode()).hexdigest()[:32]}"


def find_cached_runs(client: SyncPrefectClient, tag: str) -> Iterator[FlowRun]:
    """Yield the completed flow runs of steps that have a given cache tag, newest first."""
    which = {"tags": {"all_": [tag]}, "state": {"type": {"any_": [StateType.COMPLETED]}}}
    yield from read_flow_runs(client, which, ["train"], FlowRunSort.END_TIME_DESC)


def use_cached_run(
    client: SyncPrefectClient, pipeline: UUID, unit: str, number: int, flow_run: FlowRun
) -> StageRun:
    """Record that the result of an earlier run of a step is used instead of a new run.

    Args:
        client: Client of the Prefect server.
        pipeline: Id of the pipeline's flow run.
        unit: Name of the stage, or `NAME.N` for one combination of parameters in its matrix.
        number: Number that the new run would have among the runs of the unit, from 1.
        flow_run: The earlier, completed flow run.

    Returns:
        The earlier run with the state Cached.
    """
    state: State[Any] = Completed(
        name="Cached",
        message=f"not run again: the pipeline uses the result of the run {flow_run.name}",
    )
    tags = [f"{_REUSED_TAG}{flow_run.id}"]
    _create_task_run(client, pipeline, unit, number, state, tags)
    return replace(describe_stage_run(unit, number, flow_run), state="Cached")


def list_cached_runs(client: SyncPrefectClient, pipeline: UUID) -> list[StageRun]:
    """Return the earlier runs whose results a pipeline reuses for its steps.

    `use_cached_run` has recorded these runs on the Prefect server. Deleted runs are omitted.

    Args:
        client: Client of the Prefect server.
        pipeline: Id of the pipeline's flow run.
    """
    runs = []
    for task_run in _read_task_runs(client, pipeline):
        used = [tag for tag in task_run.tags if tag.startswith(_REUSED_TAG)]
        if not used:
            continue
        try:
            flow_run = client.read_flow_run(UUID(used[0].removeprefix(_REUSED_TAG)))
        except ObjectNotFound:
            # The flow run whose result was reused has been deleted, together with the result. So
            # leave this flow run out of the list. The pipeline then runs the stage again.
            continue
        unit = task_run.task_key.removeprefix("stage-")
        run = describe_stage_run(unit, int(task_run.dynamic_key), flow_run)
        runs.append(replace(run, state="Cached"))
    return runs


def _read_task_runs(client: SyncPrefectClient, pipeline: UUID) -> Iterator[TaskRun]:
    """Yield the task runs of a pipeline's flow run, which are read page by page."""
    flow_run_filter = FlowRunFilter.model_validate({"id": {"any_": [pipeline]}})
    for offset in count(step=_PAGE):
        page = client.read_task_runs(flow_run_filter=flow_run_filter, limit=_PAGE, offset=offset)
        yield from page
        if len(page) < _PAGE:
            return


def cancel_stage_run(
    client: SyncPrefectClient,
    run: StageRun,
    message: str = "the pipeline of the run was cancelled",
    *,
    is_now: bool = False,
) -> None:
    """Request the cancellation of a stage's run. A run that has ended stays unchanged.

    Args:
        client: Client of the Prefect server.
        run: The run.
        message: Message of the run's new state.
        is_now: True to cancel the run without its grace periods, like `muster cancel --now`.
    """
    flow_runs.cancel(client, UUID(run.flow_run_id), message, is_now=is_now)


def format_link(run: StageRun) -> str:
    """Return the URL of the run's page in the Prefect UI.

    Returns:
        The URL, or "flow run ID" if no address of the Prefect UI is configured.
    """
    url = find_page_url("flow-run", run.flow_run_id)
    return url or f"flow run {run.flow_run_id}"


def _placeholder_task() -> None:
    """Do nothing. This function is never called.

    Muster shows a stage's run as a task run in the pipeline's flow run. Prefect can create a task
    run only for a function.
    """
