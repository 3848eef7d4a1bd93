"""Evaluate the checkpoints of a run: create the runs of the evaluations, and record their states.

All requests to the server and all reads of checkpoints are made in one background thread, so a
server or file system that does not answer never delays the training. An error in the thread is
logged, and the thread retries the work a few seconds later.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from functools import partial
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient

from tasks.pipeline.decision import StageRun
from tasks.pipeline.stage_runs import create_child_run, describe_stage_run, list_stage_runs
from tasks.pipeline.stage_specs import CannotBegin
from tasks.record.checkpoints import judge_checkpoints
from tasks.record.evaluation_rules import add_checkpoints, choose_evaluations
from tasks.record.evaluations import (
    CheckpointNote,
    EvaluationNote,
    EvaluationsJson,
    EvaluationState,
    locate_evaluation_result,
    lock_evaluations,
    read_evaluation_figures,
)
from tasks.record.places import RunPlace
from tasks.record.result_file import InvalidResult
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server import flow_runs
from tasks.server.artifacts import Artifacts
from tasks.server.flow_runs import ServerAway, connect_to_server
from tasks.show.evaluations import show_evaluations
from tasks.show.page import EVALUATIONS
from tasks.spec.checkpoint_urls import is_url
from tasks.spec.errors import InvalidSpec, MusterError
from tasks.spec.evaluations import build_evaluation_spec
from tasks.spec.loading import load_resolved, parse_spec
from tasks.spec.start_from import RUN_ID_PATTERN
from tasks.train.background_work import BackgroundWork
from tasks.train.session import RunSession

_log = logging.getLogger(__name__)

#: Seconds between two searches for new checkpoints and ended evaluations.
_CHECK_EVERY_S = 5.0
#: Seconds between two searches for checkpoints in an object store such as S3. This interval is
#: longer than `_CHECK_EVERY_S`, because each request to the store may cost money.
_CHECK_STORE_EVERY_S = 30.0
#: Seconds between two checks whether the first attempt of the run has started.
_AWAIT_ATTEMPT_EVERY_S = 0.5
#: Time limit in seconds for the work on evaluations after the end of the training. Muster then
#: creates the last evaluations. After a cancelled training, it cancels all evaluations instead.
_END_TIMEOUT_S = 15.0
#: Longest wait in seconds, at the end of an evaluation, until the training's page in the Prefect UI
#: is updated.
_REPORT_TIMEOUT_S = 15.0
#: Largest number of figures in the message about the end of an evaluation. A figure is a number in
#: the result.
_MAX_SHOWN_FIGURES = 5
#: Prefix of a Prefect tag that the flow run of each evaluation has. The run id of the training
#: follows the prefix.
EVALUATION_TAG = "evaluation-of:"
#: Mapping from the final state of an evaluation's own run to the state of the evaluation in the
#: training's record.
_ENDINGS = {
    RunState.COMPLETED: EvaluationState.COMPLETED,
    RunState.FAILED: EvaluationState.FAILED,
    RunState.CANCELLED: EvaluationState.CANCELLED,
}

#: Function that opens a connection to the run's Prefect server.
Connect = Callable[[], AbstractContextManager[SyncPrefectClient]]


@contextmanager
def evaluate_checkpoints(
    run: RunSession, tags: Iterable[str], api_url: str | None
) -> Iterator[None]:
    """Evaluate the checkpoints of a run in the background while the context is open.

    Close the context after the run has its final state. Closing the context has these effects:

    - If the run was cancelled, the evaluations of the run are cancelled. Otherwise the last
      evaluations are created.
    - If the run itself evaluates a training, and this training has already ended, the end of the
      run is recorded in the files of the training.

    Args:
        run: The run.
        tags: Tags of the run's flow run.
        api_url: Address of the Prefect server. None if the server ends together with the run, so
            that no run can be queued on the server.
    """
    background = BackgroundWork()
    training_ids = [
        tag.removeprefix(EVALUATION_TAG) for tag in tags if tag.startswith(EVALUATION_TAG)
    ]
    if not run.spec.evals:
        try:
            yield
        finally:
            if training_ids and api_url and run.record.state.is_final:
                connect = partial(connect_to_server, api_url)
                background.start(
                    copy_context().run, report_late_evaluation, run, training_ids[0], connect
                )
                background.end(_REPORT_TIMEOUT_S)
        return
    evaluator = Evaluator(run, partial(connect_to_server, api_url) if api_url else None)
    # Run the thread with a copy of the context variables, because these variables contain the
    # credentials for the Prefect server.
    background.start(copy_context().run, evaluator.work, background)
    try:
        yield
    finally:
        background.end(_END_TIMEOUT_S)


def report_late_evaluation(run: RunSession, training_id: str, connect: Connect) -> None:
    """Record the end of an evaluation whose training has already ended.

    Also update the page of the training in the Prefect UI. If the training has not ended, do
    nothing: the training then records the end of the evaluation itself. Errors are logged.

    Args:
        run: The run of the evaluation, which has its final state.
        training_id: Run id of the training.
        connect: Function that opens a connection to the Prefect server.
    """
    if re.fullmatch(RUN_ID_PATTERN, training_id) is None:
        return
    place = RunPlace.of(training_id)
    try:
        record = RunJson.read(place.record)
        if not record.state.is_final:
            return
        with lock_evaluations(place):
            content = EvaluationsJson.read(place)
            own_id = str(run.flow_run_id)
            notes = [note for note in content.evaluations if note.flow_run_id == own_id]
            if not notes:
                return
            state = _ENDINGS[run.record.state]
            message = "" if state is EvaluationState.COMPLETED else run.verdict.message
            ended = notes[0].with_changes(state=state, run_id=run.run_id, message=run.mask(message))
            content.with_evaluation(ended).write(place)
        keep_best = load_resolved(place.spec).keep_best
        shown = show_evaluations(place, keep_best, time.time())
        if shown is not None:
            artifacts = Artifacts(UUID(record.flow_run_id), (EVALUATIONS,), run.mask)
            with connect() as client:
                artifacts.show(client, EVALUATIONS, shown)
    except (OSError, ValueError, MusterError) as error:
        _log.warning(
            "Muster could not update the evaluations of the training %s: %s", training_id, error
        )


class Evaluator:
    """Creates the evaluations of one run, and records their states.

    Only one thread uses this object.
    """

    def __init__(self, run: RunSession, connect: Connect | None) -> None:
        """
        Args:
            run: The run of the training.
            connect: Function that opens a connection to the Prefect server, or None if the run has
                only a temporary server.
        """
        self._run = run
        self._connect = connect
        #: Text of the last error. An error is logged only if its text has changed.
        self._last_error = ""

    def work(self, background: BackgroundWork) -> None:
        """Evaluate the checkpoints of the run until `background` signals the end of the run."""
        is_over = background.is_over
        while self._run.record.attempts == 0 and not is_over.wait(_AWAIT_ATTEMPT_EVERY_S):
            pass
        if self._connect is None:
            message = (
                "the checkpoints are not evaluated, because this run has only a temporary Prefect "
                "server. To start a lasting server, run `muster up`. Then set PREFECT_API_URL"
            )
            self._warn(message)
            return
        folders = [one.checkpoints or "" for one in self._run.spec.processes.values()]
        every_s = _CHECK_STORE_EVERY_S if any(map(is_url, folders)) else _CHECK_EVERY_S
        while not is_over.is_set():
            self.advance()
            is_over.wait(every_s)
        if self._run.record.state.is_final:
            self.advance()

    def advance(self) -> None:
        """Record the states of evaluations, and create evaluations for new checkpoints.

        Errors are logged. The next call repeats the failed steps.
        """
        try:
            with lock_evaluations(self._run.place):
                self._advance()
            self._last_error = ""
        except (OSError, ValueError, MusterError) as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                _log.warning(
                    "Muster could not start or read evaluations of run %s: %s",
                    self._run.run_id,
                    error,
                )
        except Exception as error:
            # A bug in Muster must not stop the evaluations of a long training.
            if repr(error) != self._last_error:
                self._last_error = repr(error)
                _log.exception(
                    "an error in Muster interrupted the evaluations of run %s", self._run.run_id
                )

    def _advance(self) -> None:
        """Do the work of `advance`, but raise errors instead of logging them.

        Raises:
            OSError, ValueError: A file or folder of the run cannot be read or written.
            MusterError: The Prefect server does not answer.
        """
        assert self._connect is not None
        run = self._run
        state = run.record.state
        content = EvaluationsJson.read(run.place)
        if state is RunState.CANCELLED:
            with self._connect() as client:
                self._cancel(client)
                self._update(client, content)
            return

        record = run.record.content
        judged = judge_checkpoints(
            run.spec,
            run.place,
            record.attempts,
            record.foreign_checkpoints,
            is_running=not state.is_final,
        )
        complete = [
            one.checkpoint for one in judged if one.checkpoint.is_complete and not one.why_foreign
        ]
        noted = add_checkpoints(content, complete, len(record.attempts))
        if noted != content or not run.place.evaluations.exists():
            # Write this file before any request to the Prefect server, so that the file is complete
            # even if the server does not answer. Otherwise, superfluous checkpoints could fill the
            # disk, because Muster does not delete a checkpoint that is missing in this file.
            noted.write(run.place)
        if any(one.state.is_active for one in noted.evaluations):
            with self._connect() as client:
                noted = self._update(client, noted)
        chosen = choose_evaluations(run.spec.evals, noted, is_last=state.is_final)
        for note in chosen:
            noted = noted.with_evaluation(note)
        if chosen:
            noted.write(run.place)
        for note in noted.evaluations:
            if note.state is EvaluationState.CHOSEN:
                # The name of the new run contains the number of the checkpoint. If this process is
                # killed now, the next process finds the run by its name and does not create a
                # second run.
                noted = noted.with_evaluation(self._begin(noted, note))
                noted.write(run.place)

    def _update(self, client: SyncPrefectClient, content: EvaluationsJson) -> EvaluationsJson:
        """Return the record with the present states of all evaluations that have not ended.

        Raises:
            MusterError: The Prefect server does not answer.
            OSError: The record cannot be written.
        """
        runs = {run.flow_run_id: run for run in list_stage_runs(client, self._run.flow_run_id)}
        changed = content
        for note in content.evaluations:
            if not note.flow_run_id or not note.state.is_active:
                continue
            new_note = self._describe(note, runs.get(note.flow_run_id))
            changed = changed.with_evaluation(new_note)
            checkpoint = content.find_checkpoint(note.checkpoint)
            if not new_note.state.is_active and checkpoint is not None:
                changed.write(self._run.place)
                self._report_end(new_note, checkpoint)
        if changed != content:
            changed.write(self._run.place)
        return changed

    def _describe(self, note: EvaluationNote, run: StageRun | None) -> EvaluationNote:
        """Return the record of an evaluation with its present state.

        Args:
            note: The record with the last known state.
            run: The run of the evaluation, or None if its flow run was deleted.
        """
        if run is None:
            message = "the flow run of the evaluation was deleted from the Prefect server"
            return note.with_changes(state=EvaluationState.FAILED, message=message)
        if run.ending is None:
            is_running = run.state in ("Running", "Cancelling")
            state = EvaluationState.RUNNING if is_running else EvaluationState.WAITING
            return note.with_changes(state=state, run_id=run.name)
        state = _ENDINGS[run.ending]
        message = "" if state is EvaluationState.COMPLETED else self._run.mask(run.message)
        if state is EvaluationState.COMPLETED:
            try:
                if not read_evaluation_figures(self._run.place, note.name, note.checkpoint):
                    path = locate_evaluation_result(self._run.place, note.name, note.checkpoint)
                    message = f"its program wrote no numbers to {path}"
            except InvalidResult as error:
                state = EvaluationState.FAILED
                message = self._run.mask(str(error))
        return note.with_changes(state=state, run_id=run.name, message=message)

    def _report_end(self, note: EvaluationNote, checkpoint: CheckpointNote) -> None:
        """Emit an event about the end of an evaluation. If it has failed, also emit a warning."""
        subject = _describe_evaluation(note, checkpoint)
        details = note.message
        if note.state is EvaluationState.COMPLETED and not details:
            figures = read_evaluation_figures(self._run.place, note.name, note.checkpoint)
            shown = list(figures.items())[:_MAX_SHOWN_FIGURES]
            details = ", ".join(f"{key or 'result'} {value:.6g}" for key, value in shown)
        self._emit(
            "evaluation.ended",
            evaluation=note.name,
            step=checkpoint.step,
            checkpoint=checkpoint.path,
            state=note.state.value,
            message=f"{subject}: {note.state.value}{': ' if details else ''}{details}",
        )
        if note.state is EvaluationState.FAILED:
            self._warn(f"the {subject} failed: {note.message}")

    def _begin(self, content: EvaluationsJson, note: EvaluationNote) -> EvaluationNote:
        """Create the run of an evaluation, and return the evaluation's record with the new state.

        Raises:
            MusterError: The Prefect server does not answer.
            OSError: The folder for the results cannot be created.
        """
        assert self._connect is not None
        run = self._run
        checkpoint = content.find_checkpoint(note.checkpoint)
        assert checkpoint is not None
        result = locate_evaluation_result(run.place, note.name, note.checkpoint)
        result.parent.mkdir(mode=0o700, exist_ok=True)
        values = {
            "checkpoint": checkpoint.path,
            "checkpoint.step": "" if checkpoint.step is None else str(checkpoint.step),
            "checkpoint.run_id": run.run_id,
            "checkpoint.run_dir": str(run.place.directory),
        }
        address = run.spec.ray.address if run.spec.ray is not None else None
        try:
            spec = build_evaluation_spec(
                run.spec.written(),
                note.name,
                values,
                result=str(result),
                ray_address=address or run.ray_address or None,
                code=run.spec.code,
            )
            with self._connect() as client:
                flow_run = create_child_run(
                    client,
                    run.flow_run_id,
                    _name_unit(note, checkpoint),
                    1,
                    spec=parse_spec(spec).to_server_data(),
                    tags=[*run.spec.tags, f"{EVALUATION_TAG}{run.run_id}"],
                )
        except ServerAway:
            raise
        except (CannotBegin, InvalidSpec) as error:
            message = run.mask(str(error))
            failed = note.with_changes(state=EvaluationState.FAILED, message=message)
            self._report_end(failed, checkpoint)
            return failed
        created = describe_stage_run(note.name, 1, flow_run)
        self._emit(
            "evaluation.queued",
            evaluation=note.name,
            step=checkpoint.step,
            checkpoint=checkpoint.path,
            flow_run_id=created.flow_run_id,
            message=f"{_describe_evaluation(note, checkpoint)}: queued",
        )
        return note.with_changes(
            state=EvaluationState.WAITING, flow_run_id=created.flow_run_id, run_id=created.name
        )

    def _cancel(self, client: SyncPrefectClient) -> None:
        """Cancel all evaluations of the run that have not ended.

        Raises:
            MusterError: The Prefect server does not answer.
        """
        for one in list_stage_runs(client, self._run.flow_run_id):
            if one.ending is None:
                flow_runs.cancel(
                    client,
                    UUID(one.flow_run_id),
                    "the training that wrote the evaluated checkpoint was cancelled",
                )

    def _warn(self, message: str) -> None:
        self._emit("run.warning", message=message)

    def _emit(self, name: str, **fields: object) -> None:
        """Emit an event of the run, unless the record of the run is already final."""
        if self._run.record.state.is_final:
            _log.info("%s: %s", name, fields)
        else:
            self._run.emit(name, **fields)


def _name_unit(note: EvaluationNote, checkpoint: CheckpointNote) -> str:
    """Return the name of the task run that shows an evaluation.

    The task run belongs to the flow run of the training. The name differs for each checkpoint, even
    if several checkpoints have the same step.
    """
    step = f"step-{checkpoint.step}-" if checkpoint.step is not None else ""
    return f"evaluate-{note.name}-{step}{note.checkpoint}"


def _describe_evaluation(note: EvaluationNote, checkpoint: CheckpointNote) -> str:
    """Return a phrase such as `evaluation math of step 20` for a message."""
    place = f"step {checkpoint.step}" if checkpoint.step is not None else checkpoint.path
    return f"evaluation {note.name} of {place}"
