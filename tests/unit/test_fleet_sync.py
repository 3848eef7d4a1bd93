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
from tests.support.fleet_fakes import READY, TOKEN, Stage, loops, plan_of, serving

A, X, R, S = GroupState.ACTIVE, GroupState.INACTIVE, GroupState.RECOVERING, GroupState.STALE
LOAD = Ask(method="POST", path="/load", body={"path": "/weights"})
WAIT, ABORT, INTERRUPT = InFlight


async def begin(stage: Stage, timeout_s: float = 100.0, in_flight: InFlight = WAIT) -> str:
    """Begin a weight sync, and return the id of the sync."""
    return str((await stage.fleet.begin_sync(timeout_s, in_flight))["sync"])


@in_virtual_time
async def test_sync_brings_all_engines_to_the_committed_version() -> None:
    stage = await serving(2, servers=2)
    answer = await stage.fleet.begin_sync(100.0, WAIT)
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
    assert (stage.fleet.state, stage.fleet.snapshot()["sync"]) == ("syncing", sync)
    answers = (await stage.fleet.syncs.broadcast(sync, LOAD, 5.0))["answers"]
    assert answers == [
        {"engine": engine, "epoch": 1, "rank": 2 * engine, "status": 200, "body": "ok"}
        for engine in range(2)
    ]
    assert await stage.fleet.syncs.commit(sync, 7, {0: 1, 1: 1}) == {
        "version": 7,
        "serving": [0, 1],
        "stale": [],
        "failed": [],
    }

    assert stage.fleet.state == "serving"
    assert [group.version for group in stage.fleet.registry.view.groups] == [7, 7]
    assert {entrypoint.version for entrypoint in stage.fleet.router.entrypoints} == {7}
    [ended] = stage.told("rollout.sync.ended")
    assert (ended["outcome"], ended["version"], ended["serving"]) == ("committed", 7, [0, 1])


@in_virtual_time
async def test_stale_engine_is_a_target_and_serves_after_a_commit_names_it() -> None:
    stage = await serving(2)
    await stage.sync(5)
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [S, A])
    assert stage.routed() == [1]

    # The fleet already has version 5, but the restarted engine does not.
    assert (await stage.sync(5, engines={1}))["stale"] == [0]
    assert stage.routed() == [1]
    assert (await stage.sync(5))["serving"] == [0, 1]
    assert stage.routed() == [0, 1]


@in_virtual_time
async def test_engine_restarted_during_a_sync_is_stale() -> None:
    stage = await serving(2)
    sync = await begin(stage)
    await stage.fleet.syncs.broadcast(sync, LOAD, 5.0)
    stage.host.die(0)

    answers = (await stage.fleet.syncs.broadcast(sync, LOAD, 5.0))["answers"]
    committed = await stage.fleet.syncs.commit(sync, 1, {0: 1, 1: 1})
    await stage.until(lambda: stage.states() == [S, A])

    assert [(answer["engine"], answer["status"]) for answer in answers] == [(1, 200), (0, None)]
    assert (committed["serving"], committed["stale"]) == ([1], [])


@in_virtual_time
async def test_only_one_sync_is_open_and_its_id_ends_with_it() -> None:
    stage = await serving(2)
    sync = await begin(stage)

    with pytest.raises(FleetRefused, match=f"the sync {sync} is open, for at most 100 s"):
        await stage.fleet.begin_sync(5.0, WAIT)
    with pytest.raises(NoSuchSync, match="no sync 0 is open"):
        await stage.fleet.syncs.broadcast("0", LOAD, 5.0)
    with pytest.raises(FleetRefused, match="a sync is open"):
        await stage.fleet.check()
    await stage.fleet.syncs.commit(sync, 1, {})
    with pytest.raises(NoSuchSync, match=f"the sync {sync} is over: committed, version 1"):
        await stage.fleet.syncs.commit(sync, 2, {})
    assert stage.states() == [S, S]


@in_virtual_time
async def test_sync_stays_open_after_a_rejected_commit() -> None:
    stage = await serving(2)
    await stage.sync(5)
    sync = await begin(stage)
    sending = asyncio.create_task(stage.fleet.syncs.broadcast(sync, LOAD, 5.0))
    await asyncio.sleep(0)

    with pytest.raises(FleetRefused, match="a broadcast is not complete"):
        await stage.fleet.syncs.commit(sync, 6, {0: 1})
    await sending
    with pytest.raises(IllegalTransition, match="version 4 is older than the fleet's version 5"):
        await stage.fleet.syncs.commit(sync, 4, {0: 1})
    with pytest.raises(KeyError, match="the fleet has no engine 7: it has 2"):
        await stage.fleet.syncs.commit(sync, 6, {7: 1})
    committed = await stage.fleet.syncs.commit(sync, 4, {0: 1, 1: 1}, force=True)

    assert committed["serving"] == [0, 1]


@in_virtual_time
async def test_new_requests_wait_in_order_until_the_commit() -> None:
    stage = await serving(1, concurrency=1)
    router = stage.fleet.router
    served = []
    sync = await begin(stage)

    async def request(number: int) -> None:
        entrypoint = await router.take(None)
        served.append((number, entrypoint.version))
        await asyncio.sleep(1.0)
        router.done(entrypoint)

    requests = [asyncio.create_task(request(number)) for number in range(3)]
    await asyncio.sleep(50.0)
    assert (served, router.waiting) == ([], 3)
    # A request that generates nothing does not wait for the end of the sync.
    router.done(await router.take(None, generates=False))
    await stage.fleet.syncs.commit(sync, 3, {0: 1})
    await asyncio.gather(*requests)

    assert served == [(0, 3), (1, 3), (2, 3)]


@in_virtual_time
async def test_sync_waits_for_outstanding_requests() -> None:
    stage = await serving(2)
    taken = stage.fleet.router.pick(None)
    asyncio.get_running_loop().call_later(2.0, lambda: stage.fleet.router.done(taken))
    began_s = now_s()
    await begin(stage)

    assert now_s() - began_s == 2.0
    assert stage.told("rollout.sync.begun")[0]["waited_s"] == 2.0


@in_virtual_time
async def test_outstanding_requests_at_the_time_limit_end_only_the_sync() -> None:
    stage = await serving(2)
    stage.fleet.router.pick(None)

    with pytest.raises(
        FleetRefused, match=r"1 requests were still outstanding after 5 s: .* abort"
    ):
        await begin(stage, timeout_s=5.0)

    assert (stage.fleet.state, stage.states(), stage.routed()) == ("serving", [A, A], [0, 1])


@in_virtual_time
async def test_sync_begins_although_an_engine_hangs_with_a_request() -> None:
    stage = await serving(2, interval_s=5.0)
    taken = stage.fleet.router.pick(None)
    stage.fleet.router.listen(
        lambda ended: (
            stage.fleet.router.done(taken)
            if taken.key in {entrypoint.key for entrypoint in ended}
            else None
        )
    )
    stage.host[taken.rank].answers = stage.host[taken.rank].at_home = "hang"

    answer = await stage.fleet.begin_sync(1000.0, WAIT)

    assert [target["engine"] for target in answer["targets"]] == [1 - taken.rank]


@in_virtual_time
async def test_sync_with_abort_ends_outstanding_requests_at_once() -> None:
    stage = await serving(2)
    router = stage.fleet.router
    taken = router.pick(None)
    router.listen(
        lambda ended: router.done(taken) if taken in ended and router.outstanding else None
    )
    began_s = now_s()

    await begin(stage, in_flight=ABORT)

    assert now_s() == began_s


@in_virtual_time
async def test_sync_with_interrupt_pauses_and_resumes_requests() -> None:
    pause, resume = (Ask(method="POST", path=path) for path in ("/pause", "/resume"))
    plan = plan_of(3)
    object.__setattr__(
        plan, "questions", Questions(ready=READY, token=TOKEN, pause=pause, resume=resume)
    )
    stage = Stage(plan)
    await stage.fleet.start()
    stage.fleet.router.pick(None)
    sync = await begin(stage, in_flight=INTERRUPT)
    await stage.fleet.syncs.broadcast(sync, LOAD, 5.0)
    stage.prober.statuses[2] = 500
    await stage.fleet.syncs.commit(sync, 1, {0: 1, 1: 1, 2: 1})

    paths = [ask.path for url, ask in stage.prober.calls if url.endswith("8000")]
    assert paths == ["/pause", "/load", "/resume"]
    # An engine that does not resume after the sync must fail. Otherwise its requests would stay
    # paused forever.
    assert stage.cause_of(2).endswith("in a weight sync: POST /resume: 500 truncated file")
    assert stage.fleet.router.outstanding == 1


@in_virtual_time
async def test_interrupt_is_rejected_if_the_backend_cannot_pause() -> None:
    stage = await serving(1)

    with pytest.raises(
        FleetRefused, match="can't interrupt requests: set in_flight to wait or abort"
    ):
        await begin(stage, in_flight=INTERRUPT)

    assert stage.fleet.state == "serving"


@pytest.mark.parametrize("is_touched", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@in_virtual_time
async def test_sync_without_commit_makes_only_touched_engines_stale(
    is_touched: bool, is_late: bool
) -> None:
    stage = await serving(2)
    await stage.sync(3)
    sync = await begin(stage, timeout_s=50.0)
    read_version = Ask(method="GET", path="/version")
    await stage.fleet.syncs.broadcast(sync, LOAD if is_touched else read_version, 5.0)
    if is_late:
        await asyncio.sleep(51.0)
        with pytest.raises(NoSuchSync, match=r"had not ended after 50 s \(timeout_s\)"):
            await stage.fleet.syncs.commit(sync, 4, {0: 1, 1: 1})
    else:
        assert (await stage.fleet.syncs.give_up(sync))["version"] == 3

    assert stage.fleet.registry.view.version == 3
    assert stage.states() == [S, S] if is_touched else [A, A]
    assert stage.routed() == ([] if is_touched else [0, 1])
    assert (await stage.sync(4))["serving"] == [0, 1]


@in_virtual_time
async def test_engine_that_fails_to_load_is_restarted_and_not_committed() -> None:
    stage = await serving(3)
    sync = await begin(stage)
    stage.prober.statuses = {0: 500, 1: 503}
    await stage.fleet.syncs.broadcast(sync, LOAD, 5.0)
    # Only engine 0 fails in the second broadcast. Engine 1 receives the weights.
    stage.prober.statuses = {0: 500}
    await stage.fleet.syncs.broadcast(sync, LOAD, 5.0)
    assert stage.states() == [A, A, A]

    committed = await stage.fleet.syncs.commit(sync, 1, {0: 1, 1: 1, 2: 1})
    await stage.until(lambda: stage.states() == [S, A, A])

    assert (committed["serving"], committed["failed"]) == (
        [1, 2],
        [{"engine": 0, "why": "POST /load: 500 truncated file"}],
    )
    assert [len(stage.host.times("start", rank)) for rank in range(3)] == [2, 1, 1]


@in_virtual_time
async def test_engine_that_hangs_in_a_broadcast_fails_at_the_timeout() -> None:
    stage = await serving(2)
    sync = await begin(stage)
    stage.host[0].answers = "hang"
    began_s = now_s()
    answers = (await stage.fleet.syncs.broadcast(sync, LOAD, 5.0))["answers"]

    assert now_s() - began_s == 5.0
    assert [answer["status"] for answer in answers] == [None, 200]
    assert stage.states() == [X, A]
    assert (await stage.fleet.syncs.commit(sync, 1, {0: 1, 1: 1}))["serving"] == [1]


@in_virtual_time
async def test_no_restart_begins_during_a_sync() -> None:
    stage = await serving(2, servers=2)
    sync = await begin(stage, timeout_s=5000.0)
    stage.host.die(0)
    assert await stage.until(lambda: not stage.host[1].is_alive) < 0.1
    await asyncio.sleep(3600.0)

    assert len(stage.host.times("start", 0)) == 1
    await stage.fleet.syncs.commit(sync, 1, {1: 1})
    assert await stage.until(lambda: stage.states() == [S, A]) < 1.0


@in_virtual_time
async def test_restart_that_has_begun_continues_during_a_sync() -> None:
    stage = await serving(2)
    stage.host[0].loads_for_s = 50.0
    stage.host.die(0)
    await stage.until(lambda: stage.host[0].is_alive)

    # The sync must not end the restart. Otherwise a trainer with a sync each minute would prevent
    # every restart.
    sync = await begin(stage)
    await asyncio.sleep(60.0)
    await stage.fleet.syncs.commit(sync, 1, {1: 1})

    assert stage.states() == [S, A]
    assert len(stage.host.times("start", 0)) == 2


@in_virtual_time
async def test_engines_are_not_probed_during_a_sync() -> None:
    stage = await serving(2, interval_s=10.0)
    sync = await begin(stage, timeout_s=5000.0)
    asked = len(stage.prober.asked)
    stage.host[0].answers = "503"
    stage.fleet.note_failure(0, 1, "503")
    await asyncio.sleep(1000.0)
    stage.host[0].answers = "yes"
    await stage.fleet.syncs.commit(sync, 1, {0: 1, 1: 1})

    assert len(stage.prober.asked) == asked
    assert stage.states() == [A, A]
    # If the trainer never ends the sync, the probes resume at the time limit of the sync.
    await begin(stage, timeout_s=20.0)
    stage.host[1].answers = "503"
    assert await stage.until_out(1) <= 20.0 + 3 * 10.0 + 0.1


@in_virtual_time
async def test_min_active_is_checked_after_each_sync() -> None:
    stage = await serving(2, min_active=2)
    sync = await begin(stage)
    stage.host.die(0)
    await asyncio.sleep(10.0)
    assert not stage.fleet.fatal.done()
    await stage.fleet.syncs.commit(sync, 1, {1: 1})

    reason = stage.fleet.fatal.result()
    assert reason.startswith("1 of 2 engines serve requests, min_active is 2: ranks 0: rank 0 died")


@in_virtual_time
async def test_placeholders_of_a_broadcast_form_one_process_group() -> None:
    stage = await serving(3, servers=2)
    body = {
        "group": "update",
        "offset": "${engine.rank_offset}",
        "size": "${engine.world_size}",
        "names": ["engine-${engine.index}", "$${engine.index}", "${run.id}"],
    }
    sync = await begin(stage)
    stage.host.die(2)
    await stage.fleet.syncs.broadcast(sync, Ask(method="POST", path="/init", body=body), 5.0)

    # In the process group for the weights, the trainer is rank 0. The two engines that still run
    # have the next ranks, without a gap.
    assert {url[-4:]: ask.body for url, ask in stage.prober.calls} == {
        "8000": {
            **body,
            **{"offset": 1, "size": 2, "names": ["engine-0", "$${engine.index}", "${run.id}"]},
        },
        "8004": {
            **body,
            **{"offset": 3, "size": 2, "names": ["engine-2", "$${engine.index}", "${run.id}"]},
        },
    }
    with pytest.raises(KeyError, match=r"unknown name `\$\{engine.rank\}`: known names are"):
        ask = Ask(method="POST", path="/init", body={"rank": "${engine.rank}"})
        await stage.fleet.syncs.broadcast(sync, ask, 5.0)


@in_virtual_time
async def test_each_expert_server_gets_its_own_rank_offset() -> None:
    stage = await serving(1, servers=3, are_experts=True)
    sync = await begin(stage)
    ask = Ask(method="POST", path="/init", body={"offset": "${engine.rank_offset}"})

    answers = (await stage.fleet.syncs.broadcast(sync, ask, 5.0))["answers"]

    assert [(answer["engine"], answer["rank"]) for answer in answers] == [(0, 0), (0, 1), (0, 2)]
    assert [ask.body for _, ask in stage.prober.calls] == [{"offset": n} for n in (1, 2, 3)]
    assert stage.fleet.registry.view.training["mesh"] == [[0], [1], [2]]


@in_virtual_time
async def test_fleet_that_starts_stale_serves_after_its_first_commit() -> None:
    stage = Stage(plan_of(2), serves_as_loaded=False, min_active=2)
    await stage.fleet.start()

    assert (stage.states(), stage.routed(), stage.fleet.has_started) == ([S, S], [], True)
    assert not stage.fleet.fatal.done()
    assert (await stage.sync(0))["serving"] == [0, 1]


@in_virtual_time
async def test_start_returns_when_min_active_engines_work() -> None:
    stage = Stage(plan_of(3), min_active=2)
    stage.host[1].loads_for_s = 80.0
    began_s = now_s()
    await stage.fleet.start()

    assert now_s() - began_s < 1.0
    assert stage.routed() == [0, 2]
    assert await stage.until(lambda: stage.routed() == [0, 1, 2]) > 70.0


@in_virtual_time
async def test_stop_ends_an_open_sync_and_waiting_requests() -> None:
    stage = await serving(2)
    await begin(stage)
    waiting = asyncio.create_task(stage.fleet.router.take(None))
    await asyncio.sleep(1.0)

    await stage.fleet.stop()

    with pytest.raises(Exception, match="the fleet is stopped"):
        await waiting
    assert loops() == []


@in_virtual_time
async def test_check_restarts_an_engine_after_one_bad_answer() -> None:
    stage = await serving(3)
    stage.host[0].answers = "503"
    answer = await stage.fleet.check()

    assert [failure["engine"] for failure in answer["failed"]] == [0]
    assert not stage.host[0].is_alive
    await stage.until_active()


@in_virtual_time
async def test_check_has_a_time_limit_even_if_a_server_cannot_be_ended() -> None:
    stage = await serving(2)
    stage.host[0].answers = stage.host[0].at_home = "hang"
    stage.host.stop_takes_s = 1e6
    began_s = now_s()
    await stage.fleet.check()

    assert now_s() - began_s <= 15.0 + 15.0 + stage.stop_within_s + 0.1
    assert "could not be ended" in stage.told("rollout.warning")[0]["message"]


@in_virtual_time
async def test_check_does_not_end_a_server_that_only_the_network_hides() -> None:
    stage = await serving(2)
    stage.host[0].answers = "hang"
    answer = await stage.fleet.check()
    stage.host[0].answers = "yes"
    await stage.until(lambda: stage.routed() == [0, 1], within_s=31.0)

    assert answer["failed"] == []
    assert answer["active"] == [1]
    assert answer["unreachable"] == [[0]]
    assert len(stage.host.times("start", 0)) == 1


@in_virtual_time
async def test_snapshot_describes_every_server_and_engine() -> None:
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
    stage = await serving(2)

    assert await stage.fleet.restart(1) == {"engine": 1, "state": "inactive"}
    with pytest.raises(FleetRefused, match="engine 1 is inactive: it has no running server"):
        await stage.fleet.restart(1)
    with pytest.raises(KeyError, match="the fleet has no engine 2: it has 2"):
        await stage.fleet.restart(2)
    await stage.until_active()

    assert [len(stage.host.times("start", rank)) for rank in range(2)] == [1, 2]


@in_virtual_time
async def test_worker_is_retired_with_its_engine_unless_the_fleet_needs_it() -> None:
    stage = await serving(3, servers=2, min_active=2)

    assert (await stage.fleet.retire(2))["engine"] == 1
    assert not stage.host[2].is_alive and not stage.host[3].is_alive
    with pytest.raises(FleetRefused, match="2 engines remain, and min_active requires all of them"):
        await stage.fleet.retire(0)
    await asyncio.sleep(1000.0)

    assert stage.routed() == [0, 4]
    assert [worker["id"] for worker in stage.fleet.workers()["workers"]] == ["0", "4"]
    assert not stage.fleet.fatal.done()


@in_virtual_time
async def test_only_the_fleets_own_entrypoints_are_workers() -> None:
    stage = await serving(2)
    stage.host.die(1)

    workers = stage.fleet.workers()["workers"]
    assert [(worker["url"], worker["is_healthy"]) for worker in workers] == [
        ("http://10.0.0.1:8000", True),
        ("http://10.0.0.1:8001", False),
    ]
    assert (await stage.fleet.add("http://10.0.0.1:8001/"))["worker_id"] == "1"
    with pytest.raises(FleetRefused, match="is no server of this fleet"):
        await stage.fleet.add("http://10.0.0.9:8000")


@in_virtual_time
async def test_retired_worker_can_be_added_again_and_waits_for_weights() -> None:
    stage = await serving(2)
    await stage.fleet.retire(1)
    await stage.fleet.syncs.commit(await begin(stage), 1, {0: 1})

    await stage.fleet.add("http://10.0.0.1:8001")
    await stage.until(lambda: stage.states() == [A, S])
    assert (stage.host[1].is_alive, stage.routed()) == (True, [0])
    await stage.fleet.syncs.commit(await begin(stage), 2, {0: 1, 1: 2})

    assert stage.routed() == [0, 1]
    assert stage.fleet.registry.view.groups[1].version == 2


@in_virtual_time
async def test_retired_worker_cannot_be_added_if_the_budget_is_spent() -> None:
    stage = await serving(2, budget=1)
    stage.host.die(1)
    await stage.until_active()
    await stage.fleet.retire(1)

    with pytest.raises(FleetRefused, match="engine 1 stays retired: the budget of 1 recoveries"):
        await stage.fleet.add("http://10.0.0.1:8001")
    await asyncio.sleep(100.0)

    assert not stage.host[1].is_alive
    assert not stage.fleet.fatal.done()
