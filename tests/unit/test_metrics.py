"""Tests of reading a metrics file while a training writes it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tasks.processes.progress import JsonlProgress
from tasks.record.metrics_file import FileFingerprint, MetricsFile
from tasks.record.metrics_of_run import MetricReader
from tasks.record.places import RunPlace
from tasks.spec.probes import get_number


@pytest.fixture
def run(tmp_path: Path) -> RunPlace:
    """Return the directory of a run with two attempts that share a metrics file."""
    place = RunPlace(directory=tmp_path / "run")
    progress = {"jsonl": str(tmp_path / "metrics.jsonl"), "step": "step"}
    for number in (1, 2):
        attempt = place.attempt(number).directory
        attempt.mkdir(parents=True)
        (attempt / "spec.yaml").write_text(json.dumps({"progress": progress}))
    write_record(place, 1)
    return place


def write_record(place: RunPlace, *attempts: int) -> None:
    """Write the record of an active run. `attempts` are the numbers of its attempts."""
    record = {"run_id": "a", "state": "running", "started_at": 1.0}
    record["attempts"] = [{"number": number, "state": "running"} for number in attempts]
    place.record.write_text(json.dumps(record))


def test_metric_of_a_running_run_is_read_by_step(run: RunPlace, path: Path) -> None:
    reader = MetricReader(run, "a.reward")
    reader.read_new()
    before = (reader.values, reader.last_step)
    path.write_text('{"step": 2, "a": {"reward": 5}}\n{"step": 1, "a": {"reward": 4}}\n{"x": 1}\n')
    reader.read_new()
    first = reader.values

    with path.open("a") as file:
        file.write('{"step": 2, "loss": 1}\n{"step": 3, "a": {"reward": NaN}}\n')
    reader.read_new()

    assert before == ({}, None)
    assert [*first.items()] == [(1, 4), (2, 5)]
    assert (reader.values, reader.last_step) == ({1: 4, 2: 5}, 3)


def test_metric_of_the_last_attempt_counts(run: RunPlace, path: Path) -> None:
    reader = MetricReader(run, "reward")
    path.write_text('{"step": 1, "reward": 1}\n{"step": 2, "reward": 2}\n')
    reader.read_new()
    path.write_text('{"step": 2, "reward": 7}\n')
    write_record(run, 1, 2)

    reader.read_new()

    assert reader.values == {2: 7}


def test_metric_of_a_run_that_has_not_begun_cannot_be_read(tmp_path: Path) -> None:
    reader = MetricReader(RunPlace(directory=tmp_path / "none"), "reward")

    with pytest.raises(FileNotFoundError):
        reader.read_new()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(file: MetricsFile) -> list[float | None]:
    """Read the new lines of a metrics file and return their steps."""
    return [get_number(figures, "step") for figures in file.read_new()]


@pytest.mark.parametrize("end", ["\n", ""])
def test_last_line_counts_with_and_without_newline(path: Path, end: str) -> None:
    path.write_text('{"step": 1}\n{"more": "' + "x" * 10_000_000 + '", "step": 2}' + end)
    file = MetricsFile(path)

    read_steps = steps(file)
    while file.has_more:
        read_steps += steps(file)

    assert read_steps == [1, 2]


def test_second_read_returns_only_new_lines(path: Path) -> None:
    path.write_text('{"step": 1}\n{"st')
    file = MetricsFile(path)
    first = steps(file)
    with path.open("a") as f:
        f.write('ep": 2}\nnonsense\n[3]\n')

    second = steps(file)
    third = steps(file)

    assert (first, second, third) == ([1], [2], [])


def test_longer_replacement_is_read_from_its_beginning(path: Path) -> None:
    path.write_text('{"step": 8}\n')
    file = MetricsFile(path)
    steps(file)
    other = path.with_name("other")
    other.write_text('{"step": 1}\n{"step": 2}\n')
    os.replace(other, path)

    assert (steps(file), file.restarts) == ([1, 2], 1)


def test_truncated_file_is_read_from_its_beginning(path: Path) -> None:
    path.write_text('{"step": 7}\n{"step": 8}\n')
    file = MetricsFile(path)
    steps(file)
    path.write_text('{"step": 1}\n')

    assert (steps(file), file.restarts) == ([1], 1)


@pytest.mark.parametrize("more", ["", '{"step": 3}\\n{"step": 4}\\n'])
def test_rewritten_file_is_read_from_its_beginning(path: Path, more: str) -> None:
    path.write_text('{"step": 1}\n')
    file = MetricsFile(path)
    steps(file)
    path.write_text('{"step": 2}\n' + more)

    assert (steps(file)[:1], file.restarts) == ([2], 1)


def test_steps_of_earlier_attempts_are_not_counted(path: Path) -> None:
    path.write_text('{"step": 60}\n')
    progress = JsonlProgress(path, "step")

    step_before = asyncio.run(progress.step())
    with path.open("a") as f:
        f.write('{"step": 11}\n')

    step_after = asyncio.run(progress.step())

    assert (step_before, step_after) == (None, 11)


def test_modification_time_does_not_matter(path: Path) -> None:
    progress = JsonlProgress(path, "step")
    path.write_text('{"step": 1}\n')
    os.utime(path, (0, 0))

    assert asyncio.run(progress.step()) == 1


@pytest.mark.parametrize("clock_s", [0, 4e9])
def test_adopted_attempt_keeps_its_earlier_steps(path: Path, clock_s: float) -> None:
    path.write_text('{"step": 60}\n')
    fingerprint = FileFingerprint.model_validate(FileFingerprint.of(path).model_dump())
    os.utime(path, (clock_s, clock_s))
    step_before = asyncio.run(JsonlProgress(path, "step", fingerprint).step())

    with path.open("a") as f:
        f.write('{"step": 5}\n')
    os.utime(path, (clock_s, clock_s))

    step_after = asyncio.run(JsonlProgress(path, "step", fingerprint).step())

    assert (step_before, step_after) == (None, 5)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_all_lines_of_a_file_rewritten_during_the_attempt_count(
    path: Path, is_replaced: bool
) -> None:
    path.write_text('{"step": 60}\n')
    fingerprint = FileFingerprint.of(path)

    if is_replaced:
        path.unlink()
    path.write_text('{"step": 1}\n{"step": 2}\n')

    assert asyncio.run(JsonlProgress(path, "step", fingerprint).step()) == 2


def test_all_lines_of_a_new_file_count(path: Path) -> None:
    fingerprint = FileFingerprint.of(path)
    path.write_text('{"step": 2}\n')

    assert asyncio.run(JsonlProgress(path, "step", fingerprint).step()) == 2


def test_numbers_keep_their_type(path: Path) -> None:
    path.write_text('{"step": 60, "reward": 0.5}\n')

    [figures] = MetricsFile(path).read_new()

    assert [json.dumps(get_number(figures, key)) for key in ("step", "reward")] == ["60", "0.5"]


@pytest.mark.parametrize("is_removed", [False, True])
def test_last_lines_of_a_rotated_metrics_file_are_read(path: Path, is_removed: bool) -> None:
    path.write_text('{"step": 1}\n')
    file = MetricsFile(path)
    steps_before = steps(file)
    with path.open("a") as f:
        f.write('{"step": 2}\n')

    path.unlink() if is_removed else path.rename(path.with_suffix(".1"))
    path.write_text('{"step": 3}\n')
    steps_after = [*steps(file), *steps(file)]

    assert (steps_before, steps_after, file.restarts) == ([1], [2, 3], 1)
