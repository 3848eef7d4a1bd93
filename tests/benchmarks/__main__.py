"""Muster against other ways of doing the same work: `python -m tests.benchmarks [NAME...]`.

Every figure is taken in the same run as those it is compared with, in turn with them. The other
ways are real programs where one can have them, see `peers.py`, and else small models of what other
projects do, see `models.py`. Without a NAME, all are measured and BENCHMARKS.md is written anew.
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
from tests.benchmarks.report import Machine, NotHere, Result, say, table, write_json
from tests.benchmarks.stage import settle_environment
from tests.support.help import HelpFormatter

NAMES = (
    "crash",
    "load",
    "orphans",
    "readiness",
    "overhead",
    "watching",
    "many",
    "starting",
    "nodes",
    "jobs",
    "queue",
    "capacity",
    "release",
    "waiting",
    "gateway",
    "fleet",
    "limits",
)
#: They run real flows; one server is enough for all.
_NEED_SERVER = frozenset({"crash", "load", "orphans", "readiness", "overhead", "nodes", "jobs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What came of one benchmark."""

    name: str
    #: Why it did not run; None where it failed.
    result: Result | str | None
    machine: Machine
    took_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Returns: 0; 1 if a benchmark failed, the others being measured all the same. Bad options exit 2.
    """
    options = _parser().parse_args(arguments)
    if options.page:
        _write_pages()
        return 0
    # Quick figures say little: only by order do they replace others.
    keeps = options.record or not (options.names or options.quick)
    versions = records.versions_here()
    machine = Machine()
    found: dict[str, _Found] = {}
    with tempfile.TemporaryDirectory(prefix="muster-bench-home-") as home:
        settle_environment(Path(home))
        for one in _measured(set(options.names or NAMES), quick=options.quick):
            found[one.name] = one
            if keeps and one.result is not None:
                records.write(
                    records.record_of(
                        one.name,
                        one.result,
                        machine=one.machine,
                        versions=versions,
                        quick=options.quick,
                        took_s=one.took_s,
                    )
                )
                _write_pages()
    in_order = [found[name] for name in NAMES if name in found]
    _print(machine, in_order)
    if options.json is not None:
        results = [one.result for one in in_order if isinstance(one.result, Result)]
        write_json(options.json, machine, results, quick=options.quick)
    return 1 if any(one.result is None for one in in_order) else 0


def _measured(chosen: set[str], *, quick: bool) -> Iterator[_Found]:
    for name in sorted(chosen - _NEED_SERVER):
        yield _measure(name, quick=quick)
    if served := sorted(chosen & _NEED_SERVER):
        # Imported now: Prefect reads the environment when it is imported.
        from tasks.server.server import prefect_server

        with prefect_server(password=""):
            for name in served:
                yield _measure(name, quick=quick)


def _measure(name: str, *, quick: bool) -> _Found:
    say(f"{name} ...")
    machine = Machine()
    began = time.monotonic()
    result: Result | str | None
    try:
        result = importlib.import_module(f"tests.benchmarks.{name}").measure(quick=quick)
    except NotHere as reason:
        result = str(reason)
        say(f"{name} is left out: {reason}")
    except Exception:
        # Hours of other figures must not be lost with it.
        result = None
        traceback.print_exc()
        say(f"{name} failed; what was kept of it before stays")
    took_s = time.monotonic() - began
    say(f"{name}: {took_s:.0f} s")
    return _Found(name=name, result=result, machine=machine, took_s=took_s)


def _print(machine: Machine, found: Sequence[_Found]) -> None:
    print(machine)
    results = [one.result for one in found if isinstance(one.result, Result)]
    for result in results:
        print(f"{result.name}: {result.question}")
    if results:
        print(f"\n{table(results)}")
    for one in found:
        if isinstance(one.result, str):
            print(f"{one.name}: not run: {one.result}")
    for result in results:
        for missing in result.missing:
            print(f"{result.name}, {missing.way}: not run: {missing.why}")


def _write_pages() -> None:
    kept = records.read_all()
    benchmarks = records.ROOT / "BENCHMARKS.md"
    benchmarks.write_text(page.page(kept, NAMES), encoding="utf-8")
    limits = records.ROOT / "docs" / "limits.md"
    text = limits.read_text(encoding="utf-8")
    limits.write_text(limits_page.filled(text, kept), encoding="utf-8")


def _name(text: str) -> str:
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
        "names", metavar="NAME", nargs="*", type=_name, help=f"{', '.join(NAMES)}; all by default"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the figures and write BENCHMARKS.md and the tables of docs/limits.md, as is "
        "done without a NAME",
    )
    parser.add_argument(
        "--page", action="store_true", help="write both again from what was kept; measure nothing"
    )
    parser.add_argument("--quick", action="store_true", help="few samples: does it work at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
