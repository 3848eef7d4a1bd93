"""The upkeep process of a host: `python -m deployments.upkeep`.

Every minute, the process finishes the runs of this host whose flow process is gone: it ends their
leftover processes and records their final state. It also serves the flows of `SERVED`, each as
`<flow>/<host>`, on the Prefect server of PREFECT_API_URL. Every host that starts runs needs one
upkeep process.

Do not serve a flow here that waits for days. Prefect's runner ends all its flow runs when it stops,
and also if the Prefect server fails to answer several times.
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
from tasks.server.flow_runs import make_context_thread, read_listed_clusters
from tasks.spec.own_settings import InvalidVariable, require_valid_settings
from tasks.spec.ownership import UntrustedPath
from tasks.upkeep.reconcile import publish, reconcile_every_minute, reconcile_host

#: Pause, in seconds, between an error of Prefect's runner and the next start of the runner.
_RETRY_AFTER_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A maintenance flow of this host that runs on a schedule."""

    flow: Flow[..., Any]
    #: Description of the flow's deployment in the Prefect UI.
    description: str
    #: Seconds between the starts of two flow runs. If a flow run takes longer, two flow runs
    #: overlap.
    interval_s: int


SERVED = (
    Served(
        flow=reconcile,
        description="Cleans up after runs of this host whose flow process has died. Muster's "
        "upkeep process does the same every minute, without a flow run.",
        # One flow run per hour is enough, because the upkeep process does the same work every
        # minute. The flow runs have two purposes: they show in the Prefect UI that the host is
        # maintained, and they do the work if the upkeep process fails.
        interval_s=3600,
    ),
    Served(
        flow=prune,
        description="Removes the files of ended runs of this host, MUSTER_PRUNE_DAYS days "
        "after the end of each run.",
        interval_s=6 * 3600,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    _parser().parse_args(arguments)
    try:
        require_valid_settings(lambda warning: print(warning, file=sys.stderr))
        keep_private()
    except (InvalidVariable, UntrustedPath) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # Prefect's runner writes files into the temporary directory of the module `tempfile`. Use a
    # private directory, which is removed at the end of this process.
    use_own_temporary_folder()
    # Clean up after killed runs now, before the first scheduled flow run. The cleanup also ends a
    # flow run of `reconcile` that a killed upkeep process was executing.
    publish(reconcile_host())
    make_context_thread("agents", make_ready).start()
    with reconcile_every_minute():
        while True:
            try:
                serve()
                return 0
            except Exception as error:
                # Prefect's runner ends with an error if the server fails to answer several times.
                # Start the runner again after a pause.
                _log.warning(
                    "Muster could not serve the flows, and tries again in %g s: %r",
                    _RETRY_AFTER_S,
                    error,
                )
                time.sleep(_RETRY_AFTER_S)


def make_ready() -> None:
    """Start Muster's agent in advance on the nodes of all Ray clusters that the work pool lists.

    Later requests to these nodes are then fast.
    """
    clusters = read_listed_clusters(PREFECT_API_URL.value())
    add_listed_clusters(clusters)
    addresses = {
        cluster["address"]
        for cluster in clusters
        if isinstance(cluster, dict) and "address" in cluster
    }
    for address in addresses:
        asyncio.run(make_nodes_ready(str(address)))


def deployment_options(client: SyncPrefectClient, served: Served, host: str) -> dict[str, Any]:
    """Return the schedule, tags and description of a served flow's deployment.

    At each start of this process, Prefect replaces the whole deployment. To keep changes that a
    user made in the UI, the function returns the values of the existing deployment.

    Args:
        client: Client of the Prefect server.
        served: The flow.
        host: Name of this host, which is also the name of the deployment.
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
            schedule=schedule.schedule,
            active=schedule.active,
            parameters=schedule.parameters,
            slug=schedule.slug,
        )
        for schedule in existing.schedules
    ]
    return {**kept, "schedules": schedules}


def serve() -> None:
    """Serve this host's maintenance flows until SIGINT or SIGTERM stops this process."""
    host = host_name()
    # Limit the number of simultaneous flow runs in this process: one for each flow, and one more in
    # case a flow is slow. Do not use a concurrency limit of the deployment, because Prefect's
    # server never frees the slots of a killed process.
    runner = Runner(name=host, pause_on_shutdown=True, limit=len(SERVED) + 1)
    with get_client(sync_client=True) as client:
        for served in SERVED:
            name = served.flow.name
            options = deployment_options(client, served, host)
            runner.add_flow(served.flow, name=host, **options)
            print(f"Your flow {name!r} is being served as {name}/{host}", flush=True)
    # After Ctrl-C, end the process without a traceback. SIGTERM ends the process in the same way.
    with suppress(KeyboardInterrupt):
        asyncio.run(runner.start())


def _parser() -> argparse.ArgumentParser:
    flows = "; ".join(
        f"`{served.flow.name}/<host>`, every {served.interval_s} s "
        f"({served.description.rstrip('.')})"
        for served in SERVED
    )
    return argparse.ArgumentParser(
        prog="python -m deployments.upkeep",
        description="Maintain this host: every minute, clean up after runs whose flow "
        "process (the process of the Prefect flow run) has died. Start this "
        "program once on each host that starts runs. The program also serves "
        f"deployments on the Prefect server of PREFECT_API_URL: {flows}. If the "
        "server does not answer, the program waits.",
        epilog="Exit: 0 the program was ended by SIGINT or SIGTERM; 2 the program takes no "
        "arguments but got one, or another user has write permission in MUSTER_HOME.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
