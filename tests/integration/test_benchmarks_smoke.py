"""The benchmarks run and write all their figures; the values are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_quick_benchmarks_print_a_table_and_write_every_figure(tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    page = (ROOT / "BENCHMARKS.md").read_bytes()

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.benchmarks",
            "starting",
            "watching",
            "gateway",
            "--quick",
            "--json",
            str(figures_file),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    figures = json.loads(figures_file.read_text())
    assert figures["quick"] is True
    assert {"at", "python", "kernel", "cpus", "memory_gb", "load"} <= figures["machine"].keys()
    assert [benchmark["name"] for benchmark in figures["benchmarks"]] == [
        "watching",
        "starting",
        "gateway",
    ]
    for benchmark in figures["benchmarks"]:
        assert benchmark["rows"][0]["way"].startswith("Muster")
        assert any(row["times_muster"] for row in benchmark["rows"][1:])
        for row in benchmark["rows"]:
            assert row["way"] in done.stdout
            assert row["samples"] == len(row["values"]) > 0
            assert min(row["values"]) >= 0 and row["median"] <= row["p99"] <= row["max"]
    # This short run must not change BENCHMARKS.md. Only a full run of the benchmarks, or the option
    # --record, may change this file.
    assert (ROOT / "BENCHMARKS.md").read_bytes() == page
