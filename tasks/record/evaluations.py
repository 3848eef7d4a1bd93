"""The record of a run's evaluations, `evaluations.json`, and their figures.

The flow process of the training owns the file. Each evaluation is a separate run, and writes its
result to a file in the directory of the training's run. The *figures* of an evaluation are the
numbers in its result. They are read from the file with the result. Therefore they are known even if
the evaluation ends after the training.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tasks.record.disk import json_text, replace_file
from tasks.record.outcome import Recorded
from tasks.record.places import RunPlace, read_own_file
from tasks.record.result_file import InvalidResult, list_figures, read_result_file


class EvaluationState(Enum):
    """State of the evaluation of one checkpoint."""

    #: The evaluation will be started, but its run is not created yet.
    CHOSEN = "chosen"
    #: The run of the evaluation is waiting in the queue or is starting.
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: The checkpoint is never evaluated, because a newer checkpoint is evaluated instead.
    SKIPPED = "skipped"

    @property
    def is_active(self) -> bool:
        """True if the evaluation has not ended and so still needs the checkpoint."""
        return self in (EvaluationState.CHOSEN, EvaluationState.WAITING, EvaluationState.RUNNING)


class CheckpointNote(Recorded):
    """A complete checkpoint of the run."""

    #: Number of the checkpoint. The complete checkpoints of a run are numbered from 1.
    number: int
    #: Absolute path or URL of the checkpoint.
    path: str
    #: Training step of the checkpoint, or None if unknown.
    step: int | None = None
    #: Hash of the checkpoint's files, see `Checkpoint.signature`.
    signature: str = ""
    #: Number of the attempt during which the checkpoint became complete.
    attempt: int = 0


class EvaluationNote(Recorded):
    """One evaluation of one checkpoint."""

    #: Name of the evaluation in the run spec.
    name: str
    #: Number of the checkpoint, see `CheckpointNote.number`.
    checkpoint: int
    state: EvaluationState = EvaluationState.CHOSEN
    #: Prefect id of the evaluation's flow run. Empty if the flow run was not created.
    flow_run_id: str = ""
    #: Name of the evaluation's flow run. After the evaluation has started, this name is also the
    #: run id of the evaluation.
    run_id: str = ""
    #: Message about the state, such as the cause of a failure. May be empty.
    message: str = ""


class EvaluationsJson(Recorded):
    """Content of `evaluations.json`, which records the evaluations of a run's checkpoints."""

    #: The complete checkpoints in the order in which they became complete.
    checkpoints: tuple[CheckpointNote, ...] = ()
    #: The evaluations in the order in which they were chosen.
    evaluations: tuple[EvaluationNote, ...] = ()

    @staticmethod
    def read(place: RunPlace) -> EvaluationsJson:
        """Return the record of a run's evaluations. The record is empty if the file does not exist.

        Raises:
            OSError: The file cannot be read.
            ValueError: The content of the file is not valid.
        """
        try:
            return EvaluationsJson.model_validate_json(read_own_file(place.evaluations))
        except FileNotFoundError:
            return EvaluationsJson()

    def write(self, place: RunPlace) -> None:
        """Write the record to `evaluations.json`, which is replaced atomically.

        Raises:
            OSError: The file cannot be written.
        """
        replace_file(place.evaluations, json_text(self.as_json()))

    def find_checkpoint(self, number: int) -> CheckpointNote | None:
        """Return the checkpoint with the given number, or None if it is not in the record."""
        return next((one for one in self.checkpoints if one.number == number), None)

    @property
    def current_numbers(self) -> frozenset[int]:
        """Numbers of the checkpoints that are still stored at their path.

        A newer checkpoint at the same path replaces an older checkpoint.
        """
        return frozenset({one.path: one.number for one in self.checkpoints}.values())

    def with_evaluation(self, changed: EvaluationNote) -> EvaluationsJson:
        """Return the record with a new evaluation, or with a changed evaluation."""
        key = (changed.name, changed.checkpoint)
        keys = [(one.name, one.checkpoint) for one in self.evaluations]
        if key not in keys:
            return self.with_changes(evaluations=(*self.evaluations, changed))
        evaluations = [*self.evaluations]
        evaluations[keys.index(key)] = changed
        return self.with_changes(evaluations=tuple(evaluations))


@contextmanager
def lock_evaluations(place: RunPlace) -> Iterator[None]:
    """Hold the lock of a run's `evaluations.json` while the context is open.

    The training and its evaluations write to the same file, so each of them takes the lock first.
    On a file system without file locks, one writer may overwrite a state that another
    writer has just changed. Results are not lost, because each evaluation has its own result file.

    Raises:
        OSError: The lock file cannot be opened.
    """
    path = place.evaluations.with_suffix(".lock")
    with open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def locate_evaluation_result(place: RunPlace, name: str, checkpoint: int) -> Path:
    """Return the path of the file into which an evaluation writes its result.

    Args:
        place: Directory of the training's run.
        name: Name of the evaluation.
        checkpoint: Number of the checkpoint.
    """
    return place.evaluations.with_suffix("") / f"{name}-{checkpoint}.json"


def read_evaluation_figures(place: RunPlace, name: str, checkpoint: int) -> dict[str, float]:
    """Return the numbers in the result of an evaluation, as a mapping from their dotted keys.

    Args:
        place: Directory of the training's run.
        name: Name of the evaluation.
        checkpoint: Number of the checkpoint.

    Raises:
        InvalidResult: The result file is missing or not valid.
    """
    try:
        return list_figures(read_result_file(locate_evaluation_result(place, name, checkpoint)))
    except FileNotFoundError:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedCheckpoint:
    """An evaluation of a checkpoint, together with the numbers in the evaluation's result."""

    evaluation: EvaluationNote
    checkpoint: CheckpointNote
    #: Mapping from dotted keys to the numbers in the result of the evaluation. Empty if the
    #: evaluation has not written a result yet.
    figures: dict[str, float]
    #: True if the checkpoint was not replaced by a newer checkpoint at the same path.
    is_current: bool

    @property
    def state(self) -> EvaluationState:
        """State of the evaluation: COMPLETED if a result exists, otherwise the recorded state.

        The recorded state may be outdated, because only the flow process of the training records
        states. If an evaluation ends after the exit of the flow process, the evaluation may still
        be recorded as waiting or running.
        """
        if self.evaluation.state.is_active and self.figures:
            return EvaluationState.COMPLETED
        return self.evaluation.state

    def figure(self, by: str) -> float | None:
        """Return one number from the evaluation's result, or None if the result has no such number.

        Args:
            by: Name of the number, `EVALUATION.KEY`, such as `math.accuracy`. If EVALUATION is the
                name of another evaluation, the result is None.
        """
        name, _, key = by.partition(".")
        return self.figures.get(key) if name == self.evaluation.name else None

    def list_named_figures(self) -> dict[str, float]:
        """Return a mapping from names such as `math.accuracy` to the numbers of the result."""
        name = self.evaluation.name
        return {f"{name}.{key}" if key else name: value for key, value in self.figures.items()}


def read_evaluated_checkpoints(
    place: RunPlace, content: EvaluationsJson | None = None
) -> list[EvaluatedCheckpoint]:
    """Return the evaluations of a training run, with their results, in the recorded order.

    If an evaluation has no valid result, its `figures` are empty.

    Args:
        place: Directory of the training run.
        content: The record of the evaluations. If None, the file is read.

    Raises:
        OSError: The record of the evaluations cannot be read.
        ValueError: The record of the evaluations is not valid.
    """
    content = content or EvaluationsJson.read(place)
    return [*_join_figures(place, content)]


def _join_figures(place: RunPlace, content: EvaluationsJson) -> Iterator[EvaluatedCheckpoint]:
    checkpoints = {one.number: one for one in content.checkpoints}
    current = content.current_numbers
    for evaluation in content.evaluations:
        checkpoint = checkpoints.get(evaluation.checkpoint)
        if checkpoint is None:
            continue
        figures: dict[str, float] = {}
        if evaluation.state not in (EvaluationState.CHOSEN, EvaluationState.SKIPPED):
            with suppress(InvalidResult):
                figures = read_evaluation_figures(place, evaluation.name, checkpoint.number)
        yield EvaluatedCheckpoint(
            evaluation=evaluation,
            checkpoint=checkpoint,
            figures=figures,
            is_current=checkpoint.number in current,
        )


def list_evaluation_rows(place: RunPlace) -> list[dict[str, Any]]:
    """Return the results of a run's evaluations, with one mapping for each training step.

    Each mapping contains the step, the number of the attempt that saved the checkpoint, and results
    under names such as `math.accuracy`. If several checkpoints of a step were evaluated, the newest
    checkpoint is used.

    Raises:
        OSError: The record of the evaluations cannot be read.
        ValueError: The record of the evaluations is not valid.
    """
    rows: dict[int, dict[str, Any]] = {}
    for one in read_evaluated_checkpoints(place):
        step = one.checkpoint.step
        if step is None or not one.figures:
            continue
        row = rows.get(step, {})
        if row.get("checkpoint", 0) < one.checkpoint.number:
            row = {"attempt": one.checkpoint.attempt, "checkpoint": one.checkpoint.number}
        if row["checkpoint"] == one.checkpoint.number:
            rows[step] = {**row, **one.list_named_figures()}
    return [
        {"step": step, **{key: value for key, value in row.items() if key != "checkpoint"}}
        for step, row in sorted(rows.items())
    ]


def read_evaluation_curve(place: RunPlace, by: str) -> dict[float, float]:
    """Return one result of a run's evaluations as a mapping from training steps to values.

    The steps are in ascending order.

    Args:
        place: Directory of the training's run.
        by: Name of the result, such as `math.accuracy`.

    Raises:
        OSError: The record of the evaluations cannot be read.
        ValueError: The record of the evaluations is not valid.
    """
    return {float(row["step"]): row[by] for row in list_evaluation_rows(place) if by in row}
