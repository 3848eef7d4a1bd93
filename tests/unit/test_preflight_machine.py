"""Facts that a machine reports about itself: GPUs (with a fake driver), shared directory, code."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tasks.processes.machine import (
    digest_code,
    find_unreadable_files,
    gather_facts,
    read_gpus,
    remove_test_files,
)
from tests.support.fake_nvml import FakeNvml, Gpu


def test_gpus_and_their_processes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Gpu(used_mib=40321, processes=[(os.getpid(), 40318)])
    FakeNvml.install(monkeypatch, [held, Gpu(used_mib=3)])

    facts = read_gpus()

    assert (facts["driver"], facts["problem"]) == (True, "")
    assert [(gpu["used_mib"], gpu["busy_percent"]) for gpu in facts["gpus"]] == [
        (40321, 100),
        (3, 0),
    ]
    [holder] = facts["processes"]
    assert holder == {"uuid": "GPU-0", "pid": os.getpid(), "used_mib": 40318, "alive": True}


def test_dead_process_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    FakeNvml.install(monkeypatch, [Gpu(processes=[(ended.pid, None)])])

    [held] = read_gpus()["processes"]

    assert (held["alive"], held["used_mib"]) == (False, None)


def test_silent_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml.install(monkeypatch, [Gpu()]).is_silent = True

    facts = read_gpus()

    assert (facts["driver"], facts["problem"]) == (True, "NVML: Driver Not Loaded")


def test_test_file_can_be_read_by_other_nodes(tmp_path: Path) -> None:
    folder = tmp_path / ".muster-preflight-x"

    facts = gather_facts(str(tmp_path), str(folder), "node-a", str(tmp_path))

    assert facts["shared_problem"] == ""
    assert facts["shared_free_bytes"] > 0
    assert find_unreadable_files(str(folder), ["node-a"]) == {"unseen": []}
    remove_test_files(str(folder))
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_reported_and_not_created(tmp_path: Path) -> None:
    missing = tmp_path / "missing"

    facts = gather_facts(str(missing), str(missing / "x"), "node-a", str(tmp_path))

    assert facts["shared_problem"] == f"there is no directory {missing}"
    assert not missing.exists()


def test_run_process_is_a_leftover_unless_its_guardian_lives(tmp_path: Path) -> None:
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    env = {**os.environ, "MUSTER_RUN_ID": run_id, "MUSTER_ATTEMPT": "1"}
    alone = subprocess.Popen(["sleep", "600"], env=env)
    guardian = subprocess.Popen(
        [sys.executable, "-c", "import subprocess; subprocess.run(['cat'])"],
        env={**env, "MUSTER_ROLE": "guardian"},
        stdin=subprocess.PIPE,
    )
    try:
        facts = gather_facts(str(tmp_path), str(tmp_path / "x"), "node-a", str(tmp_path))
    finally:
        alone.kill()
        alone.wait()
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait(10)

    assert [c["pid"] for c in facts["carriers"] if c["run_id"] == run_id] == [alone.pid]


def test_code_has_a_digest() -> None:
    assert digest_code()["problem"] == ""
    assert len(digest_code()["digest"]) == 12
