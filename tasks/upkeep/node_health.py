"""Which nodes of a cluster a run may be sent to, judged by what was seen of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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
    #: See `machine_look.look`; of the caller at most what stands in the way of its own file, and
    #: empty for a node that was not reached.
    look: Mapping[str, Any]
    #: Names of nodes whose file in the shared directory it can't read.
    unseen: tuple[str, ...] = ()
    #: Its clock less the caller's, seconds; None where it was not measured.
    skew_s: float | None = None
    #: By how much `skew_s` may be wrong: half the round trip.
    skew_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a node, and what to do about it."""

    node: str
    #: `code`, `shared`, `disk`, `clock`, `leftovers`, `gpus` or `reach`.
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
    #: Whether a run is meant to have processes, by run id; one that is missing is not.
    is_live: Mapping[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a preflight came to."""

    nodes: tuple[NodeSeen, ...]
    findings: tuple[Finding, ...]

    @property
    def summary(self) -> str:
        """One line, or one and a line for each finding."""
        count = sum(node.name != CALLER for node in self.nodes)
        failed = list(dict.fromkeys(finding.node for finding in self.findings))
        if not failed:
            return f"all {count} nodes are fit"
        lines = [f"not fit, of {count} nodes: {', '.join(failed)}", *map(str, self.findings)]
        return "\n".join(lines)

    def as_markdown(self) -> str:
        """A line for each node, then what to do."""
        return as_markdown(self.nodes, self.findings)


def judged(survey: Survey, limits: Limits) -> Verdict:
    """What a survey says of each node."""
    findings = judge(
        survey.nodes, limits, shared=survey.shared, code=survey.code, is_live=survey.is_live
    )
    return Verdict(nodes=survey.nodes, findings=findings)


def judge(
    nodes: Sequence[NodeSeen],
    limits: Limits,
    *,
    shared: str,
    code: str,
    is_live: Mapping[str, bool],
) -> tuple[Finding, ...]:
    """All that is wrong, in the order of the nodes.

    Args:
        shared: The directory that has to be the same everywhere.
        code: The digest of the caller's code.
        is_live: By run id, whether a process or a job of it is still meant to be there; a run id
            that is missing is not live.
    """
    has_driver = any(node.look.get("gpus", {}).get("driver") for node in nodes)
    found: list[Finding] = []
    machines: set[str] = set()
    for node in nodes:
        if node.unreached:
            remedy = "look at its raylet: `ray status`, and its log raylet.out"
            found.append(_finding(node, "reach", node.unreached, remedy))
            continue
        if "machine" in node.look:
            if limits.code == "same":
                found += _code(node, code)
            found += _disk(node, limits, shared)
            # Nodes that share a machine see the same processes.
            if node.look["machine"] not in machines:
                machines.add(node.look["machine"])
                found += _leftovers(node, is_live)
            found += _gpus(node, limits, has_driver)
        found += _shared(node, shared)
        found += _clock(node, limits)
    return tuple(found)


def as_markdown(nodes: Sequence[NodeSeen], findings: Sequence[Finding]) -> str:
    """A line for each node, then what to do."""
    head = ("node", "verdict", "clock", "free", "GPUs", "of runs")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for node in nodes:
        wrong = [finding.check for finding in findings if finding.node == node.name]
        is_seen = "machine" in node.look
        cells = (
            node.name,
            ", ".join(dict.fromkeys(wrong)) or "ok",
            "" if node.skew_s is None else f"{node.skew_s:+.3f} ± {node.skew_error_s:.3f} s",
            _gib(node.look["shared_free_bytes"]) if is_seen else "",
            gpu_words(node) if is_seen else "",
            f"{len(node.look['carriers'])} processes" if is_seen else "",
        )
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    if findings:
        lines += ["", *(f"- {_cell(str(finding))}" for finding in findings)]
    return "\n".join(lines)


def gpu_words(node: NodeSeen) -> str:
    """`8`, `8 logical`, `8 of 7`."""
    seen = node.look.get("gpus", {})
    if not node.gpus:
        return "0"
    if not seen.get("driver"):
        return f"{node.gpus:g} logical"
    real = len(seen["gpus"])
    return f"{real}" if real == node.gpus else f"{node.gpus:g} counted, {real} there"


def _finding(node: NodeSeen, check: str, problem: str, remedy: str) -> Finding:
    return Finding(node=node.name, check=check, problem=problem, remedy=remedy)


def _code(node: NodeSeen, code: str) -> list[Finding]:
    here = node.look["code"]
    remedy = "install the caller's release there, in the interpreter that Ray runs with"
    if here["problem"]:
        return [_finding(node, "code", f"`tasks` can't be imported: {here['problem']}", remedy)]
    if here["digest"] != code:
        problem = f"its code is another ({here['digest']}, the caller's is {code})"
        return [_finding(node, "code", problem, remedy)]
    return []


def _shared(node: NodeSeen, shared: str) -> list[Finding]:
    if problem := node.look.get("shared_problem"):
        return [_finding(node, "shared", problem, f"mount it at {shared}, writable")]
    if node.unseen:
        problem = f"in {shared} it does not see what {', '.join(node.unseen)} wrote"
        remedy = "mount the same file system there, or name another with --shared"
        return [_finding(node, "shared", problem, remedy)]
    return []


def _disk(node: NodeSeen, limits: Limits, shared: str) -> list[Finding]:
    places = (
        (shared, node.look["shared_free_bytes"], limits.free_gib),
        ("Ray's directory", node.look["ray_free_bytes"], limits.ray_free_gib),
    )
    return [
        _finding(
            node,
            "disk",
            f"{_gib(free)} free in {place}, less than {least:g} GiB",
            "free some, or lower the limit",
        )
        for place, free, least in places
        if free is not None and free < least * _GIB
    ]


def _clock(node: NodeSeen, limits: Limits) -> list[Finding]:
    """Only what is certain: the round trip is taken off."""
    if node.skew_s is None or abs(node.skew_s) - node.skew_error_s <= limits.skew_s:
        return []
    problem = f"its clock is {node.skew_s:+.1f} s off (± {node.skew_error_s:.1f} s)"
    return [_finding(node, "clock", problem, "start its time service (chrony, ntpd)")]


def _leftovers(node: NodeSeen, is_live: Mapping[str, bool]) -> list[Finding]:
    dead: dict[str, list[int]] = {}
    for carrier in node.look["carriers"]:
        if not is_live.get(carrier["run_id"]):
            dead.setdefault(carrier["run_id"], []).append(carrier["pid"])
    return [
        _finding(
            node,
            "leftovers",
            f"run {run_id} has ended, and pid {', '.join(map(str, sorted(pids)))} of it lives",
            "`python -m flows.reconcile` where it ran, or "
            f"`python -m tasks.ray.nodes --address ... --run-id {run_id}`",
        )
        for run_id, pids in dead.items()
    ]


def _gpus(node: NodeSeen, limits: Limits, has_driver: bool) -> list[Finding]:
    seen = node.look["gpus"]
    if seen["problem"]:
        remedy = "restart its driver, or drain the node"
        return [_finding(node, "gpus", seen["problem"], remedy)]
    if not seen["driver"]:
        is_wrong = limits.gpus == "real" or (limits.gpus == "auto" and has_driver)
        if not node.gpus or not is_wrong:
            return []
        problem = f"Ray counts {node.gpus:g} GPUs, and there is no driver"
        return [
            _finding(node, "gpus", problem, "install it, or start its raylet with --num-gpus 0")
        ]
    found = []
    if len(seen["gpus"]) != node.gpus:
        problem = f"Ray counts {node.gpus:g} GPUs, the driver sees {len(seen['gpus'])}"
        found.append(_finding(node, "gpus", problem, "reset what fell off, restart its raylet"))
    for gpu in seen["gpus"]:
        held = _held_mib(gpu, seen["processes"])
        if held > limits.gpu_held_mib:
            problem = f"{held} MiB of {gpu['uuid']} are held by no process that lives here"
            remedy = "`nvidia-smi --gpu-reset`, or end what holds it from another container"
            found.append(_finding(node, "gpus", problem, remedy))
    return found


def _held_mib(gpu: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> int:
    """What living processes do not account for; 0 where one of them does not tell its share."""
    alive = [p["used_mib"] for p in processes if p["uuid"] == gpu["uuid"] and p["alive"]]
    if gpu["used_mib"] is None or None in alive:
        return 0
    return int(gpu["used_mib"] - sum(alive))


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / _GIB:.1f} GiB"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
