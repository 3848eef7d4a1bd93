"""Recorded results: one JSON file per benchmark, from which the pages are written.

If there are many samples, only quantiles are recorded. The option `--json` writes all samples.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.benchmarks.report import How, Machine, Missing, Result, machine_as_json, rows_as_json

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).with_name("results")
#: Files that the benchmarks write. If any other file differs from the git commit, the recorded
#: version of Muster ends with ", changed".
WRITTEN = ("tests/benchmarks/results", "BENCHMARKS.md", "docs/limits.md")
#: Largest number of samples that are recorded for a row of a result. If a row has more samples,
#: none of its samples is recorded.
_SAMPLES_KEPT = 100
#: Number of significant digits of a recorded value.
_DIGITS = 6
#: Packages whose versions are recorded if they are installed.
_PACKAGES = (
    *("prefect", "ray", "pydantic", "aiohttp", "psutil"),
    *("supervisor", "circus", "honcho", "sglang-router"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One recorded row in the results of a benchmark."""

    #: Name of the measured program or method, used as the title of the row.
    way: str
    #: Unit of the values.
    unit: str
    median: float
    #: 99th percentile of the measured values.
    p99: float
    #: Largest measured value.
    max: float
    #: Number of samples. 0 if the values were computed and nothing was measured.
    samples: int
    #: Median of this program divided by the median of Muster. None if the two are not comparable.
    times_muster: float | None
    #: Origin of the values: measured, modelled or computed.
    how: How
    #: Explanation that a reader needs to understand the values.
    note: str
    #: Name of the group of rows that are compared with each other.
    group: str
    #: True if this row measures only a part of another row, or if no other row is comparable. The
    #: results then show no ratio to Muster for this row.
    is_detail: bool
    #: Load during the measurement, for example the number of components. None if the benchmark did
    #: not vary the load.
    at: int | None
    #: All measured values. Empty if there were too many values to record.
    values: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Recorded result of one benchmark."""

    #: Name of the benchmark.
    name: str
    #: Description of the measurement, or an empty string if the benchmark did not run.
    question: str = ""
    #: Measured values, one object for each row of the result.
    figures: Sequence[Figure] = ()
    #: Other programs that could not be measured for the comparison, each with the reason.
    missing: Sequence[Missing] = ()
    #: Reason why the benchmark did not run, or an empty string.
    not_run: str = ""
    #: True if only few samples were taken, so that the values are imprecise.
    quick: bool
    #: Duration of the benchmark, in seconds.
    took_s: float
    #: Machine and time of the measurement: mapping from the fields of `report.Machine` to their
    #: values.
    machine: Mapping[str, Any]
    #: Mapping from the name of a package to its version. The version of `Muster` includes the
    #: commit.
    versions: Mapping[str, str]


def record_of(
    name: str,
    result: Result | str,
    *,
    machine: Machine,
    versions: Mapping[str, str],
    quick: bool,
    took_s: float,
) -> Record:
    """Return the record of a benchmark.

    Args:
        name: Name of the benchmark.
        result: Result of the benchmark, or the reason why it did not run.
        machine: Machine of the measurement.
        versions: Versions of the packages.
        quick: True if only few samples were taken.
        took_s: Duration of the benchmark, in seconds.
    """
    conditions: dict[str, Any] = {
        "machine": machine_as_json(machine),
        "versions": versions,
        "quick": quick,
        "took_s": took_s,
    }
    if isinstance(result, str):
        return Record(name=name, not_run=result, **conditions)
    figures = [_figure(row) for row in rows_as_json(result)]
    return Record(
        name=name,
        question=result.question,
        figures=figures,
        missing=result.missing,
        **conditions,
    )


def _figure(row: Mapping[str, Any]) -> Figure:
    """Convert a row of a result into its recorded form.

    The numbers are rounded. If the row has more than 100 samples, the samples are left out.

    Args:
        row: The row, as `rows_as_json` returns it.
    """
    values = row["values"] if len(row["values"]) <= _SAMPLES_KEPT else []
    rounded = {name: _rounded(row[name]) for name in ("median", "p99", "max", "times_muster")}
    return Figure(**{**row, **rounded, "values": [_rounded(value) for value in values]})


def _rounded(figure: float | None) -> float | None:
    """Round a number to six significant digits."""
    return None if figure is None else float(f"{figure:.{_DIGITS}g}")


def write(record: Record, folder: Path = FOLDER) -> None:
    """Write the result of a benchmark to its JSON file.

    Each row of the result has its own line, so that `git diff` is readable.
    """
    content = asdict(record)
    figures = ",\n".join(f"    {json.dumps(figure)}" for figure in content.pop("figures"))
    content["took_s"] = round(record.took_s)
    head = json.dumps(content, indent=2).removesuffix("\n}")
    folder.mkdir(parents=True, exist_ok=True)
    text = f'{head},\n  "figures": [\n{figures}\n  ]\n}}\n'
    (folder / f"{record.name}.json").write_text(text, encoding="utf-8")


def read_all(folder: Path = FOLDER) -> dict[str, Record]:
    """Return a mapping from the name of each recorded benchmark to its record."""
    records = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        content["figures"] = [Figure(**fields) for fields in content["figures"]]
        content["missing"] = [Missing(**fields) for fields in content["missing"]]
        records[path.stem] = Record(**content)
    return records


def versions_here() -> dict[str, str]:
    """Return a mapping from package to version. The version of Muster includes the git commit."""
    versions = {"Muster": f"{version('muster')} ({_commit()})"}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    """Return the current git commit, with ", changed" appended if files differ from the commit."""
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
        exclusions = [f":(exclude){path}" for path in WRITTEN]
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *exclusions)
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return f"{commit}, changed" if changed else commit


def _git(*arguments: str) -> str:
    """Run a git command, and return its output."""
    completed = subprocess.run(
        ("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return completed.stdout.strip()
