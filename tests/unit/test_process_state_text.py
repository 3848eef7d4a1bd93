"""Tests of the text about the state of a process in /proc. The test creates its own /proc."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tasks.processes.hang_report import handles_signal, kernel_view, read_status
from tasks.processes.sockets import describe_connections

#: Process id that no process has: it is above the kernel's maximum.
PID = 1 << 22


def plant(proc: Path, pid: int, files: dict[str, str]) -> None:
    """Create the files of a process below the folder `proc`.

    Args:
        proc: Folder that replaces /proc.
        pid: Process id.
        files: Mapping from the path of each file, relative to /proc/PID, to its content.
    """
    at = proc / str(pid)
    for name, text in files.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    status = f"Name:\tpython\nState:\tT (stopped)\nPPid:\t7\nSigCgt:\t{1 << 5:016x}\n"
    files = {
        "status": status,
        "cmdline": "python\0trainer.py\0--port\0" + "8000\0",
        "wchan": "do_signal_stop",
        "stack": "[<0>] futex_wait\n[<0>] do_syscall_64\n",
        "environ": "API_KEY=hunter2\0",
        "task/1/stat": "1 (python) T 7 12",
        "task/1/wchan": "do_signal_stop",
        "task/1/children": "13 14 ",
        "task/15/stat": "15 (a) b) S 7 12",
        "task/15/wchan": "futex_do_wait",
    }
    plant(tmp_path, PID, files)
    return tmp_path


def test_process_is_shown_with_its_state_stack_and_threads(proc: Path) -> None:
    [text] = kernel_view([PID], proc)

    assert text.splitlines() == [
        f"pid {PID}, child of 7: python trainer.py --port 8000",
        "  state: T (stopped), waits in: do_signal_stop",
        "  kernel stack:",
        "    [<0>] futex_wait",
        "    [<0>] do_syscall_64",
        "  threads:",
        "    1 python T do_signal_stop",
        "    15 a) b S futex_do_wait",
        "  connections:",
    ]


def test_environment_is_not_shown(proc: Path) -> None:
    assert "hunter2" not in "".join(kernel_view([PID], proc))


def test_process_that_is_gone_is_left_out(proc: Path) -> None:
    assert len(list(kernel_view([PID - 1, PID, PID + 1], proc))) == 1


def test_process_with_unreadable_files_is_shown_with_its_readable_status(tmp_path: Path) -> None:
    plant(tmp_path, PID, {"status": "Name:\tkthread\nState:\tD (disk sleep)\n"})

    [text] = kernel_view([PID], tmp_path)

    assert "[kthread]" in text and "D (disk sleep)" in text
    assert "not readable" in text


def test_own_process_is_described_from_the_real_proc_files() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        [text] = kernel_view([os.getpid()])
        at = f"fd {server.fileno()} 127.0.0.1:{server.getsockname()[1]} LISTEN"

    assert at in text
    assert f"pid {os.getpid()}, child of {os.getppid()}: " in text
    assert "R (running)" in text


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_connection_is_shown_with_both_ends(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no address {address}")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        lines = describe_connections(os.getpid())
        own_port, server_port = client.getsockname()[1], server.getsockname()[1]
        line = f"fd {client.fileno()} {address}:{own_port} -> {address}:{server_port} ESTABLISHED"

    assert line in lines


@pytest.mark.parametrize(
    ("caught", "signum", "has"),
    [
        ("0000000000000020", signal.SIGABRT, True),
        ("0000000000000020", signal.SIGTERM, False),
        ("0000000000004000", signal.SIGTERM, True),
        # signal 1 has the lowest bit of the mask, and signal 64 has the highest bit
        ("0000000000000001", 1, True),
        ("8000000000000000", 64, True),
        # the process has ended and has no files in /proc, so the result is False
        (None, signal.SIGABRT, False),
    ],
)
def test_signals_that_are_caught_are_read_by_their_bits(
    tmp_path: Path, caught: str | None, signum: int, has: bool
) -> None:
    if caught is not None:
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "status").write_text(f"Name:\tpython\nSigCgt:\t{caught}\n")

    assert handles_signal(7, signum, tmp_path) is has


def test_status_of_a_process_that_is_gone_is_empty(proc: Path) -> None:
    assert read_status(11, proc) == {}
