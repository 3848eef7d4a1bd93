"""Measure the limits of this machine for processes, threads and open files.

Linux refuses a new process or thread with the same error for each of several limits. The texts of
this module name the limits, their values, and the processes that use most of them. This module uses
only the standard library.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.processes import tree
from tasks.record.outcome import Failure

#: Value of `Failure.rule` if a limit of processes and threads has caused the failure.
PROCESS_RULE = "process-limit"
#: Value of `Failure.rule` if a limit of open files has caused the failure.
FILE_RULE = "file-limit"
#: A limit counts as reached if at least this share of it is in use. The share is below 1, because
#: some processes that used the limit may have ended before the measurement.
_REACHED_SHARE = 0.95
#: Matches messages of programs that could not start a process or thread.
_NO_PROCESS = re.compile(
    r"can't start new thread|unable to create (?:new )?(?:native )?thread|pthread_create.{0,20}fail"
    r"|cannot fork|can't fork|fork: (?:retry|Resource)|failed to spawn thread|clone3? failed"
    r"|BlockingIOError: \[Errno 11\] Resource temporarily unavailable$"
    r"|thread.{0,60}Resource temporarily unavailable",
    re.IGNORECASE | re.MULTILINE,
)
#: Matches messages of programs that could not open a file, because too many files were open.
_NO_FILE = re.compile(r"too many open files|\[Errno 2[34]\]|\bE[MN]FILE\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimit:
    """A limit of this machine, and how much of the limit was in use at one moment."""

    #: Name of the limit, with the cgroup or user to which it applies, such as `pids.max of the
    #: cgroup /sys/fs/cgroup/pids/job`.
    name: str
    #: Unit of the limit, such as `processes and threads`.
    unit: str
    used: int
    limit: int
    #: Text about the process with the most threads, such as `pid 812 (python) has 40`. Empty if
    #: unknown.
    largest_user: str = ""
    #: Number of times that the kernel has refused to start a process or thread because of the
    #: limit; 0 if unknown.
    refusals: int = 0

    @property
    def is_reached(self) -> bool:
        return self.refusals > 0 or self.used >= self.limit * _REACHED_SHARE

    def __str__(self) -> str:
        """Return a text such as `ulimit -u of user 1000: 40 of 40 processes and threads in use`."""
        text = f"{self.name}: {self.used} of {self.limit} {self.unit} in use"
        if self.refusals:
            text += f", {self.refusals} refused"
        return f"{text}; {self.largest_user}" if self.largest_user else text


def measure_process_limits() -> tuple[HostLimit, ...]:
    """Return the limits that restrict how many processes and threads this process can start.

    Each `HostLimit` contains the number in use now. The result is incomplete if this process has no
    free file descriptor to read /proc.
    """
    threads_by_pid: dict[int, int] = {}
    with suppress(OSError):
        threads_by_pid = dict(_count_threads())
    limits = [*_measure_cgroups(threads_by_pid)]

    # Leave out RLIMIT_NPROC for root, because the kernel does not apply this limit to root.
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    uid = os.getuid()
    if soft != resource.RLIM_INFINITY and uid != 0:
        own = {pid: count for pid, count in threads_by_pid.items() if _read_uid(pid) == uid}
        limits.append(
            HostLimit(
                name=f"RLIMIT_NPROC (ulimit -u) of user {uid}",
                unit="processes and threads",
                used=sum(own.values()),
                limit=soft,
                largest_user=_name_largest(own),
            )
        )
    with suppress(OSError, ValueError):
        of_machine = HostLimit(
            name="/proc/sys/kernel/threads-max of this machine",
            unit="threads",
            used=sum(threads_by_pid.values()),
            limit=int(Path("/proc/sys/kernel/threads-max").read_text()),
            largest_user=_name_largest(threads_by_pid),
        )
        if of_machine.is_reached:
            limits.append(of_machine)
    return tuple(limits)


def describe_file_limits() -> str:
    """Return a text about the limit of open files (RLIMIT_NOFILE) of each process that reached it.

    If there is no such process now, the text names the limit that the run's components inherit from
    this process.
    """
    limits: list[HostLimit] = []
    with suppress(OSError):
        for pid in tree.all_pids():
            with suppress(OSError, ValueError):
                limits.append(_measure_files_of(pid))
    if reached := [limit for limit in limits if limit.is_reached]:
        return _join(reached)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"each component starts with a limit of {soft} open files (RLIMIT_NOFILE, ulimit -n)"


def _measure_files_of(pid: int) -> HostLimit:
    """Return the limit of open files of a process.

    Raises:
        OSError: The process has ended, or belongs to another user.
        ValueError: The process has no limit.
    """
    return HostLimit(
        name=f"limit of open files RLIMIT_NOFILE (ulimit -n) of pid {pid} ({_read_name(pid)})",
        unit="files",
        used=len(os.listdir(f"/proc/{pid}/fd")),
        limit=_read_file_limit(pid),
    )


def _describe_own_files() -> str:
    """Return a message that this process has reached its limit of open files.

    The open files are not counted, because counting needs a free file descriptor.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"Muster's process {os.getpid()} has reached its limit of {soft} open files "
        "(RLIMIT_NOFILE, ulimit -n)"
    )


def _describe_files_of_machine() -> str:
    """Return a text about the limit of open files of the whole machine.

    Raises:
        OSError: The file `/proc/sys/fs/file-nr` cannot be read.
    """
    used, _, limit = Path("/proc/sys/fs/file-nr").read_text().split()
    return (
        f"{used} of {limit} possible open files are in use on this machine (/proc/sys/fs/file-max)"
    )


def describe_shortage(error: BaseException) -> str:
    """Return a text with the limits that explain an error of this process, or an empty string.

    This function raises no error. If this process has no free file descriptor, it cannot read
    /proc, and the text may be empty.

    Args:
        error: An error which may mean that no process, thread or file could be created.
    """
    with suppress(OSError):
        if is_process_shortage(error):
            return _join(measure_process_limits())
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return _describe_own_files()
        if isinstance(error, OSError) and error.errno == errno.ENFILE:
            return _describe_files_of_machine()
    return ""


def is_process_shortage(error: BaseException) -> bool:
    """Return True if an error means that no process or thread could be started."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


def name_reached_limit(failure: Failure, limits_at_exit: Sequence[HostLimit] = ()) -> Failure:
    """Return a copy of a failure. The copy names a reached limit as the cause.

    The limit may apply to processes, threads or open files. If the log of the component shows
    another cause, the failure is returned unchanged. The call may take some tenths of a second.

    Args:
        failure: Failure of a component.
        limits_at_exit: Result of `measure_process_limits` at the end of the component. If empty,
            the limits are measured now.
    """
    text = "\n".join((failure.message, failure.line, failure.log_tail))
    if _NO_PROCESS.search(text):
        description = _join(limits_at_exit or measure_process_limits())
        rule = PROCESS_RULE
        hint = (
            "The program could not start another process or thread. Use fewer worker processes or "
            "threads (for example, set OMP_NUM_THREADS). Or raise the limit of processes: `ulimit "
            "-u`, or pids.max of the cgroup."
        )
    elif _NO_FILE.search(text):
        description = describe_file_limits()
        rule = FILE_RULE
        hint = (
            "The program could not open another file or connection, because too many files were "
            "open. Close unused files, use fewer worker processes, or raise the limit with "
            "`ulimit -n` before Muster starts."
        )
    else:
        return failure
    if not description:
        return failure
    message = failure.message
    # The rule `spawn` means that a component could not be started. The message of such a failure
    # already names the reached limit.
    if failure.rule != "spawn":
        message = f"{message}; {description}"
    return failure.with_changes(rule=rule, message=message, hint=failure.hint or hint)


def _join(limits: Iterable[HostLimit]) -> str:
    """Return descriptions of the reached limits, or of all limits if none is reached now."""
    limits = tuple(limits)
    reached = [limit for limit in limits if limit.is_reached]
    return "; ".join(map(str, reached or limits))


def _count_threads() -> Iterator[tuple[int, int]]:
    """Yield `(pid, number of threads)` of each process."""
    for pid in tree.all_pids():
        with suppress(OSError, ValueError, IndexError):
            # The number of threads is field 20 of /proc/PID/stat (source: proc_pid_stat(5)).
            # `stat_fields` begins with field 3.
            yield pid, int(tree.stat_fields(pid)[17])


def _measure_cgroups(threads_by_pid: dict[int, int]) -> Iterator[HostLimit]:
    """Yield the limit on the number of processes of each cgroup that contains this process.

    A cgroup without such a limit is left out.
    """
    for directory in _list_pids_cgroups():
        try:
            limit = int((directory / "pids.max").read_text())
            used = int((directory / "pids.current").read_text())
        except (OSError, ValueError):  # for example, if the limit is the word `max`
            continue
        refusals = 0
        with suppress(OSError, ValueError):
            events = (directory / "pids.events").read_text().split()
            refusals = int(events[events.index("max") + 1])
        inside: set[int] = set()
        for folder, _, _ in os.walk(directory):
            with suppress(OSError, ValueError):
                inside.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
        yield HostLimit(
            name=f"pids.max of the cgroup {directory}",
            unit="processes and threads",
            used=used,
            limit=limit,
            largest_user=_name_largest({pid: threads_by_pid.get(pid, 1) for pid in inside}),
            refusals=refusals,
        )


def _list_pids_cgroups() -> Iterator[Path]:
    """Yield the cgroups that may limit the number of processes, the innermost cgroup first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "pids" in controllers.split(","):
            paths["cgroup"] = path
    for mount in mounts:
        _, place, kind, options, *_ = mount.split(" ")
        if kind not in paths or (kind == "cgroup" and "pids" not in options.split(",")):
            continue
        root = Path(place)
        directory = root / paths[kind].lstrip("/")
        while directory != root.parent:
            yield directory
            directory = directory.parent


def _name_largest(counts: dict[int, int]) -> str:
    """Return a text about the process with the most threads. Empty if `counts` is empty.

    Args:
        counts: Mapping from the pid of each process to its number of threads.
    """
    if not counts:
        return ""
    [(pid, count)] = Counter(counts).most_common(1)
    return f"pid {pid} ({_read_name(pid)}) has {count}"


def _read_name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return "unknown"


def _read_uid(pid: int) -> int:
    """Return the id of the user that a process runs as, or -1 if it has ended."""
    with suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid
    return -1


def _read_file_limit(pid: int) -> int:
    """Return the soft limit of open files of a process.

    Raises:
        OSError: The process has ended.
        ValueError: The process has no limit.
    """
    for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
        if line.startswith("Max open files"):
            return int(line.split()[3])
    raise ValueError(f"pid {pid} has no limit on open files")
