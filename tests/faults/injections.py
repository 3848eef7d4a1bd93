"""Tools that inject faults: cgroup limits, small disks, unrelated servers, reused process ids."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.support.supervised_components import python, sh, wait_until

#: HTTP server with the command line `python(SERVER) PORT ANSWERS`. Each path cycles through the
#: letters of ANSWERS: `y` answers 200, `n` answers 503, `-` never answers. The server logs each
#: request as `PATH LETTER`. The server answers only 503 after the file `down` was created in its
#: working directory.
SERVER = """
import collections, os, socket, sys, time
request_counts = collections.Counter()
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", int(sys.argv[1])))
s.listen(50)
os.write(1, b"up\\n")
while True:
    c, _ = s.accept()
    words = c.recv(65536).split(b" ")
    if len(words) < 2:
        continue
    path = words[1].decode()
    letter = sys.argv[2][request_counts[path] % len(sys.argv[2])]
    if os.path.exists("down"):
        letter = "n"
    request_counts[path] += 1
    os.write(1, f"{path} {letter}\\n".encode())
    while letter == "-":
        time.sleep(600)
    status = b"200 OK" if letter == "y" else b"503 Service Unavailable"
    c.sendall(b"HTTP/1.0 " + status + b"\\r\\nContent-Type: application/json\\r\\n\\r\\n{}")
    c.close()
"""

#: Program that starts one process for each process id on its command line, with exactly this id.
#: The processes belong to no run. The program then prints `up`, and kills the processes when its
#: stdin is closed.
#: Source: clone(2), `set_tid` of clone3.
_TAKE_PIDS = """
import ctypes, os, signal, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
for requested_pid in map(int, sys.argv[1:]):
    tid = (ctypes.c_int * 1)(requested_pid)
    # Fields: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid,
    # set_tid_size, cgroup.
    fields = struct.pack("11Q", 0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(tid), 1, 0)
    arguments = ctypes.create_string_buffer(fields, len(fields))
    pid = libc.syscall(435, arguments, ctypes.c_size_t(len(fields)))
    if pid == 0:
        os.setsid()
        os.closerange(0, 3)
        os.execve("/bin/sleep", ["sleep", "604"], {})
    if pid < 0:
        print(os.strerror(ctypes.get_errno()), flush=True)
        sys.exit()
print("up", flush=True)
sys.stdin.read()
for pid in map(int, sys.argv[1:]):
    os.kill(pid, signal.SIGKILL)
"""

#: Program that traces a process until its own stdin is closed. The program never waits for the
#: traced process. So a traced process stays a zombie after a kill: the parent of a traced process
#: cannot reap the process before the tracer has waited for it.
_TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
seized = libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0  # PTRACE_SEIZE
print("up" if seized else "refused", flush=True)
sys.stdin.read()
"""


def server(port: int, answers: str) -> tuple[str, ...]:
    """Return the command line of the program `SERVER` with this port and these answers.

    `answers` has one letter per answer; see `SERVER`.
    """
    return (*python(SERVER), str(port), answers)


@contextlib.contextmanager
def helper(*command: str, cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """Start a process outside every run, wait until it prints `up`, and yield its process id.

    The process is killed when the context ends.

    Args:
        *command: Command line of the process.
        cwd: Working directory of the process.
        env: Environment variables of the process. None for the variables of this process.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=cwd,
        env=env,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            first_line = process.stdout.readline().decode().strip()
            assert first_line == "up", first_line
            yield process.pid
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            process.kill()


def pids_taken(*pids: int, cwd: Path) -> contextlib.AbstractContextManager[int]:
    """Start processes with the given process ids, and kill the processes when the context ends.

    The processes belong to no run.
    """
    return helper(*python(_TAKE_PIDS), *map(str, pids), cwd=cwd)


def traced(pid: int, cwd: Path) -> contextlib.AbstractContextManager[int]:
    """Trace a process until the context ends. Meanwhile, the parent cannot reap the process.

    If SIGKILL ends the traced process, the process stays a zombie.
    """
    return helper(*python(_TRACER), str(pid), cwd=cwd)


def why_no_pid_to_choose() -> str:
    """Return the reason why this machine cannot start a process with a chosen process id.

    The result is an empty string if the machine can start such a process.
    """
    ended = subprocess.Popen(["true"])
    ended.wait()
    try:
        with pids_taken(ended.pid, cwd=Path("/")):
            return ""
    except AssertionError as error:
        return f"no pid can be chosen (clone3): {error}"


def _cgroup_v1(controller: str) -> Path | None:
    """Return the cgroup directory of this process in a hierarchy of cgroup version 1.

    Returns:
        The directory, or None if this machine manages the controller with cgroup version 2.
    """
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = [path for _, names, path in lines if controller in names.split(",")]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        if paths and after.startswith("cgroup ") and controller in after.split()[-1].split(","):
            return Path(os.path.normpath(f"{mount_point}/{os.path.relpath(paths[0], root)}"))
    return None


def why_no_cgroup_v1(controller: str) -> str:
    """Return the reason why no cgroup of version 1 can be created.

    The result is an empty string if a cgroup can be created.
    """
    if _cgroup_v1(controller) is None:
        return f"no {controller} cgroup of version 1 is mounted"
    try:
        with _new_cgroup(controller):
            return ""
    except OSError as error:
        return f"no {controller} cgroup can be made: {error.strerror}"


@contextlib.contextmanager
def _new_cgroup(controller: str) -> Iterator[Path]:
    """Create a cgroup of version 1, yield its directory, and remove it when it is empty."""
    parent = _cgroup_v1(controller)
    assert parent is not None
    path = parent / f"fault-{os.getpid()}-{os.urandom(2).hex()}"
    path.mkdir()
    try:
        yield path
    finally:
        wait_until(lambda: not (path / "cgroup.procs").read_text(), f"{path} is empty")
        _remove_cgroup(path)


def _remove_cgroup(path: Path) -> None:
    """Remove the directory of an empty cgroup."""

    # For a moment after the last process was reaped, the kernel refuses to remove the cgroup.
    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            path.rmdir()
        return not path.exists()

    wait_until(is_removed, f"{path} is removed")


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Create a cgroup with a memory limit and yield its directory.

    A process enters the cgroup through the file `cgroup.procs`. The kernel kills a process that
    exceeds the limit.
    """
    with _new_cgroup("memory") as path:
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield path


@contextlib.contextmanager
def pids_cgroup(limit: int) -> Iterator[Path]:
    """Create a cgroup with a limit on the number of its processes, and yield its directory."""
    with _new_cgroup("pids") as path:
        (path / "pids.max").write_text(str(limit))
        yield path


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Keep a process in uninterruptible sleep (D state) until the context ends.

    In that state, the process does not react to any signal, not even to SIGKILL.
    """
    with _new_cgroup("freezer") as path:
        (path / "cgroup.procs").write_text(str(pid))
        (path / "freezer.state").write_text("FROZEN")
        try:
            wait_until(lambda: "FROZEN" in (path / "freezer.state").read_text(), "it is frozen")
            yield
        finally:
            (path / "freezer.state").write_text("THAWED")


@contextlib.contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    """Create a directory, and mount a file system there until the context ends.

    Args:
        place: Directory that is created as the mount point.
        options: Options of the command `mount`.
    """
    place.mkdir()
    subprocess.run(["mount", *options, str(place)], check=True, capture_output=True)
    try:
        yield
    finally:
        # "-l" unmounts even if a leftover process of a failed test still uses the file system.
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


@contextlib.contextmanager
def freezable_disk(place: Path) -> Iterator[None]:
    """Create a directory, and mount a file system there that `fsfreeze` can stop.

    A stopped file system behaves like a file server that does not answer. A process that writes to
    the stopped file system waits, and no signal ends this wait.
    """
    image = place.with_suffix(".img")
    with image.open("wb") as f:
        f.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    with mounted(place, "-o", "loop", str(image)):
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "-u", str(place)], capture_output=True)


def why_no_disks(make: Callable[[Path], contextlib.AbstractContextManager[None]]) -> str:
    """Return the reason why a file system cannot be mounted, or an empty string.

    Args:
        make: Mounts the file system at a path, and unmounts it at the end of the context.
    """
    with tempfile.TemporaryDirectory() as directory:
        try:
            with make(Path(directory) / "disk"):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"nothing can be mounted: {error}"


def in_mounts(script: str) -> tuple[str, ...]:
    """Return a command prefix that runs a command in a new mount namespace.

    Args:
        script: Shell script that changes the mounts of the namespace before the command starts.
    """
    return ("unshare", "-m", *sh(f'{script} && exec "$@"'), "sh")


def why_no_mounts() -> str:
    """Return the reason why no mount namespace can be created.

    The result is an empty string if a namespace can be created.
    """
    return why_not(*in_mounts("mount -t tmpfs -o size=64k none /mnt"), "true")


def why_not(*command: str) -> str:
    """Run the command, and return the reason why it failed, or an empty string if it succeeded."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if completed.returncode == 0:
        return ""
    return f"{command[0]}: {completed.stderr.strip()[-100:]}"
