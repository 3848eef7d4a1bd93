"""The guardian: a small process that owns one component's process tree.

It is started as `python -I -S guardian.py FD PID NAME`, FD being its end of a socket pair whose
other end only the supervisor, of that pid, holds. Over it go JSON lines. From the supervisor:
first the launch order (see `Order`), later `{"do": "stop"}` and `{"do": "kill"}`. To the
supervisor: `{"event": ...}` with `spawned` (pid), `refused` (why nothing was started), `exited`
(exit_code or signal of the component), `stuck` (pids that SIGKILL does not end) and `empty`, after
which the guardian leaves. Times in them are CLOCK_MONOTONIC seconds, the same clock in every
process of the machine.

When the supervisor is gone, whatever the reason, the guardian stops the component and ends what is
left of its tree. So no single SIGKILL leaves a process: of the component, its descendants come to
the guardian, a subreaper; of the supervisor, the socket closes; of the guardian, the kernel ends
the component (PDEATHSIG) and the supervisor, a subreaper too, ends the rest.

Stdlib only and single-threaded: it must start in tens of milliseconds, and PDEATHSIG belongs to the
thread that forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __name__ != "__main__":
    from tasks.supervise import tree
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import tree

#: SIGKILL needs no longer than this, but for a process in uninterruptible sleep.
STUCK_AFTER_S = 5.0
#: How often a tree that is being killed is looked at again.
_KILL_ROUND_S = 0.02
_IGNORED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Order:
    """What to start and how to stop it, as the supervisor sends it.

    `argv` (list of str), `env` (the whole environment), `cwd`, `log` (appended to), `stop_signal`
    (a number), `grace_s` (from that signal to SIGKILL).
    """

    def __init__(self, message: dict) -> None:  # type: ignore[type-arg]
        self.argv: list[str] = message["argv"]
        self.env: dict[str, str] = message["env"]
        self.cwd: str = message["cwd"]
        self.log: str = message["log"]
        self.stop_signal: int = message["stop_signal"]
        self.grace_s: float = message["grace_s"]


class Channel:
    """JSON lines over a file descriptor; the peer's end closing is its message too."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = b""
        os.set_inheritable(fd, False)

    def receive(self) -> tuple[list[dict], bool]:  # type: ignore[type-arg]
        """The messages that have arrived, and whether the peer is still there. Blocks for one."""
        try:
            data = os.read(self.fd, 65536)
        except ConnectionError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines], bool(data)

    def send(self, event: str, **fields: object) -> None:
        message = {"event": event, "at_monotonic_s": time.monotonic(), **fields}
        # A supervisor that is gone is noticed by the loop, which goes on to end the tree.
        with contextlib.suppress(OSError):
            os.write(self.fd, json.dumps(message).encode() + b"\n")


def spawn(order: Order) -> int:
    """Start the component in a session of its own.

    Returns: its pid, once the program runs. Raises: OSError, as exec, chdir or open gave it; then
    no process is left.
    """
    report_read, report_write = os.pipe()
    guardian_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(report_read)
            tree.die_with_parent(guardian_pid)
            _become_component(order)
        except OSError as error:
            text = f"{error.errno} {error.strerror}: {error.filename}"
            os.write(report_write, os.fsencode(text))
        except BaseException as error:
            os.write(report_write, ascii(f"0 {error!r}")[1:-1].encode())
        os._exit(127)
    os.close(report_write)
    # Closed by exec, so an empty read says that the program runs.
    problem = os.fsdecode(os.read(report_read, 4096))
    os.close(report_read)
    if problem:
        os.waitpid(pid, 0)
        number, _, text = problem.partition(" ")
        raise OSError(int(number), text)
    return pid


def _become_component(order: Order) -> None:
    os.setsid()
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # 32 and 33 belong to the C library.
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(order.cwd)
    os.execvpe(order.argv[0], order.argv, order.env)


class Guardian:
    """The state of one guardian: a component that runs, or a tree that is being taken down."""

    def __init__(self, order: Order, channel: Channel, supervisor: int, wakeup_fd: int) -> None:
        """
        Args:
            supervisor: its pidfd.
        """
        self._order = order
        self._channel = channel
        self._supervisor = supervisor
        self._wakeup_fd = wakeup_fd
        self._leader = 0
        self._leader_lives = False
        self._told_stragglers = False
        self._kill_at: float | None = None
        self._killing_since: float | None = None
        self._reported_stuck = False

    def run(self, messages: list[dict]) -> None:  # type: ignore[type-arg]
        """Start the component and stay until nothing of it is left.

        Args:
            messages: what came together with the order, a stop for example.
        """
        try:
            self._leader = spawn(self._order)
        except OSError as error:
            self._channel.send("refused", errno=error.errno, message=str(error.strerror))
            return
        self._leader_lives = True
        self._channel.send("spawned", pid=self._leader)
        self._obey(messages)
        self._watch()
        self._channel.send("empty")

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fd, select.POLLIN)
        poll.register(self._wakeup_fd, select.POLLIN)
        # A copy of the socket's other end, held by a fork of the supervisor, delays its EOF.
        poll.register(self._supervisor, select.POLLIN)
        while not self._reap():
            if self._killing_since is not None:
                tree.kill_below_once(self._reap)
                self._report_stuck()
            for fd, _ in poll.poll(self._timeout_ms()):
                if fd == self._wakeup_fd:
                    os.read(fd, 4096)
                elif fd == self._channel.fd:
                    messages, connected = self._channel.receive()
                    self._obey(messages)
                    if not connected:
                        poll.unregister(fd)
                        self._begin_stop()
                else:
                    poll.unregister(fd)
                    self._begin_stop()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._begin_kill()

    def _obey(self, messages: list[dict]) -> None:  # type: ignore[type-arg]
        for message in messages:
            if message["do"] == "kill":
                self._begin_kill()
            else:
                self._begin_stop()

    def _timeout_ms(self) -> float | None:
        if self._killing_since is not None:
            return _KILL_ROUND_S * 1000
        if self._kill_at is not None:
            return max(0.0, self._kill_at - time.monotonic()) * 1000 + 1
        return None

    def _reap(self) -> bool:
        statuses, is_empty = tree.reap_all()
        if self._leader in statuses:
            self._leader_lives = False
            code = os.waitstatus_to_exitcode(statuses[self._leader])
            self._channel.send(
                "exited",
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
            )
        if not self._leader_lives and not is_empty:
            self._begin_stop()
            self._tell_stragglers()
        return is_empty

    def _begin_stop(self) -> None:
        """Signal the component's group; what is left after the grace period is killed."""
        if self._kill_at is not None:
            return
        self._kill_at = time.monotonic() + self._order.grace_s
        if self._leader_lives:
            # Not reaped, so its number, and that of its group, can't belong to another. A stopped
            # process takes the signal only once it goes on.
            for signum in (self._order.stop_signal, signal.SIGCONT):
                with contextlib.suppress(PermissionError):
                    os.killpg(self._leader, signum)

    def _tell_stragglers(self) -> None:
        """Once the leader has gone, nobody else will ask the rest of its tree to leave."""
        if not self._told_stragglers:
            self._told_stragglers = True
            tree.signal_descendants(os.getpid(), self._order.stop_signal)

    def _begin_kill(self) -> None:
        if self._killing_since is None:
            self._kill_at = self._killing_since = time.monotonic()

    def _report_stuck(self) -> None:
        since = self._killing_since
        if since is None or self._reported_stuck:
            return
        if time.monotonic() - since > STUCK_AFTER_S:
            self._reported_stuck = True
            self._channel.send("stuck", pids=tree.descendants(os.getpid()))


def _pidfd(pid: int) -> int | None:
    """A pidfd of our parent; None when the process is not our parent any more."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    return fd if os.getppid() == pid else None


def main() -> None:
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    # An inherited "ignore" would have the kernel discard every exit status.
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    tree.become_subreaper()
    os.chdir("/")

    tree.mark_own()
    channel = Channel(int(sys.argv[1]))
    supervisor = _pidfd(int(sys.argv[2]))
    if supervisor is not None and (orders := _first_messages(channel, supervisor)):
        order, *messages = orders
        Guardian(Order(order), channel, supervisor, wakeup_read).run(messages)
    # The interpreter's own end takes ten times as long.
    os._exit(0)


def _first_messages(channel: Channel, supervisor: int) -> list[dict]:  # type: ignore[type-arg]
    """What the supervisor says first; nothing when it has no order to give."""
    poll = select.poll()
    poll.register(channel.fd, select.POLLIN)
    poll.register(supervisor, select.POLLIN)
    messages: list[dict] = []  # type: ignore[type-arg]
    connected = True
    while connected and not messages:
        if supervisor in dict(poll.poll()):
            return []
        messages, connected = channel.receive()
    return messages


if __name__ == "__main__":
    main()
