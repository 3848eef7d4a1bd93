"""Tests of failures of the Prefect server and the Prefect worker.

After each failure, the run either continues or has no process left, and the Prefect server shows
the correct state within two minutes. The two minutes limit the waiting; no test asserts a duration.
The server, the worker and the runs are real. The upkeep process reconciles each minute, as on each
host.
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

from tests.support.host_environment import (
    HostEnvironment,
    Run,
    Server,
    make_sleeping_spec,
    wait_for,
)

pytestmark = pytest.mark.timeout(600)

#: Program that keeps the standard output of a process open until its own stdin is closed.
HOLDER = """
import sys
output = open(f"/proc/{sys.argv[1]}/fd/1", "ab")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a Prefect server with the work pool and the deployments."""
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        server.start()
        HostEnvironment(home=tmp_path_factory.mktemp("home"), api=server.api).set_up()
        yield server
    finally:
        server.kill()


@pytest.fixture
def host_env(server: Server, tmp_path: Path) -> Iterator[HostEnvironment]:
    """Return a host whose upkeep process reconciles lost runs each minute."""
    host_env = HostEnvironment(home=tmp_path / "home", api=server.api)
    try:
        host_env.start_upkeep()
        yield host_env
    finally:
        host_env.clear()


@pytest.fixture
def worker(host_env: HostEnvironment) -> subprocess.Popen[bytes]:
    return host_env.start_worker()


@pytest.fixture
def run(host_env: HostEnvironment, worker: subprocess.Popen[bytes]) -> Run:
    """Return a run that the worker has started, with all components ready."""
    return host_env.submit(make_sleeping_spec("api", "trainer")).wait_until_running()


def cancel(run: Run) -> None:
    run.host_env.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLING"})


def assert_cancelled(run: Run) -> None:
    run.wait_for_state("CANCELLED")
    run.wait_until_gone()
    wait_for(lambda: run.record()["state"] == "cancelled", "run.json says cancelled")


def assert_crashed(run: Run) -> None:
    """Wait until the run is CRASHED on the Prefect server.

    The state is set by the run's worker or by `muster reconcile`.
    """
    run.wait_for_state("CRASHED")
    run.wait_until_gone()
    wait_for(lambda: run.record()["state"] == "failed", "run.json says failed")
    assert run.record()["attempts"][-1]["failure"]["rule"] == "flow-lost"


def assert_continues(run: Run, pids: list[int]) -> None:
    assert run.state()[0] == "RUNNING"
    assert run.record()["state"] == "running"
    assert set(pids) <= set(run.pids())


def test_run_of_a_dead_worker_can_be_cancelled(run: Run, worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()

    cancel(run)

    assert_cancelled(run)


def test_dead_run_of_a_dead_worker_becomes_cancelled(
    run: Run, worker: subprocess.Popen[bytes]
) -> None:
    worker.kill()
    worker.wait()
    run.kill_flow()
    cancel(run)

    assert_cancelled(run)


def test_run_survives_its_worker_and_a_new_worker_does_not_touch_it(
    host_env: HostEnvironment, run: Run, worker: subprocess.Popen[bytes]
) -> None:
    pids = run.pids()

    worker.kill()
    worker.wait()
    host_env.start_worker()
    other = host_env.submit(make_sleeping_spec()).wait_until_running()
    host_env.reconcile()

    assert_continues(run, pids)
    # Both runs can be cancelled. The new worker cancels the new run. The old run has no worker, so
    # the flow process of the old run must notice the cancellation.
    for each_run in (run, other):
        cancel(each_run)
        assert_cancelled(each_run)


def test_pending_run_of_a_killed_worker_is_started_by_the_next_worker(
    host_env: HostEnvironment, worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    mark = tmp_path / "first"
    # The first process of the run only sleeps, so the run stays PENDING. The next worker starts a
    # second process, which runs the flow.
    script = f"[ -e {mark} ] && exec {sys.executable} -m prefect.engine; : >{mark}; exec sleep 600"
    run = host_env.submit(make_sleeping_spec(), command=f"sh -c '{script}'")
    (pid,) = wait_for(lambda: mark.exists() and run.processes(), "its first process")
    worker.kill()
    worker.wait()
    os.kill(pid, signal.SIGKILL)
    assert run.state()[0] == "PENDING"

    host_env.start_worker()

    run.wait_until_running()


def test_run_continues_while_the_server_is_down(
    host_env: HostEnvironment, run: Run, server: Server
) -> None:
    pids = run.pids()

    server.kill()
    restart_at = time.monotonic() + 60
    try:
        while time.monotonic() < restart_at:
            # `muster reconcile` cannot reach the Prefect server, so the command must not change the
            # run.
            assert host_env.reconcile_without_flow() == "nothing to do"
    finally:
        server.start()

    assert_continues(run, pids)
    # Kill the run after the restart of the server. The upkeep process, which runs
    # `muster reconcile` each minute, must find the killed run.
    run.kill_flow()
    assert_crashed(run)


def test_run_that_dies_while_the_server_is_down_is_closed_afterwards(
    host_env: HostEnvironment, run: Run, server: Server
) -> None:
    server.kill()
    try:
        run.kill_flow()
        host_env.reconcile_without_flow()
        record = run.record()["state"]
    finally:
        server.start()

    assert record == "failed"
    assert_crashed(run)


@pytest.mark.parametrize("is_held", [False, True], ids=["alone", "with its stdio held"])
def test_run_with_a_killed_flow_process_is_crashed(is_held: bool, run: Run) -> None:
    """The worker must notice the death even if another process keeps the output of the run open.

    Therefore, the worker must wait for the end of the flow process, and not for the end of the flow
    process's output.
    """
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


def test_sigterm_to_the_worker_ends_its_run(run: Run, worker: subprocess.Popen[bytes]) -> None:
    """A worker that receives SIGTERM kills its runs, unless `muster up` started the worker."""
    worker.terminate()
    worker.wait(60)

    assert run.wait_for_state("CRASHED", "CANCELLED", "FAILED")
    run.wait_until_gone()
    wait_for(lambda: run.record()["state"] in {"failed", "cancelled"}, "run.json has an end")
    kinds = {"failed": {"CRASHED", "FAILED"}, "cancelled": {"CANCELLED"}}
    assert run.state()[0] in kinds[run.record()["state"]]
