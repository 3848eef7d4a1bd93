"""A fleet without processes: servers that behave as a test says, and a plan for them.

Everything runs on the time of the loop, so in `fleet_clock.run` in none at all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from tasks.processes.shortage import Unasked
from tasks.record.states import GroupState
from tasks.rollout.backends import Ask, Questions
from tasks.rollout.component import FleetPlan
from tasks.rollout.fleet import Fleet
from tasks.rollout.local_host import LocalHost
from tasks.rollout.probing import Death, NoReply, NoRoomToStart, Rebind, Reply, StartFailed
from tasks.rollout.recovery import STOPPED_WITHIN_S
from tasks.rollout.sync import InFlight
from tasks.rollout.topology import Engine, ServerSlot, TopologyPlan
from tasks.spec.errors import LostContact
from tasks.spec.rollout import UNLIMITED, FleetHealth, FleetRecovery, Rollout
from tasks.spec.values import Stop
from tests.support.fleet_clock import now_s

READY = Ask(method="GET", path="/health")
TOKEN = Ask(method="GET", path="/health_generate")
PORT_IN_USE = "OSError: [Errno 98] Address already in use"


def plan_of(
    engines: int, servers: int = 1, *, token: Ask | None = TOKEN, are_experts: bool = False
) -> TopologyPlan:
    """So many engines of so many servers each.

    Args:
        are_experts: each server is an entrypoint, for its own rank. Else only the first of an
            engine is, for all ranks; the others prove only that their process lives.
    """
    made = []
    for engine in range(engines):
        ranks = tuple(range(engine * servers, (engine + 1) * servers))
        slots = tuple(
            slot_of(
                rank,
                engine,
                is_entrypoint=are_experts or rank == ranks[0],
                weight_ranks=(rank,) if are_experts else ranks,
            )
            for rank in ranks
        )
        made.append(Engine(nodes=(0,), servers=slots))
    questions = Questions(ready=READY, token=token)
    return TopologyPlan(engines=tuple(made), questions=questions, placement="local")


def slot_of(
    rank: int,
    engine: int,
    *,
    is_entrypoint: bool = True,
    weight_ranks: tuple[int, ...] | None = None,
    port: int | None = None,
) -> ServerSlot:
    updates = (rank,) if weight_ranks is None else weight_ranks
    return ServerSlot(
        ranks=(rank,),
        engine=engine,
        index=0,
        node=0,
        bundles=(rank,),
        weight_ranks=updates if is_entrypoint else (),
        is_entrypoint=is_entrypoint,
        host="10.0.0.1",
        port=8000 + rank if port is None else port,
        argv=("serve", str(rank)),
    )


@dataclass(slots=True, kw_only=True)
class FakeServer:
    """How one server behaves; a test changes it at any time, a start makes it well again."""

    rank: int
    #: Its epoch; 0: it never ran.
    epoch: int = 0
    is_alive: bool = False
    #: yes | slow (after 4 s) | hang | refuse | 503: to probes over the network.
    answers: str = "yes"
    #: The same, asked from its own machine; lost: that cannot be asked.
    at_home: str = "yes"
    #: From its next start to its first yes.
    loads_for_s: float = 0.0
    ready_s: float = 0.0
    #: Of its process; a stop of it hangs.
    is_stuck: bool = False
    #: Why its next starts fail, one after the other; empty: a start succeeds.
    start_errors: list[str] = field(default_factory=list)
    #: So many of its next starts find this machine without what they need.
    shortages: int = 0
    #: It starts, and dies after so many seconds, with this behaviour for its next starts.
    dies_after_s: list[float] = field(default_factory=list)
    #: A start hangs.
    hangs_in_start: bool = False
    #: Its incarnations that are asked just now.
    asked: set[int] = field(default_factory=set)


class FakeHost:
    """A `ServerHost` that notes what is asked of it in `log`: `(time, verb, ranks)`."""

    def __init__(self) -> None:
        self.on_death: Callable[[Death], None] = lambda death: None
        self.servers: dict[int, FakeServer] = {}
        self.log: list[tuple[float, str, tuple[int, ...]]] = []
        self.slots: dict[int, ServerSlot] = {}
        #: What a fleet may never do, and has done.
        self.faults: list[str] = []
        #: Ports that somebody else listens on.
        self.foreign_ports: set[int] = set()
        #: A stop takes so long.
        self.stop_takes_s = 0.0001

    def __getitem__(self, rank: int) -> FakeServer:
        return self.servers.setdefault(rank, FakeServer(rank=rank))

    def times(self, verb: str, rank: int) -> list[float]:
        return [at for at, what, ranks in self.log if what == verb and rank in ranks]

    async def start(self, slot: ServerSlot, epoch: int) -> None:
        server = self[slot.rank]
        self.log.append((now_s(), "start", (slot.rank,)))
        if server.is_alive:
            self.faults.append(f"rank {slot.rank} is started and runs already")
        if server.hangs_in_start:
            await asyncio.sleep(1e9)
        await asyncio.sleep(0.01)
        if server.shortages:
            server.shortages -= 1
            raise NoRoomToStart("no guardian: Too many open files")
        if server.start_errors:
            raise StartFailed(server.start_errors.pop(0))
        self.slots[slot.rank] = slot
        server.epoch, server.is_alive = epoch, True
        server.ready_s = now_s() + server.loads_for_s
        server.answers = server.at_home = "yes"
        if slot.port in self.foreign_ports:
            asyncio.get_running_loop().call_later(
                0.0005, lambda: self.die(slot.rank, "exit 1", last_words=PORT_IN_USE)
            )
        if server.dies_after_s:
            after_s = server.dies_after_s.pop(0)
            asyncio.get_running_loop().call_later(after_s, lambda: self._die_of(epoch, slot.rank))

    def _die_of(self, epoch: int, rank: int) -> None:
        if self[rank].epoch == epoch:
            self.die(rank)

    def die(self, rank: int, why: str = "killed by SIGKILL", **more: Any) -> None:
        """Its process ends, and it is told."""
        server = self[rank]
        if server.is_alive:
            server.is_alive = False
            self.on_death(Death(rank=rank, epoch=server.epoch, why=why, **more))

    async def stop(self, ranks: Collection[int], *, grace_s: float) -> tuple[str, ...]:
        self.log.append((now_s(), "stop", tuple(ranks)))
        await asyncio.sleep(self.stop_takes_s)
        left = [rank for rank in ranks if self[rank].is_stuck and self[rank].is_alive]
        for rank in ranks:
            if rank not in left:
                self[rank].is_alive = False
        return tuple(f"pid {rank}" for rank in left)

    async def ask(self, rank: int, question: Ask, timeout_s: float) -> str | None:
        server = self[rank]
        if server.at_home == "lost":
            raise LostContact("its machine does not answer")
        return await _answer(server, server.at_home, timeout_s)

    async def close(self) -> None: ...

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        return frozenset(slot.rank for slot in slots if slot.port in self.foreign_ports)


class FakeProber:
    """Of a FakeHost's servers; it notes two questions at once as a fault of that."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        #: `(time, rank, path)` of each question.
        self.asked: list[tuple[float, int, str]] = []
        self.calls: list[tuple[str, Ask]] = []
        #: The questions to these paths never get a yes.
        self.deaf_paths: set[str] = set()
        #: By rank, the status of what it is sent; None: it hangs.
        self.statuses: dict[int, int | None] = {}
        #: Why nothing can be asked; None: it can.
        self.shortage: Unasked | None = None

    def times(self, rank: int) -> list[float]:
        return [at for at, asked, _ in self.asked if asked == rank]

    async def ask(self, url: str, question: Ask, timeout_s: float) -> str | None:
        server = self._server(url)
        self.asked.append((now_s(), server.rank, question.path))
        epoch = server.epoch
        if epoch in server.asked:
            self._host.faults.append(f"rank {server.rank} has two questions at once")
        server.asked.add(epoch)
        try:
            if self.shortage is not None:
                return self.shortage
            behaviour = "503" if question.path in self.deaf_paths else server.answers
            return await _answer(server, behaviour, timeout_s)
        finally:
            server.asked.discard(epoch)

    async def call(self, url: str, ask: Ask, timeout_s: float) -> Reply:
        self.calls.append((url, ask))
        server = self._server(url)
        status = self.statuses.get(server.rank, 200)
        if self.shortage is not None:
            await asyncio.sleep(timeout_s)
            return Reply(status=None, body=self.shortage)
        if server.answers == "hang" or status is None:
            await asyncio.sleep(timeout_s)
            return Reply(status=None, body=f"no answer within {timeout_s:g} s")
        await asyncio.sleep(0.001)
        if not server.is_alive:
            return Reply(status=None, body="connection refused")
        return Reply(status=status, body="ok" if status == 200 else "truncated file")

    def _server(self, url: str) -> FakeServer:
        port = int(url.rpartition(":")[2])
        [rank] = [slot.rank for slot in self._host.slots.values() if slot.port == port]
        return self._host[rank]


async def _answer(server: FakeServer, behaviour: str, timeout_s: float) -> str | None:
    if not server.is_alive or behaviour == "refuse":
        return NoReply("connection refused")
    if behaviour == "hang":
        await asyncio.sleep(timeout_s)
        return NoReply(f"no answer within {timeout_s:g} s")
    await asyncio.sleep(4.0 if behaviour == "slow" else 0.001)
    if behaviour == "503" or now_s() < server.ready_s:
        return "503 Scheduler is dead"
    return None


def settings_of(*, grace_s: float = 10.0, budget: int | None = None, **numbers: Any) -> Rollout:
    """Those of a spec, whatever section they stand in; budget: None: no limit."""
    numbers["budget"] = UNLIMITED if budget is None else budget

    def part(model: type[Any]) -> Any:
        own = {name: numbers.pop(name) for name in model.model_fields if name in numbers}
        return model.model_construct(**own)

    health, recovery = part(FleetHealth), part(FleetRecovery)
    stop = Stop(grace_s=grace_s)
    return Rollout.model_construct(health=health, recovery=recovery, stop=stop, **numbers)


def plan_in(
    directory: Path,
    *,
    run_id: str,
    grace_s: float,
    fleet: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> FleetPlan:
    """Of an attempt whose files are in this directory, for a host."""
    return FleetPlan(
        run_id=run_id,
        attempt=1,
        fleet=settings_of(grace_s=grace_s, **fleet),
        port=0,
        ports={},
        cwd=directory,
        directory=directory,
        **more,
    )


def pid_of(host: LocalHost, rank: int) -> int | None:
    """Of the server's own process, while that runs."""
    server = host._servers.get(rank)
    return None if server is None or server.process.exited.done() else server.process.pid


class Stage:
    """A fleet of fakes with everything that it says."""

    def __init__(
        self,
        plan: TopologyPlan,
        *,
        seed: int = 7,
        rebind: Rebind | None = None,
        serves_as_loaded: bool = True,
        **settings: Any,
    ) -> None:
        self.host = FakeHost()
        self.prober = FakeProber(self.host)
        #: `(time, event, fields)`.
        self.events: list[tuple[float, str, dict[str, Any]]] = []
        self.settings = settings_of(
            **{"grace_s": 5.0, "start_within_s": 100.0, "paths": ("*",), **settings}
        )
        self.stop_within_s = self.settings.stop.grace_s + STOPPED_WITHIN_S
        self.fleet = Fleet(
            plan,
            settings=self.settings,
            host=self.host,
            prober=self.prober,
            emit=self._emit,
            random=Random(seed),
            rebind=rebind or ports_from(9000),
            serves_as_loaded=serves_as_loaded,
        )

    async def sync(
        self, version: int | None = None, *, engines: Collection[int] | None = None
    ) -> dict[str, Any]:
        """A whole sync of weights, as a trainer makes it.

        Args:
            version: None: the next one.
            engines: those that are committed, of the targets; None: all that took the weights.
        """
        begun = await self.fleet.begin_sync(100.0, InFlight.WAIT)
        ask = Ask(method="POST", path="/load")
        answers = (await self.fleet.syncs.broadcast(begun["sync"], ask, 5.0))["answers"]
        epochs = {
            one["engine"]: one["epoch"]
            for one in answers
            if one["status"] == 200 and (engines is None or one["engine"] in engines)
        }
        if version is None:
            version = self.fleet.registry.view.version + 1
        return await self.fleet.syncs.commit(begun["sync"], version, epochs)

    def _emit(self, event: str, **fields: Any) -> None:
        self.events.append((now_s(), event, fields))

    def told(self, event: str) -> list[dict[str, Any]]:
        return [fields for _, name, fields in self.events if name == event]

    def when(self, event: str, **wanted: Any) -> float:
        """The first time of an event with these fields."""
        return next(
            at
            for at, name, fields in self.events
            if name == event and wanted.items() <= fields.items()
        )

    def states(self) -> list[GroupState]:
        return [group.state for group in self.fleet.registry.view.groups]

    def routed(self) -> list[int]:
        return sorted(one.rank for one in self.fleet.router.entrypoints)

    async def until(self, condition: Callable[[], Any], within_s: float = 1000.0) -> float:
        """Wait until it holds, and say how long that took. Raises: TimeoutError."""
        began_s = now_s()
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)
        return now_s() - began_s

    async def until_active(self) -> float:
        return await self.until(lambda: set(self.states()) == {GroupState.ACTIVE})

    async def until_out(self, group: int = 0, within_s: float = 1000.0) -> float:
        """Until it has failed; a recovery may have begun by then."""
        begun_s = now_s()
        async with asyncio.timeout(within_s):
            while self.fleet.registry.view.groups[group].is_running:
                await asyncio.sleep(0.01)
        return now_s() - begun_s

    def cause_of(self, group: int = 0) -> str:
        """Of its last failure."""
        told = self.told("rollout.group.state")
        return next(
            str(one["cause"])
            for one in reversed(told)
            if one["group"] == group and one["after"] == "inactive"
        )


def loops() -> list[str]:
    """The fleet's own tasks that live, by name."""
    names = (task.get_name() for task in asyncio.all_tasks())
    return sorted(name for name in names if name.startswith("rollout-"))


def ports_from(first: int) -> Rebind:
    """A rebind of groups of one server, to ports counted from there."""
    ports = itertools.count(first)

    async def rebind(group: int) -> list[ServerSlot]:
        return [slot_of(group, group, port=next(ports))]

    return rebind


async def serving(
    engines: int = 2,
    servers: int = 1,
    *,
    token: Ask | None = TOKEN,
    are_experts: bool = False,
    **settings: Any,
) -> Stage:
    """A fleet that has just begun to serve."""
    stage = Stage(plan_of(engines, servers, token=token, are_experts=are_experts), **settings)
    await stage.fleet.start()
    return stage
