"""A pipeline in its flow process: begin its stages one after the other, and follow their runs.

Everything that is known about a pipeline is on the Prefect server and is read again for each step.
So its process can be killed at any time, and the next one continues where it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Failed

from tasks.pipeline.stage_runs import (
    cancel_stage_run,
    create_stage_run,
    describe_stage_run,
    format_link,
    list_stage_runs,
)
from tasks.pipeline.stage_specs import CannotBegin, read_specs_of_deployments
from tasks.pipeline.steps import Begin, StageRun, completed_run, last_asked, next_step
from tasks.record.checkpoints import find_stage_checkpoint
from tasks.record.places import RunPlace
from tasks.record.states import RunState
from tasks.server import flow_process, flow_runs
from tasks.server.flow_runs import ServerAway, talking_to
from tasks.server.interruption import ended_from_outside
from tasks.server.server import secrets_of
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.pipeline import PipelineSpec, add_deployment_specs, parse_pipeline
from tasks.spec.placeholders import RUN_DIR, RUN_ID, fill_in_stages
from tasks.spec.run import RunSpec

_log = logging.getLogger(__name__)

#: Called with each message about the pipelines of this context. The command prints the messages.
on_message: ContextVar[Callable[[str], None]] = ContextVar(
    "on_message", default=lambda message: None
)

#: Seconds between two requests for the state of a run.
_POLL_INTERVAL_S = 2.0
#: Seconds to wait for the end of a cancelled run, in addition to its grace periods.
_CANCEL_TIMEOUT_S = 180.0
#: Seconds to wait for the end of a run that is cancelled without grace periods.
_HURRIED_TIMEOUT_S = 30.0
#: Seconds to wait for a server that does not answer while the pipeline is ending.
_SERVER_TIMEOUT_S = 30.0
#: Seconds until the next process of the pipeline may start. By then, this one has exited.
_DUE_AFTER_S = 5.0

T = TypeVar("T")


class PipelineSession:
    """One pipeline in its flow process. `interrupt` and `let_go` may be called by any thread."""

    def __init__(self, spec: PipelineSpec, *, flow_run_id: UUID, api_url: str) -> None:
        self.spec = spec
        self.flow_run_id = flow_run_id
        self._api_url = api_url
        #: Reason for ending the pipeline as cancelled, or an empty string.
        self.interrupted_by = ""
        #: Reason for handing the pipeline over to its next process, or an empty string.
        self.left_by = ""
        #: Reason why the pipeline cannot continue, or an empty string.
        self.refused = ""
        #: The run that ended the pipeline, or None.
        self.ended_by: StageRun | None = None
        #: All runs that the stages have had.
        self._runs: list[StageRun] = []
        #: The last message about the current stage.
        self._last_message = ""
        #: True if the grace periods of the current stage are skipped.
        self._is_hurried = False
        #: Set when the pipeline is to end or to be handed over.
        self._ending = threading.Event()

    def interrupt(self, why: str) -> None:
        """End the pipeline as cancelled, and its stage with every grace period. Returns at once.

        One cancel may arrive in several ways, so another call changes nothing.
        """
        self.interrupted_by = self.interrupted_by or why
        self._ending.set()

    def hurry(self) -> None:
        """Skip the grace periods of the stage of an interrupted pipeline. Returns at once."""
        self._is_hurried = True

    def let_go(self, why: str) -> None:
        """Hand the pipeline over to its next process. Returns at once."""
        self.left_by = self.left_by or why
        self._ending.set()

    def prepare(self) -> None:
        """Check that every stage can begin, before the first one does.

        If a stage cannot begin, `refused` says why.
        """
        self._try(self._update_tags)
        try:
            spec = parse_pipeline(self.spec)
            specs = self._ask(lambda client: read_specs_of_deployments(client, spec))
            self.spec = add_deployment_specs(spec, specs)
            for stage in self.spec.stages:
                self._ask(partial(secrets_of, spec=RunSpec.model_validate(stage.spec)))
        except (InvalidSpec, CannotBegin) as error:
            self.refused = f"USER_ERROR: {error}"

    def next_stage(self) -> Begin | StageRun | None:
        """Return the next run to create or to follow, or None if the pipeline ends."""
        if self.refused or self.interrupted_by:
            return None
        self._runs, asked_at = self._ask(self._read_progress)
        step = next_step(self.spec.stage_names, self._runs, asked_at)
        if isinstance(step, StageRun) and step.ending is not None:
            self.ended_by = step
            return None
        return step

    def begin(self, step: Begin | StageRun) -> StageRun | None:
        """Return the run to follow. For `Begin`, create it.

        Returns:
            None if the run cannot be created. `refused` then says why.

        Raises:
            Pause: The pipeline is handed over to its next process.
        """
        self._last_message = ""
        if isinstance(step, StageRun):
            self.say(f"stage {step.stage}: run {step.name} is taken up, {step.state}")
            return step
        if self.left_by:
            self._hand_over(f"stage {step.stage} is next")

        stage = self.spec.stage(step.stage)
        try:
            spec = parse_spec(fill_in_stages(stage.spec or {}, self._placeholder_value)).written()
            tags = [*self.spec.tags, f"pipeline:{self.spec.name}"]
            run = self._ask(
                lambda client: create_stage_run(
                    client, self.flow_run_id, stage, step.number, spec=spec, tags=tags
                )
            )
        except (InvalidSpec, CannotBegin) as error:
            self.refused = f"stage {stage.name}: USER_ERROR: {error}"
            return None

        try_text = f", try {step.number}" if step.number > 1 else ""
        self.say(f"stage {stage.name}{try_text}: queued ({format_link(run)})")
        return run

    def follow(self, run: StageRun) -> bool:
        """Wait until the run ends.

        Returns:
            False if the pipeline is interrupted before the run ends.

        Raises:
            Pause: The pipeline is handed over to its next process.
        """
        while True:
            run = self._refresh(run)
            if run.ending is not None:
                self.say(f"stage {run.stage}: {run.state}: {run.message}")
                return True
            if self.interrupted_by:
                return False
            # While the run is being cancelled, wait for its end: it also cancels the pipeline. For
            # example, all runs of this machine are cancelled when the stack stops.
            if self.left_by and run.state not in ("Cancelling", flow_runs.CANCELLING_NOW):
                self._hand_over(f"stage {run.stage} goes on, and its next process takes it up")
            self._wait(_POLL_INTERVAL_S)

    def cancel(self, run: StageRun) -> None:
        """Cancel the run and wait until it has ended.

        The wait is limited to the grace periods of the run and three minutes. After `hurry`, the
        run is cancelled without grace periods, and the wait is limited to 30 s.
        """
        self.say(f"cancelling stage {run.stage}: {self.interrupted_by}")
        try:
            self._ask(lambda client: cancel_stage_run(client, run))
            spec = RunSpec.model_validate(self.spec.stage(run.stage).spec)
            deadline = time.monotonic() + spec.teardown_s + _CANCEL_TIMEOUT_S
            was_hurried = False
            while time.monotonic() < deadline:
                run = self._refresh(run)
                if run.ending is not None:
                    break
                if self._is_hurried and not was_hurried:
                    was_hurried = True
                    self._ask(partial(cancel_stage_run, run=run, is_now=True))
                    deadline = min(deadline, time.monotonic() + _HURRIED_TIMEOUT_S)
                time.sleep(_POLL_INTERVAL_S / 4)
            state = run.state if run.ending is not None else f"still {run.state}"
            self.interrupted_by += f"; stage {run.stage}: {state}"
        except ServerAway as error:
            self.interrupted_by += f"; stage {run.stage} may go on: {error}"

    def conclude(self) -> State[Any]:
        """Return the final Prefect state of the pipeline."""
        if self.interrupted_by:
            return Cancelled(message=self.interrupted_by)
        if self.refused:
            return Failed(message=self.refused)
        run = self.ended_by
        if run is None:
            names = ", ".join(self.spec.stage_names)
            return Completed(message=f"all stages are complete: {names}")
        if run.ending is RunState.CANCELLED:
            return Cancelled(
                message=f"stage {run.stage}: its run was cancelled ({format_link(run)})"
            )
        reason = run.message if run.state == "Failed" else f"{run.state}: {run.message}"
        return Failed(message=f"stage {run.stage}: {reason} ({format_link(run)})")

    def say(self, message: str) -> None:
        """Write a message to the flow run's log, and pass it to `on_message`."""
        get_run_logger().info(message)
        on_message.get()(message)

    def _update_tags(self, client: SyncPrefectClient) -> None:
        """Add the pipeline's own tags to the flow run.

        If a worker started this process, remove the tags of a process that was started directly:
        that process no longer runs the pipeline.
        """
        old_tags = set(client.read_flow_run(self.flow_run_id).tags)
        stale_tags: set[str] = set()
        if flow_process.started_by_others() is not None:
            stale_tags = flow_runs.process_tags_of(old_tags)
        new_tags = (old_tags - stale_tags) | {*self.spec.tags, f"pipeline:{self.spec.name}"}
        if new_tags != old_tags:
            client.update_flow_run(self.flow_run_id, tags=sorted(new_tags))

    def _refresh(self, run: StageRun) -> StageRun:
        """Read the run's current state, and report it if it has changed."""
        flow_run = self._ask(lambda client: client.read_flow_run(UUID(run.flow_run_id)))
        current = describe_stage_run(run.stage, run.number, flow_run)
        if current != run or not self._last_message:
            self._report_stage(current)
        return current

    def _report_stage(self, run: StageRun) -> None:
        """Show the state of the run in the message of the pipeline's flow run."""
        position = self.spec.stage_names.index(run.stage) + 1
        state_text = f"{run.state}: {run.message}" if run.message else run.state
        message = f"stage {run.stage} ({position} of {len(self.spec.stages)}): {state_text}"
        if message == self._last_message or run.ending is not None:
            return
        on_message.get()(message)
        self._last_message = message
        self._try(lambda _client: flow_runs.say_running(self.flow_run_id, message, self._ending))

    def _read_progress(self, client: SyncPrefectClient) -> tuple[list[StageRun], datetime]:
        """Return all runs so far, and when somebody last asked for the pipeline."""
        states = client.read_flow_run_states(self.flow_run_id)
        times = [(state.timestamp, state.is_final()) for state in states]
        return list_stage_runs(client, self.flow_run_id), last_asked(times)

    def _placeholder_value(self, stage: str, key: str) -> str:
        """Return the value of a placeholder that refers to an earlier stage.

        Raises:
            CannotBegin: The placeholder needs a checkpoint, and there is none.
        """
        run = completed_run(stage, self._runs)
        assert run is not None, f"stage {stage} has not completed"
        if key == RUN_ID:
            return run.name
        directory = RunPlace.of(run.name).directory
        if key == RUN_DIR:
            return str(directory)
        checkpoint = self._ask(lambda client: self._find_checkpoint(client, run))
        if checkpoint is not None:
            return str(checkpoint)
        raise CannotBegin(
            f"stage {stage} has completed and no checkpoint of it is there: looked for by "
            f"{directory}; that folder must be seen by this host, and `checkpoints` or "
            "`checkpoint` say where the run writes them"
        )

    def _find_checkpoint(self, client: SyncPrefectClient, run: StageRun) -> Path | None:
        # Use the spec that the run had. The pipeline's spec may have been changed since.
        spec = RunSpec.model_validate(
            client.read_flow_run(UUID(run.flow_run_id)).parameters.get("spec")
        )
        return find_stage_checkpoint(
            self.spec.stage(run.stage).checkpoint, spec, RunPlace.of(run.name)
        )

    def _ask(self, request: Callable[[SyncPrefectClient], T]) -> T:
        """Call a function with a client, and repeat this while the server does not answer.

        Raises:
            ServerAway: The server did not answer, and the pipeline is ending.
        """
        ending_since_s: float | None = None
        while True:
            try:
                with talking_to(self._api_url) as client:
                    return request(client)
            except ServerAway as error:
                if self._ending.is_set():
                    ending_since_s = ending_since_s or time.monotonic()
                    waited_s = time.monotonic() - ending_since_s
                    if self._is_hurried or waited_s > _SERVER_TIMEOUT_S:
                        raise
                _log.warning("asked again soon: %s", error)
            self._wait(_POLL_INTERVAL_S)

    def _try(self, request: Callable[[SyncPrefectClient], object]) -> None:
        """Call a function with a client. A failure is logged: the request is not essential."""
        try:
            with talking_to(self._api_url) as client:
                request(client)
        except Exception as error:
            _log.warning("not told to the Prefect server: %r", error)

    def _wait(self, delay_s: float) -> None:
        """Wait until the pipeline is to end, at most `delay_s`. While it ends, wait a quarter."""
        if self._ending.is_set():
            time.sleep(delay_s / 4)
        else:
            self._ending.wait(delay_s)

    def _hand_over(self, progress: str) -> NoReturn:
        """Hand the pipeline over to its next process.

        If the server does not accept the state, `reconcile` finds the flow run without a process.

        Args:
            progress: Says where the pipeline is, for the message of the state.

        Raises:
            Pause: Always. It ends this process's part of the flow run.
        """
        state = flow_runs.goes_on(f"{self.left_by}; {progress}", _DUE_AFTER_S)
        self.say(str(state.message))
        try:
            self._ask(lambda client: flow_process.hand_over(client, self.flow_run_id, state))
        except ServerAway as error:
            _log.warning("left as it is: %s", error)
        raise Pause(state=state)


def pipeline_id_of_flow_run() -> str:
    """Return the name of this context's flow run. It is the same in each of its processes."""
    return flow_process.id_here(flow_process.spec_here(PipelineSpec).name, "pipeline")


@contextmanager
def open_pipeline(spec: PipelineSpec) -> Iterator[PipelineSession]:
    """Open the pipeline of this flow run, as a context manager.

    While it is open, a signal or a cancel ends the pipeline together with its current stage. There
    is one exception: if a worker sends SIGTERM without a cancel, the pipeline is handed over to the
    next worker.
    """
    flow_run_id = flow_process.flow_run_here().id
    session = PipelineSession(spec, flow_run_id=flow_run_id, api_url=PREFECT_API_URL.value() or "")
    with ended_from_outside(session, flow_run_id, may_be_left=True):
        session.prepare()
        yield session
