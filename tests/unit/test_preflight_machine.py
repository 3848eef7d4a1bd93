"""What a machine reports about itself: GPUs (with a fake driver), shared directory, and code."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tasks.processes.machine import digest_code, find_unreadable_files, forget, gpus_seen, look
from tests.support.fake_nvml import FakeNvml, Gpu


def test_gpus_and_their_processes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Gpu(used_mib=40321, processes=[(os.getpid(), 40318)])
    FakeNvml.installed(monkeypatch, [held, Gpu(used_mib=3)])

    seen = gpus_seen()

    assert (seen["driver"], seen["problem"]) == (True, "")
    assert [(gpu["used_mib"], gpu["busy_percent"]) for gpu in seen["gpus"]] == [
        (40321, 100),
        (3, 0),
    ]
    [holder] = seen["processes"]
    assert holder == {"uuid": "GPU-0", "pid": os.getpid(), "used_mib": 40318, "alive": True}


def test_dead_process_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    FakeNvml.installed(monkeypatch, [Gpu(processes=[(ended.pid, None)])])

    [held] = gpus_seen()["processes"]

    assert (held["alive"], held["used_mib"]) == (False, None)


def test_silent_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml.installed(monkeypatch, [Gpu()]).is_silent = True

    seen = gpus_seen()

    assert (seen["driver"], seen["problem"]) == (True, "NVML: Driver Not Loaded")


def test_look_writes_a_name_that_others_can_read(tmp_path: Path) -> None:
    folder = tmp_path / ".muster-preflight-x"

    seen = look(str(tmp_path), str(folder), "node-a", str(tmp_path))

    assert seen["shared_problem"] == ""
    assert seen["shared_free_bytes"] > 0
    assert find_unreadable_files(str(folder), ["node-a"]) == {"unseen": []}
    forget(str(folder))
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_reported_and_not_created(tmp_path: Path) -> None:
    missing = tmp_path / "missing"

    seen = look(str(missing), str(missing / "x"), "node-a", str(tmp_path))

    assert seen["shared_problem"] == f"there is no directory {missing}"
    assert not missing.exists()


def test_run_process_is_a_leftover_unless_its_guardian_lives(tmp_path: Path) -> None:
    run_id = f"seen-{uuid.uuid4().hex[:8]}"
    env = {**os.environ, "MUSTER_RUN_ID": run_id, "MUSTER_ATTEMPT": "1"}
    alone = subprocess.Popen(["sleep", "600"], env=env)
    guardian = subprocess.Popen(
        [sys.executable, "-c", "import subprocess; subprocess.run(['cat'])"],
        env={**env, "MUSTER_ROLE": "guardian"},
        stdin=subprocess.PIPE,
    )
    try:
        seen = look(str(tmp_path), str(tmp_path / "x"), "node-a", str(tmp_path))
    finally:
        alone.kill()
        alone.wait()
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait(10)

    assert [c["pid"] for c in seen["carriers"] if c["run_id"] == run_id] == [alone.pid]


def test_code_has_a_digest() -> None:
    assert digest_code()["problem"] == ""
    assert len(digest_code()["digest"]) == 12
