"""Write a report on a component that hangs, before the component is ended.

The report is a file next to the component's log. It shows the Python stacks if py-spy is installed,
the state of the processes in the kernel, NCCL's report, and the utilisation of the GPUs. On this
machine, processes that catch SIGABRT also write their own stacks before they end.
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

from tasks.processes.ending import was_started_with
from tasks.processes.guarded import Command, GuardedProcess
from tasks.processes.identity import ProcessId, host_name
from tasks.processes.machine import read_gpus
from tasks.processes.ports import list_sockets, listening_inodes
from tasks.processes.sockets import describe_connections
from tasks.processes.tree import all_pids, is_zombie, machine, read_environment
from tasks.record.crash_stack import is_own_code, read_frame
from tasks.record.log_file import HeldLog
from tasks.spec.formatting import format_datetime, join_commas

_PROC = Path("/proc")
#: Largest number of threads of a process that the report shows.
_THREADS_AT_MOST = 200


def kernel_view(pids: Iterable[int], proc: Path = _PROC) -> Iterator[str]:
    """Yield a text about each process from /proc: state, kernel stack, threads and connections.

    Processes that have ended are skipped.

    Args:
        pids: The processes.
        proc: Directory of the proc file system.
    """
    for pid in pids:
        if status := read_status(pid, proc):
            yield "\n".join(_describe_process(proc / str(pid), pid, status)) + "\n"


def read_status(pid: int, proc: Path = _PROC) -> dict[str, str]:
    """Return the fields of /proc/PID/status; an empty dictionary if the process has ended."""
    lines = _read_text(proc / str(pid) / "status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def handles_signal(pid: int, signum: int, proc: Path = _PROC) -> bool:
    """Return True if the process has its own handler for the signal."""
    return bool(int(read_status(pid, proc).get("SigCgt") or "0", 16) >> (signum - 1) & 1)


def _describe_process(at: Path, pid: int, status: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the text about one process.

    Args:
        at: Directory of the process in /proc.
        pid: Pid of the process.
        status: Fields of the file `status` of the process.
    """
    command = _read_text(at / "cmdline").replace("\0", " ").strip() or f"[{status.get('Name')}]"
    yield f"pid {pid}, child of {status.get('PPid')}: {command}"
    yield f"  state: {status.get('State')}, waits in: {_read_text(at / 'wchan') or '?'}"
    yield "  kernel stack:"
    yield from (f"    {line}" for line in _read_text(at / "stack", "not readable").splitlines())
    yield "  threads:"
    threads = sorted(at.glob("task/*"), key=lambda path: int(path.name))
    for thread in threads[:_THREADS_AT_MOST]:
        head, _, rest = _read_text(thread / "stat").rpartition(") ")
        waits_in = _read_text(thread / "wchan") or "?"
        yield f"    {thread.name} {head.partition('(')[2]} {rest[:1] or '?'} {waits_in}"
    yield "  connections:"
    with suppress(OSError):
        yield from (f"    {line}" for line in describe_connections(pid, str(at.parent)))


def _read_text(path: Path, otherwise: str = "") -> str:
    """Return the content of a file. If it cannot be read, return the argument `otherwise`."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return otherwise


#: Largest number of processes that are examined with py-spy. One py-spy process is started for each
#: of them, all at the same time.
_ASKED_AT_MOST = 32
#: Largest number of ranks that are named together as probable causes of a hang. If even more ranks
#: are equally probable causes, only one of these ranks is named.
_SUSPECTS_AT_MOST = 3
#: If the path of a source file contains this text, the file is Muster's wrapper of a Ray job and
#: not the program's own code.
_WRAPS = "/muster_driver/"
#: Pattern of a stack frame in which a process probably waits for other ranks or for child
#: processes. The pattern matches the backward pass and functions that exchange data between ranks.
#: It also matches all functions in those modules of PyTorch, DeepSpeed and `multiprocessing` that
#: handle several processes.
_WAITS_FOR_OTHERS = re.compile(
    r"\b(?:_engine_run_backward|backward|all_reduce\w*|all_gather\w*|_all_gather_base|all_to_all\w*"
    r"|reduce_scatter\w*|_reduce_scatter_base|broadcast\w*|barrier|monitored_barrier|gather|scatter"
    r"|batch_isend_irecv|recv|send|clip_grad_norm_|_sync_\w+) \("
    r"|\([^()]*\btorch/(?:distributed|nn/parallel)/"
    r"|\([^()]*\bdeepspeed/comm/"
    r"|\([^()]*\bmultiprocessing/(?:popen_\w+|process|context|connection|spawn)\.py:"
)
#: Pattern of a stack frame of a function that waits for child processes. Between this frame and the
#: program's own code there may be further frames, for example of `selectors`.
_WAITS_FOR_CHILDREN = re.compile(
    r"\([^()]*(?:\btorch/multiprocessing/spawn|\btorch/utils/data/dataloader"
    r"|\bmultiprocessing/(?:popen_\w+|process|pool)|\bconcurrent/futures/\w+|\bsubprocess)\.py:"
)
#: Pattern of the stack frame in which a child process of `multiprocessing` begins its own work. The
#: frames further out are never this work. In a forked child, these frames are copied from the
#: parent process. In a child of the start methods `spawn` and `forkserver`, these frames only start
#: the child.
_STARTS_CHILD = re.compile(r"\b_bootstrap \([^()]*\bmultiprocessing/process\.py:")
#: Pattern of the stack frame of a function such as `spawn_main`. `multiprocessing` starts a child
#: process with `python -c CODE`, and CODE calls such a function. CODE does not count as the
#: program's own code.
_STARTS_PROCESS = re.compile(
    r"\([^()]*\bmultiprocessing/(?:spawn|resource_tracker|forkserver)\.py:"
)


class HungProcess(TypedDict):
    """State of one process of a hung component."""

    pid: int
    #: Pid of the parent process.
    parent: int
    #: Name of the process, as the kernel shows it.
    name: str
    #: State of the process, as the kernel shows it, for example `S (sleeping)`.
    state: str
    #: Value of the environment variable RANK, which launchers of distributed programs set. Empty if
    #: it is not set or cannot be read.
    rank: str
    #: Function, file and line of the program's own code that a thread executes. If that code has
    #: called a library, the function, file and line of the innermost call follow. Empty if unknown.
    frame: str
    #: True if the call stack contains the program's own code. Otherwise `frame` names library code.
    is_own: bool
    #: True if the program's own code has called a function that waits for child processes.
    waits_for_children: bool


class HangEvidence(TypedDict):
    """Facts about a component's processes on one machine.

    Facts that could not be gathered within the time limit are missing.
    """

    #: Identity of the machine, see `tree.machine`.
    machine: str
    processes: list[HungProcess]
    #: Call stacks of the processes, and their state in the kernel, as a text for people.
    text: str
    #: NCCL's report on the communicators of the job; empty if there is none.
    nccl: str
    #: Utilisation and memory use of the GPUs, as a text for people; empty if unknown.
    gpus: str


def gather_evidence(pids: Sequence[int], within_s: float) -> HangEvidence:
    """Gather facts about processes of this machine, without changing the processes.

    The facts are gathered one after the other in another thread. If one of the checks blocks, for
    example on a process that is stuck in the kernel, its facts and all later facts are missing.

    Args:
        pids: The processes.
        within_s: Time limit in seconds.
    """
    evidence = HangEvidence(machine=machine(), processes=[], text="", nccl="", gpus="")

    def gather() -> None:
        with _log_errors():
            stacks = python_stacks(pids, within_s * 2 / 3)
            evidence["processes"] = [_examine_process(pid, stacks.get(pid, [])) for pid in pids]
            evidence["text"] = "\n".join(
                f"py-spy of pid {pid}:\n{_format_threads(s)}" for pid, s in stacks.items()
            )
            for text in kernel_view(pids):
                evidence["text"] += f"\n{text}"
            evidence["nccl"] = nccl_status(pids)
            evidence["gpus"] = _describe_gpus(read_gpus())

    thread = threading.Thread(target=gather, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        evidence["text"] = f"The processes could not be examined: {error}"
        return evidence
    thread.join(within_s)
    return evidence.copy()


def compose_report(
    component: str,
    title: str,
    evidence_by_node: Mapping[str, HangEvidence],
    unreached: Mapping[str, str],
) -> tuple[str, str]:
    """Compose the report on a component that hangs.

    Args:
        component: Name of the component.
        title: Title of the report.
        evidence_by_node: `evidence_by_node[node]`: facts that were gathered on the node.
        unreached: `unreached[node]`: reason why the node could not be examined.

    Returns:
        `(place, report)`: one line that names the place in the code where the component hangs
        (empty if unknown), and the text of the whole report. If two or three ranks are equally
        probable causes, the line names all of them.
    """
    processes = [
        (node, process)
        for node, of_node in evidence_by_node.items()
        for process in of_node["processes"]
    ]
    frame_counts = Counter(process["frame"] for _, process in processes)
    ancestors = {
        (node, pid)
        for node, of_node in evidence_by_node.items()
        for pid in _find_ancestors(of_node["processes"])
    }

    def sort_key(node_and_process: tuple[str, HungProcess]) -> tuple[bool, bool, bool, bool, int]:
        node, process = node_and_process
        return (
            not process["rank"],
            process["waits_for_children"] and (node, process["pid"]) in ancestors,
            _WAITS_FOR_OTHERS.search(process["frame"]) is not None,
            not process["is_own"],
            frame_counts[process["frame"]],
        )

    # Put the probable cause of the hang first. Most ranks wait at the same place in the code for
    # the rank that hangs. So ranks that do not wait for other ranks come first. Among several such
    # ranks, the rank at the place that the fewest processes share comes first. A process that waits
    # for the ends of its child processes, such as the parent in `torch.multiprocessing.spawn`,
    # comes after these child processes. The parent may also wait for a child of its child:
    # with the start method `forkserver` of `multiprocessing`, a server forks all children.
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
    nccl = [
        (node, of_node["nccl"]) for node, of_node in evidence_by_node.items() if of_node["nccl"]
    ]
    # Show only one report of NCCL, because each of these reports covers all nodes of the job.
    parts += [f"NCCL's report from node {node}:\n{text}" for node, text in nccl[:1]]
    for node, of_node in evidence_by_node.items():
        if of_node["gpus"]:
            parts.append(f"GPUs of node {node}: {of_node['gpus']}")
    for node, of_node in evidence_by_node.items():
        if of_node["text"]:
            parts.append(f"node {node}\n\n{of_node['text']}")
    parts += [f"node {node}: {why}" for node, why in unreached.items()]
    suspects = [
        f"{process['frame']} ({place})"
        for place, (node, process) in zip(places, processes, strict=True)
        if process["frame"] and sort_key((node, process)) == sort_key(processes[0])
    ]
    has_several = 1 < len(suspects) <= _SUSPECTS_AT_MOST and processes[0][1]["rank"]
    hangs_in = " or in ".join(suspects if has_several else suspects[:1])
    return hangs_in, "\n\n".join(parts) + "\n"


def _find_ancestors(processes: Sequence[HungProcess]) -> set[int]:
    """Return the pids of the ancestors of all processes that execute the program's own code.

    Args:
        processes: The examined processes of a machine. The result contains only these processes and
            their parents. Ancestors further up are unknown.
    """
    parent_by_pid = {process["pid"]: process["parent"] for process in processes}
    ancestors: set[int] = set()
    for process in processes:
        pid = process["parent"] if process["is_own"] else None
        while pid is not None and pid not in ancestors:
            ancestors.add(pid)
            pid = parent_by_pid.get(pid)
    return ancestors


def python_stacks(pids: Iterable[int], within_s: float) -> dict[int, list[dict[str, Any]] | str]:
    """Return the threads of each Python process with their call stacks, from py-spy.

    Args:
        pids: The processes. Programs other than Python are skipped.
        within_s: Time limit in seconds for all processes together.

    Returns:
        Mapping from the pid of a process to its threads in py-spy's JSON format, the main thread
        first. If py-spy failed for the process, the value is a text with the reason. The mapping is
        empty if py-spy is not installed.
    """
    stacks: dict[int, list[dict[str, Any]] | str] = {}
    if (spy := _find_py_spy()) is None:
        return stacks
    deadline = time.monotonic() + within_s
    asked = {
        pid: subprocess.Popen(
            # Do not let py-spy pause the process (`--nonblocking`). Otherwise py-spy would wait
            # forever for the pause of a process that SIGSTOP has already stopped.
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
            stacks[pid] = answer.decode(errors="replace") or "py-spy did not answer in time"
    return stacks


def _format_threads(threads: list[dict[str, Any]] | str) -> str:
    """Return the call stacks of a process as a text.

    Args:
        threads: Threads of the process, as `python_stacks` returns them.
    """
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
    """Return the state of one process.

    Args:
        pid: The process.
        threads: Threads of the process, as `python_stacks` returns them.
    """
    status = read_status(pid)
    process = HungProcess(
        pid=pid,
        parent=int(status.get("PPid", 0)),
        name=status.get("Name", "?"),
        state=status.get("State", "gone"),
        rank="",
        frame="",
        is_own=False,
        waits_for_children=False,
    )
    if not threads or isinstance(threads, str):
        return process
    # py-spy can have permissions that Muster does not have. So Muster can be unable to read the
    # environment of a process that py-spy has read. The rank then stays unknown.
    with suppress(PermissionError):
        process["rank"] = read_environment(pid).get("RANK", "")
    stacks = [thread["frames"] for thread in threads if thread["frames"]]
    for frames in stacks:
        position = _find_own_frame(frames)
        if position is not None and not any(_WRAPS in frame["filename"] for frame in frames):
            called = [_format_frame(frame) for frame in frames[:position]]
            innermost = f", in {called[0]}" if called else ""
            return process | {
                "is_own": True,
                "frame": _format_frame(frames[position]) + innermost,
                "waits_for_children": any(map(_WAITS_FOR_CHILDREN.search, called)),
            }
    # No call stack contains the program's own code, for example if the program is an installed
    # package such as verl. Show the four innermost calls of the main thread.
    return process | {"frame": " < ".join(map(_format_frame, stacks[0][:4])) if stacks else ""}


def _find_own_frame(frames: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the position of the innermost frame with the program's own code.

    Args:
        frames: Call stack of a thread, the innermost frame first.

    Returns:
        None if the thread executes only library code. Example: an idle worker of a data loader or
        process pool.
    """
    for position, frame in enumerate(frames):
        if _STARTS_CHILD.search(_format_frame(frame)):
            return None
        if is_own_code(frame["filename"]):
            called = _format_frame(frames[position - 1]) if position else ""
            is_start = frame["filename"] == "<string>" and _STARTS_PROCESS.search(called)
            return None if is_start else position
    return None


def _describe_gpus(gpu_state: Mapping[str, Any]) -> str:
    """Return the utilisation, the memory use and the processes of each GPU, as a text for people.

    Args:
        gpu_state: Result of `read_gpus`.
    """
    lines = []
    for gpu in gpu_state["gpus"]:
        pids = [
            process["pid"] for process in gpu_state["processes"] if process["uuid"] == gpu["uuid"]
        ]
        use = f"{gpu['busy_percent']} % busy, {gpu['used_mib']} MiB used"
        line = f"{gpu['index']}: {use} by pids {join_commas(pids) or 'none'}"
        if gpu["problem"]:
            line += f", {gpu['problem']}"
        lines.append(line)
    if gpu_state["problem"]:
        lines.append(gpu_state["problem"])
    return "; ".join(lines)


#: Default address of NCCL's RAS service. The environment variable NCCL_RAS_ADDR replaces it.
#: Source: NCCL 2.24, src/ras/client.cc, ras_internal.h.
_RAS_ADDRESS = "localhost:28028"
#: Seconds that NCCL's RAS service may take to ask the other ranks of the job.
_RAS_PEERS_WITHIN_S = 3
#: Number of attempts to get a report from one address of NCCL's RAS service.
_RAS_TRIES = 3


def nccl_status(pids: Sequence[int]) -> str:
    """Return the report of NCCL's RAS service on the communicators of a job.

    The report names the ranks that are behind, silent or dead.

    Args:
        pids: Processes of the job on this machine.

    Returns:
        An empty string if none of the processes offers the RAS service.
    """
    addresses = set()
    for pid in pids:
        with suppress(PermissionError):
            addresses.add(read_environment(pid).get("NCCL_RAS_ADDR", _RAS_ADDRESS))
    for address in sorted(addresses):
        host, _, port = address.rpartition(":")
        # Try again after a failure. Several processes of the job may listen at the same address. If
        # one of them hangs and does not answer, another one may get the next request.
        for _ in range(_RAS_TRIES):
            with suppress(OSError, ValueError):
                inodes = listening_inodes(int(port)).keys()
                if not any(inodes & {*list_sockets(pid).values()} for pid in pids):
                    # No process of this job listens at this address.
                    break
                return _ras_status(host.strip("[]"), int(port))
    return ""


def _ras_status(host: str, port: int) -> str:
    """Request the status report of NCCL's RAS service at an address, and return it.

    Raises:
        OSError: The service does not answer.
    """
    with socket.create_connection((host, port), 1.0) as s, s.makefile("rb") as answer:
        s.sendall(b"CLIENT PROTOCOL 2\n")
        if not answer.readline().startswith(b"SERVER PROTOCOL"):
            raise OSError(f"the program that listens on {host}:{port} is not NCCL's RAS service")
        s.sendall(f"TIMEOUT {_RAS_PEERS_WITHIN_S}\n".encode())
        answer.readline()
        s.settimeout(2.0 * _RAS_PEERS_WITHIN_S)
        s.sendall(b"VERBOSE STATUS\n")
        return answer.read(_TEXT_AT_MOST).decode(errors="replace")


#: Largest number of processes that are examined on one machine. A job may have hundreds of
#: processes that load data.
_CARRIERS_AT_MOST = 64
#: Largest number of characters of the call stacks, and largest number of bytes of NCCL's report.
_TEXT_AT_MOST = 1 << 20


def examine_carriers(wanted: Mapping[str, str], within_s: float) -> HangEvidence:
    """Gather facts about local processes that were started with certain environment variables.

    Ray pickles this function by value, so that it also runs on nodes without Muster.

    Args:
        wanted: Names and values of the environment variables.
        within_s: Time limit in seconds.
    """
    carriers = [pid for pid in all_pids() if not is_zombie(pid) and was_started_with(pid, wanted)]
    gathered = gather_evidence(carriers[:_CARRIERS_AT_MOST], within_s)
    return gathered | {"text": gathered["text"][:_TEXT_AT_MOST]}


def abort_python(processes: Iterable[ProcessId], within_s: float) -> None:
    """Send SIGABRT to all processes that handle it. They then write their call stacks and end.

    Python's faulthandler installs such a handler. Processes without a handler get no signal,
    because they would end without writing their stacks. The processes are signalled one after the
    other, so that their outputs are not mixed.

    Args:
        processes: The processes.
        within_s: Time limit in seconds for all processes together.
    """
    deadline = time.monotonic() + within_s
    asked = [process for process in processes if handles_signal(process.pid, signal.SIGABRT)]
    for process in asked:
        # Stop all processes first. Otherwise, the end of one process would let a waiting process
        # resume, and the call stack of the waiting process would no longer show the wait.
        _send_signal(process, signal.SIGSTOP)
    for process in asked:
        with suppress(OSError, ValueError):
            # Prevent a core dump, because writing it takes too long. The limit is 1 byte and not 0:
            # with 0, the kernel still sends the dump to a program that collects dumps.
            # Source: core(5).
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_CORE)
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (1, hard))
        _send_signal(process, signal.SIGABRT)
        # The process is stopped, so it has not handled SIGABRT yet. After SIGCONT, the process
        # handles SIGABRT before it does anything else.
        _send_signal(process, signal.SIGCONT)
        process.is_gone_within(max(0.0, deadline - time.monotonic()))


def _send_signal(process: ProcessId, signum: int) -> None:
    """Send a signal to a process, unless it has ended or belongs to another user."""
    with suppress(PermissionError):
        process.send(signum)


def _find_py_spy() -> str | None:
    """Return the path of the program py-spy; None if it is not installed."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def _is_python(pid: int) -> bool:
    """Return True if the process runs a Python interpreter."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(("python", "pypy"))
    except OSError:
        return False


_log = logging.getLogger(__name__)
T = TypeVar("T")

#: Noun phrase that names the work of this module in the log.
_EXAMINATION = "the search for the place where a component hangs"
#: Time limit in seconds for gathering facts about the processes of a component that hangs. The
#: teardown of the run waits for these facts.
_EXAMINED_WITHIN_S = 15.0
#: Time limit in seconds for writing the report on a component that hangs.
_REPORTED_WITHIN_S = 1.0
#: Time limit in seconds for writing call stacks before the stop signal is sent. Processes write
#: their call stacks when they get SIGABRT.
_ABORTED_WITHIN_S = 1.0
#: Time limit in seconds for copying the end of the component's log into the report.
_COPIED_WITHIN_S = 1.0
#: Seconds from SIGABRT to SIGKILL for processes that have survived the stop signal. If half of the
#: grace period is shorter, half of the grace period is used instead.
_BEFORE_KILL_S = 1.0
#: Largest number of bytes of the log that are copied into the report.
_LOG_BYTES_AT_MOST = 1 << 20


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """Examines a component that hangs, and writes the report on it.

    First await `examine`, before any process of the run is stopped. If the component waits for
    another component, the wait is visible only while both components are alive. Then stop the
    component inside the context `collecting_output`.

    `examine` and `collecting_output` take some seconds and raise no errors. Their work is done in
    daemon threads, which are abandoned if a process or a file system blocks them.
    """

    #: The component that hangs.
    process: GuardedProcess
    #: Command of the component, with its stop signal.
    command: Command
    #: Log of the component.
    log: HeldLog
    #: Masks secrets in a text, before the text is written into the report.
    mask: Callable[[str], str]
    #: Place in the code where the component hangs; empty if unknown.
    hangs_in: str = ""
    #: True after a part of the report was written.
    _is_written: bool = False
    #: Size of the component's log in bytes when `examine` was called.
    _log_began: int = 0

    async def examine(self) -> Path | None:
        """Gather facts about the component's processes, and write the report.

        Returns:
            The path of the report; None if it could not be written.
        """
        await call_with_time_limit(
            _EXAMINED_WITHIN_S + _REPORTED_WITHIN_S, self._examine, None, _EXAMINATION
        )
        return self._path if self._is_written else None

    @property
    def _path(self) -> Path:
        """Path of the report on the component that hangs."""
        return self.command.log.with_name(f"{self.process.name}.hang.txt")

    @asynccontextmanager
    async def collecting_output(self) -> AsyncIterator[None]:
        """Collect the last output of the component while the caller stops the component.

        The caller must stop the component inside the `async with` block. This method sends SIGABRT
        to processes with a handler for it, so that they write their call stacks into the log. At
        the end of the block, the new part of the log is added to the report.
        """
        await call_with_time_limit(_ABORTED_WITHIN_S, self._abort_early, None, _EXAMINATION)
        late = asyncio.create_task(self._abort_late())
        try:
            yield
        finally:
            late.cancel()
        if self._is_written:
            await call_with_time_limit(_COPIED_WITHIN_S, self._copy_log, None, _EXAMINATION)

    def _examine(self) -> None:
        pids = self.process.processes()
        if not pids:
            return
        with _log_errors():
            self._log_began = self.log.source.stat().st_size
        evidence_by_node = {host_name(): gather_evidence(pids, _EXAMINED_WITHIN_S)}
        name = self.process.name
        self.hangs_in, text = compose_report(
            name, f"{name} (pid {self.process.pid})", evidence_by_node, {}
        )
        self._write(text)

    def _abort_early(self) -> None:
        """Send SIGABRT to the processes that the stop signal would end without any output.

        On SIGABRT, Python's faulthandler writes the call stacks of its process into the log.
        """
        # Signal the component's first process last. If the first process ended earlier, the
        # guardian process would end the other processes before they write their call stacks.
        unheard = [
            pid for pid in reversed(self.process.processes()) if self._dies_without_output(pid)
        ]
        abort_python(map(ProcessId.of, unheard), _ABORTED_WITHIN_S)

    def _dies_without_output(self, pid: int) -> bool:
        """Return True if the stop signal would end a process before it can write its call stacks.

        This is the case if the process gets the stop signal but has no handler for it.
        """
        if handles_signal(pid, self.command.stop_signal):
            return False
        # The stop signal reaches only the process group of the component's first process. If the
        # first process has a handler for the signal, the handler may save a checkpoint with the
        # help of processes outside this group. In that case, abort only processes in this group.
        first = self.process.pid or 0
        saves = handles_signal(first, self.command.stop_signal)
        return not saves or _read_group(pid) == _read_group(first)

    async def _abort_late(self) -> None:
        """Send SIGABRT to processes that have survived the stop signal, shortly before SIGKILL.

        On SIGABRT, Python's faulthandler writes the call stacks of its process into the log.
        """
        grace_s = self.command.grace_s
        before_kill_s = min(_BEFORE_KILL_S, grace_s / 2)
        await asyncio.sleep(grace_s - before_kill_s)

        def abort() -> None:
            abort_python(map(ProcessId.of, reversed(self.process.processes())), before_kill_s)

        await call_with_time_limit(before_kill_s, abort, None, _EXAMINATION)

    def _copy_log(self) -> None:
        """Copy the new part of the component's log into the report.

        The new part is the output since the call of `examine`.
        """
        with self.log.source.open("rb") as f:
            # If the log is now shorter than at the start of the examination, log rotation has
            # truncated it. All of its content is then new.
            is_truncated = f.seek(0, os.SEEK_END) < self._log_began
            f.seek(0 if is_truncated else self._log_began)
            output = f.read(_LOG_BYTES_AT_MOST).decode(errors="replace")
        if output:
            self._write(f"New output in {self.log.path.name}:\n{output}")
        for frame in filter(None, map(read_frame, output.split("\n"))):
            if not self.hangs_in and is_own_code(frame.path):
                # py-spy has found no place in the program's own code. For example, the kernel may
                # forbid py-spy to read a process that py-spy has not started. So take the place
                # from the call stack that faulthandler has written into the log.
                place = f"{frame.function} ({os.path.basename(frame.path)}:{frame.line})"
                self.hangs_in = (
                    f"{place} (on node {host_name()}, in a descendant of process "
                    f"{self.process.pid})"
                )

    def _write(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as f:
            f.write(self.mask(text) + "\n")
        self._is_written = True


async def call_with_time_limit(
    limit_s: float,
    work: Callable[[], T],
    otherwise: T,
    purpose: str = "a check in the background",
) -> T:
    """Call a function in a daemon thread, and wait for its result at most `limit_s` seconds.

    Use it for functions that may block forever. After the time limit, the thread is abandoned. If
    no thread can be started, a thread of the asyncio event loop's default executor calls the
    function. The time limit is the same.

    Args:
        limit_s: Time limit in seconds.
        work: The function.
        otherwise: Result if the function fails or takes too long.
        purpose: Noun phrase that names the work in the log if the function fails.

    Returns:
        The result of the function; `otherwise` if the function fails or takes too long.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    result = otherwise

    def run() -> None:
        nonlocal result
        with _log_errors(purpose):
            result = work()
        # If the function has taken too long, the loop may be closed by now. Nothing waits for
        # `done` in that case, so ignore the error.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    try:
        threading.Thread(target=run, name="diagnosis", daemon=True).start()
    except RuntimeError:
        loop.run_in_executor(None, run)
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await done.wait()
    return result


@contextmanager
def _log_errors(purpose: str = _EXAMINATION) -> Iterator[None]:
    """Write errors of the context to Muster's log instead of raising them.

    Args:
        purpose: Noun phrase that names the work of the context.
    """
    try:
        yield
    except Exception:
        _log.exception("%s has failed", purpose)


def _read_group(pid: int) -> int:
    """Return the process group id of a process; 0 if the process has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
