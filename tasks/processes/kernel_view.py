"""What the kernel knows of processes that hang: what they wait for, and whom they talk to.

Read from /proc, which asks nothing of the processes. Their environment, where secrets are, is not
looked at.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tasks.record.outcome import signal_name

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


def describe(pids: Iterable[int], proc: Path = _PROC) -> Iterator[str]:
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
    for table in ("tcp", "tcp6"):
        for line in _text(net / table).splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
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
    yield f"  children: {' '.join(_children(at)) or 'none'}"
    if stack := _text(at / "stack", unreadable=lambda why: why):
        yield "  kernel stack:"
        yield from (f"    {line}" for line in stack.splitlines())
    threads = _numbers(at / "task")
    yield f"  threads: {len(threads)}"
    for thread in threads[:_THREADS_AT_MOST]:
        yield f"    {_describe_thread(at / 'task' / thread)}"
    yield "  sockets:"
    yield from (f"    {line}" for line in _open_sockets(at / "fd", sockets) or ["none"])


def _describe_thread(at: Path) -> str:
    head, _, rest = _text(at / "stat").rpartition(") ")
    state = rest[:1] or "?"
    return f"{at.name} {head.partition('(')[2]} {state} {_text(at / 'wchan') or '?'}"


def _children(at: Path) -> list[str]:
    return [
        child
        for thread in _numbers(at / "task")
        for child in _text(at / "task" / thread / "children").split()
    ]


def _open_sockets(fds: Path, sockets: Sockets) -> list[str]:
    targets = [(fd, _link(fds / fd)) for fd in _numbers(fds)]
    held = [(fd, target[8:-1]) for fd, target in targets if target.startswith("socket:[")]
    return [
        f"fd {fd} {sockets.get(inode, 'of another kind')}" for fd, inode in held[:_SOCKETS_AT_MOST]
    ]


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
