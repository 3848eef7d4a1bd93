"""Run the command of a Ray job, and wait until the command's whole process tree has ended.

    exec python -I -S -c BOOTSTRAP --grace S --signal N --stragglers S -- COMMAND ...

Muster ships this file with each Ray job, as `__main__.py` of a directory that also contains
`tree.py`. The file runs with Ray's Python interpreter on the node, so it uses only the standard
library.

The wrapper consists of two processes between Ray's job supervisor and the command:

- The *front* is the process that Ray has started. Ray reports the exit status of the front.
- The *keeper* starts the command and ends the command's process tree. The keeper runs in its own
  session, because Ray kills the front's process group with SIGKILL if the job supervisor dies.

Both processes are subreapers: they adopt orphaned descendants. If the front or the keeper is
killed, the remaining process kills the process tree.
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

#: Signals to which both processes of the wrapper program react. Ray or a user may send these
#: signals.
_HANDLED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
#: Layout of a message from a signalfd, with the fields signo, errno, code and pid.
#: Source: signalfd(2), struct signalfd_siginfo, 128 bytes.
_SIGINFO = struct.Struct("=IiiI112x")
#: Number of the prctl option PR_SET_DUMPABLE. Source: prctl(2).
_PR_SET_DUMPABLE = 4
#: If the command has run for less than this number of seconds, the keeper process sends the stop
#: signal even if Ray has sent its own stop signal. Ray first lists the processes of the job and
#: then sends the signal, so a process that starts after the listing gets no signal from Ray.
_YOUNG_S = 0.5
#: The front process sends this message to the keeper process to stop the command. The message is
#: used if the stop was not requested by Ray.
_STOP = b"s"
#: The front process sends this message to the keeper process to stop the command. The message is
#: used if Ray requested the stop. Ray then also sends its stop signal to every process of the job.
_STOP_BY_RAY = b"t"


class Signals:
    """Reads the signals of this process, and the pid of each signal's sender, from a signalfd."""

    def __init__(self) -> None:
        # Ray may start this process with SIGCHLD ignored. The kernel would then discard the exit
        # status of every child, so reset the signals to their default action.
        for signum in _HANDLED_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        bits = sum(1 << (signum - 1) for signum in _HANDLED_SIGNALS)
        mask = ctypes.create_string_buffer(bits.to_bytes(128, "little"), 128)
        self.fd = ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "signalfd")
        os.set_blocking(self.fd, False)

    def read(self) -> list[tuple[int, int]]:
        """Return a pair (signal number, pid of the sender) for each pending signal."""
        pending = []
        with contextlib.suppress(BlockingIOError):
            while True:
                signum, _, _, pid = _SIGINFO.unpack(os.read(self.fd, _SIGINFO.size))
                pending.append((signum, pid))
        return pending


def end_like(status: int) -> None:
    """End this process with the exit code or the signal of another process. Does not return.

    Args:
        status: Wait status of the other process, as `os.waitpid` returns it.
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    # Disable core dumps, because a core dump of this wrapper process would not show why the command
    # has crashed.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Ignore the error for SIGKILL, whose action cannot be set. SIGKILL always ends the process.
    with contextlib.suppress(OSError):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def kill_rest() -> None:
    """Kill all descendants of this process, and return when this process has no child left."""
    rounds = tree.KillRounds()
    while not tree.reap_all()[1]:
        tree.kill_below_once(lambda: tree.reap_all()[1])
        rounds.note_round()
        time.sleep(rounds.pause_s)


def run_front(options: argparse.Namespace, argv: list[str], env: dict[str, str]) -> None:
    """Run the front process of the wrapper, which Ray treats as the process of the job.

    The front process starts the keeper process, which runs the command. The front process forwards
    stop requests to the keeper, and ends with the exit code or the signal of the keeper. This
    function does not return.

    Args:
        options: Parsed arguments of this program.
        argv: The command.
        env: Environment of the command.
    """
    ray_pid = os.getppid()
    ray = os.pidfd_open(ray_pid)
    signals = Signals()
    read_end, write_end = os.pipe()
    keeper_pid = os.fork()
    if keeper_pid == 0:
        os.close(write_end)
        os.close(signals.fd)
        os.setsid()
        tree.become_subreaper()
        Keeper(options, argv, env, read_end, ray, ray_pid).run()
    os.close(read_end)
    tree.become_subreaper()
    poll = select.poll()
    poll.register(signals.fd, select.POLLIN)
    poll.register(ray, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == ray:
                # Ray's job supervisor has died. Close the pipe to the keeper process. The keeper
                # then kills the process tree of the command.
                poll.unregister(ray)
                os.close(write_end)
                write_end = -1
        for signum, sender in signals.read():
            if signum != signal.SIGCHLD and write_end >= 0:
                with contextlib.suppress(BrokenPipeError):
                    os.write(write_end, _STOP_BY_RAY if sender == ray_pid else _STOP)
        statuses, _ = tree.reap_all()
        if keeper_pid in statuses:
            kill_rest()
            end_like(statuses[keeper_pid])


class Keeper:
    """The wrapper's second process. It starts the command and ends the command's descendants.

    The keeper is a child of the front process, which Ray treats as the process of the job.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        argv: list[str],
        env: dict[str, str],
        orders: int,
        ray: int,
        ray_pid: int,
    ) -> None:
        """Create the keeper, and start the command as its child process.

        Args:
            options: Parsed arguments of this program.
            argv: The command.
            env: Environment of the command.
            orders: Read end of the pipe over which the front process sends messages. The pipe
                closes when the front process ends.
            ray: Pidfd of the job supervisor, the Ray process that has started the front process.
            ray_pid: Process id of the job supervisor.
        """
        self._options = options
        self._orders = orders
        self._ray = ray
        self._ray_pid = ray_pid
        self._signals = Signals()
        #: Wait status of the command, or None while it runs.
        self._status: int | None = None
        #: Time in CLOCK_MONOTONIC seconds at which this process begins to kill the process tree of
        #: the command. None if the process tree is not being ended.
        self._kill_at: float | None = None
        #: Decides when SIGKILL is sent to the process tree again. None before the first SIGKILL.
        self._kill_rounds: tree.KillRounds | None = None
        #: True if the command was asked to stop.
        self._is_stopping = False
        self._command_pid = spawn(argv, env)
        self._started_s = time.monotonic()

    def run(self) -> None:
        """Wait until the process tree is empty, and then end this process.

        This process ends with the exit code or the signal of the command. Does not return.
        """
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
                        self._stop(is_sent_by_ray=_STOP not in order)
            for signum, sender in self._signals.read():
                if signum != signal.SIGCHLD:
                    self._stop(is_sent_by_ray=sender == self._ray_pid)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_once()
        assert self._status is not None
        end_like(self._status)

    def _timeout_ms(self) -> float | None:
        """Return the longest wait for the next event in milliseconds, or None for no limit."""
        if self._kill_rounds is not None:
            return self._kill_rounds.pause_s * 1000 + 1
        if self._kill_at is None:
            return None
        return max(0.0, self._kill_at - time.monotonic()) * 1000 + 1

    def _kill_once(self) -> None:
        """Send SIGKILL to the whole process tree.

        Do nothing if the pause after the previous SIGKILL has not ended yet.
        """
        self._kill_rounds = self._kill_rounds or tree.KillRounds()
        if self._kill_rounds.is_due():
            tree.kill_below_once(self._reap)
            self._kill_rounds.note_round()

    def _reap(self) -> bool:
        """Reap children that have ended. Return True if the process tree is empty."""
        statuses, is_empty = tree.reap_all()
        if self._command_pid in statuses:
            self._status = statuses[self._command_pid]
            if not is_empty and not self._is_stopping:
                # The command has ended by itself. Send the stop signal to its descendants.
                tree.signal_descendants(os.getpid(), self._options.signal)
                self._end_within(self._options.stragglers)
        return is_empty

    def _end_within(self, seconds: float) -> None:
        """Schedule the kill of the process tree. A kill that is already scheduled is never delayed.

        Args:
            seconds: Delay until the kill.
        """
        deadline = time.monotonic() + seconds
        self._kill_at = deadline if self._kill_at is None else min(deadline, self._kill_at)

    def _stop(self, *, is_sent_by_ray: bool) -> None:
        """Send the stop signal to the command, and start the command's grace period.

        Args:
            is_sent_by_ray: True if Ray requested the stop. Ray then also sends its stop signal to
                every process of the job. If Ray's stop signal equals the command's stop signal,
                this method sends no signal, because a second signal could interrupt the command's
                cleanup.
        """
        if self._is_stopping:
            return
        self._is_stopping = True
        self._end_within(self._options.grace)

        has_rays_signal = is_sent_by_ray and time.monotonic() - self._started_s > _YOUNG_S
        rays_signal_name = os.environ.get("RAY_JOB_STOP_SIGNAL", "SIGTERM")
        is_same_signal = rays_signal_name == signal.Signals(self._options.signal).name
        if self._status is None and not (has_rays_signal and is_same_signal):
            # The command has not been reaped, so the kernel cannot have given its pid to another
            # process.
            tree.stop_group(self._command_pid, self._options.signal)


def spawn(argv: list[str], env: dict[str, str]) -> int:
    """Start the command and return its pid.

    If the command cannot be executed, print one line with the reason, and exit with code 126 or 127
    as a shell does.
    """
    try:
        return tree.spawn(argv, {**env, "PWD": os.getcwd()})
    except OSError as error:
        error_number = error.errno or 0
    text = f"muster: cannot execute {argv[0]!r}: {os.strerror(error_number)}"
    if error_number == errno.ENOENT:
        text += f"; searched in {os.getcwd()} and PATH={env.get('PATH', '')}"
    os.write(2, f"{text}\n".encode(errors="replace"))
    os._exit(127 if error_number in (errno.ENOENT, errno.ENOTDIR) else 126)


def command_environment(package: str) -> dict[str, str]:
    """Return the environment variables of the command.

    The programs of Ray's Python environment come first on PATH, as if that environment were
    activated. The variables that Ray has set for this wrapper are removed, because they could
    conflict with a `runtime_env` that the command passes to `ray.init`.

    Args:
        package: Path of the directory that contains this wrapper.
    """
    env = dict(os.environ)
    shipped = os.path.dirname(os.path.abspath(package))
    paths = [path for path in env.pop("PYTHONPATH", "").split(":") if path]
    other_paths = [path for path in paths if os.path.abspath(path) != shipped]
    if other_paths:
        env["PYTHONPATH"] = ":".join(other_paths)

    job_variables: dict[str, str] = {}
    with contextlib.suppress(KeyError, ValueError, AttributeError):
        config = json.loads(env["RAY_JOB_CONFIG_JSON_ENV_VAR"])
        job_variables = config["runtime_env"].get("env_vars") or {}
        # Remove `py_modules` from the job's runtime_env, because the command does not need it. The
        # only entry of `py_modules` is this wrapper.
        config["runtime_env"].pop("py_modules", None)
        env["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(config)

    programs = programs_of_ray(os.getppid())
    if programs and "PATH" not in job_variables:
        env["PATH"] = f"{programs}:{env.get('PATH', os.defpath)}"
    return env


def programs_of_ray(pid: int) -> str:
    """Return the path of the `bin` directory of the Python environment that contains Ray.

    Args:
        pid: Process id of a process that has loaded Ray. Its memory map shows Ray's path.

    Returns:
        The path, or an empty string if the directory is not found.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            before, separator, _ = line.partition(b"/ray/_raylet")
            if separator:
                # `packages` has the form PREFIX/lib/python3.11/site-packages, and the directory
                # with the programs is PREFIX/bin.
                packages = os.fsdecode(before[before.index(b"/") :])
                programs = os.path.join(os.path.dirname(packages), "..", "..", "bin")
                programs = os.path.normpath(programs)
                return programs if os.path.isdir(programs) else ""
    return ""


def main() -> None:
    """Parse the arguments of the wrapper, and run the command. Does not return."""
    separator = sys.argv.index("--")
    own_arguments = sys.argv[1:separator]
    command = sys.argv[separator + 1 :]

    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--signal", type=int, required=True)
    parser.add_argument("--stragglers", type=float, required=True)
    options = parser.parse_args(own_arguments)

    # `sys.path[0]` is the directory that contains this file, because Muster starts this file by
    # calling `runpy.run_path` with that directory.
    run_front(options, command, command_environment(sys.path[0]))


if __name__ == "__main__":
    main()
