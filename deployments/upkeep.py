"""What keeps a host true: `python -m deployments.upkeep` finishes the runs whose process is gone,
each minute, and serves the flows of SERVED, each as `<flow>/<host>`, on the Prefect server of
PREFECT_API_URL, until this process is ended.

One for each host on which runs are started. What waits for days does not belong here: Prefect's
runner ends all that it runs when it stops, and when its server has not answered a few times.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.runner import Runner
from prefect.settings import PREFECT_API_URL

from flows.prune import prune
from flows.reconcile import reconcile
from tasks.processes.identity import host_name
from tasks.processes.temporary import use_own_temporary_folder
from tasks.ray.dashboard import add_listed_clusters
from tasks.ray.nodes import make_nodes_ready
from tasks.record.places import keep_private
from tasks.server.deployments import find_deployment
from tasks.server.flow_runs import listed_clusters, thread_here
from tasks.spec.ownership import UntrustedPath
from tasks.upkeep.reconcile import publish, reconcile_every_minute, reconcile_host

_AGAIN_AFTER_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A flow that looks after this host, again and again."""

    flow: Flow[..., Any]
    description: str
    #: Seconds from one run to the next. A flow that takes longer is run twice at once.
    interval_s: int


SERVED = (
    Served(
        flow=reconcile,
        description="Finishes the runs of this host whose process is gone; the upkeep does so each "
        "minute by itself, without a flow run.",
        # Shows that the host is looked after, and works where the upkeep's own looks do not.
        interval_s=3600,
    ),
    Served(
        flow=prune,
        description="Removes what ended runs of this host have left; MUSTER_PRUNE_DAYS says when.",
        interval_s=6 * 3600,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    _parser().parse_args(arguments)
    try:
        keep_private()
    except UntrustedPath as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # Prefect's runner keeps its files where `tempfile` does.
    use_own_temporary_folder()
    # Before the first scheduled one: what was lost together with this process's predecessor may be
    # a flow run of `reconcile` itself.
    publish(reconcile_host())
    thread_here("agents", make_ready).start()
    with reconcile_every_minute():
        while True:
            try:
                serve()
                return 0
            except Exception as error:
                # Prefect's runner gives up when its server has not answered a few times.
                _log.warning("served no more, and again soon: %r", error)
                time.sleep(_AGAIN_AFTER_S)


def make_ready() -> None:
    """Before the first job ends, the nodes of the listed Ray clusters are ready to be asked."""
    listed = listed_clusters(PREFECT_API_URL.value())
    add_listed_clusters(listed)
    for address in {one["address"] for one in listed if isinstance(one, dict) and "address" in one}:
        asyncio.run(make_nodes_ready(str(address)))


def deployment_options(client: SyncPrefectClient, served: Served, host: str) -> dict[str, Any]:
    """Return the schedule, tags and description of a served flow's deployment.

    Prefect replaces the whole deployment at each start of this process. So what a person changed of
    these in the UI is read from the server and given to it again.
    """
    existing = find_deployment(client, f"{served.flow.name}/{host}")
    if existing is None:
        return {
            "interval": served.interval_s,
            "tags": ["upkeep"],
            "description": served.description,
        }
    kept = {"tags": existing.tags, "description": existing.description}
    if not existing.schedules:
        return {**kept, "interval": served.interval_s}
    schedules = [
        DeploymentScheduleCreate(
            schedule=one.schedule, active=one.active, parameters=one.parameters, slug=one.slug
        )
        for one in existing.schedules
    ]
    return {**kept, "schedules": schedules}


def serve() -> None:
    """Returns: when this process is to end."""
    host = host_name()
    # Kept by this process: one run of each, and room for the next one's while one of them is slow.
    # A limit of the deployment's own is kept by the server, which never gives back what was held
    # when it was killed.
    runner = Runner(name=host, pause_on_shutdown=True, limit=len(SERVED) + 1)
    with get_client(sync_client=True) as client:
        for served in SERVED:
            name = served.flow.name
            options = deployment_options(client, served, host)
            runner.add_flow(served.flow, name=host, **options)
            print(f"Your flow {name!r} is being served as {name}/{host}", flush=True)
    # By Ctrl-C, as by SIGTERM.
    with suppress(KeyboardInterrupt):
        asyncio.run(runner.start())


def _parser() -> argparse.ArgumentParser:
    flows = "; ".join(
        f"`{one.flow.name}/<host>` each {one.interval_s} s ({one.description.rstrip('.')})"
        for one in SERVED
    )
    return argparse.ArgumentParser(
        prog="python -m deployments.upkeep",
        description="Keep this host true until this process is ended: each minute it finishes the "
        "runs whose process is gone. It serves flows on the Prefect server of PREFECT_API_URL: "
        f"{flows}. One for each host on which runs are started; it waits for a server that is "
        "away.",
        epilog="Exit: 0 ended by SIGINT or SIGTERM; 2 it takes no arguments, or another user may "
        "write in MUSTER_HOME.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
