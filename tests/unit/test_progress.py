"""How often the step and the silence of a run are checked, and when a step counts as slow."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tasks.processes import progress
from tasks.processes.component import AttemptPlan
from tasks.processes.progress import ProgressWatch, Silence, StepSource
from tasks.record.log_file import HeldLog
from tasks.spec.run import Progress
from tests.support.fleet_clock import Stuck, VirtualLoop, run
from tests.support.inline_reader import InlineReader
from tests.support.step_function import StepFunction

HOUR_S = 3600.0


class CountedSilence(Silence):
    """A `Silence` that counts its checks, and uses the clock of the event loop.

    `Silence` measures how long a run has made no progress.
    """

    def __init__(self, *logs: Path) -> None:
        super().__init__(map(HeldLog, logs), clock=lambda: asyncio.get_running_loop().time())
        self.check_count = 0

    def seconds_without_progress(self, step: float | None, has_output: bool | None = None) -> float:
        self.check_count += 1
        return super().seconds_without_progress(step, has_output)


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
        (100.0, 52),  # fifty checks within the limit
        (HOUR_S, HOUR_S / 10 + 2),  # a check every ten seconds
    ],
)
def test_number_of_silence_checks_is_limited(limit_s: float, at_most: float) -> None:
    stall, check_count, took_s = watch_until_stalled(limit_s=limit_s)

    assert "no output" in stall
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
    """Return the messages about slow steps of a run, each with its time.

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

    # The step of 99 s is not reported: it is shorter than ten times the median of 10 s.
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
