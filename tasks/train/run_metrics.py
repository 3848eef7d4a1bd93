"""Read the metrics that the training of a run wrote, over all attempts of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.record.checkpoints import read_attempt_spec
from tasks.record.metrics_file import MetricsFile
from tasks.spec.errors import BadArgument
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.probes import get_number
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
    attempts = record.attempts if record is not None else ()
    # Fingerprint of the metrics file at the start of each attempt, by number of the attempt.
    files_at_start = {attempt.number: attempt.metrics for attempt in attempts}

    rows: dict[float, dict[str, Any]] = {}
    for number in numbers:
        spec = read_attempt_spec(run.place, number)
        if not spec:
            # The attempt has just begun, and its spec is not written yet.
            continue
        progress = mapping_or_empty(spec.get("progress"))
        name = progress.get("jsonl")
        if not name:
            raise BadArgument(f"{run.run_id} has no metrics file: set progress.jsonl in its spec")
        path = Path(str(spec.get("cwd", "."))) / name
        for row in _read_all(MetricsFile(path, since=files_at_start.get(number))):
            step = get_number(row, str(progress["step"]))
            if step is None:
                continue
            # A training may write several lines for one step. Merge the lines that one attempt
            # wrote for a step.
            merged = rows.get(step, {})
            if merged.get("attempt") != number:
                merged = {}
            rows[step] = {**merged, **row, "attempt": number}
    return [rows[step] for step in sorted(rows)]


def _read_all(file: MetricsFile) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file, which is read in parts of limited size."""
    while (rows := file.read_new()) or file.has_more:
        yield from rows
