"""Start a component's command under a guardian process, and wait for the end of both.

A guardian is a small process that owns the process tree of one component (see `guardian`).

If a run has several components, a helper process, the `GuardianTemplate`, forks their guardians.
Without this helper, the start of 20 components took 480 instead of 300 ms on 2 busy cores. The
start of 1,000 components took 39 instead of 24 s, and their guardians used 4.1 instead of 1.3 GB of
memory. So the helper is worth its code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tasks.processes import cgroup, tree
from tasks.processes.containment import PidNamespace
from tasks.processes.ending import (
    CLEAN_ROUNDS,
    ROUND_S,
    end_marked,
    end_orphans,
    guardians,
    guardians_lock,
    kept_marks,
)
from tasks.processes.guardian import TEMPLATE, decode_messages, encode_message
from tasks.processes.identity import ProcessId
from tasks.record.outcome import Exit

#: File descriptors of the sockets that reserve the run's GPUs. Each guardian process inherits them.
#: If this process is killed, the GPUs stay reserved until the last guardian of the run has ended.
kept_fds: set[int] = set()

#: Command line of a guardian process, without its arguments. The command line contains the path of
#: `guardian.py`, so that `ps` shows the purpose of the process.
_GUARDIAN = (
    *(sys.executable, "-I", "-S", "-c"),
    "import sys; del sys.argv[0]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
    "import guardian; guardian.main()",
    str(Path(__file__).with_name("guardian.py")),
)
#: Seconds to wait for the report of the guardian process, after the kernel has reported the end of
#: the component. A guardian process that was stopped with SIGSTOP never reports.
_REPORT_WITHIN_S = 2.0
#: Seconds to wait until the component's program starts. The start usually takes milliseconds, but
#: takes seconds on a machine that is short of memory.
_SPAWN_WITHIN_S = 30.0
#: Time limit in seconds for sending the description of a command to a guardian process, and for an
#: answer of the process that forks guardian processes.
_ORDER_WITHIN_S = 2.0
#: Longest time, in seconds, from the end of the grace period until a guardian process has killed
#: the process tree and reported the processes that survived.
KILL_WITHIN_S = 8.0
#: Seconds between two checks of a command's children after the guardian process of the command was
#: killed.
_KEPT_ROUND_S = 0.2
#: Difference in seconds that Muster records between the end times of two processes, if it knows
#: only which process ended first.
_A_MOMENT_S = 1e-6
#: Environment variables of this process that its guardian processes inherit.
_GUARDIAN_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that a guardian process starts, and the way to stop the command."""

    argv: tuple[str, ...]
    #: Complete environment of the process. The process inherits no other variables.
    env: Mapping[str, str]
    cwd: Path
    #: File that standard output and standard error are appended to.
    log: Path
    stop_signal: int = signal.SIGTERM
    #: Seconds from the stop signal to SIGKILL.
    grace_s: float = 10.0
    #: Longest time, in seconds, to wait for the end of the program's children. The children get the
    #: stop signal before this wait, and the program itself gets the signal after this wait. Use
    #: this setting for a program whose children may outlive the program. If None, the program gets
    #: the signal first, and children that outlive the program are stopped at once.
    children_grace_s: float | None = None
    #: Longest time in seconds that the program gets to finish a checkpoint. The stop signal and
    #: SIGKILL are delayed while the program writes a checkpoint. If None, the time is `grace_s`.
    save_grace_s: float | None = None
    #: Umask of the program. If None, the program inherits the umask of this process.
    umask: int | None = None
    #: Largest memory of the program and all its descendants together, in bytes. None for no limit.
    memory_limit_bytes: int | None = None

    @property
    def saves_within_s(self) -> float:
        """Longest time in seconds that the program gets to finish a checkpoint."""
        return self.grace_s if self.save_grace_s is None else self.save_grace_s

    @property
    def longest_grace_s(self) -> float:
        """Longest time in seconds from the stop signal to SIGKILL.

        The time includes the delay of SIGKILL while the program writes a checkpoint.
        """
        return max(self.grace_s, self.saves_within_s)

    @property
    def ends_within_s(self) -> float:
        """Longest time from the request to stop until the whole process tree has ended, in seconds.

        The end takes longer only if SIGKILL cannot end a process.
        """
        return (self.children_grace_s or 0.0) + self.longest_grace_s + KILL_WITHIN_S


#: Coroutine function that writes an entry for a process into this machine's registry of active
#: runs, before the process executes its program.
Register = Callable[["GuardedProcess"], Awaitable[None]]


def _start(
    name: str, numbers: Sequence[int], tag: Mapping[str, str], fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start `guardian.py` as a new process, and add its pid to `guardians`.

    Args:
        name: Name of the component, or TEMPLATE.
        numbers: The arguments FD, PIDFD and MARK of `guardian.py` (see its docstring), and INIT and
            ALIVE if the guardian process enters a PID namespace.
        tag: Variables that identify the run, for the environment of the new process.
        fds: File descriptors that the new process inherits.

    Raises:
        OSError: The process could not be started.
    """
    env = {key: os.environ[key] for key in _GUARDIAN_ENV if key in os.environ}
    with guardians_lock:
        popen = subprocess.Popen(
            [*_GUARDIAN, *map(str, numbers[:3]), name, *map(str, numbers[3:])],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**env, **tag, "MUSTER_ROLE": "guardian"},
            cwd="/",
        )
        guardians.add(popen.pid)
    return popen


class _Forked:
    """A guardian process that a `GuardianTemplate` has forked, with the methods of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> None:
        status = 0
        # If `end_orphans` has already reaped the guardian process, its exit code is lost. The
        # attribute `returncode` then becomes 0.
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class GuardianTemplate:
    """A helper process that forks guardian processes, which own the components of a run.

    Forking a guardian is ten times faster than starting a new process.

    The guardians become children of the calling process, which must be a subreaper. Call `close`
    from the thread that created this object. The helper process also ends when that thread ends.
    """

    def __init__(self, tag: Mapping[str, str]) -> None:
        """
        Args:
            tag: Variables that identify the run, for the environment of the guardians.

        Raises:
            OSError: No process could be started.
        """
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_ORDER_WITHIN_S)
        self._owes_answer = False
        with theirs:
            numbers = (theirs.fileno(), -1, tree.new_mark())
            self._popen = _start(
                TEMPLATE, numbers, {**tag, "MUSTER_COMPONENT": TEMPLATE}, numbers[:1]
            )

    def fork(self, name: str, mark: int, is_inside: bool, fds: Sequence[int]) -> _Forked:
        """Fork the guardian process of a component.

        Args:
            name: Name of the component.
            mark: Number that identifies the guardian and its descendants, see `tree.mark_own`.
            is_inside: True if the guardian enters a PID namespace.
            fds: File descriptors that the guardian gets.

        Raises:
            OSError: The helper process has ended or does not answer. Call `close` after this error,
                because the helper process may still have forked a guardian.
        """
        request = encode_message({"name": name, "mark": mark, "is_inside": is_inside})
        # Without this lock, `end_orphans` could run before the new guardian process is in
        # `guardians`, and would kill the guardian as an orphan.
        with guardians_lock:
            self._owes_answer = True
            socket.send_fds(self._channel, [request], fds)
            if not (pid := int(self._channel.recv(32) or b"0")):
                raise ChildProcessError("no guardian process could be forked")
            self._owes_answer = False
            guardians.add(pid)
        return _Forked(pid)

    def close(self) -> None:
        """End the helper process.

        If the helper process has not answered the last request, also end the guardian process that
        it may have forked for the request. May be called any number of times.
        """
        if self._popen.returncode is not None:
            return
        self._channel.close()
        self._popen.kill()
        self._popen.wait()
        with guardians_lock:
            guardians.discard(self._popen.pid)
        for _ in range(CLEAN_ROUNDS if self._owes_answer else 0):
            end_orphans()
            time.sleep(ROUND_S)


class GuardedProcess:
    """A command under its own guardian process, watched from an asyncio loop.

    `prepare` starts the guardian, and `launch` starts the command. The future `exited` resolves
    with the command's Exit. The future `empty` resolves when the command's whole process tree has
    ended. The future `ended` resolves a moment later, when the guardian has ended, too. All futures
    resolve even if the guardian is killed. If the calling process ends for any reason, the guardian
    stops the command.
    """

    def __init__(
        self,
        name: str,
        guardian: subprocess.Popen[bytes] | _Forked,
        channel: socket.socket,
        mark: int,
        is_in_namespace: bool,
        ended_processes: list[GuardedProcess] | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        #: Pid of the command in the PID namespace of this process; None before the guardian process
        #: has forked the command.
        self.pid: int | None = None
        #: Number that identifies the guardian process and its descendants, see `tree.mark_own`.
        self.mark = mark
        #: Directory of the command's cgroup v2; None if the command has no cgroup.
        self.cgroup: str | None = None
        #: Directory of the cgroup with the command's memory limit; None if there is no limit.
        self.memory_cgroup: str | None = None
        #: Pids in the last report of the guardian process: processes that survived SIGKILL, or that
        #: this user may not signal.
        self.stuck: tuple[int, ...] = ()
        #: Command lines of processes that outlived the command and did not end by themselves. The
        #: value is valid when the future `empty` is done.
        self.stragglers: tuple[str, ...] = ()
        #: True if the guardian process sent SIGKILL. The value is valid when the future `empty` is
        #: done.
        self.was_killed = False
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.empty: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        #: Resolves when processes could not be ended. Their pids are in `stuck`.
        self.has_survivors: asyncio.Future[None] = loop.create_future()
        self._is_in_namespace = is_in_namespace
        self._register: Register | None = None
        self._registering: asyncio.Task[None] | None = None
        self._guardian = guardian
        self.guardian_pid = guardian.pid
        self.guardian = ProcessId.of(guardian.pid)
        self._channel = channel
        self._buffer = b""
        self._spawned: asyncio.Future[None] = loop.create_future()
        self._leader_pidfd: int | None = None
        #: Time at which the pidfd reported the end of the command, in CLOCK_MONOTONIC seconds. The
        #: command may have ended shortly before. Infinite until the report.
        self._leader_gone_s = float("inf")
        self._ended_processes = [] if ended_processes is None else ended_processes
        #: True from the launch of the command until the guardian process reports that no process of
        #: the command's process tree remains.
        self._owes_processes = False
        self._orphan_sweep: asyncio.Task[None] | None = None
        #: Value of `Command.children_grace_s` for the launched command. None before the launch.
        self._children_grace_s: float | None = None
        self._is_to_stop = False
        self._is_to_kill = False
        loop.add_reader(channel, self._on_message)

    @classmethod
    def prepare(
        cls,
        name: str,
        *,
        tag: Mapping[str, str],
        namespace: PidNamespace | None = None,
        ended_processes: list[GuardedProcess] | None = None,
        template: GuardianTemplate | None = None,
    ) -> GuardedProcess:
        """Start a guardian process, which waits until `launch` sends the command.

        Args:
            name: Name shown in the guardian's command line, for `ps`.
            tag: Variables that identify the run, for the guardian's environment.
            namespace: PID namespace of the guardian and the command. If None, both run in the
                namespace of this process.
            ended_processes: List to which the process is appended when a pidfd reports the end of
                the process. Pass the same list for processes whose end times are compared.
            template: Helper process that forks the guardian. The guardian then has the variables of
                the helper process, and `tag` is ignored. If None, the guardian is started as a
                new process.

        Raises:
            OSError: No process could be started.
        """
        mark = tree.new_mark()
        inside = namespace.fds if namespace is not None else ()
        guardian: subprocess.Popen[bytes] | _Forked
        with contextlib.ExitStack() as stack:
            me = os.pidfd_open(os.getpid())
            stack.callback(os.close, me)
            ours, theirs = map(stack.enter_context, socket.socketpair())
            fds = [theirs.fileno(), me, *inside, *kept_fds]
            if template is None:
                guardian = _start(name, (*fds[:2], mark, *inside), tag, fds)
            else:
                guardian = template.fork(name, mark, bool(inside), fds)
            channel = socket.socket(fileno=ours.detach())
        channel.setblocking(False)
        return cls(name, guardian, channel, mark, namespace is not None, ended_processes)

    async def launch(
        self,
        command: Command,
        *,
        cgroup: str | None = None,
        memory_cgroup: str | None = None,
        register: Register | None = None,
    ) -> int:
        """Start the command. If this call is cancelled, call `stop` or `kill` to end the command.

        Args:
            command: The command.
            cgroup: Cgroup directory for the command. If the kernel refuses to put the command
                there, the command starts without a cgroup.
            memory_cgroup: Cgroup directory that limits the memory of the command. `register` must
                put the command into this cgroup. The caller removes the directory when the process
                tree has ended. If the calling process ends earlier, the guardian process removes
                the directory.
            register: Coroutine function that is called with this object and awaited before the
                command is executed. If it raises OSError, `launch` raises the error and the command
                is not executed.

        Returns:
            The pid of the command, after its program was executed.

        Raises:
            OSError: The program or its log could not be opened. No process remains.
            TimeoutError: The guardian process does not answer.
        """
        # If the guardian process has already ended, `_spawned` contains an error. Raise it.
        if self._spawned.done():
            await self._spawned
        order = {field.name: getattr(command, field.name) for field in fields(command)}
        # A program may read its working directory from the variable PWD instead of asking the
        # kernel. So set PWD, because the inherited value is the working directory of this process.
        env = {**command.env, "PWD": str(command.cwd)}
        env.pop("OLDPWD", None)
        order |= {"env": env, "cwd": str(command.cwd), "log": str(command.log)}
        order |= {"stop_signal": int(command.stop_signal), "cgroup": cgroup}
        order["memory_cgroup"] = memory_cgroup
        order["files"] = tree.FILES_AT_START
        self._register = register
        self._children_grace_s = command.children_grace_s
        if command.children_grace_s is not None:
            kept_marks.add(self.mark)
            self.empty.add_done_callback(lambda _: kept_marks.discard(self.mark))
        self.cgroup = cgroup
        self.memory_cgroup = memory_cgroup
        self._owes_processes = True
        # Block until the whole message is sent, so that no other message is sent in between. The
        # guardian process reads the message at once, unless SIGSTOP has stopped the guardian.
        self._channel.settimeout(_ORDER_WITHIN_S)
        self._channel.sendall(encode_message(order))
        self._channel.setblocking(False)
        async with asyncio.timeout(_SPAWN_WITHIN_S):
            await asyncio.shield(self._spawned)
        assert self.pid is not None
        return self.pid

    def processes(self) -> list[int]:
        """Return the pids of the command and its descendants, parents before their children.

        Returns an empty list if the guardian process, the parent of the command, has ended. After
        the end of the guardian, its pid may belong to an unrelated process.
        """
        if not self.guardian.is_alive():
            return []
        # If the command runs in a PID namespace, the process `guardian_pid` is outside the
        # namespace. The child of that process is the guardian process inside the namespace. Leave
        # out this child, because it is not part of the command.
        inner = tree.children(self.guardian_pid) if self._is_in_namespace else []
        return [pid for pid in tree.descendants(self.guardian_pid) if pid not in inner]

    def stop(self) -> None:
        """Request that the guardian process stops the command.

        The guardian sends the stop signal to the process group of the command, and SIGKILL to the
        processes that remain after the grace period. Further calls do nothing.
        """
        if not self._is_to_stop:
            self._is_to_stop = True
            self._request("stop")

    def kill(self) -> None:
        """Request that the guardian process sends SIGKILL to the whole process tree now."""
        self._is_to_kill = True
        self._request("kill")

    def delay_kill(self, for_s: float) -> None:
        """Request that the guardian process sends SIGKILL no sooner than in `for_s` seconds.

        The request has an effect only between the stop signal and SIGKILL.
        """
        self._request("delay kill", for_s=for_s)

    def abandon_guardian(self) -> None:
        """Kill a guardian process that does not answer.

        The calling process, a subreaper, then becomes the parent of the guardian's descendants and
        kills these descendants.
        """
        self._guardian.kill()

    async def end(self, within_s: float) -> tuple[int, ...]:
        """Wait for the end of the process tree and its guardian. Call `stop` or `kill` before.

        Args:
            within_s: Time limit in seconds. A guardian that has sent no report by then is killed.

        Returns:
            Pids that cannot be ended; empty if the whole process tree and the guardian have ended.
        """
        await self._wait_for_end(within_s)
        # By now, a working guardian process has ended, or has reported that processes cannot be
        # killed. A guardian that has done neither was stopped by SIGSTOP. Kill that guardian, so
        # that this process adopts and ends the descendants of the guardian.
        if not self.ended.done() and not self.stuck:
            self.abandon_guardian()
            await self._wait_for_end(KILL_WITHIN_S)
        return self.unended_pids

    async def _wait_for_end(self, within_s: float) -> None:
        """Wait until the process tree and the guardian have ended.

        The wait ends early if some processes survive SIGKILL.

        Args:
            within_s: Time limit in seconds. After this time, the method returns without an error.
        """
        reports = [self.ended, self.has_survivors]
        await asyncio.wait(reports, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)

    @property
    def unended_pids(self) -> tuple[int, ...]:
        """Pids of the processes of the process tree that have not ended.

        If only the guardian process has not ended, the value contains only the pid of the guardian.
        """
        if self.empty.done() and not self.ended.done():
            return (self.guardian_pid,)
        return self.leftover_pids

    @property
    def leftover_pids(self) -> tuple[int, ...]:
        """Pids of the processes of the process tree that have not ended.

        Empty if the whole process tree has ended. If it has not ended, but none of its processes
        can be found, the pid of the guardian process is returned.
        """
        if self.empty.done():
            return ()
        return self.stuck or tuple(self.processes()) or (self.guardian_pid,)

    def dismiss(self) -> None:
        """Close the connection to the guardian process.

        If the guardian has started a command, it stops the command. Then the guardian ends.
        """
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def _request(self, action: str, **fields: float) -> None:
        # Ignore an error: the guardian process has then ended, and `_on_guardian_gone` ends the
        # processes of the command.
        with contextlib.suppress(OSError):
            self._channel.send(encode_message({"do": action, **fields}))

    def _on_message(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, 65536, 4)
        except BlockingIOError:
            return
        except OSError:
            data = b""
            fds = []
        for fd in fds:
            self._watch_leader(fd)
        if not data:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._guardian.wait()
            with guardians_lock:
                guardians.discard(self.guardian_pid)
            self._on_guardian_gone()
            return
        messages, self._buffer = decode_messages(self._buffer + data)
        for message in messages:
            self._on_event(message)

    def _on_event(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "forked":
                if not message["is_in_cgroup"]:
                    self.cgroup = None
                self._registering = asyncio.get_running_loop().create_task(self._enter())
            case "spawned":
                _resolve(self._spawned, None)
            case "refused":
                self.pid = None
                error = OSError(message["errno"], message["message"])
                _reject(self._spawned, error)
                self._owes_processes = False
            case "exited":
                self._settle_exit(Exit.from_return_code(message["code"], message["at_monotonic_s"]))
            case "stuck":
                # List the processes again. If the guardian process is in another PID namespace, the
                # pids in its message are valid only in that namespace.
                self._report_stuck(tree.living_or_all(self.processes()) or message["pids"])
            case "empty":
                self.stuck = ()
                self._owes_processes = False
                self.stragglers = tuple(message["stragglers"])
                self.was_killed = message["is_killed"]
                _resolve(self.empty, None)

    def _report_stuck(self, pids: Sequence[int]) -> None:
        self.stuck = tuple(pids)
        _resolve(self.has_survivors, None)

    def _watch_leader(self, pidfd: int) -> None:
        """Watch the end of the command through its pidfd.

        The guardian process reports this end, too. But a guardian process that was stopped with
        SIGSTOP cannot report anything.
        """
        try:
            self.pid = _pid_of(pidfd)
        except OSError:
            os.close(pidfd)
            return
        self._leader_pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_leader_gone)

    async def _enter(self) -> None:
        try:
            if self.pid is None:
                # The guardian process has sent a pidfd of the command. The pidfd did not arrive,
                # because this process has too many open files.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if self._register is not None:
                await self._register(self)
        except Exception as error:
            _reject(self._spawned, error)
            self._request("kill")
        else:
            self._request("go")

    def _on_leader_gone(self) -> None:
        self._leader_gone_s = time.monotonic()
        self._ended_processes.append(self)
        self._forget_leader()
        asyncio.get_running_loop().call_later(_REPORT_WITHIN_S, self._on_no_report)

    def _on_no_report(self) -> None:
        if not self.exited.done():
            self.abandon_guardian()

    def _forget_leader(self) -> None:
        if self._leader_pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._leader_pidfd)
            os.close(self._leader_pidfd)
            self._leader_pidfd = None

    def _settle_exit(self, status: Exit) -> None:
        self._forget_leader()
        at_s = min(status.at_monotonic_s, self._leader_gone_s)
        _resolve(self.exited, replace(status, at_monotonic_s=at_s))
        # `earlier` contains the processes whose end was reported before the end of this process. A
        # report may be late, but the order of the reports is right. So the recorded end times of
        # the processes in `earlier` must be before the end of this process.
        earlier = self._ended_processes
        if self in earlier:
            earlier = earlier[: earlier.index(self)]
        for process in earlier:
            process._leader_gone_s = min(process._leader_gone_s, at_s - _A_MOMENT_S)

    def _on_guardian_gone(self) -> None:
        note = f"its guardian process (pid {self.guardian_pid}) was killed"
        _reject(self._spawned, ChildProcessError(note))
        # If a guardian process inside a PID namespace was killed, its zombie is now a child of this
        # process. Let the task below reap the zombie. Otherwise the kernel would not let the first
        # process of the namespace end.
        was_killed = self._is_in_namespace and (self._guardian.returncode or 0) < 0
        if not self._owes_processes and not was_killed:
            self._resolve_end()
            return
        if not self.exited.done():
            self._settle_exit(Exit.from_return_code(None, time.monotonic(), note))
        sweep = self._end_orphans() if self._children_grace_s is None else self._keep_orphans()
        self._orphan_sweep = asyncio.get_running_loop().create_task(sweep)

    async def _keep_orphans(self) -> None:
        """Reap the children of a command whose guardian process was killed, until no child remains.

        This method is used only if the children may outlive the command. When `stop` is called, the
        children get SIGTERM. Children that remain after the grace period get SIGKILL.
        """
        deadline_s = float("inf")
        clean_rounds = 0
        while clean_rounds < CLEAN_ROUNDS:
            children = [
                pid for pid in tree.children(os.getpid()) if tree.read_mark(pid) == self.mark
            ]
            if self._is_to_kill or time.monotonic() > deadline_s:
                kept_marks.discard(self.mark)
                await self._end_orphans()
                return
            if children and self._is_to_stop and deadline_s == float("inf"):
                deadline_s = time.monotonic() + (self._children_grace_s or 0.0)
                for pid in children:
                    tree.signal_with_group(pid, signal.SIGTERM, parent=os.getpid())
            for pid in children:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            clean_rounds = 0 if children else clean_rounds + 1
            await asyncio.sleep(_KEPT_ROUND_S if children else ROUND_S)
        self._resolve_end()

    async def _end_orphans(self) -> None:
        """Send SIGKILL to the descendants of a killed guardian process, until none remains.

        This process is a subreaper, so the kernel has made these descendants its children.
        """
        rounds = tree.KillRounds()
        clean_rounds = 0
        while clean_rounds < CLEAN_ROUNDS:
            is_cgroup_killed = self.cgroup is not None and cgroup.kill_all(self.cgroup)
            left = end_orphans(chases=not is_cgroup_killed)
            if self._is_in_namespace:
                # The first process of the PID namespace adopts the command's processes, so they are
                # no children of this process. Find them by the number in `mark`.
                left += [pid for pid, _ in end_marked(self.mark)]
            rounds.note_round()
            clean_rounds = 0 if left else clean_rounds + 1
            if left and rounds.are_stuck(left):
                self._report_stuck(left)
            await asyncio.sleep(rounds.pause_s if left else ROUND_S)
        self.stuck = ()
        if self.cgroup is not None:
            cgroup.remove(self.cgroup)
        self._resolve_end()

    def _resolve_end(self) -> None:
        _resolve(self.empty, None)
        _resolve(self.ended, None)


def _pid_of(pidfd: int) -> int:
    """Return the pid of the process that a pidfd refers to, in the PID namespace of this process.

    Source: pidfd_open(2), fdinfo.
    """
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as f:
        return next(int(line[4:]) for line in f if line.startswith("Pid:"))


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Read the error of the future once. Otherwise, if no caller awaits the future, asyncio logs
        # that the error was never retrieved.
        future.exception()
