"""A host that is gone for good, as somebody has said: its runs are finished from another one.

Nobody can tell a host that is off from one that is only cut off, whose processes still hold their
GPUs. So nothing is concluded from silence; a host that is not even silent is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime

from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL

from tasks.processes.identity import host_name
from tasks.processes.registry import owner_of, registered_runs
from tasks.server.flow_runs import (
    SILENT_AFTER_S,
    held_flow_runs,
    host_of,
    server_now,
    talking_to,
    upkeep_of,
)
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.errors import BadArgument
from tasks.upkeep.reconcile import publish, reconcile_host
from tasks.upkeep.report import Report


def give_up_host(name: str) -> Report:
    """Finish every run that a host had, and close its record, on the Prefect server of
    PREFECT_API_URL and in this MUSTER_HOME.

    Raises: BadArgument, before anything is changed; ServerAway.
    """
    if name == host_name():
        raise BadArgument(f"{name} is this host: `muster reconcile` looks after its runs")
    api_url = PREFECT_API_URL.value()
    if not api_url:
        raise BadArgument("PREFECT_API_URL is not set: only a server knows what a host had")
    with talking_to(api_url) as client:
        _check(client, name)
    return reconcile_host(lost=name)


def _check(client: SyncPrefectClient, name: str) -> None:
    heard = dict(_heard(client, name))
    now = server_now(client) or datetime.now(UTC)
    for what, when in heard.items():
        if (age_s := (now - when).total_seconds()) < SILENT_AFTER_S:
            raise BadArgument(
                f"{what} was heard of {max(0.0, age_s):.0f} s ago, so {name} is not lost: cancel "
                f"its runs; or switch it off, and ask again after {SILENT_AFTER_S:.0f} s"
            )
    owners = filter(None, map(owner_of, registered_runs()))
    known = {owner.host for owner in owners} | {host_of(run) for run in held_flow_runs(client)}
    if not heard and name not in known:
        others = ", ".join(sorted(filter(None, known - {host_name()}))) or "no other host"
        raise BadArgument(f"nobody knows a host {name!r}; runs are on record of {others}")


def _heard(client: SyncPrefectClient, name: str) -> Iterator[tuple[str, datetime]]:
    """What runs on the host for Muster, and when the server has heard of it last."""
    for pool in client.read_work_pools():
        for worker in client.read_workers_for_work_pool(pool.name):
            if worker.name == name and worker.last_heartbeat_time is not None:
                yield f"its worker of the pool {pool.name}", worker.last_heartbeat_time
    for deployment, found in upkeep_of(client, name):
        if found.last_polled is not None:
            yield f"its upkeep (`{deployment}`)", found.last_polled


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
