"""What a Prefect server needs before a worker starts: the work pool, every deployment and
automation, and no run that only its record says is alive.

`python -m deployments.stack.setup` does it on the server of PREFECT_API_URL, any number of times.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker

import tasks.server  # noqa: F401  (its import guards Prefect's clients)
from deployments.automations.apply import main as apply_automations
from deployments.stack.deploying import deploy_project
from deployments.stack.env import (
    NODES_PAGE,
    PIPELINES_POOL,
    POOL,
    PROJECT_FILE,
    QUEUE_PAGE,
    RAY_VARIABLE,
    ROOT,
    SET_UP,
)
from tasks.processes.identity import host_name
from tasks.queue.ledger import TYPE
from tasks.queue.nodes import devices_here
from tasks.queue.settings import TableNode, settings_of, with_settings
from tasks.queue.worker import GangWorker
from tasks.ray.dashboard import ListedCluster
from tasks.show.output import guard_output
from tasks.spec.errors import MusterError
from tasks.upkeep.reconcile import publish, reconcile_host

#: How many runs the pool lets run at once, until somebody changes it.
POOL_LIMIT = 8
#: The queues of the pool, and the priority of each: 1 comes first. Prefect makes `default` itself.
QUEUES = {"urgent": 1, "idle": 3}
#: The flows whose one parameter is a spec, which each deployment of them has.
_FLOWS_OF_SPECS = ("train", "pipeline")


class WrongPool(Exception):
    """There is a work pool of the name, and of another type."""


def ensure_pool(client: SyncPrefectClient) -> None:
    """The work pool is there, with its queues, and knows the stack's Ray cluster. All else that
    was there before is left as it is.

    Raises: WrongPool.
    """
    pool = WorkPoolCreate(
        name=POOL,
        type=TYPE,
        # The UI shows it as plain text, without links.
        description="Runs of the flow train, each when its whole gang of GPUs is free, in order; "
        "at most so many at once as the concurrency limit. Who waits for what is on the page "
        f"{QUEUE_PAGE} of this server, the artifact gang-queue; the nodes are on {NODES_PAGE}.",
        base_job_template=GangWorker.get_default_base_job_template(),
        concurrency_limit=POOL_LIMIT,
    )
    table: tuple[TableNode, ...] = ()
    try:
        client.create_work_pool(pool)
        # Runs of processes find this machine's GPUs; on a cluster, Ray says which there are.
        gpus = len(asyncio.run(devices_here()).indices)
        table = (TableNode(name=host_name(), gpus=gpus),) if gpus else ()
    except ObjectAlreadyExists:
        print(f"The work pool {POOL} is there already, and left as it is.", flush=True)
        if (found := client.read_work_pool(POOL).type) != TYPE:
            raise WrongPool(
                f"The work pool {POOL} is of the type {found}, whose workers start runs past the "
                f"queue. Delete it, then try again: prefect work-pool delete {POOL}"
            ) from None
    there = client.read_work_pool(POOL)
    changes: dict[str, object] = {"nodes": table} if table else {}
    settings = settings_of(there.base_job_template)
    address = os.environ.get(RAY_VARIABLE, "")
    if address and address not in {one.address for one in settings.clusters}:
        # Each stack may have another port; a cluster on loopback was that of an earlier one.
        others = (one for one in settings.clusters if "//127.0.0.1:" not in one.address)
        changes["clusters"] = (*others, ListedCluster(address=address))
    if changes:
        template = with_settings(there.base_job_template, settings.model_copy(update=changes))
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
    known = {queue.name for queue in client.read_work_queues(work_pool_name=POOL)}
    for name, priority in QUEUES.items():
        if name not in known:
            client.create_work_queue(name=name, priority=priority, work_pool_name=POOL)


def ensure_pipelines_pool(client: SyncPrefectClient) -> None:
    """The work pool of pipelines is there; one that was there before is left as it is."""
    pool = WorkPoolCreate(
        name=PIPELINES_POOL,
        type=ProcessWorker.type,
        description="Pipelines of runs. Each waits here, in a process of its own, while its runs "
        f"go through the pool {POOL}; so this one has no limit.",
        base_job_template=ProcessWorker.get_default_base_job_template(),
    )
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(pool)


def ensure_quick_runs(client: SyncPrefectClient) -> None:
    """*Quick run* in the UI starts a run at once, where a deployment has all parameters' values.

    The UI asks for what the flow's signature requires, whether it has a value or not: by a form
    of some hundred fields here.
    """
    ours = FlowFilter(name=FlowFilterName(any_=list(_FLOWS_OF_SPECS)))
    for deployment in client.read_deployments(flow_filter=ours):
        schema = deployment.parameter_openapi_schema or {}
        required = set(schema.get("required", ()))
        if required and required <= set(deployment.parameters):
            quick = DeploymentUpdate(parameter_openapi_schema={**schema, "required": []})
            client.update_deployment(deployment.id, quick)


def main(arguments: Sequence[str] | None = None) -> int:
    _parser().parse_args(arguments)
    try:
        with get_client(sync_client=True) as client:
            ensure_pool(client)
            ensure_pipelines_pool(client)
    except WrongPool as error:
        print(error, file=sys.stderr)
        return 1
    if apply_automations([]) != 0:
        return 1
    # What an earlier stack was lost with would hold its places in the pool for ever.
    publish(reconcile_host())
    # The paths in the project file start from the working directory.
    os.chdir(ROOT)
    with get_client(sync_client=True) as client:
        try:
            deploy_project(client, PROJECT_FILE)
        except MusterError as error:
            print(error, file=sys.stderr)
            return 1
        ensure_quick_runs(client)
    print(f"{SET_UP} work pool {POOL}, deployments of {PROJECT_FILE}")
    return 0


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m deployments.stack.setup",
        description="Set the Prefect server of PREFECT_API_URL up for Muster: its work pools, the "
        "automations, every deployment of prefect.yaml. Any number of times. Changes that somebody "
        "made to pools, automations and deployments are kept; only code and specs are renewed.",
        epilog="Exit: 0 done; 1 something is in the way, or the server does not take it; 2 it "
        "takes no arguments.",
    )


if __name__ == "__main__":
    with guard_output():
        raise SystemExit(main())
