"""Tests of logs whose size on the disk has a bound: the beginning and the newest lines stay."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.processes.probes import LogProbe
from tasks.record.causes import find_cause, read_since_step
from tasks.record.log_bound import LogBound
from tasks.record.log_file import HeldLog, LogFile

LIMIT_BYTES = 1 << 20


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    """Yield a file descriptor that appends to `trainer.log` in the test's directory."""
    fd = os.open(tmp_path / "trainer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield fd
    os.close(fd)


def write_lines(log: int, begin: int, end: int) -> None:
    for number in range(begin, end, 1000):
        text = "".join(f"line {line:08d} {'x' * 50}\n" for line in range(number, number + 1000))
        os.write(log, text.encode())


def bytes_on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_log_within_its_bound_is_unchanged(log: int, tmp_path: Path) -> None:
    write_lines(log, 0, 10_000)
    before = (tmp_path / "trainer.log").read_bytes()

    left_out = LogBound(limit_bytes=LIMIT_BYTES).apply(tmp_path / "trainer.log")

    assert left_out == 0
    assert (tmp_path / "trainer.log").read_bytes() == before


def test_bounded_log_keeps_its_beginning_and_its_newest_lines(log: int, tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    bound = LogBound(limit_bytes=LIMIT_BYTES)
    for begin in range(0, 100_000, 10_000):
        write_lines(log, begin, begin + 10_000)
        left_out = bound.apply(path)

    lines = [*LogFile(path).read_new(is_last=True)]

    assert bytes_on_disk(path) < LIMIT_BYTES + 64 * 1024
    assert lines[0].startswith("line 00000000") and lines[-1].startswith("line 00099999")
    markers = [index for index, line in enumerate(lines) if line.startswith("[muster:")]
    assert len(markers) == 1 and f"{left_out} bytes of this log were left out" in lines[markers[0]]
    assert sum(len(line) + 1 for line in lines[: markers[0]]) >= LIMIT_BYTES // 5
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert len(numbers) == len(lines) - 1
    assert numbers == sorted(set(numbers))


def test_reader_that_follows_a_bounded_log_gets_no_line_twice(log: int, tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    bound = LogBound(limit_bytes=LIMIT_BYTES)
    reader = LogFile(path)
    lines: list[str] = []
    for begin in range(0, 60_000, 5_000):
        write_lines(log, begin, begin + 5_000)
        lines += reader.read_new()
        bound.apply(path)

    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]

    assert numbers == [*range(60_000)]


def test_slow_reader_of_a_bounded_log_continues_after_the_gap(log: int, tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    write_lines(log, 0, 1000)
    reader = LogFile(path)
    first = [*reader.read_new()]
    write_lines(log, 1000, 100_000)
    LogBound(limit_bytes=LIMIT_BYTES).apply(path)

    rest = [*reader.read_new()]

    numbers = [int(line.split()[1]) for line in first + rest if line.startswith("line ")]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 99_999


def test_cause_and_probe_are_found_in_a_bounded_log(log: int, tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    held = HeldLog(path)
    probe = LogProbe(held, r"^ValueError: the cause")
    bound = LogBound(limit_bytes=LIMIT_BYTES)
    write_lines(log, 0, 50_000)
    assert asyncio.run(probe.why_not(5.0)) == "no line of the log matches yet"
    bound.apply(path)
    write_lines(log, 50_000, 100_000)
    os.write(log, b"Traceback (most recent call last):\n  File 'x'\nValueError: the cause\n")
    bound.apply(path)

    cause = find_cause(read_since_step(path))

    assert cause is not None and cause.line == "ValueError: the cause"
    assert asyncio.run(probe.why_not(5.0)) == ""
