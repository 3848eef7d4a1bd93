"""The command `python -m flows.preflight`: one look at every node of a cluster, now."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from prefect.client.schemas.objects import State
from pydantic import ValidationError

from tasks.server.server import NoServer, prefect_server, quieten_prefect
from tasks.show.help import HelpFormatter
from tasks.upkeep.node_health import DEFAULT_LIMITS, Limits, Verdict
from tasks.upkeep.preflight import LOOK_WITHIN_S

EXIT_FIT, EXIT_UNFIT, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(preflight: Callable[..., State[Any]], arguments: Sequence[str] | None = None) -> int:
    """Run the flow, and print what it found.

    Returns: 0 every node is fit, 1 one is not or can't be asked, 2 the arguments are wrong and
    nothing was done, 130 interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        limits = Limits(**{name: getattr(options, name) for name in Limits.model_fields})
        if not options.address.startswith(("http://", "https://")):
            raise ValueError(f"--address {options.address}: the dashboard's URL is needed")
        if options.within_s <= 0:
            raise ValueError(f"--within-s {options.within_s:g}: must be more than 0")
    except (ValidationError, ValueError) as error:
        print(f"{_plain(error)}\nNothing was done.", file=sys.stderr)
        return EXIT_INVALID
    quieten_prefect()
    try:
        with prefect_server():
            state = preflight(
                options.address, options.shared, limits, options.within_s, return_state=True
            )
    except NoServer as error:
        print(error, file=sys.stderr)
        return EXIT_UNFIT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    found = state.result(raise_on_failure=False)
    if isinstance(found, Verdict):
        print(found.as_markdown())
    print(found.summary.splitlines()[0] if isinstance(found, Verdict) else state.message)
    return EXIT_FIT if state.is_completed() else EXIT_UNFIT


def _plain(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "\n".join(
        f"--{'-'.join(str(part) for part in fault['loc']).replace('_', '-')}: {fault['msg']}"
        for fault in error.errors()
    )


def _parser() -> argparse.ArgumentParser:
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
            f"--{name.replace('_', '-')}",
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
