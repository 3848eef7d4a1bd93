"""Finishing what a killed run has left: all of that, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.processes import registry as lost_runs
from tasks.processes import tree
from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.processes.registry import LostRun, Owner, RegisterEntry, Remains, finish
from tests.support.stage import RUN_ID, is_alive

GONE = ProcessId(pid=1 << 22, start_ticks=1, boot_id=boot_id())

#: A process with a mark of its own, and a daemon that came of it, with an empty environment.
MARKED = """
import os, sys
from tasks.processes import tree
tree.mark_own(int(sys.argv[1]))
os.execvp("sh", ["sh", "-c", "setsid env -i /bin/sleep 600 & echo $!; exec sleep 600"])
"""

Marked = tuple[int, tuple[int, int]]


@pytest.fixture
def marked() -> Iterator[Marked]:
    """A mark, and the pids of a process that has it and of its daemon."""
    mark = tree.new_mark()
    with subprocess.Popen(
        [sys.executable, "-c", MARKED, str(mark)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        try:
            yield mark, (process.pid, daemon)
        finally:
            for pid in (process.pid, daemon):
                if is_alive(pid) and tree.mark_of(pid) == mark:
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def lost_run(directory: Path, *entries: RegisterEntry, **owner: object) -> LostRun:
    fields = {"run_id": RUN_ID, "host": host_name(), "process": GONE}
    run = LostRun(directory, Owner.model_validate({**fields, **owner}))
    run.entries = list(entries)
    return run


def entry(**changes: object) -> RegisterEntry:
    fields = {
        "run_id": RUN_ID,
        "attempt": 1,
        "component": "trainer",
        "mark": 0,
        "guardian": GONE,
        "process": GONE,
        "grace_s": 1.0,
    }
    return RegisterEntry.model_validate({**fields, **changes})


def test_all_that_carries_the_mark_is_ended(tmp_path: Path, marked: Marked) -> None:
    mark, pids = marked

    remains = finish(lost_run(tmp_path, entry(mark=mark)))

    assert remains == Remains(killed=tuple(sorted(pids)), left={}, waiting={}, removed=())
    assert remains.is_clean


def test_process_with_a_known_pid_is_left(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """The pid was re-used: everything but the start is what the registry says."""
    before = ProcessId.of(sleeper.pid).model_copy(update={"start_ticks": 1})

    remains = finish(lost_run(tmp_path, entry(guardian=before, process=before)))

    assert remains.killed == ()
    assert sleeper.poll() is None


def test_registry_from_before_a_reboot_harms_nobody(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], marked: Marked
) -> None:
    """Pid, start and even mark are those of processes of today."""
    now = ProcessId.of(sleeper.pid)
    before = now.model_copy(update={"boot_id": "another boot"})

    remains = finish(
        lost_run(tmp_path, entry(mark=marked[0], guardian=before, process=before), process=before)
    )

    assert remains == Remains(killed=(), left={}, waiting={}, removed=())
    assert sleeper.poll() is None
    assert all(is_alive(pid) for pid in marked[1])


def test_guardian_that_lives_is_left_to_do_its_work(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], marked: Marked
) -> None:
    guardian = ProcessId.of(sleeper.pid)
    run = lost_run(tmp_path, entry(mark=marked[0], guardian=guardian))

    remains = finish(run)

    assert remains.waiting == {"trainer": sleeper.pid}
    assert not remains.is_clean
    assert all(is_alive(pid) for pid in marked[1])


def test_guardian_that_has_had_its_time_is_ended_with_the_rest(
    tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped (SIGSTOP) would be waited for for ever."""
    os.kill(marked[1][0], signal.SIGSTOP)
    guardian = ProcessId.of(marked[1][0])
    run = lost_run(tmp_path, entry(mark=marked[0], guardian=guardian))
    monkeypatch.setattr(lost_runs, "_GUARDIAN_MARGIN_S", -2.0)

    remains = finish(run)

    assert remains.is_clean
    assert set(remains.killed) == {*marked[1]}


def test_only_leftovers_that_are_ours_are_removed(tmp_path: Path) -> None:
    ours, other = tmp_path / "muster-prefect-x", tmp_path / "data"
    for directory in (ours, other):
        (directory / "below").mkdir(parents=True)

    remains = finish(lost_run(tmp_path, leftovers=(ours, other, tmp_path / "muster-gone")))

    assert remains.removed == (ours,)
    assert other.exists()


def test_leftovers_stay_with_processes(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    ours = tmp_path / "muster-prefect-x"
    ours.mkdir()
    run = lost_run(tmp_path, entry(guardian=ProcessId.of(sleeper.pid)), leftovers=(ours,))

    remains = finish(run)

    assert remains.removed == ()
    assert ours.exists()
