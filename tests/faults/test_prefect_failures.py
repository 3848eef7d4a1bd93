"""Prefect's own parts fail: the run's processes are gone or rightly go on, and the server's word
about it is true within two minutes.

Two minutes are a deadline on waiting, and nothing here is timed. `reconcile` runs each minute, as
on every host; server, worker and runs are real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ground import Ground, Run, Server, sleepers, until

pytestmark = pytest.mark.timeout(600)

#: Opens the standard output of a process, and holds it open.
HOLDER = """
import sys
held = open(f"/proc/{sys.argv[1]}/fd/1", "ab")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that knows the pool and the deployments."""
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        server.start()
        Ground(home=tmp_path_factory.mktemp("home"), api=server.api).set_up()
        yield server
    finally:
        server.kill()


@pytest.fixture
def ground(server: Server, tmp_path: Path) -> Iterator[Ground]:
    """A host on which lost runs are looked for each minute."""
    ground = Ground(home=tmp_path / "home", api=server.api)
    try:
        ground.start_upkeep()
        yield ground
    finally:
        ground.clear()


@pytest.fixture
def worker(ground: Ground) -> subprocess.Popen[bytes]:
    return ground.start_worker()


@pytest.fixture
def run(ground: Ground, worker: subprocess.Popen[bytes]) -> Run:
    """A run of the worker, all of whose components are ready."""
    return ground.submit(sleepers("api", "trainer")).until_running()


def cancel(run: Run) -> None:
    run.ground.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLING"})


def assert_cancelled(run: Run) -> None:
    run.until_state("CANCELLED")
    run.until_gone()
    until(lambda: run.record()["state"] == "cancelled", "run.json says cancelled")


def assert_crashed(run: Run) -> None:
    """The server may have it from the worker, or from a reconcile."""
    run.until_state("CRASHED")
    run.until_gone()
    until(lambda: run.record()["state"] == "failed", "run.json says failed")
    assert run.record()["attempts"][-1]["failure"]["rule"] == "flow-lost"


def assert_goes_on(run: Run, pids: list[int]) -> None:
    assert run.state()[0] == "RUNNING"
    assert run.record()["state"] == "running"
    assert set(pids) <= set(run.pids())


def test_a_cancel_is_done_with_a_dead_worker(run: Run, worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()

    cancel(run)

    assert_cancelled(run)


def test_a_cancel_of_a_run_dead_with_its_worker(run: Run, worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    run.kill_flow()
    cancel(run)

    assert_cancelled(run)


def test_a_run_outlives_its_worker_and_the_next_one_lets_it_be(
    ground: Ground, run: Run, worker: subprocess.Popen[bytes]
) -> None:
    pids = run.pids()

    worker.kill()
    worker.wait()
    ground.start_worker()
    other = ground.submit(sleepers()).until_running()
    ground.reconcile()

    assert_goes_on(run, pids)
    # The new one is cancelled by its worker, the old one by itself.
    for one in (run, other):
        cancel(one)
        assert_cancelled(one)


def test_a_run_handed_to_a_worker_that_was_killed_is_begun_by_the_next(
    ground: Ground, worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    first = tmp_path / "first"
    begin = f"[ -e {first} ] && exec {sys.executable} -m prefect.engine; : >{first}; exec sleep 600"
    run = ground.submit(sleepers(), command=f"sh -c '{begin}'")
    (process,) = until(lambda: first.exists() and run.processes(), "its first process")
    worker.kill()
    worker.wait()
    os.kill(process, signal.SIGKILL)
    assert run.state()[0] == "PENDING"

    ground.start_worker()

    run.until_running()


def test_a_run_goes_on_while_the_server_is_away(ground: Ground, run: Run, server: Server) -> None:
    pids = run.pids()

    server.kill()
    until_back = time.monotonic() + 60
    try:
        while time.monotonic() < until_back:
            # They come and go, and have nobody to ask.
            assert ground.reconcile_without_flow() == "nothing to do"
    finally:
        server.start()

    assert_goes_on(run, pids)
    # What reconciles each minute has been without it, too, and is back.
    run.kill_flow()
    assert_crashed(run)


def test_a_run_that_dies_while_the_server_is_away_is_closed_when_it_is_back(
    ground: Ground, run: Run, server: Server
) -> None:
    server.kill()
    try:
        run.kill_flow()
        ground.reconcile_without_flow()
        record = run.record()["state"]
    finally:
        server.start()

    assert record == "failed"
    assert_crashed(run)


@pytest.mark.parametrize("is_held", [False, True], ids=["alone", "with its stdio held"])
def test_a_flow_process_that_is_killed(is_held: bool, run: Run) -> None:
    """Held by anybody else, the flow process's output tells the worker nothing of its end."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.flow_pid() if is_held else os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        run.kill_flow()

        assert_crashed(run)
    finally:
        holder.stdin.close()
        holder.wait()


def test_sigterm_to_the_worker_of_a_running_run(run: Run, worker: subprocess.Popen[bytes]) -> None:
    """A worker that is told to end ends its runs with it: by SIGKILL, unless a stack holds it."""
    worker.terminate()
    worker.wait(60)

    assert run.until_state("CRASHED", "CANCELLED", "FAILED")
    run.until_gone()
    until(lambda: run.record()["state"] in {"failed", "cancelled"}, "run.json has an end")
    kinds = {"failed": {"CRASHED", "FAILED"}, "cancelled": {"CANCELLED"}}
    assert run.state()[0] in kinds[run.record()["state"]]
