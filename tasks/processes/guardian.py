"""The guardian: a small process that owns one component's process tree.

It starts as `python -I -S -c ... guardian.py FD PIDFD MARK NAME [INIT ALIVE]`, imported and not run
as a file, which would be compiled anew each time: FD is its end of a
socket pair whose other end only the supervisor holds, PIDFD the supervisor's own, and MARK a number
for all that comes of it (see `tree.mark_own`). With the last two, file descriptors both, it
goes on inside a PID namespace (see `containment.PidNamespace`). As TEMPLATE it is none itself, and
guardians are forked from it (see `fork_guardians`).

Over FD go messages (see `packed`). From the supervisor: first the launch order (see `Order`), then
`{"do": "go"}`, later `{"do": "stop"}` and `{"do": "kill"}`. To the supervisor: `{"event": ...}`
with `forked` (the component's process is there, its pidfd comes along, and waits for "go"),
`spawned` (it runs its program), `refused` (why nothing was started), `exited` (the code of the
component; below zero: the signal), `stuck` (pids that SIGKILL does not end) and `empty`, after
which the guardian leaves. Times in them are CLOCK_MONOTONIC seconds, the same clock in every
process of the machine; pids are those of the guardian's namespace.

When the supervisor is gone, whatever the reason, the guardian stops the component and ends what is
left of its tree. So no single SIGKILL leaves a process: of the component, its descendants come to
the guardian, a subreaper; of the supervisor, the socket closes; of the guardian, the kernel ends
the component (PDEATHSIG) and the supervisor, a subreaper too, ends the rest.

Stdlib only and single-threaded: it must start in tens of milliseconds, and PDEATHSIG belongs to the
thread that forks.
"""

from __future__ import annotations

# The socket module, which is made of this one, takes longer to import than all the rest.
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

#: In place of the name, and of MUSTER_COMPONENT: room for those of the guardians.
TEMPLATE = "template".ljust(64)
_MOST_FDS = 253
_CLONE_NEWUSER = 0x10000000
#: CLONE_NEWPID and CLONE_NEWNS.
_INSIDE = 0x20000000 | 0x00020000
#: SIGKILL needs no longer than this, but for a process in uninterruptible sleep.
STUCK_AFTER_S = 5.0
#: How often a tree that is being killed is looked at again.
_KILL_ROUND_S = 0.02
#: Seconds between two looks at children that were told to end.
_CHILDREN_ROUND_S = 0.1
_IGNORED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class Guardian:
    """The state of one guardian: a component that runs, or a tree that is being taken down."""

    def __init__(self, order: Order, channel: Channel, supervisor: int, wakeup_fd: int) -> None:
        self._order = order
        self._channel = channel
        #: Its pidfd.
        self._supervisor = supervisor
        self._wakeup_fd = wakeup_fd
        self._leader = 0
        self._leader_lives = False
        self._told_stragglers = False
        #: The children, which are told to end first, have time until then; see `Order`.
        self._children_until: float | None = None
        self._kill_at: float | None = None
        self._killing_since: float | None = None
        self._reported_stuck = False
        #: Messages that came before the program ran, a stop for example.
        self._early: list[dict] = []  # type: ignore[type-arg]
        #: The cgroup that the component was put into.
        self._cgroup: str | None = None

    def run(self, messages: list[dict]) -> None:  # type: ignore[type-arg]
        """Start the component and stay until nothing of it is left."""
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
        """Put the new process where it belongs and have the supervisor register it."""
        if self._order.cgroup is not None:
            with contextlib.suppress(OSError):
                cgroup.put(self._order.cgroup, pid)
                self._cgroup = self._order.cgroup
        with contextlib.suppress(OSError):  # It has failed, and reported it.
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
        # A copy of the socket's other end, held by a fork of the supervisor, delays its EOF.
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
            # Nobody else will ask the rest of its tree to leave.
            if self._kill_at is not None and not self._told_stragglers:
                self._told_stragglers = True
                tree.signal_descendants(os.getpid(), self._order.stop_signal)
        return is_empty

    def _begin_stop(self) -> None:
        """Signal the children first, where the order gives them time of their own, then the
        component. Does nothing when called again."""
        if self._kill_at is not None or self._children_until is not None:
            return
        if self._order.children_grace_s is None:
            self._stop_leader()
            return
        self._children_until = time.monotonic() + self._order.children_grace_s
        if self._leader_lives:
            # A stopped process starts no further child. The signal of `_stop_leader` resumes it.
            with contextlib.suppress(OSError):
                os.kill(self._leader, signal.SIGSTOP)
        for pid, parent in self._living_children():
            tree.signal_with_group(pid, self._order.stop_signal, parent=parent)

    def _living_children(self) -> list[tuple[int, int]]:
        """`(pid, parent)` of the component's children, and of those that it left to this process
        when it died."""
        parents = [os.getpid(), self._leader] if self._leader_lives else [os.getpid()]
        return [
            (pid, parent)
            for parent in parents
            for pid in tree.children(parent)
            if pid != self._leader and not tree.is_zombie(pid)
        ]

    def _stop_leader(self) -> None:
        """Signal the component's group; what is left after the grace period is killed."""
        self._kill_at = time.monotonic() + self._order.grace_s
        if self._leader_lives:
            # Not reaped, so its number, and that of its group, can't belong to another.
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
        # It holds nothing of the run, and may even be stopped as the run loses its supervisor.
        tree.die_with_parent(os.getppid())
        tree.mark_own(mark)
        fd, supervisor, mark, *inside = fork_guardians(_socket.socket(fileno=fd))
    # What it was given, the locks of devices among it, is not for what it guards.
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
    # An inherited "ignore" would have the kernel discard every exit status.
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with contextlib.suppress(OSError):  # At level L1.
        tree.become_subreaper()
    os.chdir("/")
    if orders := first_messages(channel, supervisor):
        order, *messages = orders
        Guardian(Order(**order), channel, supervisor, wakeup_read).run(messages)
    # The interpreter's own end takes ten times as long.
    os._exit(0)


def fork_guardians(requests: _socket.socket) -> list[int]:
    """Fork a guardian for each request, until there is no more of them.

    A request is a message, `{"mark": ..., "name": ..., "is_inside": ...}`, with the fds of a
    guardian: FD, PIDFD, those of its namespace where it is to be in one, and what it is to keep.
    The answer is its pid, once it is a child of the nearest subreaper; 0, where none could be made.

    Returns: in a guardian, its numbers as on a command line.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # What a guardian never touches, it shares with all of them.
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
    """Put a name where TEMPLATE stands in what others read of this process: its command line and
    its environment. Source: proc_pid_stat(5), fields 48 to 51."""
    start, end = (int(tree.stat_fields(os.getpid())[index]) for index in (45, 48))
    room, whole = TEMPLATE.encode(), ctypes.string_at(start, end - start)
    named = whole.replace(room, name.encode()[: len(room)].ljust(len(room), b"\0"))
    ctypes.memmove(start, named, len(named))


def enter_namespace(init: int, alive: int) -> None:
    """Go on inside a PID namespace; what was started stays outside, and leaves when this does.

    Args:
        init: pidfd of the namespace's first process.
        alive: an fd that keeps the namespace as long as a process holds it.

    Raises: OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Where we have no privileges, it has a user namespace of its own, in which we have.
    if libc.setns(init, _INSIDE) != 0 and libc.setns(init, _INSIDE | _CLONE_NEWUSER) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"no namespace: {os.strerror(error)}")
    os.close(init)
    os.set_inheritable(alive, False)
    # Only a child is in the PID namespace.
    child = os.fork()
    if child == 0:
        # Its parent has no pid in here, so one that died before this goes unnoticed: then it
        # serves its supervisor without.
        tree.die_with_parent(os.getppid())
        return
    os.closerange(3, 1024)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.waitpid(child, 0)
    os._exit(0)


class Order(types.SimpleNamespace):
    """What to start and how to stop it, as the supervisor sends it.

    `argv` (list of str), `env` (the whole environment), `cwd`, `log` (appended to), `stop_signal`
    (a number), `grace_s` (from that signal to SIGKILL), `cgroup` (a cgroup v2 directory to put it
    into, or None), `files` (how many it may open, unless it asks for more), `children_grace_s` (see
    `guarded.Command`).
    """

    def prepare(self) -> None:
        """What the component's process does before its program. Raises: OSError."""
        with contextlib.suppress(OSError, ValueError):  # The hard limit was lowered since.
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.files, hard))
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self.cwd)


def packed(message: dict) -> bytes:  # type: ignore[type-arg]
    """A message as it goes over a channel: its length, and it as `marshal` writes it, which both
    ends, of one interpreter, have without an import of some milliseconds."""
    data = marshal.dumps(message)
    return struct.pack("I", len(data)) + data


def unpacked(buffer: bytes) -> tuple[list[dict], bytes]:  # type: ignore[type-arg]
    """The messages that a buffer has whole, and the rest of it."""
    messages: list[dict] = []  # type: ignore[type-arg]
    while len(buffer) >= 4 and len(buffer) >= (end := 4 + struct.unpack_from("I", buffer)[0]):
        messages.append(marshal.loads(buffer[4:end]))
        buffer = buffer[end:]
    return messages, buffer


class Channel:
    """Messages over a file descriptor; the peer's end closing is its message too."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._socket = _socket.socket(fileno=fd)
        self._buffer = b""
        os.set_inheritable(fd, False)

    def receive(self) -> tuple[list[dict], bool]:  # type: ignore[type-arg]
        """The messages that have arrived, and whether the peer is still there. Blocks for one."""
        try:
            data = os.read(self.fd, 65536)
        except ConnectionError:
            data = b""
        messages, self._buffer = unpacked(self._buffer + data)
        return messages, bool(data)

    def send(self, event: str, pidfd: int = -1, **fields: object) -> None:
        message = {"event": event, "at_monotonic_s": time.monotonic(), **fields}
        fds = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", pidfd))]
        # A supervisor that is gone is noticed by the loop, which goes on to end the tree.
        with contextlib.suppress(OSError):
            self._socket.sendmsg([packed(message)], fds if pidfd >= 0 else [])


def first_messages(channel: Channel, supervisor: int) -> list[dict]:  # type: ignore[type-arg]
    """What the supervisor says next; nothing when it has gone, or has no more to say."""
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
