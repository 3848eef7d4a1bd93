"""Whether anything of a process outlived it, by the kernel's word.

A judge of its own, which shares no code with what it judges. It is a subreaper, so each descendant
that loses its parent becomes its child, and the kernel's ECHILD is the proof that none is left;
where it may make a cgroup v2, the process also runs in one, and that must be unpopulated too.
Its lines are `pid N`, `ended STATUS`, and at last `empty S AT` (after S seconds, at UTC epoch
seconds AT), or `left PID COMMAND` for each process that was still there at the deadline, which it
then kills; before the last ones `cgroup PATH` for each cgroup that was made below its own and is
still there, and `oracles ECHILD [populated]`.

Stdlib only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

TIDY_WITHIN_S = 2.0


def is_watched(deadline_s: float) -> bool:
    """Fork, and watch over the new process to the end of all that it begins: in that process, True;
    in this one, which then is the oracle, False once it has spoken."""
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        raise SystemExit("not a subreaper")
    cgroup = own_cgroup()
    pid = os.fork()
    if pid == 0:
        # A group of its own, as a shell gives it to what runs in the foreground.
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
    say(f"pid {pid}")
    ended, status = 0, 0
    while ended != pid:
        ended, status = os.wait()
    say(f"ended {os.waitstatus_to_exitcode(status)}")
    since = time.monotonic()
    while is_alive() or is_populated(cgroup):
        if time.monotonic() - since > deadline_s:
            for left in below(cgroup):
                say(f"left {left} {command_of(left)}")
            end_all(cgroup)
            return
        time.sleep(0.005)
    after_s, at = time.monotonic() - since, time.time()
    # Whoever ended the last process may be about to remove what it was in.
    since = time.monotonic()
    while made_below(cgroup) and time.monotonic() - since < TIDY_WITHIN_S:
        time.sleep(0.005)
    for path in made_below(cgroup):
        say(f"cgroup {path}")
    say("oracles ECHILD" + (" populated" if cgroup else ""))
    say(f"empty {after_s:.3f} {at:.3f}")


def is_alive() -> bool:
    """Whether a child is left; reaps those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def end_all(cgroup: str) -> None:
    since = time.monotonic()
    while (is_alive() or is_populated(cgroup)) and time.monotonic() - since < 10:
        for pid in below(cgroup):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def below(cgroup: str) -> list[int]:
    parents = {int(name): parent_of(name) for name in os.listdir("/proc") if name.isdigit()}
    found = [os.getpid()]
    for root in found:
        found.extend(pid for pid, parent in parents.items() if parent == root)
    for path in [cgroup, *made_below(cgroup)] if cgroup else []:
        with contextlib.suppress(OSError), open(f"{path}/cgroup.procs", encoding="ascii") as f:
            found.extend(int(line) for line in f if int(line) not in found)
    return found[1:]


def own_cgroup() -> str:
    """A new cgroup v2 below the one this process is in; empty where none can be made."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as f:
            [mine] = [line[3:].strip() for line in f if line.startswith("0::")]
        with open("/proc/self/mountinfo", encoding="utf-8") as f:
            [(root, place)] = [line.split()[3:5] for line in f if " - cgroup2 " in line]
        here = os.path.normpath(os.path.join(place, os.path.relpath(mine, root)))
        path = f"{here}/oracle-{os.getpid()}"
        os.mkdir(path)
    except (OSError, ValueError):
        return ""
    return path


def is_populated(cgroup: str) -> bool:
    if not cgroup:
        return False
    with open(f"{cgroup}/cgroup.events", encoding="ascii") as f:
        return "populated 1\n" in f.readlines()


def made_below(cgroup: str) -> list[str]:
    """Inner ones first."""
    found = [path for path, _, _ in os.walk(cgroup, topdown=False)] if cgroup else []
    return found[:-1]


def remove(cgroup: str) -> None:
    for path in [*made_below(cgroup), cgroup]:
        with contextlib.suppress(OSError):
            os.rmdir(path)


def write(path: str, text: str) -> None:
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as f:
        f.write(text)


def parent_of(name: str) -> int:
    try:
        with open(f"/proc/{name}/stat", "rb") as f:
            return int(f.read().rpartition(b") ")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").replace("\n", " ")[:120]
    except OSError:
        return "?"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
