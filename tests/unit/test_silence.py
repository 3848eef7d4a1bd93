"""How long a run has made no step, or has said nothing new."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.processes.progress import Silence

#: As vLLM, uvicorn and slime's own servers write one every few seconds, whatever else happens.
POLLED = [
    'INFO:     127.0.0.1:{i} - "GET /health HTTP/1.1" 200 OK\n',
    "(APIServer pid=812) INFO 11-23 15:{i:02}:00 [loggers.py:123] Engine 000: Avg prompt "
    "throughput: {i}.5 tokens/s, Running: 0 reqs, GPU KV cache usage: 0.{i}%\n",
    "[2026-11-23 15:{i:02}:00] POST /generate request cmpl-{i:032x} took 1e-{i} s\n",
]


class Watched:
    """A log, and the silence of a run by a clock that the test sets."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.now = 0.0
        self.silence = Silence([log], clock=lambda: self.now)
        self.says("a line to begin with\n")

    def says(self, text: str, *, step: float | None = None) -> float:
        """After ten seconds more; the seconds of silence."""
        self.now += 10
        with self.log.open("a") as f:
            f.write(text)
        return self.silence.lasts_s(step)


@pytest.fixture
def run(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "api.log")


@pytest.mark.parametrize("step", [None, 0.0])
def test_lines_that_repeat_but_for_their_numbers_are_silence(
    run: Watched, step: float | None
) -> None:
    for line in POLLED:
        run.says(line.format(i=1), step=step)

    lasts = [run.says(POLLED[i % 3].format(i=i), step=step) for i in range(2, 9)]

    assert lasts == [10, 20, 30, 40, 50, 60, 70]


@pytest.mark.parametrize(
    "said",
    [
        "another line\n",
        "a line without its end",
        "{'loss': 0.5}\n",
        " 12%|█▏        | 12/100\r",
        # behind so much that nothing else of it is read
        "a line to begin with\n" * 10_000 + "another line\n",
    ],
)
def test_a_line_that_was_not_there_before_is_none(run: Watched, said: str) -> None:
    assert run.says(said) == 0


@pytest.mark.parametrize(
    "line",
    ["step {i} loss 0.3\n", "step:{i} - actor/loss:0.1\n", " 12%|█▏  | {i}/1000 [00:10<02:10]\r"],
)
def test_a_step_that_only_a_log_says_is_a_number_as_any_other(run: Watched, line: str) -> None:
    assert [run.says(line.format(i=i)) for i in (1, 2, 3, 3)] == [0, 10, 20, 30]


def test_empty_lines_are_silence(run: Watched) -> None:
    assert [run.says(line) for line in ("\n\n", "  \n")] == [10, 20]


def test_a_line_that_is_read_in_two_pieces_repeats_all_the_same(run: Watched) -> None:
    line = POLLED[0].format(i=1)
    run.says(line)

    assert [run.says(piece) for piece in (line[:20], line[20:50], line[50:])] == [10, 20, 30]


def test_a_log_that_was_begun_anew_is_read_from_its_beginning(run: Watched) -> None:
    run.log.write_text("")

    assert run.says("other words\n") == 0


def test_once_there_is_a_step_only_steps_count(run: Watched) -> None:
    before = run.says("loading\n", step=None)
    first = run.says("", step=1)
    noise = [run.says(f"{word} is said\n", step=1) for word in ("this", "that")]
    unread = run.says("", step=None)

    assert (before, first, noise, unread) == (0, 0, [10, 20], 30)
    assert run.says("", step=2) == 0


def test_a_step_0_that_a_server_tells_is_none_yet(run: Watched) -> None:
    run.says("", step=0)

    assert run.says("loading\n", step=0) == 0
