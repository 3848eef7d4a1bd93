"""One guarded process: a component's command, its guardian, and how both end."""

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
from tasks.processes.guardian import TEMPLATE, packed, unpacked
from tasks.processes.identity import ProcessId
from tasks.record.outcome import Exit

#: What each guardian keeps open as long as it lives: the locks of what its component was given, so
#: that what a killed process leaves running has that until it, too, has ended.
kept_fds: set[int] = set()

#: What follows is its arguments: the file's own path shows in `ps` what it is.
_GUARDIAN = (
    *(sys.executable, "-I", "-S", "-c"),
    "import sys; del sys.argv[0]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
    "import guardian; guardian.main()",
    str(Path(__file__).with_name("guardian.py")),
)
#: A guardian reports its component's end in milliseconds; one that is stopped or hung never does.
_REPORT_WITHIN_S = 2.0
#: A guardian that was started answers an order in milliseconds, on a machine out of memory later.
_SPAWN_WITHIN_S = 30.0
_ORDER_WITHIN_S = 2.0
#: What a guardian needs after the grace period to kill, to reap, and to report what is stuck.
KILL_WITHIN_S = 8.0
#: Seconds between two looks at children whose guardian was killed.
_KEPT_ROUND_S = 0.2
#: Between two ends of which the order alone is known.
_A_MOMENT_S = 1e-6
_GUARDIAN_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a guardian is ordered to start, and how to stop it."""

    argv: tuple[str, ...]
    #: The whole environment of the process; nothing else is inherited.
    env: Mapping[str, str]
    cwd: Path
    #: Standard output and error, appended to.
    log: Path
    stop_signal: int = signal.SIGTERM
    #: Seconds from the stop signal to SIGKILL.
    grace_s: float = 10.0
    #: Set for a program whose children outlive it: seconds that they have at a stop, before the
    #: program itself gets its signal. None: whatever the program leaves is ended at once.
    children_grace_s: float | None = None

    @property
    def ends_within_s(self) -> float:
        """Seconds from the order to stop until nothing may be left but what SIGKILL can't end."""
        return (self.children_grace_s or 0.0) + self.grace_s + KILL_WITHIN_S


#: Notes a process where others find it, before it executes its program.
Register = Callable[["GuardedProcess"], Awaitable[None]]


def _start(
    name: str, numbers: Sequence[int], tag: Mapping[str, str], fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """A process of `guardian.py`, which is noted as one of ours. Raises: OSError."""
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
    """A guardian that was forked for this process: what a Popen is of one that was started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> None:
        status = 0
        with contextlib.suppress(ChildProcessError):  # Somebody else has reaped it.
            _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class GuardianTemplate:
    """A process that guardians are forked from, which takes a tenth of what a start of one takes.

    They become children of this process, which must be a subreaper. Close it, from the thread that
    made it, with whose end it ends too.
    """

    def __init__(self, tag: Mapping[str, str]) -> None:
        """
        Args:
            tag: identity of the run, put into the environment of the guardians.

        Raises: OSError, when no process can be started.
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
        """Raises: OSError, when it has ended, or does not answer; then close it."""
        request = packed({"name": name, "mark": mark, "is_inside": is_inside})
        # No orphan until it is known to be one of ours.
        with guardians_lock:
            self._owes_answer = True
            socket.send_fds(self._channel, [request], fds)
            if not (pid := int(self._channel.recv(32) or b"0")):
                raise ChildProcessError("no guardian was forked")
            self._owes_answer = False
            guardians.add(pid)
        return _Forked(pid)

    def close(self) -> None:
        """End it, and a guardian that it may just have forked; any number of times."""
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
    """A command under a guardian of its own, watched from an asyncio loop.

    `prepare` starts the guardian, `launch` the command. After that, `exited` resolves with the
    command's Exit and `empty` once nothing of its tree is left, nor of the guardian; both resolve
    whatever happens to the guardian. Closing the loop's process, by any signal, makes the guardian
    stop the command.
    """

    def __init__(
        self,
        name: str,
        guardian: subprocess.Popen[bytes] | _Forked,
        channel: socket.socket,
        mark: int,
        is_in_namespace: bool,
        gone: list[GuardedProcess] | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        #: Of the command's process, as seen from this one, from its fork on.
        self.pid: int | None = None
        #: Of all that will descend from it.
        self.mark = mark
        #: The cgroup v2 directory that it is in, where it is in one.
        self.cgroup: str | None = None
        #: Pids that outlived SIGKILL, as last reported.
        self.stuck: tuple[int, ...] = ()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.empty: asyncio.Future[None] = loop.create_future()
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
        #: When its pidfd said that it has ended, CLOCK_MONOTONIC seconds; no report is later.
        self._leader_gone_s = float("inf")
        self._gone = [] if gone is None else gone
        # An order was sent, and nothing has said yet that there is no process of it any more.
        self._owes_processes = False
        self._orphan_sweep: asyncio.Task[None] | None = None
        #: See `Command.children_grace_s`.
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
        gone: list[GuardedProcess] | None = None,
        template: GuardianTemplate | None = None,
    ) -> GuardedProcess:
        """A guardian that waits for its order.

        Args:
            name: shown in its command line, for who reads `ps`.
            tag: identity of the run, put into the guardian's environment.
            namespace: where guardian and command are to live; None: in ours.
            gone: takes those whose pidfd has said that they have ended, in the order of that: one
                list for all whose ends are compared.
            template: what to fork it from, with the tag of that; None: it is started.

        Raises: OSError, when no process can be started.
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
        return cls(name, guardian, channel, mark, namespace is not None, gone)

    async def launch(
        self, command: Command, *, cgroup: str | None = None, register: Register | None = None
    ) -> int:
        """Start the command.

        Args:
            cgroup: where to put it; after a failure to, it has none.
            register: given this, with its pid, before the command is executed, which waits for it;
                an OSError that it raises is raised here, and the command is not executed.

        Returns: its pid, once the program runs. Raises: OSError, as exec or the log's opening gave
        it, with nothing left behind; TimeoutError, when the guardian does not answer. A cancel
        leaves the process to `stop` or `kill`.
        """
        if self._spawned.done():  # The guardian has gone before it was needed.
            await self._spawned
        order = {field.name: getattr(command, field.name) for field in fields(command)}
        order |= {"env": dict(command.env), "cwd": str(command.cwd), "log": str(command.log)}
        order |= {"stop_signal": int(command.stop_signal), "cgroup": cgroup}
        order["files"] = tree.FILES_AT_START
        self._register = register
        self._children_grace_s = command.children_grace_s
        if command.children_grace_s is not None:
            kept_marks.add(self.mark)
            self.empty.add_done_callback(lambda _: kept_marks.discard(self.mark))
        self.cgroup = cgroup
        self._owes_processes = True
        # Whole, before anything else is said. The guardian reads at once, unless it is stopped.
        self._channel.settimeout(_ORDER_WITHIN_S)
        self._channel.sendall(packed(order))
        self._channel.setblocking(False)
        async with asyncio.timeout(_SPAWN_WITHIN_S):
            await asyncio.shield(self._spawned)
        assert self.pid is not None
        return self.pid

    def processes(self) -> list[int]:
        """Its whole tree, parents first; nothing once the guardian is gone, whose pid may be
        another's then."""
        if not self.guardian.is_alive():
            return []
        # In a PID namespace the guardian is a child of the process that we started.
        inner = tree.children(self.guardian_pid) if self._is_in_namespace else []
        return [pid for pid in tree.descendants(self.guardian_pid) if pid not in inner]

    def stop(self) -> None:
        """Ask: the stop signal to the group, SIGKILL to all that is left after the grace period."""
        self._is_to_stop = True
        self._say("stop")

    def kill(self) -> None:
        """End the whole tree now."""
        self._is_to_kill = True
        self._say("kill")

    def abandon_guardian(self) -> None:
        """End a guardian that does not answer: what it guarded comes to us, and is ended."""
        self._guardian.kill()

    async def end(self, within_s: float) -> tuple[int, ...]:
        """Wait for the end of one that was told to end.

        Args:
            within_s: then a guardian that has said nothing is taken to be stopped.

        Returns: pids of what can't be ended; empty when nothing is left, nor of the guardian.
        """
        await asyncio.wait([self.empty], timeout=within_s)
        # A guardian that works has reported what is stuck by now. One that is itself stopped
        # reports nothing: without it, what it guarded comes to this process, and is ended.
        if not self.empty.done() and not self.stuck:
            self.abandon_guardian()
            await asyncio.wait([self.empty], timeout=KILL_WITHIN_S)
        if self.empty.done():
            return ()
        return self.stuck or tuple(self.processes()) or (self.guardian_pid,)

    def dismiss(self) -> None:
        """Let a guardian go that never got an order. With a command running, this stops it."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def _say(self, what: str) -> None:
        # A guardian that is gone has its tree ended by `_on_guardian_lost`.
        with contextlib.suppress(OSError):
            self._channel.send(packed({"do": what}))

    def _on_message(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, 65536, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
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
        messages, self._buffer = unpacked(self._buffer + data)
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
                # The guardian's own numbers are those of its namespace.
                self.stuck = tuple(self.processes()) or tuple(message["pids"])
            case "empty":
                self.stuck = ()
                self._owes_processes = False

    def _watch_leader(self, pidfd: int) -> None:
        """See the command's end even when its guardian is stopped and reports nothing."""
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
                # Its pidfd did not arrive: this process has no room for one more file.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if self._register is not None:
                await self._register(self)
        except Exception as error:
            _reject(self._spawned, error)
            self._say("kill")
        else:
            self._say("go")

    def _on_leader_gone(self) -> None:
        self._leader_gone_s = time.monotonic()
        self._gone.append(self)
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
        # The kernel tells of ends in their order, but we may hear of them late: those that it told
        # of before were earlier than what this one's guardian says of this one.
        before = self._gone[: self._gone.index(self)] if self in self._gone else self._gone
        for process in before:
            process._leader_gone_s = min(process._leader_gone_s, at_s - _A_MOMENT_S)

    def _on_guardian_gone(self) -> None:
        note = f"its guardian (pid {self.guardian_pid}) was killed"
        _reject(self._spawned, ChildProcessError(note))
        # One that was killed in a namespace comes to this process, and keeps the namespace's first
        # process from its end until it is reaped.
        was_killed = self._is_in_namespace and (self._guardian.returncode or 0) < 0
        if not self._owes_processes and not was_killed:
            _resolve(self.empty, None)
            return
        if not self.exited.done():
            self._settle_exit(Exit.from_return_code(None, time.monotonic(), note))
        sweep = self._end_orphans() if self._children_grace_s is None else self._keep_orphans()
        self._orphan_sweep = asyncio.get_running_loop().create_task(sweep)

    async def _keep_orphans(self) -> None:
        """Do what the dead guardian did for children that outlive their program: reap them, and
        at a stop give them their time."""
        deadline_s = float("inf")
        clean_rounds = 0
        while clean_rounds < CLEAN_ROUNDS:
            children = [pid for pid in tree.children(os.getpid()) if tree.mark_of(pid) == self.mark]
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
        _resolve(self.empty, None)

    async def _end_orphans(self) -> None:
        """SIGKILL what the dead guardian left, which came to this process, a subreaper."""
        since = time.monotonic()
        clean_rounds = 0
        while clean_rounds < CLEAN_ROUNDS:
            if self.cgroup is not None:
                with contextlib.suppress(OSError):
                    cgroup.kill(self.cgroup)
            left = end_orphans()
            if self._is_in_namespace:
                # They come to its first process; only the guardian itself comes to this one.
                left += [pid for pid, _ in end_marked(self.mark)]
            clean_rounds = 0 if left else clean_rounds + 1
            if time.monotonic() - since > 5.0:
                self.stuck = tuple(left)
            await asyncio.sleep(ROUND_S)
        self.stuck = ()
        if self.cgroup is not None:
            cgroup.remove(self.cgroup)
        _resolve(self.empty, None)


def _pid_of(pidfd: int) -> int:
    """The pid of a pidfd, as seen from here, whatever namespace it came from.

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
        future.exception()  # Nobody may be waiting for it.
