"""Retry a run that has ended: the command `muster retry`.

A retry is a new attempt of the same run. The run keeps its id, its directory, its checkpoints and
its record. A run that a worker started is queued again. A run that a person started with `muster
train` continues in the terminal of the person. If its flow run was on a temporary Prefect server,
the run gets a new flow run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL
from prefect.states import Scheduled

from tasks.processes.identity import host_name
from tasks.processes.registry import read_owner
from tasks.queue.grants import requeue_labels
from tasks.record.disk import write_json
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.server.flow_process import enter_project
from tasks.server.flow_runs import (
    clear_process,
    connect_to_server,
    find_flow_run,
    find_process_tags,
    make_process_tag,
)
from tasks.spec.errors import BadArgument, MusterError
from tasks.spec.loading import load_resolved, parse_spec, parse_yaml, read_text
from tasks.spec.run import RunSpec
from tasks.spec.secrets import MASK
from tasks.spec.start_from import StartFrom, find_start_faults
from tasks.train.command import run_in_terminal
from tasks.train.completed_run import has_steps_left
from tasks.train.deploying import connect_to_configured_server, follow_run
from tasks.train.local_runs import list_attempts
from tasks.train.run_checkpoints import choose_step
from tasks.train.run_records import describe_lost_process, find_record
from tasks.train.runs import ENDED_STATES, Run


def retry_run(
    train: Flow[..., State[Any]],
    run: Run,
    from_step: int | None,
    *,
    watch: bool = False,
    json: bool = False,
) -> int:
    """Start another attempt of a run that has ended.

    Args:
        train: The flow `train`.
        run: The run.
        from_step: Step of the checkpoint from which the attempt starts, or None for the newest
            complete checkpoint.
        watch: True to show a queued run until it has ended. A run in this process is always shown.
        json: True to print the ids of a queued run as JSON.

    Returns:
        The exit code of the command.

    Raises:
        BadArgument: The run cannot be retried. Nothing was changed.
        MusterError: The Prefect server did not accept the retry.
    """
    if run.state not in ENDED_STATES:
        if sentence := describe_lost_process(run):
            raise BadArgument(f"{run.run_id} is still recorded as {run.state}. {sentence}")
        raise BadArgument(
            f"{run.run_id} is {run.state}: only a run that has ended can be retried. To end it: "
            f"muster cancel {run.run_id}"
        )
    if PREFECT_API_URL.value() and run.flow_run_id:
        with connect_to_configured_server() as client:
            flow_run = find_flow_run(client, run.flow_run_id)
            if flow_run is not None and flow_run.deployment_id is not None:
                return _queue_again(client, flow_run, run, from_step, watch=watch, json=json)
    return _retry_here(train, run, from_step)


def _queue_again(
    client: SyncPrefectClient,
    flow_run: FlowRun,
    run: Run,
    from_step: int | None,
    *,
    watch: bool,
    json: bool,
) -> int:
    """Queue the flow run of a run again, so that a worker starts the next attempt.

    Args:
        client: Client of the Prefect server.
        flow_run: The flow run of the run.
        run: The run.
        from_step: Step of the checkpoint from which the attempt starts. None for the newest
            complete checkpoint.
        watch: True to show the run until its end.
        json: True to print the result as JSON.

    Returns:
        The exit code of the command.
    """
    spec = parse_spec(flow_run.parameters.get("spec"), from_form=True)
    record = find_record(run)
    start = _choose_attempt_start(run, spec, record, from_step)
    if start is not None:
        parameters = {**flow_run.parameters}
        parameters["spec"] = {
            **parameters["spec"],
            "start_from": start.model_dump(mode="json", exclude_unset=True),
        }
        client.update_flow_run(flow_run.id, parameters=parameters)
    last_attempt = max(list_attempts(run.place), default=0)
    clear_process(client, str(flow_run.id))
    client.update_flow_run_labels(flow_run.id, requeue_labels())
    state: State[Any] = Scheduled(message=f"retried by muster on {host_name()}")
    response = client.set_flow_run_state(flow_run.id, state)
    if response.status != SetStateStatus.ACCEPT:
        reason = getattr(response.details, "reason", None) or response.status.value
        raise MusterError(f"the Prefect server did not queue {run.run_id} again: {reason}")
    note = f" again, from step {start.step} ({start.checkpoint})" if start else " again"
    return follow_run(
        client,
        flow_run,
        spec,
        watch=watch,
        json=json,
        note=note,
        after_attempt=last_attempt,
    )


def _retry_here(train: Flow[..., State[Any]], run: Run, from_step: int | None) -> int:
    """Run the next attempt in this process. `muster train` must have started the run."""
    place = run.place
    if not place.record.exists():
        host = run.host or "another host"
        raise BadArgument(
            f"{run.run_id} was started on {host} without a queue, and can only be retried there, "
            f"because its files are on that host. Run this command on {host}"
        )
    record = RunJson.read(place.record)
    provenance = record.provenance or {}
    file = Path(str(provenance.get("spec_file") or ""))
    project = provenance.get("project")
    if not provenance.get("spec_file") and project:
        file = Path(str(project)) / "muster.yaml"
    if not place.spec.exists() or not file.is_absolute():
        raise BadArgument(
            f"{run.run_id} cannot be retried, because it was started by an earlier version of "
            "Muster, which did not record the spec file. To start a new run from the last "
            f"checkpoint: muster train SPEC --from {run.run_id}"
        )
    if not file.parent.is_dir():
        raise BadArgument(
            f"{run.run_id} cannot be retried, because the folder of its spec, "
            f"{file.parent}, no longer exists"
        )
    spec = _restore_secrets(place, file)
    start = _choose_attempt_start(run, spec, record, from_step)
    if start is not None:
        spec = spec.model_copy(update={"start_from": start})
    enter_project(file)
    return run_in_terminal(spec, lambda: _run_again(train, run, spec))


def _choose_attempt_start(
    run: Run, spec: RunSpec, record: RunJson | None, from_step: int | None
) -> StartFrom | None:
    """Return the checkpoint that a person has chosen for the next attempt of a run.

    Args:
        run: The run.
        spec: The run spec, in which placeholders are not replaced yet.
        record: The record of the run, or None if the run has none.
        from_step: Step of the checkpoint, or None for the newest complete checkpoint.

    Returns:
        The checkpoint, or None if the attempt starts from the newest complete checkpoint.

    Raises:
        BadArgument: The run has finished, has no such checkpoint, or does not pass checkpoints to
            its trainer.
    """
    if from_step is None:
        _refuse_finished_run(run, spec, record)
        return None
    if [*find_start_faults({**spec.written(), "start_from": {"run": run.run_id}})]:
        raise BadArgument(
            f"--from-step {from_step} would have no effect, because the spec of {run.run_id} does "
            "not use ${attempt.resume_from}. The trainer itself decides from which checkpoint it "
            "starts"
        )
    start = choose_step(run, from_step)
    attempts = record.attempts if record is not None else ()
    return start.model_copy(update={"attempt": len(attempts) + 1})


def _refuse_finished_run(run: Run, spec: RunSpec, record: RunJson | None) -> None:
    """Raise an error if a completed run has no training steps left.

    Raises:
        BadArgument: The run is completed. No training steps are left, or the number of
            remaining steps is unknown.
    """
    if run.state != "completed":
        return
    # Allow a retry only if training steps are left.
    if has_steps_left(spec, record):
        return
    run_id = run.run_id
    raise BadArgument(
        f"{run_id} is completed, so a retry would train nothing. To train again from step N: "
        f"muster retry {run_id} --from-step N (`muster checkpoints {run_id}` lists the steps). To "
        f"continue with another spec: muster submit SPEC --from {run_id}"
    )


def _restore_secrets(place: RunPlace, file: Path) -> RunSpec:
    """Return the spec of a run, in which masked values are replaced by the values in the spec file.

    Args:
        place: Directory of the run.
        file: The spec file from which the run was started.

    Raises:
        BadArgument: A masked value is no longer in the spec file.
        InvalidSpec: The spec of the run or the spec file is not valid.
    """
    stored = parse_yaml(read_text(place.spec), str(place.spec))
    if MASK not in read_text(place.spec):
        return load_resolved(place.spec)
    present = parse_yaml(read_text(file), str(file)) if file.exists() else {}

    def restore(value: object, present_value: object, path: str) -> object:
        if isinstance(value, dict):
            values = present_value if isinstance(present_value, Mapping) else {}
            return {
                key: restore(item, values.get(key), f"{path}.{key}") for key, item in value.items()
            }
        if isinstance(value, list):
            items = present_value if isinstance(present_value, list) else []
            items = [*items, *[None] * len(value)]
            return [
                restore(item, items[index], f"{path}.{index}") for index, item in enumerate(value)
            ]
        if not isinstance(value, str) or MASK not in value:
            return value
        if present_value is None:
            raise BadArgument(
                f"{place.run_id} cannot be retried, because Muster does not store the secret value "
                f"of {path.lstrip('.')}, and {file} no longer contains the key {path.lstrip('.')}"
            )
        return present_value

    return parse_spec(restore(stored, present, ""), source=str(place.spec))


def _run_again(train: Flow[..., State[Any]], run: Run, spec: RunSpec) -> State[Any]:
    """Run the flow of a run again in this process, and return its final state.

    If the flow run was deleted on the Prefect server, a new flow run is created. The id of the new
    flow run is written into the record of the run.

    Raises:
        BadArgument: Another process has started the run in the meantime.
    """
    with connect_to_server(PREFECT_API_URL.value() or "") as client:
        flow_run = find_flow_run(client, run.flow_run_id) if run.flow_run_id else None
        if flow_run is not None:
            tags = {*flow_run.tags} - find_process_tags(flow_run.tags) | {make_process_tag()}
            clear_process(client, str(flow_run.id))
            client.update_flow_run(
                flow_run.id, parameters={"spec": spec.to_server_data()}, tags=sorted(tags)
            )
            flow_run = client.read_flow_run(flow_run.id)
        else:
            spec = spec.model_copy(update={"run_id": run.run_id})
            flow_run = client.create_flow_run(
                train,
                parameters={"spec": spec.to_server_data()},
                name=run.run_id,
                tags=[*spec.tags, make_process_tag()],
            )
            _replace_flow_run_id(run.place, flow_run.id)
    state = run_flow(train, flow_run=flow_run, parameters={"spec": spec}, return_type="state")
    return cast(State[Any], state)


def _replace_flow_run_id(place: RunPlace, flow_run_id: UUID) -> None:
    """Write the id of a run's new flow run into the record of the run.

    Raises:
        BadArgument: Another process has started the run in the meantime.
    """
    owner = read_owner(place.run_id)
    if owner is not None and owner.process.is_alive():
        raise BadArgument(f"{place.run_id} was started again by process {owner.process.pid}")
    record = RunJson.read(place.record)
    content = record.with_changes(flow_run_id=str(flow_run_id)).as_json()
    write_json(place.record, content, durable=True)
