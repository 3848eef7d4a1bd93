"""The preflight finds a problem of a node from the facts that the node reported."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.upkeep.preflight import (
    CALLER,
    DEFAULT_LIMITS,
    Limits,
    NodeResult,
    Survey,
    judge_nodes,
)

GIB = 1 << 30
LOGICAL: dict[str, Any] = {"driver": False, "problem": "", "gpus": [], "processes": []}


def gpus(count: int, each_mib: int = 3, **process: Any) -> dict[str, Any]:
    gpu_reports = [{"uuid": f"GPU-{n}", "used_mib": each_mib} for n in range(count)]
    return {
        "driver": True,
        "problem": "",
        "gpus": gpu_reports,
        "processes": [{"uuid": "GPU-0", "pid": 7, **process}] if process else [],
    }


def node(name: str = "10.0.0.2", *, counted: float = 8.0, **other: Any) -> NodeResult:
    fields = {key: other.pop(key) for key in list(other) if key in NodeResult.__dataclass_fields__}
    facts = {
        "machine": name,
        "code": {"digest": "abc", "problem": ""},
        "shared_problem": "",
        "shared_free_bytes": 100 * GIB,
        "ray_free_bytes": 100 * GIB,
        "carriers": [],
        "gpus": LOGICAL,
        **other,
    }
    return NodeResult(**{"name": name, "gpus": counted, "facts": facts, "skew_s": 0.0} | fields)


def checks(*nodes: NodeResult, limits: Limits = DEFAULT_LIMITS, live: str = "") -> list[str]:
    verdict = judge_nodes(survey(*nodes, live=live), limits)
    return [f"{finding.node} {finding.check}" for finding in verdict.findings]


def survey(*nodes: NodeResult, live: str = "") -> Survey:
    return Survey(nodes=nodes, shared="/shared", code="abc", running_run_ids=frozenset([live]))


def carrier(run_id: str) -> dict[str, Any]:
    return {"pid": 812, "run_id": run_id, "attempt": "1"}


def test_healthy_node_has_no_finding() -> None:
    assert checks(node()) == []


@pytest.mark.parametrize(
    ("checked_node", "check"),
    [
        (node(unreached="no answer within 60 s", facts={}), "reach"),
        (node(code={"digest": "", "problem": "ModuleNotFoundError: tasks"}), "code"),
        (node(code={"digest": "xyz", "problem": ""}), "code"),
        (node(shared_problem="there is no directory /shared"), "shared"),
        (node(is_elsewhere=True), "shared"),
        (node(shared_free_bytes=9 * GIB), "disk"),
        (node(ray_free_bytes=4 * GIB), "disk"),
        (node(skew_s=2.2, skew_error_s=0.1), "clock"),
        (node(skew_s=-2.2, skew_error_s=0.1), "clock"),
        (node(carriers=[carrier("ended")]), "leftovers"),
        # Ray reports eight GPUs, but the GPU driver finds only seven
        (node(gpus=8.0, facts=node().facts | {"gpus": gpus(7)}), "gpus"),
        # the GPU driver does not answer
        (node(facts=node().facts | {"gpus": LOGICAL | {"problem": "nvidia-smi failed"}}), "gpus"),
        # a process that has ended still holds GPU memory
        (
            node(facts=node().facts | {"gpus": gpus(8, 40_000, used_mib=39_000, alive=False)}),
            "gpus",
        ),
    ],
)
def test_faulty_node_is_reported_with_the_failed_check(
    checked_node: NodeResult, check: str
) -> None:
    assert checks(checked_node) and set(checks(checked_node)) == {f"10.0.0.2 {check}"}


@pytest.mark.parametrize(
    "checked_node",
    [
        # the free disk space is exactly as large as required
        node(shared_free_bytes=10 * GIB, ray_free_bytes=5 * GIB),
        # the measured clock skew is 4 s, but the measurement error is large, so the clock may be
        # correct
        node(skew_s=4.0, skew_error_s=2.5),
        node(carriers=[carrier("live")]),
        # the GPU memory is held by a living process, or the holder is unknown, so the GPU may be
        # healthy
        node(gpus=1.0, facts=node().facts | {"gpus": gpus(1, 40_000, used_mib=39_500, alive=True)}),
        node(gpus=1.0, facts=node().facts | {"gpus": gpus(1, 40_000, used_mib=None, alive=True)}),
        # the GPU driver itself may use this amount of memory, without a process
        node(facts=node().facts | {"gpus": gpus(8, 1024)}),
    ],
)
def test_possibly_healthy_node_has_no_finding(checked_node: NodeResult) -> None:
    assert checks(checked_node, live="live") == []


@pytest.mark.parametrize(
    ("option", "has_other_driver", "is_fault"),
    [("auto", False, False), ("auto", True, True), ("real", False, True), ("any", True, False)],
)
def test_missing_driver_is_a_fault_if_other_nodes_have_one(
    option: Any, has_other_driver: bool, is_fault: bool
) -> None:
    other = node("10.0.0.3", facts=node().facts | {"machine": "b", "gpus": gpus(8)})

    findings = checks(node(), *([other] if has_other_driver else []), limits=Limits(gpus=option))

    assert bool(findings) is is_fault


def test_leftover_is_reported_once_per_machine() -> None:
    nodes = (node("a", carriers=[carrier("x")]), node("b", carriers=[carrier("x")], machine="a"))

    assert checks(*nodes) == ["a leftovers"]


def test_missing_code_is_ignored_if_not_required() -> None:
    checked_node = node(code={"digest": "", "problem": "ModuleNotFoundError"})

    assert checks(checked_node, limits=Limits(code="any")) == []


def test_summary_names_node_problem_and_remedy() -> None:
    checked_node = node(shared_problem="/shared is not writable: Read-only file system")

    verdict = judge_nodes(survey(checked_node), DEFAULT_LIMITS)

    assert verdict.summary.splitlines() == [
        "unfit nodes: 10.0.0.2 (1 nodes were checked)",
        "10.0.0.2: shared: /shared is not writable: Read-only file system "
        "(mount the shared file system at /shared, writable)",
    ]
    assert "| 10.0.0.2 | shared |" in verdict.as_markdown()


def test_unknown_devices_are_a_fault_of_the_caller() -> None:
    caller = NodeResult(name=CALLER, facts={"devices_problem": "MUSTER_GPUS=a: 'a' is no device"})

    assert checks(caller, node()) == [f"{CALLER} devices"]
