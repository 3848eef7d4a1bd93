"""Runs the servers of a fleet on this machine, each as a child of its own guardian process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tasks.processes import tree
from tasks.processes.guarded import KILL_WITHIN_S, Command, GuardedProcess
from tasks.processes.guards import Guards
from tasks.processes.log_bounds import keep_log_bounded
from tasks.processes.ports import PortsReserved, has_listener, listeners
from tasks.processes.registry import EntryWriter
from tasks.processes.shortage import OWN_SHORTAGES
from tasks.processes.survivors import describe_survivors
from tasks.record.causes import read_tail
from tasks.record.disk import DiskThread
from tasks.record.log_file import HeldLog
from tasks.rollout.backends import Ask
from tasks.rollout.component import FleetPlan
from tasks.rollout.ownership import LocalListeners
from tasks.rollout.probing import Death, HttpProber, NoRoomToStart, StartFailed
from tasks.rollout.topology import LOOPBACK, ServerSlot, nodes_needed
from tasks.spec.component import FLEET

_log = logging.getLogger(__name__)

#: Largest number of bytes at the end of a server's log that are reported when the server has died.
#: Reading more bytes would delay the report.
_LOOKBACK_BYTES = 20_000


@dataclass(slots=True, kw_only=True)
class _LocalServer:
    """An inference server on this machine, from one start of the server to its end."""

    slot: ServerSlot
    epoch: int
    process: GuardedProcess
    #: Log of the server's output. A restarted server appends to the same log. The file is held
    #: open, so that the log can be read even after the file is moved or removed.
    log: HeldLog
    #: Size of the log in bytes when the server was started.
    log_began_at: int
    #: True if the fleet is stopping the server. The server's end is then not reported as a death.
    is_stopping: bool = False
    #: Exit stack of the running server. Closing the stack ends the server and releases its log.
    running: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @property
    def is_gone(self) -> bool:
        """True if the server, its descendants and the guardian process above them have ended."""
        return self.process.empty.done()


class LocalHost:
    """A `ServerHost` that runs each server on this machine, as a child of a guardian process.

    The process that uses this class must be a subreaper (`tree.become_subreaper`). If this process
    is killed, each guardian stops its server. If a guardian is killed, this class ends the
    processes of the guardian's server.

    Args:
        plan: The plan of the fleet.
        env: Environment variables of all servers. The variables in a server's `ServerSlot` take
            precedence.
        disk: Thread that writes the servers' entries in the run's process register.
    """

    def __init__(self, plan: FleetPlan, env: Mapping[str, str], disk: DiskThread) -> None:
        self._plan = plan
        self._env = env
        registry = EntryWriter(plan.register_at, disk) if plan.register_at is not None else None
        #: Object that starts and ends the servers' processes.
        self._guards = Guards(plan.run_id, plan.attempt, registry)
        self.on_death: Callable[[Death], None] = lambda death: None
        #: Mapping from rank to the server that was started last for this rank.
        self._servers: dict[int, _LocalServer] = {}
        #: Ports of the servers. No other run can reserve these ports until this process ends.
        self._reserved: list[PortsReserved] = []
        self.listeners = LocalListeners()
        self._prober = HttpProber(self.listeners)

    async def hosts(self) -> tuple[str, ...]:
        """Return the address of each node of the plan. Each address is the loopback address."""
        return (LOOPBACK,) * nodes_needed(self._plan.fleet, self._plan.node_gpus)

    async def hold_ports(self, node: int, names: Sequence[str]) -> list[int]:
        """Reserve a port for each name, and return the ports in the order of the names.

        Args:
            node: Unused, because all nodes are this machine.
            names: Names of the ports.

        Raises:
            OSError: No port is free.
        """
        reserved = PortsReserved(f"{FLEET}.{name}" for name in names)
        reserved.release(FLEET)
        self._reserved.append(reserved)
        return list(reserved.numbers.values())

    async def start(self, slot: ServerSlot, epoch: int) -> None:
        """Start a server. Its output is appended to the log file, which is kept over restarts.

        Args:
            slot: The planned server.
            epoch: Epoch of the server's group: 1 for the first start, 2 for the second start, and
                so on. The servers of a group are always started and stopped together.

        Raises:
            StartFailed: The server could not be started, or it still runs from an earlier start.
            NoRoomToStart: This machine lacks resources, such as open files.
        """
        rank = slot.rank
        name = f"rollout-r{rank}"
        earlier = self._servers.get(rank)
        if earlier is not None and not earlier.is_gone:
            pid = earlier.process.pid
            raise StartFailed(
                f"{name} can't be started: its earlier process (pid {pid}) has not ended"
            )
        log = HeldLog(self._plan.log_of(rank))
        stop = self._plan.fleet.stop
        if earlier is not None:
            await earlier.running.aclose()
        try:
            log.hold()
        except OSError as error:
            message = f"{name} can't be started, because its log can't be opened: {error.strerror}"
            raise _start_error(message, error) from error
        try:
            process = self._guards.prepare(FLEET, f"r{rank}")
        except OSError as error:
            log.release()
            message = (
                f"{name} can't be started, because its guardian process can't be started: "
                f"{error.strerror or error}"
            )
            raise _start_error(message, error) from error
        server = _LocalServer(
            slot=slot, epoch=epoch, process=process, log=log, log_began_at=max(log.size(), 0)
        )
        self._servers[rank] = server
        server.running.callback(log.release)
        if (bound := self._plan.log_bound) is not None:
            bounding = asyncio.create_task(keep_log_bounded(name, log, bound, _log.warning))
            server.running.callback(bounding.cancel)
        if (url := slot.url) is not None:
            expected = self.listeners.expect(url, process.processes)
            process.empty.add_done_callback(lambda _: self.listeners.forget(url, expected))
        command = Command(
            argv=slot.argv,
            env={**self._env, **slot.env},
            cwd=self._plan.cwd,
            log=log.path,
            stop_signal=signal.Signals[stop.signal],
            grace_s=stop.grace_s,
        )
        try:
            running = self._guards.running(FLEET, f"r{rank}", command)
            await server.running.enter_async_context(running)
        except OSError as error:  # TimeoutError is a subclass of OSError.
            reason = error.strerror or str(error) or "its guardian process does not answer"
            message = f"{name} can't be started: {slot.argv[0]}: {reason}"
            raise _start_error(message, error) from error
        # After a failed start, StartFailed already reports the failure. So add this callback, which
        # reports the death of the server, only after a successful start.
        process.exited.add_done_callback(lambda _: self._on_exit(server))
        # If the server has already exited, let the event loop call this callback now. Otherwise,
        # the first health check would fail before the callback, and the reported cause would be
        # the unanswered check instead of the exit code.
        await asyncio.sleep(0)

    async def stop(self, ranks: Collection[int], *, grace_s: float) -> tuple[str, ...]:
        """Stop servers, and kill their remaining processes after the grace period.

        Args:
            ranks: Ranks of the servers. Ranks without a server are ignored.
            grace_s: Seconds from the stop signal to SIGKILL.

        Returns:
            One text for each server that could not be ended completely. The text contains the pids
            of the remaining processes, or an error.
        """
        servers = [self._servers[rank] for rank in sorted(ranks) if rank in self._servers]
        for server in servers:
            server.is_stopping = True
        results = await asyncio.gather(
            *(self._end(server, grace_s) for server in servers), return_exceptions=True
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
            elif result:
                leftovers.append(result)
        return tuple(leftovers)

    async def ask(self, rank: int, question: Ask, timeout_s: float) -> str | None:
        """Send an HTTP request to a server.

        Args:
            rank: Rank of the server.
            question: The request.
            timeout_s: Seconds that the server gets to answer.

        Returns:
            None if the server answered with status 200, else a description of the failure.
        """
        server = self._servers.get(rank)
        if server is None or server.slot.url is None:
            return f"the server of rank {rank} has no URL for health checks"
        return await self._prober.ask(server.slot.url, question, timeout_s)

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        """Return the ranks of the planned servers whose ports are used by another process."""

        def list_taken_ranks() -> list[int]:
            return [slot.rank for slot in slots if self._is_taken(slot)]

        return frozenset(await asyncio.to_thread(list_taken_ranks))

    async def close(self) -> None:
        """Kill all servers."""
        await self.stop(list(self._servers), grace_s=0.0)
        await self._guards.close()

    async def _end(self, server: _LocalServer, grace_s: float) -> str:
        """Stop a server, and kill its remaining processes after the grace period.

        Args:
            server: The server.
            grace_s: Seconds from the stop signal to SIGKILL. 0 to kill at once.

        Returns:
            A text that names the processes that could not be ended, or an empty string.
        """
        process = server.process
        if grace_s > 0:
            process.stop()
            await asyncio.wait([process.empty], timeout=grace_s)
        if not server.is_gone:
            process.kill()
        await self._guards.end(process, KILL_WITHIN_S)
        await server.running.aclose()
        leftover_pids = process.leftover_pids
        if not leftover_pids:
            return ""
        return f"rank {server.slot.rank}: {'; '.join(await describe_survivors(leftover_pids))}"

    def _on_exit(self, server: _LocalServer) -> None:
        """Report the death of a server, unless the server was stopped or has been replaced."""
        if server.is_stopping or self._servers.get(server.slot.rank) is not server:
            return
        log_size = max(server.log.size(), 0)
        # If the log is now shorter than at the start of the server, log rotation has truncated the
        # log. Then this server has written the whole content of the log.
        is_truncated = log_size < server.log_began_at
        written_bytes = log_size if is_truncated else log_size - server.log_began_at
        self.on_death(
            Death(
                rank=server.slot.rank,
                epoch=server.epoch,
                why=str(server.process.exited.result()),
                log_end=read_tail(server.log.source, min(written_bytes, _LOOKBACK_BYTES)),
            )
        )

    def _is_taken(self, slot: ServerSlot) -> bool:
        """Return True if a process outside a server's tree listens on a port of the server."""
        server = self._servers.get(slot.rank)
        own_pids: set[int] = set()
        if server is not None:
            own_pids = set(tree.descendants(server.process.guardian_pid))
        used_ports = (port for port in slot.listens_on if has_listener(port))
        return any(
            listener.pid not in own_pids
            for port in used_ports
            for listener in listeners(port, own_pids)
        )


def _start_error(message: str, error: OSError) -> StartFailed:
    """Return the exception for a failed start of a server.

    Returns:
        `NoRoomToStart` if this machine lacks resources, such as file descriptors or processes.
        `StartFailed` for every other error.
    """
    # EAGAIN means that this user has reached the limit of processes.
    is_shortage = error.errno in OWN_SHORTAGES or error.errno == errno.EAGAIN
    return NoRoomToStart(message) if is_shortage else StartFailed(message)
