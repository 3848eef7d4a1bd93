"""Tests of the place in the user's code at which a Python process crashed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.processes.attempt import make_failure
from tasks.record import crash_stack
from tasks.record.crash_stack import Frame, find_crash_place, is_own_code, read_frame
from tasks.record.outcome import Exit, Failure

FOLDER = Path("/runs/x/code")
FATAL = "Fatal Python error: Segmentation fault\n\n"
CURRENT = "Current thread 0x00007fedff642b80 (most recent call first):\n"
LIBRARY = '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
OWN = '  File "/runs/x/code/mytrain/faults.py", line 9 in maybe\n'
MAIN = '  File "/runs/x/code/train.py", line 44 in main\n'
OTHER = '  File "/runs/x/code/mytrain/data.py", line 3 in load\n'
STACK = FATAL + CURRENT + LIBRARY + OWN + MAIN
END = "\nExtension modules: numpy._core (total: 1)\n"


def add_prefix(text: str, prefix: str) -> str:
    return "".join(f"{prefix}{line}" for line in text.splitlines(keepends=True))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (STACK + END, "maybe (mytrain/faults.py:9)"),
        (f"step 8\n{STACK}{OTHER}", "maybe (mytrain/faults.py:9)"),
        # a line of another rank is between the lines of the stack
        (FATAL + CURRENT + LIBRARY + "step 11 loss 1.7\n" + OWN, "maybe (mytrain/faults.py:9)"),
        (FATAL + f"Thread 0x00007f (most recent call first):\n{OTHER}\n{CURRENT}{OWN}", "maybe "),
        # the format of Python 3.14
        (FATAL + CURRENT.replace(" (most", " [python] (most") + OWN, "maybe (mytrain/faults.py:9)"),
        (add_prefix(STACK, "[default1]:"), "maybe (mytrain/faults.py:9)"),
        (add_prefix(STACK, "(pid=12, ip=10.0.0.1) ") + OTHER, "maybe (mytrain/faults.py:9)"),
        # a terminal has changed the ends of the lines
        ((STACK + END).replace("\n", "\r\n"), "maybe (mytrain/faults.py:9)"),
        (add_prefix(STACK, "[rank0]: ").replace("\n", "\r\n"), "maybe (mytrain/faults.py:9)"),
        (STACK.replace("\n", "\r\r\n") + END, "maybe (mytrain/faults.py:9)"),
        # two processes crashed at the same place
        (STACK + END + STACK, "maybe (mytrain/faults.py:9)"),
        # two processes crashed at different places
        (STACK + END + FATAL + CURRENT + OTHER, ""),
        (STACK + END + FATAL + CURRENT + LIBRARY, ""),
        # two processes crashed, but only one of them printed its call stack
        (FATAL + add_prefix(STACK, "[rank1]: "), ""),
        # the lines of two processes are mixed
        (FATAL + FATAL + CURRENT + OWN + END + CURRENT + OTHER, "maybe (mytrain/faults.py:9)"),
        # the thread that crashed executes no code of the user
        (FATAL + CURRENT + LIBRARY + f"\nThread 0x00007f (most recent call first):\n{OWN}", ""),
        (FATAL + CURRENT + f"  <no Python frame>\n\nThread 0x00007f (most recent):\n{OWN}", ""),
        # the fatal error in the output belongs to another signal than the exit of the process
        (STACK.replace("Segmentation fault", "Aborted"), ""),
        (CURRENT + OWN, ""),
        ("step 8\n", ""),
        # the code is in another folder
        (FATAL + CURRENT + OWN.replace("/runs/x", "/tmp/ray"), "maybe (faults.py:9)"),
        (STACK.replace("/runs/x", "/tmp/ray"), "maybe (mytrain/faults.py:9)"),
        (FATAL + CURRENT + '  File "train.py", line 2 in main\n', "main (train.py:2)"),
    ],
)
def test_innermost_line_of_the_users_code_is_found(text: str, place: str) -> None:
    found = find_crash_place(text, "SIGSEGV", FOLDER)

    assert found.startswith(place)
    assert bool(found) is bool(place)


def test_each_line_of_a_log_with_many_incomplete_stacks_is_read_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_lines = []

    def read(line: str) -> Frame | None:
        read_lines.append(line)
        return read_frame(line)

    monkeypatch.setattr(crash_stack, "read_frame", read)
    text = 100 * (FATAL + OTHER) + CURRENT + OWN

    place = find_crash_place(text, "SIGSEGV", FOLDER)

    assert place == "maybe (mytrain/faults.py:9)"
    assert len(read_lines) <= len(text.splitlines())


def test_carriage_return_is_no_part_of_the_name_of_a_function() -> None:
    frame = read_frame(OWN.replace("\n", "\r"))

    assert frame == Frame(path="/runs/x/code/mytrain/faults.py", line=9, function="maybe")


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/runs/x/code/train.py", True),
        ("/home/user/lib/python/train.py", True),
        ("/home/user/lib/python-train/train.py", True),
        ("/home/user/lib/python3/train.py", True),
        ("/usr/lib/python3.11/threading.py", False),
        ("/usr/lib64/python3.9/threading.py", False),
        ("/opt/conda/lib/python3.13t/threading.py", False),
        ("/usr/lib/python311.zip/threading.py", False),
        ("/usr/lib/python3/dist-packages/yaml/loader.py", False),
        ("/home/user/.venv/lib/python3.11/site-packages/torch/nn/functional.py", False),
        ("<frozen runpy>", False),
    ],
)
def test_library_folders_of_python_contain_no_code_of_the_user(path: str, is_own: bool) -> None:
    assert is_own_code(path) is is_own


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"])
def test_place_is_found_in_the_output_of_a_crashed_python(tmp_path: Path, signal: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "faults.py").write_text(
        f"import os, signal\ndef crash():\n    os.kill(os.getpid(), signal.{signal})\n"
    )
    (tmp_path / "train.py").write_text(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from pkg.faults import crash\n"
        "crash()\n"
    )
    command = [sys.executable, "-X", "faulthandler", "train.py"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    ended = Exit.from_return_code(done.returncode, 0.0)
    failure = make_failure(
        "trainer", done.stderr, message="ended", rule="exit", exit=ended, folder=tmp_path
    )

    assert ended.signal_name == signal
    assert failure.message.endswith(", in crash (pkg/faults.py:3)")


def fail(text: str, *, code: int) -> Failure:
    ended = Exit.from_return_code(code, 0.0)
    return make_failure("trainer", text, message="ended", rule="exit", exit=ended, folder=FOLDER)


def test_failure_of_a_rank_names_the_place_of_the_crash() -> None:
    table = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "Root Cause (first observed failure):\n"
        "[0]:\n"
        "  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : -11 (pid: 12191)  (SIGSEGV)\n"
        "  traceback : Signal 11 (SIGSEGV) received by PID 12191\n"
    )

    failure = fail(f"step 8\n{STACK}{END}{table}", code=1)

    assert failure.message == (
        "ended: rank 1 (pid 12191) was killed by SIGSEGV first: Fatal Python error: Segmentation "
        "fault, in maybe (mytrain/faults.py:9)"
    )


@pytest.mark.parametrize("code", [-11, 139])
def test_failure_of_a_component_without_ranks_names_the_place_of_the_crash(code: int) -> None:
    failure = fail(STACK + END, code=code)

    assert failure.message == (
        "ended: Fatal Python error: Segmentation fault, in maybe (mytrain/faults.py:9)"
    )


def test_stack_of_an_earlier_crash_does_not_explain_a_later_failure() -> None:
    assert "maybe" not in fail(STACK + END, code=1).message
    assert "maybe" not in fail(STACK + END, code=-9).message
