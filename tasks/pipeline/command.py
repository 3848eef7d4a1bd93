"""The command that runs a pipeline file or resumes a pipeline, and prints its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow, tags
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import TerminationSignal
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL

from tasks.pipeline.early_stopping import require_optuna
from tasks.pipeline.progress_report import on_message
from tasks.pipeline.stage_specs import add_code, read_specs_of_deployments
from tasks.processes.signals import expect_one_run, ignore_until_exit, interrupt_on_signals
from tasks.server import flow_process, flow_runs
from tasks.server.flow_runs import connect_to_server, read_flow_runs
from tasks.server.server import NoServer, hide_prefect_logs, prefect_server
from tasks.spec.errors import BadArgument, MusterError
from tasks.spec.pipeline import PipelineSpec, add_deployment_specs, load_pipeline, parse_pipeline

_NO_QUEUE = """\
A pipeline needs a Prefect server, but PREFECT_API_URL is not set.
To start a server: muster up
To run a single training without a server: muster train SPEC.yaml"""


def run_pipeline(
    pipeline: Flow[..., State[Any]], path: Path | None, overrides: Sequence[str], resume: str
) -> int:
    """Run a pipeline in this process until it ends, and print its progress.

    Args:
        pipeline: The Prefect flow that runs pipelines.
        path: The pipeline file. None to resume the flow run `resume` with its present spec.
        overrides: Values of the option `--set`, which replace values of the pipeline's spec.
        resume: Id or name of the flow run to resume. If empty, a new flow run is started.

    Returns:
        The exit code of the command, as `get_exit_code` derives it from the final state.

    Raises:
        MusterError: The arguments or the spec are invalid, or the flow run cannot be resumed.
    """
    if path is None and not resume:
        raise BadArgument(
            "no pipeline was named. To start a pipeline: muster pipeline PIPELINE.yaml. To resume "
            "a pipeline: muster pipeline --resume FLOW_RUN"
        )
    spec = load_pipeline(path, overrides) if path else None
    if spec is not None:
        require_optuna(spec)
    api_url = PREFECT_API_URL.value()
    if not api_url:
        raise NoServer(_NO_QUEUE)
    if path:
        flow_process.enter_project(path)
    hide_prefect_logs()
    expect_one_run()
    interrupt_on_signals()

    print_message = _message_printer()
    token = on_message.set(print_message)
    try:
        with prefect_server() as url:
            print_message(f"Prefect server {url}")
            flow_run = _find_resumable(api_url, resume) if resume else None
            if spec is None and flow_run is not None:
                spec = parse_pipeline(flow_run.parameters.get("spec"), overrides)
            assert spec is not None

            with connect_to_server(api_url) as client:
                if path:
                    spec = add_code(client, spec, Path.cwd())
                # Check the specs of all stages, so that an invalid pipeline does not start. The
                # result is not needed: the call raises an error if a spec is invalid.
                add_deployment_specs(spec, read_specs_of_deployments(client, spec))

            if flow_run is not None:
                state = _resume(pipeline, api_url, flow_run, spec)
            else:
                with tags(*spec.tags, flow_runs.make_process_tag()):
                    state = pipeline(spec, return_state=True)
    except TerminationSignal as error:
        raise KeyboardInterrupt from error
    finally:
        on_message.reset(token)
    ignore_until_exit()
    print_message(f"{(state.name or '').lower()}: {state.message}")
    return flow_process.get_exit_code(state)


def _message_printer() -> Callable[[str], None]:
    """Return a function that prints messages. Each message begins with its time in seconds.

    The time counts from the call of `_message_printer`.
    """
    started_s = time.monotonic()

    def print_message(message: str) -> None:
        print(f"{time.monotonic() - started_s:7.1f}s {message}", flush=True)

    return print_message


def _resume(
    pipeline: Flow[..., State[Any]], api_url: str, flow_run: FlowRun, spec: PipelineSpec
) -> State[Any]:
    """Run an existing flow run of a pipeline in this process, and return its final state."""
    other_tags = set(flow_run.tags) - flow_runs.find_process_tags(flow_run.tags)
    new_tags = other_tags | {flow_runs.make_process_tag()}
    with connect_to_server(api_url) as client:
        flow_runs.clear_process(client, str(flow_run.id))
        client.update_flow_run(
            flow_run.id, parameters={"spec": spec.written()}, tags=sorted(new_tags)
        )
        flow_run = client.read_flow_run(flow_run.id)
    state = run_flow(pipeline, flow_run=flow_run, parameters={"spec": spec}, return_type="state")
    assert isinstance(state, State), state
    return state


def _find_resumable(api_url: str, id_or_name: str) -> FlowRun:
    """Return the flow run of a pipeline with the given id or name, if it can be resumed.

    Raises:
        MusterError: The flow run does not exist, or may still have a process.
    """
    try:
        flow_run_filter: Mapping[str, Any] = {"id": {"any_": [UUID(id_or_name)]}}
    except ValueError:
        flow_run_filter = {"name": {"any_": [id_or_name]}}
    with connect_to_server(api_url) as client:
        flow_run = next(read_flow_runs(client, flow_run_filter, ["pipeline"]), None)
    if flow_run is None:
        raise MusterError(
            f"the Prefect server has no flow run of a pipeline with the id or name {id_or_name}. "
            "To list all flow runs: prefect flow-run ls"
        )
    state = flow_run.state
    if state is None or state.is_final() or flow_runs.has_lost_process(flow_run):
        return flow_run
    raise MusterError(
        f"The pipeline {flow_run.name} cannot be resumed: its state is {state.name}, so it may "
        f"still be running. Cancel the pipeline first: prefect flow-run cancel {flow_run.id}. If "
        "the process of the pipeline was killed, wait a minute, until Muster has noticed the end "
        "of the process."
    )
