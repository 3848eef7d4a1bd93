"""One component of a running attempt: its plan, its start, its readiness, its liveness, its end.

A plan is frozen data, resolved to the last port. What runs a component is for the subclasses of
`Member`: a process of this machine, or a job of a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Never

import httpx

from tasks.processes import cgroup, probes, registry, tree
from tasks.processes.containment import Containment, Level, PidNamespace
from tasks.processes.guarded import Command, GuardedProcess, GuardianTemplate
from tasks.processes.ports import PortsReserved
from tasks.processes.probes import ComponentProbe, make_client, until_yes
from tasks.processes.shortage import Unasked
from tasks.record.causes import read_since_step
from tasks.record.disk import DiskThread
from tasks.record.events import Emit
from tasks.record.metrics_file import FileFingerprint
from tasks.record.outcome import Exit, GivenUp, GiveUpReason
from tasks.spec.component import OnExitZero
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.run import Progress
from tasks.spec.watch import WatchRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlan:
    """One component: what to start, how to tell that it is ready, what its end means."""

    name: str
    command: Command
    #: None: ready as soon as the program runs.
    ready: ReadyProbe | None
    live: LiveProbe | None
    on_exit_zero: OnExitZero
    #: It starts servers on its further ports by itself and watches those ports; only `NAME.port` is
    #: checked for it.
    manages_ports: bool = False
    #: Whether it writes a checkpoint; None: it has none. May take its time.
    is_saving: Callable[[], bool] | None = None
    #: Makes the member that a cluster runs; None: a process of this machine runs it.
    make_member: Callable[[ComponentPlan, AttemptContext], Member] | None = None

    def is_same_start(self, other: ComponentPlan) -> bool:
        """Return True if both start the same command and ask the same probes."""
        return (self.command, self.ready, self.live) == (other.command, other.ready, other.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """One try at a run."""

    run_id: str
    #: From 1.
    number: int
    #: Where relative paths of the run begin; absolute.
    cwd: Path
    #: In the order of their start.
    components: tuple[ComponentPlan, ...]
    progress: Progress | None = None
    #: The file of `progress.jsonl` when the attempt began; None: it begins now.
    metrics: FileFingerprint | None = None
    #: Rules over its figures, by name.
    alarms: Mapping[str, WatchRule] = field(default_factory=dict)
    #: The step without which the run has not succeeded; None: exit 0 is enough.
    success_step: float | None = None
    #: Seconds without progress and output after which the run has failed; None: never.
    stall_after_s: float | None = None
    #: Seconds from its beginning to its end as TIME_LIMIT; None: it may take any time.
    time_limit_s: float | None = None
    #: When it began, UTC epoch seconds; None: now.
    began_at: float | None = None
    #: Of this machine's, those that it was given, as their driver numbers them.
    devices: tuple[int, ...] = ()
    #: Of its cluster, by node, the share of the last moment in which its GPUs did something.
    gpu_use: Callable[[], Awaitable[Mapping[str, float]]] | None = None
    #: What holds the attempt's processes.
    containment: Containment = field(default_factory=lambda: Containment(level=Level.L2))
    #: Takes secrets out of a text, before it is written down.
    mask: Callable[[str], str] = str


_LAST_ASK_S = 1.0
#: The rule of a failure: a process that is not of this run has a port of the run.
PORT_TAKEN = "port-taken"


def tag_of(run_id: str, attempt: int) -> dict[str, str]:
    """The variables by which the guardians of an attempt are found."""
    return {"MUSTER_RUN_ID": run_id, "MUSTER_ATTEMPT": str(attempt)}


@dataclass
class AttemptContext:
    """What the components of one attempt share, and what guards their processes by the level of its
    plan: guardians, cgroups, a PID namespace, and the registry that says on disk what they hold.

    Use: `begin`, `prepare` each component, `settle`, `enter` and `release` them, at last `close`.
    """

    plan: AttemptPlan
    ports: PortsReserved
    emit: Emit
    register: registry.RunRegister | None
    template: GuardianTemplate | None = None
    client: httpx.AsyncClient = field(default_factory=make_client)
    _namespace: PidNamespace | None = None
    _processes: list[GuardedProcess] = field(default_factory=list)
    _gone: list[GuardedProcess] = field(default_factory=list)
    _shared_memory: registry.SharedMemoryWatch | None = None
    #: `cgroups[component]`, made and not removed yet.
    _cgroups: dict[str, str] = field(default_factory=dict)

    @property
    def disk(self) -> DiskThread | None:
        """Writes what there is to write of the run; None: it has no registry."""
        return self.register.disk if self.register is not None else None

    @property
    def _tag(self) -> dict[str, str]:
        return tag_of(self.plan.run_id, self.plan.number)

    def begin(self) -> None:
        """Have what guardians are made of. Raises: OSError."""
        level = self.plan.containment.level
        count = sum(component.make_member is None for component in self.plan.components)
        if level is Level.L4 and count:
            self._namespace = PidNamespace()
        if level is not Level.L1 and count > 1:
            self.template = self.template or GuardianTemplate(self._tag)

    def prepare(self, component: ComponentPlan) -> GuardedProcess:
        """A guardian that waits for its order. Raises: OSError."""
        make = partial(
            GuardedProcess.prepare,
            component.name,
            tag={**self._tag, "MUSTER_COMPONENT": component.name},
            namespace=self._namespace,
            gone=self._gone,
        )
        try:
            process = make(template=self.template)
        except OSError:
            if self.template is None:
                raise
            # Without it, as when it was killed, each is started.
            self._close_template()
            process = make()
        # A pid below a guardian that has gone may be anybody's.
        self._processes = [one for one in self._processes if not one.empty.done()]
        self._processes.append(process)
        return process

    def own_pids(self) -> set[int]:
        """Every process of the attempt on this machine, guardians aside. Safe in any thread."""
        return set(tree.descendants(*(process.guardian_pid for process in self._processes)))

    def settle(self) -> None:
        """Every guardian is there: from now on note what their processes make in /dev/shm."""
        self._close_template()
        if self._namespace is not None:
            self._namespace.settle()
        if self.register is not None:
            note = self.register.note_leftovers
            self._shared_memory = registry.SharedMemoryWatch(self.own_pids, note)

    @property
    def can_prepare_again(self) -> bool:
        """Return True if `prepare` still works after `settle`: a namespace is closed by then."""
        return self._namespace is None

    async def enter(
        self,
        kind: type[registry.RegisterEntry | registry.JobEntry],
        component: ComponentPlan,
        **about: object,
    ) -> None:
        """Register something of a component before it is started. Raises: OSError.

        Args:
            about: the fields that only this kind of entry has.
        """
        if self.register is not None:
            own = {
                "run_id": self.plan.run_id,
                "attempt": self.plan.number,
                "component": component.name,
                "grace_s": component.command.grace_s,
            }
            await self.register.enter(kind.model_validate(own | about))

    def make_cgroup(self, component: str) -> str | None:
        """Of a component's own, where the level has them and it can be made."""
        parent = self.plan.containment.cgroup_parent
        if parent is None:
            return None
        name = f"{self.plan.run_id}-a{self.plan.number:02d}-{component}"
        # One that can't be made is told by the registry's entry: it has none.
        with contextlib.suppress(OSError):
            self._cgroups[component] = cgroup.create(parent, name)
        return self._cgroups.get(component)

    def release(self, component: str) -> None:
        """Nothing of the component is left."""
        path = self._cgroups.pop(component, None)
        if path is not None and not cgroup.remove(path):
            # Its entry stays, too, so that a reconcile removes it.
            return
        if self.register is not None:
            self.register.leave(component)

    def hurry(self) -> None:
        """Processes of the attempt are about to end: note what they have made until now."""
        if self._shared_memory is not None:
            self._shared_memory.hurry()

    async def close(self) -> tuple[int, ...]:
        """End what guards them, and give the ports up.

        Returns: the pid of a namespace's first process that the kernel could not end, since
        something in the namespace can't be ended.
        """
        self._close_template()
        if self._shared_memory is not None:
            await asyncio.to_thread(self._shared_memory.close)
        namespace, self._namespace = self._namespace, None
        left: tuple[int, ...] = ()
        if namespace is not None and not await asyncio.to_thread(namespace.close):
            left = (namespace.init_pid,)
        await self.client.aclose()
        self.ports.close()
        return left

    def _close_template(self) -> None:
        if self.template is not None:
            self.template.close()
            self.template = None


class Member(ABC):
    """A component from before its start until nothing of it is left."""

    #: Resolves with its end, once it is launched.
    exited: asyncio.Future[Exit]

    def __init__(self, plan: ComponentPlan, context: AttemptContext) -> None:
        """Raises: OSError, when what it needs can't be had."""
        self.plan = plan
        #: Of its first process; None where that is not on this machine, or not there yet.
        self.pid: int | None = None
        #: It does not run yet: its silence means nothing.
        self.is_pending = True
        #: The launch was ordered: from now on there is something to end.
        self.is_launched = False
        self.is_ready = False
        #: Set if another process took its port before it was ready, and it can start again on
        #: another port.
        self.lost_port = asyncio.Event()
        #: Why; known once that is set.
        self.port_loss = GiveUpReason(kind=FailureKind.PORT_CONFLICT, rule=PORT_TAKEN, message="")
        #: It left with exit 0, its part done, while the run goes on.
        self.is_drained = False
        #: The run stalled by it, and it is examined before it is ended.
        self.is_hung = False
        #: In a line, as far as that was found once it was examined and ended.
        self.hangs_in = ""
        self.exit: Exit | None = None
        #: Of which machines nobody can say what it has left there, in words, once it has ended.
        self.unseen: tuple[str, ...] = ()
        self._context = context
        self._emit = context.emit
        #: `files[path]` that its probes ask for, as they were before it.
        self._files: dict[Path, object] = {}
        self._launched_monotonic_s = 0.0
        #: Size of its log before its launch, in bytes: an earlier process wrote that much.
        self._log_since = 0

    @property
    def name(self) -> str:
        return self.plan.name

    def _note_start(self) -> None:
        """Note what is there before it starts, and when that is."""
        for spec in (self.plan.ready, self.plan.live):
            if spec is not None and spec.file is not None:
                path = self.plan.command.cwd / spec.file
                self._files[path] = probes.identity_of(path)
        self._launched_monotonic_s = time.monotonic()

    def seconds_alive(self) -> float:
        return time.monotonic() - self._launched_monotonic_s

    @abstractmethod
    async def launch(self) -> None:
        """Start it; in moments, and never cut short.

        Raises: OSError, when it can't be started; GivenUp, when another has its port. Nothing is
        left then.
        """

    async def until_running(self) -> None:
        """Wait until it runs. Raises: GivenUp. A cancel leaves it to `end`."""
        self.is_pending = False

    async def until_ready(self) -> None:
        """Wait for the readiness probe's yes.

        Raises: GivenUp, with the last reason, at the probe's deadline, or when another answers.
        """
        if (ready := self.plan.ready) is not None:
            probe = self._probe(ready)
            assert probe is not None

            def on_no(reason: str) -> None:
                self._emit("probe.failed", self.name, reason=reason)

            try:
                async with asyncio.timeout(ready.within_s):
                    await until_yes(probe, every_s=ready.every_s, on_no=on_no)
            except TimeoutError:
                # This process may have been stopped, or starved, when the answer became yes.
                if (reason := await probe.ask(_LAST_ASK_S)) is not None:
                    on_no(reason)
                    message = f"not ready after {self.seconds_alive():.0f} s: {reason}"
                    kind = FailureKind.NOT_READY
                    loss = GiveUpReason(kind=kind, rule="not-ready", message=message)
                    raise GivenUp(loss) from None
            self._refuse_foreign(probe.local_port)
        self.refuse_foreign_ports()
        self.is_ready = True
        self._emit("component.ready", self.name, pid=self.pid, after_s=self.seconds_alive())

    async def has_last_word(self) -> bool:
        """What a component that has ended left behind, in a log or a file, says it was ready."""
        ready = self.plan.ready
        if ready is None:
            return True
        if not (ready.log or ready.file or ready.notify):
            return False
        probe = self._probe(ready)
        return probe is not None and await probe.ask(_LAST_ASK_S) is None

    async def until_unresponsive(self) -> GiveUpReason:
        """Ask the liveness probe for ever, until it has missed so often in a row. A cancel ends
        it."""
        live = self.plan.live
        probe = self._probe(live) if live is not None else None
        if live is None or probe is None:
            return await forever()
        misses = 0
        while True:
            await asyncio.sleep(live.every_s)
            if self.exit is not None:
                return await forever()
            reason = await probe.ask(live.timeout_s)
            if reason is None:
                misses = 0
                continue
            if isinstance(reason, Unasked):
                # It says nothing about the component, so it is no miss.
                self._emit("probe.failed", self.name, reason=reason, misses=misses, probe="live")
                continue
            misses += 1
            self._emit("probe.failed", self.name, reason=reason, misses=misses, probe="live")
            if misses >= live.misses:
                message = f"liveness probe missed {misses} times in a row: {reason}"
                return GiveUpReason(kind=FailureKind.STALLED, rule="live", message=message)

    async def until_process_lost(self) -> GiveUpReason:
        """Watch the processes below it that must stay alive, for ever. A cancel ends it."""
        return await forever()

    async def until_job_lost(self) -> GiveUpReason:
        """Watch what only a job can lose, for ever. A cancel ends it."""
        return await forever()

    def last_words(self, since: int = 0, until: int | None = None) -> str:
        """The end of its log, and what else is known of its end; for the arguments see
        `read_since_step`."""
        since = max(since, self._log_since)
        return read_since_step(self.plan.command.log, since=since, until=until)

    async def examine(self) -> None:
        """Write down what it hangs in."""
        return

    @abstractmethod
    def stop(self) -> None:
        """Ask it to end. Returns at once."""

    @abstractmethod
    def kill(self) -> None:
        """End it without a grace period. Returns at once."""

    @abstractmethod
    async def end(self) -> tuple[int | str, ...]:
        """Stop it and wait until nothing of it is left.

        Returns: what can't be ended: pids of this machine, and those of others with their node;
            empty when nothing is left.
        """

    async def let_go(self) -> None:
        """Leave it running, where it is able to without this process; else end it."""
        await self.end()

    def _probe(self, spec: ReadyProbe | LiveProbe) -> ComponentProbe | None:
        """The question of a spec; None for one that is not answered by asking."""
        if spec.http is not None:
            return probes.HttpProbe(spec.http, self._context.client, spec.json_)
        if spec.address is not None:
            return probes.TcpProbe(*spec.address)
        if spec.log is not None:
            return probes.LogProbe(self.plan.command.log, spec.log, self._log_since)
        if spec.file is not None:
            path = self.plan.command.cwd / spec.file
            return probes.FileProbe(path, self._files.get(path))
        if spec.alive_s is not None:
            return probes.AliveProbe(spec.alive_s, self._launched_monotonic_s)
        return None

    def refuse_foreign_ports(self, suspected: Iterable[int] | None = None) -> None:
        """Check who listens on the ports that were reserved for this component.

        Args:
            suspected: check only these of them; None: all.

        Raises: GivenUp, when a process that is not of this run listens on one.
        """
        return

    def _refuse_foreign(self, port: int | None) -> None:
        """Raises: GivenUp, when a server that is not of this run answers on the port."""
        return


async def forever() -> Never:
    """Wait until cancelled."""
    await asyncio.Event().wait()
    raise AssertionError
