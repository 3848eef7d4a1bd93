"""Tests of FLEET_LOST: when it applies, and the last activity of the fleet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.processes.attempt import make_failure
from tasks.record.events import Event
from tasks.record.outcome import Exit, Failure, Verdict
from tasks.record.places import AttemptPlace
from tasks.record.states import RunState
from tasks.rollout.backends import Ask
from tasks.rollout.fleet_loss import describe_fleet_activity, recognize_fleet_loss
from tasks.rollout.sync import InFlight
from tasks.spec.failure_kinds import FailureKind
from tests.support.fleet_clock import in_virtual_time
from tests.support.fleet_fakes import start_fake_fleet

CRASH = 'Traceback (most recent call last):\n  File "fleet.py", line 8, in run\nKeyError: 7\n'
#: Log of a fleet that has ended because of an error: the error of a server, the reason of the end,
#: and an error during the clean-up.
GAVE_UP = (
    "CUDA out of memory\nFleetError: the servers of ranks 0 failed to start 3 times\nERROR x\n"
    f"{CRASH}"
)


@pytest.fixture
def place(tmp_path: Path) -> AttemptPlace:
    return AttemptPlace(directory=tmp_path, number=1)


def fleet_event(name: str, **fields: Any) -> Event:
    return Event(at=1.0, name=name, fields=fields)


def group_moved(engine: int, before: str, after: str, cause: str = "") -> Event:
    move = {"group": engine, "ranks": [engine], "before": before, "after": after, "cause": cause}
    return fleet_event("rollout.group.state", **move, epoch=1)


#: Events of a fleet with three engines. At the end, two engines serve and the third recovers.
LIFE = [
    *(group_moved(engine, "starting", "active") for engine in range(3)),
    group_moved(2, "active", "inactive", "rank 2 died"),
    group_moved(2, "inactive", "recovering", "rank 2 died"),
]


def judge(
    place: AttemptPlace,
    log: str = "INFO gateway on http://127.0.0.1:8000\n",
    *,
    code: int | None = None,
    signal: int | None = None,
    component: str = "rollout",
) -> Failure:
    """Return the failure of an attempt in which one component ended.

    The arguments give the component, its exit code or signal, and the text of its log.
    """
    place.log(component).write_text(log)
    place.fleet_events.write_text("".join(f"{event.as_line()}\n" for event in LIFE))
    ended = Exit(exit_code=code, signal=signal, at_monotonic_s=1.0)
    message = f"{component} (pid 7) ended"
    failure = make_failure(component, log, message=message, rule="exit", exit=ended)
    verdict = recognize_fleet_loss(Verdict.failed(failure, 1.0), place, 3)
    assert verdict.failure is not None and verdict.message == str(verdict.failure)
    return verdict.failure


@pytest.mark.parametrize(
    ("end", "log"),
    [
        ({"signal": 9}, "INFO gateway on http://127.0.0.1:8000\n"),
        ({"signal": 11}, "Fatal Python error: Segmentation fault\n"),
        # the fleet's process ends with an uncaught exception, so the fleet is lost
        ({"code": 1}, CRASH),
        ({"code": 1}, ""),
        # a process outside the run has stopped the fleet with a signal, so the fleet is lost
        ({"code": 0}, "INFO stopped\n"),
        # the log contains an earlier error of a server, but a signal ended the fleet's process, so
        # the fleet is lost
        ({"signal": 9}, "WARNING server.died why=ray.exceptions.NodeDiedError: lost\n"),
        # the fleet's process was killed together with its guardian, so the exit status is unknown
        ({}, "INFO gateway on http://127.0.0.1:8000\n"),
    ],
)
def test_killed_or_crashed_fleet_is_lost(
    place: AttemptPlace, end: dict[str, int], log: str
) -> None:
    lost = judge(place, log, **end)

    assert (lost.kind, lost.rule) == (FailureKind.FLEET_LOST, "fleet-lost")
    assert lost.message.startswith("rollout (pid 7) ended")
    doing = "when the process ended, 2 of 3 engines served requests, recovering: 2"
    assert lost.message.endswith(f"; {doing}")


@pytest.mark.parametrize(
    ("end", "log", "kind"),
    [
        ({"code": 1}, GAVE_UP, "CUDA_OOM"),
        (
            {"code": 1},
            "FleetError: Muster no longer restarts 1 of 2 engines, but the run needs at least 2 "
            "engines\n",
            "RUNTIME_ERROR",
        ),
        (
            {"code": 2},
            "FleetError: Muster could not assign the inference servers to nodes: no GPUs\n",
            "RUNTIME_ERROR",
        ),
        # the log named an error before the fleet's process was killed, so this error is the cause
        ({"signal": 9}, GAVE_UP, "CUDA_OOM"),
        # the fleet ran out of memory. A new fleet would run out of memory again, so the failure is
        # HOST_OOM and not FLEET_LOST
        ({"code": 1}, "MemoryError\n", "HOST_OOM"),
        ({"signal": 9}, "Memory cgroup out of memory: Killed process 7 (python)\n", "HOST_OOM"),
        # another component than the fleet failed, so the fleet is not lost
        ({"signal": 9, "component": "trainer"}, "step 8\n", "UNKNOWN"),
    ],
)
def test_fleet_with_its_own_reason_is_not_lost(
    place: AttemptPlace, end: dict[str, Any], log: str, kind: str
) -> None:
    kept = judge(place, log, **end)

    assert kept.kind.value == kind
    assert "engines served" not in kept.message


@pytest.mark.parametrize(("kind", "rule"), [("STALLED", "live"), ("NOT_READY", "not-ready")])
def test_living_fleet_is_not_lost(place: AttemptPlace, kind: str, rule: str) -> None:
    failure = Failure(kind=FailureKind(kind), component="rollout", message="m", rule=rule)
    verdict = Verdict.failed(failure, 1.0)

    assert recognize_fleet_loss(verdict, place, 3) is verdict


def test_verdict_without_failure_stays_unchanged(place: AttemptPlace) -> None:
    verdict = Verdict(state=RunState.COMPLETED, message="60/60 steps")

    assert recognize_fleet_loss(verdict, place, 3) is verdict


def test_verdict_of_a_lost_fleet_keeps_its_leftovers(place: AttemptPlace) -> None:
    failure = Failure(
        kind=FailureKind.UNKNOWN,
        component="rollout",
        message="killed",
        rule="exit",
        signal="SIGKILL",
    )
    verdict = Verdict.failed(failure, 1.0).with_leftovers({"rollout": (7,)})

    lost = recognize_fleet_loss(verdict, place, 1)

    assert lost.left == {"rollout": (7,)}
    assert lost.failure is not None and lost.failure.kind is FailureKind.FLEET_LOST
    # the process of the fleet wrote no events, so the engine counts as starting
    assert lost.message.endswith(
        "when the process ended, 0 of 1 engines served requests, starting: 0"
    )


@pytest.mark.parametrize(
    ("events", "doing"),
    [
        ([], "0 of 3 engines served requests, starting: 0, 1, 2"),
        (LIFE[:1], "1 of 3 engines served requests, starting: 1, 2"),
        (LIFE[:3], "3 of 3 engines served requests"),
        (LIFE, "2 of 3 engines served requests, recovering: 2"),
        (
            [*LIFE, group_moved(0, "active", "stale"), group_moved(1, "active", "suspect")],
            "1 of 3 engines served requests, recovering: 2, stale: 0",
        ),
        (
            [*LIFE[:3], fleet_event("rollout.sync.begun")],
            "3 of 3 engines served requests, weights were being synced",
        ),
        (
            [*LIFE[:3], fleet_event("rollout.sync.begun"), fleet_event("rollout.sync.ended")],
            "3 of 3 engines served requests",
        ),
    ],
)
def test_last_activity_of_a_fleet_follows_from_its_events(events: list[Event], doing: str) -> None:
    assert describe_fleet_activity(events, 3) == doing


@in_virtual_time
async def test_stop_of_the_fleet_is_not_its_last_activity() -> None:
    harness = await start_fake_fleet(3)
    begun = await harness.fleet.begin_sync(60.0, InFlight.WAIT)
    push = Ask(method="POST", path="/update_weights_from_disk")
    await harness.fleet.syncs.broadcast(begun["sync"], push, 10.0)

    await harness.fleet.stop()

    events = [
        fleet_event(name, **json.loads(json.dumps(fields))) for _, name, fields in harness.events
    ]
    assert (
        describe_fleet_activity(events, 3)
        == "3 of 3 engines served requests, weights were being synced"
    )


def test_incomplete_event_line_is_skipped(place: AttemptPlace) -> None:
    judge(place, signal=9)
    with place.fleet_events.open("a") as f:
        f.write('{"at": 3.0, "event": "rollout.gro')
    killed = Failure(
        kind=FailureKind.UNKNOWN, component="rollout", message="m", rule="exit", signal="SIGKILL"
    )

    lost = recognize_fleet_loss(Verdict.failed(killed, 1.0), place, 3)

    assert "2 of 3 engines served requests" in lost.message
