"""The figures that were kept: one JSON file a benchmark, of which the pages are made.

Of a row with many samples only the quantiles are kept; `--json` writes them all.
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
#: Written from the figures, so that they make no commit another one.
WRITTEN = ("tests/benchmarks/results", "BENCHMARKS.md", "docs/limits.md")
_SAMPLES_KEPT = 100
_DIGITS = 6
#: What the figures depend on, as far as it is installed.
_PACKAGES = (
    *("prefect", "ray", "pydantic", "aiohttp", "psutil"),
    *("supervisor", "circus", "honcho", "sglang-router"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row, as it was kept."""

    way: str
    unit: str
    median: float
    p99: float
    max: float
    #: 0: nothing ran.
    samples: int
    #: None where a ratio says nothing.
    times_muster: float | None
    how: How
    note: str
    group: str
    is_detail: bool
    at: int | None
    #: Empty where there were too many.
    values: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one benchmark found, where and when."""

    name: str
    #: Empty where it did not run.
    question: str = ""
    figures: Sequence[Figure] = ()
    missing: Sequence[Missing] = ()
    #: Why it did not run.
    not_run: str = ""
    #: Few samples were taken: it works, and the figures say little.
    quick: bool
    took_s: float
    machine: Mapping[str, Any]
    #: `versions[package]`, and `Muster` with its commit.
    versions: Mapping[str, str]


def record_of(
    name: str,
    found: Result | str,
    *,
    machine: Machine,
    versions: Mapping[str, str],
    quick: bool,
    took_s: float,
) -> Record:
    """
    Args:
        found: what it found, or why it did not run.
    """
    where: dict[str, Any] = {
        "machine": machine_as_json(machine),
        "versions": versions,
        "quick": quick,
        "took_s": took_s,
    }
    if isinstance(found, str):
        return Record(name=name, not_run=found, **where)
    figures = [_figure(row) for row in rows_as_json(found)]
    return Record(
        name=name,
        question=found.question,
        figures=figures,
        missing=found.missing,
        **where,
    )


def _figure(row: Mapping[str, Any]) -> Figure:
    values = row["values"] if len(row["values"]) <= _SAMPLES_KEPT else []
    rounded = {name: _short(row[name]) for name in ("median", "p99", "max", "times_muster")}
    return Figure(**{**row, **rounded, "values": [_short(value) for value in values]})


def _short(figure: float | None) -> float | None:
    return None if figure is None else float(f"{figure:.{_DIGITS}g}")


def write(record: Record, folder: Path = FOLDER) -> None:
    """A line a figure, so that two versions can be compared."""
    content = asdict(record)
    figures = ",\n".join(f"    {json.dumps(one)}" for one in content.pop("figures"))
    content["took_s"] = round(record.took_s)
    head = json.dumps(content, indent=2).removesuffix("\n}")
    folder.mkdir(parents=True, exist_ok=True)
    text = f'{head},\n  "figures": [\n{figures}\n  ]\n}}\n'
    (folder / f"{record.name}.json").write_text(text, encoding="utf-8")


def read_all(folder: Path = FOLDER) -> dict[str, Record]:
    """By name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        content["figures"] = [Figure(**one) for one in content["figures"]]
        content["missing"] = [Missing(**one) for one in content["missing"]]
        found[path.stem] = Record(**content)
    return found


def versions_here() -> dict[str, str]:
    """Of Muster with its commit, and of the packages that are installed."""
    found = {"Muster": f"{version('muster')} ({_commit()})"}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """With a mark where files differ from it."""
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
        others = [f":(exclude){path}" for path in WRITTEN]
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return f"{commit}, changed" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()
