"""What there is for gangs, by what the ledger grants and what the cluster shows."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.queue.decision import shares_of
from tasks.queue.packing import Demand
from tasks.queue.policy import Held, Waiting, plan
from tasks.ray.usage import Cluster, ClusterNode

A = ClusterNode(name="a", gpus=8, cpus=32)
B = ClusterNode(name="b", gpus=8, cpus=32)


def cluster(*nodes: ClusterNode, **taken: Mapping[str, float]) -> Cluster:
    return Cluster(nodes=nodes, taken=taken)


def holder(run_id: str, demand: Demand, promised: Mapping[str, int]) -> Any:
    """As much of a run that holds as its shares are told by."""
    request = SimpleNamespace(name=run_id)
    return SimpleNamespace(id=run_id, request=request, demand=demand, promised=promised)


def gang(run_id: str, nodes: int, gpus: int, **promised: int) -> Any:
    return holder(run_id, Demand(nodes=nodes, gpus_per_node=gpus, cpus_per_gpu=3), promised)


def gpus_of(nodes: tuple[ClusterNode, ...]) -> dict[str, int]:
    return {node.name: node.usable_gpus for node in nodes}


def left(cluster: Cluster, *running: Any) -> dict[str, int]:
    """What the policy finds free, with nobody waiting."""
    shares = shares_of(cluster, running)
    gangs = [
        Held(id=str(run_id), gpus=gpus, cpus_per_gpu=3, place=(index,), ends_at=0.0)
        for index, (run_id, gpus) in enumerate(shares.held.items())
    ]
    return dict(plan([], gangs, shares.nodes, 0.0).free)


def test_all_of_a_free_cluster_is_there_in_the_order_of_its_nodes() -> None:
    shares = shares_of(cluster(B, A), [])

    assert shares.nodes == (
        ClusterNode(name="b", gpus=8, cpus=32),
        ClusterNode(name="a", gpus=8, cpus=32),
    )
    assert shares.held == {}


@pytest.mark.parametrize(
    ("promised", "taken", "held"),
    [
        # not yet taken
        ({"a": 4, "b": 4}, {}, {"a": 4, "b": 4}),
        # taken as promised
        ({"a": 4, "b": 4}, {"a": 4, "b": 4}, {"a": 4, "b": 4}),
        # Ray has placed it elsewhere
        ({"a": 4, "b": 4}, {"c": 4, "b": 4}, {"c": 4, "b": 4}),
        # in the middle of taking it, and maybe elsewhere
        ({"a": 4, "b": 4}, {"c": 4}, {"a": 4, "b": 4, "c": 4}),
        ({"a": 4, "b": 4}, {"a": 2}, {"a": 4, "b": 4}),
        # more than it has asked for
        ({"a": 4, "b": 4}, {"a": 8, "b": 4}, {"a": 8, "b": 4}),
        # a part of a GPU is a GPU that no gang can have
        ({"a": 4, "b": 4}, {"a": 4.5, "b": 4}, {"a": 5, "b": 4}),
        # as Ray's sums come out
        ({"a": 4, "b": 4}, {"a": 4.00001, "b": 3.99999}, {"a": 4, "b": 4}),
        # it began past the gate: nobody has promised it anything
        ({}, {"c": 4}, {"c": 4}),
        ({}, {}, {}),
        # a node that is gone takes no room, and counts for limits still
        ({"a": 4, "gone": 4}, {"a": 4}, {"a": 4, "gone": 4}),
    ],
)
def test_a_run_holds_what_it_has_taken_and_what_it_may_still_take(
    promised: dict[str, int], taken: dict[str, float], held: dict[str, int]
) -> None:
    nodes = (A, B, ClusterNode(name="c", gpus=8, cpus=32))

    shares = shares_of(cluster(*nodes, run=taken), [gang("run", 2, 4, **promised)])

    assert shares.held == {"run": held}


@pytest.mark.parametrize(
    ("node", "gpus"),
    [
        (ClusterNode(name="a", gpus=8, others_gpus=3), 5),
        # half of one is in use: no gang can have it
        (ClusterNode(name="a", gpus=8, others_gpus=0.5), 7),
        # as Ray's sums come out
        (ClusterNode(name="a", gpus=8, others_gpus=3.00001), 5),
        (ClusterNode(name="a", gpus=8, others_gpus=8), 0),
        (ClusterNode(name="a", gpus=0), 0),
    ],
)
def test_what_others_use_is_not_there(node: ClusterNode, gpus: int) -> None:
    shares = shares_of(cluster(node), [])

    assert gpus_of(shares.nodes) == {"a": gpus}


def test_cpus_that_others_use_are_not_there_and_unknown_ones_stay_unknown() -> None:
    node = ClusterNode(name="a", gpus=8, cpus=32, others_cpus=7.5)

    shares = shares_of(cluster(node, ClusterNode(name="b", gpus=8)), [])

    assert [node.usable_cpus for node in shares.nodes] == [24.5, None]


def test_a_run_of_ours_that_the_ledger_does_not_know_is_one_of_the_others() -> None:
    shares = shares_of(cluster(A, B, forgotten={"a": 3.0}), [])

    assert gpus_of(shares.nodes) == {"a": 5, "b": 8}
    assert shares.held == {}


def test_what_ends_on_a_drained_node_makes_no_room() -> None:
    drained = ClusterNode(name="a", gpus=8, cpus=32, is_drained=True)
    shares = shares_of(cluster(drained, B), [gang("run", 1, 8, a=8)])
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


def test_more_in_use_than_there_is_leaves_none_free_and_takes_none_from_other_nodes() -> None:
    crowded = ClusterNode(name="a", gpus=8, cpus=32, others_gpus=6)

    free = left(cluster(crowded, B), gang("run", 1, 4, a=4))

    assert free == {"a": 0, "b": 8}


def test_a_table_of_nodes_goes_by_what_was_promised() -> None:
    table = Cluster(nodes=(ClusterNode(name="n1", gpus=8), ClusterNode(name="n2", gpus=4)))

    assert left(table, gang("run", 1, 4, n2=4), gang("other", 1, 2, n1=2)) == {"n1": 6, "n2": 0}


ONE, TWO = "10.0.0.5/0a1b2c3d", "10.0.0.5/4e5f6071"


@pytest.mark.parametrize(
    ("promised", "there", "held"),
    [
        # a second node of that name has come: nobody knows which of them was meant
        ({"10.0.0.5": 8}, (ONE, TWO), {ONE: 8, TWO: 8}),
        # the other one has gone
        ({ONE: 8}, ("10.0.0.5",), {"10.0.0.5": 8}),
        # it has gone itself
        ({ONE: 8}, (TWO, "10.0.0.6"), {ONE: 8}),
        ({ONE: 8}, (ONE, TWO), {ONE: 8}),
    ],
)
def test_a_promise_follows_its_node_when_that_gets_or_loses_a_suffix(
    promised: dict[str, int], there: tuple[str, ...], held: dict[str, int]
) -> None:
    nodes = tuple(ClusterNode(name=name, gpus=8) for name in there)

    shares = shares_of(cluster(*nodes), [gang("run", 1, 8, **promised)])

    assert shares.held == {"run": held}


def two_nodes(taken: dict[str, dict[str, float]]) -> Cluster:
    nodes = (ClusterNode(name="n1", gpus=8), ClusterNode(name="n2", gpus=8))
    return Cluster(nodes=nodes, taken=taken)


def promise(run_id: str, gpus: dict[str, int]) -> Any:
    wide = max(gpus.values())
    return holder(run_id, Demand(nodes=len(gpus), gpus_per_node=wide, cpus_per_gpu=1), gpus)


ENDING, NEXT = promise("ending", {"n1": 6}), promise("next", {"n2": 7})


def test_a_run_that_ends_and_the_one_that_took_its_place_both_count() -> None:
    """The first has given its GPUs back to Ray, which has put the second there."""
    shares = shares_of(two_nodes({"next": {"n1": 7.0}}), [ENDING, NEXT])

    on = {
        node.name: sum(h.get(node.name, 0) for h in shares.held.values()) for node in shares.nodes
    }
    assert [node.usable_gpus - on[node.name] for node in shares.nodes] == [-5, 1]


def test_a_promise_follows_a_run_as_soon_as_nobody_else_was_promised_that() -> None:
    cluster = two_nodes({"next": {"n1": 7.0}})

    moved = [shares_of(cluster, gangs).moved for gangs in ([ENDING, NEXT], [NEXT])]

    assert moved == [{}, {"next": {"n1": 7}}]


def test_what_a_run_was_promised_is_there_once_it_has_taken_its_gpus_elsewhere() -> None:
    """Else it would be others' for a look, in which the head of the line is passed."""
    shares = shares_of(two_nodes({"next": {"n1": 7.0}}), [NEXT])

    assert [node.usable_gpus for node in shares.nodes] == [8, 8]
    assert shares.held == {"next": {"n1": 7}}


def test_a_run_that_has_not_taken_all_keeps_its_promise() -> None:
    shares = shares_of(two_nodes({"a": {"n1": 3.0}}), [promise("a", {"n2": 7})])

    assert shares.moved == {}
