"""Holds run specs that start verl against verl's own configuration.

    python -m tests.peers.verl.check [SPEC.yaml...]            against the facts in this checkout
    python -m tests.peers.verl.check --wheel [--write] ...     and against verl itself, by pip

Without SPEC all of deployments/runs/verl-*.yaml. `--write` writes the facts anew.

Exit status: 0 nothing is wrong · 1 something is, a line each · 2 the arguments are wrong · 3 the
wheel cannot be had.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from tasks.spec.errors import InvalidSpec
from tasks.spec.run import RunSpec
from tests.peers import pip
from tests.peers.verl import facts, rules, wheel
from tests.support.help import HelpFormatter

ROOT = Path(__file__).resolve().parents[3]


def main(argv: list[str] | None = None) -> int:
    """The exit status, after a line for each fault and for each spec."""
    options = _parser().parse_args(argv)
    paths = options.specs or sorted((ROOT / "deployments" / "runs").glob("verl-*.yaml"))
    try:
        specs = {path.name: read(path) for path in paths}
    except (OSError, yaml.YAMLError, InvalidSpec) as error:
        print(error, file=sys.stderr)
        return 2

    faults: dict[str, list[str]] = {name: [] for name in specs}
    if options.wheel:
        try:
            own = ask_verl(specs, options.version, write=options.write)
        except pip.NoWheel as error:
            print(f"verl {options.version} cannot be had: {error}", file=sys.stderr)
            return 3
        for name, found in own.items():
            faults[name] += found
    known = facts.load(options.version)
    for name, spec in specs.items():
        faults[name] += rules.faults_in(spec, known)

    for name, found in faults.items():
        for fault in found:
            print(f"{name}: {fault}")
        source = "its wheel and its facts" if options.wheel else "its facts"
        print(f"{name}: {len(found) or 'no'} faults, by verl {known.version}: {source}")
    return 1 if any(faults.values()) else 0


def read(path: Path) -> RunSpec:
    """The spec of a file.

    Raises:
        InvalidSpec: It is none.
        OSError, YAMLError: It cannot be read.
    """
    return RunSpec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def ask_verl(specs: Mapping[str, RunSpec], version: str, *, write: bool) -> dict[str, list[str]]:
    """What verl itself has against the specs, by their names; with `write`, its facts on disk.

    Raises:
        NoWheel: pip cannot get it.
        Unanswered: its configuration could not be composed at all.
    """
    question = {
        f"{name}\n{component}": {"module": module, "overrides": overrides, "env": dict(env)}
        for name, spec in specs.items()
        for component, module, overrides, env in rules.starts_in(spec)
    }
    with tempfile.TemporaryDirectory(prefix="verl-") as folder:
        fetched = pip.fetch(f"verl=={version}", Path(folder))
        answer = wheel.ask(fetched, question, Path(folder) / "hydra")
    if write:
        path = facts.path_of(version)
        path.write_text(facts.as_text(version, fetched.sha256, answer), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: written")
    found: dict[str, list[str]] = {}
    for asked, faults in answer["faults"].items():
        name, component = asked.split("\n")
        found.setdefault(name, []).extend(f"{component}: {fault}" for fault in faults)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers.verl.check",
        description="Run specs against verl's own configuration: keys, types, batch sizes.",
        epilog="Exit: 0 nothing is wrong; 1 something is; 2 a spec or the arguments are wrong; 3 "
        "verl could not be asked.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("specs", nargs="*", type=Path, metavar="SPEC.yaml", help="else those of Muster for verl")
    add("--version", default=facts.VERSION, help="of verl")
    add("--wheel", action="store_true", help="ask verl itself too: pip gets it, without torch")
    add("--write", action="store_true", help="with --wheel: write what is known of it anew")
    return parser


if __name__ == "__main__":
    sys.exit(main())
