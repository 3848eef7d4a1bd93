"""Refuse a run with missing files, if only workers on this machine could start the run."""

from __future__ import annotations

from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import WorkerStatus

from tasks.processes.identity import host_name
from tasks.queue.ledger import GANG_POOLS
from tasks.server.flow_runs import parse_worker_host
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.programs import add_active_environment
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.train.interpreters import find_missing_files


def has_only_local_workers(client: SyncPrefectClient, pool_name: str | None = None) -> bool:
    """Return True if the server has workers of Muster's pools, all of them on this machine.

    Args:
        client: Client of the Prefect server.
        pool_name: Name of the work pool in which the run starts. None to consider all of Muster's
            pools. If the pool is not one of Muster's pools, the result is False.
    """
    hosts = {
        parse_worker_host(worker.name)
        for pool in client.read_work_pools(work_pool_filter=GANG_POOLS)
        if pool_name in (None, pool.name)
        for worker in client.read_workers_for_work_pool(pool.name)
        if worker.status is WorkerStatus.ONLINE
    }
    return hosts == {host_name()}


def require_files(
    client: SyncPrefectClient, spec: RunSpec, root: Path, pool_name: str | None = None
) -> None:
    """Raise an error if the run of a spec cannot start because files are missing.

    A program without a folder in its name, such as `torchrun`, is not required, because the PATH of
    the worker may differ from the PATH of this process.

    If a worker on another host could start the run, nothing is checked, because that host may have
    the files. The same holds for a run of code that was submitted earlier, because the files of the
    project may have changed since then.

    Args:
        client: Client of the Prefect server.
        spec: The run spec.
        root: Root folder of the spec's project.
        pool_name: See `has_only_local_workers`.

    Raises:
        InvalidSpec: The error lists the missing files.
    """
    if spec.code not in (None, LIVE_CODE):
        return
    faults = find_missing_files(add_active_environment(spec, root), root)
    faults = tuple(fault for fault in faults if not _is_searched_in_path(fault, spec))
    if faults and has_only_local_workers(client, pool_name):
        raise InvalidSpec(faults, source=f"the spec of run {spec.name!r}")


def _is_searched_in_path(fault: Fault, spec: RunSpec) -> bool:
    """Return True if a fault is about a program that the system searches in the folders of PATH."""
    section, _, place = fault.path.partition(".")
    name, _, key = place.rpartition(".command.")
    owners = spec.components if section == "components" else spec.evals
    owner = owners.get(name)
    command = (owner.command if owner is not None else None) or ("/",)
    return key == "0" and "/" not in command[0]
