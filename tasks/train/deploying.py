"""A run spec as a deployment's parameter: for `prefect deploy`, and for `--param` of one run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import load_spec, project_root
from tasks.spec.pipeline import load_pipeline

EXIT_PRINTED, EXIT_INVALID = 0, 2


def load_run_spec(path: str) -> dict[str, Any]:
    """A build step of prefect.yaml: `{{ ID.spec }}` then stands for the content of a spec file.

    A faulty file fails the deploy, with every fault, and not the first run that a schedule starts.

    Args:
        path: The file, relative to the project's root.

    Returns: `{"spec": ...}`, plain data that says the order of the file in `start_order` too.

    Raises: InvalidSpec, with every fault of the file.
    """
    return {"spec": load_spec(project_root() / path).for_server()}


def load_pipeline_spec(path: str) -> dict[str, Any]:
    """The same for a pipeline: `{{ ID.spec }}` stands for its content, with the run specs of the
    files that it names.

    Raises: InvalidSpec, with every fault of all of them.
    """
    return {"spec": load_pipeline(project_root() / path).written()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the spec of a file as JSON, with values changed.

    Returns: 0, or 2 where the spec is invalid.
    """
    parser = parser_of_spec(
        "python -m tasks.train.deploying",
        "Print a run spec as JSON, for the parameter `spec` of one run: prefect deployment run "
        "'train/NAME' --param \"spec=$(python -m tasks.train.deploying SPEC.yaml)\"",
        "Exit: 0 printed, 2 the arguments are wrong, or the spec is.",
    )
    options = parser.parse_args(arguments)
    try:
        spec = load_spec(Path(options.spec), options.set)
    except InvalidSpec as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    print(json.dumps(spec.for_server()))
    return EXIT_PRINTED


def parser_of_spec(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Of a command that takes a spec file, with changes to it."""
    parser = argparse.ArgumentParser(prog=prog, description=description, epilog=epilog)
    parser.add_argument("spec", metavar="SPEC.yaml", help="the run spec")
    parser.add_argument(
        "--set",
        metavar="a.b=c",
        action="append",
        default=[],
        help="change a value of the spec, for example --set progress.total=20; repeatable",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
