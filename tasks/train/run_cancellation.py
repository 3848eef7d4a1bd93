"""Cancel a run through its Prefect server."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from tasks.processes.identity import host_name
from tasks.server.flow_runs import cancel as cancel_flow_run
from tasks.server.flow_runs import connect_to_server
from tasks.spec.errors import BadArgument, MusterError
from tasks.train.finding_runs import ENDED_STATES, Run


def cancel_run(run: Run, *, is_now: bool = False) -> None:
    """Request the cancellation of a run. Return before the run has ended.

    Args:
        run: The run.
        is_now: True to skip the grace periods of the components.

    Raises:
        BadArgument: The run has already ended.
        MusterError: The run has no flow run on the configured server, so it cannot be cancelled.
    """
    if run.state in ENDED_STATES:
        raise BadArgument(f"{run.run_id} has ended: it is {run.state}")
    api_url = PREFECT_API_URL.value()
    if api_url and run.flow_run_id:
        with suppress(ObjectNotFound), connect_to_server(api_url) as client:
            how = "cancelled now" if is_now else "cancelled"
            message = f"{how} by muster on {host_name()}"
            cancel_flow_run(client, UUID(run.flow_run_id), message, is_now=is_now)
            return
    raise MusterError(
        f"{run.run_id} has its own Prefect server: press Ctrl-C in the terminal of the run, "
        "or send SIGTERM to its process"
    )
