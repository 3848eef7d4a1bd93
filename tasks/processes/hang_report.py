"""What a component that hangs was doing: written down beside its log before it is ended.

Three witnesses, each less sure to speak than the one before, and of more use: the kernel, by /proc,
which asks nothing of the processes (their environment, where secrets are, is not looked at);
py-spy, where it is installed; and the processes themselves, asked by SIGABRT.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tasks.processes.ending import carries
from tasks.processes.guarded import Command
from tasks.processes.identity import ProcessId
from tasks.processes.ports import sockets_of, tcp_sockets
from tasks.processes.tree import all_pids, is_zombie, machine
from tasks.record.outcome import signal_name
from tasks.spec.words import moment

_PROC = Path("/proc")
_THREADS_AT_MOST = 200
_SOCKETS_AT_MOST = 200
#: Source: include/net/tcp_states.h.
_TCP_STATES = (
    *("?", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE"),
    *("CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV"),
)
#: Source: include/uapi/linux/net.h, socket_state.
_UNIX_STATES = ("FREE", "UNCONNECTED", "CONNECTING", "CONNECTED", "DISCONNECTING")
_UNIX_LISTENS = 1 << 16
_SIGNAL_SETS = {"SigPnd": "pending", "SigBlk": "blocked", "SigIgn": "ignored", "SigCgt": "caught"}

#: `sockets[inode]` -> `tcp 127.0.0.1:8000 -> 127.0.0.1:51234 ESTABLISHED`.
Sockets = dict[str, str]


def kernel_view(pids: Iterable[int], proc: Path = _PROC) -> Iterator[str]:
    """A text of several lines for each process, those that are gone left out.

    Args:
        proc: where the proc file system is.
    """
    #: By network namespace: processes in containers have tables of their own.
    tables: dict[str, Sockets] = {}
    for pid in pids:
        at = proc / str(pid)
        if status := status_of(pid, proc):
            namespace = _link(at / "ns/net")
            if namespace not in tables:
                tables[namespace] = sockets_in(at / "net")
            yield "\n".join(_describe(at, pid, status, tables[namespace])) + "\n"


def status_of(pid: int, proc: Path = _PROC) -> dict[str, str]:
    """What stands in /proc/PID/status, by its keys; empty when the process is gone."""
    lines = _text(proc / str(pid) / "status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def has_signal(status: dict[str, str], key: str, signum: int) -> bool:
    """Whether a signal is in a set of `status_of`: SigCgt, those that are caught, or SigIgn."""
    return bool(int(status.get(key) or "0", 16) >> (signum - 1) & 1)


def sockets_in(net: Path) -> Sockets:
    """The TCP and Unix sockets of a network namespace, from the folder `net` of a process in it."""
    found: Sockets = {}
    for table, (_, local, remote, state, *rest) in tcp_sockets(net):
        ends = f"{_address(local)} -> {_address(remote)}"
        found[rest[5]] = f"{table} {ends} {_named(_TCP_STATES, int(state, 16))}"
    for line in _text(net / "unix").splitlines()[1:]:
        with suppress(ValueError):  # The name of a socket may hold the end of a line.
            _, _, _, flags, _, state, inode, *path = line.split()
            is_listening = int(flags, 16) & _UNIX_LISTENS
            said = "LISTEN" if is_listening else _named(_UNIX_STATES, int(state, 16))
            found[inode] = " ".join(["unix", *path, said])
    return found


def _describe(at: Path, pid: int, status: dict[str, str], sockets: Sockets) -> Iterator[str]:
    command = _text(at / "cmdline").replace("\0", " ").strip() or f"[{status.get('Name')}]"
    yield f"pid {pid}, child of {status.get('PPid')}: {command}"
    yield f"  state: {status.get('State')}"
    yield f"  waits in: {_text(at / 'wchan') or '?'}"
    yield f"  system call: {_text(at / 'syscall').strip() or '?'}"
    yield f"  memory: {status.get('VmRSS', 'none')}"
    for key, name in _SIGNAL_SETS.items():
        signals = [n for n in range(1, 65) if has_signal(status, key, n)]
        if signals:
            yield f"  signals {name}: {' '.join(map(signal_name, signals))}"
    threads = _numbers(at / "task")
    below = [_text(at / "task" / thread / "children") for thread in threads]
    yield f"  children: {' '.join(' '.join(below).split()) or 'none'}"
    if stack := _text(at / "stack", unreadable=lambda why: why):
        yield "  kernel stack:"
        yield from (f"    {line}" for line in stack.splitlines())
    yield f"  threads: {len(threads)}"
    for thread in threads[:_THREADS_AT_MOST]:
        head, _, rest = _text(at / "task" / thread / "stat").rpartition(") ")
        waits_in = _text(at / "task" / thread / "wchan") or "?"
        yield f"    {thread} {head.partition('(')[2]} {rest[:1] or '?'} {waits_in}"
    yield "  sockets:"
    held = sorted(sockets_of(pid, str(at.parent)).items())[:_SOCKETS_AT_MOST]
    yield from (f"    fd {fd} {sockets.get(inode, 'of another kind')}" for fd, inode in held)
    if not held:
        yield "    none"


def _address(written: str) -> str:
    """`127.0.0.1:8000` for `0100007F:1F40`: words in the machine's own order, so as they were."""
    host, _, port = written.partition(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    name = socket.inet_ntop(family, packed)
    return f"[{name}]:{int(port, 16)}" if ":" in name else f"{name}:{int(port, 16)}"


def _named(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else str(number)


def _text(path: Path, unreadable: Callable[[str], str] = lambda why: "") -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError as error:
        return unreadable(f"not readable: {error.strerror}")


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _numbers(folder: Path) -> list[str]:
    try:
        return sorted((name for name in os.listdir(folder) if name.isdigit()), key=int)
    except OSError:
        return []


#: Each is a py-spy of its own for a moment.
_ASKED_AT_MOST = 32


def python_stacks(pids: Iterable[int], within_s: float) -> Iterator[str]:
    """What py-spy says of each Python process; nothing where it is not installed.

    Args:
        within_s: for all of them together.
    """
    spy = _py_spy()
    if spy is None:
        return
    deadline = time.monotonic() + within_s
    with ExitStack() as stack:
        asked = []
        for pid in [pid for pid in pids if _is_python(pid)][:_ASKED_AT_MOST]:
            popen = subprocess.Popen(
                # Without a pause of the process: one that is stopped would keep py-spy waiting.
                [spy, "dump", "--nonblocking", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            stack.callback(popen.wait)
            stack.callback(popen.kill)
            asked.append((pid, popen))
        for pid, popen in asked:
            try:
                said, _ = popen.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                popen.kill()
                said, _ = popen.communicate()
            yield f"py-spy of pid {pid}:\n{said.decode(errors='replace')}"


#: Of one machine: a node may run hundreds of data workers.
_CARRIERS_AT_MOST = 64
_TEXT_AT_MOST = 1 << 20


def examine_carriers(wanted: Mapping[str, str], within_s: float) -> dict[str, Any]:
    """What the processes of this machine do that have all the variables with these values; they are
    left as they are.

    Sent to nodes by value, as `end_carriers` is.

    Args:
        within_s: for py-spy.

    Returns: `{"machine": machine(), "text": str}`.
    """
    carriers = [pid for pid in all_pids() if not is_zombie(pid) and carries(pid, wanted)]
    shown = carriers[:_CARRIERS_AT_MOST]
    text = "\n".join([*python_stacks(shown, within_s), *kernel_view(shown)])
    return {"machine": machine(), "text": text[:_TEXT_AT_MOST]}


def abort_python(processes: Iterable[ProcessId], within_s: float) -> None:
    """Have those that catch SIGABRT write down their stacks, as faulthandler does, and die.

    The others are left as they are: to them it is but a death, and says nothing.

    Args:
        within_s: how long to wait, all in all, for one to be done before the next, so that what
            they write is not mixed.
    """
    deadline = time.monotonic() + within_s
    asked = [p for p in processes if has_signal(status_of(p.pid), "SigCgt", signal.SIGABRT)]
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

#: At most so long does each part keep a teardown: the look at the processes, of which py-spy may
#: take so much for all of them, ...
_EXAMINED_WITHIN_S, _STACKS_WITHIN_S = 3.0, 2.0
#: ... their own last words, and the copy of the log.
_ABORTED_WITHIN_S, _COPIED_WITHIN_S = 1.0, 1.0
#: So long before SIGKILL is what is left asked for its stacks; of a short grace period, half.
_BEFORE_KILL_S = 1.0
_LOG_BYTES_AT_MOST = 1 << 20


class Diagnosis:
    """Examines a component that hangs while it is ended.

    First `examine` it, with all it may wait for still there; then enter the context, stop it, and
    leave the context once it has ended. This takes a few seconds at most, whatever state the
    machine is in, and raises nothing: the work is done in daemon threads, which are left behind
    where a process or a file system keeps them.
    """

    def __init__(
        self,
        name: str,
        command: Command,
        pid: int,
        processes: Callable[[], list[int]],
        mask: Callable[[str], str],
    ) -> None:
        """
        Args:
            pid: of the component's first process.
            processes: the pids of its tree, parents first, each time anew; none once they can't be
                told.
            mask: takes secrets out of a text.
        """
        self._name, self._pid = name, pid
        self._command = command
        self._processes = processes
        self._mask = mask
        self._report = command.log.with_name(f"{name}.hang.txt")
        self._is_written = False
        self._log_began = 0
        self._late: asyncio.Task[None] | None = None

    async def examine(self) -> Path | None:
        """Write down the state of its processes; the file, None where there is none."""
        await _within(_EXAMINED_WITHIN_S, self._examine)
        return self._report if self._is_written else None

    async def __aenter__(self) -> None:
        await _within(_ABORTED_WITHIN_S, self._abort_early)
        self._late = asyncio.create_task(self._abort_late())

    async def __aexit__(self, *_: object) -> None:
        if self._late is not None:
            self._late.cancel()
        if self._is_written:
            await _within(_COPIED_WITHIN_S, self._copy_log)

    def _examine(self) -> None:
        pids = self._processes()
        if not pids:
            return
        with _told_if_it_fails():
            self._log_began = self._command.log.stat().st_size
        with _told_if_it_fails():
            self._write(f"{self._name} (pid {self._pid}) hangs, {moment(time.time())}\n")
            for text in kernel_view(pids):
                self._write(text)
        for text in python_stacks(pids, _STACKS_WITHIN_S):
            self._write(text)

    def _abort_early(self) -> None:
        """Ask those for their stacks that the stop signal will just end."""
        # The first process last: once it has gone, the guardian tells the rest to stop.
        unheard = [pid for pid in reversed(self._processes()) if self._dies_unheard(pid)]
        abort_python(map(ProcessId.of, unheard), _ABORTED_WITHIN_S)

    def _dies_unheard(self, pid: int) -> bool:
        """The stop signal would end the process without a chance to do anything, such as saving."""
        if self._catches_stop(pid):
            return False
        # Out of reach of the first signal, it may be needed by a first process that does save.
        return not self._catches_stop(self._pid) or _group_of(pid) == _group_of(self._pid)

    def _catches_stop(self, pid: int) -> bool:
        return has_signal(status_of(pid), "SigCgt", self._command.stop_signal)

    async def _abort_late(self) -> None:
        """Ask those for their stacks that the stop signal has not ended, before SIGKILL does."""
        grace_s = self._command.grace_s
        before_kill_s = min(_BEFORE_KILL_S, grace_s / 2)
        await asyncio.sleep(grace_s - before_kill_s)

        def abort() -> None:
            abort_python(map(ProcessId.of, reversed(self._processes())), before_kill_s)

        await _within(before_kill_s, abort)

    def _copy_log(self) -> None:
        log = self._command.log
        with log.open("rb") as f:
            f.seek(self._log_began)
            said = f.read(_LOG_BYTES_AT_MOST).decode(errors="replace")
        if said:
            self._write(f"{log.name} from then on:\n{said}")

    def _write(self, text: str) -> None:
        with self._report.open("a", encoding="utf-8") as f:
            f.write(self._mask(text) + "\n")
        self._is_written = True


async def _within(limit_s: float, work: Callable[[], None]) -> None:
    """Do what may block for ever, in a thread that nothing waits for longer than this."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def run() -> None:
        with _told_if_it_fails():
            work()
        with suppress(RuntimeError):  # The loop has gone on without us, and is closed.
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="diagnosis", daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await done.wait()


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
