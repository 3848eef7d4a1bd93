"""What a file of figures has, however it is written: the same for the verdict and the curve."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tasks.processes.progress import JsonlProgress
from tasks.record.growing import Mark, MetricsFile
from tasks.spec.probes import number_at


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(file: MetricsFile) -> list[float | None]:
    return [number_at(figures, "step") for figures in file.look()]


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_last_line_of_any_length_counts_with_and_without_its_end(path: Path, end: str) -> None:
    path.write_text('{"step": 1}\n{"more": "' + "x" * 10_000_000 + '", "step": 2}' + end)
    file = MetricsFile(path)

    found = steps(file)
    while file.is_behind:
        found += steps(file)

    assert found == [1, 2]


def test_only_what_was_added_is_read(path: Path) -> None:
    path.write_text('{"step": 1}\n{"st')
    file = MetricsFile(path)
    first = steps(file)
    with path.open("a") as f:
        f.write('ep": 2}\nnonsense\n[3]\n')

    assert (first, steps(file), steps(file)) == ([1], [2], [])


def test_a_file_that_was_replaced_by_a_longer_one_is_read_from_its_beginning(path: Path) -> None:
    path.write_text('{"step": 8}\n')
    file = MetricsFile(path)
    steps(file)
    other = path.with_name("other")
    other.write_text('{"step": 1}\n{"step": 2}\n')
    os.replace(other, path)

    assert (steps(file), file.begun) == ([1, 2], 1)


def test_a_file_that_was_truncated_is_read_from_its_beginning(path: Path) -> None:
    path.write_text('{"step": 7}\n{"step": 8}\n')
    file = MetricsFile(path)
    steps(file)
    path.write_text('{"step": 1}\n')

    assert (steps(file), file.begun) == ([1], 1)


@pytest.mark.parametrize("more", ["", '{"step": 3}\\n{"step": 4}\\n'])
def test_a_file_that_was_written_anew_is_read_from_its_beginning(path: Path, more: str) -> None:
    path.write_text('{"step": 1}\n')
    file = MetricsFile(path)
    steps(file)
    path.write_text('{"step": 2}\n' + more)

    assert (steps(file)[:1], file.begun) == ([2], 1)


def test_what_an_earlier_attempt_wrote_is_no_step_of_this_one(path: Path) -> None:
    path.write_text('{"step": 60}\n')
    progress = JsonlProgress(path, "step")

    before = asyncio.run(progress.step())
    with path.open("a") as f:
        f.write('{"step": 11}\n')

    assert (before, asyncio.run(progress.step())) == (None, 11)


def test_no_clock_hides_a_step(path: Path) -> None:
    progress = JsonlProgress(path, "step")
    path.write_text('{"step": 1}\n')
    os.utime(path, (0, 0))

    assert asyncio.run(progress.step()) == 1


@pytest.mark.parametrize("clock_s", [0, 4e9])
def test_an_attempt_that_is_adopted_has_the_steps_that_it_wrote_before(
    path: Path, clock_s: float
) -> None:
    path.write_text('{"step": 60}\n')
    before = Mark.model_validate(Mark.of(path).model_dump())
    os.utime(path, (clock_s, clock_s))
    of_another = asyncio.run(JsonlProgress(path, "step", before).step())

    with path.open("a") as f:
        f.write('{"step": 5}\n')
    os.utime(path, (clock_s, clock_s))

    assert (of_another, asyncio.run(JsonlProgress(path, "step", before).step())) == (None, 5)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_that_was_begun_anew_in_the_attempt_is_its_own(
    path: Path, is_replaced: bool
) -> None:
    path.write_text('{"step": 60}\n')
    before = Mark.of(path)

    if is_replaced:
        path.unlink()
    path.write_text('{"step": 1}\n{"step": 2}\n')

    assert asyncio.run(JsonlProgress(path, "step", before).step()) == 2


def test_steps_are_the_attempts_own_where_there_was_no_file_before(path: Path) -> None:
    before = Mark.of(path)
    path.write_text('{"step": 2}\n')

    assert asyncio.run(JsonlProgress(path, "step", before).step()) == 2


def test_a_number_is_told_as_it_was_written(path: Path) -> None:
    path.write_text('{"step": 60, "reward": 0.5}\n')

    [figures] = MetricsFile(path).look()

    assert [json.dumps(number_at(figures, key)) for key in ("step", "reward")] == ["60", "0.5"]
