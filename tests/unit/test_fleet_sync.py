"""Tests of the trainer's orders to a fleet: weight syncs, checks, restarts and retirements."""

from __future__ import annotations

import asyncio

import pytest

from tasks.record.states import GroupState
from tasks.rollout.backends import Ask, Questions
from tasks.rollout.probing import FleetRefused
from tasks.rollout.sync import InFlight, NoSuchSync
from tasks.spec.errors import IllegalTransition
from tests.support.fleet_clock import in_virtual_time, now_s
from tests.support.fleet_fakes import (
    READY,
    TOKEN,
    FleetHarness,
    list_fleet_tasks,
    make_topology,
    start_fake_fleet,
)

A, X, R, S = GroupState.ACTIVE, GroupState.INACTIVE, GroupState.RECOVERING, GroupState.STALE
LOAD = Ask(method="POST", path="/load", body={"path": "/weights"})
WAIT, ABORT, INTERRUPT = InFlight


async def begin(harness: FleetHarness, timeout_s: float = 100.0, in_flight: InFlight = WAIT) -> str:
    """Begin a weight sync, and return the id of the sync.

    Args:
        harness: The fleet.
        timeout_s: Time limit of the sync, in seconds.
        in_flight: Treatment of running requests, for example WAIT.
    """
    return str((await harness.fleet.begin_sync(timeout_s, in_flight))["sync"])


@in_virtual_time
async def test_sync_brings_all_engines_to_the_committed_version() -> None:
    harness = await start_fake_fleet(2, servers=2)
    answer = await harness.fleet.begin_sync(100.0, WAIT)
    sync = answer["sync"]

    assert answer["targets"] == [
        {
            "engine": engine,
            "epoch": 1,
            "state": "active",
            "version": 0,
            "ranks": [2 * engine, 2 * engine + 1],
            "urls": [f"http://10.0.0.1:{8000 + 2 * engine}"],
        }
        for engine in range(2)
    ]
    assert (harness.fleet.state, harness.fleet.snapshot()["sync"]) == ("syncing", sync)
    answers = (await harness.fleet.syncs.broadcast(sync, LOAD, 5.0))["answers"]
    assert answers == [
        {"engine": engine, "epoch": 1, "rank": 2 * engine, "status": 200, "body": "ok"}
        for engine in range(2)
    ]
    assert await harness.fleet.syncs.commit(sync, 7, {0: 1, 1: 1}) == {
        "version": 7,
        "serving": [0, 1],
        "stale": [],
        "failed": [],
    }

    assert harness.fleet.state == "serving"
    assert [group.version for group in harness.fleet.registry.view.groups] == [7, 7]
    assert {entrypoint.version for entrypoint in harness.fleet.router.entrypoints} == {7}
    [ended] = harness.list_events("rollout.sync.ended")
    assert (ended["outcome"], ended["version"], ended["serving"]) == ("committed", 7, [0, 1])


@in_virtual_time
async def test_stale_engine_is_a_target_and_serves_after_a_commit_names_it() -> None:
    harness = await start_fake_fleet(2)
    await harness.sync(5)
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states() == [S, A])
    assert harness.list_routed_ranks() == [1]

    # The fleet has committed weight version 5, but the restarted engine 0 does not have this
    # version.
    assert (await harness.sync(5, engines={1}))["stale"] == [0]
    assert harness.list_routed_ranks() == [1]
    assert (await harness.sync(5))["serving"] == [0, 1]
    assert harness.list_routed_ranks() == [0, 1]


@in_virtual_time
async def test_engine_restarted_during_a_sync_is_stale() -> None:
    harness = await start_fake_fleet(2)
    sync = await begin(harness)
    await harness.fleet.syncs.broadcast(sync, LOAD, 5.0)
    harness.host.die(0)

    answers = (await harness.fleet.syncs.broadcast(sync, LOAD, 5.0))["answers"]
    committed = await harness.fleet.syncs.commit(sync, 1, {0: 1, 1: 1})
    await harness.wait_until(lambda: harness.states() == [S, A])

    assert [(answer["engine"], answer["status"]) for answer in answers] == [(1, 200), (0, None)]
    assert (committed["serving"], committed["stale"]) == ([1], [])


@in_virtual_time
async def test_only_one_sync_is_open_and_its_id_ends_with_it() -> None:
    harness = await start_fake_fleet(2)
    sync = await begin(harness)

    with pytest.raises(
        FleetRefused, match=rf"another weight sync \({sync}\) is still open, for at most 100 s"
    ):
        await harness.fleet.begin_sync(5.0, WAIT)
    with pytest.raises(NoSuchSync, match="no weight sync 0 is open"):
        await harness.fleet.syncs.broadcast("0", LOAD, 5.0)
    with pytest.raises(FleetRefused, match="a weight sync is in progress"):
        await harness.fleet.check()
    await harness.fleet.syncs.commit(sync, 1, {})
    with pytest.raises(NoSuchSync, match=f"the weight sync {sync} is over: committed, version 1"):
        await harness.fleet.syncs.commit(sync, 2, {})
    assert harness.states() == [S, S]


@in_virtual_time
async def test_sync_stays_open_after_a_rejected_commit() -> None:
    harness = await start_fake_fleet(2)
    await harness.sync(5)
    sync = await begin(harness)
    sending = asyncio.create_task(harness.fleet.syncs.broadcast(sync, LOAD, 5.0))
    await asyncio.sleep(0)

    with pytest.raises(FleetRefused, match="have not answered the broadcast of this sync"):
        await harness.fleet.syncs.commit(sync, 6, {0: 1})
    await sending
    with pytest.raises(IllegalTransition, match="version 4 is lower than the current version 5"):
        await harness.fleet.syncs.commit(sync, 4, {0: 1})
    with pytest.raises(KeyError, match="there is no engine 7: the run has 2"):
        await harness.fleet.syncs.commit(sync, 6, {7: 1})
    committed = await harness.fleet.syncs.commit(sync, 4, {0: 1, 1: 1}, force=True)

    assert committed["serving"] == [0, 1]


@in_virtual_time
async def test_new_requests_wait_in_order_until_the_commit() -> None:
    harness = await start_fake_fleet(1, concurrency=1)
    router = harness.fleet.router
    served = []
    sync = await begin(harness)

    async def request(number: int) -> None:
        entrypoint = await router.take(None)
        served.append((number, entrypoint.version))
        await asyncio.sleep(1.0)
        router.done(entrypoint)

    requests = [asyncio.create_task(request(number)) for number in range(3)]
    await asyncio.sleep(50.0)
    assert (served, router.waiting) == ([], 3)
    # A request that generates no tokens does not wait for the end of the weight sync.
    router.done(await router.take(None, generates=False))
    await harness.fleet.syncs.commit(sync, 3, {0: 1})
    await asyncio.gather(*requests)

    assert served == [(0, 3), (1, 3), (2, 3)]


@in_virtual_time
async def test_sync_waits_for_outstanding_requests() -> None:
    harness = await start_fake_fleet(2)
    taken = harness.fleet.router.pick(None)
    asyncio.get_running_loop().call_later(2.0, lambda: harness.fleet.router.done(taken))
    began_s = now_s()
    await begin(harness)

    assert now_s() - began_s == 2.0
    assert harness.list_events("rollout.sync.begun")[0]["waited_s"] == 2.0


@in_virtual_time
async def test_outstanding_requests_at_the_time_limit_end_only_the_sync() -> None:
    harness = await start_fake_fleet(2)
    harness.fleet.router.pick(None)

    with pytest.raises(FleetRefused, match=r"1 requests were still running after 5 s\. .* abort"):
        await begin(harness, timeout_s=5.0)

    assert (harness.fleet.state, harness.states(), harness.list_routed_ranks()) == (
        "serving",
        [A, A],
        [0, 1],
    )


@in_virtual_time
async def test_sync_begins_although_an_engine_hangs_with_a_request() -> None:
    harness = await start_fake_fleet(2, interval_s=5.0)
    taken = harness.fleet.router.pick(None)
    harness.fleet.router.listen(
        lambda ended: (
            harness.fleet.router.done(taken)
            if taken.key in {entrypoint.key for entrypoint in ended}
            else None
        )
    )
    harness.host[taken.rank].answers = harness.host[taken.rank].at_home = "hang"

    answer = await harness.fleet.begin_sync(1000.0, WAIT)

    assert [target["engine"] for target in answer["targets"]] == [1 - taken.rank]


@in_virtual_time
async def test_sync_with_abort_ends_outstanding_requests_at_once() -> None:
    harness = await start_fake_fleet(2)
    router = harness.fleet.router
    taken = router.pick(None)
    router.listen(
        lambda ended: router.done(taken) if taken in ended and router.outstanding else None
    )
    began_s = now_s()

    await begin(harness, in_flight=ABORT)

    assert now_s() == began_s


@in_virtual_time
async def test_sync_with_interrupt_pauses_and_resumes_requests() -> None:
    pause, resume = (Ask(method="POST", path=path) for path in ("/pause", "/resume"))
    plan = make_topology(3)
    object.__setattr__(
        plan, "questions", Questions(ready=READY, token=TOKEN, pause=pause, resume=resume)
    )
    harness = FleetHarness(plan)
    await harness.fleet.start()
    harness.fleet.router.pick(None)
    sync = await begin(harness, in_flight=INTERRUPT)
    await harness.fleet.syncs.broadcast(sync, LOAD, 5.0)
    harness.prober.statuses[2] = 500
    await harness.fleet.syncs.commit(sync, 1, {0: 1, 1: 1, 2: 1})

    paths = [ask.path for url, ask in harness.prober.calls if url.endswith("8000")]
    assert paths == ["/pause", "/load", "/resume"]
    # An engine that does not resume after the sync must fail. Otherwise the requests of this engine
    # would stay paused forever.
    assert harness.last_failure_cause(2).endswith(
        "during a weight sync: POST /resume: 500 truncated file"
    )
    assert harness.fleet.router.outstanding == 1


@in_virtual_time
async def test_interrupt_is_rejected_if_the_backend_cannot_pause() -> None:
    harness = await start_fake_fleet(1)

    with pytest.raises(
        FleetRefused, match=r"can't interrupt requests\. Set in_flight to wait or abort"
    ):
        await begin(harness, in_flight=INTERRUPT)

    assert harness.fleet.state == "serving"


@pytest.mark.parametrize("is_touched", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@in_virtual_time
async def test_sync_without_commit_makes_only_touched_engines_stale(
    is_touched: bool, is_late: bool
) -> None:
    harness = await start_fake_fleet(2)
    await harness.sync(3)
    sync = await begin(harness, timeout_s=50.0)
    read_version = Ask(method="GET", path="/version")
    await harness.fleet.syncs.broadcast(sync, LOAD if is_touched else read_version, 5.0)
    if is_late:
        await asyncio.sleep(51.0)
        with pytest.raises(NoSuchSync, match=r"reached its time limit of 50 s \(timeout_s\)"):
            await harness.fleet.syncs.commit(sync, 4, {0: 1, 1: 1})
    else:
        assert (await harness.fleet.syncs.give_up(sync))["version"] == 3

    assert harness.fleet.registry.view.version == 3
    assert harness.states() == [S, S] if is_touched else [A, A]
    assert harness.list_routed_ranks() == ([] if is_touched else [0, 1])
    assert (await harness.sync(4))["serving"] == [0, 1]


@in_virtual_time
async def test_engine_that_fails_to_load_is_restarted_and_not_committed() -> None:
    harness = await start_fake_fleet(3)
    sync = await begin(harness)
    harness.prober.statuses = {0: 500, 1: 503}
    await harness.fleet.syncs.broadcast(sync, LOAD, 5.0)
    # In the second broadcast, only engine 0 fails. Engines 1 and 2 receive the weights. Engine 0
    # stays active until the commit.
    harness.prober.statuses = {0: 500}
    await harness.fleet.syncs.broadcast(sync, LOAD, 5.0)
    assert harness.states() == [A, A, A]

    committed = await harness.fleet.syncs.commit(sync, 1, {0: 1, 1: 1, 2: 1})
    await harness.wait_until(lambda: harness.states() == [S, A, A])

    assert (committed["serving"], committed["failed"]) == (
        [1, 2],
        [{"engine": 0, "why": "POST /load: 500 truncated file"}],
    )
    assert [len(harness.host.times("start", rank)) for rank in range(3)] == [2, 1, 1]


@in_virtual_time
async def test_engine_that_hangs_in_a_broadcast_fails_at_the_timeout() -> None:
    harness = await start_fake_fleet(2)
    sync = await begin(harness)
    harness.host[0].answers = "hang"
    began_s = now_s()
    answers = (await harness.fleet.syncs.broadcast(sync, LOAD, 5.0))["answers"]

    assert now_s() - began_s == 5.0
    assert [answer["status"] for answer in answers] == [None, 200]
    assert harness.states() == [X, A]
    assert (await harness.fleet.syncs.commit(sync, 1, {0: 1, 1: 1}))["serving"] == [1]


@in_virtual_time
async def test_no_restart_begins_during_a_sync() -> None:
    harness = await start_fake_fleet(2, servers=2)
    sync = await begin(harness, timeout_s=5000.0)
    harness.host.die(0)
    assert await harness.wait_until(lambda: not harness.host[1].is_alive) < 0.1
    await asyncio.sleep(3600.0)

    assert len(harness.host.times("start", 0)) == 1
    await harness.fleet.syncs.commit(sync, 1, {1: 1})
    assert await harness.wait_until(lambda: harness.states() == [S, A]) < 1.0


@in_virtual_time
async def test_restart_that_has_begun_continues_during_a_sync() -> None:
    harness = await start_fake_fleet(2)
    harness.host[0].loads_for_s = 50.0
    harness.host.die(0)
    await harness.wait_until(lambda: harness.host[0].is_alive)

    # The weight sync must not interrupt the restart of the engine. Otherwise an engine with a sync
    # each minute would never be ready.
    sync = await begin(harness)
    await asyncio.sleep(60.0)
    await harness.fleet.syncs.commit(sync, 1, {1: 1})

    assert harness.states() == [S, A]
    assert len(harness.host.times("start", 0)) == 2


@in_virtual_time
async def test_engines_are_not_probed_during_a_sync() -> None:
    harness = await start_fake_fleet(2, interval_s=10.0)
    sync = await begin(harness, timeout_s=5000.0)
    asked = len(harness.prober.asked)
    harness.host[0].answers = "503"
    harness.fleet.note_failure(0, 1, "503")
    await asyncio.sleep(1000.0)
    harness.host[0].answers = "yes"
    await harness.fleet.syncs.commit(sync, 1, {0: 1, 1: 1})

    assert len(harness.prober.asked) == asked
    assert harness.states() == [A, A]
    # If the trainer never ends a sync, engines are probed again after the time limit of the sync.
    await begin(harness, timeout_s=20.0)
    harness.host[1].answers = "503"
    assert await harness.wait_until_failed(1) <= 20.0 + 3 * 10.0 + 0.1


@in_virtual_time
async def test_min_active_is_checked_after_each_sync() -> None:
    harness = await start_fake_fleet(2, min_active=2)
    sync = await begin(harness)
    harness.host.die(0)
    await asyncio.sleep(10.0)
    assert not harness.fleet.fatal.done()
    await harness.fleet.syncs.commit(sync, 1, {1: 1})

    reason = harness.fleet.fatal.result()
    assert reason.startswith(
        "only 1 of 2 engines serve requests, but recovery.min_active requires at least 2: ranks 0: "
        "the server of rank 0 died"
    )


@in_virtual_time
async def test_placeholders_of_a_broadcast_form_one_process_group() -> None:
    harness = await start_fake_fleet(3, servers=2)
    body = {
        "group": "update",
        "offset": "${engine.rank_offset}",
        "size": "${engine.world_size}",
        "names": ["engine-${engine.index}", "$${engine.index}", "${run.id}"],
    }
    sync = await begin(harness)
    harness.host.die(2)
    await harness.fleet.syncs.broadcast(sync, Ask(method="POST", path="/init", body=body), 5.0)

    # The trainer is rank 0 in the process group that broadcasts the weights. The two engines that
    # still run have the next ranks, without a gap.
    assert {url[-4:]: ask.body for url, ask in harness.prober.calls} == {
        "8000": {
            **body,
            **{"offset": 1, "size": 2, "names": ["engine-0", "$${engine.index}", "${run.id}"]},
        },
        "8004": {
            **body,
            **{"offset": 3, "size": 2, "names": ["engine-2", "$${engine.index}", "${run.id}"]},
        },
    }
    with pytest.raises(
        KeyError, match=r"no placeholder `\$\{engine.rank\}`\. The known placeholders are"
    ):
        ask = Ask(method="POST", path="/init", body={"rank": "${engine.rank}"})
        await harness.fleet.syncs.broadcast(sync, ask, 5.0)


@in_virtual_time
async def test_each_expert_server_gets_its_own_rank_offset() -> None:
    harness = await start_fake_fleet(1, servers=3, are_experts=True)
    sync = await begin(harness)
    ask = Ask(method="POST", path="/init", body={"offset": "${engine.rank_offset}"})

    answers = (await harness.fleet.syncs.broadcast(sync, ask, 5.0))["answers"]

    assert [(answer["engine"], answer["rank"]) for answer in answers] == [(0, 0), (0, 1), (0, 2)]
    assert [ask.body for _, ask in harness.prober.calls] == [{"offset": n} for n in (1, 2, 3)]
    assert harness.fleet.registry.view.training["mesh"] == [[0], [1], [2]]


@in_virtual_time
async def test_fleet_that_starts_stale_serves_after_its_first_commit() -> None:
    harness = FleetHarness(make_topology(2), serves_as_loaded=False, min_active=2)
    await harness.fleet.start()

    assert (harness.states(), harness.list_routed_ranks(), harness.fleet.has_started) == (
        [S, S],
        [],
        True,
    )
    assert not harness.fleet.fatal.done()
    assert (await harness.sync(0))["serving"] == [0, 1]


@in_virtual_time
async def test_start_returns_when_min_active_engines_work() -> None:
    harness = FleetHarness(make_topology(3), min_active=2)
    harness.host[1].loads_for_s = 80.0
    began_s = now_s()
    await harness.fleet.start()

    assert now_s() - began_s < 1.0
    assert harness.list_routed_ranks() == [0, 2]
    assert await harness.wait_until(lambda: harness.list_routed_ranks() == [0, 1, 2]) > 70.0


@in_virtual_time
async def test_stop_ends_an_open_sync_and_waiting_requests() -> None:
    harness = await start_fake_fleet(2)
    await begin(harness)
    waiting = asyncio.create_task(harness.fleet.router.take(None))
    await asyncio.sleep(1.0)

    await harness.fleet.stop()

    with pytest.raises(Exception, match="the fleet is stopped"):
        await waiting
    assert list_fleet_tasks() == []


@in_virtual_time
async def test_check_restarts_an_engine_after_one_bad_answer() -> None:
    harness = await start_fake_fleet(3)
    harness.host[0].answers = "503"
    answer = await harness.fleet.check()

    assert [failure["engine"] for failure in answer["failed"]] == [0]
    assert not harness.host[0].is_alive
    await harness.wait_until_active()


@in_virtual_time
async def test_check_has_a_time_limit_even_if_a_server_cannot_be_ended() -> None:
    harness = await start_fake_fleet(2)
    harness.host[0].answers = harness.host[0].at_home = "hang"
    harness.host.stop_takes_s = 1e6
    began_s = now_s()
    await harness.fleet.check()

    assert now_s() - began_s <= 15.0 + 15.0 + harness.stop_within_s + 0.1
    assert "Muster could not end" in harness.list_events("rollout.warning")[0]["message"]


@in_virtual_time
async def test_check_does_not_end_a_server_that_only_the_network_hides() -> None:
    harness = await start_fake_fleet(2)
    harness.host[0].answers = "hang"
    answer = await harness.fleet.check()
    harness.host[0].answers = "yes"
    await harness.wait_until(lambda: harness.list_routed_ranks() == [0, 1], within_s=31.0)

    assert answer["failed"] == []
    assert answer["active"] == [1]
    assert answer["unreachable"] == [[0]]
    assert len(harness.host.times("start", 0)) == 1


@in_virtual_time
async def test_snapshot_describes_every_server_and_engine() -> None:
    harness = await start_fake_fleet(2, servers=2, concurrency=8)
    harness.fleet.url = "http://127.0.0.1:9"
    harness.fleet.router.pick(None)
    harness.host[2].answers = "503"
    await harness.wait_until(lambda: harness.fleet.snapshot()["servers"][2]["misses"] == 1)

    snapshot = harness.fleet.snapshot()

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
    assert snapshot["sync"] is None
    assert snapshot["engines"][0] == {
        "engine": 0,
        "ranks": [0, 1],
        "urls": ["http://10.0.0.1:8000", "http://10.0.0.1:8001"],
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


@in_virtual_time
async def test_engine_is_restarted_by_order() -> None:
    harness = await start_fake_fleet(2)

    assert await harness.fleet.restart(1) == {"engine": 1, "state": "inactive"}
    with pytest.raises(
        FleetRefused, match="engine 1 has no running server: the state of the engine is inactive"
    ):
        await harness.fleet.restart(1)
    with pytest.raises(KeyError, match="there is no engine 2: the run has 2"):
        await harness.fleet.restart(2)
    await harness.wait_until_active()

    assert [len(harness.host.times("start", rank)) for rank in range(2)] == [1, 2]


@in_virtual_time
async def test_worker_is_retired_with_its_engine_unless_the_fleet_needs_it() -> None:
    harness = await start_fake_fleet(3, servers=2, min_active=2)

    assert (await harness.fleet.retire(2))["engine"] == 1
    assert not harness.host[2].is_alive and not harness.host[3].is_alive
    with pytest.raises(
        FleetRefused, match=r"only 2 engines are left, and recovery\.min_active requires at least 2"
    ):
        await harness.fleet.retire(0)
    await asyncio.sleep(1000.0)

    assert harness.list_routed_ranks() == [0, 4]
    assert [worker["id"] for worker in harness.fleet.workers()["workers"]] == ["0", "4"]
    assert not harness.fleet.fatal.done()


@in_virtual_time
async def test_only_the_fleets_own_entrypoints_are_workers() -> None:
    harness = await start_fake_fleet(2)
    harness.host.die(1)

    workers = harness.fleet.workers()["workers"]
    assert [(worker["url"], worker["is_healthy"]) for worker in workers] == [
        ("http://10.0.0.1:8000", True),
        ("http://10.0.0.1:8001", False),
    ]
    assert (await harness.fleet.add("http://10.0.0.1:8001/"))["worker_id"] == "1"
    with pytest.raises(FleetRefused, match="is not a server of this run"):
        await harness.fleet.add("http://10.0.0.9:8000")


@in_virtual_time
async def test_retired_worker_can_be_added_again_and_waits_for_weights() -> None:
    harness = await start_fake_fleet(2)
    await harness.fleet.retire(1)
    await harness.fleet.syncs.commit(await begin(harness), 1, {0: 1})

    await harness.fleet.add("http://10.0.0.1:8001")
    await harness.wait_until(lambda: harness.states() == [A, S])
    assert (harness.host[1].is_alive, harness.list_routed_ranks()) == (True, [0])
    await harness.fleet.syncs.commit(await begin(harness), 2, {0: 1, 1: 2})

    assert harness.list_routed_ranks() == [0, 1]
    assert harness.fleet.registry.view.groups[1].version == 2


@in_virtual_time
async def test_retired_worker_cannot_be_added_if_the_budget_is_spent() -> None:
    harness = await start_fake_fleet(2, budget=1)
    harness.host.die(1)
    await harness.wait_until_active()
    await harness.fleet.retire(1)

    with pytest.raises(
        FleetRefused,
        match="engine 1 cannot be started again: all 1 allowed restarts are used up",
    ):
        await harness.fleet.add("http://10.0.0.1:8001")
    await asyncio.sleep(100.0)

    assert not harness.host[1].is_alive
    assert not harness.fleet.fatal.done()
