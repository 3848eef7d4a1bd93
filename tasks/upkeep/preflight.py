"""Check every node of a Ray cluster, and decide which nodes are fit for runs."""

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
from tasks.processes.machine import code_here, look, names_unseen
from tasks.processes.registry import owner_of
from tasks.ray.dashboard import add_listed_clusters
from tasks.ray.nodes import NodeClient, connect_to_nodes, find_gcs_address
from tasks.record.places import muster_home
from tasks.server.artifacts import leave_report
from tasks.server.flow_runs import listed_clusters
from tasks.server.server import prefect_server, quieten_prefect
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.errors import BadArgument
from tasks.spec.formatting import escape_markdown, join_commas, markdown_table

_GIB = 1 << 30
#: Name under which the calling machine appears among the nodes.
CALLER = "caller"


class Limits(BaseModel):
    """Requirements that a node must meet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    free_gib: float = Field(10.0, ge=0, description="Free disk in the shared directory, GiB")
    ray_free_gib: float = Field(5.0, ge=0, description="Free disk in Ray's own directory, GiB")
    skew_s: float = Field(2.0, gt=0, description="Clock against the caller's, seconds")
    gpu_held_mib: int = Field(
        1024, ge=0, description="Memory of a GPU that no living process accounts for, MiB"
    )
    gpus: Literal["auto", "real", "any"] = Field(
        "auto",
        description="GPUs that Ray counts on a node without a driver: a failure (real), fine (any),"
        " or a failure where another node has a driver (auto)",
    )
    code: Literal["same", "any"] = Field(
        "same", description="Whether Muster's code has to be installed on nodes (same), or not"
    )


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """What was found out about one node."""

    #: Name for people: `10.0.0.2`.
    name: str
    #: Number of GPUs that Ray counts on the node.
    gpus: float = 0.0
    #: Reason why the node could not be checked, or an empty string.
    unreached: str = ""
    #: Result of `machine.look`; empty if the node was not reached. For the caller, it holds only
    #: the problems with its own file in the shared directory and with its devices.
    look: Mapping[str, Any]
    #: True if the node and the caller do not see each other's files in the shared directory.
    is_elsewhere: bool = False
    #: Difference of the node's clock to the caller's, in seconds. None if it was not measured.
    skew_s: float | None = None
    #: Largest error of `skew_s`, in seconds: half of the round trip.
    skew_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem of a node, and its remedy."""

    node: str
    #: `code`, `shared`, `disk`, `clock`, `leftovers`, `gpus`, `devices` or `reach`.
    check: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.node}: {self.check}: {self.problem} ({self.remedy})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found out about the nodes of a cluster."""

    #: The caller comes first.
    nodes: tuple[NodeSeen, ...]
    #: Path of the directory that must be the same on all nodes.
    shared: str
    #: Digest of the caller's code.
    code: str
    #: Ids of runs that have processes on the nodes and a living flow process, as far as this
    #: machine knows.
    live: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightVerdict:
    """Result of a preflight."""

    nodes: tuple[NodeSeen, ...]
    findings: tuple[Finding, ...]

    @property
    def summary(self) -> str:
        """One line. If nodes are not fit, one more line for each finding."""
        count = sum(node.name != CALLER for node in self.nodes)
        unfit_nodes = list(dict.fromkeys(finding.node for finding in self.findings))
        if not unfit_nodes:
            return f"all {count} nodes are fit"
        headline = f"not fit, of {count} nodes: {', '.join(unfit_nodes)}"
        return "\n".join([headline, *map(str, self.findings)])

    def as_markdown(self) -> str:
        """Return a table with one row for each node, and a list of the findings."""
        rows = []
        for node in self.nodes:
            failed_checks = [
                finding.check for finding in self.findings if finding.node == node.name
            ]
            skew = ""
            if node.skew_s is not None:
                skew = f"{node.skew_s:+.3f} ± {node.skew_error_s:.3f} s"
            row = (node.name, join_commas(dict.fromkeys(failed_checks)) or "ok", skew)
            if "machine" in node.look:
                free_bytes = node.look["shared_free_bytes"]
                free = "?" if free_bytes is None else decimal(free_bytes)
                processes = f"{len(node.look['carriers'])} processes"
                rows.append((*row, free, gpu_words(node), processes))
            else:
                rows.append((*row, "", "", ""))
        head = ("node", "verdict", "clock", "free", "GPUs", "of runs")
        parts = [markdown_table(head, [[*map(escape_markdown, row)] for row in rows])]
        if self.findings:
            parts.append("\n".join(f"- {escape_markdown(finding)}" for finding in self.findings))
        return "\n\n".join(parts)


def judge_nodes(survey: Survey, limits: Limits) -> PreflightVerdict:
    """Check all nodes against the limits. Findings are in the order of the nodes."""
    if limits.gpus == "auto":
        has_driver = any(node.look.get("gpus", {}).get("driver") for node in survey.nodes)
        limits = limits.model_copy(update={"gpus": "real" if has_driver else "any"})
    findings: list[Finding] = []
    machines: set[str] = set()
    for node in survey.nodes:
        checks: dict[str, _Check]
        if node.unreached:
            checks = {"reach": _check_reach}
        else:
            checks = {"shared": _check_shared, "clock": _check_clock, "devices": _check_devices}
            if "machine" in node.look:
                machine_checks: dict[str, _Check] = {
                    "code": _check_code,
                    "disk": _check_disk,
                    "leftovers": _check_leftovers,
                    "gpus": _check_gpus,
                }
                # Nodes on the same machine see the same processes, so report leftovers only once.
                if node.look["machine"] in machines:
                    del machine_checks["leftovers"]
                machines.add(node.look["machine"])
                checks = machine_checks | checks
        findings += [
            Finding(node=node.name, check=name, problem=problem, remedy=remedy)
            for name, check in checks.items()
            for problem, remedy in check(node, survey, limits)
        ]
    return PreflightVerdict(nodes=survey.nodes, findings=tuple(findings))


def gpu_words(node: NodeSeen) -> str:
    """Describe the GPUs of a node: `8`, `8 logical` (no driver), or `8 counted, 7 there`."""
    gpu_report = node.look.get("gpus", {})
    if not node.gpus:
        return "0"
    if not gpu_report.get("driver"):
        return f"{node.gpus:g} logical"
    driver_count = len(gpu_report["gpus"])
    if driver_count == node.gpus:
        return f"{driver_count}"
    return f"{node.gpus:g} counted, {driver_count} there"


#: Pairs of a problem and its remedy.
_Faults = Iterator[tuple[str, str]]
_Check = Callable[[NodeSeen, Survey, Limits], _Faults]


def _check_reach(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    yield node.unreached, "look at its raylet: `ray status`, and its log raylet.out"


def _check_code(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    installed = node.look["code"]
    remedy = "install the caller's release there, in the interpreter that Ray runs with"
    if limits.code != "same":
        return
    if installed["problem"]:
        yield f"`tasks` can't be imported: {installed['problem']}", remedy
    elif installed["digest"] != survey.code:
        problem = f"its code is another ({installed['digest']}, the caller's is {survey.code})"
        yield problem, remedy


def _check_shared(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    if problem := node.look.get("shared_problem"):
        yield problem, f"mount it at {survey.shared}, writable"
    elif node.is_elsewhere:
        problem = f"{survey.shared} is another one there than the caller's"
        yield problem, "mount the same file system there, or name another with --shared"


def _check_disk(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    for place, free_bytes, min_gib in (
        (survey.shared, node.look["shared_free_bytes"], limits.free_gib),
        ("Ray's directory", node.look["ray_free_bytes"], limits.ray_free_gib),
    ):
        if free_bytes is not None and free_bytes < min_gib * _GIB:
            problem = f"{decimal(free_bytes)} free in {place}, less than {min_gib:g} GiB"
            yield problem, "free some, or lower the limit"


def _check_clock(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    """Report a clock only if it is wrong for certain, even with the largest measuring error."""
    if node.skew_s is not None and abs(node.skew_s) - node.skew_error_s > limits.skew_s:
        problem = f"its clock is {node.skew_s:+.1f} s off (± {node.skew_error_s:.1f} s)"
        yield problem, "start its time service (chrony, ntpd)"


def _check_leftovers(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    leftover_pids: dict[str, list[int]] = {}
    for carrier in node.look["carriers"]:
        if carrier["run_id"] not in survey.live:
            leftover_pids.setdefault(carrier["run_id"], []).append(carrier["pid"])
    for run_id, pids in leftover_pids.items():
        yield (
            f"run {run_id} has ended, and pid {join_commas(sorted(pids))} of it lives",
            f"`muster reconcile` where it ran, or `muster sweep --address URL --run-id {run_id}`",
        )


def _check_gpus(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    gpu_report = node.look["gpus"]
    if gpu_report["problem"]:
        yield gpu_report["problem"], "restart its driver, or drain the node"
        return
    if not gpu_report["driver"]:
        if node.gpus and limits.gpus == "real":
            problem = f"Ray counts {node.gpus:g} GPUs, and there is no driver"
            yield problem, "install it, or start its raylet with --num-gpus 0"
        return
    driver_count = len(gpu_report["gpus"])
    if driver_count != node.gpus:
        problem = f"Ray counts {node.gpus:g} GPUs, the driver sees {driver_count}"
        yield problem, "reset what fell off, restart its raylet"
    for gpu in gpu_report["gpus"]:
        if gpu.get("problem"):
            problem = f"GPU {gpu['index']} gets no run: {gpu['problem']}"
            yield problem, "mend or reset it; until then, drain the node"
        lost_mib = _unaccounted_mib(gpu, gpu_report["processes"])
        if lost_mib > limits.gpu_held_mib:
            problem = f"{lost_mib} MiB of {gpu['uuid']} are held by no process that lives here"
            yield problem, "`nvidia-smi --gpu-reset`, or end what holds it from another container"


def _check_devices(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    if problem := node.look.get("devices_problem"):
        yield problem, "mend it where runs and workers of this machine are started"


def _unaccounted_mib(gpu: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> int:
    """Return the used memory of a GPU that no living process accounts for, in MiB.

    Returns:
        0 if the memory of the GPU or of one of its processes is unknown.
    """
    process_mib = [
        process["used_mib"]
        for process in processes
        if process["uuid"] == gpu["uuid"] and process["alive"]
    ]
    if gpu["used_mib"] is None or None in process_mib:
        return 0
    return int(gpu["used_mib"] - sum(process_mib))


#: Default deadline of each step of a survey, in seconds.
LOOK_WITHIN_S = 60.0


@task(name="survey", persist_result=False, cache_policy=NO_CACHE)
def survey_cluster(address: str, shared: str | None, within_s: float) -> Survey:
    """Check all nodes at the same time.

    Args:
        address: The URL of the Ray dashboard.
        shared: Path of the directory that must be the same on all nodes; None: MUSTER_HOME.
        within_s: Deadline of each step in seconds. The steps are looking and comparing files.

    Raises:
        NoAnswer, Denied, OSError, ValueError: The cluster could not be asked at all.
    """
    add_listed_clusters(listed_clusters(PREFECT_API_URL.value()))
    directory = Path(shared) if shared else muster_home()
    if not shared:
        # Create MUSTER_HOME if it does not exist, as the first run would.
        directory.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_survey_nodes(address, directory.absolute(), within_s))


@task(name="publish", persist_result=False, cache_policy=NO_CACHE)
def publish_verdict(verdict: PreflightVerdict) -> None:
    """Show the result as a table on the flow run, and log a line for each finding."""
    log = get_run_logger()
    for finding in verdict.findings:
        log.error("%s", finding)
    leave_report("preflight", verdict.as_markdown(), verdict.summary[:500], log)


def conclude_preflight(verdict: PreflightVerdict) -> State[PreflightVerdict]:
    """Return the final state of the flow run: failed if a node is not fit."""
    conclude = Failed if verdict.findings else Completed
    return conclude(message=verdict.summary, data=verdict)


async def _survey_nodes(address: str, shared: Path, within_s: float) -> Survey:
    async with connect_to_nodes(await find_gcs_address(address)) as visitor:
        nodes = await _look_at_nodes(visitor, shared, within_s)
    run_ids = {carrier["run_id"] for node in nodes for carrier in node.look.get("carriers", ())}
    return Survey(
        nodes=nodes,
        shared=str(shared),
        code=code_here()["digest"],
        live=frozenset(filter(_may_be_alive, run_ids)),
    )


async def _look_at_nodes(
    visitor: NodeClient, shared: Path, within_s: float
) -> tuple[NodeSeen, ...]:
    """Look at the caller and at all nodes, and test whether they share a directory.

    For the test, each node and the caller write a file into the directory. Then the nodes look for
    the caller's file, and the caller looks for the files of the nodes.
    """
    nodes = visitor.nodes
    folder = shared / f".muster-preflight-{uuid.uuid4().hex[:12]}"
    caller = look(str(shared), str(folder), CALLER, str(shared))
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
        looked = await visitor.send_order("look", orders, within_s)
        writers = [
            node_id for node_id, answer in looked.answers.items() if not answer["shared_problem"]
        ]

        caller_names = [] if caller["shared_problem"] else [CALLER]
        comparisons = {
            node_id: {"folder": str(folder), "names": caller_names} for node_id in writers
        }
        compared = await visitor.send_order("compare", comparisons, within_s)

        elsewhere = [node_id for node_id, answer in compared.answers.items() if answer["unseen"]]
        others = [node_id for node_id in writers if node_id not in elsewhere]
        elsewhere += names_unseen(str(folder), others)["unseen"]

        # These nodes wrote into another directory, where the caller cannot delete their files.
        deletions = {node_id: {"folder": str(folder)} for node_id in elsewhere}
        await visitor.send_order("tidy", deletions, within_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    unreached = {**looked.unreached, **compared.unreached}
    problems = {"shared_problem": caller["shared_problem"], "devices_problem": _devices_problem()}
    seen = [NodeSeen(name=CALLER, look=problems)]
    for node in nodes:
        skew_s, error_s = visitor.clocks.get(node.node_id, (None, 0.0))
        seen.append(
            NodeSeen(
                name=node.name,
                gpus=node.gpus,
                look=looked.answers.get(node.node_id, {}),
                unreached=unreached.get(node.node_id, ""),
                is_elsewhere=node.node_id in elsewhere,
                skew_s=skew_s,
                skew_error_s=error_s,
            )
        )
    return tuple(seen)


def _devices_problem() -> str:
    """Return why the devices of this machine are unknown, or an empty string if they are known."""
    try:
        Devices.here()
    except (BadDevices, OSError) as error:
        return str(error)
    return ""


def _may_be_alive(run_id: str) -> bool:
    """Return True if the flow process of a run lives or may live."""
    owner = owner_of(run_id)
    # Hosts can share a registry. A process of another host cannot be checked, so it may be alive.
    return owner is not None and (owner.host != host_name() or owner.process.is_alive())


LimitOptions = Annotated[Limits, Parameter(name="*")]


def run_preflight(
    flow: Callable[..., State[Any]],
    address: str,
    shared: str | None,
    limits: Limits,
    within_s: float,
) -> int:
    """Run the flow and print its result. Returns 1 if a node is not fit or cannot be checked."""
    if not address.startswith(("http://", "https://")):
        raise BadArgument(f"--address {address}: the dashboard's URL is needed")
    if within_s <= 0:
        raise BadArgument(f"--within-s {within_s:g}: must be more than 0")
    quieten_prefect()
    with prefect_server():
        state = flow(address, shared, limits, within_s, return_state=True)
    verdict = state.result(raise_on_failure=False)
    message = state.message
    if isinstance(verdict, PreflightVerdict):
        print(verdict.as_markdown())
        message = verdict.summary.splitlines()[0]
    print(message)
    return EXIT_DONE if state.is_completed() else EXIT_FAILED
