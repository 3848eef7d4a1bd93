"""`make house` counts the modules through which Muster passes a spec, a dead process or a run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.house import ROOT


@pytest.mark.thorough
@pytest.mark.usefixtures("muster_home")
def test_house_report_lists_the_modules_of_each_path() -> None:
    result = subprocess.run(
        (sys.executable, "-m", "tests.support.module_paths"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert result.returncode == 0, result.stderr
    assert len(re.findall(r": \d+ modules", result.stdout)) == 3, result.stdout
    assert "processes/guardian.py: spawn" in result.stdout
    assert "record/retries.py" in result.stdout
    assert "processes/devices.py" in result.stdout
