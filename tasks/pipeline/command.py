"""The verb `muster pipeline`: one pipeline, whose stages go through the queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow, tags
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterName,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL

from tasks.pipeline.pipeline import on_word
from tasks.pipeline.stage_runs import CannotBegin, spec_of_deployment
from tasks.server.flow_process import (
    EXIT_INTERRUPTED,
    end_on_signals,
    enter_project_of,
    exit_code_of,
)
from tasks.server.flow_runs import (
    clear_process,
    has_lost_its_process,
    process_tag,
    process_tags_of,
    talking_to,
)
from tasks.server.server import NoServer, prefect_server, quieten_prefect
from tasks.show.arguments import EXIT_INVALID
from tasks.spec.errors import MusterError
from tasks.spec.pipeline import PipelineSpec, load_pipeline, parse_pipeline, with_specs

_NO_QUEUE = """\
A pipeline's runs go through the queue of a Prefect server, and PREFECT_API_URL names none.
Start one: muster up
A single run needs none: muster train SPEC.yaml"""


class NoPipeline(MusterError):
    """None is named."""

    exit_code = EXIT_INVALID


class CannotResume(MusterError):
    """The flow run can't be gone on with, now or at all; its message says what to do instead."""


def run_pipeline(
    pipeline: Flow[..., State[Any]],
    path: Path | None,
    overrides: Sequence[str] = (),
    resume: str = "",
) -> int:
    """Run a pipeline file, or go on with a flow run of one, and show what happens.

    Returns: 0 completed, 1 failed, 3 a stage can never fit, 130 interrupted.

    Raises: InvalidSpec, NoPipeline, NoServer, CannotResume, ServerAway.
    """
    if path is None and not resume:
        raise NoPipeline("name a PIPELINE.yaml, or a flow run with --resume")
    spec = load_pipeline(path, overrides) if path else None
    if not (api_url := PREFECT_API_URL.value()):
        raise NoServer(_NO_QUEUE)
    if path:
        enter_project_of(path)
    quieten_prefect()
    end_on_signals()
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:7.1f}s {words}", flush=True)

    token = on_word.set(say)
    try:
        with prefect_server() as url:
            say(f"Prefect server {url}")
            flow_run = _to_resume(api_url, resume) if resume else None
            if spec is None and flow_run is not None:
                spec = parse_pipeline(flow_run.parameters.get("spec"), overrides)
            assert spec is not None
            _check(api_url, spec)
            if flow_run is not None:
                state = _resumed(pipeline, api_url, flow_run, spec)
            else:
                with tags(*spec.tags, process_tag()):
                    state = pipeline(spec, return_state=True)
    except (KeyboardInterrupt, TerminationSignal):
        print("Interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        on_word.reset(token)
    say(f"{(state.name or '').lower()}: {state.message}")
    return exit_code_of(state)


def _resumed(
    pipeline: Flow[..., State[Any]], api_url: str, flow_run: FlowRun, spec: PipelineSpec
) -> State[Any]:
    own = {*flow_run.tags} - process_tags_of(flow_run.tags) | {process_tag()}
    parameters = {"spec": spec.written()}
    with talking_to(api_url) as client:
        clear_process(client, str(flow_run.id))
        client.update_flow_run(flow_run.id, parameters=parameters, tags=sorted(own))
        flow_run = client.read_flow_run(flow_run.id)
    state = run_flow(pipeline, flow_run=flow_run, parameters={"spec": spec}, return_type="state")
    assert isinstance(state, State), state
    return state


def _to_resume(api_url: str, name: str) -> FlowRun:
    """The flow run that is to be gone on with.

    Raises: CannotResume, ServerAway.
    """
    with talking_to(api_url) as client:
        flow_run = _find(client, name)
        state = flow_run.state
    if state is None or state.is_final() or has_lost_its_process(flow_run):
        return flow_run
    raise CannotResume(
        f"{flow_run.name} is {state.name} and may have a process: cancel it first "
        f"(prefect flow-run cancel {flow_run.id}). Where that was killed, the reconcile of its "
        "host says so within a minute, and goes on with it itself where it is a deployment's"
    )


def _find(client: SyncPrefectClient, name: str) -> FlowRun:
    """By id or name. Raises: CannotResume."""
    try:
        id_ = UUID(name)
    except ValueError:
        flow = FlowFilter(name=FlowFilterName(any_=["pipeline"]))
        run = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        found = client.read_flow_runs(flow_filter=flow, flow_run_filter=run, limit=1)
    else:
        try:
            found = [client.read_flow_run(id_)]
        except ObjectNotFound:
            found = []
    if not found or client.read_flow(found[0].flow_id).name != "pipeline":
        raise CannotResume(f"the Prefect server has no flow run {name} of a pipeline")
    return found[0]


def _check(api_url: str, spec: PipelineSpec) -> None:
    """What only the server knows of the stages is there.

    Raises: InvalidSpec, ServerAway.
    """
    bare = {stage.name: stage.deployment for stage in spec.stages if stage.spec is None}
    try:
        with talking_to(api_url) as client:
            specs = {
                name: spec_of_deployment(client, deployment)
                for name, deployment in bare.items()
                if deployment is not None
            }
    except CannotBegin as error:
        raise NoServer(str(error)) from error
    with_specs(spec, specs)
