"""Tests of `make house`, which follows a spec, a death and a waiting run through the code."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.house import ROOT


@pytest.mark.usefixtures("muster_home")
def test_spec_death_and_waiting_run_are_followed_to_their_end() -> None:
    done = subprocess.run(
        (sys.executable, "-m", "tests.support.ways"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    assert len(re.findall(r": \d+ modules", done.stdout)) == 3, done.stdout
    assert "processes/guardian.py: spawn" in done.stdout
    assert "record/retries.py" in done.stdout
    assert "processes/devices.py" in done.stdout
