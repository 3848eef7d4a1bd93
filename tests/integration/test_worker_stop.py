"""A systemd unit stops a worker: its runs end first, each with its grace period."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gang_pool import gang_pool
from tests.support.host_environment import ROOT, wait_for
from tests.support.saving_component import has_saved, saving_spec

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]


def test_runs_of_a_stopped_worker_end_as_cancelled(tmp_path: Path) -> None:
    with gang_pool(tmp_path) as pool:
        worker = pool.start_worker()
        run = pool.submit(pool.spec(lasts_s=600)).wait_until_running()

        stop_result = subprocess.run(
            (sys.executable, "-m", "deployments.stack.runs", str(worker.pid), "--within-s", "60"),
            cwd=ROOT,
            env=pool.host_env.env,
            timeout=120,
        )
        # Act as systemd, which sends SIGTERM and SIGCONT after the command of ExecStop has ended.
        worker.send_signal(signal.SIGTERM)
        worker.send_signal(signal.SIGCONT)
        worker.wait(60)
        state = run.state()[0]
        record = run.record()
        run.wait_until_gone()
    assert stop_result.returncode == 0
    assert record["state"] == "cancelled"
    assert record["message"].startswith("cancelled, because the worker on ")
    assert record["attempts"][0]["components"]["trainer"]["exit_code"] == 0
    assert state == "CANCELLED"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_worker_that_gets_a_signal_lets_its_runs_save(
    tmp_path: Path, signum: signal.Signals
) -> None:
    with gang_pool(tmp_path) as pool:
        worker = pool.start_worker()
        saved_file = tmp_path / "saved.txt"
        run = pool.submit(saving_spec(saved_file, save_s=3)).wait_until_running()

        worker.send_signal(signum)
        worker.wait(60)
        state = run.state()[0]
        record = run.record()
        remaining_pids = run.pids()
    assert has_saved(saved_file)
    assert (record["state"], state) == ("cancelled", "CANCELLED")
    assert record["message"].startswith("cancelled, because the worker on ")
    assert remaining_pids == []


def test_run_survives_the_death_of_its_worker(tmp_path: Path) -> None:
    with gang_pool(tmp_path) as pool:
        worker = pool.start_worker()
        run = pool.submit(pool.spec(lasts_s=20)).wait_until_running()

        worker.kill()
        pool.start_worker()

        wait_for(lambda: run.state()[0] == "COMPLETED", "the run completes", 300)
        attempts = run.record()["attempts"]
    assert len(attempts) == 1
