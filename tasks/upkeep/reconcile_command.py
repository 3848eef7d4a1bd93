"""The command `python -m flows.reconcile`: one reconcile of this host, now."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from tasks.upkeep.reconciling import publish, reconcile_host

EXIT_DONE, EXIT_OPEN = 0, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Reconcile, without a flow run of its own, and say what was done.

    Returns: 0, or 1 where something could not be finished yet.
    """
    parser = argparse.ArgumentParser(
        prog="python -m flows.reconcile",
        description="Finish what killed runs have left on this host and close their records, here "
        "and on the Prefect server of PREFECT_API_URL, where it is set. Safe at any time.",
        epilog="Exit: 0 done, or nothing to do; 1 something could not be finished yet; 2 it takes "
        "no arguments.",
    )
    parser.parse_args(arguments)
    # What it would log is printed here.
    logging.getLogger("tasks.upkeep.reconciling").setLevel(logging.ERROR)
    report = reconcile_host()
    publish(report)
    for run in report.runs:
        print(run)
    print(report.summary)
    return EXIT_OPEN if any(run.open for run in report.runs) else EXIT_DONE
