"""Process trees of this machine: who descends from whom, and how a whole tree is ended.

The emptiness of a tree is proved by the kernel, not by a listing: a subreaper that has no child
left (ECHILD) has no descendant left. A listing only says whom to signal next, because a process
that forks and exits in a fraction of a millisecond is missed by most of them.

Stdlib only, and light to import: the guardian starts with it in tens of milliseconds.
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
# The kernel has not looked at it since 2.4.25. Source: getrlimit(2).
_RLIMIT_LOCKS = 10
_MARK_BASE = 1 << 62
#: What a process that was spawned waits for before it executes its program.
_GO = b"g"
#: How many files this process could open when it began.
FILES_AT_START, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

#: Not there where the kernel is built without CONFIG_PROC_CHILDREN.
_CHILDREN = "/proc/thread-self/children"
#: How long one round follows newborn processes before it lists all of them again.
_CHASE_S = 0.005


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def become_subreaper(is_one: bool = True) -> None:
    """This process adopts every descendant whose own parent dies; or no longer does."""
    _prctl(_PR_SET_CHILD_SUBREAPER, is_one)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the *thread* that forked it ends.

    Call it in the child, after the fork, with the pid that forked it: a parent that died before
    the request was made is noticed here.
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
    """Start a program in a session of its own, which ends with this process; no signal is ignored
    or blocked there, and there is nothing to read.

    Args:
        prepare: called in the new process.
        may_go: told the pid of the process before it executes the program; whether it may.

    Returns: its pid, once the program runs. Raises: OSError, as exec or `prepare` gave it; then no
    process is left.
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
        with suppress(BrokenPipeError):  # It has failed, and reported it.
            os.write(go_write, _GO)
    os.close(go_write)
    # Closed by exec, so an empty read says that the program runs.
    problem = os.fsdecode(os.read(report_read, 4096))
    os.close(report_read)
    if problem:
        os.waitpid(pid, 0)
        number, _, text = problem.partition(" ")
        raise OSError(int(number), text)
    return pid


def stop_group(leader: int, signum: int) -> None:
    """Signal a process group; what is stopped takes the signal only once it goes on."""
    for one in (signum, signal.SIGCONT):
        with suppress(PermissionError, ProcessLookupError):
            os.killpg(leader, one)


def new_mark() -> int:
    """A mark that no other process of this machine has."""
    return _MARK_BASE | int.from_bytes(os.urandom(8), "big") >> 4


def mark_own(mark: int) -> None:
    """Mark this process, and all that will descend from it, as others than its parent's own.

    The mark is a resource limit without effect: unlike an environment or a session it can't be
    lost by accident, across any fork, exec and daemonising.

    Raises: OSError, where a hard limit stands in the way.
    """
    _, hard = resource.getrlimit(_RLIMIT_LOCKS)
    try:
        resource.setrlimit(_RLIMIT_LOCKS, (mark, hard))
    except ValueError:
        why = "the limit of file locks (ulimit -x) can't be set: make it unlimited"
        raise OSError(errno.EPERM, why) from None


def allow_files(wanted: int) -> None:
    """Raise the limit of open files of this process, often 1,024, as far as it may.

    What it starts is to have the limit of before, `FILES_AT_START`: many a program uses select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def mark_of(pid: int) -> int | None:
    """What `mark_own` left in a process; 0 for one without a mark, None when it is gone."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as f:
            _, _, rest = f.read().partition(b"Max file locks")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    soft = rest.split()[0] if rest else b""
    return int(soft) if soft.isdigit() and int(soft) >= _MARK_BASE else 0


def stat_fields(pid: int) -> list[bytes]:
    """Fields of `/proc/<pid>/stat` from the third (state) on; empty when the process is gone, or is
    another user's whom /proc hides (hidepid), and so none of ours."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def parent_of(pid: int) -> int:
    """The parent's pid, 0 when the process is gone."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def start_ticks(pid: int) -> int:
    """When the process began, in clock ticks since boot, 0 when it is gone.

    With the pid and the boot id it names one process for ever.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def is_zombie(pid: int) -> bool:
    """The process has ended and waits to be reaped (or is gone altogether)."""
    fields = stat_fields(pid)
    # A main thread that has left shows Z while other threads run on.
    return not fields or (fields[0] in (b"Z", b"X") and _thread_count(pid) <= 1)


def _thread_count(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def all_pids(proc: str = "/proc") -> list[int]:
    """Every process that can be listed now, kernel threads and zombies included."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def command_of(pid: int, proc: str = "/proc") -> str:
    """The command line joined with spaces; empty for a kernel thread, and for what has ended."""
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
    """The real uid of a process; None if the process is gone or hidden.

    A program with the set-user-ID bit keeps the real uid of the user who started it.
    """
    try:
        with open(f"{proc}/{pid}/status", "rb") as f:
            _, _, rest = f.read().partition(b"\nUid:")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return int(rest.split()[0]) if rest else None


def is_of_own_user(pid: int, proc: str = "/proc") -> bool:
    """Return True if this user started the process. Only then do the variables and the mark of a
    run mean something: any other user can copy both."""
    return real_user_of(pid, proc) == os.getuid()


def open_files(pid: int, proc: str = "/proc") -> dict[int, str]:
    """`target[fd]` of a process: a path, or a name such as `socket:[4711]`.

    Returns: nothing for a process that has ended, and for one of another user.

    Raises: OSError, where this process itself cannot look, such as EMFILE.
    """
    found: dict[int, str] = {}
    hidden = (FileNotFoundError, ProcessLookupError, PermissionError)
    with suppress(*hidden):
        for name in os.listdir(f"{proc}/{pid}/fd"):
            with suppress(*hidden):  # Closed meanwhile.
                found[int(name)] = os.readlink(f"{proc}/{pid}/fd/{name}")
    return found


def machine() -> str:
    """This boot and pid namespace: within one, a pid and its start name a process for ever."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f"{f.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def children(pid: int) -> list[int]:
    """The direct children of a process, zombies included."""
    return _children_of()(pid)


def descendants(*roots: int) -> list[int]:
    """All pids below the roots, parents before their children, zombies included."""
    return [pid for pid, _ in _below(*roots)]


def _below(
    *roots: int, is_meant: Callable[[int], bool] = lambda child: True
) -> list[tuple[int, int]]:
    """`(pid, parent)` of all that is below the roots.

    No other processes of the machine are looked at: to end many trees costs as much for each of
    them as to end one.

    Args:
        is_meant: which children of the roots count, each with all that is below it.
    """
    children_of = _children_of()
    found = [(pid, root) for root in roots for pid in children_of(root) if is_meant(pid)]
    known = {pid for pid, _ in found}
    for parent, _ in found:
        # A pid that is given to another meanwhile may come again.
        fresh = [pid for pid in children_of(parent) if pid not in known]
        known.update(fresh)
        found.extend((pid, parent) for pid in fresh)
    return found


def _children_of() -> Callable[[int], list[int]]:
    """What tells the children of a process; where the kernel does not, they are listed now."""
    if os.path.exists(_CHILDREN):
        return _children_by_thread
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        if parent := parent_of(pid):
            children.setdefault(parent, []).append(pid)
    return lambda pid: children.get(pid, [])


def _children_by_thread(pid: int) -> list[int]:
    found: list[int] = []
    # Only what has ended, or is hidden, has none: that no more files can be opened is an error.
    passed_over = (FileNotFoundError, ProcessLookupError, PermissionError)
    with suppress(*passed_over):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(*passed_over), open(f"/proc/{pid}/task/{thread}/children", "rb") as f:
                found.extend(map(int, f.read().split()))
    return found


def signal_if(pid: int, signum: int, is_meant: Callable[[], bool]) -> bool:
    """Signal a process if it is the one that is meant; whether it was signalled.

    The pidfd comes first and pins the process, so that the look at it holds for the signal.

    Raises: PermissionError.
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
    """Signal `pid` if it still is a child of `parent`: a pid that was re-used is left alone.

    Returns: whether the signal was sent. Raises: PermissionError.
    """
    return signal_if(pid, signum, lambda: parent_of(pid) == parent)


def signal_with_group(pid: int, signum: int, *, parent: int) -> None:
    """Signal `pid`, with its process group if it leads one, while it is a child of `parent`.

    Prefect has a process between a worker and the engine of a flow run that ignores SIGTERM: the
    engine gets the signal by its group.
    """
    with suppress(PermissionError, ProcessLookupError):
        if os.getpgid(pid) == pid and parent_of(pid) == parent:
            stop_group(pid, signum)
        else:
            signal_process(pid, signum, parent=parent)


def signal_descendants(
    root: int, signum: int, *, is_meant: Callable[[int], bool] = lambda child: True
) -> list[int]:
    """Signal everything below `root`.

    Args:
        is_meant: which children of `root` to signal, each with all that is below it.

    Returns: the pids signalled, parents first. A process that may not be signalled is passed over.
    """
    signalled = []
    # All are listed first: the children of what has been ended are another's.
    for pid, parent in _below(root, is_meant=is_meant):
        with suppress(PermissionError):
            if signal_process(pid, signum, parent=parent):
                signalled.append(pid)
    return signalled


def reap_all() -> tuple[dict[int, int], bool]:
    """Reap every child of this process that has ended.

    Returns: `({pid: wait status}, empty)`; empty means the kernel says there is no child at all.
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
    """One round (see `kill_once`) against everything below this process, a subreaper. Call it again
    until there is no child left.

    Args:
        reap: reaps what has ended, and says whether no child is left.
        is_meant: which children to end, each with all that is below it.
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
    """One round against processes that are listed anew for each signal.

    All are stopped before any is killed, so that no two can revive each other; then newborns are
    followed for a few milliseconds, since what forks and exits faster than a listing takes is never
    found by one.

    Args:
        send_all: sends a signal to all that are there, and returns their pids.
        kill_newborn: ends a process just born if it is one of them; whether it was.
        is_done: whether nothing is left, so that no newborns are looked for.
        found: all that were there, filled in on the way.
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
        # Looked at again: a newborn's parent may exit, and make it ours, a moment later.
        last = max(newest - 8, 0)


def is_ready(fd: int, events: int, within_s: float = 0.0) -> bool:
    """Whether an fd of any number, which select(2) is not for, has one of the events of poll(2)."""
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(within_s * 1000))


def last_pid() -> int:
    """The newest pid of this pid namespace. Source: proc_loadavg(5), the last field."""
    with open("/proc/loadavg", "rb") as f:
        return int(f.read().split()[-1])
