"""The servers of a fleet as processes of this machine, each under a guardian of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tasks.processes import tree
from tasks.processes.guarded import KILL_WITHIN_S, Command, GuardedProcess
from tasks.processes.identity import ProcessId
from tasks.processes.ports import PortsReserved, is_listened, listeners
from tasks.processes.registry import RegisterEntry, enter, leave
from tasks.processes.shortage import OWN_SHORTAGES
from tasks.record.causes import read_tail
from tasks.record.disk import DiskThread
from tasks.rollout.backends import Ask
from tasks.rollout.component import FleetPlan
from tasks.rollout.ownership import LocalListeners
from tasks.rollout.probing import Death, HttpProber, NoRoomToStart, StartFailed
from tasks.rollout.topology import LOOPBACK, ServerSlot, nodes_needed
from tasks.spec.component import FLEET

#: How much of a log's end is looked at: little, since a death is to be told at once.
_LOOKBACK_BYTES = 20_000


@dataclass(slots=True, kw_only=True)
class _LocalServer:
    """One incarnation of a server."""

    slot: ServerSlot
    epoch: int
    process: GuardedProcess
    log: Path
    #: Of the log when it began: what stands before that, an earlier incarnation has said.
    log_began_at: int
    #: Somebody has asked for its end, which is no death then.
    is_stopping: bool = False

    @property
    def is_gone(self) -> bool:
        """Its guardian, too."""
        return self.process.empty.done()


class LocalHost:
    """A `ServerHost` over guardians. Its process must be a subreaper (`tree.become_subreaper`).

    If that process is killed, each guardian stops its server; if a guardian is killed, its server
    ends with it, and what that has left is ended here.

    Args:
        env: of every server; a slot's own variables win.
        disk: writes the servers' entries in the run's register.
    """

    def __init__(self, plan: FleetPlan, env: Mapping[str, str], disk: DiskThread) -> None:
        self._plan, self._env, self._disk = plan, env, disk
        self.on_death: Callable[[Death], None] = lambda death: None
        self._servers: dict[int, _LocalServer] = {}
        #: Ports, kept from other runs as long as this process lives.
        self._reserved: list[PortsReserved] = []
        self.listeners = LocalListeners()
        self._prober = HttpProber(self.listeners)

    async def hosts(self) -> tuple[str, ...]:
        # This machine stands for each of them.
        return (LOOPBACK,) * nodes_needed(self._plan.fleet, self._plan.node_gpus)

    async def hold_ports(self, node: int, names: Sequence[str]) -> list[int]:
        """Raises: OSError."""
        reserved = PortsReserved(f"{FLEET}.{name}" for name in names)
        reserved.release(FLEET)
        self._reserved.append(reserved)
        return list(reserved.numbers.values())

    async def start(self, slot: ServerSlot, epoch: int) -> None:
        """Its log goes on with what its earlier incarnations wrote."""
        name, rank = f"rollout-r{slot.rank}", slot.rank
        if (before := self._servers.get(rank)) is not None and not before.is_gone:
            pid = before.process.pid
            raise StartFailed(f"{name} can't be started: what it was (pid {pid}) has not ended")
        log, stop = self._plan.log_of(rank), self._plan.fleet.stop
        tag = {
            "MUSTER_RUN_ID": self._plan.run_id,
            "MUSTER_ATTEMPT": str(self._plan.attempt),
            "MUSTER_COMPONENT": FLEET,
        }
        try:
            process = GuardedProcess.prepare(name, tag=tag)
        except OSError as error:
            message = f"{name}: no guardian: {error.strerror or error}"
            raise _start_error(message, error) from error
        server = _LocalServer(
            slot=slot, epoch=epoch, process=process, log=log, log_began_at=_size_of(log)
        )
        self._servers[rank] = server
        process.exited.add_done_callback(lambda _: self._on_exit(server))
        process.empty.add_done_callback(lambda _: self._unregister(rank))
        if (url := slot.url) is not None:
            expected = self.listeners.expect(url, process.processes)
            process.empty.add_done_callback(lambda _: self.listeners.forget(url, expected))
        command = Command(
            argv=slot.argv,
            env={**self._env, **slot.env},
            cwd=self._plan.cwd,
            log=log,
            stop_signal=signal.Signals[stop.signal],
            grace_s=stop.grace_s,
        )
        try:
            await process.launch(command, register=partial(self._register, rank))
        except OSError as error:  # TimeoutError is one.
            server.is_stopping = True
            await self._end(server, 0.0)
            what = error.strerror or str(error) or "its guardian does not answer"
            message = f"{name} can't be started: {slot.argv[0]}: {what}"
            raise _start_error(message, error) from error
        except asyncio.CancelledError:
            # `stop` ends it; until somebody does, its end is nobody's news.
            server.is_stopping = True
            raise

    async def stop(self, ranks: Collection[int], *, grace_s: float) -> tuple[str, ...]:
        servers = [self._servers[rank] for rank in sorted(ranks) if rank in self._servers]
        for server in servers:
            server.is_stopping = True
        left = await asyncio.gather(*(self._end(server, grace_s) for server in servers))
        return tuple(one for one in left if one)

    async def ask(self, rank: int, question: Ask, timeout_s: float) -> str | None:
        server = self._servers.get(rank)
        if server is None or server.slot.url is None:
            return f"rank {rank} has no address to be asked at"
        return await self._prober.ask(server.slot.url, question, timeout_s)

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        taken = await asyncio.to_thread(lambda: [one.rank for one in slots if self._is_taken(one)])
        return frozenset(taken)

    async def close(self) -> None:
        await self.stop(list(self._servers), grace_s=0.0)

    async def _register(self, rank: int, process: GuardedProcess) -> None:
        """Whoever finishes a run whose processes were all killed at once finds the servers, too."""
        if self._plan.register_at is not None:
            entry = RegisterEntry(
                run_id=self._plan.run_id,
                attempt=self._plan.attempt,
                component=f"{FLEET}.r{rank}",
                mark=process.mark,
                guardian=process.guardian,
                process=ProcessId.of(process.pid or 0),
                grace_s=self._plan.fleet.stop.grace_s,
            )
            writing = self._disk.do(partial(enter, self._plan.register_at, entry))
            await asyncio.wrap_future(writing)

    def _unregister(self, rank: int) -> None:
        if self._plan.register_at is not None:
            self._disk.do(partial(leave, self._plan.register_at, f"{FLEET}.r{rank}"))

    async def _end(self, server: _LocalServer, grace_s: float) -> str:
        """What could not be ended, in words; empty when nothing is left."""
        process = server.process
        if grace_s > 0:
            process.stop()
            await asyncio.wait([process.empty], timeout=grace_s)
        if not server.is_gone:
            process.kill()
        left = await process.end(KILL_WITHIN_S)
        return f"rank {server.slot.rank}: pid {', '.join(map(str, left))}" if left else ""

    def _on_exit(self, server: _LocalServer) -> None:
        if server.is_stopping or self._servers.get(server.slot.rank) is not server:
            return
        said_bytes = max(_size_of(server.log) - server.log_began_at, 0)
        self.on_death(
            Death(
                rank=server.slot.rank,
                epoch=server.epoch,
                why=str(server.process.exited.result()),
                last_words=read_tail(server.log, min(said_bytes, _LOOKBACK_BYTES)),
            )
        )

    def _is_taken(self, slot: ServerSlot) -> bool:
        server = self._servers.get(slot.rank)
        own = set(tree.descendants(server.process.guardian_pid)) if server is not None else set()
        heard = (port for port in slot.listens_on if is_listened(port))
        return any(one.pid not in own for port in heard for one in listeners(port, own))


def _start_error(message: str, error: OSError) -> StartFailed:
    # EAGAIN: this user may have no more processes.
    is_shortage = error.errno in OWN_SHORTAGES or error.errno == errno.EAGAIN
    return NoRoomToStart(message) if is_shortage else StartFailed(message)


def _size_of(log: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(log).st_size
    return 0
