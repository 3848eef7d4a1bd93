"""What a component that hangs was doing: written down beside its log before it is ended.

The witnesses: py-spy, where it is installed; the kernel, by /proc, which asks nothing of the
processes; NCCL and the driver of the GPUs, where they answer; and, on this machine, the processes
themselves, asked by SIGABRT.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import psutil

from tasks.processes.ending import carries
from tasks.processes.guarded import Command, GuardedProcess
from tasks.processes.identity import ProcessId, host_name
from tasks.processes.machine import gpus_seen
from tasks.processes.ports import listening_inodes, sockets_of
from tasks.processes.tree import all_pids, environment_of, is_zombie, machine
from tasks.spec.formatting import format_datetime, join_commas

_PROC = Path("/proc")
_THREADS_AT_MOST = 200


def kernel_view(pids: Iterable[int], proc: Path = _PROC) -> Iterator[str]:
    """A text of several lines for each process, those that are gone left out."""
    for pid in pids:
        if status := status_of(pid, proc):
            yield "\n".join(_describe(proc / str(pid), pid, status)) + "\n"


def status_of(pid: int, proc: Path = _PROC) -> dict[str, str]:
    """What stands in /proc/PID/status, by its keys; empty when the process is gone."""
    lines = _text(proc / str(pid) / "status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def catches(pid: int, signum: int, proc: Path = _PROC) -> bool:
    """Whether a process has a handler of its own for a signal."""
    return bool(int(status_of(pid, proc).get("SigCgt") or "0", 16) >> (signum - 1) & 1)


def _describe(at: Path, pid: int, status: dict[str, str]) -> Iterator[str]:
    command = _text(at / "cmdline").replace("\0", " ").strip() or f"[{status.get('Name')}]"
    yield f"pid {pid}, child of {status.get('PPid')}: {command}"
    yield f"  state: {status.get('State')}, waits in: {_text(at / 'wchan') or '?'}"
    yield "  kernel stack:"
    yield from (f"    {line}" for line in _text(at / "stack", "not readable").splitlines())
    yield "  threads:"
    for thread in sorted(at.glob("task/*"), key=lambda one: int(one.name))[:_THREADS_AT_MOST]:
        head, _, rest = _text(thread / "stat").rpartition(") ")
        waits_in = _text(thread / "wchan") or "?"
        yield f"    {thread.name} {head.partition('(')[2]} {rest[:1] or '?'} {waits_in}"
    yield "  connections:"
    # On a node it is Ray's own, and may be older than what has these.
    with suppress(psutil.Error, AttributeError):
        for one in psutil.Process(pid).net_connections("tcp"):
            ends = " -> ".join(f"{end.ip}:{end.port}" for end in (one.laddr, one.raddr) if end)
            yield f"    fd {one.fd} {ends} {one.status}"


def _text(path: Path, otherwise: str = "") -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return otherwise


#: Each is a py-spy of its own for a moment.
_ASKED_AT_MOST = 32
#: Files of these are not a program's own; nor is anything below what wraps a Ray job.
_NOT_OWN, _WRAPS = ("/lib/python", "-packages/", "<frozen", ".pyx"), "/muster_driver/"


class HungProcess(TypedDict):
    """One process of a component that hangs."""

    pid: int
    #: The name the kernel has for it, and its state there: `S (sleeping)`.
    name: str
    state: str
    #: RANK, which launchers of distributed programs set; empty: it has none.
    rank: str
    #: Where it is in its program's own code, and in what that has called; empty: nobody can say.
    frame: str
    is_own: bool


class HangEvidence(TypedDict):
    """What is known of a component's processes on one machine, as far as there was time."""

    #: See `tree.machine`.
    machine: str
    processes: list[HungProcess]
    #: Their stacks, and the kernel's view of them.
    text: str
    #: NCCL's own account, and how busy the GPUs are; empty where nobody can say.
    nccl: str
    gpus: str


def evidence(pids: Sequence[int], within_s: float) -> HangEvidence:
    """What processes of this machine do; they are left as they are.

    What blocks, as a look at a process that is stuck in the kernel, or at a GPU that is, is left
    out with what would come after it.
    """
    found = HangEvidence(machine=machine(), processes=[], text="", nccl="", gpus="")

    def gather() -> None:
        with _told_if_it_fails():
            stacks = python_stacks(pids, within_s * 2 / 3)
            found["processes"] = [_seen(pid, stacks.get(pid, [])) for pid in pids]
            found["text"] = "\n".join(
                f"py-spy of pid {pid}:\n{_text_of(s)}" for pid, s in stacks.items()
            )
            for text in kernel_view(pids):
                found["text"] += f"\n{text}"
            found["nccl"] = nccl_status(pids)
            found["gpus"] = _gpus(gpus_seen())

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    thread.join(within_s)
    return found.copy()


def report(
    component: str, title: str, found: Mapping[str, HangEvidence], unreached: Mapping[str, str]
) -> tuple[str, str]:
    """What a component hangs in, in a line and as a whole, by what was found on each node."""
    processes = [(node, one) for node, of in found.items() for one in of["processes"]]
    number = Counter(one["frame"] for _, one in processes)
    # Of many ranks the one that is elsewhere is the one to look at.
    processes.sort(key=lambda p: (not p[1]["rank"], not p[1]["is_own"], number[p[1]["frame"]]))
    where = [
        (f"rank {one['rank']}, " if one["rank"] else "")
        + f"node {node}, pid {one['pid']} ({one['name']}), {one['state']}"
        for node, one in processes
    ]
    frames = [one["frame"] for _, one in processes]
    listed = [f"{component}, {one}: {at or '?'}" for one, at in zip(where, frames, strict=True)]
    parts = [f"{title} hangs, {format_datetime(time.time())}", "\n".join(listed)]
    nccl = [(node, of["nccl"]) for node, of in found.items() if of["nccl"]]
    # Each answers for all of the job.
    parts += [f"NCCL, asked on node {node}:\n{text}" for node, text in nccl[:1]]
    parts += [f"GPUs of node {node}: {of['gpus']}" for node, of in found.items() if of["gpus"]]
    parts += [f"node {node}\n\n{of['text']}" for node, of in found.items() if of["text"]]
    parts += [f"node {node}: {why}" for node, why in unreached.items()]
    hangs_in = f"{frames[0]} ({where[0]})" if frames and frames[0] else ""
    return hangs_in, "\n\n".join(parts) + "\n"


def python_stacks(pids: Iterable[int], within_s: float) -> dict[int, list[dict[str, Any]] | str]:
    """`threads[pid]` of the Python processes as py-spy sees them, or why it can't; none where it is
    not installed.
    """
    stacks: dict[int, list[dict[str, Any]] | str] = {}
    if (spy := _py_spy()) is None:
        return stacks
    deadline = time.monotonic() + within_s
    asked = {
        pid: subprocess.Popen(
            # Without a pause of the process: one that is stopped would keep py-spy waiting.
            [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for pid in [pid for pid in pids if _is_python(pid)][:_ASKED_AT_MOST]
    }
    for pid, popen in asked.items():
        try:
            said, _ = popen.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            popen.kill()
            said, _ = popen.communicate()
        try:
            threads = json.loads(said)
            stacks[pid] = sorted(threads, key=lambda one: one["thread_name"] != "MainThread")
        except ValueError:
            stacks[pid] = said.decode(errors="replace") or "no answer in time"
    return stacks


def _text_of(threads: list[dict[str, Any]] | str) -> str:
    if isinstance(threads, str):
        return threads
    lines = []
    for thread in threads:
        does = ("active" if thread["active"] else "idle") + "+gil" * thread["owns_gil"]
        lines.append(f"Thread {thread['os_thread_id']} ({does}): {thread['thread_name'] or '?'}")
        lines += [f"    {_place(frame)}" for frame in thread["frames"]]
    return "\n".join(lines) + "\n"


def _place(frame: Mapping[str, Any]) -> str:
    return f"{frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"


def _seen(pid: int, threads: list[dict[str, Any]] | str) -> HungProcess:
    status = status_of(pid)
    seen = HungProcess(
        pid=pid,
        name=status.get("Name", "?"),
        state=status.get("State", "gone"),
        rank="",
        frame="",
        is_own=False,
    )
    if not threads or isinstance(threads, str):
        return seen
    # Where py-spy could read, its environment is not behind a lock.
    with suppress(PermissionError):
        seen["rank"] = environment_of(pid).get("RANK", "")
    stacks = [thread["frames"] for thread in threads if thread["frames"]]
    for frames in stacks:
        own = [one for one in frames if _is_own(one["filename"])]
        if own and not any(_WRAPS in one["filename"] for one in frames):
            within = "" if own[0] is frames[0] else f", in {_place(frames[0])}"
            return seen | {"is_own": True, "frame": _place(own[0]) + within}
    # A program that is installed, such as verl's.
    return seen | {"frame": " < ".join(map(_place, stacks[0][:4])) if stacks else ""}


def _is_own(path: str) -> bool:
    return not any(part in path for part in _NOT_OWN)


def _gpus(seen: Mapping[str, Any]) -> str:
    said = [
        f"{gpu['index']}: {gpu['busy_percent']} % busy, {gpu['used_mib']} MiB used by pids "
        f"{join_commas(p['pid'] for p in seen['processes'] if p['uuid'] == gpu['uuid']) or 'none'}"
        + (f", {gpu['problem']}" if gpu["problem"] else "")
        for gpu in seen["gpus"]
    ]
    return "; ".join([*said, seen["problem"]] if seen["problem"] else said)


#: Where NCCL's RAS listens unless NCCL_RAS_ADDR says otherwise; how long it may look for its peers.
#: Source: NCCL 2.24, src/ras/client.cc, ras_internal.h.
_RAS_ADDRESS, _RAS_LOOKS_S = "localhost:28028", 3
_RAS_TRIES = 3


def nccl_status(pids: Sequence[int]) -> str:
    """NCCL's account of a job's communicators: which ranks are behind, silent or dead. Empty where
    none of the processes gives it."""
    addresses = set()
    for pid in pids:
        with suppress(PermissionError):
            addresses.add(environment_of(pid).get("NCCL_RAS_ADDR", _RAS_ADDRESS))
    for address in sorted(addresses):
        host, _, port = address.rpartition(":")
        # Several of them may listen there, one of which may be stopped.
        for _ in range(_RAS_TRIES):
            with suppress(OSError, ValueError):
                inodes = listening_inodes(int(port)).keys()
                if not any(inodes & {*sockets_of(pid).values()} for pid in pids):
                    break  # Another job's, or nobody's.
                return _ras_status(host.strip("[]"), int(port))
    return ""


def _ras_status(host: str, port: int) -> str:
    """Raises: OSError."""
    with socket.create_connection((host, port), 1.0) as s, s.makefile("rb") as said:
        s.sendall(b"CLIENT PROTOCOL 2\n")
        if not said.readline().startswith(b"SERVER PROTOCOL"):
            raise OSError("it is not NCCL that listens there")
        s.sendall(f"TIMEOUT {_RAS_LOOKS_S}\n".encode())
        said.readline()
        s.settimeout(2.0 * _RAS_LOOKS_S)
        s.sendall(b"VERBOSE STATUS\n")
        return said.read(_TEXT_AT_MOST).decode(errors="replace")


#: Of one machine: a node may run hundreds of data workers.
_CARRIERS_AT_MOST = 64
_TEXT_AT_MOST = 1 << 20


def examine_carriers(wanted: Mapping[str, str], within_s: float) -> HangEvidence:
    """What the processes of this machine do that have all the variables with these values.

    Sent to nodes by value, as `end_carriers` is.
    """
    carriers = [pid for pid in all_pids() if not is_zombie(pid) and carries(pid, wanted)]
    found = evidence(carriers[:_CARRIERS_AT_MOST], within_s)
    return found | {"text": found["text"][:_TEXT_AT_MOST]}


def abort_python(processes: Iterable[ProcessId], within_s: float) -> None:
    """Have those that catch SIGABRT write down their stacks, as faulthandler does, and die.

    The others are left as they are: to them it is but a death, and says nothing.

    Args:
        within_s: how long to wait, all in all, for one to be done before the next, so that what
            they write is not mixed.
    """
    deadline = time.monotonic() + within_s
    asked = [process for process in processes if catches(process.pid, signal.SIGABRT)]
    for process in asked:
        # What waits for another of them would go on when that one has ended, and say nothing.
        _send_abort(process, signal.SIGSTOP)
    for process in asked:
        with suppress(OSError, ValueError):
            # To write out its memory would take longer than it has. Source: core(5); a limit of 1
            # stops a program that collects cores, too, which 0 does not.
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_CORE)
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (1, hard))
        _send_abort(process, signal.SIGABRT)
        # A stopped process takes it only when it goes on, and then before anything else.
        _send_abort(process, signal.SIGCONT)
        process.is_gone_within(max(0.0, deadline - time.monotonic()))


def _send_abort(process: ProcessId, signum: int) -> None:
    with suppress(PermissionError):
        process.send(signum)


def _py_spy() -> str | None:
    beside = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(("python", "pypy"))
    except OSError:
        return False


_log = logging.getLogger(__name__)
T = TypeVar("T")

#: At most so long does each part keep a teardown: the look at the processes, and its report, ...
_EXAMINED_WITHIN_S, _REPORTED_WITHIN_S = 15.0, 1.0
#: ... their own last words, and the copy of the log.
_ABORTED_WITHIN_S, _COPIED_WITHIN_S = 1.0, 1.0
#: So long before SIGKILL is what is left asked for its stacks; of a short grace period, half.
_BEFORE_KILL_S = 1.0
_LOG_BYTES_AT_MOST = 1 << 20
#: A frame as faulthandler writes it.
_FAULTHANDLERS = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """Examines a component that hangs while it is ended.

    First `examine` it, with all it may wait for still there; then stop it while `listening`. This
    takes a few seconds, and raises nothing, whatever state the machine is in: the work is done in
    daemon threads, which are left behind where a process or a file system keeps them.
    """

    process: GuardedProcess
    command: Command
    #: Takes secrets out of a text.
    mask: Callable[[str], str]
    #: In a line; empty while nobody can say.
    hangs_in: str = ""
    _is_written: bool = False
    _log_began: int = 0

    async def examine(self) -> Path | None:
        """Write down the state of its processes; the file, None where there is none."""
        await within(_EXAMINED_WITHIN_S + _REPORTED_WITHIN_S, self._examine, None)
        return self._path if self._is_written else None

    @property
    def _path(self) -> Path:
        return self.command.log.with_name(f"{self.process.name}.hang.txt")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """For its end: what its processes say then is a part of the report."""
        await within(_ABORTED_WITHIN_S, self._abort_early, None)
        late = asyncio.create_task(self._abort_late())
        try:
            yield
        finally:
            late.cancel()
        if self._is_written:
            await within(_COPIED_WITHIN_S, self._copy_log, None)

    def _examine(self) -> None:
        pids = self.process.processes()
        if not pids:
            return
        with _told_if_it_fails():
            self._log_began = self.command.log.stat().st_size
        found = {host_name(): evidence(pids, _EXAMINED_WITHIN_S)}
        name = self.process.name
        self.hangs_in, text = report(name, f"{name} (pid {self.process.pid})", found, {})
        self._write(text)

    def _abort_early(self) -> None:
        """Ask those for their stacks that the stop signal will just end."""
        # The first process last: once it has gone, the guardian tells the rest to stop.
        unheard = [pid for pid in reversed(self.process.processes()) if self._dies_unheard(pid)]
        abort_python(map(ProcessId.of, unheard), _ABORTED_WITHIN_S)

    def _dies_unheard(self, pid: int) -> bool:
        """The stop signal would end the process without a chance to do anything, such as saving."""
        if catches(pid, self.command.stop_signal):
            return False
        # Out of reach of the first signal, it may be needed by a first process that does save.
        first = self.process.pid or 0
        saves = catches(first, self.command.stop_signal)
        return not saves or _group_of(pid) == _group_of(first)

    async def _abort_late(self) -> None:
        """Ask those for their stacks that the stop signal has not ended, before SIGKILL does."""
        grace_s = self.command.grace_s
        before_kill_s = min(_BEFORE_KILL_S, grace_s / 2)
        await asyncio.sleep(grace_s - before_kill_s)

        def abort() -> None:
            abort_python(map(ProcessId.of, reversed(self.process.processes())), before_kill_s)

        await within(before_kill_s, abort, None)

    def _copy_log(self) -> None:
        log = self.command.log
        with log.open("rb") as f:
            f.seek(self._log_began)
            said = f.read(_LOG_BYTES_AT_MOST).decode(errors="replace")
        if said:
            self._write(f"{log.name} from then on:\n{said}")
        for path, line, name in _FAULTHANDLERS.findall(said):
            if not self.hangs_in and _is_own(path):
                # Where py-spy may not look: the kernel lets it look at its own children only.
                frame = f"{name} ({os.path.basename(path)}:{line})"
                self.hangs_in = f"{frame} (node {host_name()}, below pid {self.process.pid})"

    def _write(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as f:
            f.write(self.mask(text) + "\n")
        self._is_written = True


async def within(limit_s: float, work: Callable[[], T], otherwise: T) -> T:
    """Do what may block for ever, in a thread that nothing waits for longer than this.

    Returns: what it gives; `otherwise`, where it fails or is late.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    found = otherwise

    def run() -> None:
        nonlocal found
        with _told_if_it_fails():
            found = work()
        with suppress(RuntimeError):  # The loop has gone on without us, and is closed.
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="diagnosis", daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await done.wait()
    return found


@contextmanager
def _told_if_it_fails() -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("a component that hangs can't be examined")


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
