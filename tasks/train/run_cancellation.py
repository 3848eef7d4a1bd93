"""Cancel a run through its Prefect server, or by a signal to its process on this machine."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from uuid import UUID

from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from tasks.processes.identity import host_name, user_name
from tasks.processes.registry import Owner, find_living_owner, send_to_owner
from tasks.record.cancellation_note import write_note
from tasks.server.flow_runs import cancel as cancel_flow_run
from tasks.server.flow_runs import connect_to_server
from tasks.spec.errors import BadArgument, MusterError
from tasks.train.local_runs import read_local_record
from tasks.train.runs import ENDED_STATES, Run

#: Seconds between two SIGINT signals to the process of a run. After this pause, the process treats
#: the second signal as a second Ctrl-C, and skips the grace periods.
_SECOND_CTRL_C_S = 0.5


def cancel_run(run: Run, *, is_now: bool = False) -> None:
    """Request the cancellation of a run, and return before the run has ended.

    A run whose process is on this machine can always be cancelled. If its flow run does not exist
    on the Prefect server, the process of the run gets a signal.

    Args:
        run: The run.
        is_now: True to skip the grace periods of the components.

    Raises:
        BadArgument: The run has already ended.
        MusterError: The run cannot be cancelled here: it has no flow run on the configured server
            and no process on this machine.
    """
    owner = _find_working_process(run)
    if run.state in ENDED_STATES and owner is None:
        raise BadArgument(f"{run.run_id} has ended: it is {run.state}")
    api_url = PREFECT_API_URL.value()
    command = "muster cancel --now" if is_now else "muster cancel"
    message = f"cancelled by {user_name()} with `{command}` on {host_name()}"
    if api_url and run.flow_run_id:
        with suppress(ObjectNotFound), connect_to_server(api_url) as client:
            has_process = owner is not None
            flow_run_id = UUID(run.flow_run_id)
            cancel_flow_run(client, flow_run_id, message, is_now=is_now, has_process=has_process)
            return
    if owner is None:
        raise MusterError(
            f"the Prefect server has no flow run of {run.run_id}, and this machine has no process "
            "of the run. Run this command on the host of the run, or press Ctrl-C in the terminal "
            "of the run"
        )
    write_note(run.place.directory, message)
    _signal_process(run, owner, is_now=is_now)


def _find_working_process(run: Run) -> Owner | None:
    """Return the process that executes a run on this machine, or None if there is none.

    Return None, too, if the record of the run is final. The process may still send its last reports
    then, but the run is over.
    """
    record = read_local_record(run.run_id)
    if record is not None and record.state.is_final:
        return None
    return find_living_owner(run.run_id)


def _signal_process(run: Run, owner: Owner, *, is_now: bool) -> None:
    """Send signals to the process of a run, so that the process ends the run.

    Use this function only if the run has no flow run on the configured Prefect server.

    Raises:
        MusterError: The process belongs to another user, or the grace periods cannot be skipped.
    """
    if is_now and owner.worker is not None:
        raise MusterError(
            f"Muster cannot skip the grace periods of {run.run_id}, because the Prefect server no "
            "longer has the flow run of this run. To end the run with its grace periods: muster "
            f"cancel {run.run_id}"
        )
    try:
        if is_now:
            send_to_owner(owner, signal.SIGINT)
            time.sleep(_SECOND_CTRL_C_S)
            send_to_owner(owner, signal.SIGINT)
        else:
            send_to_owner(owner, signal.SIGTERM)
    except PermissionError as error:
        pid = owner.process.pid
        raise MusterError(
            f"{run.run_id} cannot be ended, because Muster cannot send a signal to its process "
            f"{pid}: {error}"
        ) from error
