"""A gang that no free cluster could hold is known before anything starts."""

from __future__ import annotations

import pytest

from tasks.gang.demand import Demand, NodeTotal, why_never


def node(gpus: float, cpus: float = 256) -> NodeTotal:
    return NodeTotal(name="n", gpus=gpus, cpus=cpus)


def demand(nodes: int, gpus: int, cpus_per_gpu: float = 3) -> Demand:
    return Demand(nodes=nodes, gpus_per_node=gpus, cpus_per_gpu=cpus_per_gpu)


@pytest.mark.parametrize(
    ("asked", "nodes"),
    [
        (demand(1, 8), [node(8)]),
        # on more nodes than are asked for
        (demand(2, 4), [node(8), node(8), node(0)]),
        # just as many CPUs as go with the GPUs
        (demand(1, 8), [node(8, cpus=24)]),
    ],
)
def test_a_gang_that_a_free_cluster_could_hold_is_feasible(
    asked: Demand, nodes: list[NodeTotal]
) -> None:
    assert why_never(asked, nodes) == ""


@pytest.mark.parametrize(
    ("asked", "nodes"),
    [
        # one GPU more than the largest node has, though there are enough in all
        (demand(1, 9), [node(8), node(8)]),
        # one node too few
        (demand(3, 8), [node(8), node(8)]),
        # one CPU too few: verl's bundles would wait for ever
        (demand(1, 8), [node(8, cpus=23)]),
        # nothing but a head
        (demand(1, 1), [node(0)]),
        (demand(1, 1), []),
    ],
)
def test_a_gang_that_never_fits_is_told_with_the_numbers(
    asked: Demand, nodes: list[NodeTotal]
) -> None:
    why = why_never(asked, nodes)

    assert str(asked) in why
    assert "Ask for less" in why
