r"""Behaviours that a fleet of inference servers must have, with the tests that show each behaviour.

The table numbers the known faults of XTuner's fleet of inference servers, which Muster's fleet must
not have:

| nr | test |
| --- | --- |
| 1 | test_group_that_fails_while_generating_is_stopped_before_the_next_check |
| 2 | test_all_groups_recover_at_once_if_all_are_down, \
test_all_groups_down_without_budget_is_fatal_at_once |
| 3 | test_failed_server_leaves_the_router_first; test_gateway.py, \
test_every_request_ends_once_whatever_the_servers_do |
| 4 | test_stop_during_a_recovery_has_a_time_limit |
| 5 | test_fleet_has_one_probe_loop_per_engine_after_a_timed_out_stop_and_a_start |
| 6 | test_check_of_many_hung_servers_takes_only_one_timeout |
| 7 | test_gateway.py, test_control_request_forwards_its_arguments |
| 8, 9 | test_unknown_rank_or_group_is_an_error |
| 10 | test_dead_engine_behind_a_live_http_server_is_detected |
| 11 | test_backend_without_a_token_probe_gets_only_health_probes_and_a_warning |
| 12 | test_restarted_group_generates_a_token_before_it_is_active |
| 13 | test_check_fails_a_group_at_the_first_bad_probe |
| 14 | test_result_of_a_check_names_failed_and_active_servers |
| 15 | test_first_probe_after_a_sync_waits_a_whole_interval |
| 16 | test_fleet_spec.py, test_invalid_fleet_is_rejected_with_a_remedy; test_rollout_topology.py, \
test_sglang_health_check_generates_a_token_within_the_fleets_timeout |
| 17 | test_event_quotes_an_answer_that_is_not_200 |
| 18 | test_one_failed_rank_removes_and_restores_its_whole_group |
| 19 | test_only_entrypoints_get_requests |
| 20 | test_restart_reuses_addresses_and_bundles, test_port_conflict_gets_new_ports |
| 21 | test_fleet_registry.py |
| 22 | test_rollout_router.py, \
test_session_moves_to_another_entrypoint_if_its_entrypoint_leaves; \
test_gateway.py, test_without_an_active_server_a_request_is_refused_at_once_with_the_reason |
| 23 | test_rollout_topology.py |
| 24 | test_trainer_reads_one_consistent_snapshot |
| 25 | test_every_claimed_group_ends_in_a_final_state_after_any_error, test_fleet_histories.py |
| 26 | test_rollout_router.py, test_concurrency_follows_the_entrypoints; test_rollout_line.py, \
test_new_entrypoint_takes_waiting_requests_up_to_its_limit |
| 27 | test_death_of_the_hosting_actor_is_recovered; test_ray_host.py, \
test_the_death_of_an_actor_ends_its_server_and_can_be_recovered |

With real processes: test_fleet_servers.py, test_fleet_process.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tasks.record.states import GroupState
from tasks.rollout.sync import InFlight
from tests.support.fleet_clock import in_virtual_time, now_s
from tests.support.fleet_fakes import (
    TOKEN,
    FleetHarness,
    list_fleet_tasks,
    make_rebind,
    make_topology,
    start_fake_fleet,
)

A, X, R, S = GroupState.ACTIVE, GroupState.INACTIVE, GroupState.RECOVERING, GroupState.STALE


@in_virtual_time
async def test_group_that_fails_while_generating_is_stopped_before_the_next_check() -> None:
    harness = await start_fake_fleet(servers=2)
    began_s = now_s()
    harness.host.die(0)
    await harness.wait_until(lambda: not harness.host[1].is_alive)

    assert now_s() - began_s < 0.1
    [stopped, *_] = [ranks for _, verb, ranks in harness.host.log if verb == "stop"]
    assert stopped == (0, 1)


@in_virtual_time
async def test_all_groups_recover_at_once_if_all_are_down() -> None:
    harness = await start_fake_fleet(3, backoff_s=50.0, parallel=3)
    for rank in range(3):
        harness.host.die(rank)
    assert harness.list_routed_ranks() == []

    assert await harness.wait_until_active() < 1.0


@in_virtual_time
async def test_all_groups_down_without_budget_is_fatal_at_once() -> None:
    harness = await start_fake_fleet(budget=1, parallel=2)
    for rank in range(2):
        harness.host.die(rank)
    await harness.wait_until_active()
    await asyncio.sleep(10.0)
    began_s = now_s()
    for rank in range(2):
        harness.host.die(rank, "killed by SIGKILL", log_end="CUDA error")

    took_s = now_s() - began_s
    reason = await harness.fleet.fatal

    assert took_s == 0
    assert reason.startswith(
        "Muster no longer restarts 2 of 2 engines, but the run needs at least 1 engine: ranks 0: "
        "all 1 allowed restarts are used up"
    )
    assert "rank 0 died: killed by SIGKILL" in reason
    assert reason.endswith("last lines of rank 0:\nCUDA error")


@in_virtual_time
async def test_failed_server_leaves_the_router_first() -> None:
    harness = await start_fake_fleet()
    routed_ranks: list[int] = []
    harness.fleet.registry.listen(
        lambda before, after: routed_ranks.extend(harness.list_routed_ranks())
    )
    harness.host.die(0)

    assert routed_ranks == [1]


@pytest.mark.parametrize("stop_takes_s", [0.0, 1e6])
@in_virtual_time
async def test_stop_during_a_recovery_has_a_time_limit(stop_takes_s: float) -> None:
    harness = await start_fake_fleet(3)
    harness.host[1].hangs_in_start = True
    harness.host.die(1)
    await harness.wait_until(lambda: len(harness.host.times("start", 1)) == 2)
    harness.host.stop_takes_s = stop_takes_s
    began_s = now_s()
    await harness.fleet.stop()

    assert now_s() - began_s < harness.stop_within_s + 2.0
    assert harness.states() == [X, X, X]
    assert list_fleet_tasks() == []


@in_virtual_time
async def test_fleet_has_one_probe_loop_per_engine_after_a_timed_out_stop_and_a_start() -> None:
    harness = await start_fake_fleet()
    tasks_before = list_fleet_tasks()
    harness.host.die(0)
    harness.host.stop_takes_s = 1e6
    assert "TimeoutError" in await harness.fleet.stop()
    harness.host.stop_takes_s = 0.0
    assert await harness.fleet.stop() == ""
    await harness.fleet.start()

    assert tasks_before == ["rollout-health-0", "rollout-health-1"]
    assert list_fleet_tasks() == tasks_before
    assert harness.list_routed_ranks() == [0, 1]


@pytest.mark.parametrize("at_home", ["yes", "hang"])
@in_virtual_time
async def test_check_of_many_hung_servers_takes_only_one_timeout(at_home: str) -> None:
    harness = await start_fake_fleet(100, timeout_s=15.0)
    for rank in range(100):
        harness.host[rank].answers = "hang"
        harness.host[rank].at_home = at_home
    began_s = now_s()
    failed = (await harness.fleet.check())["failed"]

    assert 15.0 <= now_s() - began_s < 15.0 * 1.1
    assert len(failed) == (0 if at_home == "yes" else 100)


@in_virtual_time
async def test_unknown_rank_or_group_is_an_error() -> None:
    registry = FleetHarness(make_topology(2)).fleet.registry
    with pytest.raises(
        KeyError, match=r"there is no server with rank 7\. The ranks with a server are: 0, 1"
    ):
        registry.fail(7, 1, "gone")
    with pytest.raises(KeyError, match="there is no engine 2: the run has 2"):
        registry.begin(2)


@pytest.mark.parametrize("servers", [1, 2])
@in_virtual_time
async def test_dead_engine_behind_a_live_http_server_is_detected(servers: int) -> None:
    harness = await start_fake_fleet(1, servers=servers, interval_s=10.0, misses=3)
    harness.prober.deaf_paths = {TOKEN.path}
    await harness.wait_until_failed(within_s=31.0)

    assert (
        harness.last_failure_cause() == "the server of rank 0 does not work: 503 Scheduler is dead"
    )
    # An engine has two servers. Only the entrypoint, which receives requests, is probed. The other
    # server answers 200 even if the engine is dead.
    assert harness.prober.times(1) == []


@in_virtual_time
async def test_backend_without_a_token_probe_gets_only_health_probes_and_a_warning() -> None:
    harness = await start_fake_fleet(3, token=None, interval_s=10.0)
    await asyncio.sleep(100.0)

    assert {path for _, _, path in harness.prober.asked} == {"/health"}
    [warning] = harness.list_events("rollout.warning")
    assert "no health check that generates a token" in warning["message"]


@in_virtual_time
async def test_restarted_group_generates_a_token_before_it_is_active() -> None:
    harness = await start_fake_fleet()
    harness.host[0].loads_for_s = 40.0
    began_s = now_s()
    harness.host.die(0)
    await harness.wait_until(lambda: harness.host[0].is_alive)
    assert harness.states() == [R, A]
    await harness.wait_until_active()

    became_active_s = harness.time_of_event("rollout.group.state", group=0, before="recovering")
    answered = [(at, path) for at, rank, path in harness.prober.asked if rank == 0 and at > began_s]
    assert became_active_s > began_s + 40.0
    assert answered[-1][1] == TOKEN.path
    assert answered[-1][0] <= became_active_s


@pytest.mark.parametrize("misses", [0, 3, 50])
@in_virtual_time
async def test_check_fails_a_group_at_the_first_bad_probe(misses: int) -> None:
    harness = await start_fake_fleet(misses=misses)
    harness.host[1].answers = "503"

    answer = await harness.fleet.check()

    assert [failure["ranks"] for failure in answer["failed"]] == [[1]]
    assert len(harness.host.times("stop", 1)) == 1


@in_virtual_time
async def test_result_of_a_check_names_failed_and_active_servers() -> None:
    harness = await start_fake_fleet(3, servers=2)
    harness.host[2].answers = harness.host[2].at_home = "hang"
    answer = await harness.fleet.check()

    cause = "the server of rank 2 does not answer: no answer within 15 s"
    assert answer == {
        "epoch": harness.fleet.registry.view.epoch,
        "failed": [{"engine": 1, "ranks": [2, 3], "cause": cause}],
        "active": [0, 4],
        "inactive": [[2, 3]],
        "unreachable": [],
    }
    assert not harness.host[2].is_alive
    assert not harness.host[3].is_alive


@in_virtual_time
async def test_first_probe_after_a_sync_waits_a_whole_interval() -> None:
    harness = await start_fake_fleet(3, interval_s=30.0)
    await asyncio.sleep(29.0)
    begun = await harness.fleet.begin_sync(2000.0, InFlight.WAIT)
    await asyncio.sleep(1000.0)
    await harness.fleet.syncs.give_up(begun["sync"])
    ended_s = now_s()
    await asyncio.sleep(100.0)

    for rank in range(3):
        [*_, first, _, _] = harness.prober.times(rank)
        assert first == pytest.approx(ended_s + 30.0)


@in_virtual_time
async def test_event_quotes_an_answer_that_is_not_200() -> None:
    harness = await start_fake_fleet(1, interval_s=10.0)
    harness.host[0].answers = "503"
    await harness.wait_until_failed()

    failures = harness.list_events("rollout.probe.failed")
    assert [(failure["misses"], failure["reason"]) for failure in failures] == [
        (1, "503 Scheduler is dead"),
        (2, "503 Scheduler is dead"),
        (3, "503 Scheduler is dead"),
    ]


@in_virtual_time
async def test_one_failed_rank_removes_and_restores_its_whole_group() -> None:
    harness = await start_fake_fleet(servers=4, are_experts=True)
    assert harness.list_routed_ranks() == [0, 1, 2, 3, 4, 5, 6, 7]
    harness.host.die(6)
    assert harness.list_routed_ranks() == [0, 1, 2, 3]
    await harness.wait_until_active()

    assert harness.list_routed_ranks() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [len(harness.host.times("start", rank)) for rank in range(8)] == [1, 1, 1, 1, 2, 2, 2, 2]


@in_virtual_time
async def test_only_entrypoints_get_requests() -> None:
    # The fleet has two engines with two servers each. Ranks 0 and 2 are the entrypoints, which are
    # the servers that receive requests.
    harness = await start_fake_fleet(servers=2)
    routed = [harness.list_routed_ranks()]
    harness.host.die(3)
    routed.append(harness.list_routed_ranks())
    await harness.wait_until_active()

    assert [*routed, harness.list_routed_ranks()] == [[0, 2], [0], [0, 2]]


@in_virtual_time
async def test_restart_reuses_addresses_and_bundles() -> None:
    harness = await start_fake_fleet(rebind=make_rebind(9000))
    before = harness.host.slots[0]
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states()[0] is R)
    await harness.wait_until_active()

    assert harness.host.slots[0] == before


@in_virtual_time
async def test_port_conflict_gets_new_ports() -> None:
    harness = await start_fake_fleet(rebind=make_rebind(9000))
    harness.host.foreign_ports.add(8000)
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states()[0] is R)
    await harness.wait_until_active()

    assert harness.host.slots[0].port == 9000
    assert harness.fleet.registry.view.servers[0].url == "http://10.0.0.1:9000"
    assert sorted(entrypoint.url for entrypoint in harness.fleet.router.entrypoints) == [
        "http://10.0.0.1:8001",
        "http://10.0.0.1:9000",
    ]
    assert len(harness.host.times("start", 0)) == 2


@in_virtual_time
async def test_trainer_reads_one_consistent_snapshot() -> None:
    harness = await start_fake_fleet(3, servers=2)
    await harness.sync(1)
    harness.host.die(3)
    await harness.wait_until(lambda: harness.states() == [A, S, A])
    snapshot = harness.fleet.snapshot()
    training = snapshot["training"]

    harness.host.die(0)

    assert training["mesh"] == [[0, 1], [2, 3], [4, 5]]
    assert [engine["epoch"] for engine in snapshot["engines"]] == [1, 2, 1]
    assert snapshot["epoch"] == training["epoch"]
    assert harness.fleet.snapshot()["training"]["epoch"] > training["epoch"]
    # The commit says that engine 0 received the weights in epoch 1. But engine 0 has died in this
    # epoch, so engine 0 serves no requests after the commit.
    harness.fleet.registry.commit(2, {0: 1, 1: 2, 2: 1})
    assert [group.index for group in harness.fleet.registry.view.serving] == [1, 2]


def _raise_error(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


async def _raise_error_later(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "break_part",
    [
        pytest.param(
            lambda harness: setattr(harness.host, "start", _raise_error_later), id="start"
        ),
        pytest.param(lambda harness: setattr(harness.host, "stop", _raise_error_later), id="stop"),
        pytest.param(
            lambda harness: setattr(harness.host, "ports_taken", _raise_error_later), id="ports"
        ),
        pytest.param(
            lambda harness: setattr(harness.prober, "ask", _raise_error_later), id="probe"
        ),
        pytest.param(lambda harness: harness.host.foreign_ports.add(8000), id="rebind"),
    ],
)
@in_virtual_time
async def test_every_claimed_group_ends_in_a_final_state_after_any_error(
    break_part: Callable[[FleetHarness], None], caplog: pytest.LogCaptureFixture
) -> None:
    harness = await start_fake_fleet(budget=3, backoff_s=0.1, rebind=_raise_error)
    claimed: set[int] = set()
    harness.fleet.registry.listen(
        lambda before, after: claimed.add(after.index) if after.state is R else None
    )
    break_part(harness)
    harness.host.die(0)
    await asyncio.sleep(1000.0)

    assert claimed == {0}
    assert harness.states() in ([A, A], [GroupState.RETIRED, A])


@in_virtual_time
async def test_death_of_the_hosting_actor_is_recovered() -> None:
    harness = await start_fake_fleet()
    harness.host.die(0, "its Ray actor died: node 10.0.0.7 is gone")
    await harness.wait_until(lambda: harness.states()[0] is R)
    await harness.wait_until_active()

    [begun] = harness.list_events("rollout.recovery.begun")
    assert begun["cause"] == "the server of rank 0 died: its Ray actor died: node 10.0.0.7 is gone"
