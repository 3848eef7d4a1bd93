"""The commands `python -m flows.reconcile`, one reconcile of this host; `python -m flows.prune`,
what may go of what ended runs have left, and with `--yes` its end; and `python -m flows.preflight`,
one look at every node of a cluster."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from prefect.client.schemas.objects import State
from pydantic import ValidationError

from tasks.server.flow_runs import ServerAway
from tasks.server.server import NoServer, prefect_server, quieten_prefect
from tasks.show.help import HelpFormatter
from tasks.upkeep.lost_host import NotLost, give_up_host
from tasks.upkeep.preflight import DEFAULT_LIMITS, LOOK_WITHIN_S, Limits, PreflightVerdict
from tasks.upkeep.prune import prune_host
from tasks.upkeep.reconcile import publish, reconcile_host
from tasks.upkeep.retention import NEVER, Retention, variable_of

EXIT_DONE, EXIT_OPEN, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 130


def reconcile_main(arguments: Sequence[str] | None = None) -> int:
    """Reconcile, without a flow run of its own, and say what was done.

    Returns: 0, or 1 where something could not be finished yet.
    """
    parser = argparse.ArgumentParser(
        prog="python -m flows.reconcile",
        description="Finish what killed runs have left on this host and close their records, here "
        "and on the Prefect server of PREFECT_API_URL, where it is set. Safe at any time.",
        epilog="Exit: 0 done, or nothing to do; 1 something could not be finished yet; 2 the host "
        "is not lost, or the command is wrong: nothing was done.",
    )
    parser.add_argument(
        "--lost-host",
        metavar="HOST",
        help="finish the runs of another host from here, which is gone for good: their GPUs are "
        "given to other runs. Say so only of a host that is off: what still runs on one that is "
        "only cut off would share its GPUs. Refused for a host that was heard of in the last two "
        "minutes",
    )
    asked = parser.parse_args(arguments)
    # What it would log is printed here.
    logging.getLogger("tasks.upkeep.reconcile").setLevel(logging.ERROR)
    try:
        report = give_up_host(asked.lost_host) if asked.lost_host else reconcile_host()
    except (NotLost, ServerAway) as error:
        parser.error(f"{error}. Nothing was done.")
    publish(report)
    for run in report.runs:
        print(run)
    print(report.summary)
    return EXIT_OPEN if any(run.open for run in report.runs) else EXIT_DONE


def prune_main(arguments: Sequence[str] | None = None) -> int:
    """Show what would go, or have it gone.

    Returns: 0 done, or shown; 1 something was left that should have gone; 2 a rule is no rule, and
    nothing was done.
    """
    parser = _prune_parser()
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
        return EXIT_INVALID
    pruned = prune_host(keep, dry_run=is_dry)
    for line in pruned.lines():
        print(line)
    if is_dry and pruned.plan.steps:
        print("Nothing was done: with --yes it is (make prune ARGS=--yes).")
    return EXIT_OPEN if pruned.has_problem else EXIT_DONE


def _prune_parser() -> argparse.ArgumentParser:
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


def _option(field: object) -> str:
    return f"--{field}".replace("_", "-")


def preflight_main(
    preflight: Callable[..., State[Any]], arguments: Sequence[str] | None = None
) -> int:
    """Run the flow, and print what it found.

    Returns: 0 every node is fit, 1 one is not or can't be asked, 2 the arguments are wrong and
    nothing was done, 130 interrupted.
    """
    options = _preflight_parser().parse_args(arguments)
    try:
        limits = Limits(**{name: getattr(options, name) for name in Limits.model_fields})
        problems = []
        if not options.address.startswith(("http://", "https://")):
            problems = [f"--address {options.address}: the dashboard's URL is needed"]
        elif options.within_s <= 0:
            problems = [f"--within-s {options.within_s:g}: must be more than 0"]
    except ValidationError as error:
        problems = [f"{_option(fault['loc'][0])}: {fault['msg']}" for fault in error.errors()]
    if problems:
        print(*problems, "Nothing was done.", sep="\n", file=sys.stderr)
        return EXIT_INVALID
    quieten_prefect()
    try:
        with prefect_server():
            state = preflight(
                options.address, options.shared, limits, options.within_s, return_state=True
            )
    except NoServer as error:
        print(error, file=sys.stderr)
        return EXIT_OPEN
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    found, said = state.result(raise_on_failure=False), state.message
    if isinstance(found, PreflightVerdict):
        print(found.as_markdown())
        said = found.summary.splitlines()[0]
    print(said)
    return EXIT_DONE if state.is_completed() else EXIT_OPEN


def _preflight_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.preflight",
        description="Look at every node of a Ray cluster: is Muster's code there, is the shared "
        "directory the same everywhere, is there disk, is the clock right, is something left of "
        "runs that have ended, are the GPUs there and free. On the Prefect server of "
        "PREFECT_API_URL or on a temporary one.",
        epilog="Exit: 0 every node is fit; 1 one is not, or the cluster can't be asked; 2 the "
        "arguments are wrong; 130 interrupted.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--address", required=True, metavar="URL", help="of the Ray dashboard")
    parser.add_argument("--shared", metavar="DIR", help="the shared directory; else MUSTER_HOME")
    for name, field in Limits.model_fields.items():
        value = getattr(DEFAULT_LIMITS, name)
        choices = {"gpus": ("auto", "real", "any"), "code": ("same", "any")}.get(name)
        parser.add_argument(
            _option(name),
            dest=name,
            type=type(value),
            default=value,
            choices=choices,
            metavar=None if choices else "N",
            help=field.description,
        )
    parser.add_argument(
        "--within-s", type=float, default=LOOK_WITHIN_S, metavar="S", help="for each step"
    )
    return parser
