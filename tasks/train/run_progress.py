"""Read the current training step and the last reward or loss of runs, for `muster ls`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tasks.processes.place_reader import PlaceReader, PlaceTimeout
from tasks.record.checkpoints import read_attempt_spec
from tasks.record.last_objects import read_last_objects
from tasks.record.metrics_of_run import find_metrics_file
from tasks.show.facts_of_run import format_step
from tasks.show.page import find_step
from tasks.show.pictures import list_curve_metrics
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.values import is_number
from tasks.spec.watch import find_metric
from tasks.train.local_runs import list_attempts, read_local_record
from tasks.train.runs import Run
from tasks.train.server_imports import import_server_runs
from tasks.train.server_url import may_have_prefect_server


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Training step and metric that `muster ls` shows for a run."""

    #: Last training step that the run reported. None if unknown.
    step: float | None = None
    #: Training step at which the training is complete. None if unknown.
    total: float | None = None
    #: Name of the reward. If the training has no reward, the name of the loss. Empty if there is
    #: neither a reward nor a loss, or if the files of the run are on another host.
    metric: str = ""
    #: Last value of `metric`. None if unknown or not finite.
    value: float | None = None

    @property
    def step_text(self) -> str:
        """Training step as text for the user, such as `12/60`, or an empty string if unknown."""
        if self.step is None:
            return ""
        return format_step(self.step, self.total).removeprefix("step ").replace(" of ", "/")

    @property
    def metric_text(self) -> str:
        """Metric as text for the user, such as `reward 0.83`, or an empty string if unknown."""
        return "" if self.value is None else f"{self.metric} {self.value:.4g}"


def read_progress(runs: Sequence[Run]) -> dict[str, RunProgress]:
    """Return a mapping from run ids to the training step and metric of each run.

    For runs on this machine, step and metric are read from files. For other runs, only the steps
    are read, with one request to the Prefect server for all runs.
    """
    progress: dict[str, RunProgress] = {}
    remote_runs = []
    for run in runs:
        if list_attempts(run.place) and not run.is_on_another_host:
            progress[run.run_id] = _read_local_progress(run)
        elif run.flow_run_id and run.started_at is not None:
            remote_runs.append(run)
    if remote_runs and may_have_prefect_server():
        for run_id, summary in import_server_runs().read_summaries(remote_runs).items():
            if (step_and_total := find_step(summary)) is not None:
                step, total = step_and_total
                progress[run_id] = RunProgress(step=step, total=total)
    return progress


def _read_local_progress(run: Run) -> RunProgress:
    """Return the last training step and the last metric of a run from its files on this machine."""
    number = list_attempts(run.place)[-1]
    place = run.place.attempt(number)
    spec = read_attempt_spec(run.place, number)
    total = mapping_or_empty(spec.get("progress")).get("total")

    step = _find_last_step(place.events)
    record = read_local_record(run.run_id)
    attempt = record.attempt if record is not None else None
    if attempt is not None:
        # After SIGKILL of the flow process, Muster adds the last step of the metrics file to the
        # record, but not to the events.
        has_ended = attempt.number == number and attempt.state.is_final
        if step is None or (has_ended and step < (attempt.step or 0)):
            step = attempt.step

    path, _ = find_metrics_file(spec, place)
    metric, value = "", None
    curve_metrics = list_curve_metrics(spec.get("workload"))
    with suppress(PlaceTimeout):
        metric, value = PlaceReader(path).ask_blocking(
            partial(_find_last_metric, path, curve_metrics)
        )
    return RunProgress(
        step=step,
        total=float(total) if is_number(total) else None,
        metric=metric,
        value=value,
    )


def _find_last_step(events: Path) -> float | None:
    """Return the training step in the last event `run.progress` of an event log, or None."""
    for event in read_last_objects(events):
        if event.get("event") == "run.progress" and is_number(event.get("step")):
            return float(event["step"])
    return None


def _find_last_metric(path: Path, names: Sequence[str]) -> tuple[str, float | None]:
    """Return the name and the last value of a metric in a metrics file.

    Args:
        path: The metrics file. Only its last lines are read.
        names: Names of metrics. The first name that occurs in the file is used.

    Returns:
        The name and the value. The value is None if it is not finite. The name is empty if none of
        the metrics was found.
    """
    rows = list(read_last_objects(path))
    for name in names:
        for row in rows:
            metric = find_metric(row, [name])
            if metric is not None:
                value = metric[1]
                return name, value if math.isfinite(value) else None
    return "", None
