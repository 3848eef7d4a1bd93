"""Read what completed runs of a pipeline have produced: results, checkpoints, and numbers.

The numbers are those that the key `best` of a stage compares. Each result and each number is read
only once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient

from tasks.pipeline.decision import StageRun
from tasks.pipeline.results import read_last_metric, read_result
from tasks.pipeline.server_requests import ServerRequests
from tasks.pipeline.stage_specs import CannotBegin
from tasks.record.checkpoint_paths import CheckpointPath
from tasks.record.checkpoints import describe_stage_unrecognised, find_stage_checkpoint
from tasks.record.evaluation_rules import find_best_checkpoint
from tasks.record.evaluations import (
    EvaluatedCheckpoint,
    EvaluationsJson,
    read_evaluated_checkpoints,
)
from tasks.record.places import RunPlace
from tasks.record.result_file import InvalidResult
from tasks.record.states import RunState
from tasks.server.flow_runs import read_flow_runs
from tasks.spec.matrix import Best
from tasks.spec.pipeline import Stage
from tasks.spec.probes import get_number
from tasks.spec.run import RunSpec
from tasks.spec.secrets import mask_text

_log = logging.getLogger(__name__)


class RunResults:
    """Reads the results and checkpoints of a pipeline's completed runs.

    The class also reads the numbers that decide which run of a parameter sweep is best.
    """

    def __init__(self, requests: ServerRequests, secrets: Collection[str]) -> None:
        """
        Args:
            requests: Connection to the Prefect server.
            secrets: Secret values that are masked in results.
        """
        self._requests = requests
        self._secrets = frozenset(secrets)
        #: Mapping from the id of a flow run to the result of its completed step. A step is a stage
        #: that runs a function or a command. If the result is missing or invalid, the value is an
        #: exception with the reason.
        self._results: dict[str, Any] = {}
        #: Mapping from the flow run id of an ended run in a parameter sweep to the number that
        #: decides which run is best. None if the number is unknown.
        self._figures: dict[str, float | None] = {}
        #: Flow run ids of the completed runs whose evaluations have ended. These evaluations do not
        #: change any more.
        self._evaluated: set[str] = set()

    def add_secrets(self, secrets: Collection[str]) -> None:
        """Mask further secret values in the results that are read from now on."""
        self._secrets |= frozenset(secrets)

    def check_result(self, stage: Stage, run: StageRun) -> StageRun:
        """Return a run after a check of its result.

        - A completed step (a function or a command) without a usable result becomes Failed.
        - A completed run whose evaluations are compared by `best` gets `awaits_evaluations=True`
          until all evaluations of the run have ended.

        Any other run is returned unchanged.

        Args:
            stage: The stage of the run.
            run: The run.
        """
        if run.ending is RunState.COMPLETED and stage.best_evaluation:
            return replace(run, awaits_evaluations=self._awaits_evaluations(stage, run))
        if run.ending is not RunState.COMPLETED or not stage.is_step:
            return run
        if run.flow_run_id not in self._results:
            try:
                self._results[run.flow_run_id] = read_result(
                    RunPlace.of(run.name),
                    is_required=stage.call is not None,
                    mask=partial(mask_text, secret_values=self._secrets),
                )
            except InvalidResult as error:
                self._results[run.flow_run_id] = error
        result = self._results[run.flow_run_id]
        if isinstance(result, InvalidResult):
            message = f"USER_ERROR: {result}"
            return replace(run, state="Failed", message=message, ending=RunState.FAILED)
        return run

    def result(self, run: StageRun) -> Any:
        """Return the result of a completed step. `check_result` must have read the result."""
        return self._results[run.flow_run_id]

    def _awaits_evaluations(self, stage: Stage, run: StageRun) -> bool:
        """Return True if an evaluation of a completed run has not ended.

        The method also asks the Prefect server, because the states of the evaluations in the run's
        directory may be outdated.

        Args:
            stage: The stage of the run. Its key `best` names the evaluation.
            run: The completed run.
        """
        if run.flow_run_id in self._evaluated:
            return False
        try:
            notes = EvaluationsJson.read(RunPlace.of(run.name)).evaluations
        except (OSError, ValueError) as error:
            _log.warning("The evaluations of the run %s cannot be read: %s", run.name, error)
            return False
        active_ids = [
            note.flow_run_id
            for note in notes
            if note.name == stage.best_evaluation and note.state.is_active and note.flow_run_id
        ]
        if active_ids:
            flow_runs = self._requests.ask(
                lambda client: [*read_flow_runs(client, {"id": {"any_": active_ids}})]
            )
            if any(one.state is None or not one.state.is_final() for one in flow_runs):
                return True
        self._evaluated.add(run.flow_run_id)
        return False

    def figure(self, stage: Stage, run: StageRun, best: Best) -> float | None:
        """Return the number by which a run is compared with other runs, or None if unknown.

        For a step (a function or a command), this is a number in the result. For a training, this
        is the last value of a metric, or the best value of a number in the evaluations.

        Args:
            stage: The stage of the run.
            run: A run that has completed or was stopped early.
            best: The key `best` of the stage. All calls for the same run must use the same value.
        """
        if run.awaits_evaluations:
            return self._read_figure(stage, run, best)
        if run.flow_run_id not in self._figures:
            self._figures[run.flow_run_id] = self._read_figure(stage, run, best)
        return self._figures[run.flow_run_id]

    def _read_figure(self, stage: Stage, run: StageRun, best: Best) -> float | None:
        if stage.is_step:
            return get_number(self.result(run), best.by)
        if stage.best_evaluation:
            evaluated = _find_best_evaluated(run, best)
            return evaluated.figure(best.by) if evaluated is not None else None
        try:
            return read_last_metric(RunPlace.of(run.name), best.by)
        except (OSError, ValueError) as error:
            _log.warning("The metrics of the run %s cannot be read: %s", run.name, error)
            return None

    def checkpoint(self, stage: Stage, run: StageRun) -> str:
        """Return the path of the checkpoint of a completed run.

        If the stage's key `best` names a number in the results of an evaluation, and the stage has
        no key `checkpoint`, the result is the checkpoint with the best value of this number.

        Raises:
            CannotBegin: No checkpoint was found on this host, or the folder of the checkpoints
                cannot be read.
        """
        if stage.best is not None and stage.best_evaluation and stage.checkpoint is None:
            evaluated = _find_best_evaluated(run, stage.best)
            if evaluated is not None:
                return evaluated.checkpoint.path
        try:
            checkpoint = self._requests.ask(lambda client: _find_checkpoint(client, stage, run))
        except OSError as error:
            raise CannotBegin(
                f"Stage {run.stage} has completed, but its checkpoints cannot be read: {error}"
            ) from error
        if checkpoint is not None:
            return str(checkpoint)
        raise CannotBegin(self._requests.ask(lambda client: _explain_missing(client, stage, run)))


def _find_best_evaluated(run: StageRun, best: Best) -> EvaluatedCheckpoint | None:
    """Return the best checkpoint of a run, compared by a number in the results of an evaluation.

    Args:
        run: The run.
        best: The key `best` of the stage, which names the number.

    Returns:
        The evaluation of the checkpoint. None if no evaluation has the number, or if the record of
        the evaluations cannot be read.
    """
    try:
        return find_best_checkpoint(best, read_evaluated_checkpoints(RunPlace.of(run.name)))
    except (OSError, ValueError) as error:
        _log.warning("The evaluations of the run %s cannot be read: %s", run.name, error)
        return None


def _find_checkpoint(
    client: SyncPrefectClient, stage: Stage, run: StageRun
) -> CheckpointPath | None:
    """Return the path of a completed run's checkpoint, or None if the run has no checkpoint."""
    return find_stage_checkpoint(stage.checkpoint, _read_spec(client, run), RunPlace.of(run.name))


def _explain_missing(client: SyncPrefectClient, stage: Stage, run: StageRun) -> str:
    """Return a message about a completed run in which no checkpoint was found."""
    place = RunPlace.of(run.name)
    message = (
        f"Stage {run.stage} has completed, but Muster found no checkpoint of its run in "
        f"{place.directory}. "
    )
    spec = _read_spec(client, run)
    if unrecognised := describe_stage_unrecognised(stage.checkpoint, spec, place):
        return f"{message}{unrecognised}."
    return (
        f"{message}Make sure that this host can read this directory. Also check the path of the "
        "checkpoints: `checkpoints` in the run spec, or `checkpoint` in the stage."
    )


def _read_spec(client: SyncPrefectClient, run: StageRun) -> RunSpec:
    """Return the spec with which a run was started.

    The pipeline's spec may have changed since then.
    """
    return RunSpec.model_validate(
        client.read_flow_run(UUID(run.flow_run_id)).parameters.get("spec")
    )
