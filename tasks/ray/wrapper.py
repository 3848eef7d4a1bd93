"""Runs the driver of a Ray job, and stays until nothing of its process tree is left.

    exec python -I -S -c BOOTSTRAP --grace S --signal N --stragglers S -- COMMAND ...

It is shipped with the job, as `__main__.py` of a directory with `tree.py` beside it, and runs on
whatever interpreter Ray itself runs on there: the standard library only. Ray sees two processes
above the driver. The *front* is the one that Ray started, and has the status that Ray reports.
Ray's watcher sends SIGKILL to its process group when the job's supervisor has died, so the work
is done by the *keeper*, in a session of its own. Both adopt what loses its parent: whichever of
them is killed, the other ends the tree.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING or __name__ != "__main__":
    from tasks.processes import tree
else:
    import tree

#: What Ray or a person may send to the front or the keeper.
_TAKEN = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
#: signo, errno, code, pid. Source: signalfd(2), struct signalfd_siginfo, 128 bytes.
_SIGINFO = struct.Struct("=IiiI112x")
_PR_SET_DUMPABLE = 4
#: How often a tree that is being killed is looked at again.
_KILL_ROUND_S = 0.02
#: A child this young may not have stood in the listing that Ray signalled.
_YOUNG_S = 0.5
_STOP = b"s"
_TOLD = b"t"


class Signals:
    """The signals of this process, read from an fd: who sent one is known, unlike in a handler."""

    def __init__(self) -> None:
        # Ray may leave SIGCHLD ignored: then the kernel would discard every exit status.
        for signum in _TAKEN:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
        bits = sum(1 << (signum - 1) for signum in _TAKEN)
        mask = ctypes.create_string_buffer(bits.to_bytes(128, "little"), 128)
        self.fd = ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "signalfd")
        os.set_blocking(self.fd, False)

    def read(self) -> list[tuple[int, int]]:
        """`(signal, sender's pid)` of all that wait."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                signum, _, _, pid = _SIGINFO.unpack(os.read(self.fd, _SIGINFO.size))
                found.append((signum, pid))
        return found


def end_like(status: int) -> None:
    """End this process as the one with this wait status ended. Does not return."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    # Its core was dumped, if any was wanted.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    with contextlib.suppress(OSError):  # SIGKILL takes no disposition.
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def kill_rest() -> None:
    """End everything below this process; returns once the kernel says that nothing is left."""
    while not tree.reap_all()[1]:
        tree.kill_below_once(lambda: tree.reap_all()[1])
        time.sleep(_KILL_ROUND_S)


def run_front(options: argparse.Namespace, argv: list[str], env: dict[str, str]) -> None:
    """Stand for the driver before Ray. Does not return."""
    ray_pid = os.getppid()
    ray = os.pidfd_open(ray_pid)
    signals = Signals()
    orders, giver = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(giver)
        os.close(signals.fd)
        os.setsid()
        tree.become_subreaper()
        Keeper(options, argv, env, orders, ray, ray_pid).run()
    os.close(orders)
    tree.become_subreaper()
    poll = select.poll()
    poll.register(signals.fd, select.POLLIN)
    poll.register(ray, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == ray:
                # The keeper sees the end of the pipe as well as Ray's.
                poll.unregister(ray)
                os.close(giver)
                giver = -1
        for signum, sender in signals.read():
            if signum != signal.SIGCHLD and giver >= 0:
                with contextlib.suppress(BrokenPipeError):
                    os.write(giver, _TOLD if sender == ray_pid else _STOP)
        statuses, _ = tree.reap_all()
        if pid in statuses:
            kill_rest()
            end_like(statuses[pid])


class Keeper:
    """Starts the command, and ends all that descends from it."""

    def __init__(
        self,
        options: argparse.Namespace,
        argv: list[str],
        env: dict[str, str],
        orders: int,
        ray: int,
        ray_pid: int,
    ) -> None:
        """
        Args:
            orders: read end of the front's pipe, which ends when the front does.
            ray: pidfd of Ray's supervisor of the job.
        """
        self._options = options
        self._orders = orders
        self._ray = ray
        self._ray_pid = ray_pid
        self._signals = Signals()
        self._status: int | None = None
        self._kill_at: float | None = None
        self._is_stopping = False
        self._leader = spawn(argv, env)
        self._born = time.monotonic()

    def run(self) -> None:
        """Stay until nothing is left, and end as the command did. Does not return."""
        poll = select.poll()
        for fd in (self._signals.fd, self._orders, self._ray):
            poll.register(fd, select.POLLIN)
        while not self._reap():
            for fd, _ in poll.poll(self._timeout_ms()):
                if fd == self._ray:
                    poll.unregister(fd)
                    self._kill_at = time.monotonic()
                elif fd == self._orders:
                    order = os.read(fd, 4096)
                    if not order:
                        poll.unregister(fd)
                        self._kill_at = time.monotonic()
                    else:
                        self._stop(is_told=_STOP not in order)
            for signum, sender in self._signals.read():
                if signum != signal.SIGCHLD:
                    self._stop(is_told=sender == self._ray_pid)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                tree.kill_below_once(lambda: self._reap())
        assert self._status is not None
        end_like(self._status)

    def _timeout_ms(self) -> float | None:
        if self._kill_at is None:
            return None
        return max(_KILL_ROUND_S, self._kill_at - time.monotonic()) * 1000 + 1

    def _reap(self) -> bool:
        statuses, is_empty = tree.reap_all()
        if self._leader in statuses:
            self._status = statuses[self._leader]
            if not is_empty and not self._is_stopping:
                # Nobody else asks the rest of its tree to leave.
                tree.signal_descendants(os.getpid(), self._options.signal)
                self._end_within(self._options.stragglers)
        return is_empty

    def _end_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _stop(self, *, is_told: bool) -> None:
        """
        Args:
            is_told: Ray sends its stop signal to each process of the tree by itself. A second
                one would interrupt the clean-up that the first began.
        """
        if self._is_stopping:
            return
        self._is_stopping = True
        self._end_within(self._options.grace)
        is_known_to_ray = is_told and time.monotonic() - self._born > _YOUNG_S
        ray_sends = os.environ.get("RAY_JOB_STOP_SIGNAL", "SIGTERM")
        is_the_same = ray_sends == signal.Signals(self._options.signal).name
        if self._status is None and not (is_known_to_ray and is_the_same):
            # Not reaped, so its number, and that of its group, can't belong to another.
            tree.stop_group(self._leader, self._options.signal)


def spawn(argv: list[str], env: dict[str, str]) -> int:
    """Start the command. Does not return where it can't be executed: says why, in one line, and
    ends with 127 or 126, as a shell does."""
    try:
        return tree.spawn(argv, env)
    except OSError as error:
        number = error.errno or 0
    text = f"muster: cannot execute {argv[0]!r}: {os.strerror(number)}"
    if number == errno.ENOENT:
        text += f"; looked for in {os.getcwd()} and PATH={env.get('PATH', '')}"
    os.write(2, f"{text}\n".encode(errors="replace"))
    os._exit(127 if number in (errno.ENOENT, errno.ENOTDIR) else 126)


def command_environment(package: str) -> dict[str, str]:
    """The environment of the command: with the programs of Ray's own environment first on its
    path, as in an activated one, and without a trace of this wrapper, which a driver's own
    `runtime_env` could collide with.
    """
    env = dict(os.environ)
    shipped = os.path.dirname(os.path.abspath(package))
    paths = [path for path in env.pop("PYTHONPATH", "").split(":") if path]
    if paths := [path for path in paths if os.path.abspath(path) != shipped]:
        env["PYTHONPATH"] = ":".join(paths)
    given: dict[str, str] = {}
    with contextlib.suppress(KeyError, ValueError, AttributeError):
        config = json.loads(env["RAY_JOB_CONFIG_JSON_ENV_VAR"])
        given = config["runtime_env"].get("env_vars") or {}
        # Nobody but us names modules of the job's own runtime_env.
        config["runtime_env"].pop("py_modules", None)
        env["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(config)
    programs = programs_of_ray(os.getppid())
    if programs and "PATH" not in given:
        env["PATH"] = f"{programs}:{env.get('PATH', os.defpath)}"
    return env


def programs_of_ray(pid: int) -> str:
    """`.../bin` of the environment that a process has loaded Ray from; empty where not found."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as f:
        for line in f:
            before, found, _ = line.partition(b"/ray/_raylet")
            if found:
                packages = os.fsdecode(before[before.index(b"/") :])
                # PREFIX/lib/python3.11/site-packages
                programs = os.path.join(os.path.dirname(packages), "..", "..", "bin")
                programs = os.path.normpath(programs)
                return programs if os.path.isdir(programs) else ""
    return ""


def main() -> None:
    end = sys.argv.index("--")
    own, argv = sys.argv[1:end], sys.argv[end + 1 :]
    parser = argparse.ArgumentParser()
    for name, kind in (("--grace", float), ("--signal", int), ("--stragglers", float)):
        parser.add_argument(name, type=kind, required=True)
    options = parser.parse_args(own)
    # Given to runpy as a directory, it finds its own modules there first.
    run_front(options, argv, command_environment(sys.path[0]))


if __name__ == "__main__":
    main()
