"""A registry entry of a run whose flow process was killed, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.processes.registry import LostRun, Owner

#: A process that does not exist: its process id is larger than the largest id on Linux.
_GONE = ProcessId(pid=1 << 22, start_ticks=1, boot_id=boot_id())


def make_lost_run(
    entry: Path, flow_run_id: UUID, *, run_id: str = "a-run", **fields: Any
) -> LostRun:
    """Return a run that a worker of this host started, and whose flow process was killed.

    Args:
        entry: Directory of the run in the registry.
        flow_run_id: Id of the run's flow run. No Prefect server listens at the recorded address.
        run_id: Id of the run.
        fields: More fields of `Owner`, such as `directory`.
    """
    owner = Owner(
        run_id=run_id,
        host=host_name(),
        process=_GONE,
        flow_run_id=str(flow_run_id),
        api_url="http://127.0.0.1:9/api",
        worker=host_name(),
        **fields,
    )
    return LostRun(entry, owner)
