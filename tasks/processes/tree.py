"""Process trees of this machine: list the descendants of a process, and end a whole tree.

Only the kernel can prove that a tree is empty: a subreaper without a child (ECHILD) has no
descendants. A listing of /proc only names the processes to signal next. It misses most processes
that fork and exit within a fraction of a millisecond.

Standard library only, and quick to import: the guardian starts with it in tens of milliseconds.
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
# A resource limit without effect since Linux 2.4.25. Source: getrlimit(2).
_RLIMIT_LOCKS = 10
#: Smallest number that is a mark. Real limits of file locks are smaller.
_MARK_BASE = 1 << 62
#: Byte that permits a spawned process to execute its program.
_GO = b"g"
#: Soft limit of open files of this process at its start.
FILES_AT_START, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

#: This file is missing if the kernel was built without CONFIG_PROC_CHILDREN.
_CHILDREN = "/proc/thread-self/children"
#: Seconds in which one round follows newborn processes, before all are listed again.
_CHASE_S = 0.005


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def become_subreaper(is_one: bool = True) -> None:
    """Make this process adopt its orphaned descendants; False ends that."""
    _prctl(_PR_SET_CHILD_SUBREAPER, is_one)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the *thread* that forked it ends.

    Call this in the child after the fork. If the parent has already died, this process is killed at
    once.

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
    """Start a program in its own session; the kernel ends the program together with this process.

    The program starts without ignored or blocked signals, and its standard input is empty.

    Args:
        argv: The command line.
        env: The complete environment.
        prepare: Called in the new process.
        may_go: Called in this process with the pid, before the program is executed. False prevents
            the execution.

    Returns:
        The pid, once the program runs.

    Raises:
        OSError: Exec or `prepare` failed, or `may_go` returned False. No process remains.
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
                with suppress(OSError, ValueError):  # 32 and 33 belong to the C library.
                    signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            prepare()
            if os.read(go_read, 1) != _GO:
                raise OSError(errno.ECANCELED, "was stopped before it began", argv[0])
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
        with suppress(BrokenPipeError):  # The child has failed and reported its error.
            os.write(go_write, _GO)
    os.close(go_write)
    # Exec closes the pipe, so an empty read proves that the program runs.
    problem = os.fsdecode(os.read(report_read, 4096))
    os.close(report_read)
    if problem:
        os.waitpid(pid, 0)
        number, _, text = problem.partition(" ")
        raise OSError(int(number), text)
    return pid


def stop_group(leader: int, signum: int) -> None:
    """Signal a process group, and resume it: stopped processes handle signals only after
    SIGCONT.
    """
    for number in (signum, signal.SIGCONT):
        with suppress(PermissionError, ProcessLookupError):
            os.killpg(leader, number)


def new_mark() -> int:
    """Return a random mark that no other process of this machine has."""
    return _MARK_BASE | int.from_bytes(os.urandom(8), "big") >> 4


def mark_own(mark: int) -> None:
    """Give this process and its future descendants a mark.

    The mark is stored in a resource limit without effect. Unlike an environment or a session, it
    survives each fork, exec and daemonisation.

    Raises:
        OSError: The hard limit is too low.
    """
    _, hard = resource.getrlimit(_RLIMIT_LOCKS)
    try:
        resource.setrlimit(_RLIMIT_LOCKS, (mark, hard))
    except ValueError:
        why = "the limit of file locks (ulimit -x) can't be set: make it unlimited"
        raise OSError(errno.EPERM, why) from None


def allow_files(wanted: int) -> None:
    """Raise this process's soft limit of open files, which is often 1,024, as far as permitted.

    Programs that this process starts should get the former limit, `FILES_AT_START`, because many of
    them use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def mark_of(pid: int) -> int | None:
    """Return the mark of a process; 0 if it has no mark, None if it has ended."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as f:
            _, _, rest = f.read().partition(b"Max file locks")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    soft = rest.split()[0] if rest else b""
    return int(soft) if soft.isdigit() and int(soft) >= _MARK_BASE else 0


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of `/proc/<pid>/stat` from the third (state) on.

    Returns:
        An empty list if the process has ended, or if /proc hides it (hidepid). A hidden process
        belongs to another user.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def parent_of(pid: int) -> int:
    """Return the parent's pid; 0 if the process has ended."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it has ended.

    Together with the pid and the boot id, it identifies a process permanently.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def is_zombie(pid: int) -> bool:
    """Return True if the process has ended, whether or not its parent has reaped it."""
    fields = stat_fields(pid)
    # The state is also Z if only the main thread has ended while others continue.
    return not fields or (fields[0] in (b"Z", b"X") and _thread_count(pid) <= 1)


def _thread_count(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def all_pids(proc: str = "/proc") -> list[int]:
    """Return the pids of all visible processes, including kernel threads and zombies."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def command_of(pid: int, proc: str = "/proc") -> str:
    """Return the command line, joined with spaces; empty for a kernel thread or an ended
    process.
    """
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def environment_of(pid: int, proc: str = "/proc") -> dict[str, str]:
    """Return the environment with which a process began its program.

    Returns:
        An empty dictionary if the process has ended.

    Raises:
        PermissionError: The process belongs to another user.
        OSError: This process cannot open more files.
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


def real_user_of(pid: int, proc: str = "/proc") -> int | None:
    """Return the real uid of a process; None if the process has ended or is hidden.

    A program with the set-user-ID bit keeps the real uid of the user who started it.
    """
    try:
        with open(f"{proc}/{pid}/status", "rb") as f:
            _, _, rest = f.read().partition(b"\nUid:")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return int(rest.split()[0]) if rest else None


def is_of_own_user(pid: int, proc: str = "/proc") -> bool:
    """Return True if this user started the process.

    Another user's process can copy the variables and the mark of a run, so they prove nothing.
    """
    return real_user_of(pid, proc) == os.getuid()


def open_files(pid: int, proc: str = "/proc") -> dict[int, str]:
    """Return the target of each open file descriptor: a path, or a name such as `socket:[4711]`.

    Returns:
        `target[fd]`; empty if the process has ended or belongs to another user.

    Raises:
        OSError: This process cannot read /proc, for example because of EMFILE.
    """
    targets: dict[int, str] = {}
    hidden = (FileNotFoundError, ProcessLookupError, PermissionError)
    with suppress(*hidden):
        for name in os.listdir(f"{proc}/{pid}/fd"):
            with suppress(*hidden):  # The file was closed after the listing.
                targets[int(name)] = os.readlink(f"{proc}/{pid}/fd/{name}")
    return targets


def machine() -> str:
    """Return an id of this boot and PID namespace.

    Together with a pid and its start time, it identifies a process permanently.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f"{f.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def children(pid: int) -> list[int]:
    """Return the pids of the direct children of a process, including zombies."""
    return _children_of()(pid)


def descendants(*roots: int) -> list[int]:
    """Return all pids below the roots, parents before their children, including zombies."""
    return [pid for pid, _ in _below(*roots)]


def _below(
    *roots: int, is_meant: Callable[[int], bool] = lambda child: True
) -> list[tuple[int, int]]:
    """Return `(pid, parent)` of each descendant of the roots, parents first.

    Only these trees are read, so that the effort does not grow with the number of other processes.

    Args:
        roots: Pids whose descendants are returned.
        is_meant: Selects children of the roots. Each counts with its descendants.
    """
    children_of = _children_of()
    found = [(pid, root) for root in roots for pid in children_of(root) if is_meant(pid)]
    known = {pid for pid, _ in found}
    for parent, _ in found:
        # A pid may appear twice if it was reused during the listing.
        fresh = [pid for pid in children_of(parent) if pid not in known]
        known.update(fresh)
        found.extend((pid, parent) for pid in fresh)
    return found


def _children_of() -> Callable[[int], list[int]]:
    """Return a function that lists the children of a process.

    If the kernel cannot list children directly, the function uses a table of all processes that is
    read now.
    """
    if os.path.exists(_CHILDREN):
        return _children_by_thread
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        if parent := parent_of(pid):
            children.setdefault(parent, []).append(pid)
    return lambda pid: children.get(pid, [])


def _children_by_thread(pid: int) -> list[int]:
    child_pids: list[int] = []
    # An ended or hidden process has no children. Other errors, such as EMFILE, are raised.
    hidden_errors = (FileNotFoundError, ProcessLookupError, PermissionError)
    with suppress(*hidden_errors):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(*hidden_errors), open(f"/proc/{pid}/task/{thread}/children", "rb") as f:
                child_pids.extend(map(int, f.read().split()))
    return child_pids


def signal_if(pid: int, signum: int, is_meant: Callable[[], bool]) -> bool:
    """Signal a process if `is_meant` returns True. Return True if it was signalled.

    The pidfd is opened before `is_meant` is called, so that both refer to the same process.

    Raises:
        PermissionError: This process may not signal it.
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


def signal_process(pid: int, signum: int, *, parent: int) -> bool:
    """Signal `pid` if it still is a child of `parent`, so that a reused pid is not signalled.

    Returns:
        True if the signal was sent.

    Raises:
        PermissionError: This process may not signal it.
    """
    return signal_if(pid, signum, lambda: parent_of(pid) == parent)


def signal_with_group(pid: int, signum: int, *, parent: int) -> None:
    """Signal `pid` if it is a child of `parent`; if it leads a process group, signal the group.

    Between a worker and the engine of a flow run, Prefect has a process that ignores SIGTERM. The
    engine gets the signal through its group.
    """
    with suppress(PermissionError, ProcessLookupError):
        if os.getpgid(pid) == pid and parent_of(pid) == parent:
            stop_group(pid, signum)
        else:
            signal_process(pid, signum, parent=parent)


def signal_descendants(
    root: int, signum: int, *, is_meant: Callable[[int], bool] = lambda child: True
) -> list[int]:
    """Signal the descendants of `root`.

    Args:
        root: The pid whose descendants are signalled.
        signum: The signal.
        is_meant: Selects children of `root`. Each is signalled with its descendants.

    Returns:
        The signalled pids, parents first. Processes that may not be signalled are skipped.
    """
    signalled = []
    # List all of them first, because the children of an ended process get another parent.
    for pid, parent in _below(root, is_meant=is_meant):
        with suppress(PermissionError):
            if signal_process(pid, signum, parent=parent):
                signalled.append(pid)
    return signalled


def reap_all() -> tuple[dict[int, int], bool]:
    """Reap every child of this process that has ended.

    Returns:
        `({pid: wait status}, is_empty)`; `is_empty` is True if this process has no child at all.
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
    reap: Callable[[], bool], is_meant: Callable[[int], bool] = lambda child: True
) -> None:
    """SIGKILL everything below this process, a subreaper, in one round (see `kill_once`).

    Call it again until no child remains.

    Args:
        reap: Reaps ended children. Returns True if no child remains.
        is_meant: Selects children of this process. Each is killed with its descendants.
    """
    adopter = os.getpid()
    ours: set[int] = set()

    def send_all(signum: int) -> list[int]:
        return signal_descendants(adopter, signum, is_meant=is_meant)

    def kill_newborn(pid: int) -> bool:
        parent = parent_of(pid)
        is_ours = parent in ours or (parent == adopter and is_meant(pid))
        return is_ours and signal_process(pid, signal.SIGKILL, parent=parent)

    kill_once(send_all, kill_newborn, reap, ours)


def kill_once(
    send_all: Callable[[int], Iterable[int]],
    kill_newborn: Callable[[int], bool],
    is_done: Callable[[], bool],
    found: set[int],
) -> None:
    """SIGKILL a set of processes in one round; the processes are listed again for each signal.

    First all of them are stopped, so that they cannot start each other again. Then all are killed.
    Then newborn processes are followed for a few milliseconds, because a listing misses a process
    that forks and exits quickly.

    Args:
        send_all: Sends a signal to all of the processes, and returns their pids.
        kill_newborn: Kills a newborn process if it belongs to the set. Returns True if it does.
        is_done: Returns True if no process remains. Newborns are then not followed.
        found: Receives the pids of all signalled processes.
    """
    for _ in range(20):
        fresh = {*send_all(signal.SIGSTOP)} - found
        if not fresh:
            break
        found |= fresh
    found.update(send_all(signal.SIGKILL))
    deadline = time.monotonic() + _CHASE_S
    last = last_pid()
    while not is_done() and time.monotonic() < deadline:
        newest = last_pid()
        found.update(pid for pid in range(last + 1, newest + 1) if kill_newborn(pid))
        # Check the last pids again: a newborn may become a child of this process when its parent
        # exits.
        last = max(newest - 8, 0)


def is_ready(fd: int, events: int, within_s: float = 0.0) -> bool:
    """Wait until a file descriptor has one of the events of poll(2). Return False after the limit.

    Unlike select(2), poll(2) accepts any file descriptor number.
    """
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(within_s * 1000))


def last_pid() -> int:
    """Return the newest pid of this PID namespace. Source: proc_loadavg(5), the last field."""
    with open("/proc/loadavg", "rb") as f:
        return int(f.read().split()[-1])
