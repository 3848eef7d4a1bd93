"""What holds the processes of one attempt: guardians, cgroups, a PID namespace, and the registry
that says on disk what they hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tasks.processes import cgroup
from tasks.processes.containment import Level
from tasks.processes.guarded import Command, Forked, GuardedProcess
from tasks.processes.identity import ProcessId
from tasks.processes.namespace import PidNamespace
from tasks.processes.plan import AttemptPlan, ComponentPlan
from tasks.processes.registry import Entry, JobEntry, RunRegister
from tasks.processes.shared_memory import SharedMemoryWatch


class Holds:
    """The holds of one attempt, by the level of its plan.

    Use: `prepare` each component, `settle`, `launch` and `release` them, and at last `close`.
    """

    def __init__(self, plan: AttemptPlan, register: RunRegister | None) -> None:
        self._plan = plan
        self._register = register
        self._namespace: PidNamespace | None = None
        self._shared_memory: SharedMemoryWatch | None = None
        #: `cgroups[component]`, made and not removed yet.
        self._cgroups: dict[str, str] = {}

    def prepare(self, component: ComponentPlan) -> GuardedProcess:
        """A guardian that waits for its order. Raises: OSError."""
        if self._plan.containment.level is Level.L4 and self._namespace is None:
            self._namespace = PidNamespace()
        tag = {**self._plan.tag, "MUSTER_COMPONENT": component.name}
        return GuardedProcess.prepare(component.name, tag=tag, namespace=self._namespace)

    def settle(self) -> None:
        """Every guardian is there."""
        if self._namespace is not None:
            self._namespace.settle()

    def watch_shared_memory(self, own_pids: Callable[[], set[int]]) -> None:
        """From now on note what the attempt's processes make in /dev/shm."""
        if self._register is not None:
            self._shared_memory = SharedMemoryWatch(own_pids, self._register.add_leftover)

    async def launch(
        self, component: ComponentPlan, process: GuardedProcess, command: Command
    ) -> int:
        """Start a component's command, held and registered.

        Returns: its pid. Raises: OSError, as `GuardedProcess.launch`.
        """
        return await process.launch(
            command,
            cgroup=self._make_cgroup(component.name),
            register=partial(self._enter, component),
        )

    def enter_job(self, component: ComponentPlan, submission_id: str) -> None:
        """Register a component's job, before it is submitted. Raises: OSError."""
        if self._register is not None:
            self._register.enter_job(
                JobEntry(
                    run_id=self._plan.run_id,
                    attempt=self._plan.number,
                    component=component.name,
                    submission_id=submission_id,
                    log=component.command.log,
                    grace_s=component.command.grace_s,
                )
            )

    def release(self, component: str) -> None:
        """Nothing of the component is left."""
        path = self._cgroups.pop(component, None)
        if path is not None and not cgroup.remove(path):
            # Its entry stays, too, so that a reconcile removes it.
            return
        if self._register is not None:
            with contextlib.suppress(OSError):
                self._register.leave(component)

    async def close(self) -> tuple[int, ...]:
        """End what holds them.

        Returns: the pid of a namespace's first process that the kernel could not end, since
        something in the namespace can't be ended.
        """
        if self._shared_memory is not None:
            self._shared_memory.close()
        namespace, self._namespace = self._namespace, None
        if namespace is not None and not await asyncio.to_thread(namespace.close):
            return (namespace.init_pid,)
        return ()

    def _make_cgroup(self, component: str) -> str | None:
        parent = self._plan.containment.cgroup_parent
        if parent is None:
            return None
        name = f"{self._plan.run_id}-a{self._plan.number:02d}-{component}"
        # One that can't be made is told by the registry's entry: it has none.
        with contextlib.suppress(cgroup.NoCgroup):
            self._cgroups[component] = cgroup.create(parent, name)
        return self._cgroups.get(component)

    def _enter(self, component: ComponentPlan, forked: Forked) -> None:
        if self._register is None:
            return
        self._register.enter(
            Entry(
                run_id=self._plan.run_id,
                attempt=self._plan.number,
                component=component.name,
                level=self._plan.containment.level.value,
                mark=forked.mark,
                guardian=ProcessId.of(forked.guardian_pid),
                process=ProcessId.of(forked.pid),
                cgroup=Path(forked.cgroup) if forked.cgroup is not None else None,
                grace_s=component.command.grace_s,
            )
        )
