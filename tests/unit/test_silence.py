"""Tests of `Silence`: the time since the last step of a run, or since its last new log line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.processes.progress import Silence
from tasks.record.log_file import HeldLog

#: Log lines that even an idle server of vLLM, uvicorn or slime writes every few seconds.
POLLED = [
    'INFO:     127.0.0.1:{i} - "GET /health HTTP/1.1" 200 OK\n',
    "(APIServer pid=812) INFO 11-23 15:{i:02}:00 [loggers.py:123] Engine 000: Avg prompt "
    "throughput: {i}.5 tokens/s, Running: 0 reqs, GPU KV cache usage: 0.{i}%\n",
    "[2026-11-23 15:{i:02}:00] POST /generate request cmpl-{i:032x} took 1e-{i} s\n",
]


class Watched:
    """A log that a `Silence` object watches, with a clock that the test sets."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.now = 0.0
        self.silence = Silence([HeldLog(log)], clock=lambda: self.now)
        self.write("a line to begin with\n")

    def write(self, text: str, *, step: float | None = None) -> float:
        """Let ten seconds pass, add a text to the log, and return the seconds of silence.

        The silence is the time since the last new training step. Before the first step, a new log
        line also ends the silence.
        """
        self.now += 10
        with self.log.open("a") as f:
            f.write(text)
        return self.silence.seconds_without_work(step)


@pytest.fixture
def run(tmp_path: Path) -> Watched:
    """Return a watched log with one line, and with a clock that the test sets."""
    return Watched(tmp_path / "api.log")


@pytest.mark.parametrize("step", [None, 0.0])
def test_lines_that_differ_only_in_numbers_are_silence(run: Watched, step: float | None) -> None:
    for line in POLLED:
        run.write(line.format(i=1), step=step)

    silences_s = [run.write(POLLED[i % 3].format(i=i), step=step) for i in range(2, 9)]

    assert silences_s == [10, 20, 30, 40, 50, 60, 70]


@pytest.mark.parametrize(
    "text",
    [
        "another line\n",
        "a line without its end",
        "{'loss': 0.5}\n",
        " 12%|█▏        | 12/100\r",
        # the text before the new line is longer than the part that is read in one call
        "a line to begin with\n" * 10_000 + "another line\n",
    ],
)
def test_new_line_ends_the_silence(run: Watched, text: str) -> None:
    assert run.write(text) == 0


@pytest.mark.parametrize(
    "line",
    ["step {i} loss 0.3\n", "step:{i} - actor/loss:0.1\n", " 12%|█▏  | {i}/1000 [00:10<02:10]\r"],
)
def test_steps_in_log_lines_are_silence_like_other_numbers(run: Watched, line: str) -> None:
    assert [run.write(line.format(i=i)) for i in (1, 2, 3, 3)] == [0, 10, 20, 30]


def test_empty_lines_are_silence(run: Watched) -> None:
    assert [run.write(line) for line in ("\n\n", "  \n")] == [10, 20]


def test_repeated_line_read_in_pieces_is_silence(run: Watched) -> None:
    line = POLLED[0].format(i=1)
    run.write(line)

    assert [run.write(piece) for piece in (line[:20], line[20:50], line[50:])] == [10, 20, 30]


def test_truncated_log_is_read_from_its_beginning(run: Watched) -> None:
    run.log.write_text("")

    assert run.write("other words\n") == 0


def test_only_steps_count_after_the_first_step(run: Watched) -> None:
    before = run.write("loading\n", step=None)
    first = run.write("", step=1)
    lines_without_step = [run.write(f"{word} is said\n", step=1) for word in ("this", "that")]
    unread = run.write("", step=None)

    assert (before, first, lines_without_step, unread) == (0, 0, [10, 20], 30)
    assert run.write("", step=2) == 0


def test_step_0_does_not_count_as_a_step(run: Watched) -> None:
    run.write("", step=0)

    assert run.write("loading\n", step=0) == 0
