"""When a run's step and its silence are looked at: as seldom as what they are for allows."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tasks.processes import progress
from tasks.processes.component import AttemptPlan
from tasks.processes.progress import ProgressWatch, ReadStep, Silence
from tests.support.fleet_clock import Stuck, VirtualLoop, run

HOUR_S = 3600.0


class Looks(Silence):
    """Silence in the loop's own time, and how often it was looked at."""

    def __init__(self, *logs: Path) -> None:
        super().__init__(logs, clock=lambda: asyncio.get_running_loop().time())
        self.number = 0

    def lasts_s(self, step: float | None) -> float:
        self.number += 1
        return super().lasts_s(step)


def plan_of(limit_s: float | None) -> AttemptPlan:
    return AttemptPlan(run_id="r", number=1, cwd=Path("/no"), components=(), stall_after_s=limit_s)


def watched(
    *, limit_s: float | None, read_step: ReadStep | None = None, log: Path = Path("/no/log")
) -> tuple[str, int, float]:
    """Why it has stalled, after how many looks, and after what time."""

    async def watch() -> tuple[str, int, float]:
        silence = Looks(log)
        began = asyncio.get_running_loop().time()
        _, stalled = await ProgressWatch(
            plan_of(limit_s), read_step, silence, lambda *_, **more: None, is_quiet=lambda: False
        ).until_over()
        return stalled, silence.number, asyncio.get_running_loop().time() - began

    return run(watch())


def test_without_progress_and_limit_nothing_is_ever_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_timer(loop: VirtualLoop, seconds: float) -> None:
        raise AssertionError("it polls")

    monkeypatch.setattr(VirtualLoop, "jump", no_timer)
    with pytest.raises(Stuck):
        watched(limit_s=None)


@pytest.mark.parametrize(
    ("limit_s", "at_most"),
    [
        (1.0, 4),
        (100.0, 52),  # fifty a limit
        (HOUR_S, HOUR_S / 10 + 2),  # each ten seconds
    ],
)
def test_silence_is_looked_at_as_seldom_as_its_limit_allows(limit_s: float, at_most: float) -> None:
    why, looks, took_s = watched(limit_s=limit_s)

    assert "no output" in why
    assert looks <= at_most
    assert limit_s < took_s <= limit_s * 1.02 + 1.0


def test_steps_are_read_more_often_than_logs(tmp_path: Path) -> None:
    reads = 0

    async def step() -> float | None:
        nonlocal reads
        reads += 1
        return 7.0 if reads > 10 else None

    _, looks, took_s = watched(limit_s=100.0, read_step=step)

    assert reads >= 2 * took_s
    assert looks <= 60
    assert took_s >= 100.0


def said_of(*steps_s: float) -> list[str]:
    """What is said to be slow of a run whose steps take so long, and that stalls after 1000 s."""
    times = list(accumulate(steps_s))

    async def watch() -> list[str]:
        clock = asyncio.get_running_loop().time
        began, said = clock(), []

        async def step() -> float:
            return float(sum(at <= clock() - began for at in times)) + 1

        def emit(name: str, component: str | None = None, **fields: Any) -> None:
            if name == "run.slow":
                said.append(f"{clock() - began:.0f} s: {fields['message']}")

        read = ProgressWatch(plan_of(1000.0), step, Looks(), emit, is_quiet=lambda: False)
        await read.until_over()
        return said

    return run(watch())


def test_a_step_that_takes_ten_times_the_median_is_said_once_each_time() -> None:
    slow = "no step for {} since step {}, where one takes 10 s"

    # one of a hundred seconds is not over it, two are
    told = said_of(*[10.0] * 12, 99.0, 10.0, 150.0, 10.0, 400.0, 10.0)

    began = 120 + 99 + 10
    assert told == [
        f"{began + 101} s: " + slow.format("1 min 40 s", 15),
        f"{began + 261} s: " + slow.format("1 min 40 s", 17),
        f"{began + 671} s: " + slow.format("1 min 40 s", 19),
    ]


def test_nothing_is_slow_before_there_is_a_pace() -> None:
    assert said_of(*[1.0] * 9) == []


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

    watched(limit_s=100.0, log=log)

    assert opened == [log]
