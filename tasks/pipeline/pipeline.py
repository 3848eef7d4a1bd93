"""A pipeline in this process: which stage is next, its run, and the wait for that one's end.

All that is known of a pipeline is on its Prefect server, and is asked anew for each step. So a
process of it can be killed at any time, and the next one goes on where it was: whoever asks what is
next, and however often, gets the same answer.

The run of a stage is a flow run of the flow `train`, created through a deployment and so queued as
any other, and a subflow of the pipeline's flow run: its task run there has the states of the run.
Key and task run are made of pipeline, stage and number alone, so that what was created and not
noted is found again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from uuid import UUID

import httpx
from prefect import Flow, Task, get_run_logger, tags
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound, Pause, TerminationSignal
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Cancelling, Completed, Failed, Pending, Scheduled
from prefect.utilities.urls import url_for

from tasks.record.places import RunPlace
from tasks.record.retries import handed_on
from tasks.record.states import RunState
from tasks.server import flow_process, flow_runs
from tasks.server.artifacts import submitted_code
from tasks.server.flow_runs import ServerAway, flow_runs_of, refusal_of, talking_to
from tasks.server.server import NoServer, prefect_server, quieten_prefect, secrets_of
from tasks.spec.errors import BadArgument, InvalidSpec, MusterError
from tasks.spec.loading import parse_spec
from tasks.spec.pipeline import (
    STAGE_DEPLOYMENT,
    PipelineSpec,
    Stage,
    load_pipeline,
    parse_pipeline,
    with_specs,
)
from tasks.spec.placeholders import RUN_DIR, RUN_ID, filled_in
from tasks.spec.run import LIVE, RunSpec


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
    except (ObjectNotFound, ValueError):
        raise CannotBegin(
            f"the Prefect server has no deployment {name}: Muster's own are made by `muster up` or "
            "`python -m deployments.stack.setup`, one of a spec of yours by `muster deploy SPEC`"
        ) from None


def _nothing() -> None:
    """Never called: it stands for a stage's run in its pipeline's flow run."""


def link_of(run: StageRun) -> str:
    """The page of a run in the UI; its id where there is no UI."""
    url = url_for("flow-run", obj_id=run.flow_run_id)
    return url or f"flow run {run.flow_run_id}"


_log = logging.getLogger(__name__)

#: Told, in words, what happens to the pipelines of this context; the terminal listens here.
on_word: ContextVar[Callable[[str], None]] = ContextVar("on_word", default=lambda words: None)

_LOOK_EVERY_S = 2.0
#: The wait for the end of a run that was cancelled: longer than its components' grace periods.
_CANCELLED_WITHIN_S = 180.0
#: A server that is away is waited for so long where the pipeline is to end.
_AWAY_WITHIN_S = 30.0
#: The next process is not due before this one has surely left.
_DUE_AFTER_S = 5.0

T = TypeVar("T")


class Pipeline:
    """One pipeline, as far as this process sees it. Safe to interrupt from any thread."""

    def __init__(self, spec: PipelineSpec, *, flow_run_id: UUID, api_url: str) -> None:
        self.spec = spec
        self.flow_run_id = flow_run_id
        self._api_url = api_url
        #: Why the pipeline is to end; empty while it is not.
        self.interrupted_by = ""
        #: Why this process is to leave the pipeline to its next one; empty while it is not.
        self.left_by = ""
        #: Why it can't go on; empty while it can.
        self.refused = ""
        #: The run that has ended it, where one has.
        self.ended_by: StageRun | None = None
        self._runs: list[StageRun] = []
        self._told = ""
        self._hurried = False
        self._woken = threading.Event()

    def interrupt(self, why: str) -> None:
        """End the pipeline as cancelled; by a second signal, without a wait. Returns at once."""
        # One cancel is seen twice: on the server, and as the worker's SIGTERM.
        self._hurried = bool(self.interrupted_by) and why.startswith("interrupted")
        self.interrupted_by = self.interrupted_by or why
        self._woken.set()

    def let_go(self, why: str) -> None:
        """Leave the pipeline to its next process. Returns at once."""
        self.left_by = self.left_by or why
        self._woken.set()

    def prepare(self) -> None:
        """Make sure that every stage can be begun, before the first one is."""
        self._try(self._tag)
        try:
            spec = parse_pipeline(self.spec)
            specs = self._ask(lambda client: _specs_of_deployments(client, spec))
            self.spec = with_specs(spec, specs)
            for stage in self.spec.stages:
                self._ask(partial(secrets_of, spec=RunSpec.model_validate(stage.spec)))
        except (InvalidSpec, CannotBegin) as error:
            self.refused = f"USER_ERROR: {error}"

    def next_stage(self) -> Begin | StageRun | None:
        """The run that is to begin or that is on its way; None where the pipeline is at its end."""
        if self.refused or self.interrupted_by:
            return None
        self._runs, asked_at = self._ask(self._look)
        step = next_step(self.spec.stage_names, self._runs, asked_at)
        if isinstance(step, StageRun) and step.ending is not None:
            self.ended_by = step
            return None
        return step

    def begin(self, step: Begin | StageRun) -> StageRun | None:
        """The run of the stage: the one that is on its way, or a new one; None where there can't
        be any.

        Raises: Pause, where the pipeline is left to its next process.
        """
        self._told = ""
        if isinstance(step, StageRun):
            self.say(f"stage {step.stage}: run {step.name} is taken up, {step.state}")
            return step
        if self.left_by:
            self._leave(f"stage {step.stage} is next")
        stage = self.spec.stage(step.stage)
        try:
            spec = parse_spec(filled_in(stage.spec or {}, self._value_of)).written()
            tags = [*self.spec.tags, f"pipeline:{self.spec.name}"]
            run = self._ask(
                lambda client: create_stage_run(
                    client, self.flow_run_id, stage, step.number, spec=spec, tags=tags
                )
            )
        except (InvalidSpec, CannotBegin) as error:
            self.refused = f"stage {stage.name}: USER_ERROR: {error}"
            return None
        again = f", try {step.number}" if step.number > 1 else ""
        self.say(f"stage {stage.name}{again}: queued ({link_of(run)})")
        return run

    def follow(self, run: StageRun) -> bool:
        """Whether the run came to its end; else the pipeline is to end before it.

        Raises: Pause, where the pipeline is left to its next process.
        """
        while True:
            run = self._seen(run)
            if run.ending is not None:
                self.say(f"stage {run.stage}: {run.state}: {run.message}")
                return True
            if self.interrupted_by:
                return False
            # A run that is being cancelled, with all others of this machine for example, takes its
            # pipeline with it.
            if self.left_by and run.state != "Cancelling":
                self._leave(f"stage {run.stage} goes on, and its next process takes it up")
            self._wait(_LOOK_EVERY_S)

    def cancel(self, run: StageRun) -> None:
        """Cancel the run, and wait until it has ended, as long as that may take."""
        self.say(f"cancelling stage {run.stage}: {self.interrupted_by}")
        try:
            self._ask(lambda client: cancel_stage_run(client, run))
            deadline = time.monotonic() + _CANCELLED_WITHIN_S
            while time.monotonic() < deadline and not self._hurried:
                run = self._seen(run)
                if run.ending is not None:
                    break
                time.sleep(_LOOK_EVERY_S / 4)
            state = run.state if run.ending is not None else f"still {run.state}"
            self.interrupted_by += f"; stage {run.stage}: {state}"
        except ServerAway as error:
            self.interrupted_by += f"; stage {run.stage} may go on: {error}"

    def conclude(self) -> State[Any]:
        """The Prefect state that fits how the pipeline ended."""
        if self.interrupted_by:
            return Cancelled(message=self.interrupted_by)
        if self.refused:
            return Failed(message=self.refused)
        if (run := self.ended_by) is None:
            names = ", ".join(self.spec.stage_names)
            return Completed(message=f"all stages are complete: {names}")
        if run.ending is RunState.CANCELLED:
            return Cancelled(message=f"stage {run.stage}: its run was cancelled ({link_of(run)})")
        said = run.message if run.state == "Failed" else f"{run.state}: {run.message}"
        return Failed(message=f"stage {run.stage}: {said} ({link_of(run)})")

    def say(self, words: str) -> None:
        """Tell whoever listens, and the flow run's log."""
        get_run_logger().info(words)
        on_word.get()(words)

    def _tag(self, client: SyncPrefectClient) -> None:
        """Its own tags, beside those of its deployment; a worker's process is not the one of which
        an earlier, direct start has left a mark."""
        have = set(client.read_flow_run(self.flow_run_id).tags)
        stale = (
            flow_runs.process_tags_of(have)
            if flow_process.started_by_others() is not None
            else set()
        )
        wanted = (have - stale) | {*self.spec.tags, f"pipeline:{self.spec.name}"}
        if wanted != have:
            client.update_flow_run(self.flow_run_id, tags=sorted(wanted))

    def _seen(self, run: StageRun) -> StageRun:
        """The run as it is now, which is told where it has changed."""
        found = self._ask(lambda client: client.read_flow_run(UUID(run.flow_run_id)))
        now = _stage_run(run.stage, run.number, found)
        if now != run or not self._told:
            self._tell(now)
        return now

    def _tell(self, run: StageRun) -> None:
        """Have the flow run say what its stage does."""
        place = self.spec.stage_names.index(run.stage) + 1
        said = f"{run.state}: {run.message}" if run.message else run.state
        message = f"stage {run.stage} ({place} of {len(self.spec.stages)}): {said}"
        if message == self._told or run.ending is not None:
            return
        on_word.get()(message)
        self._told = message
        self._try(lambda _client: flow_runs.say_running(self.flow_run_id, message, self._woken))

    def _look(self, client: SyncPrefectClient) -> tuple[list[StageRun], datetime]:
        """All runs so far, and when somebody last asked for the pipeline."""
        states = client.read_flow_run_states(self.flow_run_id)
        seen = [(state.timestamp, state.is_final()) for state in states]
        return runs_of(client, self.flow_run_id), last_asked(seen)

    def _value_of(self, stage: str, key: str) -> str:
        """Of a placeholder. Raises: CannotBegin."""
        run = completed_run(stage, self._runs)
        assert run is not None, f"stage {stage} has not completed"
        if key == RUN_ID:
            return run.name
        place = RunPlace.of(run.name).directory
        if key == RUN_DIR:
            return str(place)
        if (found := self._ask(lambda client: self._checkpoint(client, run))) is not None:
            return str(found)
        raise CannotBegin(
            f"stage {stage} has completed and no checkpoint of it is there: looked for by "
            f"{place}; that folder must be seen by this host, and `checkpoints` or `checkpoint` "
            "say where the run writes them"
        )

    def _checkpoint(self, client: SyncPrefectClient, run: StageRun) -> Path | None:
        """By the spec that the run had, which may be another than it has here by now."""
        spec = RunSpec.model_validate(
            client.read_flow_run(UUID(run.flow_run_id)).parameters.get("spec")
        )
        return handed_on(self.spec.stage(run.stage).checkpoint, spec, RunPlace.of(run.name))

    def _ask(self, question: Callable[[SyncPrefectClient], T]) -> T:
        """The server's answer, however long it is away.

        Raises: ServerAway, soon, where the pipeline is to end or to be left.
        """
        ended_at: float | None = None
        while True:
            try:
                with talking_to(self._api_url) as client:
                    return question(client)
            except ServerAway as error:
                if self._woken.is_set():
                    ended_at = ended_at or time.monotonic()
                    if self._hurried or time.monotonic() - ended_at > _AWAY_WITHIN_S:
                        raise
                _log.warning("asked again soon: %s", error)
            self._wait(_LOOK_EVERY_S)

    def _try(self, what: Callable[[SyncPrefectClient], object]) -> None:
        """Tell the server something that it can do without."""
        try:
            with talking_to(self._api_url) as client:
                what(client)
        except Exception as error:
            _log.warning("not told to the Prefect server: %r", error)

    def _wait(self, delay_s: float) -> None:
        if self._woken.is_set():
            time.sleep(delay_s / 4)
        else:
            self._woken.wait(delay_s)

    def _leave(self, where: str) -> NoReturn:
        """Leave the pipeline, where it is, to its next process; where the server does not take
        that, `reconcile` finds the flow run without one."""
        state = flow_runs.goes_on(f"{self.left_by}; {where}", _DUE_AFTER_S)
        self.say(str(state.message))
        try:
            self._ask(lambda client: flow_process.hand_over(client, self.flow_run_id, state))
        except ServerAway as error:
            _log.warning("left as it is: %s", error)
        raise Pause(state=state)


def pipeline_id_of_flow_run() -> str:
    """The name of the flow run of this context, the same for each of its processes."""
    return flow_process.id_here(flow_process.spec_here(PipelineSpec).name, "pipeline")


@contextmanager
def open_pipeline(spec: PipelineSpec) -> Iterator[Pipeline]:
    """The pipeline of this flow run; a signal or a cancel ends it, with its stage, while open.

    SIGTERM under a worker that was not asked to cancel it leaves it to the next worker instead.
    """
    flow_run_id = flow_process.flow_run_here().id
    line = Pipeline(spec, flow_run_id=flow_run_id, api_url=PREFECT_API_URL.value() or "")
    with flow_process.ended_from_outside(line, flow_run_id, may_be_left=True):
        line.prepare()
        yield line


def with_code(client: SyncPrefectClient | None, pipeline: PipelineSpec, root: Path) -> PipelineSpec:
    """The pipeline with the code of the project in each of its specs. Raises: InvalidSpec, NoCode,
    OSError."""
    written = pipeline.written()
    own: str | None = None
    for spec in filter(None, (stage.get("spec") for stage in written["stages"])):
        if spec.get("code") is None:
            own = spec["code"] = own or submitted_code(client, None, root)
        else:
            submitted_code(client, spec["code"], root)
    return PipelineSpec.model_validate(written)


_NO_QUEUE = """\
A pipeline's runs go through the queue of a Prefect server, and PREFECT_API_URL names none.
Start one: muster up
A single run needs none: muster train SPEC.yaml"""


def run_pipeline(
    pipeline: Flow[..., State[Any]], path: Path | None, overrides: Sequence[str], resume: str
) -> int:
    """Run a pipeline file, or go on with a flow run of one, and show what happens.

    Returns: the exit code, see `exit_code_of`. Raises: MusterError.
    """
    if path is None and not resume:
        raise BadArgument("name a PIPELINE.yaml, or a flow run with --resume")
    spec = load_pipeline(path, overrides) if path else None
    if not (api_url := PREFECT_API_URL.value()):
        raise NoServer(_NO_QUEUE)
    if path:
        flow_process.enter_project_of(path)
    quieten_prefect()
    flow_process.end_on_signals()
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
            with talking_to(api_url) as client:
                if path:
                    spec = with_code(client, spec, Path.cwd())
                with_specs(spec, _specs_of_deployments(client, spec))
            if flow_run is not None:
                state = _resumed(pipeline, api_url, flow_run, spec)
            else:
                with tags(*spec.tags, flow_runs.process_tag()):
                    state = pipeline(spec, return_state=True)
    except TerminationSignal as error:
        raise KeyboardInterrupt from error
    finally:
        on_word.reset(token)
    say(f"{(state.name or '').lower()}: {state.message}")
    return flow_process.exit_code_of(state)


def _resumed(
    pipeline: Flow[..., State[Any]], api_url: str, flow_run: FlowRun, spec: PipelineSpec
) -> State[Any]:
    own = {*flow_run.tags} - flow_runs.process_tags_of(flow_run.tags) | {flow_runs.process_tag()}
    parameters = {"spec": spec.written()}
    with talking_to(api_url) as client:
        flow_runs.clear_process(client, str(flow_run.id))
        client.update_flow_run(flow_run.id, parameters=parameters, tags=sorted(own))
        flow_run = client.read_flow_run(flow_run.id)
    state = run_flow(pipeline, flow_run=flow_run, parameters={"spec": spec}, return_type="state")
    assert isinstance(state, State), state
    return state


def _to_resume(api_url: str, name: str) -> FlowRun:
    """The flow run of that id or name. Raises: MusterError, where it can't be gone on with."""
    try:
        which: Mapping[str, Any] = {"id": {"any_": [UUID(name)]}}
    except ValueError:
        which = {"name": {"any_": [name]}}
    with talking_to(api_url) as client:
        flow_run = next(flow_runs_of(client, which, ["pipeline"]), None)
    if flow_run is None:
        raise MusterError(f"the Prefect server has no flow run {name} of a pipeline")
    state = flow_run.state
    if state is None or state.is_final() or flow_runs.has_lost_its_process(flow_run):
        return flow_run
    raise MusterError(
        f"{flow_run.name} is {state.name} and may have a process: cancel it first "
        f"(prefect flow-run cancel {flow_run.id}). Where that was killed, the reconcile of its "
        "host says so within a minute, and goes on with it itself where it is a deployment's"
    )


def _specs_of_deployments(client: SyncPrefectClient, spec: PipelineSpec) -> dict[str, Any]:
    """Of the stages that have no spec of their own. Raises: CannotBegin."""
    specs: dict[str, Any] = {}
    for stage in spec.stages:
        if stage.spec is None and (name := stage.deployment):
            specs[stage.name] = deployment_named(client, name).parameters.get("spec")
            if not isinstance(specs[stage.name], Mapping):
                raise CannotBegin(f"the deployment {name} has no spec: write spec: FILE.yaml")
    return specs
