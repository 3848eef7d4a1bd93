"""Set up a Prefect server for Muster before a worker starts.

    python -m deployments.stack.setup

creates Muster's work pools, automations and deployments on the Prefect server of PREFECT_API_URL.
The program also finishes runs of this host whose process was killed: it ends their leftover
processes and records their final states. The program can be run again at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

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
from tasks.queue.nodes import NoCapacity, read_local_devices
from tasks.queue.pool_copies import PoolCopy, is_empty, parse_copy, variable_name
from tasks.queue.settings import TableNode, settings_of, with_settings
from tasks.queue.worker import GangWorker
from tasks.ray.dashboard import ListedCluster
from tasks.show.output import guard_output
from tasks.spec.errors import MusterError
from tasks.upkeep.reconcile import publish, reconcile_host

#: Concurrency limit of a new work pool `gang`: largest number of runs at the same time.
POOL_LIMIT = 8
#: Priority of each work queue of the work pool `gang`; 1 is the highest priority. Prefect itself
#: creates the work queue `default`.
QUEUES = {"urgent": 1, "idle": 3}
#: Name of the flow that executes runs, and name of the flow that executes pipelines.
_TRAIN = "train"
_PIPELINE = "pipeline"
#: Flows whose only parameter is a spec. Every deployment of these flows contains a spec.
_SPEC_FLOWS = (_TRAIN, _PIPELINE)


class WrongPool(Exception):
    """A work pool with the name `gang` exists, but has another type than Muster's work pools."""


def ensure_pool(client: SyncPrefectClient) -> None:
    """Create the work pool `gang` with its work queues, or update the existing work pool.

    The settings then list this machine's GPUs, for runs without Ray, and the stack's Ray cluster.
    All other settings of an existing work pool stay unchanged. A deleted work pool gets its former
    settings back.

    Raises:
        WrongPool: A work pool with this name and another type exists.
    """
    copy = parse_copy(client.read_variable_by_name(variable_name(POOL)))
    template = GangWorker.get_default_base_job_template()
    contents = _make_contents(copy, template).model_dump(exclude_unset=True)
    try:
        client.create_work_pool(WorkPoolCreate(name=POOL, type=TYPE, **contents))
        is_restored = copy is not None
    except ObjectAlreadyExists:
        existing_pool = client.read_work_pool(POOL)
        if existing_pool.type != TYPE:
            raise WrongPool(
                f"The work pool {POOL} is of the type {existing_pool.type}, whose workers ignore "
                f"the queue. Delete the work pool, then try again: prefect work-pool delete {POOL}"
            ) from None
        is_restored = is_empty(existing_pool)
        if is_restored:
            update = _make_contents(copy, existing_pool.base_job_template)
            client.update_work_pool(POOL, update)
        else:
            print(f"The work pool {POOL} already exists and was not changed.", flush=True)
    if is_restored:
        print(f"The work pool {POOL} was deleted. Muster has set it up again.", flush=True)

    _update_settings(client, _read_local_node())

    existing_queues = {queue.name for queue in client.read_work_queues(work_pool_name=POOL)}
    for name, priority in QUEUES.items():
        if name not in existing_queues:
            client.create_work_queue(name=name, priority=priority, work_pool_name=POOL)


def _make_contents(copy: PoolCopy | None, template: Mapping[str, Any]) -> WorkPoolUpdate:
    """Return the settings of a new work pool `gang`.

    Args:
        copy: Copy of the settings of a deleted pool with this name. None for the default settings.
        template: Base job template of the work pool, without settings of the queue.
    """
    if copy is not None:
        return copy.fill_in(template)
    return WorkPoolUpdate(
        # The description is plain text, because the Prefect UI renders no links here.
        description="Training runs of Muster's flow `train`. They start in the order of the "
        "queue, each when all GPUs that it needs are free. The concurrency limit is the largest "
        f"number of runs at once. The page {QUEUE_PAGE} of this server (artifact gang-queue) "
        f"shows the queue, and {NODES_PAGE} shows the nodes.",
        concurrency_limit=POOL_LIMIT,
        base_job_template=dict(template),
    )


def _read_local_node() -> TableNode | None:
    """Return this machine with its GPUs, or None if it has no usable GPU.

    The GPUs are those that NVML shows, or those of the variable MUSTER_GPUS.
    """
    try:
        gpus = len(asyncio.run(read_local_devices()).indices)
    except NoCapacity as error:
        print(
            f"Muster did not add this machine to the nodes of the work pool {POOL}, because Muster "
            f"could not count the GPUs of this machine: {error}",
            flush=True,
        )
        return None
    return TableNode(name=host_name(), gpus=gpus) if gpus else None


def _update_settings(client: SyncPrefectClient, local_node: TableNode | None) -> None:
    """Write this machine's GPUs and the stack's Ray cluster to the settings of the work pool.

    Args:
        client: Client of the Prefect server.
        local_node: This machine with its GPUs. If None, or if the settings already list this
            machine, the nodes in the settings stay unchanged.
    """
    template = client.read_work_pool(POOL).base_job_template
    settings = settings_of(template)

    changes: dict[str, object] = {}
    if local_node is not None and local_node.name not in {node.name for node in settings.nodes}:
        changes["nodes"] = (*settings.nodes, local_node)
    address = os.environ.get(RAY_VARIABLE, "")
    if address and address not in {cluster.address for cluster in settings.clusters}:
        # Remove the clusters with a loopback address from the settings. These clusters belong to
        # earlier stacks on this machine, which no longer run.
        other_clusters = (
            cluster for cluster in settings.clusters if "//127.0.0.1:" not in cluster.address
        )
        changes["clusters"] = (*other_clusters, ListedCluster(address=address))

    if changes:
        new_template = with_settings(template, settings.model_copy(update=changes))
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=new_template))


def ensure_pipelines_pool(client: SyncPrefectClient) -> None:
    """Create the work pool for pipelines. An existing work pool stays unchanged."""
    pool = WorkPoolCreate(
        name=PIPELINES_POOL,
        type=ProcessWorker.type,
        description="Flow runs of Muster's pipelines. Each pipeline has its own process. "
        "This pool needs no concurrency limit: the training runs of a pipeline "
        f"wait in the queue of the pool {POOL}.",
        base_job_template=ProcessWorker.get_default_base_job_template(),
    )
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(pool)


def ensure_pools_of_deployments(client: SyncPrefectClient) -> None:
    """Assign a work pool to each deployment whose work pool was deleted.

    Deployments of the flow `train` get the pool POOL, and those of `pipeline` get PIPELINES_POOL.

    If a work pool is deleted, its deployments remain on the server, but have no work pool. So no
    worker starts their runs. Deployments without pull steps are not changed: a process serves them,
    so they need no pool.
    """
    for flow, pool in ((_TRAIN, POOL), (_PIPELINE, PIPELINES_POOL)):
        name_filter = FlowFilter(name=FlowFilterName(any_=[flow]))
        for deployment in client.read_deployments(flow_filter=name_filter):
            if deployment.work_pool_name is None and deployment.pull_steps is not None:
                client.update_deployment(deployment.id, DeploymentUpdate(work_pool_name=pool))
                print(
                    f"The deployment {flow}/{deployment.name} no longer had a work pool. Muster "
                    f"moved the deployment back to the work pool {pool}.",
                    flush=True,
                )


def ensure_quick_runs(client: SyncPrefectClient) -> None:
    """Let the button *Quick run* in the Prefect UI start a run without a form.

    The UI opens a form with some hundred fields if the flow requires a spec, even if the deployment
    already has a spec. So if a deployment has values for all required parameters, this function
    marks the parameters as optional.
    """
    spec_flows = FlowFilter(name=FlowFilterName(any_=list(_SPEC_FLOWS)))
    for deployment in client.read_deployments(flow_filter=spec_flows):
        schema = deployment.parameter_openapi_schema or {}
        required = set(schema.get("required", ()))
        if required and required <= set(deployment.parameters):
            update = DeploymentUpdate(parameter_openapi_schema={**schema, "required": []})
            client.update_deployment(deployment.id, update)


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
    # Record the end of the runs of a killed stack. Otherwise these runs would still count against
    # the concurrency limit of the work pool.
    publish(reconcile_host())
    # Change to the project's folder, because the paths in the project file are relative to the
    # working directory.
    os.chdir(ROOT)
    with get_client(sync_client=True) as client:
        try:
            deploy_project(client, PROJECT_FILE)
        except MusterError as error:
            print(error, file=sys.stderr)
            return 1
        ensure_pools_of_deployments(client)
        ensure_quick_runs(client)
    print(f"{SET_UP} work pool {POOL}, deployments of {PROJECT_FILE}")
    return 0


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m deployments.stack.setup",
        description="Create the work pools, the automations and the deployments of "
        "prefect.yaml on the Prefect server of PREFECT_API_URL. You may repeat "
        "the command: it updates the code and specs of the deployments, and "
        "keeps your own changes.",
        epilog="Exit: 0 the setup is done; 1 the setup failed for a reason that was printed; 2 "
        "the program takes no arguments but got one.",
    )


if __name__ == "__main__":
    with guard_output():
        raise SystemExit(main())
