"""Ray nodes that could not be checked for leftover processes when a job ended.

The Ray cluster is a fake.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.processes.identity import host_name
from tasks.ray import control_store
from tasks.ray.dashboard import Dashboard, JobState, LiveNode, NoAnswer
from tasks.ray.end import JobEnd, TakeDown
from tasks.ray.nodes import LeftoverProcess, SweepReport
from tasks.ray.submission import SubmissionFile
from tasks.ray.unchecked_nodes import UncheckedNode, read_notes
from tasks.record.run_json import SubmissionJson
from tasks.upkeep import node_checks, reconcile
from tests.support.ray_jobs import skip_node_preparation

ADDRESS = "http://10.0.0.1:8265"
BEGAN_AT = 1000.0
SILENT = UncheckedNode(node_id="bb", name="10.0.0.5", why="no answer within 60 s")
NO_NODE = UncheckedNode(node_id="", name="10.0.0.1:6379", why="the driver has ended")
FOUND = LeftoverProcess(node="10.0.0.5", pid=812, command="train --token s3cret")


class Cluster:
    """Fake Ray cluster. A search for leftover processes on its nodes returns the field `report`.

    The cluster also records which dashboards and nodes were contacted.
    """

    def __init__(self) -> None:
        self.living = ["aa", "bb"]
        self.lost: list[tuple[str, float]] = []
        self.is_away = False
        self.report = SweepReport()
        #: Node ids of each search for leftover processes. An empty set means that all nodes are
        #: searched.
        self.swept: list[set[str]] = []
        self.asked: list[str] = []

    address = ADDRESS

    def dashboard(self, address: str) -> Any:
        self.asked.append(address)
        return self

    async def aclose(self) -> None: ...

    async def gcs_address(self) -> str:
        if self.is_away:
            raise NoAnswer("no answer from http://10.0.0.1:8265")
        return "10.0.0.1:6379"

    async def job(self, submission_id: str) -> JobState:
        return JobState(status="SUCCEEDED")

    async def actors_of(self, ray_job_id: str) -> list[Any]:
        return []

    async def groups_of(self, ray_job_id: str) -> list[Any]:
        return []

    async def nodes(self) -> list[LiveNode]:
        return [
            LiveNode(
                node_id=node_id, ip="10.0.0.5", name=node_id, is_head=False, resources_total={}
            )
            for node_id in self.living
        ]

    async def lost_nodes(self, since: float) -> dict[str, str]:
        return {
            node_id: f"node {node_id} left" for node_id, lost_at in self.lost if lost_at >= since
        }

    async def sweep(self, gcs_address: str, **arguments: Any) -> SweepReport:
        self.swept.append(set(arguments.get("only", ())))
        return self.report


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()

    async def drivers_of(*_: object) -> frozenset[str]:
        return frozenset({"01"})

    monkeypatch.setattr(control_store, "list_drivers", drivers_of)
    monkeypatch.setattr(node_checks, "Dashboard", cluster.dashboard)
    monkeypatch.setattr(node_checks, "sweep", cluster.sweep)
    return cluster


@pytest.fixture
def end(cluster: Cluster, tmp_path: Path, muster_home: Path) -> Callable[..., JobEnd]:
    """Return a function that ends a Ray job, and then searches for leftover processes of the job.

    The arguments of the function are the nodes that this search cannot reach.
    """
    content = SubmissionJson(
        address=ADDRESS,
        submission_id="r--a01",
        run_id="r",
        attempt=1,
        component="trainer",
        submit_began_at=BEGAN_AT,
        submitted_at=BEGAN_AT,
    )

    def ended(*unreached: UncheckedNode) -> JobEnd:
        cluster.report = SweepReport(unreached=unreached)
        dashboard: Any = cluster
        down = TakeDown(
            dashboard=dashboard,
            submission_id="r--a01",
            grace_s=0.0,
            emit=lambda name, **fields: None,
            on_state=lambda state: None,
            make_ready=skip_node_preparation,
            sweep=cluster.sweep,
        )
        return asyncio.run(down.run(SubmissionFile(tmp_path / "submission.json", content)))

    return ended


def read_noted_nodes() -> dict[str, dict[str, str]]:
    """Return the nodes that must still be checked for leftover processes of Ray jobs.

    Files on this host list these nodes. The result is `{submission_id: {node_id: node_name}}`.
    """
    return {note.job.submission_id: dict(note.nodes) for note in read_notes(host_name())}


def test_no_note_if_all_nodes_were_checked(end: Callable[..., JobEnd]) -> None:
    ended = end()

    assert (ended.left, ended.unseen, read_noted_nodes()) == ((), (), {})


def test_unreached_node_is_named_with_reason_and_command(
    end: Callable[..., JobEnd], tmp_path: Path
) -> None:
    ended = end(SILENT)

    message = (
        "Muster could not check node 10.0.0.5 for leftover processes (no answer within 60 s); to "
        "check these nodes again, run `muster reconcile`"
    )
    assert (ended.left, ended.unseen) == ((), (message,))
    assert read_noted_nodes() == {"r--a01": {"bb": "10.0.0.5"}}
    assert json.loads((tmp_path / "submission.json").read_text())["unseen"] == [message]


def test_sweep_without_any_reached_node_is_reported(
    end: Callable[..., JobEnd],
) -> None:
    ended = end(NO_NODE)

    assert ended.unseen == (
        "Muster could not check any node of the cluster for leftover processes (the driver has "
        "ended); to check these nodes again, run `muster reconcile`",
    )
    assert read_noted_nodes() == {"r--a01": {}}


def test_node_that_left_the_cluster_is_not_checked_again(
    end: Callable[..., JobEnd], cluster: Cluster
) -> None:
    cluster.living = ["aa"]
    cluster.lost = [("cc", BEGAN_AT + 5), ("dd", BEGAN_AT - 5)]

    ended = end(SILENT)

    assert ended.unseen == ("node cc left and node 10.0.0.5 left the cluster",)
    assert read_noted_nodes() == {}


def test_complete_check_deletes_the_note(end: Callable[..., JobEnd]) -> None:
    end(SILENT)

    end()

    assert read_noted_nodes() == {}


def test_only_the_first_of_many_nodes_are_named(
    end: Callable[..., JobEnd], cluster: Cluster
) -> None:
    silent = [UncheckedNode(node_id=f"n{n}", name=f"n{n}", why="gone") for n in range(100)]
    cluster.living = [node.node_id for node in silent]

    [message] = end(*silent).unseen

    assert "Muster could not check node n0 for leftover processes (gone)" in message
    assert "and 96 more" in message
    assert len(read_noted_nodes()["r--a01"]) == 100


@pytest.mark.parametrize(
    ("report", "results"),
    [
        (SweepReport(), ("checked node 10.0.0.5",)),
        # the results do not contain the command line of the ended process, because the command
        # line may contain a secret
        (
            SweepReport(killed=(FOUND,)),
            ("checked node 10.0.0.5", "ended node 10.0.0.5: pid 812"),
        ),
    ],
)
def test_node_that_answers_later_is_reported_and_removed(
    end: Callable[..., JobEnd], cluster: Cluster, report: SweepReport, results: tuple[str, ...]
) -> None:
    end(SILENT)
    cluster.report = report

    [run] = reconcile.reconcile_host().runs

    assert (run.name, run.nodes, run.open) == ("r", results, "")
    assert run.has_changes
    assert cluster.swept[-1] == {"bb"}
    assert read_noted_nodes() == {}


def test_silent_node_stays_noted_and_open(end: Callable[..., JobEnd], cluster: Cluster) -> None:
    end(SILENT)

    [run] = reconcile.reconcile_host().runs

    assert run.open == (
        "Muster could not check node 10.0.0.5 for leftover processes (no answer within 60 s)"
    )
    assert not run.has_changes
    assert read_noted_nodes() == {"r--a01": {"bb": "10.0.0.5"}}


def test_node_that_left_after_the_sweep_is_reported(
    end: Callable[..., JobEnd], cluster: Cluster
) -> None:
    end(SILENT)
    cluster.living = ["aa"]

    [run] = reconcile.reconcile_host().runs

    assert (run.nodes, run.open) == (("node 10.0.0.5 left the cluster",), "")
    assert read_noted_nodes() == {}


def test_survivors_of_sigkill_are_checked_again(
    end: Callable[..., JobEnd], cluster: Cluster
) -> None:
    end(SILENT)
    cluster.report = SweepReport(left=(FOUND,))

    [run] = reconcile.reconcile_host().runs

    assert run.open == "outlived SIGKILL: node 10.0.0.5: pid 812"
    assert read_noted_nodes() == {"r--a01": {"bb": "10.0.0.5"}}


def test_all_nodes_are_checked_if_none_was_reached_before(
    end: Callable[..., JobEnd], cluster: Cluster
) -> None:
    end(NO_NODE)
    cluster.report = SweepReport(unreached=(SILENT,))

    reconcile.reconcile_host()

    assert cluster.swept[-1] == set()
    assert read_noted_nodes() == {"r--a01": {"bb": "10.0.0.5"}}


def test_unreachable_cluster_is_asked_once_for_all_jobs(
    end: Callable[..., JobEnd], cluster: Cluster, muster_home: Path
) -> None:
    end(SILENT)
    note = muster_home / "unseen" / "r--a01.json"
    other = json.loads(note.read_text())
    other["job"] |= {"submission_id": "s--a01", "run_id": "s"}
    (muster_home / "unseen" / "s--a01.json").write_text(json.dumps(other))
    cluster.is_away = True

    runs = reconcile.reconcile_host().runs

    assert [run.name for run in runs] == ["r", "s"]
    assert all(
        "Muster could not check any node of the cluster (no answer from" in run.open for run in runs
    )
    assert len(cluster.asked) == 1
    assert read_noted_nodes().keys() == {"r--a01", "s--a01"}


def test_cluster_is_given_up_after_a_day_with_the_manual_command(
    end: Callable[..., JobEnd], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(SILENT)
    cluster.is_away = True
    monkeypatch.setattr(node_checks, "_GIVES_UP_AFTER_S", 0.0)

    [run] = reconcile.reconcile_host().runs

    assert f"run `muster cleanup --address {ADDRESS} --run-id r`" in run.nodes[0]
    assert (run.open, read_noted_nodes()) == ("", {})


def test_notes_of_other_hosts_are_not_changed(
    end: Callable[..., JobEnd], cluster: Cluster, muster_home: Path
) -> None:
    end(SILENT)
    note = muster_home / "unseen" / "r--a01.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"host": "another"}))

    assert reconcile.reconcile_host().runs == ()
    assert note.exists()


def test_planned_removals_are_not_reported_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(node_id: str, at_s: float, why: str | None) -> dict[str, Any]:
        return {
            "node_id": node_id,
            "node_ip": "10.0.0.7",
            "end_time_ms": at_s * 1000,
            "state_message": why,
        }

    async def state(*_: object, **equal: str) -> list[dict[str, Any]]:
        assert equal == {"state": "DEAD"}
        return [
            entry("aa", 10, "Unexpected termination: health check failed"),
            entry("bb", 10, "Expected termination: received SIGTERM"),
            entry("cc", 10, "Terminated due to idle (no Ray activity)"),
            entry("dd", 10, "Terminated due to preemption"),
            entry("ee", 10, None),
            # this node had left the cluster before the job was submitted, so it has no processes of
            # the job
            entry("ff", 9, None),
        ]

    async def lost() -> dict[str, str]:
        dashboard = Dashboard(ADDRESS)
        monkeypatch.setattr(dashboard, "_state", state)
        try:
            return await dashboard.lost_nodes(10.0)
        finally:
            await dashboard.aclose()

    words = asyncio.run(lost())

    assert [*words] == ["aa", "dd", "ee"]
    assert words["aa"] == (
        "node 10.0.0.7/aa left the cluster (Unexpected termination: health check failed)"
    )
    assert words["ee"] == "node 10.0.0.7/ee left the cluster"
