"""Tests of the recovery: pauses, budget and parallel restarts of groups that have failed."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tasks.record.states import GroupState
from tasks.rollout.fleet import FleetFailed
from tasks.rollout.probing import Death
from tasks.spec.errors import IllegalTransition
from tests.support.fleet_clock import in_virtual_time, now_s
from tests.support.fleet_fakes import (
    PORT_IN_USE,
    FleetHarness,
    list_fleet_tasks,
    make_topology,
    start_fake_fleet,
)

A, X, R, S = GroupState.ACTIVE, GroupState.INACTIVE, GroupState.RECOVERING, GroupState.STALE
RETIRED = GroupState.RETIRED


async def die_repeatedly(
    harness: FleetHarness, rank: int, times: int, every_s: float = 10.0
) -> None:
    """Let a server die and recover several times.

    Args:
        harness: The fleet.
        rank: Rank of the server.
        times: Number of deaths.
        every_s: Pause between two deaths, in seconds.
    """
    for _ in range(times):
        harness.host.die(rank)
        await harness.wait_until_active()
        await asyncio.sleep(every_s)


@in_virtual_time
async def test_recovery_events_have_id_cause_try_and_time() -> None:
    harness = await start_fake_fleet()
    harness.host[0].start_errors = ["no GPU"]
    harness.host.die(0, "exit 7")
    await harness.wait_until(lambda: len(harness.list_events("rollout.recovery.ended")) == 2)

    begun, ended = (
        harness.list_events("rollout.recovery.begun"),
        harness.list_events("rollout.recovery.ended"),
    )
    place = {"group": 0, "ranks": [0]}
    assert begun == [
        {"id": "r1", **place, "cause": "the server of rank 0 died: exit 7", "try": 1},
        {"id": "r2", **place, "cause": "no GPU", "try": 2},
    ]
    took_s = [event.pop("took_s") for event in ended]
    assert ended == [
        {"id": "r1", **place, "outcome": "failed", "message": "no GPU"},
        {"id": "r2", **place, "outcome": "recovered", "message": ""},
    ]
    assert 0 < took_s[0] < 0.1
    assert 0.5 <= took_s[1] < 1.1


@in_virtual_time
async def test_pauses_between_tries_grow_up_to_the_limit() -> None:
    harness = await start_fake_fleet(backoff_s=1.0, max_backoff_s=8.0)
    harness.host[0].start_errors = ["no GPU"] * 9
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states()[0] is R)
    await harness.wait_until_active()

    starts = harness.host.times("start", 0)[1:]

    pauses = [after - before for before, after in itertools.pairwise(starts)]
    limits = [1, 2, 4, 8, 8, 8, 8, 8, 8]
    for pause, limit in zip(pauses, limits, strict=True):
        assert limit / 2 <= pause <= limit + 0.1


@in_virtual_time
async def test_pauses_grow_with_each_failure_until_a_group_serves_for_long() -> None:
    harness = await start_fake_fleet(backoff_s=4.0, max_backoff_s=60.0)
    await die_repeatedly(harness, 0, times=3)
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states()[0] is R)
    slow_s = await harness.wait_until_active()
    await asyncio.sleep(61.0)
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states()[0] is R)

    quick_s = await harness.wait_until_active()

    assert slow_s >= 8.0
    assert quick_s < 0.5


@in_virtual_time
async def test_group_is_retired_when_recoveries_have_spent_the_budget() -> None:
    harness = await start_fake_fleet(budget=3)
    await die_repeatedly(harness, 0, times=3)
    harness.host.die(0)
    await asyncio.sleep(1000.0)

    assert harness.states() == [RETIRED, A]
    assert len(harness.host.times("start", 0)) == 4
    assert not harness.host[0].is_alive
    assert not harness.fleet.fatal.done()
    [group, _] = harness.fleet.registry.view.groups
    assert group.cause == (
        "all 3 allowed restarts are used up (recovery.budget); last failure of the engine: the "
        "server of rank 0 died: killed by SIGKILL"
    )


@in_virtual_time
async def test_failed_tries_count_against_the_budget() -> None:
    harness = await start_fake_fleet(budget=3)
    harness.host[0].start_errors = ["no GPU"] * 100
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states() == [RETIRED, A])

    assert len(harness.list_events("rollout.recovery.begun")) == 3


@in_virtual_time
async def test_deaths_within_seconds_cost_one_recovery_of_the_budget() -> None:
    harness = await start_fake_fleet(9, budget=1, parallel=8)
    for rank in range(8):
        harness.host.die(rank, "exit 1" if rank == 0 else "killed by SIGABRT")
        await asyncio.sleep(0.2)
    await harness.wait_until_active()
    await asyncio.sleep(100.0)

    assert harness.states() == [A] * 9


@in_virtual_time
async def test_servers_that_hang_together_are_one_incident() -> None:
    harness = await start_fake_fleet(4, budget=1)
    await asyncio.sleep(100.0)
    for rank in range(3):
        harness.host[rank].answers = harness.host[rank].at_home = "hang"
    await harness.wait_until(lambda: len(harness.list_events("rollout.recovery.ended")) == 3)

    assert harness.states() == [A] * 4


@in_virtual_time
async def test_deaths_further_apart_are_separate_incidents() -> None:
    harness = await start_fake_fleet(3, budget=1)
    harness.host.die(0)
    await asyncio.sleep(harness.settings.health.interval_s + 0.1)
    harness.host.die(1)
    await asyncio.sleep(10.0)

    assert harness.states() == [A, RETIRED, A]


@in_virtual_time
async def test_number_of_groups_that_start_at_once_is_limited() -> None:
    harness = await start_fake_fleet(10, parallel=3)
    for rank in range(10):
        harness.host[rank].loads_for_s = 20.0
    for rank in range(9):
        harness.host.die(rank)
    loading = []
    while set(harness.states()) != {A}:
        await asyncio.sleep(1.0)
        loading.append(sum(server.is_alive for server in harness.host.servers.values()) - 1)

    assert max([after - before for before, after in itertools.pairwise([0, *loading])]) == 3


@in_virtual_time
async def test_run_fails_if_fewer_engines_than_min_active_serve() -> None:
    harness = await start_fake_fleet(3, min_active=2)
    harness.host.die(0)
    assert not harness.fleet.fatal.done()
    harness.host.die(1, "exit 1", log_end="CUDA out of memory")
    reason = await harness.fleet.fatal
    assert harness.list_events("rollout.failed") == [{"reason": reason}]

    assert reason.startswith(
        "only 1 of 3 engines serve requests, but recovery.min_active requires at least 2: ranks 0: "
        "the server of rank 0 died: "
    )
    assert reason.endswith("last lines of rank 1:\nCUDA out of memory")


@in_virtual_time
async def test_start_fails_if_a_retired_engine_is_needed_for_min_active() -> None:
    harness = FleetHarness(make_topology(3), min_active=3, budget=1)
    harness.host[1].start_errors = ["no GPU"] * 9
    with pytest.raises(
        FleetFailed,
        match="Muster no longer restarts 1 of 3 engines, but the run needs at least 3 engines",
    ):
        await harness.fleet.start()


@in_virtual_time
async def test_group_that_fails_at_first_is_recovered_during_the_start() -> None:
    harness = FleetHarness(make_topology(3), min_active=3)
    harness.host[1].start_errors = ["no GPU"]
    harness.host[2].dies_after_s = [0.005]
    await harness.fleet.start()

    assert harness.states() == [A, A, A]
    assert [group.recoveries for group in harness.fleet.registry.view.groups] == [0, 1, 1]


@in_virtual_time
async def test_fleet_is_ready_without_a_retired_group() -> None:
    harness = FleetHarness(make_topology(3), min_active=1, budget=1)
    harness.host[1].start_errors = ["no GPU"] * 9
    await harness.fleet.start()
    await harness.wait_until(lambda: harness.states() == [A, RETIRED, A])

    assert harness.fleet.snapshot()["ready"] is True
    assert harness.list_routed_ranks() == [0, 2]


@in_virtual_time
async def test_failed_starts_before_a_success_do_not_fail_the_run() -> None:
    harness = FleetHarness(make_topology(2), backoff_s=0.1)
    harness.host[0].start_errors = ["no GPU"] * 2
    harness.host[1].loads_for_s = 50.0
    starting = asyncio.create_task(harness.fleet.start())
    await harness.wait_until(lambda: harness.states()[0] is A)
    harness.host[0].start_errors = ["no GPU"] * 2
    harness.host.die(0)
    await starting

    assert harness.states() == [A, A]


@in_virtual_time
async def test_three_failed_starts_in_a_row_fail_the_fleet() -> None:
    harness = FleetHarness(make_topology(3))
    harness.host[1].start_errors = ["no such file: serve"] * 9
    with pytest.raises(FleetFailed, match="ranks 1 failed to start 3 times: no such file"):
        await harness.fleet.start()
    assert await harness.fleet.stop() == ""

    assert len(harness.host.times("start", 1)) == 3
    assert not any(server.is_alive for server in harness.host.servers.values())


@in_virtual_time
async def test_start_without_a_token_fails_in_time_and_quotes_the_last_answer() -> None:
    harness = await start_fake_fleet(start_within_s=50.0)
    harness.host[0].loads_for_s = 1e6
    harness.host.die(0)
    await harness.wait_until(lambda: harness.list_events("rollout.recovery.ended"))

    assert str(harness.list_events("rollout.recovery.ended")[0]["message"]) == (
        "the engine was not ready within 50 s (start_within_s); rank 0: 503 Scheduler is dead"
    )


@in_virtual_time
async def test_group_does_not_restart_before_its_old_processes_have_ended() -> None:
    harness = await start_fake_fleet(servers=2)
    harness.host[1].is_stuck = True
    harness.host.die(0)
    await asyncio.sleep(5.0)
    harness.host[1].is_stuck = False
    await harness.wait_until_active()

    assert harness.host.faults == []
    assert harness.list_events("rollout.warning")[0] == {
        "message": "Muster could not end old processes of the inference servers: pid 1"
    }
    [first, *_] = harness.list_events("rollout.recovery.ended")
    assert first["message"] == "Muster could not end old processes of the engine: pid 1"


@in_virtual_time
async def test_deaths_of_two_ranks_of_a_group_are_one_failure() -> None:
    harness = await start_fake_fleet(servers=2)
    harness.host.die(0)
    harness.host.die(1)
    await harness.wait_until_active()
    await asyncio.sleep(100.0)

    assert len(harness.list_events("rollout.recovery.begun")) == 1
    assert len(harness.host.times("start", 0)) == 2


@in_virtual_time
async def test_late_report_of_an_old_epochs_death_is_ignored() -> None:
    harness = await start_fake_fleet()
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states()[0] is R)
    await harness.wait_until_active()
    harness.host.on_death(Death(rank=0, epoch=1, why="exit 1", log_end=PORT_IN_USE))
    await asyncio.sleep(10.0)

    assert harness.states() == [A, A]
    assert [event["epoch"] for event in harness.list_events("rollout.server.died")] == [1]
    assert len(harness.host.times("start", 0)) == 2


@in_virtual_time
async def test_recovered_group_is_stale_until_the_next_sync() -> None:
    harness = await start_fake_fleet()
    await harness.sync(1)
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states() == [S, A])
    assert harness.list_routed_ranks() == [1]
    await harness.sync(2)

    assert harness.states() == [A, A]
    assert harness.list_routed_ranks() == [0, 1]


@in_virtual_time
async def test_stale_group_that_hangs_is_recovered() -> None:
    harness = await start_fake_fleet()
    await harness.sync(1)
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states() == [S, A])
    harness.host[0].answers = harness.host[0].at_home = "hang"
    await harness.wait_until_failed()
    await harness.wait_until(lambda: harness.states() == [S, A])

    assert len(harness.host.times("start", 0)) == 3


@in_virtual_time
async def test_stop_ends_all_servers_and_tasks() -> None:
    harness = await start_fake_fleet(4)
    harness.host.die(0)
    harness.host[1].answers = "hang"
    await asyncio.sleep(50.0)
    assert await harness.fleet.stop() == ""
    starts = len(harness.host.log)
    remaining_tasks = list_fleet_tasks()
    await asyncio.sleep(1000.0)

    assert remaining_tasks == []
    assert len(harness.host.log) - starts == 0
    assert harness.list_routed_ranks() == []
    assert not any(server.is_alive for server in harness.host.servers.values())
    assert harness.fleet.snapshot()["state"] == "stopping"


@in_virtual_time
async def test_stop_during_the_start_ends_the_start() -> None:
    harness = FleetHarness(make_topology(2))
    harness.host[0].loads_for_s = 1e6
    starting = asyncio.create_task(harness.fleet.start())
    await asyncio.sleep(10.0)
    began_s = now_s()
    await harness.fleet.stop()
    with pytest.raises(FleetFailed, match="is stopped"):
        await starting
    assert list_fleet_tasks() == []

    assert now_s() - began_s < 2.0


@in_virtual_time
async def test_running_fleet_cannot_be_started() -> None:
    harness = await start_fake_fleet(1)
    with pytest.raises(IllegalTransition, match="can be started, but this fleet is running"):
        await harness.fleet.start()


@pytest.mark.parametrize("part", ["syncs", "_recovery", "_health"])
@in_virtual_time
async def test_error_in_one_step_of_the_stop_does_not_keep_servers_alive(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await start_fake_fleet(servers=2)

    async def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(getattr(harness.fleet, part), "stop", fail)
    remaining = await harness.fleet.stop()

    assert "RuntimeError('a bug')" in remaining
    assert not any(server.is_alive for server in harness.host.servers.values())
