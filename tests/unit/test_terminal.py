"""Tests of `Terminal`: the display of a run, which never delays or ends the run."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.logging.handlers import PrefectConsoleHandler

from tasks.record.events import Event
from tasks.show import terminal as terminal_module
from tasks.show.screen import ForeignLines, Screen
from tasks.show.terminal import Terminal
from tasks.spec.run import RunSpec
from tests.support.emulator import Emulator

SPEC = RunSpec.model_validate(
    {
        "name": "x",
        "workload": "grpo",
        "components": {"api": {"command": ["true"]}, "trainer": {"command": ["true"]}},
        "progress": {"jsonl": "metrics.jsonl", "step": "step", "total": 60},
    }
)


class Out(io.StringIO):
    """A fake terminal or pipe. The object keeps each written text, and the text on the screen."""

    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.frames: list[str] = []
        self.emulator = Emulator(200)

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.frames.append(text)
        self.emulator.write(text)
        return len(text)


def screen(out: Any, *, is_live: bool = True) -> Screen:
    """Return a screen of 200 columns that writes to `out`."""
    return Screen(out.write, is_live=is_live, size=lambda: os.terminal_size((200, 30)))


def event(name: str, component: str | None = None, **fields: Any) -> Event:
    return Event(at=1000.0, name=name, component=component, fields=fields)


def begun(folder: Path, number: int = 1) -> Event:
    """Create the folder of an attempt, and return the event that the attempt has begun."""
    directory = folder / f"attempt-{number:02d}"
    directory.mkdir(exist_ok=True)
    return event("attempt.begun", attempt=number, run_id="x-grpo", directory=directory)


def ended(number: int, failure: dict[str, Any] | None) -> Event:
    return event("attempt.ended", attempt=number, state="failed", message="", failure=failure)


FAILURE = {
    "kind": "NODE_LOST",
    "component": "trainer",
    "exit_code": 1,
    "signal": None,
    "message": "trainer lost its node",
    "hint": "see the node's kernel log",
    "log_tail": "loading\nlost",
}


def test_plain_output_consists_of_lines_only(tmp_path: Path) -> None:
    out = Out(is_terminal=False)

    with Terminal(SPEC, screen(out, is_live=False)) as terminal:
        terminal.say("connecting", "bold")
        terminal.show(begun(tmp_path))
        terminal.show(event("component.spawned", "api", pid=7, argv=[]))
        terminal.show(event("probe.failed", "api", reason="refused"))
        terminal.show(event("component.ready", "api", pid=7, after_s=0.5))
        for step in range(1, 61):
            terminal.show(event("run.progress", step=float(step), total=60))

    assert "\x1b" not in "".join(out.frames)
    lines = [line.split("s ", 1)[1] for line in out.emulator.text.splitlines()]
    assert lines == [
        "connecting",
        "run x-grpo, attempt 1",
        f"files in {tmp_path}/attempt-01",
        "api: started, pid 7",
        "api: ready after 0.50 s",
        # without a terminal, a line is printed after every 5 % of the steps
        *(f"step {step} of 60" for step in range(3, 61, 3)),
    ]


def test_live_region_is_below_the_lines_and_disappears_at_the_end(tmp_path: Path) -> None:
    out = Out()
    drawn = threading.Event()
    out.write = lambda text: (Out.write(out, text), "refused" in text and drawn.set())[0]  # type: ignore[method-assign]

    with Terminal(SPEC, screen(out)) as terminal:
        terminal.show(begun(tmp_path))
        terminal.show(event("component.spawned", "api", pid=7, argv=[]))
        terminal.show(event("run.progress", step=12.0, total=60))
        terminal.show(event("probe.failed", "api", reason="refused"))
        assert drawn.wait(30)
        during = out.emulator.text

    assert "api: started, pid 7\ncomponent" in during
    assert during.splitlines()[-1].startswith("step 12 of 60  ━")
    assert out.emulator.text.splitlines()[-1].endswith("api: started, pid 7")
    assert out.emulator.unknown == []


def test_failed_attempt_is_explained_before_the_next_attempt(tmp_path: Path) -> None:
    out = Out(is_terminal=False)

    with Terminal(SPEC, screen(out, is_live=False)) as terminal:
        terminal.show(begun(tmp_path))
        terminal.show(ended(1, FAILURE))
        terminal.show(event("attempt.decided", attempt=1, text="retried: NODE_LOST, next try"))
        waiting = "NODE_LOST: trainer lost its node; attempt 2 in 60 s"
        terminal.show(event("run.state", state="pending_resources", message=waiting))

    text = out.emulator.text
    assert "attempt 1 failed: NODE_LOST: trainer lost its node" in text
    assert "what to do         see the node's kernel log" in text
    assert f"log                {tmp_path}/attempt-01/trainer.log" in text
    assert "| loading\n" in text and "| lost\n" in text
    assert "what happens next  retried: NODE_LOST, next try" in text
    assert text.splitlines()[-1].endswith(f"waiting: {waiting}")


def test_failure_of_the_last_attempt_is_shown_once_at_the_end(tmp_path: Path) -> None:
    out = Out(is_terminal=False)
    content = {
        "run_id": "x-grpo",
        "state": "failed",
        "started_at": 0.0,
        "ended_at": 5.0,
        "attempts": [{"number": 1, "state": "failed", "failure": FAILURE}],
    }
    (tmp_path / "run.json").write_text(json.dumps(content))

    with Terminal(SPEC, screen(out, is_live=False)) as terminal:
        terminal.show(event("run.opened", run_id="x-grpo", record=tmp_path / "run.json"))
        terminal.show(begun(tmp_path))
        terminal.show(ended(1, FAILURE))
        terminal.show(event("attempt.decided", attempt=1, text="final: NODE_LOST is not retried"))
        terminal.end("failed", "NODE_LOST: trainer lost its node", "http://h/runs/flow-run/1")

    assert out.emulator.text.count("NODE_LOST: trainer lost its node") == 1
    assert out.emulator.text.count("| lost") == 1
    assert (
        out.emulator.text.rstrip().splitlines()[-1]
        == "  page               http://h/runs/flow-run/1"
    )


def test_completed_run_shows_its_reward_curve(tmp_path: Path) -> None:
    out = Out(is_terminal=False)
    lines = [json.dumps({"step": step, "reward": step / 60}) for step in range(1, 61)]

    with Terminal(SPEC, screen(out, is_live=False)) as terminal:
        terminal.show(begun(tmp_path))
        (tmp_path / "attempt-01" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        terminal.end("completed", "step 60 of 60")

    assert "reward by step" in out.emulator.text
    assert "reward: first 0.017, last 1.000" in out.emulator.text
    assert out.emulator.text.rstrip().splitlines()[-1] == "completed: step 60 of 60"


def test_curve_of_a_completed_run_covers_all_attempts(tmp_path: Path) -> None:
    out = Out(is_terminal=False)
    for number, steps in ((1, range(1, 31)), (2, range(21, 61))):
        lines = [json.dumps({"step": step, "reward": step / 60}) for step in steps]
        metrics = tmp_path / f"attempt-{number:02d}" / "metrics.jsonl"
        metrics.parent.mkdir(exist_ok=True)
        metrics.write_text("\n".join(lines) + "\n")

    with Terminal(SPEC, screen(out, is_live=False)) as terminal:
        terminal.show(begun(tmp_path, 2))
        terminal.end("completed", "step 60 of 60")

    assert "reward: first 0.017, last 1.000" in out.emulator.text


def test_completed_run_says_that_its_last_values_are_not_finite(tmp_path: Path) -> None:
    out = Out(is_terminal=False)
    losses = ["1.0", "0.111", "NaN"]
    lines = [f'{{"step": {step}, "loss": {loss}}}' for step, loss in enumerate(losses, 1)]

    with Terminal(SPEC, screen(out, is_live=False)) as terminal:
        terminal.show(begun(tmp_path))
        (tmp_path / "attempt-01" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        terminal.end("completed", "step 3 of 3")

    assert "loss: first 1.000, last 0.111 at step 2, nan since step 3" in out.emulator.text


@pytest.mark.parametrize(
    ("figures", "title"),
    [
        ({"loss": 0.5, "data": {}}, "loss by step"),
        # the metrics have a loss and a reward, so the curve shows the reward
        ({"loss": 0.5, "reward": 0.25}, "reward by step"),
    ],
)
def test_curve_shows_the_reward_if_the_metrics_have_it(
    tmp_path: Path, figures: dict[str, object], title: str
) -> None:
    out = Out(is_terminal=False)
    lines = [{"step": 0, "loss": 0.9}]
    lines += [{"step": step, **figures} for step in (1, 2, 3)]

    with Terminal(SPEC, screen(out, is_live=False)) as terminal:
        terminal.show(begun(tmp_path))
        written = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / "attempt-01" / "metrics.jsonl").write_text(written)
        terminal.end("completed", "step 3 of 3")

    assert title in out.emulator.text


class Stopped(Out):
    """A terminal whose output the user has stopped with Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.is_blocked = threading.Event()
        self.may_write = threading.Event()

    def write(self, text: str) -> int:
        self.is_blocked.set()
        self.may_write.wait(60)
        return super().write(text)


def test_stopped_terminal_does_not_delay_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_module, "_MAX_BUFFERED_LINES", 5)
    out = Stopped()

    with Terminal(SPEC, screen(out)) as terminal:
        terminal.say("first")
        assert out.is_blocked.wait(30)
        for number in range(1, 21):
            terminal.say(f"line {number}")
        terminal.show(begun(tmp_path))
        out.may_write.set()

    shown = out.emulator.text.splitlines()
    assert shown[0].endswith("first")
    assert "(17 lines are missing here, because the terminal was too slow)" in shown[1]
    assert [line.split("s ", 1)[1] for line in shown[2:5]] == ["line 18", "line 19", "line 20"]


def test_end_of_a_run_does_not_wait_for_a_stopped_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal_module, "_CLOSE_WITHIN_S", 0.1)
    out = Stopped()

    with Terminal(SPEC, screen(out)) as terminal:
        terminal.say("first")
        assert out.is_blocked.wait(30)

    assert not out.may_write.is_set()
    out.may_write.set()


def test_run_survives_the_loss_of_its_terminal(tmp_path: Path) -> None:
    class Gone(Out):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with Terminal(SPEC, screen(Gone())) as terminal:
        terminal.say("first")
        terminal.show(begun(tmp_path))
        terminal.end("completed", "step 60 of 60")


def test_failure_to_draw_the_region_leaves_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def broken(*_: Any, **__: Any) -> Any:
        failed.set()
        raise RuntimeError("a bug")

    monkeypatch.setattr(terminal_module, "build_region", broken)
    out = Out()

    with Terminal(SPEC, screen(out)) as terminal:
        terminal.show(begun(tmp_path))
        assert failed.wait(30)
        terminal.say("goes on")

    assert out.emulator.text.splitlines()[-1].endswith("goes on")


@pytest.fixture
def tty() -> Iterator[Out]:
    """Return a fake terminal. A log handler already writes to this terminal.

    The test itself must set `sys.stderr` to the terminal. A fixture cannot do so, because pytest
    replaces `sys.stderr` between the setup of the fixtures and the test.
    """
    out = Out()
    handler = logging.StreamHandler(out)
    logging.getLogger("tests.foreign").addHandler(handler)
    yield out
    logging.getLogger("tests.foreign").removeHandler(handler)


def test_output_of_other_libraries_becomes_lines(tty: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", tty)
    shown_lines: list[str] = []
    foreign = ForeignLines(shown_lines.append)

    foreign.take_over()
    print("a library", "warns", file=sys.stderr)
    logging.getLogger("tests.foreign").warning("a log line\nof two")
    print("cut short", end="", file=sys.stderr)
    foreign.give_back()
    print("after", file=sys.stderr)
    logging.getLogger("tests.foreign").warning("also after")

    assert shown_lines == ["a library warns", "a log line", "of two", "cut short"]
    assert tty.emulator.text == "after\nalso after\n"


def test_output_to_a_file_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Out(is_terminal=False)
    monkeypatch.setattr(sys, "stderr", file)
    shown_lines: list[str] = []
    foreign = ForeignLines(shown_lines.append)

    foreign.take_over()
    print("to the file", file=sys.stderr)
    foreign.give_back()

    assert (shown_lines, file.emulator.text) == ([], "to the file\n")


def test_prefect_logs_become_lines(tty: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", tty)
    shown_lines: list[str] = []
    logger = logging.getLogger("tests.foreign")
    handler = PrefectConsoleHandler(stream=tty)
    logger.addHandler(handler)
    foreign = ForeignLines(shown_lines.append)

    foreign.take_over()
    logger.warning("of Prefect")
    foreign.give_back()
    logger.removeHandler(handler)

    assert shown_lines == ["of Prefect", "of Prefect"]
    assert tty.emulator.text == ""
