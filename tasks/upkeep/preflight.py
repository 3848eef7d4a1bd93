"""Looking at every node of a cluster before runs are sent to it, and judging by what was seen of
each whether they may be."""

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
from tasks.ray.dashboard import know
from tasks.ray.nodes import NodeVisitor, gcs_address_of, visiting
from tasks.record.places import muster_home
from tasks.server.artifacts import leave_report
from tasks.server.flow_runs import listed_clusters
from tasks.server.server import prefect_server, quieten_prefect
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.errors import BadArgument
from tasks.spec.words import commas, table, text

_GIB = 1 << 30
#: The caller's place among the nodes, which the shared directory must be the same with.
CALLER = "caller"


class Limits(BaseModel):
    """What a node has to keep to."""

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
    """One node, as far as it could be seen."""

    #: For people: `10.0.0.2`.
    name: str
    #: GPUs that Ray counts on it.
    gpus: float = 0.0
    #: Why it could not be looked at; empty where it was.
    unreached: str = ""
    #: See `machine.look`; of the caller at most what stands in the way of its own file and of
    #: giving its devices, and empty for a node that was not reached.
    look: Mapping[str, Any]
    #: In the shared directory it does not see what the caller wrote, or the other way round.
    is_elsewhere: bool = False
    #: Its clock less the caller's, seconds; None where it was not measured.
    skew_s: float | None = None
    #: By how much `skew_s` may be wrong: half the round trip.
    skew_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a node, and what to do about it."""

    node: str
    #: `code`, `shared`, `disk`, `clock`, `leftovers`, `gpus`, `devices` or `reach`.
    check: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.node}: {self.check}: {self.problem} ({self.remedy})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was seen of a cluster, and where it was looked at from."""

    #: The caller, as one of them, comes first.
    nodes: tuple[NodeSeen, ...]
    #: The directory that has to be the same everywhere.
    shared: str
    #: The digest of the caller's code.
    code: str
    #: The ids of runs with processes there whose flow process lives, as far as is known here.
    live: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightVerdict:
    """What a preflight came to."""

    nodes: tuple[NodeSeen, ...]
    findings: tuple[Finding, ...]

    @property
    def summary(self) -> str:
        """One line, or one and a line for each finding."""
        count = sum(node.name != CALLER for node in self.nodes)
        failed = list(dict.fromkeys(finding.node for finding in self.findings))
        said = f"not fit, of {count} nodes: {', '.join(failed)}"
        return (
            "\n".join([said, *map(str, self.findings)]) if failed else f"all {count} nodes are fit"
        )

    def as_markdown(self) -> str:
        """A line for each node, then what to do."""
        rows = []
        for node in self.nodes:
            wrong = [finding.check for finding in self.findings if finding.node == node.name]
            skew = (
                f"{node.skew_s:+.3f} ± {node.skew_error_s:.3f} s" if node.skew_s is not None else ""
            )
            row = (node.name, commas(dict.fromkeys(wrong)) or "ok", skew)
            if "machine" in node.look:
                free, count = node.look["shared_free_bytes"], len(node.look["carriers"])
                size = "?" if free is None else decimal(free)
                rows.append((*row, size, gpu_words(node), f"{count} processes"))
            else:
                rows.append((*row, "", "", ""))
        parts = [table(("node", "verdict", "clock", "free", "GPUs", "of runs"), rows)]
        if self.findings:
            parts.append("\n".join(f"- {text(finding)}" for finding in self.findings))
        return "\n\n".join(parts)


def judge_nodes(survey: Survey, limits: Limits) -> PreflightVerdict:
    """All that is wrong, in the order of the nodes."""
    if limits.gpus == "auto":
        has_driver = any(node.look.get("gpus", {}).get("driver") for node in survey.nodes)
        limits = limits.model_copy(update={"gpus": "real" if has_driver else "any"})
    found: list[Finding] = []
    machines: set[str] = set()
    for node in survey.nodes:
        checks: dict[str, _Check] = {"shared": _shared, "clock": _clock, "devices": _devices}
        if node.unreached:
            checks = {"reach": _reach}
        elif "machine" in node.look:
            checks = {"code": _code, "disk": _disk, "leftovers": _leftovers, "gpus": _gpus} | checks
            # Nodes that share a machine see the same processes.
            if node.look["machine"] in machines:
                del checks["leftovers"]
            machines.add(node.look["machine"])
        found += [
            Finding(node=node.name, check=name, problem=problem, remedy=remedy)
            for name, check in checks.items()
            for problem, remedy in check(node, survey, limits)
        ]
    return PreflightVerdict(nodes=survey.nodes, findings=tuple(found))


def gpu_words(node: NodeSeen) -> str:
    """`8`, `8 logical`, `8 of 7`."""
    seen = node.look.get("gpus", {})
    if not node.gpus:
        return "0"
    if not seen.get("driver"):
        return f"{node.gpus:g} logical"
    real = len(seen["gpus"])
    return f"{real}" if real == node.gpus else f"{node.gpus:g} counted, {real} there"


#: What is wrong with a node, and what to do about it.
_Faults = Iterator[tuple[str, str]]
_Check = Callable[[NodeSeen, Survey, Limits], _Faults]


def _reach(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    yield node.unreached, "look at its raylet: `ray status`, and its log raylet.out"


def _code(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    here = node.look["code"]
    remedy = "install the caller's release there, in the interpreter that Ray runs with"
    if limits.code != "same":
        return
    if here["problem"]:
        yield f"`tasks` can't be imported: {here['problem']}", remedy
    elif here["digest"] != survey.code:
        yield f"its code is another ({here['digest']}, the caller's is {survey.code})", remedy


def _shared(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    if problem := node.look.get("shared_problem"):
        yield problem, f"mount it at {survey.shared}, writable"
    elif node.is_elsewhere:
        problem = f"{survey.shared} is another one there than the caller's"
        yield problem, "mount the same file system there, or name another with --shared"


def _disk(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    for place, free, least in (
        (survey.shared, node.look["shared_free_bytes"], limits.free_gib),
        ("Ray's directory", node.look["ray_free_bytes"], limits.ray_free_gib),
    ):
        if free is not None and free < least * _GIB:
            problem = f"{decimal(free)} free in {place}, less than {least:g} GiB"
            yield problem, "free some, or lower the limit"


def _clock(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    """Only what is certain: the round trip is taken off."""
    if node.skew_s is not None and abs(node.skew_s) - node.skew_error_s > limits.skew_s:
        problem = f"its clock is {node.skew_s:+.1f} s off (± {node.skew_error_s:.1f} s)"
        yield problem, "start its time service (chrony, ntpd)"


def _leftovers(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    dead: dict[str, list[int]] = {}
    for carrier in node.look["carriers"]:
        if carrier["run_id"] not in survey.live:
            dead.setdefault(carrier["run_id"], []).append(carrier["pid"])
    for run_id, pids in dead.items():
        yield (
            f"run {run_id} has ended, and pid {commas(sorted(pids))} of it lives",
            f"`muster reconcile` where it ran, or `muster sweep --address URL --run-id {run_id}`",
        )


def _gpus(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    seen = node.look["gpus"]
    if seen["problem"]:
        yield seen["problem"], "restart its driver, or drain the node"
        return
    if not seen["driver"]:
        if node.gpus and limits.gpus == "real":
            problem = f"Ray counts {node.gpus:g} GPUs, and there is no driver"
            yield problem, "install it, or start its raylet with --num-gpus 0"
        return
    if len(seen["gpus"]) != node.gpus:
        problem = f"Ray counts {node.gpus:g} GPUs, the driver sees {len(seen['gpus'])}"
        yield problem, "reset what fell off, restart its raylet"
    for gpu in seen["gpus"]:
        if gpu.get("problem"):
            problem = f"GPU {gpu['index']} gets no run: {gpu['problem']}"
            yield problem, "mend or reset it; until then, drain the node"
        held = _held_mib(gpu, seen["processes"])
        if held > limits.gpu_held_mib:
            problem = f"{held} MiB of {gpu['uuid']} are held by no process that lives here"
            yield problem, "`nvidia-smi --gpu-reset`, or end what holds it from another container"


def _devices(node: NodeSeen, survey: Survey, limits: Limits) -> _Faults:
    if problem := node.look.get("devices_problem"):
        yield problem, "mend it where runs and workers of this machine are started"


def _held_mib(gpu: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> int:
    """What living processes do not account for; 0 where one of them does not tell its share."""
    alive = [p["used_mib"] for p in processes if p["uuid"] == gpu["uuid"] and p["alive"]]
    if gpu["used_mib"] is None or None in alive:
        return 0
    return int(gpu["used_mib"] - sum(alive))


LOOK_WITHIN_S = 60.0


@task(name="survey", persist_result=False, cache_policy=NO_CACHE)
def survey_cluster(address: str, shared: str | None, within_s: float) -> Survey:
    """Look at all nodes at once.

    Args:
        address: The URL of the Ray dashboard.
        shared: The directory that has to be the same everywhere; None: MUSTER_HOME.
        within_s: For each of the steps: looking, comparing.

    Raises: NoAnswer, Denied, where the cluster can't be asked at all; OSError, ValueError.
    """
    know(listed_clusters(PREFECT_API_URL.value()))
    place = Path(shared) if shared else muster_home()
    if not shared:
        # As the first run does.
        place.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_survey(address, place.absolute(), within_s))


@task(name="publish", persist_result=False, cache_policy=NO_CACHE)
def publish_verdict(verdict: PreflightVerdict) -> None:
    """Leave a table on the flow run, and a line in its log for each thing that is wrong."""
    log = get_run_logger()
    for finding in verdict.findings:
        log.error("%s", finding)
    leave_report("preflight", verdict.as_markdown(), verdict.summary[:500], log)


def conclude_preflight(verdict: PreflightVerdict) -> State[PreflightVerdict]:
    """The flow run's end: failed where a node is not fit, with the node and the remedy."""
    end = Failed if verdict.findings else Completed
    return end(message=verdict.summary, data=verdict)


async def _survey(address: str, shared: Path, within_s: float) -> Survey:
    async with visiting(await gcs_address_of(address)) as visitor:
        seen = await _nodes_seen(visitor, shared, within_s)
    runs = {carrier["run_id"] for node in seen for carrier in node.look.get("carriers", ())}
    return Survey(
        nodes=seen,
        shared=str(shared),
        code=code_here()["digest"],
        live=frozenset(filter(_has_owner, runs)),
    )


async def _nodes_seen(visitor: NodeVisitor, shared: Path, within_s: float) -> tuple[NodeSeen, ...]:
    """Each node leaves a file in the shared directory, and so does the caller; once all have, the
    nodes read the caller's, and the caller reads theirs."""
    nodes = visitor.nodes
    folder = shared / f".muster-preflight-{uuid.uuid4().hex[:12]}"
    caller = look(str(shared), str(folder), CALLER, str(shared))
    try:
        place = {"shared": str(shared), "folder": str(folder)}
        each = {
            node.node_id: {**place, "name": node.node_id, "ray_dir": node.ray_dir} for node in nodes
        }
        looked = await visitor.visit("look", each, within_s)
        wrote = [node for node, found in looked.answers.items() if not found["shared_problem"]]
        names = [] if caller["shared_problem"] else [CALLER]
        compare = {node: {"folder": str(folder), "names": names} for node in wrote}
        compared = await visitor.visit("compare", compare, within_s)
        elsewhere = [node for node, answer in compared.answers.items() if answer["unseen"]]
        elsewhere += names_unseen(str(folder), [n for n in wrote if n not in elsewhere])["unseen"]
        # The caller can't remove what was left there.
        tidy = {node: {"folder": str(folder)} for node in elsewhere}
        await visitor.visit("tidy", tidy, within_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    unreached = {**looked.unreached, **compared.unreached}
    problems = {"shared_problem": caller["shared_problem"], "devices_problem": _bad_devices()}
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


def _bad_devices() -> str:
    """Why nobody can say which devices of this machine may be given; empty where it is known."""
    try:
        Devices.here()
    except (BadDevices, OSError) as error:
        return str(error)
    return ""


def _has_owner(run_id: str) -> bool:
    owner = owner_of(run_id)
    # A process of another host, in a registry that hosts share, can't be asked: it may live.
    return owner is not None and (owner.host != host_name() or owner.process.is_alive())


LimitOptions = Annotated[Limits, Parameter(name="*")]


def run_preflight(
    flow: Callable[..., State[Any]],
    address: str,
    shared: str | None,
    limits: Limits,
    within_s: float,
) -> int:
    """Run the flow, and print what it found; 1 where a node is not fit, or can't be asked."""
    if not address.startswith(("http://", "https://")):
        raise BadArgument(f"--address {address}: the dashboard's URL is needed")
    if within_s <= 0:
        raise BadArgument(f"--within-s {within_s:g}: must be more than 0")
    quieten_prefect()
    with prefect_server():
        state = flow(address, shared, limits, within_s, return_state=True)
    found, said = state.result(raise_on_failure=False), state.message
    if isinstance(found, PreflightVerdict):
        print(found.as_markdown())
        said = found.summary.splitlines()[0]
    print(said)
    return EXIT_DONE if state.is_completed() else EXIT_FAILED
