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
from tests.support.fleet_fakes import PORT_IN_USE, Stage, loops, plan_of, serving

A, X, R, S = GroupState.ACTIVE, GroupState.INACTIVE, GroupState.RECOVERING, GroupState.STALE
RETIRED = GroupState.RETIRED


async def die_repeatedly(stage: Stage, rank: int, times: int, every_s: float = 10.0) -> None:
    """Let a server die and recover several times, with pauses between."""
    for _ in range(times):
        stage.host.die(rank)
        await stage.until_active()
        await asyncio.sleep(every_s)


@in_virtual_time
async def test_recovery_events_have_id_cause_try_and_time() -> None:
    stage = await serving()
    stage.host[0].start_errors = ["no GPU"]
    stage.host.die(0, "exit 7")
    await stage.until(lambda: len(stage.told("rollout.recovery.ended")) == 2)

    begun, ended = stage.told("rollout.recovery.begun"), stage.told("rollout.recovery.ended")
    place = {"group": 0, "ranks": [0]}
    assert begun == [
        {"id": "r1", **place, "cause": "rank 0 died: exit 7", "try": 1},
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
    stage = await serving(backoff_s=1.0, max_backoff_s=8.0)
    stage.host[0].start_errors = ["no GPU"] * 9
    stage.host.die(0)
    await stage.until(lambda: stage.states()[0] is R)
    await stage.until_active()

    starts = stage.host.times("start", 0)[1:]

    pauses = [after - before for before, after in itertools.pairwise(starts)]
    limits = [1, 2, 4, 8, 8, 8, 8, 8, 8]
    for pause, limit in zip(pauses, limits, strict=True):
        assert limit / 2 <= pause <= limit + 0.1


@in_virtual_time
async def test_pauses_grow_with_each_failure_until_a_group_serves_for_long() -> None:
    stage = await serving(backoff_s=4.0, max_backoff_s=60.0)
    await die_repeatedly(stage, 0, times=3)
    stage.host.die(0)
    await stage.until(lambda: stage.states()[0] is R)
    slow_s = await stage.until_active()
    await asyncio.sleep(61.0)
    stage.host.die(0)
    await stage.until(lambda: stage.states()[0] is R)

    quick_s = await stage.until_active()

    assert slow_s >= 8.0
    assert quick_s < 0.5


@in_virtual_time
async def test_group_is_retired_when_recoveries_have_spent_the_budget() -> None:
    stage = await serving(budget=3)
    await die_repeatedly(stage, 0, times=3)
    stage.host.die(0)
    await asyncio.sleep(1000.0)

    assert stage.states() == [RETIRED, A]
    assert len(stage.host.times("start", 0)) == 4
    assert not stage.host[0].is_alive
    assert not stage.fleet.fatal.done()
    [group, _] = stage.fleet.registry.view.groups
    assert group.cause == (
        "the budget of 3 recoveries is used up; its last failure: rank 0 died: killed by SIGKILL"
    )


@in_virtual_time
async def test_failed_tries_count_against_the_budget() -> None:
    stage = await serving(budget=3)
    stage.host[0].start_errors = ["no GPU"] * 100
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [RETIRED, A])

    assert len(stage.told("rollout.recovery.begun")) == 3


@in_virtual_time
async def test_deaths_within_seconds_cost_one_recovery_of_the_budget() -> None:
    stage = await serving(9, budget=1, parallel=8)
    for rank in range(8):
        stage.host.die(rank, "exit 1" if rank == 0 else "killed by SIGABRT")
        await asyncio.sleep(0.2)
    await stage.until_active()
    await asyncio.sleep(100.0)

    assert stage.states() == [A] * 9


@in_virtual_time
async def test_servers_that_hang_together_are_one_incident() -> None:
    stage = await serving(4, budget=1)
    await asyncio.sleep(100.0)
    for rank in range(3):
        stage.host[rank].answers = stage.host[rank].at_home = "hang"
    await stage.until(lambda: len(stage.told("rollout.recovery.ended")) == 3)

    assert stage.states() == [A] * 4


@in_virtual_time
async def test_deaths_further_apart_are_separate_incidents() -> None:
    stage = await serving(3, budget=1)
    stage.host.die(0)
    await asyncio.sleep(stage.settings.health.interval_s + 0.1)
    stage.host.die(1)
    await asyncio.sleep(10.0)

    assert stage.states() == [A, RETIRED, A]


@in_virtual_time
async def test_number_of_groups_that_start_at_once_is_limited() -> None:
    stage = await serving(10, parallel=3)
    for rank in range(10):
        stage.host[rank].loads_for_s = 20.0
    for rank in range(9):
        stage.host.die(rank)
    loading = []
    while set(stage.states()) != {A}:
        await asyncio.sleep(1.0)
        loading.append(sum(server.is_alive for server in stage.host.servers.values()) - 1)

    assert max([after - before for before, after in itertools.pairwise([0, *loading])]) == 3


@in_virtual_time
async def test_run_fails_if_fewer_engines_than_min_active_serve() -> None:
    stage = await serving(3, min_active=2)
    stage.host.die(0)
    assert not stage.fleet.fatal.done()
    stage.host.die(1, "exit 1", log_end="CUDA out of memory")
    reason = await stage.fleet.fatal
    assert stage.told("rollout.failed") == [{"reason": reason}]

    assert reason.startswith(
        "1 of 3 engines serve requests, min_active is 2: ranks 0: rank 0 died: "
    )
    assert reason.endswith("last lines of rank 1:\nCUDA out of memory")


@in_virtual_time
async def test_start_fails_if_a_retired_engine_is_needed_for_min_active() -> None:
    stage = Stage(plan_of(3), min_active=3, budget=1)
    stage.host[1].start_errors = ["no GPU"] * 9
    with pytest.raises(FleetFailed, match="2 of 3 engines remain, 3 are needed"):
        await stage.fleet.start()


@in_virtual_time
async def test_group_that_fails_at_first_is_recovered_during_the_start() -> None:
    stage = Stage(plan_of(3), min_active=3)
    stage.host[1].start_errors = ["no GPU"]
    stage.host[2].dies_after_s = [0.005]
    await stage.fleet.start()

    assert stage.states() == [A, A, A]
    assert [group.recoveries for group in stage.fleet.registry.view.groups] == [0, 1, 1]


@in_virtual_time
async def test_fleet_is_ready_without_a_retired_group() -> None:
    stage = Stage(plan_of(3), min_active=1, budget=1)
    stage.host[1].start_errors = ["no GPU"] * 9
    await stage.fleet.start()
    await stage.until(lambda: stage.states() == [A, RETIRED, A])

    assert stage.fleet.snapshot()["ready"] is True
    assert stage.routed() == [0, 2]


@in_virtual_time
async def test_failed_starts_before_a_success_do_not_fail_the_run() -> None:
    stage = Stage(plan_of(2), backoff_s=0.1)
    stage.host[0].start_errors = ["no GPU"] * 2
    stage.host[1].loads_for_s = 50.0
    starting = asyncio.create_task(stage.fleet.start())
    await stage.until(lambda: stage.states()[0] is A)
    stage.host[0].start_errors = ["no GPU"] * 2
    stage.host.die(0)
    await starting

    assert stage.states() == [A, A]


@in_virtual_time
async def test_three_failed_starts_in_a_row_fail_the_fleet() -> None:
    stage = Stage(plan_of(3))
    stage.host[1].start_errors = ["no such file: serve"] * 9
    with pytest.raises(FleetFailed, match="ranks 1 failed to start 3 times: no such file"):
        await stage.fleet.start()
    assert await stage.fleet.stop() == ""

    assert len(stage.host.times("start", 1)) == 3
    assert not any(server.is_alive for server in stage.host.servers.values())


@in_virtual_time
async def test_start_without_a_token_fails_in_time_and_quotes_the_last_answer() -> None:
    stage = await serving(start_within_s=50.0)
    stage.host[0].loads_for_s = 1e6
    stage.host.die(0)
    await stage.until(lambda: stage.told("rollout.recovery.ended"))

    assert str(stage.told("rollout.recovery.ended")[0]["message"]) == (
        "was not ready within 50 s (start_within_s); rank 0: 503 Scheduler is dead"
    )


@in_virtual_time
async def test_group_does_not_restart_before_its_old_processes_have_ended() -> None:
    stage = await serving(servers=2)
    stage.host[1].is_stuck = True
    stage.host.die(0)
    await asyncio.sleep(5.0)
    stage.host[1].is_stuck = False
    await stage.until_active()

    assert stage.host.faults == []
    assert stage.told("rollout.warning")[0] == {"message": "processes could not be ended: pid 1"}
    [first, *_] = stage.told("rollout.recovery.ended")
    assert first["message"] == "its old processes could not be ended: pid 1"


@in_virtual_time
async def test_deaths_of_two_ranks_of_a_group_are_one_failure() -> None:
    stage = await serving(servers=2)
    stage.host.die(0)
    stage.host.die(1)
    await stage.until_active()
    await asyncio.sleep(100.0)

    assert len(stage.told("rollout.recovery.begun")) == 1
    assert len(stage.host.times("start", 0)) == 2


@in_virtual_time
async def test_late_report_of_an_old_epochs_death_is_ignored() -> None:
    stage = await serving()
    stage.host.die(0)
    await stage.until(lambda: stage.states()[0] is R)
    await stage.until_active()
    stage.host.on_death(Death(rank=0, epoch=1, why="exit 1", log_end=PORT_IN_USE))
    await asyncio.sleep(10.0)

    assert stage.states() == [A, A]
    assert [event["epoch"] for event in stage.told("rollout.server.died")] == [1]
    assert len(stage.host.times("start", 0)) == 2


@in_virtual_time
async def test_recovered_group_is_stale_until_the_next_sync() -> None:
    stage = await serving()
    await stage.sync(1)
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [S, A])
    assert stage.routed() == [1]
    await stage.sync(2)

    assert stage.states() == [A, A]
    assert stage.routed() == [0, 1]


@in_virtual_time
async def test_stale_group_that_hangs_is_recovered() -> None:
    stage = await serving()
    await stage.sync(1)
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [S, A])
    stage.host[0].answers = stage.host[0].at_home = "hang"
    await stage.until_out()
    await stage.until(lambda: stage.states() == [S, A])

    assert len(stage.host.times("start", 0)) == 3


@in_virtual_time
async def test_stop_ends_all_servers_and_tasks() -> None:
    stage = await serving(4)
    stage.host.die(0)
    stage.host[1].answers = "hang"
    await asyncio.sleep(50.0)
    assert await stage.fleet.stop() == ""
    starts = len(stage.host.log)
    remaining_tasks = loops()
    await asyncio.sleep(1000.0)

    assert remaining_tasks == []
    assert len(stage.host.log) - starts == 0
    assert stage.routed() == []
    assert not any(server.is_alive for server in stage.host.servers.values())
    assert stage.fleet.snapshot()["state"] == "stopping"


@in_virtual_time
async def test_stop_during_the_start_ends_the_start() -> None:
    stage = Stage(plan_of(2))
    stage.host[0].loads_for_s = 1e6
    starting = asyncio.create_task(stage.fleet.start())
    await asyncio.sleep(10.0)
    began_s = now_s()
    await stage.fleet.stop()
    with pytest.raises(FleetFailed, match="is stopped"):
        await starting
    assert loops() == []

    assert now_s() - began_s < 2.0


@in_virtual_time
async def test_running_fleet_cannot_be_started() -> None:
    stage = await serving(1)
    with pytest.raises(IllegalTransition, match="the fleet is running, so it cannot be started"):
        await stage.fleet.start()
