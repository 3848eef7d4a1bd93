"""The command `muster logs`, which imports Prefect only for a run without files on this machine.

The import of Prefect takes longer than the output of most logs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from tasks.show.arguments import RunName
from tasks.train.local_runs import find_local_run, list_attempts
from tasks.train.run_logs import Selection, print_logs


def logs(
    run: RunName = "latest",
    component: str = "",
    /,
    *,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    attempt: int | None = None,
    tail: Annotated[int | None, Parameter(validator=Number(gte=0))] = None,
    grep: str = "",
) -> None:
    """Show the logs of a run's components.

    Exit: 0 shown; 2 there is no such run, or this machine has no such log.

    Args:
        component: Show only the log of this component.
        follow: Continue with new lines and with later attempts, until the run has ended.
        attempt: Number of the attempt. Default: the last attempt.
        tail: Number of last lines of each log to show. Default: all lines.
        grep: Show only lines that contain this text. It is no regular expression.
    """
    selection = Selection(component=component, text=grep, last_lines=tail)
    # Ctrl-C is the usual way to end `muster logs --follow`, so do not treat it as a failure.
    with suppress(KeyboardInterrupt):
        place = find_local_run(run)
        if place is None:
            # Import these modules only for a run that is not on this machine: they import Prefect,
            # which takes long.
            from tasks.train.finding_runs import find_run
            from tasks.train.run_records import find_last_attempt

            found_run = find_run(run)
            place = found_run.place
            number = attempt or find_last_attempt(found_run, wait=follow)
        else:
            number = attempt or list_attempts(place)[-1]
        print_logs(place, number, selection, follow=follow)
