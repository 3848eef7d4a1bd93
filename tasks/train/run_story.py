"""Summarize a run in text: its attempts, its first failure, its metrics and its use of time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from tasks.record.checkpoints import read_attempt_spec
from tasks.record.events import read_events
from tasks.show.lines import summarize_run
from tasks.show.slow import Slow, TimeSpent
from tasks.spec.errors import BadArgument
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.run import DEFAULT_READ_EVERY_S
from tasks.spec.values import is_number
from tasks.train.local_runs import list_attempts
from tasks.train.run_metrics import read_metrics
from tasks.train.run_records import find_record
from tasks.train.runs import ENDED_STATES, Run


def measure_time_use(run: Run) -> Slow | None:
    """Return how a run uses its time, according to its events and metrics on this machine.

    Returns:
        The use of time. None if the files are on another host, or do not contain enough data.
    """
    numbers = list_attempts(run.place)
    spec = read_attempt_spec(run.place, numbers[-1]) if numbers else {}
    every_s = mapping_or_empty(spec.get("progress")).get("every_s", DEFAULT_READ_EVERY_S)
    spent = TimeSpent(every_s if is_number(every_s) else DEFAULT_READ_EVERY_S)
    for number in numbers:
        for event in read_events(run.place.attempt(number).events):
            spent.observe(event)
    for index, row in enumerate(_read_available_metrics(run)):
        spent.take(index, row)
    return spent.slow


def tell_story(run: Run) -> str:
    """Return a short summary of a run, for a screen or for a prompt to a language model."""
    record = find_record(run)
    if record is None:
        return str(run)

    rows = _read_available_metrics(run)
    time_use = measure_time_use(run)
    sentences = time_use.sentences() if time_use is not None else ()
    lines: Iterable[str] = summarize_run(record, run.place, rows, sentences)

    if run.state not in ENDED_STATES and run.message:
        # Replace the first line, because its message comes from `run.json`. The message from the
        # server is newer.
        lines = chain([f"{run.run_id} is {run.state}: {run.brief}"], islice(lines, 1, None))
    return "\n".join(lines)


def _read_available_metrics(run: Run) -> list[dict[str, Any]]:
    """Return the metrics of a run, or an empty list if this machine has no metrics."""
    with suppress(BadArgument, OSError):
        return read_metrics(run)
    return []
