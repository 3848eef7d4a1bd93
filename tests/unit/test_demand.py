"""Gangs that no cluster could ever hold are detected before anything starts."""

from __future__ import annotations

import pytest

from tasks.queue.nodes import explain_infeasible
from tasks.queue.packing import Demand
from tasks.ray.usage import Cluster, ClusterNode


def node(gpus: int, cpus: float | None = 256) -> ClusterNode:
    return ClusterNode(name="n", gpus=gpus, cpus=cpus)


def demand(nodes: int, gpus: int, cpus_per_gpu: float = 3) -> Demand:
    return Demand(nodes=nodes, gpus_per_node=gpus, cpus_per_gpu=cpus_per_gpu)


@pytest.mark.parametrize(
    ("requested", "nodes"),
    [
        (demand(1, 8), [node(8)]),
        # a gang fits: the cluster has more nodes than the gang needs
        (demand(2, 4), [node(8), node(8), node(0)]),
        # the node has exactly the number of CPUs that the gang needs, so the gang fits
        (demand(1, 8), [node(8, cpus=24)]),
        # the number of CPUs of the node is unknown, so this number is not checked
        (demand(1, 8), [node(8, cpus=None)]),
    ],
)
def test_feasible_gang_is_accepted(requested: Demand, nodes: list[ClusterNode]) -> None:
    assert explain_infeasible(requested, Cluster(nodes=tuple(nodes))) == ""


@pytest.mark.parametrize(
    ("requested", "nodes"),
    [
        # the gang needs more GPUs on a node than the largest node has, so the gang can never start
        (demand(1, 9), [node(8), node(8)]),
        # the cluster has one node too few, so the gang can never start
        (demand(3, 8), [node(8), node(8)]),
        # the gang needs 24 CPUs (3 for each GPU), but the node has only 23, so the gang can never
        # start
        (demand(1, 8), [node(8, cpus=23)]),
        # the only node of the cluster is a head node without GPUs, so the gang can never start
        (demand(1, 1), [node(0)]),
        (demand(1, 1), []),
    ],
)
def test_infeasible_gang_is_explained_with_numbers(
    requested: Demand, nodes: list[ClusterNode]
) -> None:
    why = explain_infeasible(requested, Cluster(nodes=tuple(nodes)))

    assert requested.describe() in why
    assert "Request fewer GPUs" in why


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        (demand(2, 8), "2 nodes with 8 GPUs and 24 CPUs each"),
        (demand(1, 1, 1), "1 node with 1 GPU and 1 CPU"),
        (demand(1, 1, 0.5), "1 node with 1 GPU and 0.5 CPUs"),
    ],
)
def test_demand_is_described_in_words(requested: Demand, words: str) -> None:
    assert requested.describe() == words


def test_drained_and_occupied_nodes_count_as_available_later() -> None:
    drained = ClusterNode(name="n1", gpus=8, cpus=24, is_drained=True)
    crowded = ClusterNode(name="n2", gpus=8, cpus=24, others_gpus=8)

    assert explain_infeasible(demand(2, 8), Cluster(nodes=(drained, crowded))) == ""


def test_explanation_uses_the_accelerators_name() -> None:
    nodes = (node(8, cpus=32), node(8, cpus=None), node(8, cpus=None))

    why = explain_infeasible(demand(1, 16), Cluster(nodes=nodes, accelerator="NPU"))

    assert "needs 1 node with 16 NPUs and 48 CPUs," in why
    assert "1 with 8 NPUs and 32 CPUs, 2 with 8 NPUs." in why


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        ([2], "the cluster's only node is too small"),
        ([2, 2], "none of the cluster's 2 nodes is large enough"),
        ([], "the cluster has no nodes"),
    ],
)
def test_reason_counts_the_nodes_that_are_large_enough(gpus: list[int], text: str) -> None:
    nodes = tuple(ClusterNode(name=f"n{number}", gpus=count) for number, count in enumerate(gpus))
    demand = Demand(nodes=1, gpus_per_node=4, cpus_per_gpu=0)

    assert text in explain_infeasible(demand, Cluster(nodes=nodes))


@pytest.mark.parametrize(
    ("gpus", "cluster_id", "expected"),
    [([0], "", True), ([0, 1], "", False), ([0], "ray-1", False)],
)
def test_reason_names_the_variable_for_made_up_gpus_if_no_machine_has_gpus(
    gpus: list[int], cluster_id: str, expected: bool
) -> None:
    nodes = tuple(ClusterNode(name=f"n{number}", gpus=count) for number, count in enumerate(gpus))

    why = explain_infeasible(demand(1, 4), Cluster(nodes=nodes, id=cluster_id))

    assert ("set MUSTER_GPUS=0" in why) is expected
