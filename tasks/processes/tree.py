"""Process trees of this machine: list the descendants of a process, and end a whole tree.

A subreaper is a process that the kernel makes the parent of its orphaned descendants. Only a
subreaper can prove that a tree is empty: it has no descendants if waitpid(2) reports that it has no
child (ECHILD). A list of processes from /proc is no such proof. It misses most processes that fork
and exit within a fraction of a millisecond, so it only names the processes to signal next.

This module uses only the standard library and imports quickly, because the guardian imports it and
must start in tens of milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Value of the kernel's constant RLIMIT_LOCKS, which selects the resource limit on file locks. The
#: kernel no longer enforces this limit, so `mark_own` can store a mark in it. Source: getrlimit(2).
_RLIMIT_LOCKS = 10
#: Smallest mark. `mark_own` stores a mark in the resource limit on file locks. A smaller value of
#: this limit is not a mark, but a limit that an administrator has set.
_MARK_BASE = 1 << 62
#: Byte that `spawn` writes to the new process to permit the execution of its program.
_GO = b"g"
#: Limit of open files that this process had at its start (soft limit).
FILES_AT_START, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

#: File with the children of the current thread. The file is missing if the kernel was built without
#: CONFIG_PROC_CHILDREN.
_CHILDREN = "/proc/thread-self/children"
#: Seconds in which one round of `kill_once` finds and kills new processes. After that, the next
#: round lists all processes again.
_CHASE_S = 0.005
#: Smallest pause between two rounds of SIGKILL, in seconds.
_ROUND_PAUSE_AT_LEAST_S = 0.02
#: Largest pause in seconds between two rounds of SIGKILL. In one round, each living process gets
#: the signal once.
_ROUND_PAUSE_AT_MOST_S = 5.0
#: Pause between two rounds of SIGKILL, as a share of the time since the first round.
_ROUND_PAUSE_PART = 0.05
#: For this number of seconds after the first round of SIGKILL, the rounds follow each other without
#: a pause.
_ROUNDS_AT_ONCE_S = 1.0
#: Seconds from the first SIGKILL to the report about the remaining processes, if this user can
#: signal none of them. They are not reported at once, because they may end by themselves when their
#: parent has ended.
REFUSED_AFTER_S = 1.0
#: Processes that still exist this number of seconds after the first SIGKILL are reported as stuck.
#: A stuck process is in uninterruptible sleep, for example on a broken disk.
STUCK_AFTER_S = 5.0


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    """Change a setting of this process with prctl(2). Raises OSError if the kernel refuses it."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def become_subreaper(is_one: bool = True) -> None:
    """Make this process a subreaper.

    If the parent of a descendant ends, the kernel makes this process the new parent.

    Args:
        is_one: False to make this process an ordinary process again.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, is_one)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to send SIGKILL to this process when the *thread* that forked it ends.

    Call this function in the child, after the fork. If the parent has already ended, this process
    is killed at once.

    Args:
        parent_pid: Pid of the parent that forked this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def spawn(
    argv: list[str],
    env: dict[str, str],
    prepare: Callable[[], None] = lambda: None,
    may_go: Callable[[int], bool] = lambda pid: True,
) -> int:
    """Start a program in a new session, and return its pid as soon as the program runs.

    The kernel kills the program when the calling thread ends. The program starts without ignored
    or blocked signals, and its standard input is empty.

    Args:
        argv: The command line.
        env: The complete environment.
        prepare: Called in the new process before the program is executed.
        may_go: Called in this process with the pid of the new process, before the program is
            executed. If it returns False, the program is not executed.

    Raises:
        OSError: The execution or `prepare` failed, or `may_go` returned False. No process remains.
    """
    report_read, report_write = os.pipe()
    go_read, go_write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(report_read)
            os.close(go_write)
            die_with_parent(parent)
            os.setsid()
            for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                # Skip the signals 32 and 33, which the C library uses itself.
                with suppress(OSError, ValueError):
                    signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            prepare()
            if os.read(go_read, 1) != _GO:
                raise OSError(
                    errno.ECANCELED,
                    "the process was stopped before it executed the program",
                    argv[0],
                )
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            text = f"{error.errno} {error.strerror}: {error.filename}"
            os.write(report_write, os.fsencode(text))
        except BaseException as error:
            os.write(report_write, ascii(f"0 {error!r}")[1:-1].encode())
        os._exit(127)
    os.close(report_write)
    os.close(go_read)
    if may_go(pid):
        # If the child has already failed, it has closed its end of the pipe, and has reported its
        # error through another pipe. So a broken pipe is no error here.
        with suppress(BrokenPipeError):
            os.write(go_write, _GO)
    os.close(go_write)
    # If the child's `exec` call succeeds, the kernel closes the child's end of the pipe. So if
    # there is nothing to read, the program runs.
    problem = os.fsdecode(os.read(report_read, 4096))
    os.close(report_read)
    if problem:
        os.waitpid(pid, 0)
        number, _, text = problem.partition(" ")
        raise OSError(int(number), text)
    return pid


def stop_group(leader: int, signum: int) -> None:
    """Send a signal and then SIGCONT to a process group.

    If SIGSTOP has suspended a process, the process handles other signals only after SIGCONT.

    Args:
        leader: Id of the process group, which is the pid of its leader.
        signum: The signal.
    """
    for number in (signum, signal.SIGCONT):
        with suppress(PermissionError, ProcessLookupError):
            os.killpg(leader, number)


def new_mark() -> int:
    """Return a random number with which `mark_own` can mark a process and its descendants.

    No other process of this machine has the same mark.
    """
    return _MARK_BASE | int.from_bytes(os.urandom(8), "big") >> 4


def mark_own(mark: int) -> None:
    """Mark this process and its future descendants with a number, so that they can be found.

    The number is stored as the resource limit on file locks. The kernel does not enforce this
    limit. A descendant can change its environment and its session, but it inherits this limit with
    each fork and exec.

    Args:
        mark: Number from `new_mark`.

    Raises:
        OSError: The hard limit on file locks is too low.
    """
    _, hard = resource.getrlimit(_RLIMIT_LOCKS)
    try:
        resource.setrlimit(_RLIMIT_LOCKS, (mark, hard))
    except ValueError:
        why = "the limit on file locks cannot be set: run `ulimit -x unlimited`, then retry"
        raise OSError(errno.EPERM, why) from None


def allow_files(wanted: int) -> None:
    """Raise this process's soft limit of open files to `wanted`, at most to the hard limit.

    Afterwards, the caller must start other programs with the former limit, `FILES_AT_START`. Many
    programs use select(2), which fails for file descriptors above 1,023.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def read_mark(pid: int) -> int | None:
    """Return the mark of a process: the number that `mark_own` has set for it or for an ancestor.

    Returns:
        0 if the process is not marked. None if the process has ended or /proc hides it.
    """
    try:
        with open(f"/proc/{pid}/limits", "rb") as f:
            _, _, rest = f.read().partition(b"Max file locks")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    soft = rest.split()[0] if rest else b""
    return int(soft) if soft.isdigit() and int(soft) >= _MARK_BASE else 0


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of `/proc/<pid>/stat`, beginning with the third field, the state.

    Returns:
        An empty list if the process has ended, or if /proc hides it. With the mount option
        `hidepid`, /proc hides the processes of other users.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def read_parent(pid: int) -> int:
    """Return the pid of the parent of a process; 0 if the process has ended or /proc hides it."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if the process has ended.

    No two processes of one boot have both the same pid and the same start time.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def is_zombie(pid: int) -> bool:
    """Return True if the process has ended, even if its parent has not read its exit status."""
    fields = stat_fields(pid)
    # Also check the number of threads. The kernel shows the state Z for a process whose main thread
    # has ended, even if other threads of the process still run.
    return not fields or (fields[0] in (b"Z", b"X") and _thread_count(pid) <= 1)


def living_or_all(pids: list[int]) -> list[int]:
    """Return the processes that are not zombies. If all processes are zombies, return all of them.

    Use this function to report why a process tree has not ended. If only zombies remain, a zombie
    is the reason, for example because a debugger traces the zombie.
    """
    return [pid for pid in pids if not is_zombie(pid)] or pids


def _thread_count(pid: int) -> int:
    """Return the number of threads of a process; 0 if it has ended or /proc hides it."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def all_pids(proc: str = "/proc") -> list[int]:
    """Return the pids of all processes that /proc shows, including kernel threads and zombies."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def read_command_line(pid: int, proc: str = "/proc") -> str:
    """Return the command line of a process, its words joined with spaces.

    Returns:
        An empty string for a kernel thread or a process that has ended.
    """
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def read_environment(pid: int, proc: str = "/proc") -> dict[str, str]:
    """Return the environment variables that a process had when it executed its program.

    Returns:
        An empty dictionary if the process has ended.

    Raises:
        PermissionError: The process belongs to another user.
        OSError: The calling process cannot open more files.
    """
    try:
        with open(f"{proc}/{pid}/environ", "rb") as f:
            settings = f.read().split(b"\0")
    except PermissionError:
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return {}
    pairs = (setting.decode(errors="replace").partition("=") for setting in settings)
    return {name: value for name, _, value in pairs if name}


def read_real_user(pid: int, proc: str = "/proc") -> int | None:
    """Return the real uid of a process; None if the process has ended or /proc hides it.

    A program with the set-user-ID bit keeps the real uid of the user who started it.
    """
    try:
        with open(f"{proc}/{pid}/status", "rb") as f:
            _, _, rest = f.read().partition(b"\nUid:")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return int(rest.split()[0]) if rest else None


def belongs_to_own_user(pid: int, proc: str = "/proc") -> bool:
    """Return True if the user of the calling process also started the process `pid`.

    Another user's process can copy both the environment variables and the mark (see `mark_own`) of
    a run's processes. So call this function before a process is treated as part of a run.
    """
    return read_real_user(pid, proc) == os.getuid()


def list_open_files(pid: int, proc: str = "/proc") -> dict[int, str]:
    """Return the open files of a process.

    Returns:
        Mapping from file descriptors to the open files: a path, or a name such as `socket:[4711]`.
        Empty if the process has ended or belongs to another user.

    Raises:
        OSError: The calling process cannot read /proc, for example because it has too many open
            files.
    """
    targets: dict[int, str] = {}
    hidden = (FileNotFoundError, ProcessLookupError, PermissionError)
    with suppress(*hidden):
        for name in os.listdir(f"{proc}/{pid}/fd"):
            # Skip a file that was closed after the listing.
            with suppress(*hidden):
                targets[int(name)] = os.readlink(f"{proc}/{pid}/fd/{name}")
    return targets


def machine() -> str:
    """Return a text that identifies this boot of the machine and this PID namespace.

    Together with the pid and the start time of a process, this text identifies the process
    permanently.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f"{f.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def children(pid: int) -> list[int]:
    """Return the pids of the direct children of a process, including zombies."""
    return _children_of()(pid)


def descendants(*roots: int) -> list[int]:
    """Return the pids of all descendants of the processes `roots`, without these processes.

    Parents come before their children. Zombies are included.
    """
    return [pid for pid, _ in _below(*roots)]


def _below(
    *roots: int, is_meant: Callable[[int], bool] = lambda child: True
) -> list[tuple[int, int]]:
    """Return `(pid, parent)` of each descendant of the processes `roots`, parents first.

    Args:
        roots: Pids whose descendants are returned.
        is_meant: Function that returns True for a child of a root if the child and its descendants
            must be returned.
    """
    children_of = _children_of()
    found = [(pid, root) for root in roots for pid in children_of(root) if is_meant(pid)]
    known = {pid for pid, _ in found}
    for parent, _ in found:
        # Skip a pid that is already listed. The kernel may reuse a pid during the listing.
        fresh = [pid for pid in children_of(parent) if pid not in known]
        known.update(fresh)
        found.extend((pid, parent) for pid in fresh)
    return found


def _children_of() -> Callable[[int], list[int]]:
    """Return a function that lists the children of a process.

    The returned function reads the children from the kernel. If the kernel offers no list of
    children, all processes are read now, and the returned function searches this result.
    """
    if os.path.exists(_CHILDREN):
        return _children_by_thread
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        if parent := read_parent(pid):
            children.setdefault(parent, []).append(pid)
    return lambda pid: children.get(pid, [])


def _children_by_thread(pid: int) -> list[int]:
    """Return the children of a process, from the kernel's list for each of its threads."""
    child_pids: list[int] = []
    # Return no children for a process that has ended or that /proc hides. Other errors are raised,
    # for example EMFILE for too many open files.
    hidden_errors = (FileNotFoundError, ProcessLookupError, PermissionError)
    with suppress(*hidden_errors):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(*hidden_errors), open(f"/proc/{pid}/task/{thread}/children", "rb") as f:
                child_pids.extend(map(int, f.read().split()))
    return child_pids


def signal_if(pid: int, signum: int, is_meant: Callable[[], bool]) -> bool:
    """Send a signal to a process if `is_meant` returns True.

    A pidfd of the process is opened before `is_meant` is called. If the kernel reuses the pid after
    the check, the signal therefore does not reach the new process.

    Returns:
        True if the signal was sent.

    Raises:
        PermissionError: The kernel does not allow the calling process to send the signal.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_meant():
            return False
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def refuses_signals(pid: int) -> bool:
    """Return True if the kernel does not allow this process to signal the process `pid` (EPERM).

    For example, an ordinary user cannot signal a process that `sudo` or another set-user-ID program
    has started.
    """
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return False


class KillRounds:
    """Decides when a process tree gets its next SIGKILL, and when its survivors are reported.

    Create the object before the first round of `kill_below_once`.

    In one round, each living process of the tree gets SIGKILL. The pauses between the rounds become
    longer with time. With short pauses, a process that cannot be killed would cost a fifth of a CPU
    core until the process ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: Returns the time in CLOCK_MONOTONIC seconds.
        """
        self._clock = clock
        self._began_at = clock()
        self._next_at = self._began_at

    @property
    def lasts_s(self) -> float:
        """Seconds since this object was created."""
        return self._clock() - self._began_at

    @property
    def pause_s(self) -> float:
        """Remaining seconds of the pause after the last round of SIGKILL; 0 after the pause."""
        return max(0.0, self._next_at - self._clock())

    def is_due(self) -> bool:
        """Return True if the next round of SIGKILL may begin now.

        In the first second after this object was created, a round may begin at any time. Later, a
        round may begin only when the pause after the previous round has ended.
        """
        return self.lasts_s <= _ROUNDS_AT_ONCE_S or self.pause_s == 0.0

    def note_round(self) -> None:
        """Begin the pause before the next round. Call this method after each round.

        In a round, all processes of the tree get SIGKILL.
        """
        pause_s = max(_ROUND_PAUSE_AT_LEAST_S, _ROUND_PAUSE_PART * self.lasts_s)
        self._next_at = self._clock() + min(pause_s, _ROUND_PAUSE_AT_MOST_S)

    def are_stuck(self, pids: Iterable[int]) -> bool:
        """Return True if the remaining processes must now be reported as survivors of SIGKILL.

        The processes are reported `STUCK_AFTER_S` seconds after the first SIGKILL. If all of them
        are processes that this user cannot signal, they are reported earlier, after
        `REFUSED_AFTER_S` seconds.

        Args:
            pids: The remaining processes.
        """
        if self.lasts_s < REFUSED_AFTER_S:
            return False
        return self.lasts_s >= STUCK_AFTER_S or all(refuses_signals(pid) for pid in pids)


def signal_process(pid: int, signum: int, *, parent: int) -> bool:
    """Send a signal to the process `pid` if it still is a child of `parent`.

    If the kernel has given the pid to another process, that process gets no signal.

    Returns:
        True if the signal was sent.

    Raises:
        PermissionError: The kernel does not allow the calling process to send the signal.
    """
    return signal_if(pid, signum, lambda: read_parent(pid) == parent)


def signal_with_group(pid: int, signum: int, *, parent: int) -> None:
    """Send a signal to the process `pid` if it is a child of `parent`.

    If the process leads a process group, the whole group gets the signal. For example, the child of
    a Prefect worker leads a group. The child ignores SIGTERM, but the group also contains the
    process that executes the flow run.
    """
    with suppress(PermissionError, ProcessLookupError):
        if os.getpgid(pid) == pid and read_parent(pid) == parent:
            stop_group(pid, signum)
        else:
            signal_process(pid, signum, parent=parent)


def signal_descendants(
    root: int, signum: int, *, is_meant: Callable[[int], bool] = lambda child: True
) -> list[int]:
    """Send a signal to the descendants of the process `root`.

    Args:
        root: Pid of the process, which gets no signal itself.
        signum: The signal.
        is_meant: Function that returns True for a child of `root` if the child and its descendants
            must get the signal.

    Returns:
        The pids that got the signal, parents first. Processes of other users are skipped.
    """
    signalled = []
    # List all descendants before the first signal. When a process ends, its children get another
    # parent, so a later search would miss the children.
    for pid, parent in _below(root, is_meant=is_meant):
        with suppress(PermissionError):
            if signal_process(pid, signum, parent=parent):
                signalled.append(pid)
    return signalled


def reap_all() -> tuple[dict[int, int], bool]:
    """Reap all ended children of this process: read the exit status of each child.

    Returns:
        `(statuses, is_empty)`: a mapping from the pid of each reaped child to its wait status, and
        True if this process has no child now.
    """
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses, True
        if pid == 0:
            return statuses, False
        statuses[pid] = status


def kill_below_once(
    reap: Callable[[], bool],
    is_meant: Callable[[int], bool] = lambda child: True,
    *,
    chases: bool = True,
) -> None:
    """Send SIGKILL to all descendants of this process, in one round (see `kill_once`).

    This process must be a subreaper. Repeat the call until no child remains, with the pauses of
    `KillRounds`. Processes that this user cannot signal are skipped.

    Args:
        reap: Reads the exit status of children that have ended. Returns True if no child remains.
        is_meant: Returns True for each child of this process that must be killed. Only these
            children and their descendants are killed.
        chases: See `kill_once`.
    """
    adopter = os.getpid()
    ours: set[int] = set()

    def send_all(signum: int) -> list[int]:
        return signal_descendants(adopter, signum, is_meant=is_meant)

    def kill_newborn(pid: int) -> bool:
        parent = read_parent(pid)
        is_ours = parent in ours or (parent == adopter and is_meant(pid))
        with suppress(PermissionError):
            return is_ours and signal_process(pid, signal.SIGKILL, parent=parent)
        return False

    kill_once(send_all, kill_newborn, reap, ours, chases=chases)


def kill_once(
    send_all: Callable[[int], Iterable[int]],
    kill_newborn: Callable[[int], bool],
    is_done: Callable[[], bool],
    found: set[int],
    *,
    chases: bool = True,
) -> None:
    """Send SIGKILL to a set of processes, in one round.

    First, SIGSTOP stops all of them, so that they cannot start new processes. Then SIGKILL kills
    them. Then, for a few milliseconds, each new process of the machine is checked and killed if it
    belongs to the set. Without this check, processes that fork and exit quickly would be missed.

    Args:
        send_all: Lists the processes of the set, sends a signal to each, and returns their pids.
        kill_newborn: Kills a new process if it belongs to the set. Returns True if it was killed.
        is_done: Returns True if no process of the set remains. The round then ends.
        found: Receives the pids of all processes that got a signal.
        chases: False to skip the search for new processes. The search is not needed if the kernel
            kills a whole cgroup, because no new process of a cgroup escapes that.
    """
    for _ in range(20):
        fresh = {*send_all(signal.SIGSTOP)} - found
        if not fresh:
            break
        found |= fresh
    found.update(send_all(signal.SIGKILL))
    if not chases:
        return
    deadline = time.monotonic() + _CHASE_S
    last = last_pid()
    while not is_done() and time.monotonic() < deadline:
        newest = last_pid()
        found.update(pid for pid in range(last + 1, newest + 1) if kill_newborn(pid))
        # Check the newest eight pids again in the next iteration. A new process may become a
        # descendant of this process a moment later, when its parent exits and this process adopts
        # it.
        last = max(newest - 8, 0)


def is_ready(fd: int, events: int, within_s: float = 0.0) -> bool:
    """Wait until a file descriptor has one of the events of poll(2).

    The function uses poll(2), because select(2) fails for file descriptors above 1,023.

    Returns:
        False if the time limit `within_s` is over before such an event.
    """
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(within_s * 1000))


def last_pid() -> int:
    """Return the pid that the kernel assigned last in this PID namespace.

    Source: proc_loadavg(5), the last field.
    """
    with open("/proc/loadavg", "rb") as f:
        return int(f.read().split()[-1])
