"""Run a pipeline in its flow process: create the run of each stage, and wait for the run's end.

The Prefect server stores the whole progress of a pipeline, and each step reads the progress again.
The flow process of a pipeline can therefore be killed at any time. The next flow process continues
at the same step.
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
from tasks.pipeline.steps import Begin, StageRun, completed_run, find_last_request, next_step
from tasks.record.checkpoint_paths import CheckpointPath
from tasks.record.checkpoints import find_stage_checkpoint
from tasks.record.places import RunPlace
from tasks.record.states import RunState
from tasks.server import flow_process, flow_runs
from tasks.server.flow_runs import ServerAway, connect_to_server
from tasks.server.interruption import end_on_request
from tasks.server.server import read_secrets
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.pipeline import PipelineSpec, add_deployment_specs, parse_pipeline
from tasks.spec.placeholders import RUN_DIR, RUN_ID, fill_in_stages
from tasks.spec.run import RunSpec

_log = logging.getLogger(__name__)

#: Function that is called with each progress message of a pipeline. `muster pipeline` sets a
#: function that prints the messages. By default, the messages are only logged.
on_message: ContextVar[Callable[[str], None]] = ContextVar(
    "on_message", default=lambda message: None
)

#: Seconds between two requests for the state of a stage's run.
_POLL_INTERVAL_S = 2.0
#: Seconds to wait for the end of a cancelled stage run, in addition to its grace periods.
_CANCEL_TIMEOUT_S = 180.0
#: Seconds to wait for the end of a stage run that is cancelled without grace periods.
_HURRIED_TIMEOUT_S = 30.0
#: Seconds to wait for a Prefect server that does not answer, once the pipeline must end.
_SERVER_TIMEOUT_S = 30.0
#: Seconds until the next flow process of a pipeline may start, after the old flow process has given
#: up the pipeline. The old flow process exits within this time.
_DUE_AFTER_S = 5.0

T = TypeVar("T")


class PipelineSession:
    """One pipeline that runs in this process.

    `interrupt`, `hurry` and `let_go` may be called by any thread.
    """

    def __init__(self, spec: PipelineSpec, *, flow_run_id: UUID, api_url: str) -> None:
        self.spec = spec
        self.flow_run_id = flow_run_id
        self._api_url = api_url
        #: Reason for ending the pipeline as cancelled, or an empty string.
        self.cancel_reason = ""
        #: Reason why this process stops and the pipeline's next flow process continues the
        #: pipeline. An empty string if this process keeps the pipeline.
        self.hand_over_reason = ""
        #: Reason why a stage cannot begin, so that the pipeline fails, or an empty string.
        self.failure = ""
        #: The failed or cancelled stage run that ended the pipeline, or None.
        self.final_run: StageRun | None = None
        #: All stage runs that existed when the last step began, in any order.
        self._runs: list[StageRun] = []
        #: The last progress message about the current stage, or an empty string.
        self._last_message = ""
        #: True if the run of the current stage must be cancelled without its grace periods.
        self._is_hurried = False
        #: Event that is set when the pipeline must end, or when the next flow process of the
        #: pipeline must continue it.
        self._ending = threading.Event()
        #: True after this process has begun to leave the pipeline to the next flow process.
        self.is_handing_over = False

    def interrupt(self, why: str) -> None:
        """Request that the pipeline ends as cancelled, and return at once.

        The run of the current stage is cancelled with its grace periods. A second call changes
        nothing, because one cancellation may arrive both as a signal and from the Prefect server.
        """
        self.cancel_reason = self.cancel_reason or why
        self._ending.set()

    def hurry(self) -> None:
        """Request that the run of a cancelled stage skips its grace periods, and return at once."""
        self._is_hurried = True

    def let_go(self, why: str) -> None:
        """Request that the next flow process continues the pipeline, and return at once."""
        self.hand_over_reason = self.hand_over_reason or why
        self._ending.set()

    def prepare(self) -> None:
        """Check spec, deployment and secrets of every stage before the first stage begins.

        If a stage cannot begin, the reason is stored in `failure`.
        """
        self._try(self._update_tags)
        try:
            spec = parse_pipeline(self.spec)
            specs = self._ask(lambda client: read_specs_of_deployments(client, spec))
            self.spec = add_deployment_specs(spec, specs)
            for stage in self.spec.stages:
                self._ask(partial(read_secrets, spec=RunSpec.model_validate(stage.spec)))
        except (InvalidSpec, CannotBegin) as error:
            self.failure = f"USER_ERROR: {error}"

    def next_stage(self) -> Begin | StageRun | None:
        """Return the next stage run to create or to wait for, or None if the pipeline ends."""
        if self.failure or self.cancel_reason:
            return None
        self._runs, requested_at = self._ask(self._read_progress)
        step = next_step(self.spec.stage_names, self._runs, requested_at)
        if isinstance(step, StageRun) and step.ending is not None:
            self.final_run = step
            return None
        return step

    def begin(self, step: Begin | StageRun) -> StageRun | None:
        """Return the stage run to wait for. If the step is a `Begin`, create the stage run.

        Returns:
            The stage run. None if it cannot be created. The reason is then stored in `failure`.

        Raises:
            Pause: This process must exit, because the next flow process continues the pipeline.
        """
        self._last_message = ""
        if isinstance(step, StageRun):
            self.say(f"stage {step.stage}: attached to run {step.name}, which is {step.state}")
            return step
        if self.hand_over_reason:
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
            self.failure = f"stage {stage.name}: USER_ERROR: {error}"
            return None

        try_text = f", try {step.number}" if step.number > 1 else ""
        self.say(f"stage {stage.name}{try_text}: queued ({format_link(run)})")
        return run

    def follow(self, run: StageRun) -> bool:
        """Wait until a stage's run ends.

        Returns:
            True if the run has ended. False if the pipeline was interrupted while the run had not
            ended.

        Raises:
            Pause: This process must exit, because the next flow process continues the pipeline.
        """
        while True:
            run = self._refresh(run)
            if run.ending is not None:
                self.say(f"stage {run.stage}: {run.state}: {run.message}")
                return True
            if self.cancel_reason:
                return False
            # If the run of the stage is being cancelled, the pipeline will end, too. So wait for
            # the end of the run, and do not hand over the pipeline. For example, `muster down`
            # cancels all runs of this machine.
            is_cancelling = run.state in ("Cancelling", flow_runs.CANCELLING_NOW)
            if self.hand_over_reason and not is_cancelling:
                self._hand_over(
                    f"stage {run.stage} continues, and the pipeline's next process attaches to it"
                )
            self._wait(_POLL_INTERVAL_S)

    def cancel(self, run: StageRun) -> None:
        """Cancel a stage's run and wait until it has ended.

        The wait is limited to the run's grace periods plus three minutes. After a call of `hurry`,
        the run is cancelled without grace periods, and the wait is limited to 30 s. A phrase about
        the end of the run is added to `cancel_reason`.
        """
        self.say(f"cancelling stage {run.stage}: {self.cancel_reason}")
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
            self.cancel_reason += f"; stage {run.stage}: {state}"
        except ServerAway as error:
            self.cancel_reason += (
                f"; stage {run.stage}: state unknown, it may continue, because the Prefect server "
                f"does not answer: {error}"
            )

    def conclude(self) -> State[Any]:
        """Return the final Prefect state of the pipeline."""
        if self.cancel_reason:
            return Cancelled(message=self.cancel_reason)
        if self.failure:
            return Failed(message=self.failure)
        run = self.final_run
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
        """Write a progress message to the flow run's log, and call `on_message` with it."""
        get_run_logger().info(message)
        on_message.get()(message)

    def _update_tags(self, client: SyncPrefectClient) -> None:
        """Add the tags of the pipeline's spec, and the pipeline's name as a tag, to the flow run.

        If a user started an earlier process of the pipeline on the command line, the flow run has a
        tag with that process. If a worker has started the present process, this outdated tag is
        removed.
        """
        old_tags = set(client.read_flow_run(self.flow_run_id).tags)
        stale_tags: set[str] = set()
        if flow_process.find_worker_flow_run() is not None:
            stale_tags = flow_runs.find_process_tags(old_tags)
        new_tags = (old_tags - stale_tags) | {*self.spec.tags, f"pipeline:{self.spec.name}"}
        if new_tags != old_tags:
            client.update_flow_run(self.flow_run_id, tags=sorted(new_tags))

    def _refresh(self, run: StageRun) -> StageRun:
        """Return a stage run with its current state. If the state has changed, report the state."""
        flow_run = self._ask(lambda client: client.read_flow_run(UUID(run.flow_run_id)))
        current = describe_stage_run(run.stage, run.number, flow_run)
        if current != run or not self._last_message:
            self._report_stage(current)
        return current

    def _report_stage(self, run: StageRun) -> None:
        """Set the state message of the pipeline's flow run to the state of a stage's run."""
        position = self.spec.stage_names.index(run.stage) + 1
        state_text = f"{run.state}: {run.message}" if run.message else run.state
        message = f"stage {run.stage} ({position} of {len(self.spec.stages)}): {state_text}"
        if message == self._last_message or run.ending is not None:
            return
        on_message.get()(message)
        self._last_message = message
        self._try(
            lambda _client: flow_runs.set_running_message(self.flow_run_id, message, self._ending)
        )

    def _read_progress(self, client: SyncPrefectClient) -> tuple[list[StageRun], datetime]:
        """Return all stage runs so far, and the time at which a user last started the pipeline."""
        states = client.read_flow_run_states(self.flow_run_id)
        times = [(state.timestamp, state.is_final()) for state in states]
        return list_stage_runs(client, self.flow_run_id), find_last_request(times)

    def _placeholder_value(self, stage: str, key: str) -> str:
        """Return the value of a spec placeholder that refers to an earlier stage.

        Args:
            stage: Name of the earlier stage, which has completed.
            key: Part of the placeholder after the stage's name.

        Raises:
            CannotBegin: The placeholder stands for a checkpoint, and no checkpoint was found on
                this host, or the folder of the checkpoints cannot be read.
        """
        run = completed_run(stage, self._runs)
        assert run is not None, f"stage {stage} has not completed"
        if key == RUN_ID:
            return run.name
        directory = RunPlace.of(run.name).directory
        if key == RUN_DIR:
            return str(directory)
        try:
            checkpoint = self._ask(lambda client: self._find_checkpoint(client, run))
        except OSError as error:
            raise CannotBegin(
                f"Stage {stage} has completed, but its checkpoints cannot be read: {error}"
            ) from error
        if checkpoint is not None:
            return str(checkpoint)
        raise CannotBegin(
            f"Stage {stage} has completed, but no checkpoint of it was found for its run directory "
            f"{directory}. Make sure that this host can read that directory, and that "
            "`checkpoints` or `checkpoint` in the spec names the place of the checkpoints."
        )

    def _find_checkpoint(self, client: SyncPrefectClient, run: StageRun) -> CheckpointPath | None:
        """Return the path of a completed run's checkpoint, or None if the run has no checkpoint."""
        # The pipeline's spec may have changed after the start of the run. So read the spec with
        # which the run was started.
        spec = RunSpec.model_validate(
            client.read_flow_run(UUID(run.flow_run_id)).parameters.get("spec")
        )
        return find_stage_checkpoint(
            self.spec.stage(run.stage).checkpoint, spec, RunPlace.of(run.name)
        )

    def _ask(self, request: Callable[[SyncPrefectClient], T]) -> T:
        """Send a request to the Prefect server, and repeat it while the server does not answer.

        Args:
            request: Function that sends the request. Its argument is a client of the server.

        Returns:
            The result of the function.

        Raises:
            ServerAway: The server did not answer, and the pipeline must end.
        """
        ending_since_s: float | None = None
        while True:
            try:
                with connect_to_server(self._api_url) as client:
                    return request(client)
            except ServerAway as error:
                if self._ending.is_set():
                    ending_since_s = ending_since_s or time.monotonic()
                    waited_s = time.monotonic() - ending_since_s
                    if self._is_hurried or waited_s > _SERVER_TIMEOUT_S:
                        raise
                _log.warning("Repeating the request to the Prefect server: %s", error)
            self._wait(_POLL_INTERVAL_S)

    def _try(self, request: Callable[[SyncPrefectClient], object]) -> None:
        """Send a request to the Prefect server once. A failure is only logged."""
        try:
            with connect_to_server(self._api_url) as client:
                request(client)
        except Exception as error:
            _log.warning("The Prefect server was not updated: %r", error)

    def _wait(self, delay_s: float) -> None:
        """Wait `delay_s` seconds, or less if the pipeline must end.

        If the pipeline must already end at the call, the wait lasts a quarter of `delay_s`.
        """
        if self._ending.is_set():
            time.sleep(delay_s / 4)
        else:
            self._ending.wait(delay_s)

    def _hand_over(self, progress: str) -> NoReturn:
        """Set a waiting state for the flow run. Its next flow process then continues the pipeline.

        If the server does not answer, a later `muster reconcile` finds that the flow run has no
        process, and schedules the flow run's next process.

        Args:
            progress: Progress of the pipeline, for the message of the state.

        Raises:
            Pause: Always. The exception makes Prefect leave the flow run's state unchanged when
                this process ends.
        """
        state = flow_runs.make_handover_state(f"{self.hand_over_reason}; {progress}", _DUE_AFTER_S)
        self.say(str(state.message))
        self.is_handing_over = True
        try:
            self._ask(
                lambda client: flow_process.hand_over_flow_run(client, self.flow_run_id, state)
            )
        except ServerAway as error:
            _log.warning("The state of the pipeline's flow run was not changed: %s", error)
        raise Pause(state=state)


def pipeline_id_of_flow_run() -> str:
    """Return the name of the pipeline's flow run that runs in this process.

    All processes of the same flow run get the same name.
    """
    return flow_process.make_current_run_id(
        flow_process.get_current_spec(PipelineSpec).name, "pipeline"
    )


@contextmanager
def open_pipeline(spec: PipelineSpec) -> Iterator[PipelineSession]:
    """Open the pipeline of the active flow run, as a context manager.

    While the context is open, a signal or a cancellation ends the pipeline and the run of the
    current stage. There is one exception: if a worker sends SIGTERM without a cancellation, the
    pipeline is handed over to a process of the next worker.
    """
    flow_run_id = flow_process.get_current_flow_run().id
    session = PipelineSession(spec, flow_run_id=flow_run_id, api_url=PREFECT_API_URL.value() or "")
    with end_on_request(session, flow_run_id, may_be_left=True):
        session.prepare()
        yield session
