"""The cleanup after a killed run ends all processes of the run, and no other process."""

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
from tasks.processes.registry import LeftoverCleanup, LostRun, Owner, ProcessEntry, finish
from tests.support.supervised_components import RUN_ID, is_alive

#: Identity of a process that does not exist.
GONE = ProcessId(pid=1 << 22, start_ticks=1, boot_id=boot_id())

#: A program that marks itself and starts a daemon. The mark is a number in a resource limit. Child
#: processes inherit the number, so Muster can find all descendants of a marked process.
#:
#: The daemon clears its environment.
MARKED = """
import os, sys
from tasks.processes import tree
tree.mark_own(int(sys.argv[1]))
os.execvp("sh", ["sh", "-c", "setsid env -i /bin/sleep 600 & echo $!; exec sleep 600"])
"""

#: A mark, and the pids of two processes with this mark. A mark is a number that Muster sets as a
#: resource limit of a process. Child processes inherit the limit, so Muster can find all
#: descendants of a marked process.
Marked = tuple[int, tuple[int, int]]


@pytest.fixture
def marked() -> Iterator[Marked]:
    """Yield a mark, and the pids of two processes with this mark: a process and its daemon.

    A mark is a number that Muster sets as a resource limit of a process. Descendants inherit the
    limit, so Muster can find all descendants.
    """
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
                if is_alive(pid) and tree.read_mark(pid) == mark:
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that does not belong to the run."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def build_lost_run(directory: Path, *entries: ProcessEntry, **owner: object) -> LostRun:
    """Return a lost run with these entries in the registry. The run's flow process has died.

    `owner` replaces fields of the `Owner` object, which describes the flow process.
    """
    fields = {"run_id": RUN_ID, "host": host_name(), "process": GONE}
    run = LostRun(directory, Owner.model_validate({**fields, **owner}))
    run.entries = list(entries)
    return run


def build_entry(**changes: object) -> ProcessEntry:
    """Return the registry entry of a component; `changes` replaces fields of the entry."""
    fields = {
        "run_id": RUN_ID,
        "attempt": 1,
        "component": "trainer",
        "mark": 0,
        "guardian": GONE,
        "process": GONE,
        "grace_s": 1.0,
    }
    return ProcessEntry.model_validate({**fields, **changes})


def test_all_processes_with_the_mark_are_ended(tmp_path: Path, marked: Marked) -> None:
    mark, pids = marked

    cleanup = finish(build_lost_run(tmp_path, build_entry(mark=mark)))

    assert cleanup == LeftoverCleanup(killed=tuple(sorted(pids)), left={}, waiting={}, removed=())
    assert cleanup.is_clean


def test_process_with_a_reused_pid_is_not_ended(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """The registry entry has the pid of a new process, and the start time of an older process."""
    registered_process = ProcessId.of(sleeper.pid).model_copy(update={"start_ticks": 1})

    cleanup = finish(
        build_lost_run(
            tmp_path, build_entry(guardian=registered_process, process=registered_process)
        )
    )

    assert cleanup.killed == ()
    assert sleeper.poll() is None


def test_entries_from_before_a_reboot_end_no_process(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], marked: Marked
) -> None:
    """The entries have the pid, start time and mark of running processes, but another boot id.

    A mark is a number that Muster sets as a resource limit of a process, to find the descendants of
    the process.
    """
    running_process = ProcessId.of(sleeper.pid)
    registered_process = running_process.model_copy(update={"boot_id": "another boot"})

    cleanup = finish(
        build_lost_run(
            tmp_path,
            build_entry(mark=marked[0], guardian=registered_process, process=registered_process),
            process=registered_process,
        )
    )

    assert cleanup == LeftoverCleanup(killed=(), left={}, waiting={}, removed=())
    assert sleeper.poll() is None
    assert all(is_alive(pid) for pid in marked[1])


def test_living_guardian_keeps_its_time_to_end_the_component(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], marked: Marked
) -> None:
    guardian = ProcessId.of(sleeper.pid)
    run = build_lost_run(tmp_path, build_entry(mark=marked[0], guardian=guardian))

    cleanup = finish(run)

    assert cleanup.waiting == {"trainer": sleeper.pid}
    assert not cleanup.is_clean
    assert all(is_alive(pid) for pid in marked[1])


def test_overdue_guardian_is_ended_with_its_component(
    tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP suspends the guardian, so the guardian never ends by itself.

    A guardian is the process that owns a component's process tree.
    """
    os.kill(marked[1][0], signal.SIGSTOP)
    guardian = ProcessId.of(marked[1][0])
    run = build_lost_run(tmp_path, build_entry(mark=marked[0], guardian=guardian))
    monkeypatch.setattr(lost_runs, "_GUARDIAN_MARGIN_S", -2.0)

    cleanup = finish(run)

    assert cleanup.is_clean
    assert set(cleanup.killed) == {*marked[1]}


def test_only_leftover_directories_of_muster_are_removed(tmp_path: Path) -> None:
    ours = tmp_path / "muster-prefect-x"
    other = tmp_path / "data"
    for directory in (ours, other):
        (directory / "below").mkdir(parents=True)

    cleanup = finish(build_lost_run(tmp_path, leftovers=(ours, other, tmp_path / "muster-gone")))

    assert cleanup.removed == (ours,)
    assert other.exists()


def test_leftover_directories_stay_while_a_process_lives(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    muster_directory = tmp_path / "muster-prefect-x"
    muster_directory.mkdir()
    run = build_lost_run(
        tmp_path, build_entry(guardian=ProcessId.of(sleeper.pid)), leftovers=(muster_directory,)
    )

    cleanup = finish(run)

    assert cleanup.removed == ()
    assert muster_directory.exists()
