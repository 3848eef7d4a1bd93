"""Read the metrics that the training of a run wrote, over all attempts of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.record.checkpoints import read_attempt_spec
from tasks.record.last_objects import read_last_objects
from tasks.record.metrics_file import MetricsFile
from tasks.record.places import AttemptPlace, RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.probes import get_number, get_step

#: Key of the training step in each line of a metrics file. Used if the spec contains no other key.
DEFAULT_STEP_KEY = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """One line of a metrics file."""

    #: Number of the attempt that wrote the line.
    attempt: int
    step: float
    #: Mapping from the names of metrics to their values. A value may be a mapping with further
    #: metrics.
    metrics: Mapping[str, Any]


def find_metrics_file(spec: Mapping[str, Any], attempt: AttemptPlace) -> tuple[Path, str]:
    """Return the path of an attempt's metrics file, and the key of the training step in each line.

    If the spec does not contain a metrics file, the path is `metrics.jsonl` in the attempt's
    directory.

    Args:
        spec: The spec that the attempt stored in its directory. May be empty.
        attempt: Directory of the attempt.
    """
    progress = mapping_or_empty(spec.get("progress"))
    name = progress.get("jsonl")
    if not name:
        return attempt.directory / "metrics.jsonl", DEFAULT_STEP_KEY
    path = Path(str(spec.get("cwd", "."))) / str(name)
    return path, str(progress.get("step", DEFAULT_STEP_KEY))


def read_rows(place: RunPlace, attempts: Sequence[AttemptRecord]) -> Iterator[MetricsRow]:
    """Yield the lines of the metrics files, attempt by attempt. Lines without a step are skipped.

    If several attempts share a file, each line is yielded only for the attempt that wrote it.

    Args:
        place: Directory of the run.
        attempts: Attempts whose metrics are read.
    """
    for attempt in attempts:
        attempt_place = place.attempt(attempt.number)
        spec = read_attempt_spec(place, attempt.number)
        path, step_key = find_metrics_file(spec, attempt_place)
        file = MetricsFile(path, since=attempt.metrics)
        while (lines := file.read_new()) or file.has_more:
            for line in lines:
                step = get_step(line, step_key)
                if step is not None:
                    yield MetricsRow(attempt=attempt.number, step=step, metrics=line)
        file.close()


def read_last_step(place: RunPlace, attempt: int) -> float | None:
    """Return the last training step of an attempt, from the ends of its files.

    The step is in the event log, or in the metrics file if the trainer has written a later step
    after the last event.

    Args:
        place: Directory of the run.
        attempt: Number of the attempt.

    Returns:
        The step. None if the event log has no step, because the last line of the metrics file may
        then be from an earlier attempt.
    """
    attempt_place = place.attempt(attempt)
    events = read_last_objects(attempt_place.events)
    steps = (get_step(event, "step") for event in events if event.get("event") == "run.progress")
    observed_step = next((step for step in steps if step is not None), None)
    spec = read_attempt_spec(place, attempt)
    if observed_step is None or not mapping_or_empty(spec.get("progress")).get("jsonl"):
        return observed_step
    path, step_key = find_metrics_file(spec, attempt_place)
    steps = (get_step(line, step_key) for line in read_last_objects(path))
    written_step = next((step for step in steps if step is not None), observed_step)
    return max(observed_step, written_step)


class MetricReader:
    """Reads one metric of a run while the attempts of the run append to their files."""

    def __init__(self, place: RunPlace, key: str) -> None:
        """
        Args:
            place: Directory of the run.
            key: Dotted key of the metric in the lines of the metrics files.
        """
        self._place = place
        self._key = key
        #: Mapping from the number of an attempt to three values: the metrics file, the key of the
        #: step in each line, and a mapping from training steps to values of the metric.
        self._attempts: dict[int, tuple[MetricsFile, str, dict[float, float | None]]] = {}

    @property
    def values(self) -> dict[float, float]:
        """Mapping from training steps to finite values of the metric, sorted by step.

        If several attempts reached a step, the value comes from the last of these attempts.
        """
        merged: dict[float, float] = {}
        for number in sorted(self._attempts):
            _, _, values = self._attempts[number]
            merged |= {step: value for step, value in values.items() if value is not None}
        return dict(sorted(merged.items()))

    @property
    def last_step(self) -> float | None:
        """Highest training step in the lines that were read from the metrics files.

        Lines without a value of the metric count, too. None if no line with a step was read yet.
        """
        steps = [step for _, _, values in self._attempts.values() for step in values]
        return max(steps, default=None)

    def read_new(self) -> None:
        """Read the lines that were added since the last call. Lines without a step are skipped.

        Raises:
            OSError, ValueError: The record of the run cannot be read, for example because the run
                has not started yet.
        """
        for attempt in RunJson.read(self._place.record).attempts:
            if attempt.number not in self._attempts:
                spec = read_attempt_spec(self._place, attempt.number)
                if not spec:
                    # Skip an attempt that has just started and whose spec is not written yet.
                    continue
                path, step_key = find_metrics_file(spec, self._place.attempt(attempt.number))
                file = MetricsFile(path, since=attempt.metrics)
                self._attempts[attempt.number] = (file, step_key, {})
            self._read_attempt(*self._attempts[attempt.number])

    def _read_attempt(
        self, file: MetricsFile, step_key: str, values: dict[float, float | None]
    ) -> None:
        """Add the new lines of an attempt's metrics file to the values of the attempt."""
        restarts = file.restarts
        while (lines := file.read_new()) or file.has_more:
            if file.restarts != restarts:
                restarts = file.restarts
                values.clear()
            for line in lines:
                step = get_step(line, step_key)
                if step is not None:
                    value = get_number(line, self._key)
                    values[step] = values.get(step) if value is None else value
        # Close the metrics file until the next call. Otherwise, a caller that reads many runs could
        # exceed the limit on open files.
        file.close()


def merge_rows(rows: Iterator[MetricsRow]) -> list[dict[str, Any]]:
    """Return one mapping per training step, in the order of the steps.

    Each mapping contains the metrics, and the key `attempt` with the number of the attempt that
    wrote them. If several attempts reached a step, the metrics come from the last of these
    attempts. Lines of the same attempt and step are merged.
    """
    merged: dict[float, dict[str, Any]] = {}
    for row in rows:
        earlier = merged.get(row.step, {})
        if earlier.get("attempt") != row.attempt:
            earlier = {}
        merged[row.step] = {**earlier, **row.metrics, "attempt": row.attempt}
    return [merged[step] for step in sorted(merged)]
