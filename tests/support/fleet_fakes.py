"""Fakes for tests of an inference fleet: servers without processes, and plans for such fleets.

The fakes use only the time of the event loop. In `fleet_clock.run`, the time is virtual.
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

from tasks.processes.shortage import NotChecked
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

#: HTTP request of the readiness probe.
READY = Ask(method="GET", path="/health")
#: HTTP request of the probe that lets a server generate a token.
TOKEN = Ask(method="GET", path="/health_generate")
#: Last line that a server logs if another program already listens on the port.
PORT_IN_USE = "OSError: [Errno 98] Address already in use"


def make_topology(
    engines: int, servers: int = 1, *, token: Ask | None = TOKEN, are_experts: bool = False
) -> TopologyPlan:
    """Return the plan of a fleet of fake inference servers.

    Args:
        engines: Number of engines.
        servers: Number of servers of each engine.
        token: HTTP request that makes a server generate a token, as a health check. None for no
            health check of this kind.
        are_experts: True if every server is an entrypoint, which accepts requests and updates the
            weights of the server's own rank. If False, only the first server of each engine is an
            entrypoint, and updates the weights of all ranks of the engine. The other servers have
            no probe.
    """
    planned_engines = []
    for engine in range(engines):
        ranks = tuple(range(engine * servers, (engine + 1) * servers))
        slots = tuple(
            make_slot(
                rank,
                engine,
                is_entrypoint=are_experts or rank == ranks[0],
                weight_ranks=(rank,) if are_experts else ranks,
            )
            for rank in ranks
        )
        planned_engines.append(Engine(nodes=(0,), servers=slots))
    questions = Questions(ready=READY, token=token)
    return TopologyPlan(engines=tuple(planned_engines), questions=questions, placement="local")


def make_slot(
    rank: int,
    engine: int,
    *,
    is_entrypoint: bool = True,
    weight_ranks: tuple[int, ...] | None = None,
    port: int | None = None,
) -> ServerSlot:
    """Return the plan of one server of a fake fleet, with its node and its port.

    Args:
        rank: Rank of the server.
        engine: Number of the server's engine.
        is_entrypoint: True if the server accepts requests.
        weight_ranks: Ranks whose weights the server updates. If None, only `rank`.
        port: TCP port of the server. If None, 8000 + rank.
    """
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
    """State and behaviour of a fake server.

    A test may change the attributes at any time. Each start of the server resets `answers` and
    `at_home` to `yes`, so that all probes succeed again.
    """

    rank: int
    #: Epoch of the server: the number of starts so far. 0 if the server was never started.
    epoch: int = 0
    is_alive: bool = False
    #: Answer to probes over the network: `yes` (success), `slow` (success after 4 s), `hang` (no
    #: answer), `refuse` (connection refused) or `503` (HTTP status 503).
    answers: str = "yes"
    #: Answer to probes from the server's own host, with the same possible values as
    #: `answers`. The value `lost` means that the host itself does not answer.
    at_home: str = "yes"
    #: Seconds from the next start until the server answers `yes`.
    loads_for_s: float = 0.0
    #: Time from which the current process of the server answers probes, in seconds on the clock of
    #: the event loop.
    ready_s: float = 0.0
    #: True if the process of the server survives each attempt to stop it.
    is_stuck: bool = False
    #: Error messages of the next starts, one for each start. If empty, a start succeeds.
    start_errors: list[str] = field(default_factory=list)
    #: Number of future starts that fail because the host has too few resources.
    shortages: int = 0
    #: Seconds from a start until the server dies, one number for each of the next starts. If empty,
    #: the server does not die by itself.
    dies_after_s: list[float] = field(default_factory=list)
    #: True if starts of the server hang.
    hangs_in_start: bool = False
    #: One item for each running probe: the value of `epoch` when the probe began.
    asked: set[int] = field(default_factory=set)


class FakeHost:
    """A fake `ServerHost` that starts and stops fake servers and records the calls."""

    def __init__(self) -> None:
        #: Called when a fake server dies.
        self.on_death: Callable[[Death], None] = lambda death: None
        #: Mapping from the rank of a server to the fake server.
        self.servers: dict[int, FakeServer] = {}
        #: Starts and stops of servers as `(time, verb, ranks)`. The verb is `start` or `stop`.
        self.log: list[tuple[float, str, tuple[int, ...]]] = []
        #: Mapping from the rank of a started server to its plan.
        self.slots: dict[int, ServerSlot] = {}
        #: Descriptions of wrong calls by the fleet, for example a start of a server that already
        #: runs.
        self.faults: list[str] = []
        #: Ports that are in use by other programs than the servers of the fleet.
        self.foreign_ports: set[int] = set()
        #: Time that the stop of a server takes, in seconds.
        self.stop_takes_s = 0.0001

    def __getitem__(self, rank: int) -> FakeServer:
        return self.servers.setdefault(rank, FakeServer(rank=rank))

    def times(self, verb: str, rank: int) -> list[float]:
        """Return the times at which a server was started or stopped, in seconds.

        Args:
            verb: `start` or `stop`.
            rank: Rank of the server.
        """
        return [at for at, logged_verb, ranks in self.log if logged_verb == verb and rank in ranks]

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
        server.epoch = epoch
        server.is_alive = True
        server.ready_s = now_s() + server.loads_for_s
        server.answers = "yes"
        server.at_home = "yes"

        if slot.port in self.foreign_ports:
            asyncio.get_running_loop().call_later(
                0.0005, lambda: self.die(slot.rank, "exit 1", log_end=PORT_IN_USE)
            )
        if server.dies_after_s:
            after_s = server.dies_after_s.pop(0)
            asyncio.get_running_loop().call_later(
                after_s, lambda: self._kill_epoch(epoch, slot.rank)
            )

    def _kill_epoch(self, epoch: int, rank: int) -> None:
        """End the process of a server, unless a restart has changed the server's epoch."""
        if self[rank].epoch == epoch:
            self.die(rank)

    def die(self, rank: int, why: str = "killed by SIGKILL", **fields: Any) -> None:
        """End the process of a server, and report the death through `on_death`.

        Args:
            rank: Rank of the server.
            why: Cause of the death.
            **fields: Further fields of the reported `Death`.
        """
        server = self[rank]
        if server.is_alive:
            server.is_alive = False
            self.on_death(Death(rank=rank, epoch=server.epoch, why=why, **fields))

    async def stop(self, ranks: Collection[int], *, grace_s: float) -> tuple[str, ...]:
        self.log.append((now_s(), "stop", tuple(ranks)))
        await asyncio.sleep(self.stop_takes_s)
        stuck_ranks = [rank for rank in ranks if self[rank].is_stuck and self[rank].is_alive]
        for rank in ranks:
            if rank not in stuck_ranks:
                self[rank].is_alive = False
        return tuple(f"pid {rank}" for rank in stuck_ranks)

    async def ask(self, rank: int, question: Ask, timeout_s: float) -> str | None:
        server = self[rank]
        if server.at_home == "lost":
            raise LostContact("its machine does not answer")
        return await _answer(server, server.at_home, timeout_s)

    async def close(self) -> None: ...

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        return frozenset(slot.rank for slot in slots if slot.port in self.foreign_ports)


class FakeProber:
    """Probes the servers of a `FakeHost`.

    The fleet must not send two probes to one server at the same time. Otherwise, the prober adds a
    message to `FakeHost.faults`.
    """

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        #: `(time, rank, path)` of each probe.
        self.asked: list[tuple[float, int, str]] = []
        #: `(URL, request)` of each request that is not a probe.
        self.calls: list[tuple[str, Ask]] = []
        #: URL paths at which every probe fails with HTTP status 503.
        self.deaf_paths: set[str] = set()
        #: Mapping from the rank of a server to the HTTP status of its answers. None means that
        #: requests to the server hang. Probes are not affected.
        self.statuses: dict[int, int | None] = {}
        #: Reason why no probe can be sent. None if probes can be sent.
        self.shortage: NotChecked | None = None

    def times(self, rank: int) -> list[float]:
        """Return the times at which a server was probed, in seconds of the event loop's clock."""
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


def make_settings(*, grace_s: float = 10.0, budget: int | None = None, **numbers: Any) -> Rollout:
    """Return the settings of a fleet, as a `Rollout` object that is not validated.

    Args:
        grace_s: Grace period of the servers, in seconds.
        budget: Number of recoveries that are allowed. None for no limit.
        **numbers: Further settings of the sections `health`, `recovery` and `rollout`.
    """
    numbers["budget"] = UNLIMITED if budget is None else budget

    def take_section(model: type[Any]) -> Any:
        fields = {name: numbers.pop(name) for name in model.model_fields if name in numbers}
        return model.model_construct(**fields)

    health = take_section(FleetHealth)
    recovery = take_section(FleetRecovery)
    stop = Stop(grace_s=grace_s)
    return Rollout.model_construct(health=health, recovery=recovery, stop=stop, **numbers)


def make_fleet_plan(
    directory: Path,
    *,
    run_id: str,
    grace_s: float,
    fleet: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> FleetPlan:
    """Return the plan of a fleet for the first attempt of a run.

    Args:
        directory: Working directory of the servers, and directory of the attempt's files.
        run_id: Id of the run.
        grace_s: Grace period of the servers, in seconds.
        fleet: Rollout settings, with the same names as the arguments of `make_settings`.
        **fields: Further fields of the plan.
    """
    return FleetPlan(
        run_id=run_id,
        attempt=1,
        fleet=make_settings(grace_s=grace_s, **fleet),
        port=0,
        ports={},
        cwd=directory,
        directory=directory,
        **fields,
    )


def find_server_pid(host: LocalHost, rank: int) -> int | None:
    """Return the process id of a server on a host, or None if the server does not run."""
    server = host._servers.get(rank)
    return None if server is None or server.process.exited.done() else server.process.pid


class FleetHarness:
    """The test environment of a fleet: fake servers on a fake host, and the events of the fleet."""

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
        #: `(time, event, fields)` of each event that the fleet emitted.
        self.events: list[tuple[float, str, dict[str, Any]]] = []
        self.settings = make_settings(
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
            rebind=rebind or make_rebind(9000),
            serves_as_loaded=serves_as_loaded,
        )

    async def sync(
        self, version: int | None = None, *, engines: Collection[int] | None = None
    ) -> dict[str, Any]:
        """Begin, broadcast and commit a weight update; return the result of the commit.

        Args:
            version: Weight version to commit. If None, the current version + 1.
            engines: Numbers of the engines that shall use the new weights. If None, all engines.
                The commit never includes an engine that failed to load the weights.
        """
        transaction = await self.fleet.begin_sync(100.0, InFlight.WAIT)
        sync_id = transaction["sync"]

        ask = Ask(method="POST", path="/load")
        answers = (await self.fleet.syncs.broadcast(sync_id, ask, 5.0))["answers"]
        epochs = {
            answer["engine"]: answer["epoch"]
            for answer in answers
            if answer["status"] == 200 and (engines is None or answer["engine"] in engines)
        }

        if version is None:
            version = self.fleet.registry.view.version + 1
        return await self.fleet.syncs.commit(sync_id, version, epochs)

    def _emit(self, event: str, **fields: Any) -> None:
        self.events.append((now_s(), event, fields))

    def list_events(self, event: str) -> list[dict[str, Any]]:
        """Return the fields of each event with this name that the fleet has emitted."""
        return [fields for _, name, fields in self.events if name == event]

    def time_of_event(self, event: str, **wanted: Any) -> float:
        """Return the time of the first event with the name `event` and with the fields `wanted`."""
        return next(
            at
            for at, name, fields in self.events
            if name == event and wanted.items() <= fields.items()
        )

    def states(self) -> list[GroupState]:
        return [group.state for group in self.fleet.registry.view.groups]

    def list_routed_ranks(self) -> list[int]:
        """Return the ranks of the entrypoints that receive requests from the router."""
        return sorted(entrypoint.rank for entrypoint in self.fleet.router.entrypoints)

    async def wait_until(self, condition: Callable[[], Any], within_s: float = 1000.0) -> float:
        """Wait until a condition is true, and return the waiting time in seconds.

        Raises:
            TimeoutError: The condition was not true within `within_s` seconds.
        """
        began_s = now_s()
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)
        return now_s() - began_s

    async def wait_until_active(self) -> float:
        """Wait until all servers are active, and return the waiting time in seconds."""
        return await self.wait_until(lambda: set(self.states()) == {GroupState.ACTIVE})

    async def wait_until_failed(self, group: int = 0, within_s: float = 1000.0) -> float:
        """Wait until a lifecycle group has failed, and return the waiting time in seconds.

        A lifecycle group is a set of servers that are stopped and started together.

        When the function returns, the recovery of the group may already have begun.

        Raises:
            TimeoutError: The group did not fail within `within_s` seconds.
        """
        began_s = now_s()
        async with asyncio.timeout(within_s):
            while self.fleet.registry.view.groups[group].is_running:
                await asyncio.sleep(0.01)
        return now_s() - began_s

    def last_failure_cause(self, group: int = 0) -> str:
        """Return the cause of a lifecycle group's last failure, from the events of the fleet.

        A lifecycle group is a set of servers that are stopped and started together.
        """
        changes = self.list_events("rollout.group.state")
        return next(
            str(change["cause"])
            for change in reversed(changes)
            if change["group"] == group and change["after"] == "inactive"
        )


def list_fleet_tasks() -> list[str]:
    """Return the sorted names of the asyncio tasks of the fleet that still run."""
    names = (task.get_name() for task in asyncio.all_tasks())
    return sorted(name for name in names if name.startswith("rollout-"))


def make_rebind(first: int) -> Rebind:
    """Return a `Rebind` function, which gives the fleet a new port for a restarted server.

    The first call of the function returns the port `first`, the second call the port `first + 1`,
    and so on. The fleet must restart each server alone, not together with other servers.
    """
    ports = itertools.count(first)

    async def rebind(group: int) -> list[ServerSlot]:
        return [make_slot(group, group, port=next(ports))]

    return rebind


async def start_fake_fleet(
    engines: int = 2,
    servers: int = 1,
    *,
    token: Ask | None = TOKEN,
    are_experts: bool = False,
    **settings: Any,
) -> FleetHarness:
    """Start a fleet of fake servers, and return a `FleetHarness` that records its events.

    `settings` are the settings of the fleet. The other arguments are those of `make_topology`.
    """
    harness = FleetHarness(
        make_topology(engines, servers, token=token, are_experts=are_experts), **settings
    )
    await harness.fleet.start()
    return harness
