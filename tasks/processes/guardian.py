"""The guardian: a small process that owns one component's process tree.

The guardian is started as `python -I -S -c ... guardian.py FD PIDFD MARK NAME [INIT ALIVE]`. Python
imports this file instead of running it as a script, because it would compile a script again at each
start. The arguments are:

- FD: the guardian's end of a socket pair. Only the supervisor holds the other end.
- PIDFD: a pidfd of the supervisor.
- MARK: a number that identifies the guardian and all its descendants (see `tree.mark_own`).
- NAME: the name of the component. A process with the name TEMPLATE is not a guardian itself, but
  forks guardians on request (see `fork_guardians`).
- INIT and ALIVE: file descriptors with which the guardian enters a PID namespace (see
  `containment.PidNamespace`).

The supervisor sends messages over FD (see `encode_message`): first the launch order (see `Order`),
then `{"do": "go"}`, later `{"do": "stop"}` or `{"do": "kill"}`. After "stop", it may send
`{"do": "delay kill", "for_s": SECONDS}` several times: the guardian then sends SIGKILL no sooner
than SECONDS after the message. The guardian sends messages of the form `{"event": ...}`:

- `forked`: the component's process exists and waits for "go". The message carries its pidfd.
- `spawned`: the component executes its program.
- `refused`: the component was not started. The message contains the error.
- `exited`: the first process of the component has ended. The message contains its exit code, or
  the negative number of the signal that killed it.
- `stuck`: processes have survived SIGKILL, or the kernel does not allow this user to signal them.
  The message contains their pids.
- `empty`: no process of the component's tree remains. The message contains the command lines of
  processes that the component left behind. The guardian then exits.

Times in messages are CLOCK_MONOTONIC seconds, which are the same in every process of the machine.
Pids in messages are valid in the guardian's PID namespace.

If the supervisor ends for any reason, the guardian stops the component and kills all its
descendants. No process of the component survives a single SIGKILL to any of these processes:

- If the component is killed, its descendants become children of the guardian, a subreaper.
- If the supervisor is killed, the socket closes and the guardian stops the component.
- If the guardian is killed, the kernel kills the component (PDEATHSIG). The supervisor is a
  subreaper, too: it adopts the other descendants and kills them.

This module uses only the standard library, because a guardian must start in tens of milliseconds.
The guardian uses a single thread, because PDEATHSIG is sent when the forking thread ends.
"""

from __future__ import annotations

# `_socket` is the C module below the public `socket` module. Importing `socket` would take longer
# than all other imports of this file together.
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

#: Placeholder for a component's name in the command line and the environment of the process that
#: forks guardians. Each forked guardian overwrites the placeholder in its memory with the name of
#: its component. The padding makes room for long names.
TEMPLATE = "template".ljust(64)
#: Largest number of file descriptors in one message. Source: unix(7), SCM_MAX_FD.
_MAX_FDS_PER_MESSAGE = 253
_CLONE_NEWUSER = 0x10000000
#: Flags of setns(2) for a PID namespace and a mount namespace: CLONE_NEWPID and CLONE_NEWNS.
_NAMESPACE_FLAGS = 0x20000000 | 0x00020000
#: Seconds within which a helper process, such as Python's resource tracker, ends by itself after
#: the end of the component's first process.
_HELPER_ENDS_WITHIN_S = 1.0
#: Length in characters after which a reported command line is cut.
_COMMAND_LENGTH = 200
#: Seconds between two checks whether the component's children have ended after the stop signal.
_CHILDREN_ROUND_S = 0.1
#: Signals that a guardian process ignores, so that only its supervisor can stop it.
_IGNORED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Guardian:
    """Starts one component, supervises its process tree, and ends the tree.

    All times are CLOCK_MONOTONIC seconds.
    """

    def __init__(self, order: Order, channel: Channel, supervisor: int, wakeup_fd: int) -> None:
        self._order = order
        self._channel = channel
        #: Pidfd of the supervisor process. It becomes readable when the supervisor ends.
        self._supervisor = supervisor
        self._wakeup_fd = wakeup_fd
        #: Pid of the component's first process.
        self._first_process = 0
        self._first_process_lives = False
        #: True after the stop signal was sent to descendants that outlived the first process.
        self._signalled_stragglers = False
        #: End of the grace period of the component's children. At this time, or earlier if all
        #: children have ended, the component's first process gets the stop signal. None if the
        #: children have not got the stop signal yet.
        self._children_until: float | None = None
        #: Time at which the whole tree gets SIGKILL; None if the first process was not asked to
        #: stop.
        self._kill_at: float | None = None
        #: Decides when the whole tree gets its next SIGKILL. None before the first SIGKILL.
        self._kill_rounds: tree.KillRounds | None = None
        self._reported_stuck = False
        #: Mapping from the pid of each straggler to its command line. A straggler is a descendant
        #: that outlived the first process. The first process ended with exit code 0 and without a
        #: stop signal.
        self._stragglers: dict[int, str] = {}
        #: Time at which the component's first process ended by itself.
        self._left_alone_at = 0.0
        #: Command lines of descendants that outlived the first process and have ended since. Helper
        #: processes are left out, see `_note_ended_stragglers`.
        self._ended_stragglers: list[str] = []
        #: Messages of the supervisor that arrived before the program was executed, for example a
        #: request to stop.
        self._early_messages: list[dict] = []  # type: ignore[type-arg]
        #: Directory of the cgroup that contains the component; None if it has no cgroup.
        self._cgroup: str | None = None

    def run(self, messages: list[dict]) -> None:  # type: ignore[type-arg]
        """Start the component, and return when no process of its tree remains.

        Args:
            messages: Further messages that arrived together with the supervisor's first message,
                the `Order`.
        """
        self._early_messages = messages
        try:
            order = self._order
            self._first_process = tree.spawn(
                order.argv, order.env, order.prepare, self._await_permission
            )
        except OSError as error:
            self._channel.send("refused", errno=error.errno, message=str(error.strerror))
            return
        self._first_process_lives = True
        self._channel.send("spawned")
        self._handle_messages(self._early_messages)
        self._watch()
        self._remove_cgroups()
        self._channel.send(
            "empty",
            stragglers=[command[:_COMMAND_LENGTH] for command in self._ended_stragglers],
            is_killed=self._kill_rounds is not None,
        )

    def _remove_cgroups(self) -> None:
        """Remove the cgroups of the component, whose processes have all ended.

        This method removes the memory cgroup only if the supervisor has ended. Otherwise the
        supervisor reads the counters of the memory cgroup, and then removes the cgroup.
        """
        memory_cgroup = self._order.memory_cgroup
        paths = {self._cgroup, memory_cgroup} - {None}
        if not tree.is_ready(self._supervisor, select.POLLIN, 0):
            paths -= {memory_cgroup}
        for path in paths:
            cgroup.remove(path)

    def _await_permission(self, pid: int) -> bool:
        """Wait until the supervisor permits the component's new process to execute its program.

        Before that, the process is put into the component's cgroup, and the supervisor writes the
        process to the registry of the run.

        Args:
            pid: Pid of the new process, which has not executed its program yet.

        Returns:
            True if the supervisor permits the process to execute its program.
        """
        if self._order.cgroup is not None:
            with contextlib.suppress(OSError):
                cgroup.put(self._order.cgroup, pid)
                self._cgroup = self._order.cgroup
        # `pidfd_open` fails if the new process has already ended. Ignore this failure, because
        # `tree.spawn` raises the error that ended the process.
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            self._channel.send("forked", pidfd, is_in_cgroup=self._cgroup is not None)
            os.close(pidfd)
            messages = await_messages(self._channel, self._supervisor)
            self._early_messages += [message for message in messages if message["do"] != "go"]
            return any(message["do"] == "go" for message in messages)
        return False

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fd, select.POLLIN)
        poll.register(self._wakeup_fd, select.POLLIN)
        # Watch the supervisor itself, and not only the socket to the supervisor. If a child of the
        # supervisor has inherited the socket, the socket stays open after the supervisor has ended.
        poll.register(self._supervisor, select.POLLIN)
        while not self._reap():
            if self._kill_rounds is not None and self._kill_rounds.is_due():
                self._kill_once(self._kill_rounds)
            for fd, _ in poll.poll(self._timeout_ms()):
                if fd == self._wakeup_fd:
                    os.read(fd, 4096)
                elif fd == self._channel.fd:
                    messages, connected = self._channel.receive()
                    self._handle_messages(messages)
                    if not connected:
                        poll.unregister(fd)
                        self._begin_stop()
                else:
                    poll.unregister(fd)
                    self._begin_stop()
            if self._children_until is not None and self._kill_at is None:
                has_time = time.monotonic() < self._children_until
                if not has_time or not self._living_children():
                    self._stop_first_process()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._begin_kill()

    def _handle_messages(self, messages: list[dict]) -> None:  # type: ignore[type-arg]
        for message in messages:
            if message["do"] == "kill":
                self._begin_kill()
            elif message["do"] == "delay kill":
                self._delay_kill(message["for_s"])
            else:
                self._begin_stop()

    def _timeout_ms(self) -> float | None:
        if self._kill_rounds is not None:
            return self._kill_rounds.pause_s * 1000 + 1
        if self._kill_at is not None:
            return max(0.0, self._kill_at - time.monotonic()) * 1000 + 1
        if self._children_until is not None:
            return _CHILDREN_ROUND_S * 1000
        return None

    def _reap(self) -> bool:
        statuses, is_empty = tree.reap_all()
        if self._first_process in statuses:
            self._first_process_lives = False
            code = os.waitstatus_to_exitcode(statuses[self._first_process])
            self._channel.send("exited", code=code)
            is_stopping = self._kill_at is not None or self._children_until is not None
            if code == 0 and not is_stopping:
                self._note_stragglers()
        self._note_ended_stragglers(statuses)
        if not self._first_process_lives and not is_empty:
            if self._order.children_grace_s is None:
                self._begin_stop()
            # The component's first process has ended, so it cannot pass the stop signal on to its
            # descendants. Send the signal to them directly.
            if self._kill_at is not None and not self._signalled_stragglers:
                self._signalled_stragglers = True
                tree.signal_descendants(os.getpid(), self._order.stop_signal)
        return is_empty

    def _note_stragglers(self) -> None:
        """Remember the descendants that live on after the first process ended with exit code 0."""
        self._left_alone_at = time.monotonic()
        for pid in tree.descendants(os.getpid()):
            with contextlib.suppress(OSError):
                if not tree.is_zombie(pid):
                    self._stragglers[pid] = tree.read_command_line(pid) or f"pid {pid}"

    def _note_ended_stragglers(self, statuses: dict[int, int]) -> None:
        """Record each straggler that has just ended.

        A straggler is a descendant that outlived the first process. A straggler that ends by itself
        within a second after the end of the first process is not recorded: it counts as a helper
        process, such as Python's resource tracker.

        Args:
            statuses: Mapping from pid to wait status, for all processes that have just ended.
        """
        lasted_s = time.monotonic() - self._left_alone_at
        for pid in self._stragglers.keys() & statuses.keys():
            command = self._stragglers.pop(pid)
            if os.WIFSIGNALED(statuses[pid]) or lasted_s > _HELPER_ENDS_WITHIN_S:
                self._ended_stragglers.append(command)

    def _begin_stop(self) -> None:
        """Send the component the stop signal. Further calls do nothing.

        If the children of the component have a grace period (`Order.children_grace_s`), they get
        the signal before the component's first process.
        """
        if self._kill_at is not None or self._children_until is not None:
            return
        if self._order.children_grace_s is None:
            self._stop_first_process()
            return
        self._children_until = time.monotonic() + self._order.children_grace_s
        if self._first_process_lives:
            # SIGSTOP keeps the first process from starting another child. `_stop_first_process`
            # resumes the first process.
            with contextlib.suppress(OSError):
                os.kill(self._first_process, signal.SIGSTOP)
        for pid, parent in self._living_children():
            tree.signal_with_group(pid, self._order.stop_signal, parent=parent)

    def _living_children(self) -> list[tuple[int, int]]:
        """Return `(pid, parent)` of each living child of the component.

        The children of the component include processes that this guardian process has adopted after
        the death of the component's first process.
        """
        parents = [os.getpid(), self._first_process] if self._first_process_lives else [os.getpid()]
        return [
            (pid, parent)
            for parent in parents
            for pid in tree.children(parent)
            if pid != self._first_process and not tree.is_zombie(pid)
        ]

    def _stop_first_process(self) -> None:
        """Send the stop signal to the component's process group, and set the time of SIGKILL."""
        self._kill_at = time.monotonic() + self._order.grace_s
        if self._first_process_lives:
            # The signal cannot reach a wrong process. The first process is not reaped yet, so the
            # kernel cannot have reused its pid or its process group id.
            tree.stop_group(self._first_process, self._order.stop_signal)

    def _delay_kill(self, for_s: float) -> None:
        """Postpone a planned SIGKILL, so that it is sent no sooner than `for_s` seconds from now.

        If no SIGKILL is planned, or if SIGKILL was already sent, do nothing.
        """
        if self._kill_at is not None and self._kill_rounds is None:
            self._kill_at = max(self._kill_at, time.monotonic() + for_s)

    def _begin_kill(self) -> None:
        if self._kill_rounds is None:
            self._kill_at = time.monotonic()
            self._kill_rounds = tree.KillRounds()

    def _kill_once(self, rounds: tree.KillRounds) -> None:
        """Send SIGKILL to all remaining descendants of this process, and report the survivors."""
        # The kernel kills all processes of a cgroup at once, including processes that are being
        # forked. Search for new processes only if no process was killed in this way.
        is_cgroup_killed = self._cgroup is not None and cgroup.kill_all(self._cgroup)
        tree.kill_below_once(self._reap, chases=not is_cgroup_killed)
        rounds.note_round()
        if self._reported_stuck or rounds.lasts_s < tree.REFUSED_AFTER_S:
            return
        remaining = tree.living_or_all(tree.descendants(os.getpid()))
        if remaining and rounds.are_stuck(remaining):
            self._reported_stuck = True
            self._channel.send("stuck", pids=remaining)


def main() -> None:
    """Run this process as a guardian process, or as the process that forks guardians.

    The arguments are in `sys.argv`, see the module docstring. Never returns, except after an error.
    """
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Ignore the error for the signals 32 and 33: the C library uses them itself, and does not
        # let a program change their action.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(signum, signal.SIG_IGN if signum in _IGNORED_SIGNALS else signal.SIG_DFL)
    fd, supervisor, mark, *inside = map(int, [*sys.argv[1:4], *sys.argv[5:]])
    if sys.argv[4] == TEMPLATE:
        # This process only forks the guardian processes. It owns no component that it must stop
        # when the supervisor ends. So let the kernel kill this process as soon as the supervisor
        # ends.
        tree.die_with_parent(os.getppid())
        tree.mark_own(mark)
        fd, supervisor, mark, *inside = fork_guardians(_socket.socket(fileno=fd))
    # Keep the component from inheriting the guardian process's file descriptors. A component that
    # inherits the lock of a GPU would keep the lock after the end of the run.
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
    # Install a handler for SIGCHLD that does nothing. Otherwise SIGCHLD may be ignored, because
    # this process inherits that setting from its parent. The kernel would then discard the exit
    # status of each child.
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # Some kernels have no subreapers and refuse this call. Muster then uses the containment level
    # L1, which needs no subreaper, see `containment.Level`.
    with contextlib.suppress(OSError):
        tree.become_subreaper()
    os.chdir("/")
    if orders := await_messages(channel, supervisor):
        order, *messages = orders
        Guardian(Order(**order), channel, supervisor, wakeup_read).run(messages)
    # Skip the interpreter's cleanup, which would make the exit ten times longer.
    os._exit(0)


def fork_guardians(requests: _socket.socket) -> list[int]:
    """Fork a guardian process for each request of the supervisor, until the socket is closed.

    When the supervisor has closed the socket, this process exits.

    A request is a message with the keys `mark`, `name` and `is_inside`. It carries the file
    descriptors FD and PIDFD of the new guardian (see the module docstring). If `is_inside` is true,
    it also carries INIT and ALIVE. It may carry further file descriptors, which the guardian keeps
    open but does not use.

    The answer to a request is the pid of the guardian, or 0 if the fork failed. The answer is sent
    when the nearest subreaper has adopted the guardian.

    Args:
        requests: Socket to the supervisor.

    Returns:
        Returns only in a forked guardian: the arguments FD, PIDFD and MARK of that guardian, and
        INIT and ALIVE if it enters a PID namespace.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Let the garbage collector ignore all objects that exist now. The guardian processes are forked
    # from this process and share its memory. The garbage collector writes to each object that it
    # examines, and the kernel would then copy the memory of the object for each guardian.
    gc.freeze()
    room = _socket.CMSG_SPACE(4 * _MAX_FDS_PER_MESSAGE)
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
            [order], _ = decode_messages(data)
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
    """Show a component's name in the command line and the environment of this process.

    A forked process has the command line of its parent, so `ps` would show no component's name.

    The name is written over the placeholder TEMPLATE in the memory of this process. `ps` reads the
    command line and the environment from that memory.

    Source: proc_pid_stat(5), fields 48 to 51: the addresses of the command line and of the
        environment.
    """
    start, end = (int(tree.stat_fields(os.getpid())[index]) for index in (45, 48))
    room = TEMPLATE.encode()
    whole = ctypes.string_at(start, end - start)
    named = whole.replace(room, name.encode()[: len(room)].ljust(len(room), b"\0"))
    ctypes.memmove(start, named, len(named))


def enter_namespace(init: int, alive: int) -> None:
    """Fork a child that continues as the guardian process inside a PID namespace.

    The function returns only in the child. The parent stays outside the namespace, waits for the
    child's end, and exits.

    Args:
        init: Pidfd of the namespace's first process.
        alive: File descriptor of a pipe. The namespace ends when no process holds the pipe open.

    Raises:
        OSError: The namespace cannot be entered.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # First try to enter only the PID namespace and its mount namespace. The kernel refuses this if
    # an unprivileged user has created the PID namespace together with a user namespace. The second
    # call enters the user namespace as well.
    if (
        libc.setns(init, _NAMESPACE_FLAGS) != 0
        and libc.setns(init, _NAMESPACE_FLAGS | _CLONE_NEWUSER) != 0
    ):
        error = ctypes.get_errno()
        raise OSError(error, f"the PID namespace cannot be entered: {os.strerror(error)}")
    os.close(init)
    os.set_inheritable(alive, False)
    # setns(2) does not move the calling process into the PID namespace, only its later children.
    child = os.fork()
    if child == 0:
        # `die_with_parent` cannot notice here that the parent has already died. The parent is
        # outside the namespace, so `getppid` returns 0 before and after the parent's death. In this
        # rare case, Muster accepts that the guardian process survives its parent.
        tree.die_with_parent(os.getppid())
        return
    os.closerange(3, 1024)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.waitpid(child, 0)
    os._exit(0)


class Order(types.SimpleNamespace):
    """The first message from the supervisor to a guardian process: a command, and how to stop it.

    - `argv`: command line, a list of str.
    - `env`: complete environment of the component.
    - `cwd`: working directory.
    - `log`: path of the log file. The component's output is appended to it.
    - `stop_signal`: number of the stop signal.
    - `grace_s`: seconds from the stop signal to SIGKILL.
    - `cgroup`: cgroup v2 directory for the component, or None.
    - `memory_cgroup`: cgroup directory with the component's memory limit, or None. The supervisor
      puts the component there.
    - `files`: soft limit of open files of the component.
    - `umask`: umask of the component, or None to inherit the umask of this process.
    - `children_grace_s`: seconds to wait for the end of the component's children before its first
      process gets the stop signal, or None. See `guarded.Command`.
    """

    def prepare(self) -> None:
        """Set the file limit, the output and the working directory of this process.

        Called in the component's first process, before that process executes its program.

        Raises:
            OSError: The log or the working directory cannot be opened.
        """
        # If the hard limit is below `files`, the soft limit cannot be set. The component then keeps
        # the soft limit that it has inherited.
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.files, hard))
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self.cwd)
        # Set the umask of the program only now, after the log was created. The log was created with
        # Muster's own umask, so that other users cannot read the log.
        if self.umask is not None:
            os.umask(self.umask)


def encode_message(message: dict) -> bytes:  # type: ignore[type-arg]
    """Return the bytes of a message: its length, then its content in the `marshal` format.

    The format depends on the Python version, but sender and receiver run the same interpreter.
    Importing `marshal` takes no time, while importing `json` or `pickle` takes milliseconds.
    """
    data = marshal.dumps(message)
    return struct.pack("I", len(data)) + data


def decode_messages(buffer: bytes) -> tuple[list[dict], bytes]:  # type: ignore[type-arg]
    """Decode all complete messages at the start of a buffer.

    Returns:
        `(messages, rest)`: the decoded messages, and the bytes of a message that is incomplete.
    """
    messages: list[dict] = []  # type: ignore[type-arg]
    while len(buffer) >= 4 and len(buffer) >= (end := 4 + struct.unpack_from("I", buffer)[0]):
        messages.append(marshal.loads(buffer[4:end]))
        buffer = buffer[end:]
    return messages, buffer


class Channel:
    """Sends and receives messages over the socket between a guardian process and its supervisor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._socket = _socket.socket(fileno=fd)
        self._buffer = b""
        os.set_inheritable(fd, False)

    def receive(self) -> tuple[list[dict], bool]:  # type: ignore[type-arg]
        """Wait for data from the supervisor.

        Returns:
            `(messages, is_connected)`: the messages that are complete now, and False if the
            supervisor has closed its end of the socket.
        """
        try:
            data = os.read(self.fd, 65536)
        except ConnectionError:
            data = b""
        messages, self._buffer = decode_messages(self._buffer + data)
        return messages, bool(data)

    def send(self, event: str, pidfd: int = -1, **fields: object) -> None:
        """Send an event to the supervisor. Does nothing if the supervisor has ended.

        Args:
            event: Name of the event.
            pidfd: File descriptor to send along; -1 for none.
            fields: Further content of the message.
        """
        message = {"event": event, "at_monotonic_s": time.monotonic(), **fields}
        fds = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", pidfd))]
        # Ignore an error, because it means that the supervisor has ended. `Guardian._watch` notices
        # this end as well, and stops the component.
        with contextlib.suppress(OSError):
            self._socket.sendmsg([encode_message(message)], fds if pidfd >= 0 else [])


def await_messages(channel: Channel, supervisor: int) -> list[dict]:  # type: ignore[type-arg]
    """Wait for the next messages of the supervisor, and return them.

    Args:
        channel: Channel to the supervisor.
        supervisor: Pidfd of the supervisor.

    Returns:
        An empty list if the supervisor has ended or has closed the channel.
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
