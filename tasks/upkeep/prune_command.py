"""The command `python -m flows.prune`: what may go of what ended runs have left, and with `--yes`
its end."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from tasks.upkeep.prune import prune_host
from tasks.upkeep.retention import NEVER, Retention, variable_of

EXIT_DONE, EXIT_OPEN, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Show what would go, or have it gone.

    Returns: 0 done, or shown; 1 something was left that should have gone; 2 a rule is no rule, and
    nothing was done.
    """
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    # What it would log is printed here.
    logging.getLogger("tasks.upkeep.prune").setLevel(logging.ERROR)
    is_dry = not options.pop("yes")
    said = {variable_of(name): value for name, value in options.items() if value is not None}
    try:
        keep = Retention.of_environment({**os.environ, **said})
    except ValidationError as error:
        for fault in error.errors():
            name = str(fault["loc"][0])
            print(f"{variable_of(name)} or {_option(name)}: {fault['msg']}", file=sys.stderr)
        print("Nothing was done.", file=sys.stderr)
        return EXIT_USAGE
    pruned = prune_host(keep, dry_run=is_dry)
    for line in pruned.lines():
        print(line)
    if is_dry and pruned.plan.steps:
        print("Nothing was done: with --yes it is (make prune ARGS=--yes).")
    return EXIT_OPEN if pruned.has_problem else EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.prune",
        description="Show what may go of what ended runs have left in MUSTER_HOME, and with --yes "
        "remove it. run.json and the specs of a run always stay; what its own programs wrote "
        "stays unless --outputs says otherwise; a run that has not ended, waits, or that another "
        "one has started from is left as it is.",
        epilog="A rule that is left out is that of the environment, MUSTER_PRUNE_DAYS and so on, "
        "or the default. Exit: 0 done, or shown; 1 something could not be done; 2 a rule is "
        "wrong, and nothing was done.",
    )
    parser.add_argument("--yes", action="store_true", help="do it; else it is only shown")
    for name, field in Retention.model_fields.items():
        if name == "outputs":
            text = {"action": "store_const", "const": "true"}
        else:
            text = {"metavar": "GIB" if name == "gib" else "N" if name == "runs" else "DAYS"}
        default = field.default if field.default is not None else NEVER
        help_text = (field.description or "").replace("`", "")
        shown = "" if name == "outputs" else f" By default {default:g}." if default != NEVER else ""
        parser.add_argument(_option(name), help=f"{help_text}{shown}", **text)  # type: ignore[arg-type]
    return parser


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
