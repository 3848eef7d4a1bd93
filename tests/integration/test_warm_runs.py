"""Runs that are forked from the worker's zygote: what the kernel says of them, and what is left of
them when one of the three is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gang_pool import GangPool, gang_pool
from tests.support.ground import Run, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[GangPool]:
    with gang_pool(tmp_path) as pool:
        yield pool


def began_as(pid: int) -> bytes:
    """What is alike of processes that are forked from one program, and of no others: the kernel
    lays each program out at random."""
    return Path(f"/proc/{pid}/auxv").read_bytes()


def zygote_of(worker: int) -> int:
    """Its pid, once it is ready."""
    children = Path(f"/proc/{worker}/task/{worker}/children")

    def found() -> int:
        for pid in map(int, children.read_text().split()):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"muster: ready"):
                return pid
        return 0

    return until(found, "a zygote that is ready")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started(pool: GangPool, lasts_s: float = 60.0) -> tuple[Run, int]:
    run = pool.submit(pool.spec(lasts_s=lasts_s)).until_running()
    return run, run.flow_pid()


def crashes(run: Run) -> int:
    states = run.ground.get(f"/flow_run_states/?flow_run_id={run.flow_run_id}")
    return sum(state["type"] == "CRASHED" for state in states)


@pytest.mark.thorough
def test_run_is_forked_and_looks_like_one_that_was_started(pool: GangPool) -> None:
    worker = pool.start_worker()
    zygote = zygote_of(worker.pid)
    run, pid = started(pool)
    at = Path(f"/proc/{pid}")

    assert began_as(pid) == began_as(zygote)
    assert len(os.listdir(f"/proc/{zygote}/task")) == 1
    # As `deployments.stack.runs`, `reconcile`, the queue and `ps` find it.
    assert parent_of(pid) == worker.pid
    assert run.processes() == [pid]
    assert at.joinpath("cmdline").read_text().rstrip("\0").split("\0")[1:] == [
        *("-P", "-m", "flows", run.flow_run_id)
    ]
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert at.joinpath("fd/0").readlink() == Path("/dev/null")
    assert at.joinpath("cgroup").read_text() == Path(f"/proc/{worker.pid}/cgroup").read_text()

    # Nothing of a run hangs on it; the next run has another one.
    os.kill(zygote, signal.SIGKILL)
    another = until(
        lambda: zygote_of(worker.pid) != zygote and zygote_of(worker.pid), "another zygote"
    )
    os.kill(pid, signal.SIGKILL)
    run.until_state("CRASHED")
    next_run, next_pid = started(pool, lasts_s=5.0)

    assert began_as(next_pid) == began_as(another)
    assert crashes(run) == 1
    assert next_run.until_state("COMPLETED")
