"""Compare Muster with other programs for the same work: `python -m tests.benchmarks [NAME...]`.

Muster and the other programs are measured in turn, in the same session, so that their figures can
be compared. The other programs are real if they can be installed (`peers.py`). Otherwise they are
small models of other projects (`models.py`). Without a NAME, the command runs all benchmarks and
rewrites BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import limits_page, page, records
from tests.benchmarks.harness import settle_environment
from tests.benchmarks.report import Machine, NotHere, Result, say, table, write_json
from tests.support.help import HelpFormatter

#: Names of all benchmarks, in the order of BENCHMARKS.md.
NAMES = (
    "crash",
    "load",
    "orphans",
    "readiness",
    "overhead",
    "watching",
    "many",
    "hung_files",
    "logs",
    "starting",
    "nodes",
    "jobs",
    "queue",
    "capacity",
    "release",
    "sweep",
    "waiting",
    "gateway",
    "fleet",
    "limits",
)
#: Benchmarks that run real flows. These benchmarks share one Prefect server.
_NEED_SERVER = frozenset({"crash", "load", "orphans", "readiness", "overhead", "nodes", "jobs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Result of one benchmark, or the reason why there is no result."""

    #: Name of the benchmark.
    name: str
    #: Measured values, or the reason why the benchmark cannot run here. None if the benchmark
    #: failed.
    result: Result | str | None
    #: Machine and time of the measurement.
    machine: Machine
    #: Duration of the benchmark, in seconds.
    took_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks and print their figures.

    Depending on the arguments, also record the figures, and write BENCHMARKS.md and docs/limits.md
    from the recorded figures.

    Args:
        arguments: Command-line arguments. None for the arguments of this process.

    Returns:
        The exit code: 0, or 1 if a benchmark failed. A failure does not stop the other benchmarks.

    Raises:
        SystemExit: The arguments are wrong. The exit code is 2.
    """
    options = _parser().parse_args(arguments)
    if options.page:
        _write_pages()
        return 0
    # By default, the figures are recorded only if all benchmarks run without the option `--quick`.
    # The option `--record` records the figures in all other cases, too.
    keeps_figures = options.record or not (options.names or options.quick)
    versions = records.versions_here()
    machine = Machine()
    outcomes: dict[str, _Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="muster-bench-home-") as home:
        settle_environment(Path(home))
        for outcome in _measure_all(set(options.names or NAMES), quick=options.quick):
            outcomes[outcome.name] = outcome
            if keeps_figures and outcome.result is not None:
                records.write(
                    records.record_of(
                        outcome.name,
                        outcome.result,
                        machine=outcome.machine,
                        versions=versions,
                        quick=options.quick,
                        took_s=outcome.took_s,
                    )
                )
                _write_pages()
    in_order = [outcomes[name] for name in NAMES if name in outcomes]
    _print(machine, in_order)
    if options.json is not None:
        results = [outcome.result for outcome in in_order if isinstance(outcome.result, Result)]
        write_json(options.json, machine, results, quick=options.quick)
    return 1 if any(outcome.result is None for outcome in in_order) else 0


def _measure_all(chosen: set[str], *, quick: bool) -> Iterator[_Outcome]:
    """Run the chosen benchmarks. Start a Prefect server for the benchmarks that need one."""
    for name in sorted(chosen - _NEED_SERVER):
        yield _measure(name, quick=quick)
    names_with_server = sorted(chosen & _NEED_SERVER)
    if names_with_server:
        # Python imports Prefect here, after the environment variables are set, because Prefect
        # reads the variables during its import.
        from tasks.server.server import prefect_server

        with prefect_server(password=""):
            for name in names_with_server:
                yield _measure(name, quick=quick)


def _measure(name: str, *, quick: bool) -> _Outcome:
    """Run one benchmark. A failure is printed and does not stop the other benchmarks."""
    say(f"{name} ...")
    machine = Machine()
    began = time.monotonic()
    result: Result | str | None
    try:
        result = importlib.import_module(f"tests.benchmarks.{name}").measure(quick=quick)
    except NotHere as reason:
        result = str(reason)
        say(f"{name} is skipped: {reason}")
    except Exception:
        # An error of one benchmark must not stop the program: the figures of the other benchmarks
        # took hours, and must not be lost.
        result = None
        traceback.print_exc()
        say(f"{name} failed; its recorded figures stay unchanged")
    took_s = time.monotonic() - began
    say(f"{name}: {took_s:.0f} s")
    return _Outcome(name=name, result=result, machine=machine, took_s=took_s)


def _print(machine: Machine, outcomes: Sequence[_Outcome]) -> None:
    """Print the figures of all benchmarks as one table, and the reasons for missing figures."""
    print(machine)
    results = [outcome.result for outcome in outcomes if isinstance(outcome.result, Result)]
    for result in results:
        print(f"{result.name}: {result.question}")
    if results:
        print(f"\n{table(results)}")
    for outcome in outcomes:
        if isinstance(outcome.result, str):
            print(f"{outcome.name}: not run: {outcome.result}")
    for result in results:
        for missing in result.missing:
            print(f"{result.name}, {missing.way}: not run: {missing.why}")


def _write_pages() -> None:
    """Write BENCHMARKS.md and the tables of docs/limits.md from the recorded results."""
    recorded = records.read_all()
    benchmarks = records.ROOT / "BENCHMARKS.md"
    benchmarks.write_text(page.page(recorded, NAMES), encoding="utf-8")
    limits = records.ROOT / "docs" / "limits.md"
    text = limits.read_text(encoding="utf-8")
    limits.write_text(limits_page.filled(text, recorded), encoding="utf-8")


def _parse_name(text: str) -> str:
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"no benchmark {text!r}; there are {', '.join(NAMES)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        epilog="Exit: 0 all was measured; 1 not so; 2 the arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        type=_parse_name,
        help=f"{', '.join(NAMES)}; all by default",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the figures and write BENCHMARKS.md and the tables of docs/limits.md, as is "
        "done without a NAME",
    )
    parser.add_argument(
        "--page", action="store_true", help="write both from the recorded figures; measure nothing"
    )
    parser.add_argument("--quick", action="store_true", help="few samples: does it work at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
