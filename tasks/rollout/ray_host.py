"""Runs the servers of a fleet on a Ray cluster, with one actor for each server.

All actors run in one placement group. A bundle of the group stands for one node of the fleet's plan
and holds the GPUs of all servers on that node.

If a server's process, its actor or its node ends, `RayHost` reports the death of the server. The
next start of the server creates a new actor in the same bundle. If the node was lost, Ray has moved
the bundle to another node before that start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from tasks.record.log_bound import LogBound
from tasks.record.outcome import signal_name
from tasks.rollout.actor import SENT, PortKeeper, ServerActor
from tasks.rollout.backends import Ask
from tasks.rollout.component import FleetPlan
from tasks.rollout.ownership import Impostor, UnknownListener, host_and_port
from tasks.rollout.probing import Death, NoHost, StartFailed
from tasks.rollout.topology import ServerSlot, TopologyPlan, nodes_needed, plan_topology
from tasks.spec.component import FLEET
from tasks.spec.errors import LostContact

_log = logging.getLogger(__name__)

#: Seconds that an actor may take to answer its first call. Usually, Ray starts an actor within
#: seconds. A busy node, or a node that has to load a new image, needs longer.
_ACTOR_WITHIN_S = 180.0
#: Seconds that a running actor may take to answer a call. Without this limit, a call to an actor on
#: a lost node would take about a minute.
_ANSWER_WITHIN_S = 10.0
#: Seconds that an actor gets, in addition to the grace period, to stop its server and to kill
#: leftover processes. This time plus the 5 s of `_LOG_END_WITHIN_S` must be below the 20 s of
#: `STOPPED_WITHIN_S`.
_STOP_EXTRA_S = 12.0
#: Seconds to wait until the cluster has enough free GPUs for the fleet.
_ROOM_WITHIN_S = 300.0
#: Time limit in seconds to fetch the last part of a stopped server's log.
_LOG_END_WITHIN_S = 5.0
#: Seconds between two reads of a server's log.
_LOG_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True)
class _ActorServer:
    """An inference server with its Ray actor and its tasks.

    Each start of the server creates a new object.
    """

    slot: ServerSlot
    epoch: int
    #: Ray handle of the `ServerActor`.
    actor: Any
    #: True as long as the server's process runs.
    is_alive: bool = False
    #: True if the fleet is stopping the server. The server's end is then not reported as a death.
    is_ending: bool = False
    #: Task that waits for the end of the server.
    watch: asyncio.Task[None] | None = None
    #: Task that copies the server's log.
    copy: asyncio.Task[None] | None = None
    #: Number of bytes of the actor's log that have been copied.
    log_offset: int = 0
    #: Inodes of the server's listening sockets at the last check.
    listeners: frozenset[str] = frozenset()
    #: Task that is checking which processes listen at the server's address, or None.
    listener_check: asyncio.Task[frozenset[str]] | None = None
    #: Task of a further check, which starts after the end of `listener_check`. None if no further
    #: check was requested.
    next_listener_check: asyncio.Task[frozenset[str]] | None = None


class ActorListeners:
    """An `EngineListenerCheck` for servers on a Ray cluster. The actor of a server does the check.

    Only one check of a server runs at a time. All calls of `verified` during a running check share
    one further check, which starts at the end of the running check.

    Args:
        server_at: Returns the server at a URL, or None if no server was started there.
    """

    def __init__(self, server_at: Callable[[str], _ActorServer | None]) -> None:
        self._server_at = server_at

    def known(self, url: str) -> frozenset[str]:
        """Return the sockets on which a server listened at its last check.

        Args:
            url: URL of the server.

        Returns:
            Inodes of the sockets. Empty if no server was started at this URL.
        """
        server = self._server_at(url)
        return frozenset() if server is None else server.listeners

    async def verified(self, url: str) -> frozenset[str]:
        """Check which sockets listen at the URL of a server, and return their inodes.

        Raises:
            Impostor: A process outside the server's process tree listens there.
            UnknownListener: The check failed.
        """
        server = self._server_at(url)
        if server is None:
            raise Impostor(f"no server of the fleet runs at {url}")
        if server.next_listener_check is None:
            server.next_listener_check = asyncio.create_task(
                self._check_listeners(server, url, server.listener_check)
            )
        return await asyncio.shield(server.next_listener_check)

    async def _check_listeners(
        self, server: _ActorServer, url: str, before: asyncio.Task[frozenset[str]] | None
    ) -> frozenset[str]:
        """Check that only processes of a server listen at the server's address.

        Args:
            server: The server.
            url: URL of the server.
            before: Task of an earlier check that may still run, or None. The new check begins when
                this task has ended.

        Returns:
            Inode numbers of the sockets that listen at the address.

        Raises:
            Impostor: Another process listens at the address.
            UnknownListener: The check failed.
        """
        if before is not None:
            await asyncio.wait([before])
        server.listener_check = server.next_listener_check
        server.next_listener_check = None
        host, port = host_and_port(url)
        try:
            answer = _as_future(server.actor.list_listeners.remote(host, port))
            inodes, foreign_listener = await asyncio.wait_for(answer, _ANSWER_WITHIN_S)
        except (RayError, OSError, TimeoutError) as error:
            message = f"the process that listens at {url} is unknown: {_first_line(error)}"
            raise UnknownListener(message) from error
        server.listeners = frozenset(inodes)
        if foreign_listener:
            raise Impostor(foreign_listener)
        return server.listeners


class RayHost:
    """A `ServerHost` that runs each server in a Ray actor.

    Call `open` to create a host and to connect to the cluster. Call `close` to free all GPUs.

    Args:
        plan: The plan of the fleet.
        env: Environment variables of all servers. The variables in a server's `ServerSlot` take
            precedence.
        group: Placement group with one bundle for each node of the plan.
    """

    def __init__(self, plan: FleetPlan, env: Mapping[str, str], group: PlacementGroup) -> None:
        self._plan = plan
        self._env = env
        self._group = group
        self.on_death: Callable[[Death], None] = lambda death: None
        #: Mapping from rank to server, for the servers that were started and not yet stopped.
        self._servers: dict[int, _ActorServer] = {}
        self.listeners = ActorListeners(self._server_at)
        #: Mapping from the index of a node in the plan to the Ray handle of the `PortKeeper` on the
        #: node.
        self._keepers: dict[int, Any] = {}
        #: Largest size of each copied log, or None for no bound.
        self._log_bound = plan.log_bound

    @classmethod
    async def open(
        cls, plan: FleetPlan, env: Mapping[str, str], *, within_s: float = _ROOM_WITHIN_S
    ) -> RayHost:
        """Connect to the cluster, reserve the GPUs of the whole fleet, and return a `RayHost`.

        Args:
            plan: The plan of the fleet.
            env: Environment variables of this process. The servers get only those that are also
                valid on other machines.
            within_s: Seconds to wait until the cluster has enough free GPUs for the fleet.

        Raises:
            NoHost: The cluster cannot be reached, or does not have enough free GPUs in time.
            ValueError: The plan is inconsistent; see `plan_topology`.
        """
        assert plan.ray is not None
        topology = plan_topology(plan.fleet, plan.node_gpus)
        bundles = plan_bundles(topology, nodes_needed(plan.fleet, plan.node_gpus))
        # Send the code of the actors to the nodes, so that Muster need not be installed there.
        for module in SENT:
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
        # With this job id, the cluster shows the fleet's actors as a part of the run, and Muster
        # counts the GPUs of these actors as used by the run.
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
                ", ".join(f"{count:g} {name}" for name, count in bundle.items())
                for bundle in bundles
            )
            raise NoHost(
                f"the Ray cluster had no room for the servers of the fleet within {within_s:g} s. "
                f"The servers need {wanted}"
            ) from error
        return cls(plan, {key: env[key] for key in env if _is_valid_elsewhere(key)}, group)

    async def hosts(self) -> tuple[str, ...]:
        """Return the current address of each node of the plan; an empty string for a lost node."""
        table = await asyncio.to_thread(placement_group_table, self._group)
        nodes = await asyncio.to_thread(ray.nodes)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        node_ids = table["bundles_to_node_id"]
        return tuple(addresses.get(node_ids[bundle], "") for bundle in sorted(node_ids))

    async def hold_ports(self, node: int, names: Sequence[str]) -> list[int]:
        """Reserve a port for each name on a node, and return the ports.

        `start` releases the ports again. The port `server.RANK` is released at the start of the
        server with this rank. The port `engine.INDEX` is released when a server of this engine
        starts on the node.

        Args:
            node: Index of the node in the plan.
            names: Names of the ports.
        """
        return list(await self._call_keeper(node, "hold", list(names)))

    async def start(self, slot: ServerSlot, epoch: int) -> None:
        """Start a server in a new actor. An earlier actor of the same rank is ended first.

        Args:
            slot: The planned server.
            epoch: Epoch of the server's group: 1 for the first start, 2 for the second start, and
                so on. The servers of a group are always started and stopped together.

        Raises:
            StartFailed: The actor or the server's process could not be started.
        """
        earlier = self._servers.get(slot.rank)
        if earlier is not None:
            await self._end(earlier, grace_s=0.0)
        handle = self._make_actor(
            ServerActor, slot.node, slot.rank, wrapper_sources(), gpus=len(slot.bundles)
        )
        server = _ActorServer(slot=slot, epoch=epoch, actor=handle)
        try:
            # Keep the server's port reserved until the Ray actor has answered. The start of the
            # actor may take long, and another process could use a free port in that time.
            await self._wait_for_answer(handle.ping.remote(), _ACTOR_WITHIN_S)
            # Ignore errors of the `PortKeeper` actor. If the node is lost, the `PortKeeper` has
            # ended and reserves no port any more.
            with contextlib.suppress(RayError, TimeoutError):
                if (keeper := self._keepers.get(slot.node)) is not None:
                    names = [f"server.{slot.rank}", f"engine.{slot.engine}"]
                    await self._wait_for_answer(keeper.release.remote(names), _ANSWER_WITHIN_S)
            env = {**self._env, **slot.env}
            cwd = str(self._plan.cwd)
            stop = self._plan.fleet.stop
            stop_signal = int(signal.Signals[stop.signal])
            started = handle.start.remote(slot.argv, env, cwd, stop_signal, stop.grace_s)
            await self._wait_for_answer(started, _ACTOR_WITHIN_S)
        except BaseException as error:
            with contextlib.suppress(Exception):
                ray.kill(handle)
            if isinstance(error, RayError | OSError | TimeoutError):
                raise StartFailed(f"rank {slot.rank}: {_first_line(error)}") from error
            raise
        server.is_alive = True
        self._servers[slot.rank] = server
        server.watch = asyncio.create_task(self._watch_for_death(server))
        server.copy = asyncio.create_task(self._copy_log(server))

    async def stop(self, ranks: Collection[int], *, grace_s: float) -> tuple[str, ...]:
        """Stop servers and end their actors.

        Args:
            ranks: Ranks of the servers. Ranks without a running server are ignored.
            grace_s: Seconds from the stop signal to SIGKILL.

        Returns:
            One text for each process that could not be ended, with node and pid, and one text for
            each error in Muster's own code.
        """
        servers = [self._servers[rank] for rank in ranks if rank in self._servers]
        results = await asyncio.gather(
            *(self._end(server, grace_s=grace_s) for server in servers), return_exceptions=True
        )
        leftovers: list[str] = []
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, BaseException):
                _log.error(
                    "the server of rank %d could not be ended", server.slot.rank, exc_info=result
                )
                leftovers.append(
                    f"the server of rank {server.slot.rank} could not be ended: {result!r}"
                )
            else:
                leftovers += result
        return tuple(leftovers)

    async def ask(self, rank: int, question: Ask, timeout_s: float) -> str | None:
        """Send a request to a server from the server's own machine.

        Args:
            rank: Rank of the server.
            question: The request.
            timeout_s: Seconds that the server gets to answer.

        Returns:
            None if the server answered with a success status, else a description of the failure.

        Raises:
            LostContact: The server's actor does not answer.
        """
        server = self._servers.get(rank)
        if server is None or not server.is_alive:
            return f"the server of rank {rank} is not running"
        if server.slot.url is None:
            return f"the server of rank {rank} has no URL for health checks"
        url = f"{server.slot.url}{question.path}"
        result = server.actor.ask.remote(question.method, url, question.body, timeout_s)
        try:
            answer = await self._wait_for_answer(result, timeout_s + _ANSWER_WITHIN_S)
        except (RayError, TimeoutError) as error:
            message = f"the Ray actor of rank {rank} does not answer: {_first_line(error)}"
            raise LostContact(message) from error
        return answer or None

    def _server_at(self, url: str) -> _ActorServer | None:
        return next((server for server in self._servers.values() if server.slot.url == url), None)

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        """Return the ranks of servers that cannot listen at their planned addresses.

        There are two possible reasons: another process uses a port of the server, or Ray has moved
        the server from a lost node to another node.

        Args:
            slots: The planned servers.
        """
        moved_ranks = find_moved_ranks(slots, await self.hosts())
        #: `ranks_by_node[node][port]` is the rank of the server that will use the port.
        ranks_by_node: dict[int, dict[int, int]] = {}
        for slot in slots:
            if slot.rank not in moved_ranks:
                ranks_by_port = ranks_by_node.setdefault(slot.node, {})
                ranks_by_port.update(dict.fromkeys(slot.listens_on, slot.rank))
        taken_ranks = set(moved_ranks)
        for node, ranks_by_port in ranks_by_node.items():
            with contextlib.suppress(RayError, TimeoutError):
                taken_ports = await self._call_keeper(node, "list_taken", list(ranks_by_port))
                taken_ranks.update(ranks_by_port[port] for port in taken_ports)
        return frozenset(taken_ranks)

    async def close(self) -> None:
        """End all actors and remove the placement group, which frees the GPUs."""
        try:
            await self.stop(list(self._servers), grace_s=0.0)
            for keeper in self._keepers.values():
                with contextlib.suppress(RayError):
                    ray.kill(keeper)
        finally:
            await asyncio.to_thread(remove_placement_group, self._group)

    def _make_actor(self, actor_class: type, node: int, *arguments: Any, gpus: int = 0) -> Any:
        """Create an actor on a node and return its Ray handle.

        Args:
            actor_class: Class of the actor.
            node: Index of the node in the plan.
            arguments: Arguments of the class.
            gpus: Number of GPUs that the actor holds.
        """
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=node
        )
        make: Any = ray.remote(concurrency_groups={"questions": 4})  # type: ignore[call-overload]
        remote_class = make(actor_class)
        return remote_class.options(
            num_cpus=0, num_gpus=gpus, max_restarts=0, scheduling_strategy=strategy
        ).remote(*arguments)

    async def _call_keeper(self, node: int, method: str, argument: Sequence[Any]) -> Any:
        """Call a method of the `PortKeeper` on a node and return the result.

        If the keeper and its node were lost, the call creates a new keeper and uses the new keeper.

        Args:
            node: Index of the node in the plan.
            method: Name of the method.
            argument: The argument of the method.

        Raises:
            RayError, TimeoutError: The keeper does not answer.
        """
        for is_last_try in (False, True):
            if node not in self._keepers:
                self._keepers[node] = self._make_actor(PortKeeper, node, port_key())
            keeper = self._keepers[node]
            try:
                result = getattr(keeper, method).remote(argument)
                return await self._wait_for_answer(result, _ACTOR_WITHIN_S)
            except RayActorError:
                if self._keepers.get(node) is keeper:
                    del self._keepers[node]
                if is_last_try:
                    raise
        raise AssertionError

    async def _wait_for_answer(self, ref: Any, within_s: float) -> Any:
        """Return the value of a Ray object reference.

        Raises:
            TimeoutError: The value did not arrive in time.
            RayError: The call that produces the value failed.
        """
        return await asyncio.wait_for(_as_future(ref), within_s)

    async def _watch_for_death(self, server: _ActorServer) -> None:
        """Wait for the end of a server, and report it as a death unless the server was stopped."""
        log_end = ""
        try:
            status, log_end = await _as_future(server.actor.wait_for_exit.remote())
        except RayError as error:
            verb = "died" if isinstance(error, RayActorError) else "failed"
            reason = f"its Ray actor {verb}: {_first_line(error)}"
        else:
            reason = f"exit {status}" if status >= 0 else f"killed by {signal_name(-status)}"
        server.is_alive = False
        if server.is_ending or self._servers.get(server.slot.rank) is not server:
            return
        self.on_death(Death(rank=server.slot.rank, epoch=server.epoch, why=reason, log_end=log_end))

    async def _end(self, server: _ActorServer, *, grace_s: float) -> tuple[str, ...]:
        """Stop a server, copy the end of its log, and end its actor.

        Args:
            server: The server.
            grace_s: Seconds from the stop signal to SIGKILL.

        Returns:
            One text for each process that could not be ended, with its node and pid.
        """
        server.is_ending = True
        leftover_pids: list[int] = []
        try:
            stopped = server.actor.stop.remote(grace_s)
            leftover_pids = await self._wait_for_answer(stopped, grace_s + _STOP_EXTRA_S)
            async with asyncio.timeout(_LOG_END_WITHIN_S):
                await self._copy_new_log(server)
                removed = server.actor.remove_files.remote()
                await self._wait_for_answer(removed, _LOG_END_WITHIN_S)
        except (RayError, OSError) as error:  # TimeoutError is a subclass of OSError.
            # Only log the error. The actor is killed below, and the server's wrapper then ends the
            # process tree.
            _log.info("rank %d: %s", server.slot.rank, _first_line(error))
        finally:
            for task in (server.watch, server.copy):
                if task is not None:
                    task.cancel()
            with contextlib.suppress(Exception):
                ray.kill(server.actor)
            server.is_alive = False
            if self._servers.get(server.slot.rank) is server:
                del self._servers[server.slot.rank]
        return tuple(f"{server.slot.host}: pid {pid}" for pid in leftover_pids)

    async def _copy_log(self, server: _ActorServer) -> None:
        """Copy new parts of a server's log to this machine once per second, until cancelled."""
        while True:
            await asyncio.sleep(_LOG_EVERY_S)
            with contextlib.suppress(RayError, TimeoutError, OSError):
                await self._copy_new_log(server)

    async def _copy_new_log(self, server: _ActorServer) -> None:
        """Append the new part of a server's log to the copy of the log on this machine."""
        target = self._plan.log_of(server.slot.rank)
        while True:
            result = server.actor.read_log.remote(server.log_offset)
            data = await self._wait_for_answer(result, _ANSWER_WITHIN_S)
            if not data:
                return
            with target.open("ab") as f:
                f.write(data)
            server.log_offset += len(data)
            if self._log_bound is not None:
                self._bound_log(target, self._log_bound)

    def _bound_log(self, target: Path, bound: LogBound) -> None:
        """Limit the size of a copied log. If the size cannot be limited, warn once."""
        try:
            bound.apply(target)
        except OSError as error:
            self._log_bound = None
            _log.warning(
                "The log %s is larger than log_max_bytes. Muster cannot shorten this log, because "
                "the file system cannot free the beginning of a file (%s). The logs of all "
                "inference servers will keep growing.",
                target,
                error.strerror,
            )


def _as_future(ref: Any) -> asyncio.Future[Any]:
    """Return a future of the running event loop for a Ray object reference."""
    future: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
    return future


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if the text is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def find_moved_ranks(slots: Collection[ServerSlot], hosts: Sequence[str]) -> frozenset[int]:
    """Return the ranks of the servers whose node has another address than planned.

    Args:
        slots: The planned servers.
        hosts: `hosts[node]` is the current address of a node of the plan.
    """
    return frozenset(
        slot.rank for slot in slots if slot.port is not None and slot.host != hosts[slot.node]
    )


def plan_bundles(topology: TopologyPlan, nodes: int) -> list[dict[str, float]]:
    """Return the resources of each node of the plan, as `bundles[node]`.

    A bundle has the GPUs of all servers on its node, and one CPU for each of these servers. Without
    servers, a bundle has a single CPU.

    Args:
        topology: The planned servers.
        nodes: Number of nodes.
    """
    bundles: list[dict[str, float]] = []
    for node in range(nodes):
        gpu_counts = [len(slot.bundles) for slot in topology.servers if slot.node == node]
        bundle = {"CPU": float(max(len(gpu_counts), 1))}
        if sum(gpu_counts):
            bundle["GPU"] = float(sum(gpu_counts))
        bundles.append(bundle)
    return bundles


def _is_valid_elsewhere(name: str) -> bool:
    """Return True if servers on other machines may get an environment variable of this process.

    Args:
        name: Name of the variable.
    """
    return name.startswith("MUSTER_") or name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
