"""What faults are made of: limits of the machine, foreign servers, a pid given to another."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.support.stage import python, sh, wait_until

#: A program that answers any GET: `python(SERVER) PORT ANSWERS`, each path's answers being taken
#: from the letters of ANSWERS in turn: `y` for 200 and `n` for 503; `-` never answers at all.
#: It logs each as `PATH LETTER`, and once the file `down` is there answers 503 only.
SERVER = """
import collections, os, socket, sys, time
counts = collections.Counter()
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", int(sys.argv[1])))
s.listen(50)
os.write(1, b"up\\n")
while True:
    c, _ = s.accept()
    asked = c.recv(65536).split(b" ")
    if len(asked) < 2:
        continue
    path = asked[1].decode()
    letter = sys.argv[2][counts[path] % len(sys.argv[2])]
    if os.path.exists("down"):
        letter = "n"
    counts[path] += 1
    os.write(1, f"{path} {letter}\\n".encode())
    while letter == "-":
        time.sleep(600)
    status = b"200 OK" if letter == "y" else b"503 Service Unavailable"
    c.sendall(b"HTTP/1.0 " + status + b"\\r\\nContent-Type: application/json\\r\\n\\r\\n{}")
    c.close()
"""

#: Each pid of the command line is given to a process of its own, which is none of any run; says
#: `up`, and ends them at the end of its stdin. Source: clone(2), `set_tid` of clone3.
_TAKE_PIDS = """
import ctypes, os, signal, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
for wanted in map(int, sys.argv[1:]):
    tid = (ctypes.c_int * 1)(wanted)
    # flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, its size,
    # cgroup
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

#: Traces a process until its stdin ends, without ever waiting for it, so that nobody can reap it.
_TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
seized = libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0  # PTRACE_SEIZE
print("up" if seized else "refused", flush=True)
sys.stdin.read()
"""


def server(port: int, answers: str) -> tuple[str, ...]:
    return (*python(SERVER), str(port), answers)


@contextlib.contextmanager
def helper(*command: str, cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """A process outside every run, once it has said `up`: its pid."""
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
            said = process.stdout.readline().decode().strip()
            assert said == "up", said
            yield process.pid
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            process.kill()


def pids_taken(*pids: int, cwd: Path) -> contextlib.AbstractContextManager[int]:
    """Pids that processes of a run had, given to others."""
    return helper(*python(_TAKE_PIDS), *map(str, pids), cwd=cwd)


def traced(pid: int, cwd: Path) -> contextlib.AbstractContextManager[int]:
    """A process that SIGKILL turns into a zombie which its own parent can't reap."""
    return helper(*python(_TRACER), str(pid), cwd=cwd)


def why_no_pid_to_choose() -> str:
    """Why a pid can't be given to a process of one's choice; empty where it can."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    try:
        with pids_taken(ended.pid, cwd=Path("/")):
            return ""
    except AssertionError as error:
        return f"no pid can be chosen (clone3): {error}"


def _cgroup_v1(controller: str) -> Path | None:
    """The directory of this process in a hierarchy of version 1."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = [path for _, names, path in lines if controller in names.split(",")]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split()[3:5]
        if paths and after.startswith("cgroup ") and controller in after.split()[-1].split(","):
            return Path(os.path.normpath(f"{place}/{os.path.relpath(paths[0], root)}"))
    return None


def why_no_cgroup_v1(controller: str) -> str:
    """Why a limit can't be set here; empty where it can."""
    place = _cgroup_v1(controller)
    if place is None:
        return f"no {controller} cgroup of version 1 is mounted"
    try:
        with _new_cgroup(controller):
            return ""
    except OSError as error:
        return f"no {controller} cgroup can be made: {error.strerror}"


@contextlib.contextmanager
def _new_cgroup(controller: str) -> Iterator[Path]:
    place = _cgroup_v1(controller)
    assert place is not None
    path = place / f"fault-{os.getpid()}-{os.urandom(2).hex()}"
    path.mkdir()
    try:
        yield path
    finally:
        wait_until(lambda: not (path / "cgroup.procs").read_text(), f"{path} is empty")
        _remove(path)


def _remove(path: Path) -> None:
    # It stays busy for a moment after its last process was reaped.
    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            path.rmdir()
        return not path.exists()

    wait_until(is_removed, f"{path} is removed")


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A process that enters it, by `cgroup.procs`, is killed by the kernel above the limit."""
    with _new_cgroup("memory") as path:
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield path


@contextlib.contextmanager
def pids_cgroup(limit: int) -> Iterator[Path]:
    """The processes in it can't become more than the limit."""
    with _new_cgroup("pids") as path:
        (path / "pids.max").write_text(str(limit))
        yield path


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process in D state, which takes no signal, not even SIGKILL, until it is thawed."""
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
    """A file system at a directory, which is made, as `mount` is told."""
    place.mkdir()
    subprocess.run(["mount", *options, str(place)], check=True, capture_output=True)
    try:
        yield
    finally:
        # Lazily: what a broken test has left may still use it.
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


@contextlib.contextmanager
def freezable_disk(place: Path) -> Iterator[None]:
    """A file system at a directory that `fsfreeze` stops and starts, as a server of files is that
    does not answer: who writes waits, and no signal ends that."""
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
    """Why no such file system can be had here; empty where it can."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            with make(Path(directory) / "disk"):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"nothing can be mounted: {error}"


def in_mounts(script: str) -> tuple[str, ...]:
    """A wrapper: the command runs among mounts of its own, after the script changed them."""
    return ("unshare", "-m", *sh(f'{script} && exec "$@"'), "sh")


def why_no_mounts() -> str:
    """Why there are no mounts of one's own here; empty where there are."""
    return why_not(*in_mounts("mount -t tmpfs -o size=64k none /mnt"), "true")


def why_not(*command: str) -> str:
    """Why a command can't be run here; empty where it can."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return "" if done.returncode == 0 else f"{command[0]}: {done.stderr.strip()[-100:]}"
