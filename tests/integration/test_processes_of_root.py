"""A run of an ordinary user whose component has started a process of root, as `sudo` does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.processes import tree
from tests.support.another_user import needs_another_user
from tests.support.root_child import AS_NOBODY, make_helper
from tests.support.supervised_components import is_alive, wait_until

ROOT = Path(__file__).resolve().parents[2]
#: Program that adopts a process of the user root, and prints the pid of this process. The program
#: then calls `tree.kill_below_once`, which tries to kill all descendants of the program.
#:
#: `tree.kill_below_once` also checks the processes with the newest pids, to find new descendants.
#: The program replaces `tree.last_pid`, which returns the newest pid of the machine. The
#: replacement returns the pid of root's process, so that this process is checked, too.
_KILL_ROUND = """
import subprocess, sys, time
from tasks.processes import tree
tree.become_subreaper()
script = sys.argv[1] + " > /dev/null 2>&1 & echo $!"
shell = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True)
pid = int(shell.stdout)
while tree.read_real_user(pid) != 0:
    time.sleep(0.01)
print(pid, flush=True)
tree.last_pid = lambda: pid
tree.kill_below_once(lambda: tree.reap_all()[1])
"""

#: Program that starts a child process with a mark: a number in a resource limit of the process. The
#: child becomes root. The program then prints the pid of the child, ends all processes with this
#: mark, and prints the pids that `ending.end_marked` returned.
_END_MARKED = """
import subprocess, sys, time
from tasks.processes import ending, tree
mark = tree.new_mark()
child = subprocess.Popen(
    [sys.argv[1]], preexec_fn=lambda: tree.mark_own(mark), stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
while tree.read_real_user(child.pid) != 0:
    time.sleep(0.01)
print(child.pid, flush=True)
print(*[pid for pid, _ in ending.end_marked(mark)], flush=True)
"""
#: Program that starts a shell with the environment variable MUSTER_RUN_ID. The shell starts a child
#: process that becomes root. The program prints the pid of this child process. Then it ends all
#: processes with this value of MUSTER_RUN_ID, and prints the leftover processes as JSON.
_END_CARRIERS = """
import json, os, subprocess, sys, time
from tasks.processes import ending, tree
script = sys.argv[1] + " > /dev/null 2>&1 & echo $!; exec sleep 600"
env = {**os.environ, "MUSTER_RUN_ID": "run-with-sudo"}
carrier = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, env=env)
child = int(carrier.stdout.readline())
while tree.read_real_user(child) != 0:
    time.sleep(0.01)
print(child, flush=True)
print(json.dumps(ending.end_carriers({"MUSTER_RUN_ID": "run-with-sudo"})["left"]), flush=True)
"""
#: Duration of the measurement of a guardian's CPU time, in seconds.
WATCHED_S = 3.0

pytestmark = [
    needs_another_user,
    pytest.mark.skipif(
        not (shutil.which("cc") and shutil.which("setpriv")), reason="needs cc and setpriv"
    ),
]


@dataclass
class Teardown:
    """Result of the teardown of a run of the user `nobody`."""

    #: Pid of the component's child process, which runs as the user root.
    child: int
    #: Pid of the guardian process of the component.
    guardian: int
    state: str
    message: str
    left: dict[str, list[str]]
    stuck_pids: list[int]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory in which every user may write."""
    directory = Path(tempfile.mkdtemp(prefix="muster-root-child-", dir="/tmp"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def tear_down(directory: Path) -> Iterator[Callable[..., Teardown]]:
    """Yield a function that starts and ends a component.

    The component has a child process of the user root. This child process and the component's
    supervisor are killed at the end of the test.
    """
    programs: list[subprocess.Popen[str]] = []
    pids: list[int] = []

    def run(*options: str) -> Teardown:
        program = subprocess.Popen(
            [
                *(*AS_NOBODY, sys.executable, "-m", "tests.support.root_child"),
                *(str(directory), str(make_helper(directory)), *options),
            ],
            cwd=ROOT,
            env={**os.environ, "HOME": str(directory), "MUSTER_HOME": str(directory / "home")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        programs.append(program)
        assert program.stdout is not None
        started = json.loads(program.stdout.readline())
        pids.extend(started.values())
        return Teardown(**started, **json.loads(program.stdout.readline()))

    yield run
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for program in programs:
        program.kill()
        program.communicate(timeout=30)


@pytest.mark.parametrize("options", [(), ("--kill-guardian",)])
def test_process_that_may_not_be_signalled_is_reported_with_its_user(
    tear_down: Callable[..., Teardown], options: tuple[str, ...]
) -> None:
    teardown = tear_down(*options)

    assert is_alive(teardown.child)
    assert teardown.state == "failed"
    assert teardown.stuck_pids == [teardown.child]
    [survivor] = teardown.left["trainer"]
    assert f"pid {teardown.child} (sleep 613)" in survivor
    assert "user root" in survivor and "user nobody" in survivor and "EPERM" in survivor
    assert f"sudo kill {teardown.child}" in survivor
    assert survivor in teardown.message
    assert "device" not in teardown.message


def test_guardian_waits_for_a_process_that_it_may_not_signal(
    tear_down: Callable[..., Teardown],
) -> None:
    teardown = tear_down()
    lived_on = is_alive(teardown.guardian)

    os.kill(teardown.child, signal.SIGKILL)

    assert lived_on
    wait_until(lambda: not is_alive(teardown.guardian), "the guardian has ended")


def test_newborn_process_that_may_not_be_signalled_does_not_end_its_killer(directory: Path) -> None:
    program = run_as_nobody(_KILL_ROUND, directory)

    child = int(program.stdout)
    lived_on = is_alive(child)
    os.kill(child, signal.SIGKILL)
    assert program.returncode == 0, program.stderr
    assert lived_on


def test_process_of_root_with_the_mark_of_a_run_is_a_leftover(directory: Path) -> None:
    program = run_as_nobody(_END_MARKED, directory)

    child, *found = map(int, program.stdout.split())
    os.kill(child, signal.SIGKILL)
    assert found == [child], program.stderr


def test_child_of_root_of_an_ended_process_is_a_leftover(directory: Path) -> None:
    program = run_as_nobody(_END_CARRIERS, directory)

    child, left = program.stdout.splitlines()
    os.kill(int(child), signal.SIGKILL)
    [leftover] = json.loads(left)
    assert leftover["pid"] == int(child)
    assert "sleep 613" in leftover["command"] and "EPERM" in leftover["command"]


def run_as_nobody(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code as the user `nobody`.

    In the code, `sys.argv[1]` is the path of a set-user-ID program, which becomes root.
    """
    return subprocess.run(
        [*AS_NOBODY, sys.executable, "-c", code, str(make_helper(directory))],
        cwd=ROOT,
        env={**os.environ, "HOME": str(directory), "MUSTER_HOME": str(directory / "home")},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.thorough
def test_guardian_of_a_process_that_it_may_not_signal_uses_little_cpu(
    tear_down: Callable[..., Teardown],
) -> None:
    teardown = tear_down()

    before_s = read_cpu_s(teardown.guardian)
    time.sleep(WATCHED_S)
    used_s = read_cpu_s(teardown.guardian) - before_s

    assert used_s < 0.1 * WATCHED_S


def read_cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds."""
    fields = tree.stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
