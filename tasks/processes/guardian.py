"""The guardian: a small process that owns one component's process tree.

It starts as `python -I -S -c ... guardian.py FD PIDFD MARK NAME [INIT ALIVE]`. The file is imported
and not run as a script, because Python would compile a script at each start.

- FD is the guardian's end of a socket pair. Only the supervisor holds the other end.
- PIDFD is a pidfd of the supervisor.
- MARK is a number that marks the guardian and its descendants (see `tree.mark_own`).
- NAME is the component's name. With the name TEMPLATE, the process is no guardian: guardians are
  forked from it (see `fork_guardians`).
- INIT and ALIVE are file descriptors with which the guardian enters a PID namespace (see
  `containment.PidNamespace`).

The supervisor sends messages over FD (see `packed`): first the launch order (see `Order`), then
`{"do": "go"}`, later `{"do": "stop"}` or `{"do": "kill"}`. The guardian sends `{"event": ...}`:

- `forked`: the component's process exists and waits for "go"; its pidfd comes with the message.
- `spawned`: the component executes its program.
- `refused`: the component was not started, and why.
- `exited`: exit code of the component, or the negative number of its signal.
- `stuck`: pids that survived SIGKILL.
- `empty`: no process of the tree remains. The guardian then exits.

Times in messages are CLOCK_MONOTONIC seconds, which are the same in every process of the machine.
Pids are those of the guardian's PID namespace.

If the supervisor ends for any reason, the guardian stops the component and ends its whole tree. So
a single SIGKILL never leaves a process behind:

- If the component is killed, its descendants become children of the guardian, a subreaper.
- If the supervisor is killed, the socket closes and the guardian stops the component.
- If the guardian is killed, the kernel ends the component (PDEATHSIG). The supervisor, which is
  also a subreaper, ends the other descendants.

Standard library only and single-threaded: it must start in tens of milliseconds, and PDEATHSIG
belongs to the thread that forks.
"""

from __future__ import annotations

# The public `socket` module is built on this module. Its import takes longer than all others
# together.
import _socket
import contextlib
import ctypes
import gc
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING or __name__ != "guardian":
    from tasks.processes import cgroup, tree
else:
    import cgroup
    import tree

#: Placeholder for NAME and for MUSTER_COMPONENT in a template. Its length leaves room for the real
#: names of the forked guardians.
TEMPLATE = "template".ljust(64)
#: Largest number of file descriptors in one message. Source: unix(7), SCM_MAX_FD.
_MOST_FDS = 253
_CLONE_NEWUSER = 0x10000000
#: CLONE_NEWPID and CLONE_NEWNS.
_INSIDE = 0x20000000 | 0x00020000
#: Seconds from SIGKILL to the report that a process survived it, in uninterruptible sleep.
STUCK_AFTER_S = 5.0
#: Seconds between two rounds of SIGKILL.
_KILL_ROUND_S = 0.02
#: Seconds between two checks of children that were asked to end.
_CHILDREN_ROUND_S = 0.1
#: Signals that a guardian ignores, so that only its supervisor can stop it.
_IGNORED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Guardian:
    """State of one guardian, while its component runs and while it ends the tree."""

    def __init__(self, order: Order, channel: Channel, supervisor: int, wakeup_fd: int) -> None:
        self._order = order
        self._channel = channel
        #: Pidfd of the supervisor.
        self._supervisor = supervisor
        self._wakeup_fd = wakeup_fd
        #: Pid of the component's first process.
        self._leader = 0
        self._leader_lives = False
        #: True once the descendants that survived the first process were signalled.
        self._signalled_stragglers = False
        #: Time until which the children may end before the first process is signalled. None: the
        #: children have not been signalled. See `Order`. All times are CLOCK_MONOTONIC seconds.
        self._children_until: float | None = None
        #: Time at which SIGKILL is due; None: no stop has begun.
        self._kill_at: float | None = None
        #: Time of the first SIGKILL; None: there was none.
        self._killing_since: float | None = None
        self._reported_stuck = False
        #: Messages that arrived before the program ran, for example a stop.
        self._early: list[dict] = []  # type: ignore[type-arg]
        #: The cgroup that the component was put into.
        self._cgroup: str | None = None

    def run(self, messages: list[dict]) -> None:  # type: ignore[type-arg]
        """Start the component, and stay until no process of its tree remains."""
        self._early = messages
        try:
            order = self._order
            self._leader = tree.spawn(order.argv, order.env, order.prepare, self._may_go)
        except OSError as error:
            self._channel.send("refused", errno=error.errno, message=str(error.strerror))
            return
        self._leader_lives = True
        self._channel.send("spawned")
        self._obey(self._early)
        self._watch()
        if self._cgroup is not None:
            cgroup.remove(self._cgroup)
        self._channel.send("empty")

    def _may_go(self, pid: int) -> bool:
        """Put the new process into its cgroup and have the supervisor register it.

        Returns:
            True if the supervisor permits the process to execute its program.
        """
        if self._order.cgroup is not None:
            with contextlib.suppress(OSError):
                cgroup.put(self._order.cgroup, pid)
                self._cgroup = self._order.cgroup
        with contextlib.suppress(OSError):  # The process failed earlier; `spawn` raises its error.
            pidfd = os.pidfd_open(pid)
            self._channel.send("forked", pidfd, is_in_cgroup=self._cgroup is not None)
            os.close(pidfd)
            messages = first_messages(self._channel, self._supervisor)
            self._early += [message for message in messages if message["do"] != "go"]
            return any(message["do"] == "go" for message in messages)
        return False

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fd, select.POLLIN)
        poll.register(self._wakeup_fd, select.POLLIN)
        # The socket alone is not enough: a forked child of the supervisor may keep its other end
        # open.
        poll.register(self._supervisor, select.POLLIN)
        while not self._reap():
            if self._killing_since is not None:
                tree.kill_below_once(self._reap)
                lasts_s = time.monotonic() - self._killing_since
                if lasts_s > STUCK_AFTER_S and not self._reported_stuck:
                    self._reported_stuck = True
                    self._channel.send("stuck", pids=tree.descendants(os.getpid()))
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
            if self._children_until is not None and self._kill_at is None:
                has_time = time.monotonic() < self._children_until
                if not has_time or not self._living_children():
                    self._stop_leader()
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
        if self._children_until is not None:
            return _CHILDREN_ROUND_S * 1000
        return None

    def _reap(self) -> bool:
        statuses, is_empty = tree.reap_all()
        if self._leader in statuses:
            self._leader_lives = False
            code = os.waitstatus_to_exitcode(statuses[self._leader])
            self._channel.send("exited", code=code)
        if not self._leader_lives and not is_empty:
            if self._order.children_grace_s is None:
                self._begin_stop()
            # The first process can no longer pass the signal on to its descendants.
            if self._kill_at is not None and not self._signalled_stragglers:
                self._signalled_stragglers = True
                tree.signal_descendants(os.getpid(), self._order.stop_signal)
        return is_empty

    def _begin_stop(self) -> None:
        """Start to stop the component; does nothing when called again.

        If the order gives the children a grace period, they are signalled before the first process.
        """
        if self._kill_at is not None or self._children_until is not None:
            return
        if self._order.children_grace_s is None:
            self._stop_leader()
            return
        self._children_until = time.monotonic() + self._order.children_grace_s
        if self._leader_lives:
            # A stopped process cannot start another child. `_stop_leader` resumes it.
            with contextlib.suppress(OSError):
                os.kill(self._leader, signal.SIGSTOP)
        for pid, parent in self._living_children():
            tree.signal_with_group(pid, self._order.stop_signal, parent=parent)

    def _living_children(self) -> list[tuple[int, int]]:
        """Return `(pid, parent)` of each living child of the component.

        Children that this process adopted after the component's death are included.
        """
        parents = [os.getpid(), self._leader] if self._leader_lives else [os.getpid()]
        return [
            (pid, parent)
            for parent in parents
            for pid in tree.children(parent)
            if pid != self._leader and not tree.is_zombie(pid)
        ]

    def _stop_leader(self) -> None:
        """Signal the component's process group. Survivors are killed after the grace period."""
        self._kill_at = time.monotonic() + self._order.grace_s
        if self._leader_lives:
            # It is not reaped yet, so its pid and its process group id cannot be reused.
            tree.stop_group(self._leader, self._order.stop_signal)

    def _begin_kill(self) -> None:
        if self._killing_since is None:
            self._kill_at = self._killing_since = time.monotonic()
            if self._cgroup is not None:
                with contextlib.suppress(OSError):
                    cgroup.kill(self._cgroup)


def main() -> None:
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # 32 and 33 belong to the C library.
            signal.signal(signum, signal.SIG_IGN if signum in _IGNORED else signal.SIG_DFL)
    fd, supervisor, mark, *inside = map(int, [*sys.argv[1:4], *sys.argv[5:]])
    if sys.argv[4] == TEMPLATE:
        # The template holds nothing of the run, so it may end when the run loses its supervisor.
        tree.die_with_parent(os.getppid())
        tree.mark_own(mark)
        fd, supervisor, mark, *inside = fork_guardians(_socket.socket(fileno=fd))
    # The component must not inherit the guardian's file descriptors, such as device locks.
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.set_inheritable(int(name), int(name) <= 2)
    channel = Channel(fd)
    try:
        tree.mark_own(mark)
        if inside:
            enter_namespace(*inside)
    except OSError as error:
        channel.send("refused", errno=error.errno, message=error.strerror)
        return
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    # If SIGCHLD were ignored, as it may be in the parent, the kernel would discard every exit
    # status.
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with contextlib.suppress(OSError):  # Containment level L1 has no subreapers.
        tree.become_subreaper()
    os.chdir("/")
    if orders := first_messages(channel, supervisor):
        order, *messages = orders
        Guardian(Order(**order), channel, supervisor, wakeup_read).run(messages)
    # A normal exit of the interpreter takes ten times longer.
    os._exit(0)


def fork_guardians(requests: _socket.socket) -> list[int]:
    """Fork a guardian for each request, until the other end of the socket closes.

    A request is a message `{"mark": ..., "name": ..., "is_inside": ...}` with the file descriptors
    of a guardian: FD, PIDFD, INIT and ALIVE if `is_inside`, then file descriptors that it only
    keeps open. The answer is the pid of the guardian, sent when the guardian is a child of the
    nearest subreaper; 0 if the fork failed.

    Returns:
        Only in a guardian: its arguments FD, PIDFD, MARK, and INIT and ALIVE if it has them.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Keep the garbage collector from writing to memory that the guardians could share.
    gc.freeze()
    room = _socket.CMSG_SPACE(4 * _MOST_FDS)
    while True:
        data, ancillary, _, _ = requests.recvmsg(4096, room, _socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        fds = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)]
        report_read, report_write = os.pipe()
        between = os.fork()
        if between == 0:
            guardian = os.fork()
            if guardian != 0:
                os.write(report_write, b"%d" % guardian)
                os._exit(0)
            os.close(report_read)
            os.close(report_write)
            requests.close()
            os.setsid()
            [order], _ = unpacked(data)
            _name_own(order["name"])
            channel, supervisor, *rest = fds
            return [channel, supervisor, order["mark"], *(rest[:2] if order["is_inside"] else ())]
        os.close(report_write)
        for fd in fds:
            os.close(fd)
        pid = os.read(report_read, 32)
        os.close(report_read)
        os.waitpid(between, 0)
        requests.send(pid or b"0")


def _name_own(name: str) -> None:
    """Replace TEMPLATE by a name in this process's command line and environment, as `ps` shows
    them.

    Source: proc_pid_stat(5), fields 48 to 51.
    """
    start, end = (int(tree.stat_fields(os.getpid())[index]) for index in (45, 48))
    room = TEMPLATE.encode()
    whole = ctypes.string_at(start, end - start)
    named = whole.replace(room, name.encode()[: len(room)].ljust(len(room), b"\0"))
    ctypes.memmove(start, named, len(named))


def enter_namespace(init: int, alive: int) -> None:
    """Continue inside a PID namespace, in a forked child. The parent stays outside until it ends.

    Args:
        init: Pidfd of the namespace's first process.
        alive: File descriptor that keeps the namespace alive while a process holds it.

    Raises:
        OSError: The namespace cannot be entered.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Without privileges, the PID namespace belongs to a user namespace, which is entered, too.
    if libc.setns(init, _INSIDE) != 0 and libc.setns(init, _INSIDE | _CLONE_NEWUSER) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"no namespace: {os.strerror(error)}")
    os.close(init)
    os.set_inheritable(alive, False)
    # setns(2) affects only later children: they are in the PID namespace.
    child = os.fork()
    if child == 0:
        # Inside the namespace, the parent has pid 0. If it died before this call, that is not
        # noticed, and the guardian works without its parent.
        tree.die_with_parent(os.getppid())
        return
    os.closerange(3, 1024)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.waitpid(child, 0)
    os._exit(0)


class Order(types.SimpleNamespace):
    """The command to start and the way to stop it, as the supervisor sends them.

    - `argv`: list of str.
    - `env`: the complete environment.
    - `cwd`: working directory.
    - `log`: log file; output is appended.
    - `stop_signal`: number of the stop signal.
    - `grace_s`: seconds from that signal to SIGKILL.
    - `cgroup`: cgroup v2 directory for the component, or None.
    - `files`: soft limit of open files.
    - `children_grace_s`: see `guarded.Command`.
    """

    def prepare(self) -> None:
        """Prepare the component's process before it executes its program.

        Raises:
            OSError: The log or the working directory cannot be opened.
        """
        with contextlib.suppress(OSError, ValueError):  # The hard limit may be lower by now.
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.files, hard))
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self.cwd)


def packed(message: dict) -> bytes:  # type: ignore[type-arg]
    """Encode a message: its length, then the message in the `marshal` format.

    Both ends run the same interpreter, so `marshal` is safe. Unlike other formats, it needs no
    import, which would take milliseconds.
    """
    data = marshal.dumps(message)
    return struct.pack("I", len(data)) + data


def unpacked(buffer: bytes) -> tuple[list[dict], bytes]:  # type: ignore[type-arg]
    """Decode the complete messages of a buffer. Return them and the rest of the buffer."""
    messages: list[dict] = []  # type: ignore[type-arg]
    while len(buffer) >= 4 and len(buffer) >= (end := 4 + struct.unpack_from("I", buffer)[0]):
        messages.append(marshal.loads(buffer[4:end]))
        buffer = buffer[end:]
    return messages, buffer


class Channel:
    """Messages over a socket. `receive` also reports that the peer has closed its end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._socket = _socket.socket(fileno=fd)
        self._buffer = b""
        os.set_inheritable(fd, False)

    def receive(self) -> tuple[list[dict], bool]:  # type: ignore[type-arg]
        """Wait for data. Return the complete messages, and False if the peer has closed its end."""
        try:
            data = os.read(self.fd, 65536)
        except ConnectionError:
            data = b""
        messages, self._buffer = unpacked(self._buffer + data)
        return messages, bool(data)

    def send(self, event: str, pidfd: int = -1, **fields: object) -> None:
        message = {"event": event, "at_monotonic_s": time.monotonic(), **fields}
        fds = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", pidfd))]
        # `_watch` notices the end of the supervisor and ends the tree.
        with contextlib.suppress(OSError):
            self._socket.sendmsg([packed(message)], fds if pidfd >= 0 else [])


def first_messages(channel: Channel, supervisor: int) -> list[dict]:  # type: ignore[type-arg]
    """Wait for the supervisor's next messages; an empty list if it has ended or closed the
    channel.
    """
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
