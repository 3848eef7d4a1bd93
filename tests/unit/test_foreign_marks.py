"""Another user's process with a copied mark of a run is not a leftover of that run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.stack.state import processes_of
from tasks.processes.ending import end_carriers, end_marked, find_holders
from tasks.processes.machine import gather_facts
from tasks.processes.tree import new_mark
from tests.support.another_user import (
    NOBODY,
    end_process,
    needs_another_user,
    start_as_another_user,
)

pytestmark = needs_another_user

RLIMIT_LOCKS = 10
#: Muster marks the processes of a run with a resource limit, which every user can read in
#: /proc/PID/limits. This program of another user sets the same limit.
_COPY = """
mark = int(sys.argv[1])
resource.setrlimit(10, (mark, resource.RLIM_INFINITY))
print("marked", flush=True)
time.sleep(600)
"""
#: Program of a component that changes to another user, as some daemons do. Root started the run.
#: The program has the mark of the run: a number in a resource limit. Muster recognizes the run's
#: processes by this number.
_DAEMON = f"""
import os, resource, sys, time
resource.setrlimit({RLIMIT_LOCKS}, (int(sys.argv[1]), resource.RLIM_INFINITY))
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
print("marked", flush=True)
time.sleep(600)
"""

Impostor = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    """Return a function that starts a process of another user.

    The process has the mark (a resource limit) and the environment variables of a run.
    """
    started: list[subprocess.Popen[str]] = []

    def start(mark: int = 0, **variables: str) -> subprocess.Popen[str]:
        process = start_as_another_user(_COPY, str(mark or new_mark()), env=variables)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "marked\n"
        return process

    yield start
    for process in started:
        end_process(process)


def test_process_with_a_copied_mark_is_no_leftover(impostor: Impostor) -> None:
    mark = new_mark()
    process = impostor(mark)

    found = end_marked(mark)

    assert found == set()
    assert process.poll() is None


def test_process_with_copied_variables_is_no_leftover(impostor: Impostor, tmp_path: Path) -> None:
    run_id = f"copied-{uuid.uuid4().hex[:8]}"
    process = impostor(MUSTER_RUN_ID=run_id, MUSTER_STACK=run_id, PREFECT__FLOW_RUN_ID=run_id)

    swept = end_carriers({"MUSTER_RUN_ID": run_id})
    holders = find_holders("PREFECT__FLOW_RUN_ID")
    carriers = gather_facts(str(tmp_path), str(tmp_path), "name", str(tmp_path))["carriers"]

    assert (swept["killed"], swept["left"]) == ([], [])
    assert run_id not in holders.pids
    assert process.pid in holders.hidden
    assert processes_of(run_id) == []
    assert [one for one in carriers if one["run_id"] == run_id] == []
    assert process.poll() is None


def test_program_that_gave_up_root_is_a_leftover_by_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    mark, log = new_mark(), tmp_path / "trainer.log"
    with log.open("w") as stdout:
        process = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _DAEMON, str(mark)),
            env=dict(os.environ),
            stdout=stdout,
            start_new_session=True,
        )
    try:
        while log.read_text() != "marked\n":
            assert process.poll() is None

        found = end_marked(mark)

        assert [pid for pid, _ in found] == [process.pid]
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait(30)
