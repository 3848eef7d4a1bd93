"""Check run specs that start verl against verl's own configuration.

    python -m tests.peers.verl.check [SPEC.yaml...]            with the facts in this checkout
    python -m tests.peers.verl.check --wheel [--write] ...     and with verl itself, from pip

Without SPEC, all files deployments/runs/verl-*.yaml are checked. `--write` writes new facts.

Exit status: 0 without faults; 1 with faults, which are printed one per line; 2 for wrong arguments;
3 if the wheel could not be downloaded.
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
    """Check run specs against the configuration of verl, and print each fault and a summary.

    Returns:
        Exit status of the program.
    """
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
            faults_of_verl = ask_verl(specs, options.version, write=options.write)
        except pip.NoWheel as error:
            print(f"verl {options.version} could not be downloaded: {error}", file=sys.stderr)
            return 3
        for name, spec_faults in faults_of_verl.items():
            faults[name] += spec_faults
    known = facts.load(options.version)
    for name, spec in specs.items():
        faults[name] += rules.faults_in(spec, known)

    for name, spec_faults in faults.items():
        for fault in spec_faults:
            print(f"{name}: {fault}")
        source = "its wheel and its facts" if options.wheel else "its facts"
        print(f"{name}: {len(spec_faults) or 'no'} faults, by verl {known.version}: {source}")
    return 1 if any(faults.values()) else 0


def read(path: Path) -> RunSpec:
    """Return the spec of a file.

    Raises:
        InvalidSpec: The file contains no valid spec.
        OSError, YAMLError: The file cannot be read.
    """
    return RunSpec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def ask_verl(specs: Mapping[str, RunSpec], version: str, *, write: bool) -> dict[str, list[str]]:
    """Return a mapping from the name of a spec to the faults that verl itself finds in the spec.

    Args:
        specs: Mapping from the name of a spec to the spec.
        version: Version of verl.
        write: If True, also write the programs and configuration keys of this version to its JSON
            file in this checkout.

    Raises:
        NoWheel: pip could not download verl or Hydra.
        Unanswered: verl's configuration could not be composed.
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
    faults_by_spec: dict[str, list[str]] = {}
    for question_name, faults in answer["faults"].items():
        name, component = question_name.split("\n")
        faults_by_spec.setdefault(name, []).extend(f"{component}: {fault}" for fault in faults)
    return faults_by_spec


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers.verl.check",
        description="Check run specs against verl's own configuration: keys, types, batch sizes.",
        epilog="Exit: 0 without faults; 1 with faults; 2 for an invalid spec or wrong arguments; 3 "
        "if verl could not be downloaded.",
        formatter_class=HelpFormatter,
    )
    add_argument = parser.add_argument
    add_argument(
        "specs",
        nargs="*",
        type=Path,
        metavar="SPEC.yaml",
        help="default: deployments/runs/verl-*.yaml",
    )
    add_argument("--version", default=facts.VERSION, help="version of verl")
    add_argument(
        "--wheel", action="store_true", help="also ask verl itself, downloaded by pip without torch"
    )
    add_argument("--write", action="store_true", help="with --wheel: write new facts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
