"""Check a run spec without starting a run: the command `muster check`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

from prefect.settings import PREFECT_API_URL

from tasks.processes.devices import Devices
from tasks.processes.identity import host_name
from tasks.queue.command import connected
from tasks.queue.grants import SchedulerProcess
from tasks.queue.ledger import LedgerReader
from tasks.queue.nodes import NO_NODES, NO_TABLE, Capacity, explain_infeasible
from tasks.queue.packing import Demand
from tasks.queue.scheduling_pass import QueueReader
from tasks.ray.usage import Cluster
from tasks.server.flow_process import EXIT_INFEASIBLE
from tasks.server.flow_runs import connect_to_server
from tasks.server.server import hide_prefect_logs, read_secrets
from tasks.show.arguments import EXIT_DONE, EXIT_INVALID, AsJson, Overrides, SpecFile
from tasks.spec.errors import MusterError
from tasks.spec.formatting import format_count
from tasks.spec.loading import find_project_root, load_spec
from tasks.spec.pipeline import is_pipeline_file, load_pipeline
from tasks.spec.programs import Interpreter, add_active_environment
from tasks.spec.run import Gang, RunSpec
from tasks.train.interpreters import (
    component_interpreter,
    describe_interpreters,
    find_missing_files,
)
from tasks.train.local_workers import has_only_local_workers
from tasks.train.missing_modules import describe_missing_modules
from tasks.train.pipeline_check import check_pipeline, find_unfit_evaluations

#: Longest time in seconds that `muster submit` waits for information about the clusters of the
#: queue.
_CHECK_WITHIN_S = 10.0
#: Name that the output uses for the nodes in the settings of the work pools.
_NODES_OF_QUEUE = "nodes of the queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Result of the check whether a run would fit on an idle cluster."""

    #: URL of a Ray cluster, or one of the texts `nodes of the queue` and `this machine`.
    cluster: str
    #: True if the run fits. None if the cluster does not answer, so that its nodes are unknown.
    fits: bool | None
    #: Reason why the run does not fit, or why `fits` is None. Empty if the run fits.
    reason: str = ""


def check(spec: SpecFile, /, *, set: Overrides = (), json: AsJson = False) -> int:
    """Check a run spec, and show on which cluster its run would fit. Nothing is started.

    SPEC may also be the spec of a pipeline. Then all stages are checked, and their resources are
    compared with the nodes of the queue.

    Exit: 0 the spec is valid, and the run fits or its cluster is unknown; 2 the spec is invalid, or
    the run would start on this machine, which does not have a file that the run needs; 3 no cluster
    is large enough for the run, one of its evaluations or a stage.

    Args:
        json: Print the missing programs, the clusters, and the evaluations that fit on no cluster
            as JSON. For a pipeline, print the stages that fit on no cluster.
    """
    if is_pipeline_file(spec):
        return _check_pipeline(spec, set, json=json)
    root = find_project_root(spec)
    run_spec = add_active_environment(load_spec(spec, set), root)
    interpreter = component_interpreter(run_spec.env, root)
    missing = [str(fault) for fault in find_missing_files(run_spec, root)]
    fits: list[Fit] = []
    api_url = PREFECT_API_URL.value()
    hide_prefect_logs()
    # Without a server, only `muster train` can start the run, on this machine. But a run with the
    # key `gang` probably starts on another machine, whose GPUs it needs.
    runs_here = not api_url and run_spec.gang is None
    if api_url:
        with connect_to_server(api_url) as client:
            read_secrets(client, run_spec)
            runs_here = bool(missing) and has_only_local_workers(client)
    if run_spec.gang is not None:
        if run_spec.ray is None:
            fits.append(_check_this_machine(run_spec.gang))
        if api_url:
            fits += asyncio.run(_check_clusters(run_spec, run_spec.gang))
    unfit = find_unfit_evaluations(run_spec)

    if json:
        content = {
            "python": interpreter.path,
            "missing_programs": missing,
            "clusters": [asdict(fit) for fit in fits],
            "unfit_evaluations": [asdict(fault) for fault in unfit],
        }
        print(dumps(content))
    else:
        _print_result(run_spec, root, interpreter, missing, fits, runs_here=runs_here)
        for fault in unfit:
            print(f"  {fault}")
    if missing and runs_here:
        return EXIT_INVALID
    # Without a server, the nodes of the queue are unknown. In this case, do not say that the run is
    # too large.
    is_too_large = bool(api_url and fits) and all(fit.fits is False for fit in fits)
    return EXIT_INFEASIBLE if is_too_large or unfit else EXIT_DONE


def _check_pipeline(path: Path, overrides: Sequence[str], *, json: bool) -> int:
    """Check a pipeline file, print the result, and return the exit code."""
    hide_prefect_logs()
    pipeline = load_pipeline(path, overrides)
    faults = check_pipeline(pipeline)
    if json:
        print(dumps({"stages": pipeline.stage_names, "unfit": [asdict(fault) for fault in faults]}))
    else:
        print(f"The spec of the pipeline {pipeline.name} is valid.")
        for fault in faults:
            print(f"  {fault}")
        if not PREFECT_API_URL.value():
            print(
                "Muster did not check whether the pipeline fits, because no Prefect server is "
                "set. To check this, set PREFECT_API_URL.",
                file=sys.stderr,
            )
    return EXIT_INFEASIBLE if faults else EXIT_DONE


def _print_result(
    spec: RunSpec,
    root: Path,
    interpreter: Interpreter,
    missing: Sequence[str],
    fits: Sequence[Fit],
    *,
    runs_here: bool,
) -> None:
    """Print the result of a check.

    Args:
        spec: The spec, which is valid.
        root: Root folder of the project.
        interpreter: The Python interpreter that Muster has chosen for the project.
        missing: Faults about programs that do not exist on this machine.
        fits: Results for the clusters on which the run may start.
        runs_here: True if the run can only start on this machine.
    """
    if missing and runs_here:
        print(f"The run of {spec.name} cannot start on this machine.")
    else:
        print(f"The spec of {spec.name} is valid.")
    print(f"  project {root}, python {describe_interpreters(spec, root)}")
    for fault in missing:
        advice = "" if runs_here else ". Check that the host on which the run starts has the file"
        print(
            f"  this machine does not have a file that the run needs{advice}: {fault}",
            file=sys.stderr,
        )
    if missing:
        print(
            f"  Muster searches for programs in {Path(interpreter.path).parent} and in the folders "
            "of PATH.",
            file=sys.stderr,
        )
    for warning in describe_missing_modules(spec, root):
        print(f"  warning: {warning}", file=sys.stderr)
    if spec.gang is None:
        print("The run requests no GPUs, so it does not wait for GPUs of a cluster.")
    for fit in fits:
        print(f"  {fit.cluster}: {'the run fits' if fit.fits else fit.reason}")
    if spec.gang is not None and not PREFECT_API_URL.value():
        print(
            "Muster did not check whether the run fits, because no Prefect server is set. To "
            "check this, set PREFECT_API_URL.",
            file=sys.stderr,
        )


def _make_demand(gang: Gang) -> Demand:
    return Demand(**gang.model_dump(include={"nodes", "gpus_per_node", "cpus_per_gpu"}))


def _check_this_machine(gang: Gang) -> Fit:
    """Return a `Fit` that says whether this machine has enough resources for a run without Ray."""
    cluster = f"this machine, {host_name()}"
    try:
        count = len(Devices.here().indices)
    except OSError as error:
        return Fit(cluster=cluster, fits=None, reason=str(error))
    if gang.nodes == 1 and gang.gpus_per_node <= count:
        return Fit(cluster=cluster, fits=True)
    # `muster train` does not check the number of CPUs, so the message does not name CPUs.
    nodes = format_count(gang.nodes, "node")
    gpus = format_count(gang.gpus_per_node, "GPU")
    available = format_count(count, "GPU")
    reason = f"the run needs {nodes} with {gpus}, but this machine has {available}"
    return Fit(cluster=cluster, fits=False, reason=reason)


def explain_misfit(spec: RunSpec) -> str:
    """Return the reason why no cluster of the queue has enough resources for a run.

    The result is an empty string if a cluster has enough resources, or does not answer in time.
    """
    if spec.gang is None:
        return ""
    check_within_time = asyncio.wait_for(_check_clusters(spec, spec.gang), _CHECK_WITHIN_S)
    try:
        fits = asyncio.run(check_within_time)
    except (MusterError, TimeoutError):
        return ""
    is_too_large = bool(fits) and all(fit.fits is False for fit in fits)
    return fits[0].reason if is_too_large else ""


async def _check_clusters(spec: RunSpec, gang: Gang) -> list[Fit]:
    """Return a `Fit` for each cluster on which the queue may start the run.

    Raises:
        NoServer: The server does not answer.
    """
    async with connected() as client:
        reader = QueueReader(client, Capacity(), SchedulerProcess.current(), LedgerReader(client))
        scheduling_pass = await reader.run_pass()
    fits = []
    for address, cluster in sorted(scheduling_pass.clusters.items()):
        if bool(address) is not (spec.ray is not None):
            continue
        wanted = spec.ray.address if spec.ray is not None else None
        if wanted is not None and wanted.rstrip("/") != address:
            continue
        fits.append(_check_cluster(address, cluster, _make_demand(gang)))
    for address, error in sorted(scheduling_pass.cluster_errors.items()):
        if bool(address) is (spec.ray is not None) and error != NO_TABLE:
            fits.append(Fit(cluster=address or _NODES_OF_QUEUE, fits=None, reason=error))
    error_of_queue = scheduling_pass.cluster_errors.get("", NO_TABLE)
    if spec.ray is None and "" not in scheduling_pass.clusters and error_of_queue == NO_TABLE:
        # `NO_TABLE` names this machine, which may not be the machine of a worker.
        reason = f"{NO_NODES}. To add a machine with N GPUs: `muster queue set node.HOST=N`"
        fits.append(Fit(cluster=_NODES_OF_QUEUE, fits=False, reason=reason))
    return fits


def _check_cluster(address: str, cluster: Cluster, demand: Demand) -> Fit:
    reason = explain_infeasible(demand, cluster)
    return Fit(cluster=address or _NODES_OF_QUEUE, fits=not reason, reason=reason)
