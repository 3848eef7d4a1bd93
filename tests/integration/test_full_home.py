"""The file system of MUSTER_HOME is full. The tests need root, because they mount a file system."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injections import mounted, why_no_mounts
from tests.support.host_environment import ROOT, HostEnvironment, Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or bool(why_no_mounts()), reason="only root may mount a file system"
    ),
]

#: Code of a training that writes 4 MB to its log, and a line of metrics for each step.
TRAINING = """
import json, os, time
open(os.environ["STARTED"], "w").close()
for step in range(1, 21):
    with open(os.environ["METRICS"], "a") as file:
        file.write(json.dumps({"step": step, "loss": 1 / step}) + chr(10))
    os.write(1, b"x" * 199999 + b"\\n")
    time.sleep(0.2)
"""


@pytest.fixture
def host_env(tmp_path: Path) -> Iterator[HostEnvironment]:
    """Yield a host whose MUSTER_HOME is on a file system of only 3 MB.

    The files of its Prefect server are on another file system.
    """
    server = Server(tmp_path / "server")
    with mounted(tmp_path / "home", "-t", "tmpfs", "-o", "size=3m,mode=700", "none"):
        host_env = HostEnvironment(home=tmp_path / "home", api=server.api)
        try:
            server.start()
            yield host_env
        finally:
            host_env.clear()
            server.kill()


def train(host_env: HostEnvironment, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the program TRAINING with `muster train`, and return the exit code and output."""
    metrics = "${attempt.dir}/metrics.jsonl"
    spec: dict[str, Any] = {
        "name": "fill",
        "workload": "sft",
        "cwd": str(directory),
        "env": {"METRICS": metrics, "STARTED": str(directory / "started")},
        "components": {"trainer": {"command": [sys.executable, "-c", TRAINING]}},
        "progress": {"jsonl": metrics, "step": "step", "total": 20},
        "success": {"step": 20},
    }
    path = directory / "run.yaml"
    path.write_text(json.dumps(spec))
    command = (sys.executable, "-m", "tasks.command", "train", str(path))
    # Prefect's own files must not be on the full file system.
    env = {**host_env.env, "PREFECT_HOME": str(directory / "prefect")}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


def test_home_that_fills_up_during_a_run_is_named(
    host_env: HostEnvironment, tmp_path: Path
) -> None:
    done = train(host_env, tmp_path)

    [flow_run] = host_env.flow_runs()
    message = flow_run["state"]["message"]
    assert done.returncode == 1, done.stdout + done.stderr
    assert flow_run["state"]["type"] == "FAILED"
    assert message.startswith("STORAGE")
    assert str(host_env.home) in message
    assert re.search(r"\b\d+(\.\d+)? (B|KiB|MiB|kB|MB|bytes)\b", message), message
    assert "took not ended" not in done.stdout
    assert "dmesg" not in done.stdout + message


def test_run_does_not_start_on_a_full_home(host_env: HostEnvironment, tmp_path: Path) -> None:
    path = host_env.home / "fill"
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="space left"):
        while True:
            file.write(b"x" * 4096)

    done = train(host_env, tmp_path)

    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert not (tmp_path / "started").exists()
    assert "STORAGE" in output
    assert str(host_env.home) in output
    assert "Traceback" not in output
