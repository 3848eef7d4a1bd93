"""Servers on a Ray cluster: an actor for each, on the bundles of one placement group.

A bundle is one node of the fleet's plan, with the GPUs of all servers that are planned there. What
dies (a server, its actor, its node) is told as the death of a server; the next start makes a new
actor in the same bundle, which Ray has moved to another node where the old one is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.job_config import JobConfig
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tasks.processes.ports import port_key
from tasks.ray.dashboard import Denied, NoAnswer, prepare_driver
from tasks.ray.nodes import find_gcs_address
from tasks.ray.submission import submission_id
from tasks.ray.submit import wrapper_sources
from tasks.record.outcome import signal_name
from tasks.rollout.actor import SENT, PortKeeper, ServerActor
from tasks.rollout.backends import Ask
from tasks.rollout.component import FleetPlan
from tasks.rollout.ownership import Impostor, UnknownListener, host_and_port
from tasks.rollout.probing import Death, NoHost, StartFailed
from tasks.rollout.topology import ServerSlot, TopologyPlan, nodes_needed, planned
from tasks.spec.component import FLEET
from tasks.spec.errors import LostContact

_log = logging.getLogger(__name__)

#: A worker of Ray is there in seconds; on a node under load, or with a new image, later.
_ACTOR_WITHIN_S = 180.0
#: A node that is gone is a node that is gone only after a minute, by Ray's default.
_ANSWER_WITHIN_S = 10.0
#: Beside the grace period of a stop: to kill what is left, and to fetch the end of the log. A fleet
#: waits for 20 s.
_STOP_EXTRA_S = 12.0
#: What is not free by then: the run has its gang, so nothing else should hold it.
_ROOM_WITHIN_S = 300.0
_REST_WITHIN_S = 5.0
_LOG_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True)
class _ActorServer:
    """One actor, and what watches it."""

    slot: ServerSlot
    epoch: int
    actor: Any
    is_alive: bool = False
    #: Its end was asked for.
    is_ending: bool = False
    watch: asyncio.Task[None] | None = None
    copy: asyncio.Task[None] | None = None
    log_offset: int = 0
    #: The sockets on which its own tree was seen to listen last.
    listeners: frozenset[str] = frozenset()
    #: The question to its actor that is under way, and the one that follows it.
    look: asyncio.Task[frozenset[str]] | None = None
    next_look: asyncio.Task[frozenset[str]] | None = None


class ActorListeners:
    """A `EngineListenerCheck` for servers on a cluster: the actor beside each server looks.

    Questions about one server that come while its actor looks share the next look.

    Args:
        server_at: the server that was started at a URL.
    """

    def __init__(self, server_at: Callable[[str], _ActorServer | None]) -> None:
        self._server_at = server_at

    def known(self, url: str) -> frozenset[str]:
        server = self._server_at(url)
        return frozenset() if server is None else server.listeners

    async def verified(self, url: str) -> frozenset[str]:
        server = self._server_at(url)
        if server is None:
            raise Impostor(f"no server of the fleet runs at {url}")
        if server.next_look is None:
            server.next_look = asyncio.create_task(self._look(server, url, server.look))
        return await asyncio.shield(server.next_look)

    async def _look(
        self, server: _ActorServer, url: str, before: asyncio.Task[frozenset[str]] | None
    ) -> frozenset[str]:
        if before is not None:
            await asyncio.wait([before])
        server.look, server.next_look = server.next_look, None
        host, port = host_and_port(url)
        try:
            answer = _as_future(server.actor.listening.remote(host, port))
            found, foreign = await asyncio.wait_for(answer, _ANSWER_WITHIN_S)
        except (RayError, OSError, TimeoutError) as error:
            message = f"who listens at {url} is unknown: {_first_line(error)}"
            raise UnknownListener(message) from error
        server.listeners = frozenset(found)
        if foreign:
            raise Impostor(foreign)
        return server.listeners


class RayHost:
    """A `ServerHost` whose servers are actors. `open` connects; `close` frees every GPU.

    Args:
        env: of every server; a slot's own variables win.
        group: has a bundle for each node of the plan.
    """

    def __init__(self, plan: FleetPlan, env: Mapping[str, str], group: PlacementGroup) -> None:
        self._plan, self._env, self._group = plan, env, group
        self.on_death: Callable[[Death], None] = lambda death: None
        self._servers: dict[int, _ActorServer] = {}
        self.listeners = ActorListeners(self._server_at)
        #: By node of the plan, who keeps its ports.
        self._keepers: dict[int, Any] = {}

    @classmethod
    async def open(
        cls, plan: FleetPlan, env: Mapping[str, str], *, within_s: float = _ROOM_WITHIN_S
    ) -> RayHost:
        """A host with room for the whole fleet.

        Args:
            env: of it servers get what is true on other machines, too.
            within_s: what the cluster does not free by then is not waited for.

        Raises: NoHost; ValueError, as `build`.
        """
        assert plan.ray is not None
        shape = planned(plan.fleet, plan.node_gpus)
        bundles = bundles_of(shape, nodes_needed(plan.fleet, plan.node_gpus))
        # What dies of it must not depend on code of ours on the nodes.
        for module in SENT:
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
        # As such a job this driver is known on the cluster: what it holds counts as the run's.
        job = submission_id(plan.run_id, plan.attempt, FLEET, is_only=False)
        try:
            address = await find_gcs_address(plan.ray)
            prepare_driver(address)
            if not ray.is_initialized():
                await asyncio.to_thread(
                    ray.init,
                    address,
                    job_config=JobConfig(metadata={"job_submission_id": job}),
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (NoAnswer, Denied, ConnectionError) as error:
            raise NoHost(str(error)) from error
        group = placement_group(bundles, strategy="PACK")
        try:
            await asyncio.wait_for(_as_future(group.ready()), within_s)
        except (TimeoutError, RayError) as error:
            remove_placement_group(group)
            wanted = " + ".join(
                ", ".join(f"{count:g} {name}" for name, count in one.items()) for one in bundles
            )
            raise NoHost(
                f"no room on the cluster for the fleet's {wanted} within {within_s:g} s"
            ) from error
        return cls(plan, {key: env[key] for key in env if _is_of_the_run(key)}, group)

    async def hosts(self) -> tuple[str, ...]:
        table = await asyncio.to_thread(placement_group_table, self._group)
        nodes = await asyncio.to_thread(ray.nodes)
        ip = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        placed = table["bundles_to_node_id"]
        return tuple(ip.get(placed[index], "") for index in sorted(placed))

    async def hold_ports(self, node: int, names: Sequence[str]) -> list[int]:
        # By its name `start` gives it up: `server.0` as the server of rank 0 is started, `engine.0`
        # with the first of engine 0 on that node.
        return list(await self._ask_keeper(node, "hold", list(names)))

    async def start(self, slot: ServerSlot, epoch: int) -> None:
        before = self._servers.get(slot.rank)
        if before is not None:
            await self._end(before, grace_s=0.0)
        handle = self._make_actor(
            ServerActor, slot.node, slot.rank, wrapper_sources(), gpus=len(slot.bundles)
        )
        server = _ActorServer(slot=slot, epoch=epoch, actor=handle)
        try:
            # Its actor may take long to be there, and the port is kept until then.
            await self._answer(handle.ping.remote(), _ACTOR_WITHIN_S)
            with contextlib.suppress(RayError, TimeoutError):
                # One that has gone with its node keeps nothing from anybody.
                if (keeper := self._keepers.get(slot.node)) is not None:
                    names = [f"server.{slot.rank}", f"engine.{slot.engine}"]
                    await self._answer(keeper.release.remote(names), _ANSWER_WITHIN_S)
            env, cwd = {**self._env, **slot.env}, str(self._plan.cwd)
            stop = self._plan.fleet.stop
            how = (int(signal.Signals[stop.signal]), stop.grace_s)
            await self._answer(handle.start.remote(slot.argv, env, cwd, *how), _ACTOR_WITHIN_S)
        except BaseException as error:
            with contextlib.suppress(Exception):
                ray.kill(handle)
            if isinstance(error, RayError | OSError | TimeoutError):
                raise StartFailed(f"rank {slot.rank}: {_first_line(error)}") from error
            raise
        server.is_alive = True
        self._servers[slot.rank] = server
        server.watch = asyncio.create_task(self._watch(server))
        server.copy = asyncio.create_task(self._copy_log(server))

    async def stop(self, ranks: Collection[int], *, grace_s: float) -> tuple[str, ...]:
        servers = [self._servers[rank] for rank in ranks if rank in self._servers]
        left = await asyncio.gather(*(self._end(one, grace_s=grace_s) for one in servers))
        return tuple(text for texts in left for text in texts)

    async def ask(self, rank: int, question: Ask, timeout_s: float) -> str | None:
        server = self._servers.get(rank)
        if server is None or not server.is_alive:
            return f"rank {rank} does not run"
        if server.slot.url is None:
            return f"rank {rank} has no address to be asked at"
        url = f"{server.slot.url}{question.path}"
        asked = server.actor.ask.remote(question.method, url, question.body, timeout_s)
        try:
            answer = await self._answer(asked, timeout_s + _ANSWER_WITHIN_S)
        except (RayError, TimeoutError) as error:
            message = f"rank {rank}: its actor does not answer: {_first_line(error)}"
            raise LostContact(message) from error
        return answer or None

    def _server_at(self, url: str) -> _ActorServer | None:
        return next((one for one in self._servers.values() if one.slot.url == url), None)

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        # The cluster has moved a server from a lost node: its old address is as good as taken.
        gone = moved(slots, await self.hosts())
        by_node: dict[int, dict[int, int]] = {}
        for slot in slots:
            if slot.rank not in gone:
                by_node.setdefault(slot.node, {}).update(dict.fromkeys(slot.listens_on, slot.rank))
        taken = set(gone)
        for node, ranks in by_node.items():
            with contextlib.suppress(RayError, TimeoutError):
                found = await self._ask_keeper(node, "taken", list(ranks))
                taken.update(ranks[port] for port in found)
        return frozenset(taken)

    async def close(self) -> None:
        """End every actor and give the bundles back."""
        await asyncio.gather(*(self._end(one, grace_s=0.0) for one in [*self._servers.values()]))
        for keeper in self._keepers.values():
            ray.kill(keeper)
        await asyncio.to_thread(remove_placement_group, self._group)

    def _make_actor(self, kind: type, node: int, *arguments: Any, gpus: int = 0) -> Any:
        place = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=node
        )
        make: Any = ray.remote(concurrency_groups={"questions": 4})  # type: ignore[call-overload]
        remote = make(kind)
        return remote.options(
            num_cpus=0, num_gpus=gpus, max_restarts=0, scheduling_strategy=place
        ).remote(*arguments)

    async def _ask_keeper(self, node: int, order: str, argument: Sequence[Any]) -> Any:
        """What the keeper of a node's ports answers; a new one, where it has gone with its node."""
        for is_last in (False, True):
            if node not in self._keepers:
                self._keepers[node] = self._make_actor(PortKeeper, node, port_key())
            keeper = self._keepers[node]
            try:
                return await self._answer(getattr(keeper, order).remote(argument), _ACTOR_WITHIN_S)
            except RayActorError:
                if self._keepers.get(node) is keeper:
                    del self._keepers[node]
                if is_last:
                    raise
        raise AssertionError

    async def _answer(self, ref: Any, within_s: float) -> Any:
        return await asyncio.wait_for(_as_future(ref), within_s)

    async def _watch(self, server: _ActorServer) -> None:
        """Tell its end, once, unless it was asked for."""
        last_words = ""
        try:
            status, last_words = await _as_future(server.actor.end_of.remote())
        except RayError as error:
            how = "died" if isinstance(error, RayActorError) else "failed"
            why = f"its actor {how}: {_first_line(error)}"
        else:
            why = f"exit {status}" if status >= 0 else f"killed by {signal_name(-status)}"
        server.is_alive = False
        if server.is_ending or self._servers.get(server.slot.rank) is not server:
            return
        self.on_death(
            Death(rank=server.slot.rank, epoch=server.epoch, why=why, last_words=last_words)
        )

    async def _end(self, server: _ActorServer, *, grace_s: float) -> tuple[str, ...]:
        server.is_ending = True
        left: list[int] = []
        try:
            left = await self._answer(server.actor.stop.remote(grace_s), grace_s + _STOP_EXTRA_S)
            async with asyncio.timeout(_REST_WITHIN_S):
                await self._copy_rest(server)
                await self._answer(server.actor.forget.remote(), _REST_WITHIN_S)
        except (RayError, TimeoutError) as error:
            # Its wrapper ends the tree with the actor, which is killed below.
            _log.info("rank %d: %s", server.slot.rank, _first_line(error))
        for task in (server.watch, server.copy):
            if task is not None:
                task.cancel()
        with contextlib.suppress(Exception):
            ray.kill(server.actor)
        server.is_alive = False
        if self._servers.get(server.slot.rank) is server:
            del self._servers[server.slot.rank]
        return tuple(f"{server.slot.host}: pid {pid}" for pid in left)

    async def _copy_log(self, server: _ActorServer) -> None:
        while True:
            await asyncio.sleep(_LOG_EVERY_S)
            with contextlib.suppress(RayError, TimeoutError, OSError):
                await self._copy_rest(server)

    async def _copy_rest(self, server: _ActorServer) -> None:
        target = self._plan.log_of(server.slot.rank)
        while True:
            read = server.actor.log_from.remote(server.log_offset)
            data = await self._answer(read, _ANSWER_WITHIN_S)
            if not data:
                return
            with target.open("ab") as f:
                f.write(data)
            server.log_offset += len(data)


def _as_future(ref: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
    return future


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def moved(slots: Collection[ServerSlot], hosts: Sequence[str]) -> frozenset[int]:
    """The ranks of servers whose address their node, by `hosts[node]`, does not have any more."""
    return frozenset(
        slot.rank for slot in slots if slot.port is not None and slot.host != hosts[slot.node]
    )


def bundles_of(shape: TopologyPlan, nodes: int) -> list[dict[str, float]]:
    """`bundles[node]`: the GPUs of all servers that are planned there, and a CPU for each."""
    slots, bundles = shape.servers, []
    for node in range(nodes):
        gpus = [len(slot.bundles) for slot in slots if slot.node == node]
        cpus = {"CPU": float(max(len(gpus), 1))}
        bundles.append(cpus | ({"GPU": float(sum(gpus))} if sum(gpus) else {}))
    return bundles


def _is_of_the_run(name: str) -> bool:
    """The rest of this machine's environment is not true on another."""
    return name.startswith("MUSTER_") or name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
