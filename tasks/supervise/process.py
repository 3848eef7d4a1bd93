"""One guarded process: a component's command, its guardian, and how both end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.run.outcome import Exit
from tasks.supervise import tree

_GUARDIAN = Path(__file__).with_name("guardian.py")
#: A guardian reports its component's end in milliseconds; one that is stopped or hung never does.
_REPORT_WITHIN_S = 2.0
#: A guardian that was started answers an order in milliseconds, on a machine out of memory later.
_SPAWN_WITHIN_S = 30.0
_ORDER_WITHIN_S = 2.0
_ORPHAN_ROUND_S = 0.02
#: After so many rounds in a row without an orphan there is none: one that hides by forking and
#: exiting leaves its dead to this process all the while.
_CLEAN_ROUNDS = 3
_GUARDIAN_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")

#: The guardians of this process that are not reaped yet; under the lock while one is made.
_guardians: set[int] = set()
_guardians_lock = threading.Lock()


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


class GuardedProcess:
    """A command under a guardian of its own, watched from an asyncio loop.

    `prepare` starts the guardian, `launch` the command. After that, `exited` resolves with the
    command's Exit and `empty` once nothing of its tree is left, nor of the guardian; both resolve
    whatever happens to the guardian. Closing the loop's process, by any signal, makes the guardian
    stop the command.
    """

    def __init__(self, name: str, popen: subprocess.Popen[bytes], channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.pid: int | None = None
        #: Pids that outlived SIGKILL, as last reported.
        self.stuck: tuple[int, ...] = ()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.empty: asyncio.Future[None] = loop.create_future()
        self._popen = popen
        self._channel = channel
        self._buffer = b""
        self._spawned: asyncio.Future[int] = loop.create_future()
        self._leader_pidfd: int | None = None
        # An order was sent, and nothing has said yet that there is no process of it any more.
        self._owes_processes = False
        self._orphan_sweep: asyncio.Task[None] | None = None
        loop.add_reader(channel, self._on_message)

    @classmethod
    def prepare(cls, name: str, *, tag: Mapping[str, str]) -> GuardedProcess:
        """A guardian that waits for its order.

        Args:
            name: shown in its command line, for who reads `ps`.
            tag: identity of the run, put into the guardian's environment.

        Raises: OSError, when no process can be started.
        """
        ours, theirs = socket.socketpair()
        env = {key: os.environ[key] for key in _GUARDIAN_ENV if key in os.environ}
        with theirs:
            fd, me = str(theirs.fileno()), str(os.getpid())
            try:
                with _guardians_lock:
                    popen = subprocess.Popen(
                        [sys.executable, "-I", "-S", str(_GUARDIAN), fd, me, name],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                        env={**env, **tag, "MUSTER_ROLE": "guardian"},
                        cwd="/",
                    )
                    _guardians.add(popen.pid)
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return cls(name, popen, ours)

    @property
    def guardian_pid(self) -> int:
        return self._popen.pid

    async def launch(self, command: Command) -> int:
        """Start the command.

        Returns: its pid, once the program runs. Raises: OSError, as exec or the log's opening gave
        it, with nothing left behind; TimeoutError, when the guardian does not answer. A cancel
        leaves the process to `stop` or `kill`.
        """
        if self._spawned.done():  # The guardian has gone before it was needed.
            return await self._spawned
        order: dict[str, Any] = {
            "argv": list(command.argv),
            "env": dict(command.env),
            "cwd": str(command.cwd),
            "log": str(command.log),
            "stop_signal": int(command.stop_signal),
            "grace_s": command.grace_s,
        }
        self._owes_processes = True
        # Whole, before anything else is said. The guardian reads at once, unless it is stopped.
        self._channel.settimeout(_ORDER_WITHIN_S)
        self._channel.sendall(json.dumps(order).encode() + b"\n")
        self._channel.setblocking(False)
        async with asyncio.timeout(_SPAWN_WITHIN_S):
            self.pid = await asyncio.shield(self._spawned)
        return self.pid

    def stop(self) -> None:
        """Ask: the stop signal to the group, SIGKILL to all that is left after the grace period."""
        self._say("stop")

    def kill(self) -> None:
        """End the whole tree now."""
        self._say("kill")

    def abandon_guardian(self) -> None:
        """End a guardian that does not answer: what it guarded comes to us, and is ended."""
        self._popen.kill()

    def dismiss(self) -> None:
        """Let a guardian go that never got an order. With a command running, this stops it."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def _say(self, what: str) -> None:
        # A guardian that is gone has its tree ended by `_on_guardian_lost`.
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps({"do": what}).encode() + b"\n")

    def _on_message(self) -> None:
        try:
            data = self._channel.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._popen.wait()
            with _guardians_lock:
                _guardians.discard(self.guardian_pid)
            self._on_guardian_gone()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._on_event(json.loads(line))

    def _on_event(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "spawned":
                self._watch_leader(message["pid"])
                _resolve(self._spawned, message["pid"])
            case "refused":
                error = OSError(message["errno"], message["message"])
                _reject(self._spawned, error)
                self._owes_processes = False
            case "exited":
                self._settle_exit(
                    Exit(
                        exit_code=message["exit_code"],
                        signal=message["signal"],
                        at_monotonic_s=message["at_monotonic_s"],
                    )
                )
            case "stuck":
                self.stuck = tuple(message["pids"])
            case "empty":
                self.stuck = ()
                self._owes_processes = False

    def _watch_leader(self, pid: int) -> None:
        """See the command's end even when its guardian is stopped and reports nothing."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            if tree.parent_of(pid) != self.guardian_pid:
                os.close(pidfd)
                return
            self._leader_pidfd = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._on_leader_gone)

    def _on_leader_gone(self) -> None:
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
        _resolve(self.exited, status)

    def _on_guardian_gone(self) -> None:
        note = f"its guardian (pid {self.guardian_pid}) was killed"
        _reject(self._spawned, ChildProcessError(note))
        if not self._owes_processes:
            _resolve(self.empty, None)
            return
        if not self.exited.done():
            self._settle_exit(
                Exit(exit_code=None, signal=None, at_monotonic_s=time.monotonic(), note=note)
            )
        self._orphan_sweep = asyncio.get_running_loop().create_task(self._end_orphans())

    async def _end_orphans(self) -> None:
        """SIGKILL what the dead guardian left, which came to this process, a subreaper."""
        since = time.monotonic()
        clean_rounds = 0
        while clean_rounds < _CLEAN_ROUNDS:
            left = end_orphans()
            clean_rounds = 0 if left else clean_rounds + 1
            if time.monotonic() - since > 5.0:
                self.stuck = tuple(left)
            await asyncio.sleep(_ORPHAN_ROUND_S)
        self.stuck = ()
        _resolve(self.empty, None)


def end_orphans() -> list[int]:
    """One round against what dead guardians have left to this process.

    What this process has started itself, and what came of that, is never touched.

    Returns: the orphans that were there, dead or alive.
    """
    found: set[int] = set()
    own_mark = tree.mark_of(os.getpid())

    def is_orphan(child: int) -> bool:
        return child not in _guardians and tree.mark_of(child) not in (own_mark, b"")

    def reap() -> bool:
        orphans = [child for child in tree.children(os.getpid()) if is_orphan(child)]
        found.update(orphans)
        for child in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        return not orphans

    with _guardians_lock:
        if not reap():
            tree.kill_below_once(reap, is_orphan)
    return sorted(found)


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # Nobody may be waiting for it.
