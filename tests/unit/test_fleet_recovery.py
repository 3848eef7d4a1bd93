"""What becomes of groups that fail: how soon, how often and how many at once they start again."""

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
GONE = GroupState.RETIRED


async def flap(stage: Stage, rank: int, times: int, every_s: float = 10.0) -> None:
    """It dies and comes back, so often."""
    for _ in range(times):
        stage.host.die(rank)
        await stage.until_active()
        await asyncio.sleep(every_s)


@in_virtual_time
async def test_a_recovery_is_told_with_its_id_cause_try_and_time() -> None:
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
    took_s = [one.pop("took_s") for one in ended]
    assert ended == [
        {"id": "r1", **place, "outcome": "failed", "message": "no GPU"},
        {"id": "r2", **place, "outcome": "recovered", "message": ""},
    ]
    assert 0 < took_s[0] < 0.1
    assert 0.5 <= took_s[1] < 1.1


@in_virtual_time
async def test_the_pauses_between_tries_grow_up_to_the_longest() -> None:
    stage = await serving(backoff_s=1.0, max_backoff_s=8.0)
    stage.host[0].start_errors = ["no GPU"] * 9
    stage.host.die(0)
    await stage.until(lambda: stage.states()[0] is R)
    await stage.until_active()

    starts = stage.host.times("start", 0)[1:]

    pauses = [after - before for before, after in itertools.pairwise(starts)]
    longest = [1, 2, 4, 8, 8, 8, 8, 8, 8]
    for pause, most in zip(pauses, longest, strict=True):
        assert most / 2 <= pause <= most + 0.1


@in_virtual_time
async def test_a_group_that_flaps_waits_longer_each_time_until_it_has_served_for_long() -> None:
    stage = await serving(backoff_s=4.0, max_backoff_s=60.0)
    await flap(stage, 0, times=3)
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
async def test_the_budget_is_spent_by_recoveries_and_then_the_group_is_retired() -> None:
    stage = await serving(budget=3)
    await flap(stage, 0, times=3)
    stage.host.die(0)
    await asyncio.sleep(1000.0)

    assert stage.states() == [GONE, A]
    assert len(stage.host.times("start", 0)) == 4
    assert not stage.host[0].is_alive
    assert not stage.fleet.fatal.done()
    [group, _] = stage.fleet.registry.view.groups
    assert group.cause == (
        "the budget of 3 recoveries is spent; its last failure: rank 0 died: killed by SIGKILL"
    )


@in_virtual_time
async def test_tries_that_fail_spend_the_budget_too() -> None:
    stage = await serving(budget=3)
    stage.host[0].start_errors = ["no GPU"] * 100
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [GONE, A])

    assert len(stage.told("rollout.recovery.begun")) == 3


@in_virtual_time
async def test_deaths_within_seconds_are_one_incident_and_cost_one() -> None:
    stage = await serving(9, budget=1, parallel=8)
    for rank in range(8):
        stage.host.die(rank, "exit 1" if rank == 0 else "killed by SIGABRT")
        await asyncio.sleep(0.2)
    await stage.until_active()
    await asyncio.sleep(100.0)

    assert stage.states() == [A] * 9


@in_virtual_time
async def test_servers_that_hang_at_one_time_are_one_incident_too() -> None:
    stage = await serving(4, budget=1)
    await asyncio.sleep(100.0)
    for rank in range(3):
        stage.host[rank].answers = stage.host[rank].at_home = "hang"
    await stage.until(lambda: len(stage.told("rollout.recovery.ended")) == 3)

    assert stage.states() == [A] * 4


@in_virtual_time
async def test_deaths_further_apart_are_incidents_of_their_own() -> None:
    stage = await serving(3, budget=1)
    stage.host.die(0)
    await asyncio.sleep(stage.settings.health.interval_s + 0.1)
    stage.host.die(1)
    await asyncio.sleep(10.0)

    assert stage.states() == [A, GONE, A]


@in_virtual_time
async def test_no_more_groups_start_at_once_than_may() -> None:
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
async def test_below_the_floor_the_run_fails_by_name() -> None:
    stage = await serving(3, min_active=2)
    stage.host.die(0)
    assert not stage.fleet.fatal.done()
    stage.host.die(1, "exit 1", last_words="CUDA out of memory")
    reason = await stage.fleet.fatal
    assert stage.told("rollout.failed") == [{"reason": reason}]

    assert reason.startswith("1 of 3 engines serve, min_active is 2: ranks 0: rank 0 died: ")
    assert reason.endswith("last lines of rank 1:\nCUDA out of memory")


@in_virtual_time
async def test_engines_that_are_retired_count_against_the_floor_even_while_it_starts() -> None:
    stage = Stage(plan_of(3), min_active=3, budget=1)
    stage.host[1].start_errors = ["no GPU"] * 9
    with pytest.raises(FleetFailed, match="2 of 3 engines are left, 3 are needed"):
        await stage.fleet.start()


@in_virtual_time
async def test_a_group_that_fails_at_first_is_recovered_before_the_fleet_is_up() -> None:
    stage = Stage(plan_of(3), min_active=3)
    stage.host[1].start_errors = ["no GPU"]
    stage.host[2].dies_after_s = [0.005]
    await stage.fleet.start()

    assert stage.states() == [A, A, A]
    assert [group.recoveries for group in stage.fleet.registry.view.groups] == [0, 1, 1]


@in_virtual_time
async def test_a_fleet_that_goes_on_without_a_retired_group_is_up() -> None:
    stage = Stage(plan_of(3), min_active=1, budget=1)
    stage.host[1].start_errors = ["no GPU"] * 9
    await stage.fleet.start()
    await stage.until(lambda: stage.states() == [A, GONE, A])

    assert stage.fleet.snapshot()["ready"] is True
    assert stage.routed() == [0, 2]


@in_virtual_time
async def test_only_failures_in_a_row_fail_the_start() -> None:
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
async def test_a_group_that_fails_three_times_in_a_row_at_first_fails_the_fleet() -> None:
    stage = Stage(plan_of(3))
    stage.host[1].start_errors = ["no such file: serve"] * 9
    with pytest.raises(FleetFailed, match="ranks 1 failed to start 3 times: no such file"):
        await stage.fleet.start()
    assert await stage.fleet.stop() == ""

    assert len(stage.host.times("start", 1)) == 3
    assert not any(server.is_alive for server in stage.host.servers.values())


@in_virtual_time
async def test_a_group_that_never_generates_fails_in_time_and_says_what_it_answered() -> None:
    stage = await serving(start_within_s=50.0)
    stage.host[0].loads_for_s = 1e6
    stage.host.die(0)
    await stage.until(lambda: stage.told("rollout.recovery.ended"))

    assert str(stage.told("rollout.recovery.ended")[0]["message"]) == (
        "did not serve within 50 s (start_within_s); rank 0: 503 Scheduler is dead"
    )


@in_virtual_time
async def test_what_could_not_be_ended_keeps_its_group_from_starting_and_is_ended_again() -> None:
    stage = await serving(servers=2)
    stage.host[1].is_stuck = True
    stage.host.die(0)
    await asyncio.sleep(5.0)
    stage.host[1].is_stuck = False
    await stage.until_active()

    assert stage.host.faults == []
    assert stage.told("rollout.warning")[0] == {"message": "could not be ended: pid 1"}
    [first, *_] = stage.told("rollout.recovery.ended")
    assert first["message"] == "what ran there could not be ended: pid 1"


@in_virtual_time
async def test_two_ranks_of_a_group_that_die_together_are_one_failure() -> None:
    stage = await serving(servers=2)
    stage.host.die(0)
    stage.host.die(1)
    await stage.until_active()
    await asyncio.sleep(100.0)

    assert len(stage.told("rollout.recovery.begun")) == 1
    assert len(stage.host.times("start", 0)) == 2


@in_virtual_time
async def test_a_death_of_an_old_incarnation_that_is_told_late_is_nobodys_news() -> None:
    stage = await serving()
    stage.host.die(0)
    await stage.until(lambda: stage.states()[0] is R)
    await stage.until_active()
    stage.host.on_death(Death(rank=0, epoch=1, why="exit 1", last_words=PORT_IN_USE))
    await asyncio.sleep(10.0)

    assert stage.states() == [A, A]
    assert [one["epoch"] for one in stage.told("rollout.server.died")] == [1]
    assert len(stage.host.times("start", 0)) == 2


@in_virtual_time
async def test_a_recovered_group_has_the_first_weights_and_waits_for_the_fleets() -> None:
    stage = await serving()
    await stage.sync(1)
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [S, A])
    assert stage.routed() == [1]
    await stage.sync(2)

    assert stage.states() == [A, A]
    assert stage.routed() == [0, 1]


@in_virtual_time
async def test_a_stale_group_that_hangs_is_recovered_too() -> None:
    stage = await serving()
    await stage.sync(1)
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [S, A])
    stage.host[0].answers = stage.host[0].at_home = "hang"
    await stage.until_out()
    await stage.until(lambda: stage.states() == [S, A])

    assert len(stage.host.times("start", 0)) == 3


@in_virtual_time
async def test_stop_leaves_nothing_and_restarts_nothing() -> None:
    stage = await serving(4)
    stage.host.die(0)
    stage.host[1].answers = "hang"
    await asyncio.sleep(50.0)
    assert await stage.fleet.stop() == ""
    starts = len(stage.host.log)
    left = loops()
    await asyncio.sleep(1000.0)

    assert left == []
    assert len(stage.host.log) - starts == 0
    assert stage.routed() == []
    assert not any(server.is_alive for server in stage.host.servers.values())
    assert stage.fleet.snapshot()["state"] == "stopping"


@in_virtual_time
async def test_stop_while_it_starts_ends_the_start() -> None:
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
async def test_a_fleet_that_runs_cannot_be_started_again() -> None:
    stage = await serving(1)
    with pytest.raises(IllegalTransition, match="a fleet that is running"):
        await stage.fleet.start()
