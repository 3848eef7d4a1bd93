"""Muster as process 1 of a PID namespace, like the only program of a container."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="only root can create a PID namespace with unshare",
)


@needs_namespaces
@pytest.mark.parametrize("is_first", [True, False])
def test_missing_init_is_reported_at_the_start(is_first: bool, tmp_path: Path) -> None:
    muster = [sys.executable, "-m", "tasks.command", "check", "no-such-spec.yaml"]
    as_first = ["unshare", "--pid", "--fork", "--mount-proc"] if is_first else []

    result = subprocess.run(
        [*as_first, *muster],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "MUSTER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 2
    assert ("docker run --init" in result.stderr) == is_first
