"""Read the metrics of a run that was found by name."""

from __future__ import annotations

from typing import Any

from tasks.record.checkpoints import read_attempt_spec
from tasks.record.metrics_of_run import merge_rows, read_rows
from tasks.record.run_json import AttemptRecord
from tasks.record.states import RunState
from tasks.spec.errors import BadArgument
from tasks.spec.placeholders import mapping_or_empty
from tasks.train.finding_runs import Run, read_local_record
from tasks.train.run_records import explain_missing_files, list_attempts


def read_metrics(run: Run) -> list[dict[str, Any]]:
    """Return the metrics of a run's training, one row per step, in the order of the steps.

    A row has the keys that the training wrote, and the key `attempt`: the number of the attempt
    that wrote the row. If several attempts reached a step, the row is from the last of them.

    Raises:
        BadArgument: The files of the run are on another host, or the run writes no metrics file.
    """
    numbers = list_attempts(run.place)
    if not numbers:
        raise BadArgument(explain_missing_files(run))
    record = read_local_record(run.run_id)
    recorded = {attempt.number: attempt for attempt in record.attempts} if record else {}

    attempts = []
    for number in numbers:
        spec = read_attempt_spec(run.place, number)
        if not spec:
            # The attempt has just begun, and its spec is not written yet.
            continue
        if not mapping_or_empty(spec.get("progress")).get("jsonl"):
            raise BadArgument(f"{run.run_id} has no metrics file: set progress.jsonl in its spec")
        unrecorded = AttemptRecord(number=number, state=RunState.RUNNING)
        attempts.append(recorded.get(number, unrecorded))
    return merge_rows(read_rows(run.place, attempts))
