"""Tests of the warning before the end of an attempt, and of the wait for checkpoints.

The components are fakes, and the clock only moves when the code under test sleeps.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tasks.processes.component import ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.planned_end import PlannedEnd, read_scheduled_shutdown
from tasks.processes.time_to_save import TimeToSave
from tasks.processes.warning_signal import StopWarning

pytestmark = pytest.mark.asyncio

#: Time limit of each test in seconds of the real clock.
TEST_WITHIN_S = 20.0


class Clock:
    """A clock that moves only when a coroutine sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def read(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


@dataclass
class Trainer:
    """Fake of a `RunningComponent`: a trainer that saves at the times that the test has planned."""

    clock: Clock
    plan: ComponentPlan
    #: Returns the processes of the trainer that have a handler for the warning signal.
    handlers: Callable[[], list[str]] = lambda: ["pid 7"]
    #: Returns the machine's planned shutdown, or None if no shutdown is planned. The argument is
    #: the current time of the clock, in seconds.
    planned_end: Callable[[float], PlannedEnd | None] = lambda now: None
    name: str = "trainer"
    is_hung: bool = False
    is_ready: bool = True
    exit: object = None
    #: Time of each warning signal that the fake trainer received, in seconds.
    warned_at: list[float] = field(default_factory=list)
    #: Requests to delay SIGKILL: the time of each request, and the requested delay in seconds.
    delays: list[tuple[float, float]] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)

    async def warn(self, signum: int) -> list[str]:
        assert signum == signal.SIGUSR1
        fresh = [process for process in self.handlers() if process not in self._warned]
        self._warned.update(fresh)
        if fresh:
            self.warned_at.append(self.clock.now)
        return fresh

    def forget_warnings(self) -> None:
        self._warned.clear()

    async def read_planned_end(self) -> PlannedEnd | None:
        return self.planned_end(self.clock.now)

    def delay_kill(self, for_s: float) -> None:
        self.delays.append((self.clock.now, for_s))


Events = list[tuple[str, dict[str, Any]]]


@dataclass
class Scene:
    """A fake trainer, the `TimeToSave` object under test, and the events of this object."""

    clock: Clock
    trainer: Trainer
    time_to_save: TimeToSave
    events: Events

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of the published events with this name."""
        return [fields for event, fields in self.events if event == name]

    async def seconds_until_saved(self) -> float:
        """Return how many seconds the wait for the trainer's checkpoint takes."""
        began = self.clock.now
        async with asyncio.timeout(TEST_WITHIN_S):
            await self.time_to_save.until_saved(self.trainer)  # type: ignore[arg-type]
        return round(self.clock.now - began)


def make_scene(
    tmp_path: Path,
    *,
    warn_s: float | None = None,
    grace_s: float = 10.0,
    save_grace_s: float | None = None,
    is_saving: Callable[[float], bool] | None = None,
    find_checkpoint: Callable[[float], tuple[int, float] | None] | None = None,
) -> Scene:
    """Return the `TimeToSave` object under test, with its fake trainer, clock and events.

    A `TimeToSave` object gives the trainer time to write a checkpoint before the run ends.

    Args:
        warn_s: Seconds from the warning signal to the end of the run. None for no warning.
        grace_s: Seconds from the stop signal to SIGKILL.
        save_grace_s: Longest wait for a checkpoint in seconds.
        is_saving: Returns True if the trainer writes a checkpoint at the given time of the clock.
        find_checkpoint: Returns the newest complete checkpoint at the given time of the clock.
    """
    clock = Clock()
    plan = ComponentPlan(
        name="trainer",
        command=Command(
            argv=("x",),
            env={},
            cwd=tmp_path,
            log=tmp_path / "log",
            grace_s=grace_s,
            save_grace_s=save_grace_s,
        ),
        ready=None,
        live=None,
        on_exit_zero="complete",
        is_saving=None if is_saving is None else lambda: is_saving(clock.now),
        find_checkpoint=None if find_checkpoint is None else lambda: find_checkpoint(clock.now),
        warning=None if warn_s is None else StopWarning(signum=signal.SIGUSR1, before_s=warn_s),
    )
    trainer = Trainer(clock=clock, plan=plan)
    events: Events = []
    time_to_save = TimeToSave(
        components=lambda: [trainer],  # type: ignore[list-item]
        emit=lambda name, component=None, **fields: events.append((name, fields)),
        clock=clock.read,
        monotonic=clock.read,
        sleep=clock.sleep,
    )
    return Scene(clock, trainer, time_to_save, events)


async def announce_end(scene: Scene, in_s: float) -> None:
    """Announce that the attempt ends in `in_s` seconds, and wait for this number of seconds."""
    async with asyncio.timeout(TEST_WITHIN_S):
        await scene.time_to_save.announce_end(scene.clock.now + in_s, "the time is over")


@pytest.mark.parametrize(
    ("end_in_s", "warned_in_s"),
    [
        (3600.0, 3000.0),
        (600.0, 0.0),
        # The spec sets the warning to 600 s before the end, but only 30 s remain. So the warning is
        # sent at once.
        (30.0, 0.0),
    ],
)
async def test_warning_is_sent_warn_s_seconds_before_a_known_end(
    tmp_path: Path, end_in_s: float, warned_in_s: float
) -> None:
    scene = make_scene(tmp_path, warn_s=600.0)
    began = scene.clock.now

    await announce_end(scene, end_in_s)

    assert scene.trainer.warned_at == [began + warned_in_s]
    [event] = scene.named("component.warned")
    assert event == {
        "signal": "SIGUSR1",
        "processes": ["pid 7"],
        "reason": "the time is over",
        "deadline": began + end_in_s,
    }


async def test_component_without_warn_gets_no_signal(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)

    await announce_end(scene, 30.0)
    await scene.time_to_save.warn_now("cancelled")

    assert scene.trainer.warned_at == []
    assert scene.events == []


async def test_process_that_installs_its_handler_late_is_warned_late(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, warn_s=600.0)
    began = scene.clock.now
    scene.trainer.handlers = lambda: ["pid 7"] if scene.clock.now >= began + 100 else []

    await announce_end(scene, 600.0)

    assert scene.trainer.warned_at == [began + 100]


async def test_processes_are_warned_once_each(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, warn_s=60.0)
    began = scene.clock.now
    scene.trainer.handlers = lambda: (
        ["pid 7"] if scene.clock.now < began + 10 else ["pid 7", "pid 8"]
    )

    await announce_end(scene, 60.0)

    assert [event["processes"] for event in scene.named("component.warned")] == [
        ["pid 7"],
        ["pid 8"],
    ]


async def test_missing_handler_is_reported_at_the_end(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, warn_s=60.0)
    scene.trainer.handlers = list

    await scene.time_to_save.warn_now("cancelled")

    [warning] = scene.named("run.warning")
    assert (
        "did not send the warning signal SIGUSR1 to trainer, because no process of trainer handles"
        in str(warning)
    )


async def test_save_in_flight_is_waited_for(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, grace_s=1.0, save_grace_s=900.0, is_saving=lambda now: now < 1120)

    assert await scene.seconds_until_saved() == 120
    assert scene.named("component.saving") == [{"within_s": 900.0}]


async def test_no_wait_is_reported_if_no_checkpoint_is_being_written(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, is_saving=lambda now: False)

    assert await scene.seconds_until_saved() == 0
    assert scene.named("component.saving") == []


@pytest.mark.parametrize(("save_grace_s", "waited_s"), [(30.0, 30), (0.0, 0), (None, 10)])
async def test_wait_for_a_save_is_limited(
    tmp_path: Path, save_grace_s: float | None, waited_s: int
) -> None:
    scene = make_scene(tmp_path, save_grace_s=save_grace_s, is_saving=lambda now: True)

    waits = [await scene.seconds_until_saved() for _ in range(2)]

    # The first wait has used the whole time limit for the save, so the second wait ends at once.
    assert waits == [waited_s, 0]


@pytest.mark.parametrize("state", ["exited", "hung", "hurried"])
async def test_no_save_is_awaited_if_no_component_can_save(tmp_path: Path, state: str) -> None:
    scene = make_scene(tmp_path, save_grace_s=900.0, is_saving=lambda now: True)
    scene.trainer.exit = "ended" if state == "exited" else None
    scene.trainer.is_hung = state == "hung"
    scene.time_to_save.is_hurried = state == "hurried"

    assert await scene.seconds_until_saved() == 0


async def test_end_without_notice_waits_for_the_checkpoint_after_the_warning(
    tmp_path: Path,
) -> None:
    """The wait lasts 60 s: 40 s to the end of the training step, and 20 s for the checkpoint."""
    scene = make_scene(
        tmp_path,
        warn_s=600.0,
        save_grace_s=300.0,
        is_saving=lambda now: 1040 <= now < 1060,
        find_checkpoint=lambda now: (20, 1060.0) if now >= 1060 else (10, 500.0),
    )

    await scene.time_to_save.warn_now("cancelled")

    assert await scene.seconds_until_saved() == 60


async def test_end_without_notice_waits_at_most_the_time_for_a_save(tmp_path: Path) -> None:
    scene = make_scene(
        tmp_path,
        warn_s=600.0,
        save_grace_s=300.0,
        is_saving=lambda now: False,
        find_checkpoint=lambda now: (10, 500.0),
    )

    await scene.time_to_save.warn_now("cancelled")

    assert await scene.seconds_until_saved() == 300


async def test_end_with_enough_notice_does_not_wait_for_another_checkpoint(tmp_path: Path) -> None:
    scene = make_scene(
        tmp_path,
        warn_s=600.0,
        save_grace_s=300.0,
        is_saving=lambda now: False,
        find_checkpoint=lambda now: (10, 500.0),
    )

    await announce_end(scene, 600.0)

    assert await scene.seconds_until_saved() == 0


async def test_warning_without_checkpoints_gives_the_whole_time(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, warn_s=20.0, save_grace_s=300.0)

    await scene.time_to_save.warn_now("cancelled")

    assert await scene.seconds_until_saved() == 20


async def test_sigkill_is_delayed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    scene = make_scene(
        tmp_path, grace_s=1.0, save_grace_s=60.0, is_saving=lambda now: 1010 <= now < 1030
    )

    async with asyncio.timeout(TEST_WITHIN_S):
        async with scene.time_to_save.delaying_kill(scene.trainer):  # type: ignore[arg-type]
            while scene.clock.now < 1050:
                await asyncio.sleep(0.001)

    first, last = scene.trainer.delays[0], scene.trainer.delays[-1]
    assert (round(first[0]), round(last[0])) == (1010, 1030)
    assert {seconds for _, seconds in scene.trainer.delays} == {5.0}


async def test_sigkill_is_delayed_no_longer_than_the_time_for_a_save(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, grace_s=1.0, save_grace_s=60.0, is_saving=lambda now: True)

    async with asyncio.timeout(TEST_WITHIN_S):
        async with scene.time_to_save.delaying_kill(scene.trainer):  # type: ignore[arg-type]
            while scene.clock.now < 1060:
                await asyncio.sleep(0.001)

    assert max(at + seconds for at, seconds in scene.trainer.delays) == pytest.approx(1060)


async def test_sigkill_is_not_delayed_if_the_spec_gives_no_time_for_a_save(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, is_saving=lambda now: True)
    await scene.seconds_until_saved()

    async with scene.time_to_save.delaying_kill(scene.trainer):  # type: ignore[arg-type]
        await asyncio.sleep(0.05)

    assert scene.trainer.delays == []


async def follow_planned_ends(scene: Scene, until: float) -> None:
    """Let the `TimeToSave` object watch for a planned shutdown of the machine.

    Args:
        scene: The parts of the test.
        until: Time of the clock at which the watch ends.
    """
    watch = asyncio.create_task(scene.time_to_save.follow_planned_ends())
    async with asyncio.timeout(TEST_WITHIN_S):
        while scene.clock.now < until:
            await asyncio.sleep(0)
    watch.cancel()


async def test_shutdown_that_is_scheduled_later_is_warned_of(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, warn_s=600.0)
    shutdown = PlannedEnd(at=5000.0, reason="this machine has a scheduled poweroff")
    scene.trainer.planned_end = lambda now: shutdown if now >= 2000 else None

    await follow_planned_ends(scene, 5000.0)

    assert scene.trainer.warned_at == [pytest.approx(4400, abs=20)]
    [event] = scene.named("component.warned")
    assert (event["reason"], event["deadline"]) == (shutdown.reason, shutdown.at)


async def test_warning_is_repeated_if_the_planned_end_is_moved_to_a_later_time(
    tmp_path: Path,
) -> None:
    scene = make_scene(tmp_path, warn_s=600.0)
    ends = [PlannedEnd(at=2000.0, reason="a drain"), PlannedEnd(at=9000.0, reason="a drain")]
    scene.trainer.planned_end = lambda now: ends[0] if now < 1900 else ends[1]

    await follow_planned_ends(scene, 9000.0)
    await scene.time_to_save.warn_now("the drain")

    assert scene.trainer.warned_at == [
        pytest.approx(1400, abs=20),
        pytest.approx(8400, abs=20),
    ]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("USEC=1795722178000000\nWARN_WALL=1\nMODE=poweroff\n", 1795722178.0),
        ("USEC=1795722178000000\nMODE=reboot\nUID=0\nTTY=pts/0\n", 1795722178.0),
        ("USEC=1795722178000000\nWARN_WALL=1\nMODE=dry-poweroff\n", None),
        ("USEC=soon\nMODE=reboot\n", None),
        ("", None),
        (None, None),
    ],
)
async def test_scheduled_shutdown_is_read_from_the_file_of_systemd(
    tmp_path: Path, text: str | None, at: float | None
) -> None:
    schedule = tmp_path / "scheduled"
    if text is not None:
        schedule.write_text(text)

    end = read_scheduled_shutdown(schedule)

    assert (end.at if end is not None else None) == at


async def test_save_that_begins_after_the_first_check_is_awaited(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, save_grace_s=900.0, is_saving=lambda now: 1005 <= now < 1010)

    first_wait_s = await scene.seconds_until_saved()
    # Muster stops a component other than the trainer, which takes 6 s. The trainer begins to save
    # after 5 s, and saves for 5 s.
    await scene.clock.sleep(6.0)
    second_wait_s = await scene.seconds_until_saved()

    assert (first_wait_s, second_wait_s) == (0, 4)
