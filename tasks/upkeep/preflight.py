"""Check every node of a Ray cluster, and decide which nodes are fit for runs.

The *caller* is the machine that runs the preflight. Every node is compared with it.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed
from pydantic import BaseModel, ConfigDict, Field
from rich.filesize import decimal

from tasks.processes.devices import BadDevices, Devices
from tasks.processes.identity import host_name
from tasks.processes.machine import digest_code, find_unreadable_files, gather_facts
from tasks.processes.registry import read_owner
from tasks.ray.dashboard import add_listed_clusters
from tasks.ray.nodes import NodeClient, connect_to_nodes, find_gcs_address
from tasks.record.places import muster_home
from tasks.server.artifacts import create_report
from tasks.server.flow_runs import read_listed_clusters
from tasks.server.server import hide_prefect_logs, prefect_server
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.show.markdown import escape_markdown, markdown_table
from tasks.spec.errors import BadArgument
from tasks.spec.formatting import join_commas

_GIB = 1 << 30
#: In the list of checked nodes, this name stands for the machine that runs the preflight.
CALLER = "caller"


class Limits(BaseModel):
    """Limits that decide whether a node is fit for runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    free_gib: float = Field(
        10.0, ge=0, description="Minimum free disk space in the shared directory, in GiB"
    )
    ray_free_gib: float = Field(
        5.0, ge=0, description="Minimum free disk space in Ray's own directory, in GiB"
    )
    skew_s: float = Field(
        2.0,
        gt=0,
        description="Maximum difference between a node's clock and this machine's, in seconds",
    )
    gpu_held_mib: int = Field(
        1024,
        ge=0,
        description="Limit for GPU memory that is in use although no process on the node uses the "
        "memory, in MiB. Above this limit, the node is unfit",
    )
    gpus: Literal["auto", "real", "any"] = Field(
        "auto",
        description="Result for a node with GPUs in Ray, but without a GPU driver. real: the node "
        "is unfit. any: the node is fit. auto: the node is unfit only if another node has a driver",
    )
    code: Literal["same", "any"] = Field(
        "same",
        description="Check of Muster's code on the nodes. same: each node must have the same "
        "code as this machine. any: no check",
    )


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """Results of the checks on one node."""

    #: Name of the node for messages, for example `10.0.0.2`.
    name: str
    #: Number of GPUs that Ray counts on the node.
    gpus: float = 0.0
    #: Reason why the node could not be checked, or an empty string.
    unreached: str = ""
    #: Result of `machine.gather_facts` on the node. Empty if the node was not reached. For the
    #: machine that runs the preflight, only two keys exist. `shared_problem` describes a problem
    #: with the shared directory, and `devices_problem` describes a problem with the GPU devices. If
    #: there is no problem, the description is an empty string.
    facts: Mapping[str, Any]
    #: True if this node and the machine that runs the preflight do not find each other's files in
    #: the shared directory. The two machines then see two different directories.
    is_elsewhere: bool = False
    #: Difference between the node's clock and the clock of the machine that runs the preflight, in
    #: seconds. None if the difference was not measured.
    skew_s: float | None = None
    #: Largest possible error of `skew_s` in seconds. The error is half of the round-trip time of
    #: the request that measured the difference.
    skew_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that makes a node unfit for runs, and the remedy for the problem."""

    #: Name of the node.
    node: str
    #: Name of the check that failed: `code`, `shared`, `disk`, `clock`, `leftovers`, `gpus`,
    #: `devices` or `reach`.
    check: str
    #: Description of the problem, with the value that was found.
    problem: str
    #: Action that solves the problem.
    remedy: str

    def __str__(self) -> str:
        return f"{self.node}: {self.check}: {self.problem} ({self.remedy})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Results of the checks on all nodes of a Ray cluster."""

    #: The results of each node. The first is the machine that runs the preflight.
    nodes: tuple[NodeResult, ...]
    #: Path of the directory that all nodes must share.
    shared: str
    #: Digest of the Muster code on the machine that runs the preflight.
    code: str
    #: Ids of the runs that have processes on the nodes, and whose flow process is running or may be
    #: running.
    running_run_ids: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightVerdict:
    """Result of a preflight: the checked nodes and the problems that were found."""

    #: The results of each node. The first is the machine that runs the preflight.
    nodes: tuple[NodeResult, ...]
    #: Problems that make a node unfit for runs. Empty if all nodes are fit.
    findings: tuple[Finding, ...]

    @property
    def summary(self) -> str:
        """Text with a line that names the unfit nodes, and one further line for each problem."""
        count = sum(node.name != CALLER for node in self.nodes)
        unfit_nodes = list(dict.fromkeys(finding.node for finding in self.findings))
        if not unfit_nodes:
            return "the node is fit" if count == 1 else f"all {count} nodes are fit"
        headline = f"unfit nodes: {', '.join(unfit_nodes)} ({count} nodes were checked)"
        return "\n".join([headline, *map(str, self.findings)])

    def as_markdown(self) -> str:
        """Return a Markdown table with one row for each node, and a list of the problems."""
        rows = []
        for node in self.nodes:
            failed_checks = [
                finding.check for finding in self.findings if finding.node == node.name
            ]
            skew = ""
            if node.skew_s is not None:
                skew = f"{node.skew_s:+.3f} ± {node.skew_error_s:.3f} s"
            row = (node.name, join_commas(dict.fromkeys(failed_checks)) or "ok", skew)
            if "machine" in node.facts:
                free_bytes = node.facts["shared_free_bytes"]
                free = "?" if free_bytes is None else decimal(free_bytes)
                processes = f"{len(node.facts['carriers'])}"
                rows.append((*row, free, describe_gpus(node), processes))
            else:
                rows.append((*row, "", "", ""))
        head = ("node", "failed checks", "clock", "free disk", "GPUs", "processes of runs")
        parts = [markdown_table(head, [[*map(escape_markdown, row)] for row in rows])]
        if self.findings:
            parts.append("\n".join(f"- {escape_markdown(finding)}" for finding in self.findings))
        return "\n\n".join(parts)


def judge_nodes(survey: Survey, limits: Limits) -> PreflightVerdict:
    """Decide which nodes are fit for runs.

    Args:
        survey: Results of the checks on all nodes.
        limits: Limits that decide whether a node is fit for runs.

    Returns:
        The results of the checks, and all problems in the order of the nodes.
    """
    if limits.gpus == "auto":
        has_driver = any(node.facts.get("gpus", {}).get("driver") for node in survey.nodes)
        limits = limits.model_copy(update={"gpus": "real" if has_driver else "any"})
    findings: list[Finding] = []
    machines: set[str] = set()
    for node in survey.nodes:
        checks: dict[str, _Check]
        if node.unreached:
            checks = {"reach": _check_reach}
        else:
            checks = {"shared": _check_shared, "clock": _check_clock, "devices": _check_devices}
            if "machine" in node.facts:
                machine_checks: dict[str, _Check] = {
                    "code": _check_code,
                    "disk": _check_disk,
                    "leftovers": _check_leftovers,
                    "gpus": _check_gpus,
                }
                # Nodes on the same machine see the same processes, so report the leftover
                # processes only for the first of these nodes.
                if node.facts["machine"] in machines:
                    del machine_checks["leftovers"]
                machines.add(node.facts["machine"])
                checks = machine_checks | checks
        findings += [
            Finding(node=node.name, check=name, problem=problem, remedy=remedy)
            for name, check in checks.items()
            for problem, remedy in check(node, survey, limits)
        ]
    return PreflightVerdict(nodes=survey.nodes, findings=tuple(findings))


def describe_gpus(node: NodeResult) -> str:
    """Return a short text about the number of GPUs of a node.

    Examples: `8`; `8 logical`, if the node has no GPU driver; `8 in Ray, 7 in the GPU driver`, if
    the two numbers differ.
    """
    gpu_report = node.facts.get("gpus", {})
    if not node.gpus:
        return "0"
    if not gpu_report.get("driver"):
        return f"{node.gpus:g} logical"
    driver_count = len(gpu_report["gpus"])
    if driver_count == node.gpus:
        return f"{driver_count}"
    return f"{node.gpus:g} in Ray, {driver_count} in the GPU driver"


#: Iterator over the problems of a node, each as a pair of the problem and its remedy.
_Faults = Iterator[tuple[str, str]]
#: Function that yields the problems that one check finds on a node.
_Check = Callable[[NodeResult, Survey, Limits], _Faults]


def _check_reach(node: NodeResult, survey: Survey, limits: Limits) -> _Faults:
    yield (
        node.unreached,
        (
            "check Ray's process on the node (the raylet) with `ray status`, and read the log "
            "raylet.out"
        ),
    )


def _check_code(node: NodeResult, survey: Survey, limits: Limits) -> _Faults:
    installed = node.facts["code"]
    remedy = (
        "on the node, install Muster into the Python environment of Ray, in the same version as on "
        "this machine"
    )
    if limits.code != "same":
        return
    if installed["problem"]:
        yield f"Muster's package `tasks` cannot be imported: {installed['problem']}", remedy
    elif installed["digest"] != survey.code:
        problem = (
            f"the node has another version of Muster's code ({installed['digest']}) than this "
            f"machine ({survey.code})"
        )
        yield problem, remedy


def _check_shared(node: NodeResult, survey: Survey, limits: Limits) -> _Faults:
    if problem := node.facts.get("shared_problem"):
        yield problem, f"mount the shared file system at {survey.shared}, writable"
    elif node.is_elsewhere:
        problem = f"{survey.shared} on this node is not the same directory as on this machine"
        yield (
            problem,
            "mount the same file system on both machines, or choose another path with --shared",
        )


def _check_disk(node: NodeResult, survey: Survey, limits: Limits) -> _Faults:
    for place, free_bytes, min_gib in (
        (survey.shared, node.facts["shared_free_bytes"], limits.free_gib),
        ("Ray's directory", node.facts["ray_free_bytes"], limits.ray_free_gib),
    ):
        if free_bytes is not None and free_bytes < min_gib * _GIB:
            problem = (
                f"only {decimal(free_bytes)} are free in {place}, less than the limit of "
                f"{min_gib:g} GiB"
            )
            yield problem, "delete files there, or lower the limit for free disk space"


def _check_clock(node: NodeResult, survey: Survey, limits: Limits) -> _Faults:
    """Yield a problem if the clock difference minus its measurement error exceeds the limit."""
    if node.skew_s is not None and abs(node.skew_s) - node.skew_error_s > limits.skew_s:
        problem = (
            f"the clock of the node differs from the clock of this machine by {node.skew_s:+.1f} s "
            f"(± {node.skew_error_s:.1f} s)"
        )
        yield problem, "start a time service on the node, such as chrony or ntpd"


def _check_leftovers(node: NodeResult, survey: Survey, limits: Limits) -> _Faults:
    leftover_pids: dict[str, list[int]] = {}
    for carrier in node.facts["carriers"]:
        if carrier["run_id"] not in survey.running_run_ids:
            leftover_pids.setdefault(carrier["run_id"], []).append(carrier["pid"])
    for run_id, pids in leftover_pids.items():
        yield (
            f"run {run_id} has ended, but these processes of the run are still running on "
            f"the node: {join_commas(sorted(pids))}",
            "run `muster reconcile` on the host that started the run, or "
            f"`muster cleanup --address URL --run-id {run_id}`",
        )


def _check_gpus(node: NodeResult, survey: Survey, limits: Limits) -> _Faults:
    gpu_report = node.facts["gpus"]
    if gpu_report["problem"]:
        yield gpu_report["problem"], "restart the node's GPU driver, or drain the node"
        return
    if not gpu_report["driver"]:
        if node.gpus and limits.gpus == "real":
            problem = f"Ray counts {node.gpus:g} GPUs, but the node has no GPU driver"
            yield problem, "install the driver, or start Ray on the node with --num-gpus 0"
        return
    driver_count = len(gpu_report["gpus"])
    if driver_count != node.gpus:
        problem = f"Ray counts {node.gpus:g} GPUs, but the GPU driver reports {driver_count}"
        yield problem, "reset the missing GPUs, and restart Ray on the node"
    for gpu in gpu_report["gpus"]:
        if gpu.get("problem"):
            problem = f"GPU {gpu['index']} cannot be used for runs: {gpu['problem']}"
            yield problem, "repair or reset the GPU; until then, drain the node"
        lost_mib = _unaccounted_mib(gpu, gpu_report["processes"])
        if lost_mib > limits.gpu_held_mib:
            problem = (
                f"{lost_mib} MiB of {gpu['uuid']} are in use, but no process on this node uses them"
            )
            yield (
                problem,
                "perhaps a process in another container uses the GPU: end it, or run `nvidia-smi "
                "--gpu-reset`",
            )


def _check_devices(node: NodeResult, survey: Survey, limits: Limits) -> _Faults:
    if problem := node.facts.get("devices_problem"):
        yield (
            problem,
            "repair the GPU driver of this machine, or correct the variable MUSTER_GPUS of the "
            "workers and runs on this machine",
        )


def _unaccounted_mib(gpu: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> int:
    """Return the part of a GPU's used memory that belongs to no running process, in MiB.

    Args:
        gpu: The driver's report about the GPU.
        processes: The driver's reports about the processes on all GPUs of the node.

    Returns:
        The amount, or 0 if the used memory of the GPU or of one of its processes is unknown.
    """
    process_mib = [
        process["used_mib"]
        for process in processes
        if process["uuid"] == gpu["uuid"] and process["alive"]
    ]
    if gpu["used_mib"] is None or None in process_mib:
        return 0
    return int(gpu["used_mib"] - sum(process_mib))


#: Default deadline of each of the two steps of a preflight, in seconds.
STEP_TIMEOUT_S = 60.0


@task(name="survey", persist_result=False, cache_policy=NO_CACHE)
def survey_cluster(address: str, shared: str | None, within_s: float) -> Survey:
    """Check this machine and all nodes of a Ray cluster at the same time.

    Args:
        address: URL of the Ray dashboard.
        shared: Path of the directory that all nodes must share. If None, MUSTER_HOME is used.
        within_s: Deadline in seconds for each of two steps. In the first step, every node reports
            facts about itself. In the second step, the nodes and this machine look for each other's
            files in the shared directory.

    Raises:
        NoAnswer, Denied, OSError, ValueError: No node of the cluster could be checked.
    """
    add_listed_clusters(read_listed_clusters(PREFECT_API_URL.value()))
    directory = Path(shared) if shared else muster_home()
    if not shared:
        # Create MUSTER_HOME if it is missing. The first run would also create the directory, so the
        # preflight must not report the missing directory as a problem.
        directory.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_survey_nodes(address, directory.absolute(), within_s))


@task(name="publish", persist_result=False, cache_policy=NO_CACHE)
def publish_verdict(verdict: PreflightVerdict) -> None:
    """Create a Prefect artifact with a table of the result, and log a line for each problem."""
    log = get_run_logger()
    for finding in verdict.findings:
        log.error("%s", finding)
    create_report("preflight", verdict.as_markdown(), verdict.summary[:500], log)


def conclude_preflight(verdict: PreflightVerdict) -> State[PreflightVerdict]:
    """Return the final state of the preflight's flow run: Failed if a node is unfit."""
    conclude = Failed if verdict.findings else Completed
    return conclude(message=verdict.summary, data=verdict)


async def _survey_nodes(address: str, shared: Path, within_s: float) -> Survey:
    """Check this machine and all nodes of a Ray cluster; see `survey_cluster`."""
    async with connect_to_nodes(await find_gcs_address(address)) as connection:
        nodes = await _check_nodes(connection, shared, within_s)
    run_ids = {carrier["run_id"] for node in nodes for carrier in node.facts.get("carriers", ())}
    return Survey(
        nodes=nodes,
        shared=str(shared),
        code=digest_code()["digest"],
        running_run_ids=frozenset(filter(_may_be_alive, run_ids)),
    )


async def _check_nodes(
    connection: NodeClient, shared: Path, within_s: float
) -> tuple[NodeResult, ...]:
    """Check this machine and all nodes, and test whether they see the same shared directory.

    For this test, each node and this machine create a file in the directory. Then the nodes look
    for the file of this machine, and this machine looks for the files of the nodes.

    Args:
        connection: Connection to the nodes.
        shared: The shared directory.
        within_s: Deadline of each step, in seconds.

    Returns:
        The results of each node. The first is this machine.
    """
    nodes = connection.nodes
    folder = shared / f".muster-preflight-{uuid.uuid4().hex[:12]}"
    caller = gather_facts(str(shared), str(folder), CALLER, str(shared))
    try:
        orders = {
            node.node_id: {
                "shared": str(shared),
                "folder": str(folder),
                "name": node.node_id,
                "ray_dir": node.ray_dir,
            }
            for node in nodes
        }
        reports = await connection.send_order("look", orders, within_s)
        writers = [
            node_id for node_id, answer in reports.answers.items() if not answer["shared_problem"]
        ]

        caller_names = [] if caller["shared_problem"] else [CALLER]
        comparisons = {
            node_id: {"folder": str(folder), "names": caller_names} for node_id in writers
        }
        comparison = await connection.send_order("compare", comparisons, within_s)

        elsewhere = [node_id for node_id, answer in comparison.answers.items() if answer["unseen"]]
        others = [node_id for node_id in writers if node_id not in elsewhere]
        elsewhere += find_unreadable_files(str(folder), others)["unseen"]

        # On some nodes, the same path leads to another directory than on this machine. This machine
        # cannot delete the test files there, so these nodes must delete them.
        deletions = {node_id: {"folder": str(folder)} for node_id in elsewhere}
        await connection.send_order("tidy", deletions, within_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    unreached = {**reports.unreached, **comparison.unreached}
    problems = {"shared_problem": caller["shared_problem"], "devices_problem": _devices_problem()}
    results = [NodeResult(name=CALLER, facts=problems)]
    for node in nodes:
        skew_s, error_s = connection.clocks.get(node.node_id, (None, 0.0))
        results.append(
            NodeResult(
                name=node.name,
                gpus=node.gpus,
                facts=reports.answers.get(node.node_id, {}),
                unreached=unreached.get(node.node_id, ""),
                is_elsewhere=node.node_id in elsewhere,
                skew_s=skew_s,
                skew_error_s=error_s,
            )
        )
    return tuple(results)


def _devices_problem() -> str:
    """Return the reason why the GPU devices of this machine are unknown, or an empty string."""
    try:
        Devices.here()
    except (BadDevices, OSError) as error:
        return str(error)
    return ""


def _may_be_alive(run_id: str) -> bool:
    """Return True if the flow process of a run is running or may be running."""
    owner = read_owner(run_id)
    # Several hosts can share a registry of runs. This host cannot check processes of another host,
    # so a process of another host counts as running.
    return owner is not None and (owner.host != host_name() or owner.process.is_alive())


#: Type for a parameter of a command function. The command has an option for each `Limits` field.
LimitOptions = Annotated[Limits, Parameter(name="*")]


def run_preflight(
    flow: Callable[..., State[Any]],
    address: str,
    shared: str | None,
    limits: Limits,
    within_s: float,
) -> int:
    """Run the flow `preflight` in this process, and print its result.

    Args:
        flow: The flow `preflight`.
        address: URL of the Ray dashboard.
        shared: Path of the directory that all nodes must share. If None, MUSTER_HOME is used.
        limits: Limits that decide whether a node is fit for runs.
        within_s: Deadline of each step of the preflight, in seconds.

    Returns:
        The exit code of the command: 1 if a node is unfit or could not be checked, 0 otherwise.

    Raises:
        BadArgument: The address or the deadline is invalid.
    """
    if not address.startswith(("http://", "https://")):
        raise BadArgument(
            f"--address {address} is not a URL: write the URL of the Ray dashboard, such as "
            "http://10.0.0.1:8265"
        )
    if within_s <= 0:
        raise BadArgument(f"--within-s {within_s:g} must be more than 0")
    hide_prefect_logs()
    with prefect_server():
        state = flow(address, shared, limits, within_s, return_state=True)
    verdict = state.result(raise_on_failure=False)
    message = state.message
    if isinstance(verdict, PreflightVerdict):
        print(verdict.as_markdown())
        message = verdict.summary.splitlines()[0]
    print(message)
    return EXIT_DONE if state.is_completed() else EXIT_FAILED
