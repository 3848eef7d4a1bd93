"""How often the step and the silence of a run are checked, and when a step counts as slow."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tasks.processes import progress
from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.progress import (
    JsonlProgress,
    ProgressEnd,
    ProgressWatch,
    Silence,
    StepSource,
)
from tasks.record.checkpoints import CheckpointGrowth
from tasks.record.log_file import HeldLog
from tasks.spec.run import Progress
from tests.support.fleet_clock import Stuck, VirtualLoop, run
from tests.support.inline_reader import InlineReader, InlineReaders
from tests.support.step_function import StepFunction

HOUR_S = 3600.0


class CountedSilence(Silence):
    """A `Silence` that counts its checks, and uses the clock of the event loop.

    `Silence` measures how long a run has made no progress.
    """

    def __init__(self, *logs: Path, resumed_step: float | None = None) -> None:
        super().__init__(
            map(HeldLog, logs),
            clock=lambda: asyncio.get_running_loop().time(),
            resumed_step=resumed_step,
        )
        self.check_count = 0

    def seconds_without_work(self, step: float | None, has_output: bool | None = None) -> float:
        self.check_count += 1
        return super().seconds_without_work(step, has_output)


def make_plan(limit_s: float | None) -> AttemptPlan:
    return AttemptPlan(run_id="r", number=1, cwd=Path("/no"), components=(), stall_after_s=limit_s)


def watch_until_stalled(
    *, limit_s: float | None, source: StepSource | None = None, log: Path = Path("/no/log")
) -> tuple[str, int, float]:
    """Watch a run without progress until it stalls.

    Returns:
        The description of the stall, the number of checks, and the duration in seconds.
    """

    async def watch() -> tuple[str, int, float]:
        silence = CountedSilence(log)
        began = asyncio.get_running_loop().time()
        _, stall = await ProgressWatch(
            make_plan(limit_s),
            source,
            silence,
            lambda *_, **fields: None,
            is_quiet=lambda: False,
            log_reader=InlineReader(log),
        ).until_over()
        return stall, silence.check_count, asyncio.get_running_loop().time() - began

    return run(watch())


def test_run_without_progress_and_limit_is_never_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_timer(loop: VirtualLoop, seconds: float) -> None:
        raise AssertionError("it polls")

    monkeypatch.setattr(VirtualLoop, "jump", no_timer)
    with pytest.raises(Stuck):
        watch_until_stalled(limit_s=None)


@pytest.mark.parametrize(
    ("limit_s", "at_most"),
    [
        (1.0, 4),
        (100.0, 52),  # about 50 checks in 100 s
        (HOUR_S, HOUR_S / 10 + 2),  # a check every ten seconds
    ],
)
def test_number_of_silence_checks_is_limited(limit_s: float, at_most: float) -> None:
    stall, check_count, took_s = watch_until_stalled(limit_s=limit_s)

    assert "wrote any output" in stall
    assert check_count <= at_most
    assert limit_s < took_s <= limit_s * 1.02 + 1.0


def test_steps_are_read_more_often_than_logs(tmp_path: Path) -> None:
    reads = 0

    async def step() -> float | None:
        nonlocal reads
        reads += 1
        return 7.0 if reads > 10 else None

    _, check_count, took_s = watch_until_stalled(limit_s=100.0, source=StepFunction(step))

    assert reads >= 2 * took_s
    assert check_count <= 60
    assert took_s >= 100.0


def slow_messages(*steps_s: float, last_step: int | None = None) -> list[str]:
    """Return the messages about slow steps of a run.

    Each message begins with the number of seconds since the start of the run.

    Args:
        steps_s: Durations of the steps in seconds. After the last step, the run stalls.
        last_step: Last step of the run according to its spec, or None.
    """
    times = list(accumulate(steps_s))

    async def collect_messages() -> list[str]:
        clock = asyncio.get_running_loop().time
        began = clock()
        messages: list[str] = []

        async def step() -> float:
            return float(sum(at <= clock() - began for at in times)) + 1

        def emit(name: str, component: str | None = None, **fields: Any) -> None:
            if name == "run.slow":
                messages.append(f"{clock() - began:.0f} s: {fields['message']}")

        plan = make_plan(1000.0)
        if last_step is not None:
            progress = Progress(jsonl="/no/metrics.jsonl", step="step", total=last_step)
            plan = replace(plan, progress=progress, finish_within_s=500.0)
        watch = ProgressWatch(
            plan,
            StepFunction(step),
            CountedSilence(),
            emit,
            is_quiet=lambda: False,
            log_reader=InlineReader("the logs"),
        )
        await watch.until_over()
        return messages

    return run(collect_messages())


def test_time_after_the_last_step_is_no_slow_step() -> None:
    assert slow_messages(*[10.0] * 12) != []
    assert slow_messages(*[10.0] * 12, last_step=13) == []


def test_step_of_ten_times_the_median_is_reported_once() -> None:
    slow = "no step for {} since step {}; a step usually takes 10 s"

    # The step of 99 s is not reported, because it is shorter than ten times the median step (10 s).
    messages = slow_messages(*[10.0] * 12, 99.0, 10.0, 150.0, 10.0, 400.0, 10.0)

    began = 120 + 99 + 10
    assert messages == [
        f"{began + 101} s: " + slow.format("1 min 40 s", 15),
        f"{began + 261} s: " + slow.format("1 min 40 s", 17),
        f"{began + 671} s: " + slow.format("1 min 40 s", 19),
    ]


def test_no_step_is_slow_before_the_median_of_ten_steps_is_known() -> None:
    assert slow_messages(*[1.0] * 9) == []


def test_log_that_has_not_grown_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("step 1\n")
    opened = []
    monkeypatch.setattr(
        progress.Path,
        "open",
        lambda path, mode, open=Path.open: opened.append(path) or open(path, mode),
    )

    watch_until_stalled(limit_s=100.0, log=log)

    assert opened == [log]


#: Mapping from a time in seconds to an event of the training at this time. The event is the number
#: of a step, or the path of a checkpoint file that is written.
History = Mapping[float, int | str]


def watch_history(
    checkpoints: Path,
    history: History,
    resumed_step: float | None = None,
    **settings: Any,
) -> tuple[ProgressEnd, str, float]:
    """Watch a training that makes steps and writes checkpoints, until the watch ends.

    Args:
        checkpoints: Folder of the checkpoints.
        history: Events of the training. After the last event, the training hangs.
        resumed_step: Step of the checkpoint from which the training resumes, or None.
        settings: Further fields of the `AttemptPlan`.

    Returns:
        The reason for the end of the watch, a description of this reason, and the seconds from the
        start of the watch to its end.
    """

    async def watch() -> tuple[ProgressEnd, str, float]:
        began = asyncio.get_running_loop().time()
        due = sorted(history.items())
        last_step: float | None = None

        def clock() -> float:
            return asyncio.get_running_loop().time() - began

        async def step() -> float | None:
            nonlocal last_step
            while due and due[0][0] <= clock():
                at, event = due.pop(0)
                if isinstance(event, str):
                    write_file_at(checkpoints / event, at)
                else:
                    last_step = event
            return last_step

        trainer = ComponentPlan(
            name="trainer",
            command=Command(argv=("train",), env={}, cwd=checkpoints, log=Path("/no/log")),
            ready=None,
            live=None,
            on_exit_zero="complete",
            checkpoints=str(checkpoints),
            seconds_since_growth=CheckpointGrowth(".", checkpoints, clock).seconds_since_growth,
        )
        end, why = await ProgressWatch(
            replace(make_plan(None), components=(trainer,), **settings),
            StepFunction(step),
            CountedSilence(resumed_step=resumed_step),
            lambda *_, **fields: None,
            is_quiet=lambda: False,
            readers=InlineReaders(),
            log_reader=InlineReader("the logs"),
        ).until_over()
        return end, why, clock()

    return run(watch())


def write_file_at(path: Path, at: float) -> None:
    """Append a byte to a file, and set the time of its last change in UTC epoch seconds.

    The folder of the file gets the same time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"x")
    for changed in (path, path.parent):
        os.utime(changed, (at, at))


@pytest.mark.parametrize(
    ("limit_s", "history", "last_work_s"),
    [
        # the training writes a checkpoint file after step 5, makes step 6, and then hangs
        (25.0, {10: 5, 10.5: "step_5/state.pt", 11: 6}, 11.0),
        # the training writes a checkpoint file after step 5, and then hangs
        (25.0, {10: 5, 10.5: "step_5/state.pt"}, 10.5),
        # A save takes longer than `limit_s`, and the training continues. Hours later, the training
        # hangs after another save.
        (
            100.0,
            {0: 5, **{at: "step_5/state.pt" for at in range(10, 300, 10)}, 300: 6}
            | {at: at for at in range(350, 7000, 50)}
            | {6960: "step_9/state.pt", 7000: 7},
            7000.0,
        ),
        # the training hangs while it saves a checkpoint
        (100.0, {0: 5, **{at: "step_5/state.pt" for at in range(10, 300, 10)}}, 290.0),
    ],
)
def test_stall_is_decided_in_time_after_a_save(
    tmp_path: Path, limit_s: float, history: History, last_work_s: float
) -> None:
    end, _, ended_s = watch_history(tmp_path, history, stall_after_s=limit_s)

    two_checks_s = 2 * max(limit_s / 50, 0.5)
    assert end is ProgressEnd.STALLED
    assert last_work_s + limit_s < ended_s <= last_work_s + limit_s + two_checks_s


def test_stall_after_a_save_names_the_step_and_the_save(tmp_path: Path) -> None:
    _, why, _ = watch_history(
        tmp_path, {10: 5, 20: "step_5/state.pt", 30: "step_5/state.pt"}, stall_after_s=25.0
    )

    assert why == "no new step since step 5 for 46 s, and no checkpoint has grown for 26 s"


def test_stall_with_an_old_save_names_only_the_step(tmp_path: Path) -> None:
    _, why, _ = watch_history(tmp_path, {10: 5, 10.5: "step_5/state.pt", 11: 6}, stall_after_s=25.0)

    assert why == "no new step since step 6 for 26 s"


def test_time_after_the_last_step_counts_from_the_last_growth_of_a_checkpoint(
    tmp_path: Path,
) -> None:
    progress = Progress(jsonl="/no/metrics.jsonl", step="step", total=5)
    end, _, ended_s = watch_history(
        tmp_path,
        {10: 5, 20: "step_5/state.pt"},
        progress=progress,
        success_step=5.0,
        finish_within_s=25.0,
    )

    assert end is ProgressEnd.FINISHED
    assert 45.0 < ended_s <= 46.0


@pytest.mark.parametrize(
    ("history", "resumed_step", "expected"),
    [
        ({}, None, "no first step within 26 s of the start"),
        # the server reports step 0, which does not count as the first step
        ({1: 0}, None, "no first step within 26 s of the start"),
        # the trainer repeats the step of the checkpoint from which it resumes
        ({1: 20}, 20.0, "no step after step 20 within 26 s of the start"),
    ],
)
def test_stall_before_the_first_step_says_so(
    tmp_path: Path, history: History, resumed_step: float | None, expected: str
) -> None:
    end, why, _ = watch_history(tmp_path, history, resumed_step, stall_after_s=25.0)

    assert end is ProgressEnd.NO_FIRST_STEP
    assert why.startswith(
        f"{expected}, and no component wrote any output except repeated lines for "
    )


def test_stall_of_a_training_without_known_steps_names_the_output() -> None:
    why, _, _ = watch_until_stalled(limit_s=25.0)

    assert why == "no component wrote any output except repeated lines for 26 s"


def test_stall_without_a_known_step_names_a_wrong_key(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    source = JsonlProgress(path, "stpe", reader=InlineReader(path))
    path.write_text('{"step": 3}\n')

    why, _, _ = watch_until_stalled(limit_s=25.0, source=source)

    assert why.startswith("no first step within 26 s of the start")
    assert why.endswith(f"; {path} has no number `stpe`, but has step; did you mean `step`?")


@pytest.mark.parametrize(("name", "is_named"), [("events.jsonl", False), ("log.jsonl", True)])
def test_stall_before_the_first_line_names_only_files_of_the_training(
    tmp_path: Path, name: str, is_named: bool
) -> None:
    (tmp_path / name).touch()
    path = tmp_path / "metrics.jsonl"
    source = JsonlProgress(path, "step", reader=InlineReader(path))

    why, _, _ = watch_until_stalled(limit_s=25.0, source=source)

    assert (str(path) in why) is is_named
    assert (name in why) is is_named
