"""A run continues although its programs use up all processes or files that the host allows."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.processes.supervisor import Supervisor
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded
from tests.support.another_user import NOBODY, needs_another_user
from tests.support.open_files import full_table_of_files
from tests.support.shared_places import shared_folder
from tests.support.supervised_components import (
    DEADLINE_S,
    ComponentHarness,
    python,
    sh,
    wait_until,
)

ROOT = Path(__file__).resolve().parents[2]
#: Root directory of the cgroup hierarchy with the controller `pids`, in cgroup version 1.
PIDS = Path("/sys/fs/cgroup/pids")
#: A program that starts threads until the kernel refuses another thread. The program then sleeps
#: for a number of seconds, which is its argument.
GREEDY = """
import pathlib, sys, threading, time
stop = threading.Event()
count = 0
try:
    while True:
        threading.Thread(target=stop.wait, daemon=True).start()
        count += 1
except RuntimeError as error:
    pathlib.Path("refused").write_text(f"{count} threads, then {error}")
time.sleep(float(sys.argv[1]))
"""
#: A program that starts threads until the kernel refuses another thread. The program then dies.
DYING = """
import threading
while True:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def greedy(lasts_s: float) -> tuple[str, ...]:
    return (sys.executable, "-I", "-c", GREEDY, str(lasts_s))


@pytest.fixture
def pids_cgroup() -> Iterator[Path]:
    """Move this process into a new cgroup, and yield the cgroup's directory.

    The cgroup allows 60 further processes and threads.
    """
    cgroup = PIDS / f"muster-test-{os.getpid()}"
    line = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":pids:" in line),
        "",
    )
    try:
        cgroup.mkdir()
    except OSError:
        pytest.skip("this machine offers no cgroup v1 with the controller pids")
    before = PIDS / line.split(":", 2)[2].lstrip("/")
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    used = int((cgroup / "pids.current").read_text())
    (cgroup / "pids.max").write_text(str(used + 60))
    yield cgroup
    (before / "cgroup.procs").write_text(str(os.getpid()))
    wait_until(lambda: not (cgroup / "cgroup.procs").read_text(), "an empty cgroup")
    cgroup.rmdir()


def test_run_continues_while_no_thread_can_be_started(
    harness: ComponentHarness, pids_cgroup: Path
) -> None:
    verdict = harness.run(
        harness.component("trainer", greedy(1.5), on_exit_zero="complete"),
    )

    assert verdict.state is RunState.COMPLETED, verdict
    assert "can't start new thread" in (harness.directory / "refused").read_text()


@pytest.mark.thorough
def test_run_at_its_limit_of_processes_can_be_cancelled(
    harness: ComponentHarness, pids_cgroup: Path
) -> None:
    supervisor: Supervisor = harness.start_all(harness.component("trainer", greedy(600)))
    refused = harness.directory / "refused"
    wait_until(lambda: refused.exists() and refused.read_text(), "no further thread")

    verdict = harness.end(supervisor)

    assert verdict.state is RunState.CANCELLED, verdict


def test_failure_names_the_cgroup_whose_limit_was_reached(
    harness: ComponentHarness, pids_cgroup: Path
) -> None:
    limit = (pids_cgroup / "pids.max").read_text().strip()

    verdict = harness.run(harness.component("trainer", (sys.executable, "-I", "-c", DYING)))

    failure = verdict.failure
    assert failure is not None and failure.component == "trainer"
    assert failure.rule == "process-limit"
    assert f"pids.max of the cgroup {pids_cgroup}" in failure.message
    assert f"of {limit} processes and threads in use" in failure.message
    assert "raise the limit" in failure.hint


@pytest.mark.thorough
def test_component_that_cannot_be_started_names_the_limit(
    harness: ComponentHarness, pids_cgroup: Path
) -> None:
    # The first component uses up the limit of processes and threads. So no process can be forked
    # for the second component.
    first = harness.component("hoarder", greedy(600), ready=None)
    supervisor = harness.supervise(first, harness.component("trainer", sh("touch started")))
    supervisor.start("hoarder")
    refused = harness.directory / "refused"
    wait_until(lambda: refused.exists() and refused.read_text(), "no further thread")

    with pytest.raises(RunEnded):
        supervisor.start("trainer")
    verdict = harness.end(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert f"pids.max of the cgroup {pids_cgroup}" in verdict.failure.message
    assert not (harness.directory / "started").exists()


#: Program that runs a component, and then prints the final state, the message and the failure of
#: the attempt. The component runs as the same user as the program.
SUPERVISE = """
import sys, threading
from pathlib import Path
from tests.support.supervised_components import ComponentHarness
harness = ComponentHarness(Path(sys.argv[1]))
verdict = harness.run(harness.component("trainer", tuple(sys.argv[2:]), on_exit_zero="complete"))
print(verdict.state.value, verdict.message, verdict.failure and verdict.failure.message)
"""


def supervise_as_nobody(directory: Path, *arguments: str) -> str:
    """Run a Python program as a component of the user nobody.

    A limit (`ulimit -u`) allows this user to start at most 80 further processes and threads.

    Returns:
        Final state and message of the attempt.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = shutil.which(version, path="/usr/local/bin:/usr/bin")
    if interpreter is None:
        pytest.skip(f"this machine has no {version} that the user {NOBODY} may execute")
    used = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == NOBODY:
                used += int((process / "stat").read_text().rpartition(")")[2].split()[17])
    limit = used + 80
    packages = os.pathsep.join((str(ROOT), *site.getsitepackages()))
    result = subprocess.run(
        [interpreter, "-c", SUPERVISE, str(directory), interpreter, "-I", "-c", *arguments],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit)),
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "HOME": str(directory), "PYTHONPATH": packages},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return result.stdout or result.stderr


@pytest.fixture
def folder_of_nobody() -> Iterator[Path]:
    """Yield a folder of the user nobody. This user can also enter the parent folders."""
    with shared_folder(0o755) as folder:
        os.chown(folder, NOBODY, NOBODY)
        yield folder


@pytest.mark.thorough
@needs_another_user
def test_run_of_another_user_continues_at_its_limit_of_processes(folder_of_nobody: Path) -> None:
    output = supervise_as_nobody(folder_of_nobody, GREEDY, "1.5")

    assert output.startswith("completed"), output
    refused = (folder_of_nobody / "refused").read_text()
    assert "can't start new thread" in refused


@pytest.mark.thorough
@needs_another_user
def test_failure_names_the_limit_of_processes_of_the_user(folder_of_nobody: Path) -> None:
    output = supervise_as_nobody(folder_of_nobody, DYING)

    assert output.startswith("failed"), output
    assert f"RLIMIT_NPROC (ulimit -u) of user {NOBODY}" in output


def test_failure_names_the_limit_of_open_files(harness: ComponentHarness) -> None:
    script = "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
    script += "while True: os.dup(0)"

    verdict = harness.run(harness.component("trainer", python(script)))

    failure = verdict.failure
    assert failure is not None and failure.rule == "file-limit"
    assert "open files (RLIMIT_NOFILE, ulimit -n)" in failure.message
    assert "ulimit -n" in failure.hint


def test_run_continues_while_muster_can_open_no_file(harness: ComponentHarness) -> None:
    supervisor = harness.start_all(
        harness.component("trainer", sh("sleep 2"), on_exit_zero="complete")
    )

    with full_table_of_files():
        harness.wait_for_event("component.exited")
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.state is RunState.COMPLETED, verdict
