"""Process trees: listing and ending descendants without reading other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tasks.processes import tree
from tests.support.supervised_components import wait_until

#: Program with three descendants: a child of its main thread, a child of another thread, and a
#: grandchild, whose parent is the second child. The program is a subreaper, so it adopts the
#: grandchild if the second child ends. The program prints the three pids.
FAMILY = """
import subprocess, sys, threading
from tasks.processes.tree import become_subreaper
become_subreaper()
pids = []
def have_child():
    child = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    pids.extend([child.pid, int(child.stdout.readline())])
    over.wait()
over = threading.Event()
thread = threading.Thread(target=have_child)
thread.start()
pids.append(subprocess.Popen(["sleep", "600"]).pid)
while len(pids) < 3:
    over.wait(0.01)
print(*pids, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, set[int]]]:
    """Start a process with descendants; yield its pid and the pids of the descendants."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        yield process.pid, set(map(int, process.stdout.readline().split()))
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def no_process_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test fail if the code lists all processes of the machine, which would be slow."""

    def refuse(proc: str = "/proc") -> list[int]:
        raise AssertionError("every process of the machine was looked at")

    monkeypatch.setattr(tree, "all_pids", refuse)


@pytest.mark.usefixtures("no_process_listing")
def test_descendants_are_listed_without_reading_other_processes(
    family: tuple[int, set[int]],
) -> None:
    pid, below = family

    assert set(tree.descendants(pid)) == below
    assert set(tree.children(pid)) < below


@pytest.mark.usefixtures("no_process_listing")
def test_descendants_are_ended_without_reading_other_processes(
    family: tuple[int, set[int]],
) -> None:
    pid, below = family

    # If a parent process ends before its child gets the signal, the process `pid` adopts the child.
    # So the next call of `signal_descendants` sends the signal to the child.
    wait_until(
        lambda: (
            not tree.signal_descendants(pid, signal.SIGTERM)
            or all(tree.is_zombie(descendant) for descendant in below)
        ),
        "all have ended",
    )

    assert tree.stat_fields(pid)


def test_descendants_are_the_same_without_the_kernels_lists_of_children(
    family: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, below = family
    monkeypatch.setattr(tree, "_CHILDREN", "/no/such/file")

    assert set(tree.descendants(pid)) == below


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("lasts_s", "pause_s"), [(0.0, 0.02), (0.4, 0.02), (10.0, 0.5), (100.0, 5.0), (9000.0, 5.0)]
)
def test_pause_between_rounds_of_sigkill_grows_up_to_five_seconds(
    lasts_s: float, pause_s: float
) -> None:
    clock = Clock()
    rounds = tree.KillRounds(clock)
    clock.now += lasts_s

    rounds.note_round()

    assert rounds.pause_s == pytest.approx(pause_s)
    assert rounds.is_due() is (lasts_s < 1.0)
    clock.now += pause_s
    assert rounds.is_due()


@pytest.mark.parametrize(
    ("lasts_s", "refusing", "are_stuck"),
    [
        (0.5, {7, 8}, False),
        (1.5, {7, 8}, True),
        (1.5, {7}, False),
        (1.5, set(), False),
        (5.5, set(), True),
    ],
)
def test_processes_that_may_not_be_signalled_are_reported_before_stuck_processes(
    lasts_s: float, refusing: set[int], are_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    rounds = tree.KillRounds(clock)
    clock.now += lasts_s
    monkeypatch.setattr(tree, "refuses_signals", refusing.__contains__)

    assert rounds.are_stuck([7, 8]) is are_stuck


@pytest.mark.parametrize("chases", [True, False])
def test_new_processes_are_searched_only_on_request(chases: bool) -> None:
    searches: list[int] = []

    tree.kill_once(
        lambda signum: [],
        lambda pid: searches.append(pid) is not None,
        lambda: False,
        set(),
        chases=chases,
    )

    assert bool(searches) is chases
