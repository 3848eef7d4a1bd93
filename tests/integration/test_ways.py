"""A spec reaches its program, a death its state, and a run that waits its GPUs, by few modules."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.house import ROOT


@pytest.mark.usefixtures("muster_home")
def test_the_ways_are_short() -> None:
    done = subprocess.run(
        (sys.executable, "-m", "tests.support.ways"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    to_exec, to_state, to_gpus = map(int, re.findall(r": (\d+) modules", done.stdout))
    assert to_exec <= 14, done.stdout
    assert to_state <= 11, done.stdout
    assert to_gpus <= 15, done.stdout
