"""A fleet of real server processes behaves correctly where the fleet of XTuner fails.

The table numbers the known faults of XTuner's fleet of inference servers:

| number | test |
| --- | --- |
| 1 | test_killed_server_stops_its_group_at_once_and_the_group_recovers |
| 2 | test_all_killed_groups_recover, test_deaths_beyond_the_recovery_budget_are_fatal |
| 5 | test_stop_and_start_leave_one_loop_and_one_process_per_server |
| 10 | test_dead_engine_behind_a_live_server_is_restarted |
| 12 | test_group_serves_only_after_it_has_generated |
| 14 | test_check_reports_failed_ranks_after_their_processes_have_ended |
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.processes import tree
from tasks.record.disk import DiskThread
from tasks.record.states import GroupState
from tasks.rollout.backends import Ask, Questions
from tasks.rollout.fleet import Fleet
from tasks.rollout.local_host import LocalHost
from tasks.rollout.probing import HttpProber
from tasks.rollout.topology import Engine, ServerSlot, TopologyPlan
from tests.support.fleet_fakes import (
    find_server_pid,
    list_fleet_tasks,
    make_fleet_plan,
    make_rebind,
    make_settings,
)
from tests.support.supervised_components import (
    DEADLINE_S,
    RUN_ID,
    ComponentHarness,
    free_port,
    is_alive,
)

DUMMY = Path(__file__).parents[1] / "support" / "dummy_server.py"
A = GroupState.ACTIVE
QUESTIONS = Questions(
    ready=Ask(method="GET", path="/health"), token=Ask(method="GET", path="/health_generate")
)


class RealFleet:
    """A fleet of two engines with two dummy servers each. Each server has its own guardian process.

    Only the first server of an engine is an entrypoint, which accepts requests.
    """

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        plan = make_fleet_plan(directory, run_id=RUN_ID, grace_s=0.3)
        self.host = LocalHost(plan, {"PATH": os.environ["PATH"]}, DiskThread("disk"))
        self.prober = HttpProber()
        self.fleet = Fleet(
            TopologyPlan(
                engines=tuple(_build_engine(index) for index in range(2)),
                questions=QUESTIONS,
                placement="local",
            ),
            settings=make_settings(
                **{
                    "interval_s": 0.5,
                    "timeout_s": 1.5,
                    "misses": 2,
                    "grace_s": 0.3,
                    "backoff_s": 0.05,
                    "max_backoff_s": 0.2,
                    "start_within_s": DEADLINE_S,
                    **settings,
                }
            ),
            host=self.host,
            prober=self.prober,
            emit=lambda event, **fields: self.events.append((event, fields)),
            # Called only if another program takes a port, so never in these tests.
            rebind=make_rebind(9000),
        )

    def pid(self, rank: int) -> int:
        pid = find_server_pid(self.host, rank)
        assert pid is not None
        return pid

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> int:
        """Send a signal to the process of a server, and return the pid of the process."""
        pid = self.pid(rank)
        os.kill(pid, signum)
        return pid

    def routed_ranks(self) -> set[int]:
        """Return the ranks of the servers to which the fleet's router sends requests."""
        return {entrypoint.rank for entrypoint in self.fleet.router.entrypoints}

    def epochs(self) -> list[int]:
        return [group.epoch for group in self.fleet.registry.view.groups]

    async def misbehave(self, rank: int, **fault: Any) -> None:
        """Make a dummy server misbehave from now on.

        `fault` has the fields of `dummy_server.Fault`.
        """
        url = self.fleet.registry.view.servers[rank].url
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.post(f"{url}/misbehave", json=fault)).raise_for_status()

    async def until(self, is_true: Callable[[], object]) -> None:
        """Wait until the function returns a true value; raise TimeoutError at the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not is_true():
                await asyncio.sleep(0.01)

    async def until_serving(self, epochs: list[int]) -> None:
        """Wait until all engines are active and have these epochs.

        Args:
            epochs: Expected epoch of each engine. The epoch counts the starts of the engine.
        """
        await self.until(
            lambda: (
                self.epochs() == epochs
                and all(group.state is A for group in self.fleet.registry.view.groups)
            )
        )


def _build_engine(index: int) -> Engine:
    ranks = (2 * index, 2 * index + 1)
    return Engine(
        nodes=(0,),
        servers=tuple(_build_slot(rank, index, ranks) for rank in ranks),
    )


def _build_slot(rank: int, engine: int, ranks: tuple[int, ...]) -> ServerSlot:
    port = free_port()
    is_first = rank == ranks[0]
    return ServerSlot(
        ranks=(rank,),
        engine=engine,
        index=rank - ranks[0],
        node=0,
        bundles=(),
        weight_ranks=ranks if is_first else (),
        is_entrypoint=is_first,
        host="127.0.0.1",
        port=port,
        argv=(sys.executable, "-I", "-S", str(DUMMY), "--port", str(port), "--rank", str(rank)),
    )


@pytest.fixture
def play(tmp_path: Path, harness: ComponentHarness) -> Iterator[Callable[..., None]]:
    """Yield a function that starts a fleet, runs a coroutine of a test, and stops the fleet.

    After the test, no process of the fleet may remain.
    """
    tree.become_subreaper()

    def play(scenario: Callable[[RealFleet], Awaitable[None]], **settings: Any) -> None:
        async def start_run_and_stop() -> None:
            real_fleet = RealFleet(tmp_path, **settings)
            try:
                await real_fleet.fleet.start()
                await scenario(real_fleet)
            finally:
                await real_fleet.fleet.stop()
                await real_fleet.host.close()
                assert list_fleet_tasks() == []

        asyncio.run(start_run_and_stop())

    yield play
    assert harness.list_survivors() == {}


def test_killed_server_stops_its_group_at_once_and_the_group_recovers(
    play: Callable[..., None],
) -> None:
    async def scenario(real_fleet: RealFleet) -> None:
        other = real_fleet.pid(0)
        unaffected = real_fleet.pid(2)
        real_fleet.kill(1)
        await real_fleet.until(lambda: real_fleet.routed_ranks() == {2})
        await real_fleet.until(lambda: not is_alive(other))
        await real_fleet.until_serving([2, 1])
        assert real_fleet.pid(2) == unaffected

    play(scenario)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_all_killed_groups_recover(play: Callable[..., None], signum: signal.Signals) -> None:
    async def scenario(real_fleet: RealFleet) -> None:
        old_pids = {real_fleet.kill(rank, signum) for rank in (0, 2)}
        await real_fleet.until_serving([2, 2])
        assert not any(is_alive(pid) for pid in old_pids)

    play(scenario)


def test_deaths_beyond_the_recovery_budget_are_fatal(play: Callable[..., None]) -> None:
    async def scenario(real_fleet: RealFleet) -> None:
        for rank in (0, 2):
            real_fleet.kill(rank)
        await real_fleet.until_serving([2, 2])
        for rank in (0, 2):
            real_fleet.kill(rank)
        async with asyncio.timeout(DEADLINE_S):
            reason = await real_fleet.fleet.fatal
        assert "all 1 allowed restarts are used up" in reason
        assert "killed by SIGKILL" in reason

    # `budget=1` allows one recovery. Servers that die at about the same time are restarted in one
    # recovery. So the scenario kills the servers twice: two recoveries are more than the budget
    # allows.
    play(scenario, budget=1)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("status", marks=pytest.mark.thorough),
        "hang",
        "garbage",
        pytest.param("reset", marks=pytest.mark.thorough),
    ],
)
def test_dead_engine_behind_a_live_server_is_restarted(
    play: Callable[..., None], kind: str
) -> None:
    async def scenario(real_fleet: RealFleet) -> None:
        await real_fleet.misbehave(0, kind=kind, health=True)
        await real_fleet.until_serving([2, 1])

    play(scenario)


def test_group_serves_only_after_it_has_generated(play: Callable[..., None]) -> None:
    async def scenario(real_fleet: RealFleet) -> None:
        probes: list[tuple[GroupState, str | None]] = []
        original_ask = real_fleet.prober.ask

        async def ask_and_record(url: str, question: Ask, timeout_s: float) -> str | None:
            answer = await original_ask(url, question, timeout_s)
            if url.endswith(f":{real_fleet.fleet.registry.view.servers[0].port}"):
                state = real_fleet.fleet.registry.view.groups[0].state
                probes.append((state, question.path if answer is None else None))
            return answer

        real_fleet.prober.ask = ask_and_record  # type: ignore[method-assign]
        real_fleet.kill(0)
        await real_fleet.until_serving([2, 1])
        paths_while_recovering = [path for state, path in probes if state is GroupState.RECOVERING]
        assert paths_while_recovering[-2:] == ["/health", "/health_generate"]

    play(scenario)


def test_check_reports_failed_ranks_after_their_processes_have_ended(
    play: Callable[..., None],
) -> None:
    async def scenario(real_fleet: RealFleet) -> None:
        failed_pids = [real_fleet.pid(0), real_fleet.pid(1)]
        await real_fleet.misbehave(0, kind="status", health=True)
        answer = await real_fleet.fleet.check()
        assert [failure["ranks"] for failure in answer["failed"]] == [[0, 1]]
        assert answer["active"] == [2]
        assert not any(is_alive(pid) for pid in failed_pids)
        await real_fleet.until_serving([2, 1])
        assert real_fleet.fleet.registry.view.training["mesh"] == [[0, 1], [2, 3]]

    # `misses=0` switches the regular probes off, so only the request `check` probes the servers.
    play(scenario, misses=0)


def test_stop_and_start_leave_one_loop_and_one_process_per_server(
    play: Callable[..., None],
) -> None:
    async def scenario(real_fleet: RealFleet) -> None:
        pids = {real_fleet.pid(rank) for rank in range(4)}
        expected_loops = list_fleet_tasks()
        assert await real_fleet.fleet.stop() == ""
        assert not any(is_alive(pid) for pid in pids)
        await real_fleet.fleet.start()
        assert list_fleet_tasks() == expected_loops
        assert {real_fleet.pid(rank) for rank in range(4)}.isdisjoint(pids)
        assert real_fleet.routed_ranks() == {0, 2}

    play(scenario)
