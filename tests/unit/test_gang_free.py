"""The free GPUs of nodes, computed from the grants of runs and from the usage of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.queue.decision import compute_shares
from tasks.queue.packing import Demand
from tasks.queue.policy import Held, Waiting, plan
from tasks.ray.usage import Cluster, ClusterNode

A = ClusterNode(name="a", gpus=8, cpus=32)
B = ClusterNode(name="b", gpus=8, cpus=32)


def cluster(*nodes: ClusterNode, **used: Mapping[str, float]) -> Cluster:
    return Cluster(nodes=nodes, used=used)


def holder(run_id: str, demand: Demand, granted: Mapping[str, int]) -> Any:
    """Return a fake flow run that holds GPUs, as the queue reads it from the server.

    Args:
        run_id: Id of the run.
        demand: Nodes and GPUs that the run has requested.
        granted: Mapping from node name to number of granted GPUs.
    """
    request = SimpleNamespace(name=run_id)
    return SimpleNamespace(id=run_id, request=request, demand=demand, granted=granted)


def gang(run_id: str, nodes: int, gpus: int, **granted: int) -> Any:
    return holder(run_id, Demand(nodes=nodes, gpus_per_node=gpus, cpus_per_gpu=3), granted)


def gpus_of(nodes: tuple[ClusterNode, ...]) -> dict[str, int]:
    return {node.name: node.usable_gpus for node in nodes}


def count_free_gpus(cluster: Cluster, *running: Any) -> dict[str, int]:
    """Return the free GPUs of each node in a scheduling pass without waiting runs."""
    shares = compute_shares(cluster, running)
    gangs = [
        Held(id=str(run_id), gpus=gpus, cpus_per_gpu=3, place=(index,), ends_at=0.0)
        for index, (run_id, gpus) in enumerate(shares.held.items())
    ]
    return dict(plan([], gangs, shares.nodes, 0.0).free)


def test_idle_cluster_is_all_free_in_node_order() -> None:
    shares = compute_shares(cluster(B, A), [])

    assert shares.nodes == (
        ClusterNode(name="b", gpus=8, cpus=32),
        ClusterNode(name="a", gpus=8, cpus=32),
    )
    assert shares.held == {}


@pytest.mark.parametrize(
    ("granted", "used", "held"),
    [
        # the run uses no GPUs yet, so it holds the granted GPUs
        ({"a": 4, "b": 4}, {}, {"a": 4, "b": 4}),
        # the run uses exactly the granted GPUs, so it holds these GPUs
        ({"a": 4, "b": 4}, {"a": 4, "b": 4}, {"a": 4, "b": 4}),
        # Ray placed the run on other nodes than granted, so the run holds only the GPUs that it
        # uses
        ({"a": 4, "b": 4}, {"c": 4, "b": 4}, {"c": 4, "b": 4}),
        # the run uses only a part of its GPUs so far, so it holds the granted GPUs, and also the
        # used GPUs on other nodes
        ({"a": 4, "b": 4}, {"c": 4}, {"a": 4, "b": 4, "c": 4}),
        ({"a": 4, "b": 4}, {"a": 2}, {"a": 4, "b": 4}),
        # the run uses more GPUs than it was granted, so it holds the GPUs that it uses
        ({"a": 4, "b": 4}, {"a": 8, "b": 4}, {"a": 8, "b": 4}),
        # a run that uses a part of a GPU holds the whole GPU
        ({"a": 4, "b": 4}, {"a": 4.5, "b": 4}, {"a": 5, "b": 4}),
        # Ray reports GPU numbers with rounding errors. The numbers are rounded to whole GPUs.
        ({"a": 4, "b": 4}, {"a": 4.00001, "b": 3.99999}, {"a": 4, "b": 4}),
        # the run was started without a grant, so it holds only the GPUs that it uses
        ({}, {"c": 4}, {"c": 4}),
        ({}, {}, {}),
        # a node has disappeared, but the run still holds the GPUs that were granted on this node
        ({"a": 4, "gone": 4}, {"a": 4}, {"a": 4, "gone": 4}),
    ],
)
def test_run_holds_used_and_granted_gpus(
    granted: dict[str, int], used: dict[str, float], held: dict[str, int]
) -> None:
    nodes = (A, B, ClusterNode(name="c", gpus=8, cpus=32))

    shares = compute_shares(cluster(*nodes, run=used), [gang("run", 2, 4, **granted)])

    assert shares.held == {"run": held}


@pytest.mark.parametrize(
    ("node", "gpus"),
    [
        (ClusterNode(name="a", gpus=8, others_gpus=3), 5),
        # half of a GPU is in use, so no gang can get that GPU
        (ClusterNode(name="a", gpus=8, others_gpus=0.5), 7),
        # Ray reports numbers of GPUs with rounding errors, so the numbers are rounded
        (ClusterNode(name="a", gpus=8, others_gpus=3.00001), 5),
        (ClusterNode(name="a", gpus=8, others_gpus=8), 0),
        (ClusterNode(name="a", gpus=0), 0),
    ],
)
def test_gpus_used_by_others_are_not_free(node: ClusterNode, gpus: int) -> None:
    shares = compute_shares(cluster(node), [])

    assert gpus_of(shares.nodes) == {"a": gpus}


def test_cpus_used_by_others_are_not_free_and_unknown_numbers_stay_unknown() -> None:
    node = ClusterNode(name="a", gpus=8, cpus=32, others_cpus=7.5)

    shares = compute_shares(cluster(node, ClusterNode(name="b", gpus=8)), [])

    assert [node.usable_cpus for node in shares.nodes] == [24.5, None]


def test_gpus_of_a_job_without_a_flow_run_are_not_free() -> None:
    shares = compute_shares(cluster(A, B, forgotten={"a": 3.0}), [])

    assert gpus_of(shares.nodes) == {"a": 5, "b": 8}
    assert shares.held == {}


def test_end_of_a_run_on_a_drained_node_makes_no_room() -> None:
    drained = ClusterNode(name="a", gpus=8, cpus=32, is_drained=True)
    shares = compute_shares(cluster(drained, B), [gang("run", 1, 8, a=8)])
    (held,) = shares.held.values()
    running = Held(id="run", gpus=held, cpus_per_gpu=3, place=(1,), ends_at=60.0)
    waiting = Waiting(
        id="next",
        demand=Demand(nodes=2, gpus_per_node=8, cpus_per_gpu=3),
        place=(2,),
        estimate_s=60.0,
    )

    planned = plan([waiting], [running], shares.nodes, 0.0, policy="backfill")

    assert planned.free == {"a": 0, "b": 8}
    assert planned.reasons["next"].starts_at is None


def test_overuse_of_a_node_does_not_affect_other_nodes() -> None:
    crowded = ClusterNode(name="a", gpus=8, cpus=32, others_gpus=6)

    free = count_free_gpus(cluster(crowded, B), gang("run", 1, 4, a=4))

    assert free == {"a": 0, "b": 8}


def test_granted_gpus_of_a_node_table_are_not_free() -> None:
    table = Cluster(nodes=(ClusterNode(name="n1", gpus=8), ClusterNode(name="n2", gpus=4)))

    assert count_free_gpus(table, gang("run", 1, 4, n2=4), gang("other", 1, 2, n1=2)) == {
        "n1": 6,
        "n2": 0,
    }


FIRST, SECOND = "10.0.0.5/0a1b2c3d", "10.0.0.5/4e5f6071"


@pytest.mark.parametrize(
    ("granted", "node_names", "held"),
    [
        # a second node with the granted address has appeared. Each of the two nodes may be the
        # granted node, so the GPUs of both nodes count as held
        ({"10.0.0.5": 8}, (FIRST, SECOND), {FIRST: 8, SECOND: 8}),
        # two nodes had the same address, so the grant also contains the node id. The second node
        # has disappeared, so the name of the first node is now the address without the node id
        ({FIRST: 8}, ("10.0.0.5",), {"10.0.0.5": 8}),
        # the granted node has disappeared: its GPUs still count as held under the granted name
        ({FIRST: 8}, (SECOND, "10.0.0.6"), {FIRST: 8}),
        # two nodes have the same address now. The grant contains the node id of the first node, so
        # only the GPUs of the first node count as held
        ({FIRST: 8}, (FIRST, SECOND), {FIRST: 8}),
    ],
)
def test_grant_follows_its_node_if_the_suffix_changes(
    granted: dict[str, int], node_names: tuple[str, ...], held: dict[str, int]
) -> None:
    nodes = tuple(ClusterNode(name=name, gpus=8) for name in node_names)

    shares = compute_shares(cluster(*nodes), [gang("run", 1, 8, **granted)])

    assert shares.held == {"run": held}


def two_nodes(used: dict[str, dict[str, float]]) -> Cluster:
    nodes = (ClusterNode(name="n1", gpus=8), ClusterNode(name="n2", gpus=8))
    return Cluster(nodes=nodes, used=used)


def grant(run_id: str, gpus: dict[str, int]) -> Any:
    wide = max(gpus.values())
    return holder(run_id, Demand(nodes=len(gpus), gpus_per_node=wide, cpus_per_gpu=1), gpus)


ENDING, NEXT = grant("ending", {"n1": 6}), grant("next", {"n2": 7})


def test_ending_run_and_its_successor_both_count() -> None:
    """The GPUs of an ending run still count as held, even if the next run already uses these GPUs.

    The ending run still has processes, so both runs hold these GPUs.
    """
    shares = compute_shares(two_nodes({"next": {"n1": 7.0}}), [ENDING, NEXT])

    held_on = {
        node.name: sum(held.get(node.name, 0) for held in shares.held.values())
        for node in shares.nodes
    }
    assert [node.usable_gpus - held_on[node.name] for node in shares.nodes] == [-5, 1]


def test_grant_moves_with_a_run_if_no_other_run_was_granted_the_gpus() -> None:
    cluster = two_nodes({"next": {"n1": 7.0}})

    moved = [compute_shares(cluster, gangs).moved for gangs in ([ENDING, NEXT], [NEXT])]

    assert moved == [{}, {"next": {"n1": 7}}]


def test_gpus_of_the_old_grant_are_free_after_a_move() -> None:
    """If Ray places a run on other nodes than granted, the granted GPUs count as free.

    Otherwise the first waiting run would wait for GPUs that no run uses.
    """
    shares = compute_shares(two_nodes({"next": {"n1": 7.0}}), [NEXT])

    assert [node.usable_gpus for node in shares.nodes] == [8, 8]
    assert shares.held == {"next": {"n1": 7}}


def test_run_that_does_not_use_all_gpus_yet_keeps_its_grant() -> None:
    shares = compute_shares(two_nodes({"a": {"n1": 3.0}}), [grant("a", {"n2": 7})])

    assert shares.moved == {}
