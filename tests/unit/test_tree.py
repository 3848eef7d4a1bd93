"""Process trees: what is below a process, and that no other process is looked at for that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tasks.processes import tree
from tests.support.stage import wait_until

#: A child of its main thread, one of another thread, and one below that, which come to it when
#: their parent ends; it prints their pids.
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
    """A process, and all that is below it."""
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
def unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has too many processes to list them all."""

    def refuse(proc: str = "/proc") -> list[int]:
        raise AssertionError("every process of the machine was looked at")

    monkeypatch.setattr(tree, "all_pids", refuse)


@pytest.mark.usefixtures("unlisted")
def test_what_is_below_a_process_is_found_by_looking_at_no_other(
    family: tuple[int, set[int]],
) -> None:
    pid, below = family

    assert set(tree.descendants(pid)) == below
    assert set(tree.children(pid)) < below


@pytest.mark.usefixtures("unlisted")
def test_what_is_below_a_process_is_ended_by_looking_at_no_other(
    family: tuple[int, set[int]],
) -> None:
    pid, below = family

    # Those above first: what was below them comes to it then, for the next round.
    wait_until(
        lambda: (
            not tree.signal_descendants(pid, signal.SIGTERM)
            or all(tree.is_zombie(one) for one in below)
        ),
        "all have ended",
    )

    assert tree.stat_fields(pid)


def test_without_the_kernels_lists_of_children_the_same_is_found(
    family: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, below = family
    monkeypatch.setattr(tree, "_CHILDREN", "/no/such/file")

    assert set(tree.descendants(pid)) == below
