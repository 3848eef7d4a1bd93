"""What a sweep of one machine ends, and what it spares."""

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
from tasks.processes.ending import end_all, end_carriers, holders_of
from tasks.processes.tree import environment_of, is_zombie
from tests.support.stage import wait_until

#: Ends by itself in the end: one that is not caught would be nobody's, and never seen again.
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
    return f"swept-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process in a session of its own; it is gone after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(argv: tuple[str, ...] = ("sleep", "600"), **variables: str) -> object:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **variables}
        )
        started.append(process)
        return process

    yield start_one  # type: ignore[misc]
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_what_carries_the_run_id_is_ended_and_named(start: Start, run_id: str) -> None:
    process = start(MUSTER_RUN_ID=run_id)

    found = end_carriers({"MUSTER_RUN_ID": run_id})

    assert [(one["pid"], one["command"]) for one in found["killed"]] == [(process.pid, "sleep 600")]
    assert found["left"] == []
    assert process.wait(10) == -signal.SIGKILL


def test_a_second_sweep_finds_nothing(start: Start, run_id: str) -> None:
    start(MUSTER_RUN_ID=run_id)
    end_carriers({"MUSTER_RUN_ID": run_id})

    again = end_carriers({"MUSTER_RUN_ID": run_id})

    assert (again["killed"], again["left"]) == ([], [])


@pytest.mark.parametrize(
    "variables",
    [
        # another run, whose id begins with this one's, and one that this one's begins with
        {"MUSTER_RUN_ID": "{run_id}-2"},
        {"MUSTER_RUN_ID": "swept"},
        # the id in another variable
        {"MY_MUSTER_RUN_ID": "{run_id}"},
        # another attempt, another component, none at all
        {"MUSTER_RUN_ID": "{run_id}", "MUSTER_ATTEMPT": "2", "MUSTER_COMPONENT": "trainer"},
        {"MUSTER_RUN_ID": "{run_id}", "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "api"},
        {"MUSTER_RUN_ID": "{run_id}"},
    ],
)
def test_a_process_of_another_is_left(start: Start, run_id: str, variables: dict[str, str]) -> None:
    process = start(**{name: value.format(run_id=run_id) for name, value in variables.items()})

    found = end_carriers(
        {"MUSTER_RUN_ID": run_id, "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "trainer"}
    )

    assert found["killed"] == []
    assert process.poll() is None


def test_neither_the_sweeper_nor_its_ancestors_are_ended(run_id: str) -> None:
    code = (
        "import sys; from tasks.processes.ending import end_carriers;"
        f"print(len(end_carriers({{'MUSTER_RUN_ID': '{run_id}'}})['killed']))"
    )

    done = subprocess.run(
        # A shell that is the parent, and carries the run's id as its child does.
        ["bash", "-c", '"$0" -c "$1"; echo alive', sys.executable, code],
        env={**os.environ, "MUSTER_RUN_ID": run_id},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout.split() == ["0", "alive"], done.stderr


def test_a_chain_that_forks_and_exits_is_caught(start: Start, run_id: str) -> None:
    start((sys.executable, "-I", "-S", "-c", _FORKER), MUSTER_RUN_ID=run_id)

    found = end_carriers({"MUSTER_RUN_ID": run_id})

    assert found["left"] == []
    wait_until(lambda: run_id not in holders_of("MUSTER_RUN_ID").pids, "none is left")


def test_a_stopped_process_is_ended(start: Start, run_id: str) -> None:
    process = start(MUSTER_RUN_ID=run_id)
    process.send_signal(signal.SIGSTOP)

    end_carriers({"MUSTER_RUN_ID": run_id})

    assert is_zombie(process.pid)


def test_what_begins_another_program_once_it_was_found_is_ended(
    start: Start, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(MUSTER_RUN_ID=run_id)
    looks = 0

    def seen_at_first(pid: int) -> dict[str, str]:
        nonlocal looks
        looks += pid == process.pid
        # Found by the first look, and made sure of by the second.
        return {} if pid == process.pid and looks > 2 else environment_of(pid)

    monkeypatch.setattr(ending, "environment_of", seen_at_first)

    found = end_carriers({"MUSTER_RUN_ID": run_id})

    assert [one["pid"] for one in found["killed"]] == [process.pid]
    assert found["left"] == []
    assert process.wait(10) == -signal.SIGKILL


def test_what_is_born_faster_than_it_is_ended_is_left() -> None:
    born = iter(range(1 << 30, 1 << 31))

    # Each has ended by the time it is looked at.
    ended, left = end_all(lambda: {(next(born), 1)}, within_s=0.2)

    assert len(left) == 1
    assert ended
    assert max(ended) < min(left)
