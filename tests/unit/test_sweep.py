"""Tests of `end_carriers`: it ends the processes of a run on this machine, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tasks.processes import ending
from tasks.processes.ending import end_all, end_carriers, find_holders
from tasks.processes.tree import is_zombie, read_environment
from tests.support.supervised_components import wait_until

#: Program that forks a child and exits; the child does the same, and so on. The program stops after
#: 30 s, so that it does not run forever after a failed test.
_FORKER = """
import os, time
until = time.monotonic() + 30
while time.monotonic() < until and os.fork() == 0:
    os.setsid()
    time.sleep(0.001)
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def run_id() -> str:
    """Return a new run id."""
    return f"swept-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a process in its own session and kills it after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start_process(argv: tuple[str, ...] = ("sleep", "600"), **variables: str) -> object:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **variables}
        )
        started.append(process)
        return process

    yield start_process  # type: ignore[misc]
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_process_with_the_run_id_is_killed_and_named(start: Start, run_id: str) -> None:
    sleeper = start(MUSTER_RUN_ID=run_id)

    sweep = end_carriers({"MUSTER_RUN_ID": run_id})

    killed = [(process["pid"], process["command"]) for process in sweep["killed"]]
    assert killed == [(sleeper.pid, "sleep 600")]
    assert sweep["left"] == []
    assert sleeper.wait(10) == -signal.SIGKILL


def test_second_sweep_finds_no_process(start: Start, run_id: str) -> None:
    start(MUSTER_RUN_ID=run_id)
    end_carriers({"MUSTER_RUN_ID": run_id})

    second_sweep = end_carriers({"MUSTER_RUN_ID": run_id})

    assert (second_sweep["killed"], second_sweep["left"]) == ([], [])


@pytest.mark.parametrize(
    "variables",
    [
        # the process belongs to another run, whose id is longer or shorter than the id of this run
        {"MUSTER_RUN_ID": "{run_id}-2"},
        {"MUSTER_RUN_ID": "swept"},
        # the id of the run is in a variable of another name, so the process does not belong to the
        # run
        {"MY_MUSTER_RUN_ID": "{run_id}"},
        # the process belongs to another attempt or another component of the run, or the process has
        # only the variable with the run id
        {"MUSTER_RUN_ID": "{run_id}", "MUSTER_ATTEMPT": "2", "MUSTER_COMPONENT": "trainer"},
        {"MUSTER_RUN_ID": "{run_id}", "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "api"},
        {"MUSTER_RUN_ID": "{run_id}"},
    ],
)
def test_processes_of_others_are_not_killed(
    start: Start, run_id: str, variables: dict[str, str]
) -> None:
    process = start(**{name: value.format(run_id=run_id) for name, value in variables.items()})

    sweep = end_carriers(
        {"MUSTER_RUN_ID": run_id, "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "trainer"}
    )

    assert sweep["killed"] == []
    assert process.poll() is None


def test_calling_process_and_its_ancestors_are_not_killed(run_id: str) -> None:
    code = (
        "import sys; from tasks.processes.ending import end_carriers;"
        f"print(len(end_carriers({{'MUSTER_RUN_ID': '{run_id}'}})['killed']))"
    )

    done = subprocess.run(
        # A shell starts a Python process that calls `end_carriers`. Both processes have the run id.
        ["bash", "-c", '"$0" -c "$1"; echo alive', sys.executable, code],
        env={**os.environ, "MUSTER_RUN_ID": run_id},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout.split() == ["0", "alive"], done.stderr


def test_forking_and_exiting_chain_is_killed(start: Start, run_id: str) -> None:
    start((sys.executable, "-I", "-S", "-c", _FORKER), MUSTER_RUN_ID=run_id)

    sweep = end_carriers({"MUSTER_RUN_ID": run_id})

    assert sweep["left"] == []
    wait_until(lambda: run_id not in find_holders("MUSTER_RUN_ID").pids, "none is left")


def test_stopped_process_is_killed(start: Start, run_id: str) -> None:
    process = start(MUSTER_RUN_ID=run_id)
    process.send_signal(signal.SIGSTOP)

    end_carriers({"MUSTER_RUN_ID": run_id})

    assert is_zombie(process.pid)


def test_process_that_executes_another_program_is_killed(
    start: Start, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(MUSTER_RUN_ID=run_id)
    reads = 0

    def read_twice(pid: int) -> dict[str, str]:
        """Return the environment of a process.

        For the process that the test has started, the third read and all later reads return an
        empty environment, as if this process had executed another program.
        """
        nonlocal reads
        if pid != process.pid:
            return read_environment(pid)
        reads += 1
        # The first read finds the process, and the second read confirms that the process belongs to
        # the run.
        return read_environment(pid) if reads <= 2 else {}

    monkeypatch.setattr(ending, "read_environment", read_twice)

    sweep = end_carriers({"MUSTER_RUN_ID": run_id})

    assert [killed["pid"] for killed in sweep["killed"]] == [process.pid]
    assert sweep["left"] == []
    assert process.wait(10) == -signal.SIGKILL


def test_endless_new_processes_are_reported_as_leftover() -> None:
    new_pids = iter(range(1 << 30, 1 << 31))

    # Each search finds another process, which has already ended. At the time limit, `end_all`
    # searches a last time. More processes may still appear, so `end_all` reports the process that
    # the last search finds as leftover.
    ended, left = end_all(lambda: {(next(new_pids), 1)}, within_s=0.2)

    assert len(left) == 1
    assert ended
    assert max(ended) < min(left)
