"""Check before a pipeline starts that the nodes of the queue have the resources of each stage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from prefect.settings import PREFECT_API_URL

from tasks.pipeline.stage_specs import read_specs_of_deployments
from tasks.queue.command import connected
from tasks.queue.grants import SchedulerProcess
from tasks.queue.ledger import LedgerReader
from tasks.queue.nodes import Capacity, explain_infeasible
from tasks.queue.packing import Demand
from tasks.queue.scheduling_pass import QueueReader
from tasks.ray.dashboard import Dashboard, Denied, LiveNode, NoAnswer
from tasks.ray.usage import Cluster
from tasks.server.flow_runs import connect_to_server
from tasks.server.server import read_secrets
from tasks.spec.errors import Fault
from tasks.spec.evaluations import find_place
from tasks.spec.formatting import format_count, join_commas
from tasks.spec.pipeline import PipelineSpec, Stage, add_deployment_specs
from tasks.spec.run import RunSpec

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCluster:
    """A cluster on which the queue may start runs, with its nodes."""

    #: The nodes and GPUs that the scheduler has found. None if the cluster does not respond.
    cluster: Cluster | None
    #: The nodes that the Ray dashboard lists. None if unknown, or if the cluster has no Ray.
    ray_nodes: Sequence[LiveNode] | None = None
    #: True if the autoscaler of the cluster may add nodes.
    may_grow: bool = False


def check_pipeline(pipeline: PipelineSpec) -> tuple[Fault, ...]:
    """Check a pipeline. If a Prefect server is configured, use the server for the check.

    The run specs of deployments and the Prefect Secret blocks are checked as well.

    Returns:
        A fault for each stage that is too large for its cluster.

    Raises:
        InvalidSpec: A stage is invalid.
        CannotBegin: A deployment does not exist.
    """
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return ()
    with connect_to_server(api_url) as client:
        specs = read_specs_of_deployments(client, pipeline)
        pipeline = add_deployment_specs(pipeline, specs)
        for stage in pipeline.stages:
            read_secrets(client, _parse_first_unit(pipeline, stage))
    return find_unfit_stages(pipeline)


def find_unfit_stages(pipeline: PipelineSpec) -> tuple[Fault, ...]:
    """Return a fault for each stage that is too large for its cluster.

    Args:
        pipeline: A valid pipeline. Each stage that runs a training must contain a run spec.

    Raises:
        NoServer: The Prefect server does not answer.
    """
    needs_nodes = any(
        spec.gang is not None or spec.ray is not None
        for spec in (_parse_first_unit(pipeline, stage) for stage in pipeline.stages)
    )
    if not needs_nodes or not PREFECT_API_URL.value():
        return ()
    return tuple(compare_stages(pipeline, asyncio.run(_read_clusters())))


def find_unfit_evaluations(spec: RunSpec) -> tuple[Fault, ...]:
    """Return a fault for each evaluation that cannot run on the nodes of the queue.

    Args:
        spec: A valid run spec.

    Raises:
        NoServer: The Prefect server does not answer.
    """
    if not spec.evals:
        return ()
    faults = find_unfit_stages(build_pipeline_of_evaluations(spec))
    return tuple(rename_stage_path(fault, [*spec.evals]) for fault in faults)


def build_pipeline_of_evaluations(spec: RunSpec) -> PipelineSpec:
    """Return a pipeline whose stages need the same resources as the evaluations of a run.

    The pipeline is never started. It is only compared with the nodes of the queue.
    """
    written = spec.written()
    stages = [
        {
            "name": name,
            # A stage must have a command. Use a command without effect, because the command of the
            # evaluation may contain placeholders that have no value here.
            "command": ["true"],
            "on": find_place(written, evaluation),
            "resources": evaluation.get("resources", {}),
        }
        for name, evaluation in written["evals"].items()
    ]
    return PipelineSpec.model_validate(
        {"name": spec.name, "ray": written.get("ray"), "stages": stages}
    )


def rename_stage_path(fault: Fault, names: Sequence[str]) -> Fault:
    """Return a fault in which the path of a stage is replaced by the path of an evaluation.

    The evaluations of a run are checked as if they were the stages of a pipeline. But the spec of
    the run does not contain paths such as `stages.INDEX`.

    Args:
        fault: The fault, with a path such as `stages.0.resources.gpus`. The result has a path such
            as `evals.math.resources.gpus`.
        names: Names of the evaluations, in the order of the stages.
    """
    _, index, rest = fault.path.split(".", 2)
    return replace(fault, path=f"evals.{names[int(index)]}.{rest}")


async def _read_clusters() -> dict[str, KnownCluster]:
    """Return the clusters on which the queue may start runs, by Ray address.

    The nodes without Ray form one cluster, whose key is an empty string.
    """
    async with connected() as client:
        reader = QueueReader(client, Capacity(), SchedulerProcess.current(), LedgerReader(client))
        scheduling_pass = await reader.run_pass()
    known: dict[str, KnownCluster] = {}
    for address in scheduling_pass.cluster_errors:
        known[address] = KnownCluster(cluster=None)
    for address, cluster in scheduling_pass.clusters.items():
        rules = scheduling_pass.rules.get(address)
        nodes: Sequence[LiveNode] | None = None
        if address:
            async with aclosing(Dashboard(address)) as dashboard:
                try:
                    nodes = await dashboard.nodes()
                except (NoAnswer, Denied):
                    # The nodes are unknown. `compare_stages` then checks only the GPUs, not the
                    # CPUs, the memory and the labels.
                    nodes = None
        known[address] = KnownCluster(
            cluster=cluster,
            ray_nodes=nodes,
            may_grow=bool(rules is not None and rules.max_nodes(address)),
        )
    return known


def _parse_first_unit(pipeline: PipelineSpec, stage: Stage) -> RunSpec:
    """Return the run spec of a stage.

    For a stage with a matrix, return the run spec of the first combination of values.
    """
    spec = pipeline.fill_run_spec(stage.units[0], lambda _stage, _key: "stage")
    return RunSpec.model_validate(spec)


def compare_stages(pipeline: PipelineSpec, clusters: Mapping[str, KnownCluster]) -> Iterator[Fault]:
    """Yield a fault for each stage that is too large for its cluster.

    Such a stage needs more GPUs, CPUs or memory than the nodes have, or a label that no node has.

    Args:
        pipeline: The pipeline. Each stage that runs a training must contain a run spec.
        clusters: Mapping from Ray addresses to the clusters of the queue. The nodes without Ray
            form one cluster, whose key is an empty string.
    """
    addresses = [address for address in clusters if address]
    for index, stage in enumerate(pipeline.stages):
        spec = _parse_first_unit(pipeline, stage)
        path = f"stages.{index}"
        address = ""
        if spec.ray is not None:
            address = (spec.ray.address or "").rstrip("/")
            if not address and len(addresses) != 1:
                listed = join_commas(addresses) or "none"
                yield Fault(
                    path=f"{path}.on" if stage.is_step else f"{path}.spec.ray.address",
                    problem="the address of the Ray cluster is missing. Without an address, the "
                    "queue must list exactly one cluster, but the queue lists "
                    f"{format_count(len(addresses), 'cluster')}: {listed}",
                    remedy="write `ray: {address: ADDRESS}` in the pipeline"
                    + (", or `on: host` in the step" if stage.is_step else ""),
                )
                continue
            address = address or addresses[0]
        known = clusters.get(address)
        if known is None or known.may_grow:
            continue
        gang_path = f"{path}.resources.gpus" if stage.is_step else f"{path}.spec.gang"
        if spec.gang is not None and known.cluster is not None:
            demand = Demand(
                **spec.gang.model_dump(include={"nodes", "gpus_per_node", "cpus_per_gpu"})
            )
            if reason := explain_infeasible(demand, known.cluster):
                yield Fault(path=gang_path, problem=reason)
                continue
        if spec.ray is not None and known.ray_nodes is not None:
            yield from _compare_nodes(spec, stage, path, known.ray_nodes)


def _compare_nodes(
    spec: RunSpec, stage: Stage, path: str, nodes: Sequence[LiveNode]
) -> Iterator[Fault]:
    """Yield a fault for each need of a stage (CPUs, memory, a label) that no node satisfies.

    Each need is checked separately. There is no fault if different nodes satisfy different needs.

    Args:
        spec: Run spec of the stage.
        stage: The stage. If the stage is a training, nothing is checked.
        path: Dotted path of the stage in the pipeline.
        nodes: The living nodes of the Ray cluster.
    """
    if not stage.is_step:
        return
    assert spec.ray is not None
    cpus = spec.ray.entrypoint_cpus or 0
    memory_gib = spec.ray.entrypoint_memory_gib or 0
    most_cpus = max((node.resources_total.get("CPU", 0) for node in nodes), default=0)
    most_gib = max((node.resources_total.get("memory", 0) for node in nodes), default=0) / _GIB
    if cpus > most_cpus:
        problem = f"the step needs {cpus:g} CPUs, but no node has more than {most_cpus:g} CPUs"
        yield Fault(path=f"{path}.resources.cpus", problem=problem, remedy="ask for less")
    if memory_gib > most_gib:
        problem = f"the step needs {memory_gib:g} GiB, but no node has more than {most_gib:.1f} GiB"
        yield Fault(path=f"{path}.resources.memory_gib", problem=problem, remedy="ask for less")
    for label, value in stage.resources.labels.items():
        # Check only plain values, which must be equal to the label of a node. Expressions of Ray,
        # such as `!head` or `in(a,b)`, are not checked here.
        values = {node.labels.get(label) for node in nodes}
        if value not in values and not value.startswith(("!", "in(")):
            listed = join_commas(sorted(filter(None, values))) or "none"
            problem = f"no node has the label {label}: {value}. Values that nodes have: {listed}"
            yield Fault(path=f"{path}.resources.labels.{label}", problem=problem)
