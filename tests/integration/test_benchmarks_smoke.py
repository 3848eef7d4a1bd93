"""The benchmarks run and say their figures; what the figures are is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_quick_benchmarks_print_a_table_and_write_every_figure(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    page = (ROOT / "BENCHMARKS.md").read_bytes()

    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.benchmarks", "starting", "watching", "gateway"),
            *("--quick", "--json", str(written)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    figures = json.loads(written.read_text())
    assert figures["quick"] is True
    assert {"at", "python", "kernel", "cpus", "memory_gb", "load"} <= figures["machine"].keys()
    assert [found["name"] for found in figures["benchmarks"]] == ["watching", "starting", "gateway"]
    for found in figures["benchmarks"]:
        assert found["rows"][0]["way"].startswith("Muster")
        assert any(row["times_muster"] for row in found["rows"][1:])
        for row in found["rows"]:
            assert row["way"] in done.stdout
            assert row["samples"] == len(row["values"]) > 0
            assert min(row["values"]) >= 0 and row["median"] <= row["p99"] <= row["max"]
    # Only a whole run, or --record, replaces what was kept.
    assert (ROOT / "BENCHMARKS.md").read_bytes() == page
