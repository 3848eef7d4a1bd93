"""Muster against other ways of doing the same work: `python -m tests.benchmarks [NAME...]`.

Every figure is taken in the same run as those it is compared with, in turn with them. The other
ways are small models of what other projects do; see `models.py`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.report import Machine, Result, say, table, write_json
from tests.benchmarks.stage import settle_environment

NAMES = (
    "crash",
    "readiness",
    "overhead",
    "watching",
    "starting",
    "nodes",
    "jobs",
    "queue",
    "capacity",
    "release",
    "gateway",
    "fleet",
)
#: They run real flows; one server is enough for all.
_NEED_SERVER = frozenset({"crash", "readiness", "overhead", "nodes", "jobs"})


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    machine = Machine()
    with tempfile.TemporaryDirectory(prefix="muster-bench-home-") as home:
        settle_environment(Path(home))
        chosen = set(options.names or NAMES)
        found = _measure(sorted(chosen - _NEED_SERVER), quick=options.quick)
        if served := sorted(chosen & _NEED_SERVER):
            # Imported now: Prefect reads the environment when it is imported.
            from tasks.server import prefect_server

            with prefect_server():
                found |= _measure(served, quick=options.quick)
    results = [found[name] for name in NAMES if name in found]
    print(machine)
    for result in results:
        print(f"{result.name}: {result.question}")
    print(f"\n{table(results)}")
    if options.json is not None:
        write_json(options.json, machine, results, quick=options.quick)
    return 0


def _measure(names: Sequence[str], *, quick: bool) -> dict[str, Result]:
    results = {}
    for name in names:
        benchmark = importlib.import_module(f"tests.benchmarks.{name}")
        say(f"{name} ...")
        began = time.monotonic()
        results[name] = benchmark.measure(quick=quick)
        say(f"{name}: {time.monotonic() - began:.0f} s")
    return results


def _name(text: str) -> str:
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"no benchmark {text!r}; there are {', '.join(NAMES)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "names", metavar="NAME", nargs="*", type=_name, help=f"{', '.join(NAMES)}; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="few samples: does it work at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
