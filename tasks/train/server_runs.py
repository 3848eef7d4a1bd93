"""Read the flow runs of the Prefect server as runs, with their submitted specs and artifacts.

The other modules import this module only if a server may be configured, because the import of
Prefect takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any
from uuid import UUID

from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort

from tasks.queue.ledger import parse_request
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server.artifacts import find_artifacts
from tasks.server.flow_runs import (
    TYPED_NAME_LABEL,
    ServerAway,
    connect_to_server,
    find_flow_run,
    find_host,
    read_flow_runs,
)
from tasks.server.server import hide_prefect_logs
from tasks.show.page import SUMMARY
from tasks.spec.loading import parse_spec
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.run import RunSpec
from tasks.train.runs import Run
from tasks.train.server_url import read_server_url

#: Mapping from Prefect states to states of runs. Keys in capitals are types of Prefect states. The
#: other keys are names of Prefect states, which are looked up first.
_RUN_STATES = {
    "PendingResources": "pending_resources",
    "AwaitingRetry": "pending_resources",
    "SCHEDULED": "queued",
    "PENDING": "admitted",
    "CANCELLING": "stopping",
}


def make_run(flow_run: FlowRun, record: RunJson | None) -> Run:
    """Return the `Run` for a flow run of the Prefect server.

    Args:
        flow_run: The flow run.
        record: Content of the `run.json` on this machine, or None if there is no such file.
    """
    if record is not None and _is_outdated(record, flow_run):
        record = None
    state = flow_run.state
    ended = flow_run.end_time if state is not None and state.is_final() else None
    message = (state.message if state else None) or ""
    if record is not None and record.message:
        # Prefect's worker replaces the message of a cancelled run by `Flow run was cancelled
        # successfully.` If the flow process was killed, the worker sets Crashed with a message that
        # only announces the cleanup. So use the message in the record.
        is_crashed = state is not None and state.is_crashed() and record.state.is_final
        if is_crashed or record.state is RunState.CANCELLED:
            message = record.message
    return Run(
        run_id=parse_request(flow_run).name,
        flow_run_id=str(flow_run.id),
        state=_name_state(state, record),
        message=message,
        tags=tuple(sorted(tag for tag in flow_run.tags if not tag.startswith("process:"))),
        created_at=flow_run.created.timestamp() if flow_run.created else None,
        started_at=flow_run.start_time.timestamp() if flow_run.start_time else None,
        ended_at=ended.timestamp() if ended else None,
        attempts=len(record.attempts) if record else None,
        host=find_host(flow_run) or "",
    )


def _is_outdated(record: RunJson, flow_run: FlowRun) -> bool:
    """Return True if another host has resumed the run since this machine wrote `run.json`."""
    hosts = {attempt.host for attempt in record.attempts[-1:]}
    hosts.add(find_host(flow_run))
    return len(hosts - {None}) > 1


def _name_state(state: State[Any] | None, record: RunJson | None) -> str:
    """Return the run state, such as `starting`, for the Prefect state of a flow run.

    Args:
        state: The Prefect state. None means queued.
        record: Content of the run's `run.json`, or None if unknown.
    """
    if state is None:
        return "queued"
    if state.is_running() and record is not None:
        # Prefect's state Running can mean starting, running or stopping. Only the record
        # distinguishes these states.
        return record.state.value
    type_name = state.type.value
    return _RUN_STATES.get(state.name or "") or _RUN_STATES.get(type_name, type_name.lower())


def read_server_runs(
    at_most: int, records: Mapping[str, RunJson]
) -> list[tuple[Run, Mapping[str, Any]]]:
    """Return pairs of a run and its run spec for the newest runs of the server.

    If the server does not answer, a warning is printed on stderr.

    Args:
        at_most: Largest number of runs to return.
        records: Mapping from run ids to the content of the `run.json` files on this machine.
    """
    runs: list[tuple[Run, Mapping[str, Any]]] = []
    try:
        for flow_run in _read_flow_runs(at_most):
            run = make_run(flow_run, records.get(parse_request(flow_run).name))
            runs.append((run, mapping_or_empty(flow_run.parameters.get("spec"))))
    except ServerAway as error:
        print(f"{error}\nOnly runs with a record on this machine are shown.", file=sys.stderr)
    return runs


def read_typed_names(at_most: int) -> dict[str, str]:
    """Return a mapping from flow run ids to the names that people gave to the flow runs.

    For example, a person can type a name in the form *Custom run* of the Prefect UI. Muster's
    scheduler renames the flow run to its run id, and keeps the typed name in a label.

    Args:
        at_most: Largest number of flow runs, newest first, whose names are read.
    """
    with suppress(ServerAway):
        return {
            str(flow_run.id): str(flow_run.labels.get(TYPED_NAME_LABEL) or flow_run.name)
            for flow_run in _read_flow_runs(at_most)
        }
    return {}


def read_submitted_spec(run: Run) -> RunSpec | None:
    """Return the submitted spec of a run, in which placeholders are not replaced.

    Returns:
        None if no server is configured, or if the server does not answer or does not have the run.

    Raises:
        InvalidSpec: The spec has faults.
    """
    api_url = read_server_url()
    if not api_url or not run.flow_run_id:
        return None
    with suppress(ServerAway), connect_to_server(api_url) as client:
        flow_run = find_flow_run(client, run.flow_run_id)
        if flow_run is not None and "spec" in flow_run.parameters:
            return parse_spec(flow_run.parameters["spec"], from_form=True)
    return None


def read_artifacts_of_run(run: Run, *keys: str) -> list[str]:
    """Return the content of a run's artifacts, see `tasks.train.run_records.read_artifacts`."""
    api_url = read_server_url()
    if not api_url or not run.flow_run_id:
        return []
    with suppress(ServerAway), connect_to_server(api_url) as client:
        artifacts = find_artifacts(client, UUID(run.flow_run_id), keys)
        # The artifacts are sorted newest first. If a key occurs twice, use the newest artifact.
        content = {artifact.key: str(artifact.data) for artifact in reversed(artifacts)}
        return [content[key] for key in keys if key in content]
    return []


def read_summaries(runs: Sequence[Run]) -> dict[str, str]:
    """Return a mapping from run ids to the descriptions of the runs' artifacts `summary`."""
    api_url = read_server_url()
    if not api_url:
        return {}
    run_ids = {run.flow_run_id: run.run_id for run in runs}
    criteria = {"key": {"any_": [SUMMARY]}, "flow_run_id": {"any_": list(run_ids)}}
    with suppress(ServerAway), connect_to_server(api_url) as client:
        artifact_filter = ArtifactFilter.model_validate(criteria)
        artifacts = client.read_artifacts(artifact_filter=artifact_filter)
        return {run_ids[str(one.flow_run_id)]: one.description or "" for one in artifacts}
    return {}


def _read_flow_runs(at_most: int) -> Iterator[FlowRun]:
    """Yield the newest flow runs of the flow `train`. Yield nothing if no server is configured.

    Raises:
        ServerAway: The server does not answer.
    """
    api_url = read_server_url()
    if not api_url:
        return
    hide_prefect_logs()
    with connect_to_server(api_url) as client:
        flow_runs = read_flow_runs(
            client, flows=["train"], sort=FlowRunSort.EXPECTED_START_TIME_DESC
        )
        # Skip flow runs that a schedule will start in the future.
        begun = (run for run in flow_runs if run.start_time or not run.auto_scheduled)
        yield from islice(begun, at_most)
