"""Check through the kernel whether descendants of a process outlived it.

The checking process is called the oracle. It shares no code with the programs that it checks. The
oracle is a subreaper: a descendant that loses its parent becomes a child of the oracle. The error
ECHILD of the kernel then proves that no descendant is alive. If the oracle may create a cgroup v2,
the checked process runs in it, and the cgroup must become unpopulated, too.

The oracle prints these lines:

- `pid N`: process id of the checked process.
- `ended STATUS`: the checked process has ended with this exit code, or with the signal -STATUS.
- `cgroup PATH`: a cgroup that the checked process created below its own still exists.
- `oracles ECHILD` or `oracles ECHILD populated`: the kernel's answers that the oracle used.
- `empty S AT`: the last descendant ended S seconds after the checked process. AT is the time in
  UTC epoch seconds.
- `left PID COMMAND`: a descendant that was alive at the deadline. The oracle kills it.

This module uses only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

#: Time limit for the removal of a cgroup after its last process has ended, in seconds.
TIDY_WITHIN_S = 2.0


def is_watched(deadline_s: float) -> bool:
    """Fork this process, and wait in the parent until the child and its descendants have ended.

    The parent is called the oracle. The oracle asks the kernel whether descendants of the child
    survive.

    Args:
        deadline_s: Seconds that descendants may live after the end of the child.

    Returns:
        True in the child. False in the oracle, after the oracle has printed the result.
    """
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        raise SystemExit("not a subreaper")
    cgroup = create_cgroup()
    pid = os.fork()
    if pid == 0:
        # Give the program its own process group, as a shell does for a foreground program.
        os.setpgid(0, 0)
        if cgroup:
            write(f"{cgroup}/cgroup.procs", "0")
        return True
    try:
        watch(deadline_s, pid, cgroup)
    finally:
        if cgroup:
            remove(cgroup)
    return False


def watch(deadline_s: float, pid: int, cgroup: str) -> None:
    """Wait for the end of a process and of its descendants, and print the result.

    The module's docstring describes the printed lines.

    Args:
        deadline_s: Seconds that descendants may live after the end of the process.
        pid: Process id of the process.
        cgroup: Path of the cgroup of the process, or an empty string.
    """
    print_line(f"pid {pid}")
    ended_pid = 0
    status = 0
    while ended_pid != pid:
        ended_pid, status = os.wait()
    print_line(f"ended {os.waitstatus_to_exitcode(status)}")

    since = time.monotonic()
    while is_alive() or is_populated(cgroup):
        if time.monotonic() - since > deadline_s:
            for living_pid in list_processes(cgroup):
                print_line(f"left {living_pid} {read_command(living_pid)}")
            end_all(cgroup)
            return
        time.sleep(0.005)
    after_s = time.monotonic() - since
    at = time.time()

    # A program that has killed the last process of a cgroup may need a moment to remove the cgroup.
    since = time.monotonic()
    while list_inner_cgroups(cgroup) and time.monotonic() - since < TIDY_WITHIN_S:
        time.sleep(0.005)
    for path in list_inner_cgroups(cgroup):
        print_line(f"cgroup {path}")
    print_line("oracles ECHILD" + (" populated" if cgroup else ""))
    print_line(f"empty {after_s:.3f} {at:.3f}")


def is_alive() -> bool:
    """Reap the children that have ended, and return True if a child is still alive."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def end_all(cgroup: str) -> None:
    """Kill all descendants of this process and all processes of a cgroup. Give up after 10 s."""
    since = time.monotonic()
    while (is_alive() or is_populated(cgroup)) and time.monotonic() - since < 10:
        for pid in list_processes(cgroup):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def list_processes(cgroup: str) -> list[int]:
    """Return the pids of this process, of all its descendants, and of all processes in a cgroup.

    Args:
        cgroup: Directory of the cgroup; empty for no cgroup.
    """
    parents = {int(name): read_parent_pid(name) for name in os.listdir("/proc") if name.isdigit()}
    pids = [os.getpid()]
    # The list grows during the loop, so that the children of each descendant are added, too.
    for ancestor in pids:
        pids.extend(pid for pid, parent in parents.items() if parent == ancestor)
    for path in [cgroup, *list_inner_cgroups(cgroup)] if cgroup else []:
        with contextlib.suppress(OSError), open(f"{path}/cgroup.procs", encoding="ascii") as f:
            pids.extend(int(line) for line in f if int(line) not in pids)
    return pids[1:]


def create_cgroup() -> str:
    """Create a cgroup v2 below the cgroup of this process.

    Returns:
        The path of the new cgroup, or an empty string if this process cannot create a cgroup.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as f:
            [current] = [line[3:].strip() for line in f if line.startswith("0::")]
        with open("/proc/self/mountinfo", encoding="utf-8") as f:
            [(root, mount)] = [line.split()[3:5] for line in f if " - cgroup2 " in line]
        parent = os.path.normpath(os.path.join(mount, os.path.relpath(current, root)))
        path = f"{parent}/oracle-{os.getpid()}"
        os.mkdir(path)
    except (OSError, ValueError):
        return ""
    return path


def is_populated(cgroup: str) -> bool:
    """Return True if a cgroup, or a cgroup below it, has processes.

    An empty path means that there is no cgroup. The result is then False.
    """
    if not cgroup:
        return False
    with open(f"{cgroup}/cgroup.events", encoding="ascii") as f:
        return "populated 1\n" in f.readlines()


def list_inner_cgroups(cgroup: str) -> list[str]:
    """Return the paths of the cgroups below a cgroup, the innermost first."""
    paths = [path for path, _, _ in os.walk(cgroup, topdown=False)] if cgroup else []
    return paths[:-1]


def remove(cgroup: str) -> None:
    """Remove a cgroup and the cgroups below it, if they have no processes."""
    for path in [*list_inner_cgroups(cgroup), cgroup]:
        with contextlib.suppress(OSError):
            os.rmdir(path)


def write(path: str, text: str) -> None:
    """Write a text to a file, and ignore every OSError."""
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as f:
        f.write(text)


def read_parent_pid(name: str) -> int:
    """Return the pid of a process's parent, or 0 if the process has ended.

    Args:
        name: Pid of the process, as the name of its folder in /proc.
    """
    try:
        with open(f"/proc/{name}/stat", "rb") as f:
            return int(f.read().rpartition(b") ")[2].split()[1])
    except OSError:
        return 0


def read_command(pid: int) -> str:
    """Return the first 120 characters of the command line of a process, or `?` if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").replace("\n", " ")[:120]
    except OSError:
        return "?"


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
