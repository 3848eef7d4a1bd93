"""Write down why the processes of runs are stopped, before these processes get their signals.

A run whose process gets SIGTERM does not know the reason. So the program that stops a worker or a
stack first writes the reason into the directory of each run that it stops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from tasks.processes.identity import host_name
from tasks.processes.registry import Owner, find_living_owner, registered_runs
from tasks.record.cancellation_note import write_note

_log = logging.getLogger(__name__)


def describe_stopped_worker() -> str:
    """Return the reason for the end of a run whose worker on this machine was stopped."""
    return f"cancelled, because the worker on {host_name()} was stopped"


def write_stop_notes(reason: str, is_stopped: Callable[[Owner], bool]) -> list[Path]:
    """Write a reason into the directory of each run that will be stopped.

    If a run already has a reason, that reason is kept. For example, `muster down` writes a reason
    that names the user, and then stops the worker. The worker also calls this function, but its
    reason does not name the user, and must not replace the first reason.

    Args:
        reason: Reason for the end of the runs, for the user.
        is_stopped: Called with the process that supervises a run. Returns True if the run will
            be stopped.

    Returns:
        The directories of the runs that will be stopped.
    """
    directories = []
    try:
        owners = [owner for owner in map(find_living_owner, registered_runs()) if owner is not None]
    except OSError as error:
        # Do not raise the error, because the caller must still stop the runs.
        _log.warning(
            "Muster could not record why the runs are stopped. The records of the runs will name "
            "only the signal: %s",
            error,
        )
        return []
    for owner in owners:
        if owner.directory is not None and is_stopped(owner):
            write_note(owner.directory, reason)
            directories.append(owner.directory)
    return directories
