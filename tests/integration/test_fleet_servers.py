"""A fleet over real server processes: what XTuner's head fails, by `facts/rollout.md`, holds here.

| nr | test |
| --- | --- |
| 1 | test_a_killed_server_takes_its_group_down_at_once_and_the_group_comes_back |
| 2 | test_all_groups_killed_come_back, test_all_killed_without_budget_is_fatal |
| 5 | test_stop_and_start_leave_one_loop_and_one_process_each |
| 10 | test_an_engine_that_is_dead_behind_a_live_server_is_restarted |
| 12 | test_a_group_serves_only_once_it_generates |
| 14 | test_the_check_tells_the_trainer_what_failed_and_has_ended |
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
from tests.support.fleet_fakes import loops, pid_of, plan_in, ports_from, settings_of
from tests.support.stage import DEADLINE_S, RUN_ID, Stage, free_port, is_alive

DUMMY = Path(__file__).parents[1] / "support" / "dummy_server.py"
A = GroupState.ACTIVE
QUESTIONS = Questions(
    ready=Ask(method="GET", path="/health"), token=Ask(method="GET", path="/health_generate")
)


class RealFleet:
    """Dummy servers below guardians, two of them an engine: the second has no say of its own."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        plan = plan_in(directory, run_id=RUN_ID, grace_s=0.3)
        self.host = LocalHost(plan, {"PATH": os.environ["PATH"]}, DiskThread("disk"))
        self.prober = HttpProber()
        self.fleet = Fleet(
            TopologyPlan(
                engines=tuple(_engine(index) for index in range(2)),
                questions=QUESTIONS,
                placement="local",
            ),
            settings=settings_of(
                **{
                    **{"interval_s": 0.5, "timeout_s": 1.5, "misses": 2, "grace_s": 0.3},
                    **{"backoff_s": 0.05, "max_backoff_s": 0.2, "start_within_s": DEADLINE_S},
                    **settings,
                }
            ),
            host=self.host,
            prober=self.prober,
            emit=lambda event, **fields: self.events.append((event, fields)),
            rebind=ports_from(9000),  # nobody takes a port
        )

    def pid(self, rank: int) -> int:
        pid = pid_of(self.host, rank)
        assert pid is not None
        return pid

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> int:
        pid = self.pid(rank)
        os.kill(pid, signum)
        return pid

    def routed(self) -> set[int]:
        return {one.rank for one in self.fleet.router.entrypoints}

    def epochs(self) -> list[int]:
        return [group.epoch for group in self.fleet.registry.view.groups]

    async def misbehave(self, rank: int, **fault: Any) -> None:
        url = self.fleet.registry.view.servers[rank].url
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.post(f"{url}/misbehave", json=fault)).raise_for_status()

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_so():
                await asyncio.sleep(0.01)

    async def until_serving(self, epochs: list[int]) -> None:
        await self.until(
            lambda: (
                self.epochs() == epochs
                and all(group.state is A for group in self.fleet.registry.view.groups)
            )
        )


def _engine(index: int) -> Engine:
    ranks = (2 * index, 2 * index + 1)
    return Engine(
        nodes=(0,),
        servers=tuple(_slot(rank, index, ranks) for rank in ranks),
    )


def _slot(rank: int, engine: int, ranks: tuple[int, ...]) -> ServerSlot:
    port, is_first = free_port(), rank == ranks[0]
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
def play(tmp_path: Path, stage: Stage) -> Iterator[Callable[..., None]]:
    """Plays a history on a fleet that serves, and ends what it has left."""
    tree.become_subreaper()

    def play(history: Callable[[RealFleet], Awaitable[None]], **settings: Any) -> None:
        async def whole() -> None:
            real = RealFleet(tmp_path, **settings)
            try:
                await real.fleet.start()
                await history(real)
            finally:
                await real.fleet.stop()
                await real.host.close()
                assert loops() == []

        asyncio.run(whole())

    yield play
    assert stage.left() == {}


def test_a_killed_server_takes_its_group_down_at_once_and_the_group_comes_back(
    play: Callable[..., None],
) -> None:
    async def history(real: RealFleet) -> None:
        other, well = real.pid(0), real.pid(2)
        real.kill(1)
        await real.until(lambda: real.routed() == {2})
        await real.until(lambda: not is_alive(other))
        await real.until_serving([2, 1])
        assert real.pid(2) == well

    play(history)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_all_groups_killed_come_back(play: Callable[..., None], signum: signal.Signals) -> None:
    async def history(real: RealFleet) -> None:
        before = {real.kill(rank, signum) for rank in (0, 2)}
        await real.until_serving([2, 2])
        assert not any(is_alive(pid) for pid in before)

    play(history)


def test_all_killed_without_budget_is_fatal(play: Callable[..., None]) -> None:
    async def history(real: RealFleet) -> None:
        for rank in (0, 2):
            real.kill(rank)
        await real.until_serving([2, 2])
        for rank in (0, 2):
            real.kill(rank)
        async with asyncio.timeout(DEADLINE_S):
            reason = await real.fleet.fatal
        assert "the budget of 1 recoveries is spent" in reason
        assert "killed by SIGKILL" in reason

    # Both at once are one incident, if the second death is told within its window.
    play(history, budget=1)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("status", marks=pytest.mark.thorough),
        "hang",
        "garbage",
        pytest.param("reset", marks=pytest.mark.thorough),
    ],
)
def test_an_engine_that_is_dead_behind_a_live_server_is_restarted(
    play: Callable[..., None], kind: str
) -> None:
    async def history(real: RealFleet) -> None:
        await real.misbehave(0, kind=kind, health=True)
        await real.until_serving([2, 1])

    play(history)


def test_a_group_serves_only_once_it_generates(play: Callable[..., None]) -> None:
    async def history(real: RealFleet) -> None:
        asked: list[tuple[GroupState, str | None]] = []
        ask = real.prober.ask

        async def noted(url: str, question: Ask, timeout_s: float) -> str | None:
            answer = await ask(url, question, timeout_s)
            if url.endswith(f":{real.fleet.registry.view.servers[0].port}"):
                state = real.fleet.registry.view.groups[0].state
                asked.append((state, question.path if answer is None else None))
            return answer

        real.prober.ask = noted  # type: ignore[method-assign]
        real.kill(0)
        await real.until_serving([2, 1])
        while_recovering = [path for state, path in asked if state is GroupState.RECOVERING]
        assert while_recovering[-2:] == ["/health", "/health_generate"]

    play(history)


def test_the_check_tells_the_trainer_what_failed_and_has_ended(play: Callable[..., None]) -> None:
    async def history(real: RealFleet) -> None:
        gone = [real.pid(0), real.pid(1)]
        await real.misbehave(0, kind="status", health=True)
        answer = await real.fleet.check()
        assert [one["ranks"] for one in answer["failed"]] == [[0, 1]]
        assert answer["active"] == [2]
        assert not any(is_alive(pid) for pid in gone)
        await real.until_serving([2, 1])
        assert real.fleet.registry.view.training["mesh"] == [[0, 1], [2, 3]]

    # Only the check asks.
    play(history, misses=0)


def test_stop_and_start_leave_one_loop_and_one_process_each(play: Callable[..., None]) -> None:
    async def history(real: RealFleet) -> None:
        pids = {real.pid(rank) for rank in range(4)}
        one_each = loops()
        assert await real.fleet.stop() == ""
        assert not any(is_alive(pid) for pid in pids)
        await real.fleet.start()
        assert loops() == one_each
        assert {real.pid(rank) for rank in range(4)}.isdisjoint(pids)
        assert real.routed() == {0, 2}

    play(history)
