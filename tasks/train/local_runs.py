"""Find the runs of this machine by their directories, without Prefect and without its server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from tasks.record.places import RunPlace, muster_home
from tasks.spec.prefect_address import may_have_server

if TYPE_CHECKING:
    from tasks.record.run_json import RunJson

#: Matches the time in a run id, and the first character of the random part after the time. Two run
#: ids hardly ever begin with the same text up to this character.
_TIME_OF_RUN_ID = re.compile(r"-\d{8}-\d{6}-[0-9a-f]")


def find_local_run(name: str) -> RunPlace | None:
    """Return the directory of a run with an attempt on this machine, or None.

    The Prefect server is not asked, so the runs of other machines are unknown. A name without the
    time of the run could mean a run of another machine, and is therefore not accepted. `latest` is
    accepted only if no server is configured.

    Args:
        name: Id of the run, or a beginning of the run id that contains the time of the run, or
            `latest`.
    """
    run_ids = list_local_run_ids()
    if name == "latest":
        name = "" if may_have_server() else _find_latest(run_ids)
    if name not in run_ids:
        if not _TIME_OF_RUN_ID.search(name):
            return None
        run_ids = [run_id for run_id in run_ids if run_id.startswith(name)]
        if len(run_ids) != 1:
            return None
        name = run_ids[0]
    place = RunPlace.of(name)
    return place if list_attempts(place) else None


def _find_latest(run_ids: Iterable[str]) -> str:
    """Return the id of the run that started last, or an empty string if no run has a record."""
    records = [record for record in map(read_local_record, run_ids) if record is not None]
    return max(records, key=lambda record: record.started_at).run_id if records else ""


def list_local_run_ids() -> list[str]:
    """Return the ids of the runs that have a directory on this machine, in any order.

    Raises:
        PermissionError: The directory of the runs belongs to another user.
    """
    with suppress(FileNotFoundError):
        return os.listdir(muster_home() / "runs")
    return []


def list_attempts(place: RunPlace) -> list[int]:
    """Return the sorted numbers of the attempts that have a directory on this machine."""
    names = (path.name.removeprefix("attempt-") for path in place.directory.glob("attempt-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_local_record(run_id: str) -> RunJson | None:
    """Return the content of a run's `run.json` on this machine, or None if it cannot be read."""
    with suppress(OSError, ValueError):
        return import_run_json().read(RunPlace.of(run_id).record)
    return None


@cache
def import_run_json() -> type[RunJson]:
    """Import and return the class `RunJson`.

    The import takes long, and `muster logs` often works without the class. So call this function
    only if the class is needed.

    The module `tasks.client` is an exception: it calls this function during its own import.
    Otherwise, a later import could use a package of the user's project that has the name `tasks`.
    """
    from tasks.record.run_json import RunJson

    return RunJson
