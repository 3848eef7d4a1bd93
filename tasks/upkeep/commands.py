"""The verbs `muster reconcile`, one reconcile of this host; `muster prune`, what may go of what
ended runs have left, and with `--yes` its end; and `muster preflight`, one look at every node of a
cluster."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

from cyclopts import Parameter
from prefect.client.schemas.objects import State
from pydantic import ValidationError

from tasks.server.server import prefect_server, quieten_prefect
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED, EXIT_INVALID
from tasks.upkeep.lost_host import give_up_host
from tasks.upkeep.preflight import DEFAULT_LIMITS, LOOK_WITHIN_S, Limits, PreflightVerdict
from tasks.upkeep.prune import prune_host
from tasks.upkeep.reconcile import publish, reconcile_host
from tasks.upkeep.retention import Retention, variable_of

LimitOptions = Annotated[Limits, Parameter(name="*")]
#: A number, or `never`.
Rule = Annotated[str | None, Parameter(show_default=False)]


def reconcile(*, lost_host: str | None = None) -> int:
    """Finish what killed runs have left on this host and close their records, here and on the
    Prefect server. Safe at any time.

    Exit: 0 done, or nothing to do; 1 something could not be finished yet; 2 the host is not lost.

    Args:
        lost_host: Finish the runs of another host from here, which is gone for good: their GPUs are
            given to other runs. Say so only of a host that is off: what still runs on one that is
            only cut off would share its GPUs. Refused for a host that was heard of in the last two
            minutes.
    """
    # What it would log is printed here.
    logging.getLogger("tasks.upkeep.reconcile").setLevel(logging.ERROR)
    report = give_up_host(lost_host) if lost_host else reconcile_host()
    publish(report)
    for run in report.runs:
        print(run)
    print(report.summary)
    return EXIT_FAILED if any(run.open for run in report.runs) else EXIT_DONE


def prune(
    *,
    yes: Annotated[bool, Parameter(negative=())] = False,
    compress_after_days: Rule = None,
    days: Rule = None,
    runs: Rule = None,
    gib: Rule = None,
    outputs: Annotated[bool | None, Parameter(negative=())] = None,
    upkeep_days: Rule = None,
) -> int:
    """Show what may go of what ended runs have left in MUSTER_HOME, and with --yes remove it.

    run.json and the specs of a run always stay; what its own programs wrote stays unless --outputs
    says otherwise; a run that has not ended, waits, or that another one has started from is left as
    it is. A rule that is left out is that of the environment, MUSTER_PRUNE_DAYS and so on, or the
    default.

    Exit: 0 done, or shown; 1 something could not be done; 2 a rule is wrong.

    Args:
        yes: Do it; else it is only shown.
        compress_after_days: Logs are compressed so many days after a run's end; by default 7.
        days: A run's files are removed so many days after its end; by default 60.
        runs: Of the runs that have ended, at most so many keep files.
        gib: All runs together keep at most so many GiB.
        outputs: What a run's own programs wrote into its directory is removed with Muster's files.
        upkeep_days: Flow runs of `reconcile` and `prune` that completed are deleted from the
            Prefect server after so many days; by default 2.
    """
    rules = {
        "compress_after_days": compress_after_days,
        "days": days,
        "runs": runs,
        "gib": gib,
        "outputs": outputs,
        "upkeep_days": upkeep_days,
    }
    # What it would log is printed here.
    logging.getLogger("tasks.upkeep.prune").setLevel(logging.ERROR)
    said = {variable_of(name): str(value) for name, value in rules.items() if value is not None}
    try:
        keep = Retention.of_environment({**os.environ, **said})
    except ValidationError as error:
        for fault in error.errors():
            name = str(fault["loc"][0])
            option = f"--{name}".replace("_", "-")
            print(f"{variable_of(name)} or {option}: {fault['msg']}", file=sys.stderr)
        print("Nothing was done.", file=sys.stderr)
        return EXIT_INVALID
    pruned = prune_host(keep, dry_run=not yes)
    for line in pruned.lines():
        print(line)
    if not yes and pruned.plan.steps:
        print("Nothing was done. To do it: muster prune --yes")
    return EXIT_FAILED if pruned.has_problem else EXIT_DONE


def run_preflight(
    flow: Callable[..., State[Any]],
    address: str,
    shared: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    within_s: float = LOOK_WITHIN_S,
) -> int:
    """Run the flow, and print what it found.

    Returns: 0 every node is fit, 1 one is not or can't be asked, 2 the arguments are wrong.
    """
    problems = []
    if not address.startswith(("http://", "https://")):
        problems.append(f"--address {address}: the dashboard's URL is needed")
    if within_s <= 0:
        problems.append(f"--within-s {within_s:g}: must be more than 0")
    if problems:
        print(*problems, "Nothing was done.", sep="\n", file=sys.stderr)
        return EXIT_INVALID
    quieten_prefect()
    with prefect_server():
        state = flow(address, shared, limits, within_s, return_state=True)
    found, said = state.result(raise_on_failure=False), state.message
    if isinstance(found, PreflightVerdict):
        print(found.as_markdown())
        said = found.summary.splitlines()[0]
    print(said)
    return EXIT_DONE if state.is_completed() else EXIT_FAILED
