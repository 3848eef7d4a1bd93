"""Read the metrics of a run that was found by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.processes.place_reader import PlaceReader, PlaceTimeout
from tasks.record.checkpoints import read_attempt_spec
from tasks.record.evaluations import list_evaluation_rows
from tasks.record.metrics_of_run import DEFAULT_STEP_KEY, find_metrics_file, merge_rows, read_rows
from tasks.record.run_json import AttemptRecord
from tasks.record.states import RunState
from tasks.spec.errors import BadArgument
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.probes import get_step
from tasks.train.local_runs import list_attempts, read_local_record
from tasks.train.run_records import explain_missing_files
from tasks.train.runs import Run

#: Longest wait in seconds for the file system of a metrics file.
_ANSWERS_WITHIN_S = 5.0


def require_answer(path: Path) -> None:
    """Raise BadArgument if the file system of a file does not answer within five seconds."""

    def read_first_byte() -> None:
        with suppress(OSError), path.open("rb") as file:
            file.read(1)

    try:
        PlaceReader(path).ask_blocking(read_first_byte, _ANSWERS_WITHIN_S)
    except PlaceTimeout as error:
        raise BadArgument(str(error)) from error


def read_metrics(run: Run) -> list[dict[str, Any]]:
    """Return the metrics of a run's training, one row per step, in the order of the steps.

    A row contains:

    - the keys that the training wrote
    - the key `attempt` with the number of the attempt that wrote the row
    - the results of evaluations of the checkpoint with this step, such as `math.accuracy`

    If several attempts reached a step, the row of the last attempt is returned.

    Raises:
        BadArgument: The files of the run are on another host, or the file system of the metrics
            does not answer. Also raised if the run has neither a metrics file nor evaluations.
    """
    numbers = list_attempts(run.place)
    if not numbers:
        raise BadArgument(explain_missing_files(run))
    record = read_local_record(run.run_id)
    recorded = {attempt.number: attempt for attempt in record.attempts} if record else {}

    try:
        figures = list_evaluation_rows(run.place)
    except (OSError, ValueError) as error:
        raise BadArgument(f"the evaluations of {run.run_id} cannot be read: {error}") from error
    attempts = []
    step_key = DEFAULT_STEP_KEY
    for number in numbers:
        spec = read_attempt_spec(run.place, number)
        if not spec:
            # Skip an attempt that has just started, because it has no spec and no metrics yet.
            continue
        if not mapping_or_empty(spec.get("progress")).get("jsonl"):
            if spec.get("evals"):
                continue
            raise BadArgument(
                f"{run.run_id} has no metrics file, because its spec does not set the key "
                "`progress.jsonl`. Set this key for the next run"
            )
        unrecorded = AttemptRecord(number=number, state=RunState.RUNNING)
        attempts.append(recorded.get(number, unrecorded))
        path, step_key = find_metrics_file(spec, run.place.attempt(number))
        require_answer(path)
    rows = merge_rows(read_rows(run.place, attempts))
    return _add_figures(rows, figures, step_key)


def _add_figures(
    rows: Sequence[dict[str, Any]], figures: Sequence[dict[str, Any]], step_key: str
) -> list[dict[str, Any]]:
    """Return the metrics of a training together with the results of its evaluations.

    A number in the result of an evaluation never replaces a metric that the training wrote under
    the same key.

    Args:
        rows: The rows that the training wrote, one row per step.
        figures: The rows with the evaluations' results, see `list_evaluation_rows`.
        step_key: Key of the step in the rows of the training.
    """
    by_step = {get_step(row, step_key): row for row in rows}
    for row in figures:
        step = row["step"]
        own = {step_key: step, **{key: row[key] for key in row if key != "step"}}
        by_step[step] = {**own, **by_step.get(step, {})}
    return [by_step[step] for step in sorted(by_step, key=lambda step: step or 0)]
