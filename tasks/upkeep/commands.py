"""The command `python -m flows.reconcile`: one reconcile of this host, now."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from tasks.server.flow_runs import ServerAway
from tasks.upkeep.lost_host import NotLost, give_up_host
from tasks.upkeep.reconcile import publish, reconcile_host

EXIT_DONE, EXIT_OPEN, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
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
