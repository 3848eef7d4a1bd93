"""Run the processes of an attempt under guardians, and release everything that they have used.

A guardian is a small process that owns the process tree of a component, or of one part of a
component. `Guards` starts a guardian for each process, registers the process before its program is
executed, and ends the whole process tree. `guarded` contains the code for a single process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from tasks.processes import cgroup, tree
from tasks.processes.containment import Containment, Level, PidNamespace
from tasks.processes.guarded import KILL_WITHIN_S, Command, GuardedProcess, GuardianTemplate
from tasks.processes.identity import ProcessId
from tasks.processes.memory_cgroup import find_memory_parent
from tasks.processes.registry import ProcessEntry
from tasks.processes.survivors import describe_survivors

_log = logging.getLogger(__name__)

#: Seconds to wait for the end of a guardian process that has started no command. The end takes
#: longer only if SIGSTOP has stopped the guardian.
_UNUSED_WITHIN_S = 2.0


def tag_of(run_id: str, attempt: int) -> dict[str, str]:
    """Return the environment variables that identify an attempt.

    The guardian processes, which own the components of the attempt, are started with these
    variables.
    """
    return {"MUSTER_RUN_ID": run_id, "MUSTER_ATTEMPT": str(attempt)}


class ProcessRegistry(Protocol):
    """The methods of the run's registry that `Guards` calls."""

    async def enter(self, entry: ProcessEntry) -> None: ...
    def leave(self, component: str) -> None: ...


class Guards:
    """Owns the processes of one attempt on this machine, each under its own guardian process.

    Run each process inside `async with guards.running(...)`. If the start must be fast, call
    `begin`, then `prepare` for each process, then `settle`, all before the first process is
    started. Call `close` at the end of the attempt.
    """

    def __init__(
        self,
        run_id: str,
        attempt: int,
        registry: ProcessRegistry | None,
        *,
        containment: Containment | None = None,
        template: GuardianTemplate | None = None,
    ) -> None:
        """
        Args:
            run_id: Id of the run.
            attempt: Number of the attempt, from 1.
            registry: The registry of the run's processes. None if the processes are not registered.
            containment: Mechanisms which ensure that all processes can be ended. If None, only
                guardian processes are used.
            template: Helper process that forks the guardians. If None, `begin` starts the helper
                process when it is needed.
        """
        self._run_id = run_id
        self._attempt = attempt
        self._registry = registry
        self._containment = containment or Containment(level=Level.L2)
        self._template = template
        self._namespace: PidNamespace | None = None
        #: Processes whose guardian processes have not ended, in the order in which the processes
        #: were prepared.
        self._processes: list[GuardedProcess] = []
        #: Last prepared process of each component, or of each part of a component, such as one
        #: inference server. The key is the name of the process in the registry.
        self._current: dict[str, GuardedProcess] = {}
        #: Names of the processes that are prepared and not started.
        self._prepared: set[str] = set()
        #: Processes in the order in which the kernel has reported their ends.
        self._ended_processes: list[GuardedProcess] = []
        #: Mapping from the name of each process to the directory of its existing cgroup.
        self._cgroups: dict[str, str] = {}
        #: Mapping from the name of a process to the directory of the cgroup that limits its memory.
        self._memory_cgroups: dict[str, str] = {}
        #: Mapping from a process to the task that waits for the end of the process. If the caller
        #: of `end` is cancelled, the task continues.
        self._endings: dict[GuardedProcess, asyncio.Task[tuple[int, ...]]] = {}

    @property
    def _tag(self) -> dict[str, str]:
        return tag_of(self._run_id, self._attempt)

    def begin(self, count: int) -> None:
        """Start the processes that `prepare` needs.

        For containment level L4, the first process of the PID namespace is started. If there are
        several components, the helper process that forks their guardian processes is started.

        Args:
            count: Number of components that will be prepared.

        Raises:
            OSError: A process could not be started.
        """
        level = self._containment.level
        if level is Level.L4 and count:
            self._namespace = PidNamespace()
        if level is not Level.L1 and count > 1:
            self._template = self._template or GuardianTemplate(self._tag)

    def prepare(self, component: str, part: str = "") -> GuardedProcess:
        """Start the guardian process of a command that will be executed later.

        The guardian executes no command yet. Pass the same names to `running` later to execute a
        command, or to `dismiss` to end the guardian.

        Args:
            component: Name of the component.
            part: Name of a part of the component, for example of one inference server. Empty for
                the component itself.

        Raises:
            OSError: No guardian could be started.
        """
        name = _name_of(component, part)
        make = partial(
            GuardedProcess.prepare,
            f"{component}-{part}" if part else component,
            tag={**self._tag, "MUSTER_COMPONENT": component},
            namespace=self._namespace,
            ended_processes=self._ended_processes,
        )
        try:
            process = make(template=self._template)
        except OSError:
            if self._template is None:
                raise
            # The helper process that forks guardians may have been killed. From now on, start each
            # guardian process as a new process.
            self._close_template()
            process = make()
        # Forget processes whose guardian processes have ended. The kernel may reuse the pids of
        # those guardians.
        self._processes = [other for other in self._processes if not other.ended.done()]
        self._processes.append(process)
        self._endings = {key: end for key, end in self._endings.items() if not key.ended.done()}
        self._current[name] = process
        self._prepared.add(name)
        return process

    def settle(self) -> None:
        """End the preparation. Call this after `prepare` was called for each component.

        The helper process that forks guardian processes is ended, and the PID namespace accepts no
        further guardian.
        """
        self._close_template()
        if self._namespace is not None:
            self._namespace.settle()

    @property
    def can_prepare_again(self) -> bool:
        """True if `prepare` may be called after `settle`.

        The value is False if the components run in a PID namespace. After `settle`, no further
        guardian process can be started in this namespace.
        """
        return self._namespace is None

    def own_pids(self) -> set[int]:
        """Return the pids of the attempt's processes on this machine, without guardian processes.

        Safe in any thread.
        """
        return set(tree.descendants(*(process.guardian_pid for process in self._processes)))

    @asynccontextmanager
    async def running(
        self, component: str, part: str, command: Command
    ) -> AsyncIterator[GuardedProcess]:
        """Run a command under its own guardian while the context is open, and yield its process.

        The process is registered before the command is executed. At the end of the context, the
        command gets its stop signal and its grace period. The context then waits until the whole
        process tree has ended. The registry entry is removed when the process tree has ended.
        `GuardedProcess.leftover_pids` contains the processes that could not be ended.

        If the caller is cancelled while the context waits for the end, the process still gets its
        grace period, and `close` waits for its end. To end the process before the end of the
        context, call its method `stop` or `kill`, and then `end` of this class.

        Args:
            component: Name of the component.
            part: Name of a part of the component. Empty for the component itself.
            command: The command.

        Raises:
            OSError: The command could not be started, its memory could not be limited, or the
                registry could not be written. No process remains. `TimeoutError`: the guardian
                process does not answer.
        """
        name = _name_of(component, part)
        if name not in self._prepared:
            self.prepare(component, part)
        self._prepared.discard(name)
        process = self._current[name]
        process.empty.add_done_callback(lambda _: self._release(name, process))
        register = partial(self._register, name, command)
        try:
            memory_cgroup = self._make_memory_cgroup(name, command)
        except OSError:
            process.dismiss()
            await self.end(process, _UNUSED_WITHIN_S)
            raise
        try:
            await process.launch(
                command,
                cgroup=self._cgroups.get(name) or self._make_cgroup(name),
                memory_cgroup=memory_cgroup,
                register=register,
            )
        except OSError:
            process.kill()
            await self.end(process, KILL_WITHIN_S)
            raise
        except BaseException:
            process.stop()
            await self.end(process, command.ends_within_s)
            raise
        try:
            yield process
        finally:
            process.stop()
            await self.end(process, command.ends_within_s)

    async def end(self, process: GuardedProcess, within_s: float) -> None:
        """Wait until a process tree has ended. Call `process.stop` or `process.kill` before.

        The guardian process of the tree may end a moment later; `close` waits for this end. Several
        callers may wait for the end of one process tree; the time limit of the first caller
        applies.

        Args:
            process: The process.
            within_s: Time limit in seconds. A guardian process that has sent no report by then is
                killed.
        """
        ending = self._endings.get(process)
        if ending is None:
            ending = self._endings[process] = asyncio.create_task(process.end(within_s))
        futures: list[asyncio.Future[Any]] = [ending, process.empty]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            await ending

    async def dismiss(self, component: str, part: str = "") -> None:
        """End the guardian process that was prepared for a component, if it has no command yet.

        If there is no such guardian process, do nothing.

        Args:
            component: Name of the component.
            part: Name of the part of the component; see `prepare`.
        """
        name = _name_of(component, part)
        if name in self._prepared:
            self._prepared.discard(name)
            self._current[name].dismiss()
            await self.end(self._current[name], _UNUSED_WITHIN_S)

    async def close(self) -> dict[str, tuple[str, ...]]:
        """End all processes that still run, without a grace period, and close the PID namespace.

        Returns:
            Mapping from the name of a component to descriptions of its processes that could not be
            ended. Empty if all processes have ended.
        """
        self._close_template()
        if self._endings:
            await asyncio.wait(self._endings.values())
        # Leave out processes that SIGKILL could not end. These processes were already reported.
        remaining = [
            process for process in self._processes if not (process.ended.done() or process.stuck)
        ]
        unused = [self._current[name] for name in self._prepared]
        for process in remaining:
            # The first message to a guardian process must be a command. The guardian processes in
            # `unused` have got no command, so do not call `kill`. `dismiss` is enough to end them.
            if process not in unused:
                process.kill()
            process.dismiss()
        results = await asyncio.gather(
            *(process.end(KILL_WITHIN_S) for process in remaining), return_exceptions=True
        )
        for process, result in zip(remaining, results, strict=True):
            if isinstance(result, BaseException):
                _log.error("the processes of %s could not be ended", process.name, exc_info=result)
        left = {
            process.name: await describe_survivors(pids)
            for process in self._processes
            if (pids := process.unended_pids)
        }
        namespace = self._namespace
        self._namespace = None
        if namespace is not None and not await asyncio.to_thread(namespace.close) and not left:
            # The first process of a PID namespace ends after all other processes in the namespace.
            # The first process has not ended in time, so some process in the namespace remains. The
            # pid of the remaining process is unknown, so report the first process.
            names = [process.name for process in self._processes] or ["run"]
            left[names[-1]] = await describe_survivors([namespace.init_pid])
        return left

    async def _register(self, name: str, command: Command, process: GuardedProcess) -> None:
        """Limit the memory of a process, and write the process to the run's registry.

        This function is called before the program of the process is executed.

        Raises:
            OSError: The memory could not be limited, or the entry could not be written.
        """
        memory_cgroup = self._memory_cgroups.get(name)
        if memory_cgroup is not None:
            cgroup.put(memory_cgroup, process.pid or 0)
        if self._registry is not None:
            entry = ProcessEntry.model_validate(
                {
                    "run_id": self._run_id,
                    "attempt": self._attempt,
                    "component": name,
                    "grace_s": command.grace_s,
                    "mark": process.mark,
                    "guardian": process.guardian,
                    "process": ProcessId.of(process.pid or 0),
                    "cgroup": process.cgroup,
                }
            )
            await self._registry.enter(entry)

    def _release(self, name: str, process: GuardedProcess) -> None:
        """Remove the cgroup and the registry entry of a process whose process tree has ended.

        Do nothing if a later process has the same name: the cgroup and the entry then belong to the
        later process.
        """
        if self._current.get(name) is not process:
            return
        memory_cgroup = self._memory_cgroups.pop(name, None)
        if memory_cgroup is not None:
            cgroup.remove(memory_cgroup)
        path = self._cgroups.pop(name, None)
        if path is not None and not cgroup.remove(path):
            # The cgroup of the process could not be removed. Keep the registry entry of the
            # process, so that a later `muster reconcile` removes the cgroup.
            return
        if self._registry is not None:
            self._registry.leave(name)

    def _make_memory_cgroup(self, name: str, command: Command) -> str | None:
        """Create the cgroup that limits the memory of a process, and return its directory.

        Returns:
            None if the memory of the process is not limited.

        Raises:
            OSError: The cgroup cannot be created.
        """
        if command.memory_limit_bytes is None:
            return None
        parent = find_memory_parent()
        path = parent.create(self._make_cgroup_name(name), command.memory_limit_bytes)
        self._memory_cgroups[name] = path
        if parent.is_version_2:
            # In version 2 of cgroups, a process is in one cgroup only. So the cgroup with the
            # memory limit is also used to end the processes.
            self._cgroups[name] = path
        return path

    def _make_cgroup_name(self, name: str) -> str:
        return f"{self._run_id}-a{self._attempt:02d}-{name}"

    def _make_cgroup(self, name: str) -> str | None:
        """Create a cgroup for a process, and return its directory.

        Returns:
            None if the level of containment uses no cgroups or the cgroup could not be created.
        """
        parent = self._containment.cgroup_parent
        if parent is None:
            return None
        # If the cgroup cannot be created, the process starts without a cgroup.
        with contextlib.suppress(OSError):
            self._cgroups[name] = cgroup.create(parent, self._make_cgroup_name(name))
        return self._cgroups.get(name)

    def _close_template(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None


def _name_of(component: str, part: str) -> str:
    """Return the name of a process in the registry.

    The name is the name of the component. For a part of a component, a dot and the name of the part
    follow, for example `rollout.r0` for the inference server `r0`.
    """
    return f"{component}.{part}" if part else component
