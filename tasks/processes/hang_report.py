"""A report on a component that hangs, written next to its log before the component is ended.

The report combines several sources: py-spy if it is installed, the kernel through /proc, NCCL, and
the GPU driver. On this machine, SIGABRT also makes the processes write their own stacks.
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
    """Yield a text of several lines for each process. Processes that have ended are left out."""
    for pid in pids:
        if status := status_of(pid, proc):
            yield "\n".join(_describe(proc / str(pid), pid, status)) + "\n"


def status_of(pid: int, proc: Path = _PROC) -> dict[str, str]:
    """Return the fields of /proc/PID/status; an empty dictionary if the process has ended."""
    lines = _text(proc / str(pid) / "status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def catches(pid: int, signum: int, proc: Path = _PROC) -> bool:
    """Return True if the process has its own handler for the signal."""
    return bool(int(status_of(pid, proc).get("SigCgt") or "0", 16) >> (signum - 1) & 1)


def _describe(at: Path, pid: int, status: dict[str, str]) -> Iterator[str]:
    command = _text(at / "cmdline").replace("\0", " ").strip() or f"[{status.get('Name')}]"
    yield f"pid {pid}, child of {status.get('PPid')}: {command}"
    yield f"  state: {status.get('State')}, waits in: {_text(at / 'wchan') or '?'}"
    yield "  kernel stack:"
    yield from (f"    {line}" for line in _text(at / "stack", "not readable").splitlines())
    yield "  threads:"
    threads = sorted(at.glob("task/*"), key=lambda path: int(path.name))
    for thread in threads[:_THREADS_AT_MOST]:
        head, _, rest = _text(thread / "stat").rpartition(") ")
        waits_in = _text(thread / "wchan") or "?"
        yield f"    {thread.name} {head.partition('(')[2]} {rest[:1] or '?'} {waits_in}"
    yield "  connections:"
    # On a Ray node, Ray's own copy of psutil is used. It may be too old for `net_connections`.
    with suppress(psutil.Error, AttributeError):
        for connection in psutil.Process(pid).net_connections("tcp"):
            addresses = [end for end in (connection.laddr, connection.raddr) if end]
            ends = " -> ".join(f"{end.ip}:{end.port}" for end in addresses)
            yield f"    fd {connection.fd} {ends} {connection.status}"


def _text(path: Path, otherwise: str = "") -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return otherwise


#: Largest number of processes that py-spy examines. Each needs a py-spy process.
_ASKED_AT_MOST = 32
#: Parts of paths that mark a file as library code, not as the program's own code.
_NOT_OWN = ("/lib/python", "-packages/", "<frozen", ".pyx")
#: Part of the path of the wrapper of a Ray job. Its stack is not the program's own, either.
_WRAPS = "/muster_driver/"


class HungProcess(TypedDict):
    """One process of a component that hangs."""

    pid: int
    #: Name of the process in the kernel.
    name: str
    #: State in the kernel, for example `S (sleeping)`.
    state: str
    #: RANK, which launchers of distributed programs set; empty if the process has no rank.
    rank: str
    #: Place in the program's own code, and the innermost call; empty if unknown.
    frame: str
    #: True if `frame` is in the program's own code.
    is_own: bool


class HangEvidence(TypedDict):
    """Evidence on a component's processes on one machine, as far as it was gathered in time."""

    #: Identity of the machine, see `tree.machine`.
    machine: str
    processes: list[HungProcess]
    #: Stacks of the processes, and their state in the kernel.
    text: str
    #: NCCL's report on the communicators; empty if unknown.
    nccl: str
    #: Utilisation of the GPUs; empty if unknown.
    gpus: str


def evidence(pids: Sequence[int], within_s: float) -> HangEvidence:
    """Gather evidence on processes of this machine, without changing them.

    A check can block, for example on a process that is stuck in the kernel. Its result and those of
    later checks are then missing.

    Args:
        pids: The processes.
        within_s: Time limit in seconds.
    """
    found = HangEvidence(machine=machine(), processes=[], text="", nccl="", gpus="")

    def gather() -> None:
        with _log_errors():
            stacks = python_stacks(pids, within_s * 2 / 3)
            found["processes"] = [_examine_process(pid, stacks.get(pid, [])) for pid in pids]
            found["text"] = "\n".join(
                f"py-spy of pid {pid}:\n{_format_threads(s)}" for pid, s in stacks.items()
            )
            for text in kernel_view(pids):
                found["text"] += f"\n{text}"
            found["nccl"] = nccl_status(pids)
            found["gpus"] = _describe_gpus(gpus_seen())

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    thread.join(within_s)
    return found.copy()


def report(
    component: str, title: str, found: Mapping[str, HangEvidence], unreached: Mapping[str, str]
) -> tuple[str, str]:
    """Write the report on a component that hangs.

    Args:
        component: Name of the component.
        title: Title of the report.
        found: Evidence of each node.
        unreached: Reason for each node that could not be examined.

    Returns:
        One line that names the place of the hang (empty if unknown), and the whole report.
    """
    processes = [
        (node, process) for node, of_node in found.items() for process in of_node["processes"]
    ]
    frame_counts = Counter(process["frame"] for _, process in processes)

    def sort_key(node_and_process: tuple[str, HungProcess]) -> tuple[bool, bool, int]:
        _, process = node_and_process
        return (not process["rank"], not process["is_own"], frame_counts[process["frame"]])

    # The rank whose frame differs from that of most ranks is probably the cause.
    processes.sort(key=sort_key)
    places = [
        (f"rank {process['rank']}, " if process["rank"] else "")
        + f"node {node}, pid {process['pid']} ({process['name']}), {process['state']}"
        for node, process in processes
    ]
    frames = [process["frame"] for _, process in processes]
    listed = [
        f"{component}, {place}: {frame or '?'}" for place, frame in zip(places, frames, strict=True)
    ]
    parts = [f"{title} hangs, {format_datetime(time.time())}", "\n".join(listed)]
    nccl = [(node, of_node["nccl"]) for node, of_node in found.items() if of_node["nccl"]]
    # Each report covers the whole job, so the first is enough.
    parts += [f"NCCL, asked on node {node}:\n{text}" for node, text in nccl[:1]]
    for node, of_node in found.items():
        if of_node["gpus"]:
            parts.append(f"GPUs of node {node}: {of_node['gpus']}")
    for node, of_node in found.items():
        if of_node["text"]:
            parts.append(f"node {node}\n\n{of_node['text']}")
    parts += [f"node {node}: {why}" for node, why in unreached.items()]
    hangs_in = f"{frames[0]} ({places[0]})" if frames and frames[0] else ""
    return hangs_in, "\n\n".join(parts) + "\n"


def python_stacks(pids: Iterable[int], within_s: float) -> dict[int, list[dict[str, Any]] | str]:
    """Return the threads of each Python process as py-spy shows them.

    Returns:
        `threads[pid]`, or a text with the reason if py-spy failed. Empty if py-spy is not
        installed.
    """
    stacks: dict[int, list[dict[str, Any]] | str] = {}
    if (spy := _py_spy()) is None:
        return stacks
    deadline = time.monotonic() + within_s
    asked = {
        pid: subprocess.Popen(
            # Do not pause the process: py-spy would wait forever for a process that is already
            # stopped.
            [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for pid in [pid for pid in pids if _is_python(pid)][:_ASKED_AT_MOST]
    }
    for pid, popen in asked.items():
        try:
            answer, _ = popen.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            popen.kill()
            answer, _ = popen.communicate()
        try:
            threads = json.loads(answer)
            stacks[pid] = sorted(threads, key=lambda thread: thread["thread_name"] != "MainThread")
        except ValueError:
            stacks[pid] = answer.decode(errors="replace") or "no answer in time"
    return stacks


def _format_threads(threads: list[dict[str, Any]] | str) -> str:
    if isinstance(threads, str):
        return threads
    lines = []
    for thread in threads:
        does = ("active" if thread["active"] else "idle") + "+gil" * thread["owns_gil"]
        lines.append(f"Thread {thread['os_thread_id']} ({does}): {thread['thread_name'] or '?'}")
        lines += [f"    {_format_frame(frame)}" for frame in thread["frames"]]
    return "\n".join(lines) + "\n"


def _format_frame(frame: Mapping[str, Any]) -> str:
    return f"{frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"


def _examine_process(pid: int, threads: list[dict[str, Any]] | str) -> HungProcess:
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
    # The environment may be unreadable even if py-spy could read the process.
    with suppress(PermissionError):
        seen["rank"] = environment_of(pid).get("RANK", "")
    stacks = [thread["frames"] for thread in threads if thread["frames"]]
    for frames in stacks:
        own = [frame for frame in frames if _is_own(frame["filename"])]
        if own and not any(_WRAPS in frame["filename"] for frame in frames):
            within = "" if own[0] is frames[0] else f", in {_format_frame(frames[0])}"
            return seen | {"is_own": True, "frame": _format_frame(own[0]) + within}
    # An installed program, such as verl, has no frames of its own code.
    return seen | {"frame": " < ".join(map(_format_frame, stacks[0][:4])) if stacks else ""}


def _is_own(path: str) -> bool:
    return not any(part in path for part in _NOT_OWN)


def _describe_gpus(seen: Mapping[str, Any]) -> str:
    lines = [
        f"{gpu['index']}: {gpu['busy_percent']} % busy, {gpu['used_mib']} MiB used by pids "
        f"{join_commas(p['pid'] for p in seen['processes'] if p['uuid'] == gpu['uuid']) or 'none'}"
        + (f", {gpu['problem']}" if gpu["problem"] else "")
        for gpu in seen["gpus"]
    ]
    if seen["problem"]:
        lines.append(seen["problem"])
    return "; ".join(lines)


#: Default address of NCCL's RAS service; NCCL_RAS_ADDR replaces it.
#: Source: NCCL 2.24, src/ras/client.cc, ras_internal.h.
_RAS_ADDRESS = "localhost:28028"
#: Seconds that the RAS service may take to ask its peers.
_RAS_PEERS_WITHIN_S = 3
_RAS_TRIES = 3


def nccl_status(pids: Sequence[int]) -> str:
    """Return NCCL's report on a job's communicators: which ranks are behind, silent or dead.

    Returns:
        An empty string if none of the processes serves such a report.
    """
    addresses = set()
    for pid in pids:
        with suppress(PermissionError):
            addresses.add(environment_of(pid).get("NCCL_RAS_ADDR", _RAS_ADDRESS))
    for address in sorted(addresses):
        host, _, port = address.rpartition(":")
        # Several processes may listen on the address, and some of them may be stopped.
        for _ in range(_RAS_TRIES):
            with suppress(OSError, ValueError):
                inodes = listening_inodes(int(port)).keys()
                if not any(inodes & {*sockets_of(pid).values()} for pid in pids):
                    break  # Another job listens there, or no process at all.
                return _ras_status(host.strip("[]"), int(port))
    return ""


def _ras_status(host: str, port: int) -> str:
    """Ask the RAS service for its status.

    Raises:
        OSError: The service does not answer.
    """
    with socket.create_connection((host, port), 1.0) as s, s.makefile("rb") as answer:
        s.sendall(b"CLIENT PROTOCOL 2\n")
        if not answer.readline().startswith(b"SERVER PROTOCOL"):
            raise OSError("it is not NCCL that listens there")
        s.sendall(f"TIMEOUT {_RAS_PEERS_WITHIN_S}\n".encode())
        answer.readline()
        s.settimeout(2.0 * _RAS_PEERS_WITHIN_S)
        s.sendall(b"VERBOSE STATUS\n")
        return answer.read(_TEXT_AT_MOST).decode(errors="replace")


#: Largest number of processes examined on one machine. A node may run hundreds of data workers.
_CARRIERS_AT_MOST = 64
_TEXT_AT_MOST = 1 << 20


def examine_carriers(wanted: Mapping[str, str], within_s: float) -> HangEvidence:
    """Gather evidence on this machine's processes that have all the variables with these values.

    Like `end_carriers`, this function is sent to Ray nodes by value.
    """
    carriers = [pid for pid in all_pids() if not is_zombie(pid) and carries(pid, wanted)]
    gathered = evidence(carriers[:_CARRIERS_AT_MOST], within_s)
    return gathered | {"text": gathered["text"][:_TEXT_AT_MOST]}


def abort_python(processes: Iterable[ProcessId], within_s: float) -> None:
    """Make those processes that catch SIGABRT write down their stacks, as faulthandler does, and
    die.

    Processes without a handler are not signalled, because they would die without writing their
    stacks.

    Args:
        processes: The processes.
        within_s: Total time limit in seconds. The processes are signalled one after the other, so
            that their outputs are not mixed.
    """
    deadline = time.monotonic() + within_s
    asked = [process for process in processes if catches(process.pid, signal.SIGABRT)]
    for process in asked:
        # A process that waits for another would resume after the end of that process, and its stack
        # would no longer show the wait.
        _send_abort(process, signal.SIGSTOP)
    for process in asked:
        with suppress(OSError, ValueError):
            # Writing a core dump would take too long. The limit 1 also prevents dumps to a program
            # that collects them, which the limit 0 does not. Source: core(5).
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_CORE)
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (1, hard))
        _send_abort(process, signal.SIGABRT)
        # A stopped process handles SIGABRT only after SIGCONT, and before anything else.
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

#: Time limits in seconds of the parts of the diagnosis, which delay a teardown: examination of the
#: processes, ...
_EXAMINED_WITHIN_S = 15.0
#: ... writing the report, ...
_REPORTED_WITHIN_S = 1.0
#: ... SIGABRT to the processes, ...
_ABORTED_WITHIN_S = 1.0
#: ... and the copy of the log.
_COPIED_WITHIN_S = 1.0
#: Seconds before SIGKILL at which the remaining processes get SIGABRT; at most half of the grace
#: period.
_BEFORE_KILL_S = 1.0
_LOG_BYTES_AT_MOST = 1 << 20
#: Pattern of a stack frame in the output of faulthandler.
_FAULTHANDLER_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """Examines a component that hangs, while the component is ended.

    First call `examine`, while all processes of the run are still there: the component may wait for
    one of them. Then stop the component inside `listening`. Both take a few seconds and raise no
    errors. The work is done in daemon threads, which are abandoned if a process or a file system
    blocks them.
    """

    process: GuardedProcess
    command: Command
    #: Masks secrets in a text.
    mask: Callable[[str], str]
    #: Place in the code where the component hangs; empty while unknown.
    hangs_in: str = ""
    _is_written: bool = False
    _log_began: int = 0

    async def examine(self) -> Path | None:
        """Write the report on the component's processes. Return its path; None if it was not
        written.
        """
        await within(_EXAMINED_WITHIN_S + _REPORTED_WITHIN_S, self._examine, None)
        return self._path if self._is_written else None

    @property
    def _path(self) -> Path:
        return self.command.log.with_name(f"{self.process.name}.hang.txt")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Add the last output of the component's processes to the report, while they are ended."""
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
        with _log_errors():
            self._log_began = self.command.log.stat().st_size
        evidence_by_node = {host_name(): evidence(pids, _EXAMINED_WITHIN_S)}
        name = self.process.name
        self.hangs_in, text = report(name, f"{name} (pid {self.process.pid})", evidence_by_node, {})
        self._write(text)

    def _abort_early(self) -> None:
        """Have processes print their stacks if the stop signal would end them without output."""
        # The first process comes last, because the guardian stops all others after its end.
        unheard = [pid for pid in reversed(self.process.processes()) if self._dies_unheard(pid)]
        abort_python(map(ProcessId.of, unheard), _ABORTED_WITHIN_S)

    def _dies_unheard(self, pid: int) -> bool:
        """Return True if the stop signal would end the process before it can act, such as save."""
        if catches(pid, self.command.stop_signal):
            return False
        # The first signal does not reach other process groups. Such a process may be needed by a
        # first process that saves.
        first = self.process.pid or 0
        saves = catches(first, self.command.stop_signal)
        return not saves or _group_of(pid) == _group_of(first)

    async def _abort_late(self) -> None:
        """Request the stacks of processes that survived the stop signal, shortly before SIGKILL."""
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
            output = f.read(_LOG_BYTES_AT_MOST).decode(errors="replace")
        if output:
            self._write(f"{log.name} from then on:\n{output}")
        for path, line, name in _FAULTHANDLER_FRAME.findall(output):
            if not self.hangs_in and _is_own(path):
                # py-spy was not allowed to read the process, because the kernel permits that only
                # for child processes.
                frame = f"{name} ({os.path.basename(path)}:{line})"
                self.hangs_in = f"{frame} (node {host_name()}, below pid {self.process.pid})"

    def _write(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as f:
            f.write(self.mask(text) + "\n")
        self._is_written = True


async def within(limit_s: float, work: Callable[[], T], otherwise: T) -> T:
    """Call a function that may block forever, in a daemon thread and with a time limit.

    Returns:
        The function's result; `otherwise` if it fails or exceeds the limit.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    result = otherwise

    def run() -> None:
        nonlocal result
        with _log_errors():
            result = work()
        with suppress(RuntimeError):  # The loop was closed after the time limit.
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="diagnosis", daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await done.wait()
    return result


@contextmanager
def _log_errors() -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("a component that hangs can't be examined")


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
