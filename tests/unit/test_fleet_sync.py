"""What a trainer orders of the fleet between its steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tasks.record.states import GroupState
from tasks.rollout.topology import Ask
from tests.support.fleet_clock import in_virtual_time, now_s
from tests.support.fleet_fakes import serving

A, X, R, S = GroupState.ACTIVE, GroupState.INACTIVE, GroupState.RECOVERING, GroupState.STALE


@in_virtual_time
async def test_nothing_is_started_between_barrier_and_restore() -> None:
    stage = await serving(3)
    stage.host[0].answers = "503"
    await stage.fleet.barrier()
    stage.host.die(1)
    await asyncio.sleep(3600.0)
    held = stage.states()
    answer = await stage.fleet.restore()
    assert sorted(answer["restored"]) == [[0], [1]]

    assert held == [X, X, A]
    assert stage.states() == [A, A, A]


@in_virtual_time
async def test_what_dies_between_barrier_and_restore_is_stopped_whole_at_once() -> None:
    stage = await serving(2, servers=2)
    await stage.fleet.barrier()
    stage.host.die(0)

    assert await stage.until(lambda: not stage.host[1].is_alive) < 0.1


@in_virtual_time
async def test_a_recovery_under_way_at_a_barrier_is_given_up_and_frees_its_gpus() -> None:
    stage = await serving(2, budget=1)
    stage.host[0].loads_for_s = 50.0
    stage.host.die(0)
    await stage.until(lambda: stage.host[0].is_alive)
    answer = await stage.fleet.barrier()
    assert answer["failed"] == []
    assert answer["inactive"] == [[0]]
    assert not stage.host[0].is_alive
    assert stage.states() == [X, A]
    await stage.fleet.restore()

    # Given up without fault of its own, so it does not count against the budget.
    assert stage.states() == [A, A]
    assert [one["try"] for one in stage.told("rollout.recovery.begun")] == [1, 1]
    assert [one["outcome"] for one in stage.told("rollout.recovery.ended")] == [
        "abandoned",
        "recovered",
    ]


@in_virtual_time
async def test_a_recovery_that_pauses_at_a_barrier_does_not_begin_after_its_pause() -> None:
    stage = await serving(2, backoff_s=10.0)
    stage.host[0].start_errors = ["no GPU"] * 2
    stage.host.die(0)
    await stage.until(lambda: len(stage.told("rollout.recovery.begun")) == 2)
    await stage.fleet.barrier()
    starts = len(stage.host.times("start", 0))
    await asyncio.sleep(1000.0)
    assert len(stage.host.times("start", 0)) == starts

    assert stage.states() == [X, A]


@in_virtual_time
async def test_restore_waits_until_each_group_is_up_or_has_failed_once() -> None:
    stage = await serving(4, parallel=2)
    for rank in range(3):
        stage.host[rank].answers = "503"
        stage.host[rank].loads_for_s = 20.0
    stage.host[2].start_errors = ["no GPU"]
    await stage.fleet.barrier()
    began_s = now_s()
    answer = await stage.fleet.restore()
    took_s = now_s() - began_s
    await stage.until_active()

    assert 20.0 <= took_s < 22.0
    assert sorted(answer["restored"]) == [[0], [1]]
    assert answer["failed"] == [{"group": 2, "ranks": [2], "cause": "no GPU"}]
    assert answer["stale"] == []
    assert answer["metadata"]["mesh"] == [[0], [1], [3]]


@in_virtual_time
async def test_restore_without_a_barrier_hurries_what_is_down() -> None:
    stage = await serving(2, backoff_s=500.0, max_backoff_s=1000.0)
    stage.host[0].start_errors = ["no GPU"]
    stage.host.die(0)
    await stage.until(lambda: len(stage.told("rollout.recovery.begun")) == 2)
    began_s = now_s()
    await stage.fleet.restore()
    assert stage.states() == [A, A]

    assert now_s() - began_s < 1.0


@in_virtual_time
async def test_a_restored_group_serves_only_once_its_weights_are_synced() -> None:
    stage = await serving(2)
    stage.fleet.weights(4)
    stage.host[0].answers = "503"
    await stage.fleet.barrier()
    answer = await stage.fleet.restore()
    assert answer["stale"] == [[0]]
    assert stage.routed() == [1]
    epochs = {int(rank): epoch for rank, epoch in answer["metadata"]["epochs"].items()}
    assert stage.fleet.weights(5, None, epochs) == {
        "version": 5,
        "active": [[0], [1]],
        "stale": [],
    }

    assert stage.routed() == [0, 1]


@in_virtual_time
async def test_a_floor_is_not_looked_at_while_the_trainer_has_the_gpus_and_is_after_that() -> None:
    stage = await serving(2, min_active=2)
    await stage.fleet.barrier()
    stage.host.die(0)
    await asyncio.sleep(1000.0)
    assert not stage.fleet.fatal.done()
    stage.host[0].start_errors = ["no GPU"]
    await stage.fleet.restore()

    assert stage.fleet.fatal.result() == "1 of 2 engines serve, min_active is 2: ranks 0: no GPU"


@in_virtual_time
async def test_a_barrier_is_bounded_when_a_server_cannot_be_ended() -> None:
    stage = await serving(2)
    stage.host[0].answers = stage.host[0].at_home = "hang"
    stage.host.stop_takes_s = 1e6
    began_s = now_s()
    await stage.fleet.barrier()

    assert now_s() - began_s <= 15.0 + 15.0 + stage.settings.stop_within_s + 0.1
    assert "could not be ended" in stage.told("rollout.warning")[0]["message"]


@in_virtual_time
async def test_a_server_that_only_the_network_hides_is_not_ended_by_a_barrier() -> None:
    stage = await serving(2)
    stage.host[0].answers = "hang"
    answer = await stage.fleet.barrier()
    stage.host[0].answers = "yes"
    await stage.fleet.restore()
    await stage.until(lambda: stage.routed() == [0, 1], within_s=31.0)

    assert answer["failed"] == []
    assert answer["active"] == [1]
    assert answer["unreachable"] == [[0]]
    assert len(stage.host.times("start", 0)) == 1


@in_virtual_time
async def test_orders_are_obeyed_one_after_the_other() -> None:
    stage = await serving(2)
    stage.host[0].answers = "503"
    await asyncio.gather(stage.fleet.barrier(), stage.fleet.restore(), stage.fleet.barrier())

    assert [
        name for _, name, _ in stage.events if name in ("rollout.barrier", "rollout.restore")
    ] == ["rollout.barrier", "rollout.restore", "rollout.barrier"]


@pytest.mark.parametrize(
    ("done_after_s", "answer"),
    [(None, {"drained": False, "outstanding": 1}), (2.0, {"drained": True, "outstanding": 0})],
)
@in_virtual_time
async def test_a_drain_takes_no_new_requests_and_waits_for_those_that_are_there(
    done_after_s: float | None, answer: dict[str, Any]
) -> None:
    stage = await serving(2)
    taken = stage.fleet.router.pick(None)
    if done_after_s is not None:
        loop = asyncio.get_running_loop()
        loop.call_later(done_after_s, lambda: stage.fleet.router.done(taken))
    found = await stage.fleet.drain(5.0)
    assert stage.fleet.state == "draining"
    stage.fleet.weights(1)
    assert stage.fleet.state == "serving"

    assert found == answer


@in_virtual_time
async def test_a_broadcast_reaches_every_entrypoint_with_its_arguments() -> None:
    stage = await serving(2, servers=2)
    ask = Ask(method="POST", path="/pause", body={"level": 2})

    answers = await stage.fleet.broadcast(ask, 5.0)

    assert answers == {0: {"status": 200, "body": "ok"}, 2: {"status": 200, "body": "ok"}}
    assert {(url, ask.method, ask.path, str(ask.body)) for url, ask in stage.prober.calls} == {
        ("http://10.0.0.1:8000", "POST", "/pause", "{'level': 2}"),
        ("http://10.0.0.1:8002", "POST", "/pause", "{'level': 2}"),
    }


@in_virtual_time
async def test_the_snapshot_says_everything_of_every_server() -> None:
    stage = await serving(2, servers=2, concurrency=8)
    stage.fleet.url = "http://127.0.0.1:9"
    stage.fleet.router.pick(None)
    stage.host[2].answers = "503"
    await stage.until(lambda: stage.fleet.snapshot()["servers"][2]["misses"] == 1)

    snapshot = stage.fleet.snapshot()

    assert {key: snapshot[key] for key in ("ready", "state", "reason", "url", "concurrency")} == {
        "ready": True,
        "state": "serving",
        "reason": "",
        "url": "http://127.0.0.1:9",
        "concurrency": 16,
    }
    assert snapshot["servers"][2] == {
        "rank": 2,
        "group": 1,
        "node": 0,
        "host": "10.0.0.1",
        "port": 8002,
        "url": "http://10.0.0.1:8002",
        "entrypoint": True,
        "state": "suspect",
        "reachable": True,
        "epoch": 1,
        "version": 0,
        "outstanding": 0,
        "misses": 1,
        "cause": "503 Scheduler is dead",
    }
    assert snapshot["groups"][0] == {
        "ranks": [0, 1],
        "state": "active",
        "epoch": 1,
        "version": 0,
        "cause": "",
        "recoveries": 0,
    }
    assert snapshot["training"]["urls"] == {
        "0": "http://10.0.0.1:8000",
        "2": "http://10.0.0.1:8002",
    }
    assert sum(server["outstanding"] for server in snapshot["servers"]) == 1
