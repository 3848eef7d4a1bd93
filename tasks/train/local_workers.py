"""Refuse a run with missing files, if only workers on this machine could start the run."""

from __future__ import annotations

from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import WorkerStatus

from tasks.processes.identity import host_name
from tasks.queue.ledger import GANG_POOLS
from tasks.server.flow_runs import parse_worker_host
from tasks.spec.errors import InvalidSpec
from tasks.spec.programs import add_active_environment
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.train.interpreters import find_missing_files


def has_only_local_workers(client: SyncPrefectClient) -> bool:
    """Return True if the server has workers of Muster's pools, all of them on this machine.

    Args:
        client: Client of the Prefect server.
    """
    hosts = {
        parse_worker_host(worker.name)
        for pool in client.read_work_pools(work_pool_filter=GANG_POOLS)
        for worker in client.read_workers_for_work_pool(pool.name)
        if worker.status is WorkerStatus.ONLINE
    }
    return hosts == {host_name()}


def require_files(client: SyncPrefectClient, spec: RunSpec, root: Path) -> None:
    """Raise an error if the run of a spec cannot start because files or programs are missing.

    If a worker on another host could start the run, nothing is checked, because that host may have
    the files. The same holds for a run of code that was submitted earlier, because the files of the
    project may have changed since then.

    Args:
        client: Client of the Prefect server.
        spec: The run spec.
        root: Root folder of the spec's project.

    Raises:
        InvalidSpec: The error lists the missing files and programs.
    """
    if spec.code not in (None, LIVE_CODE):
        return
    faults = find_missing_files(add_active_environment(spec, root), root)
    if faults and has_only_local_workers(client):
        raise InvalidSpec(faults, source=f"the spec of run {spec.name!r}")
