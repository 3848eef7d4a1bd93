"""The scheduling policy: the waiting gangs that start, their nodes, and why other gangs wait.

Each case is checked with the policy and with `slow_plan`, a slow and simple function that computes
the same plan. Other tests compare the two on random clusters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tasks.queue.packing import Demand, Policy
from tasks.queue.policy import Held, Reason, Waiting, Why, plan
from tasks.ray.usage import ClusterNode
from tests.support.slow_plan import slow_plan

NOW = 1000.0
GPUS, BEHIND, WOULD_DELAY, LIMIT, RETRY = (
    Why.GPUS,
    Why.BEHIND,
    Why.WOULD_DELAY,
    Why.LIMIT,
    Why.RETRY,
)


def cluster(*gpus: int, cpus: float | None = None) -> tuple[ClusterNode, ...]:
    """Return nodes with the names a, b, c, ... and these numbers of GPUs.

    Each node has `cpus` CPUs. None means that the number of CPUs is unknown.
    """
    return tuple(ClusterNode(name="abcdefgh"[i], gpus=n, cpus=cpus) for i, n in enumerate(gpus))


def held(
    id: str, left_s: float = 100, place: int = 0, cpus: float = 0, tags: str = "", **gpus: int
) -> Held:
    """Return a running gang.

    Args:
        id: Id of the gang.
        left_s: Seconds until the expected end of the gang.
        place: Position that the gang had in the queue.
        cpus: Number of CPUs for each GPU.
        tags: Tags of the gang, separated by spaces.
        **gpus: Number of GPUs on each node. The keyword is the name of the node.
    """
    return Held(
        id=id,
        gpus=gpus,
        cpus_per_gpu=cpus,
        place=(0, place),
        ends_at=NOW + left_s,
        tags=frozenset(tags.split()),
    )


def waits(
    place: int,
    gpus: int,
    nodes: int = 1,
    *,
    for_s: float = 1000,
    in_s: float = -1,
    cpus: float = 0,
    tags: str = "",
    avoid: str = "",
) -> Waiting:
    """Return the waiting gang with the name `w<place>`.

    Args:
        place: Position of the gang in the queue.
        gpus: Number of GPUs on each node.
        nodes: Number of nodes.
        for_s: Estimated duration, in seconds.
        in_s: Seconds that the gang must at least wait, for example after a requeue.
        cpus: Number of CPUs for each GPU.
        tags: Tags of the gang, separated by spaces.
        avoid: Letters of the nodes that the gang should avoid.
    """
    return Waiting(
        id=f"w{place}",
        demand=Demand(nodes=nodes, gpus_per_node=gpus, cpus_per_gpu=cpus),
        place=(1, place),
        estimate_s=for_s,
        not_before=NOW + in_s,
        tags=frozenset(tags.split()),
        avoid=frozenset(avoid),
    )


def reason(why: Why, *waits_for: str, in_s: float | None = None, tag: str = "") -> Reason:
    starts_at = None if in_s is None else NOW + in_s
    return Reason(why=why, waits_for=waits_for, starts_at=starts_at, tag=tag)


@dataclass(frozen=True, slots=True)
class Case:
    line: Sequence[Waiting]
    gangs: Sequence[Held] = ()
    #: Mapping from each admitted gang to the letters of its nodes. The gangs are in the order of
    #: their admission.
    admitted: Mapping[str, str] = field(default_factory=dict)
    #: Mapping from each waiting gang to the complete reason, or only to the kind of reason.
    reasons: Mapping[str, Reason | Why] = field(default_factory=dict)
    nodes: tuple[ClusterNode, ...] = cluster(8, 8)
    limits: Mapping[str, int] | None = None
    free: Mapping[str, int] | None = None


def check(case: Case, policy: Policy) -> None:
    for make_plan in (plan, slow_plan):
        computed = make_plan(
            case.line, case.gangs, case.nodes, NOW, policy=policy, limits=case.limits
        )

        assert list(computed.admitted.items()) == [(i, tuple(n)) for i, n in case.admitted.items()]
        assert {
            id: reason if isinstance(case.reasons.get(id), Reason) else reason.why
            for id, reason in computed.reasons.items()
        } == dict(case.reasons)
        assert case.free in (None, computed.free)


@pytest.mark.parametrize("policy", ["fifo", "backfill"])
@pytest.mark.parametrize(
    "case",
    [
        # an empty queue starts nothing, and the free GPUs are reported
        Case([], [held("h", a=3)], free={"a": 5, "b": 8}),
        # all gangs that fit start, in the order of the queue
        Case(
            [waits(3, 8), waits(1, 4), waits(2, 4)],
            [],
            {"w1": "a", "w2": "a", "w3": "b"},
            free={"a": 0, "b": 0},
        ),
        # a gang gets the nodes with the fewest free GPUs
        Case([waits(1, 3)], [], {"w1": "b"}, nodes=cluster(8, 4, 6)),
        # two nodes have equally many free GPUs: the gang gets the first node
        Case([waits(1, 3)], [], {"w1": "b"}, nodes=cluster(8, 4, 4)),
        # a node that is too small is not used
        Case([waits(1, 3)], [], {"w1": "b"}, nodes=cluster(2, 8, 1)),
        # the nodes of a gang are listed in the same order as in the cluster
        Case([waits(1, 3, 2)], [], {"w1": "bd"}, nodes=cluster(8, 4, 2, 4)),
        Case([waits(1, 3, 2)], [], {"w1": "ac"}, nodes=cluster(8, 8, 4, 1)),
        # a gang may get all GPUs of the cluster
        Case([waits(1, 3, 3)], [], {"w1": "abc"}, nodes=cluster(3, 3, 3)),
        # free GPUs of two nodes are not added up
        Case(
            [waits(1, 8)],
            [held("h1", a=4), held("h2", b=4)],
            {},
            {"w1": GPUS},
            free={"a": 4, "b": 4},
        ),
        # the run needs two CPUs per GPU. Nodes a and b have fewer than 8 free CPUs, so they are not
        # used. Node c, whose number of CPUs is unknown, is used
        Case(
            [waits(1, 4, cpus=2)],
            [held("h", b=1, cpus=1)],
            {"w1": "c"},
            nodes=(
                *(*cluster(8, cpus=7.9), ClusterNode(name="b", gpus=8, cpus=8.0)),
                ClusterNode(name="c", gpus=8),
            ),
        ),
        # the gang that starts takes CPUs, so too few CPUs remain for the second gang
        Case(
            [waits(1, 2, cpus=3), waits(2, 2, cpus=3)],
            [],
            {"w1": "a"},
            {"w2": GPUS},
            nodes=cluster(8, cpus=11),
        ),
        # the node has one CPU, and the three running gangs use 0.1 CPUs each, so the waiting gang
        # gets the free 0.7 CPUs
        Case(
            [waits(1, 1, cpus=0.7)],
            [held(f"h{i}", a=1, cpus=0.1) for i in range(3)],
            {"w1": "a"},
            nodes=cluster(4, cpus=1.0),
        ),
        # the gangs `early` and `late` end before the gang `unneeded`, so the waiting gang gets the
        # GPUs of `early` and `late`
        Case(
            [waits(1, 8)],
            [held("late", 300, a=4), held("unneeded", 400, b=8), held("early", 200, a=4)],
            {},
            {"w1": reason(GPUS, "early", "late", in_s=300)},
        ),
        # `w1` needs 8 GPUs and waits for the gang `large`. The gang `small` ends earlier, but node
        # b has only 4 GPUs
        Case(
            [waits(1, 8)],
            [held("small", 50, b=2), held("large", 100, a=8)],
            {},
            {"w1": reason(GPUS, "large", in_s=100)},
            nodes=cluster(8, 4),
        ),
        # The gang `outrun` should have ended 50 s ago. So `w1` is expected to start now, and not at
        # a time in the past
        Case(
            [waits(1, 8, 2)], [held("outrun", -50, a=1)], {}, {"w1": reason(GPUS, "outrun", in_s=0)}
        ),
        # a requeued gang starts when its delay is over
        Case([waits(1, 1, in_s=0)], [], {"w1": "a"}),
        # the delay of the requeued gang ends in 30 s, but enough GPUs become free only in 100 s
        Case(
            [waits(1, 8, 2, in_s=30)],
            [held("h", 100, a=8)],
            {},
            {"w1": reason(RETRY, "h", in_s=100)},
        ),
        # a gang over the limit of a tag is skipped, and later gangs may start
        Case(
            [waits(1, 8, tags="red"), waits(2, 4, tags="red"), waits(3, 8, tags="blue")],
            [],
            {"w2": "a", "w3": "b"},
            {"w1": reason(LIMIT, tag="red")},
            limits={"red": 7},
        ),
        # the gang `h` holds 4 GPUs on a node that has disappeared. These GPUs still count for the
        # limit of the tag
        Case(
            [waits(1, 3, tags="red"), waits(2, 2, tags="red")],
            [held("h", a=2, gone=4, tags="red")],
            {"w2": "a"},
            {"w1": LIMIT},
            limits={"red": 8},
        ),
        # a gang with several tags must stay within the GPU limit of each of its tags
        Case(
            [waits(1, 4, tags="red blue free"), waits(2, 4, tags="blue")],
            [],
            {},
            {"w1": reason(LIMIT, tag="blue"), "w2": reason(LIMIT, tag="blue")},
            limits={"red": 8, "blue": 3},
        ),
        # a drained node gets no new gang, but gangs that already run on the node continue
        Case(
            [waits(1, 4), waits(2, 8)],
            [held("h", 100, a=6)],
            {"w1": "b"},
            {"w2": reason(GPUS, "w1", in_s=1000)},
            nodes=cluster(0, 8),
            free={"a": 0, "b": 4},
        ),
        # a gang avoids the nodes on which its run failed before, if there are enough other nodes
        Case([waits(1, 8, 2, avoid="ab")], [], {"w1": "cd"}, nodes=cluster(8, 8, 8, 8)),
        Case([waits(1, 4, avoid="bz")], [held("h", b=4)], {"w1": "a"}),
        # if too few other nodes are free, the gang also gets nodes that it should avoid, but as few
        # as possible
        Case([waits(1, 8, 2, avoid="abc")], [], {"w1": "ad"}, nodes=cluster(8, 8, 8, 8)),
        Case([waits(1, 8, avoid="ab")], [held("h", a=1)], {"w1": "b"}),
        # the gang `h` holds GPUs only on node z, which has disappeared. So all GPUs of nodes a and
        # b are free
        Case([waits(1, 8, 2)], [held("h", z=8)], {"w1": "ab"}),
        # without nodes every gang waits
        Case([waits(1, 1)], [held("h", a=1)], {}, {"w1": GPUS}, nodes=(), free={}),
    ],
)
def test_every_policy_follows_the_common_rules(case: Case, policy: Policy) -> None:
    check(case, policy)


@pytest.mark.parametrize(
    "case",
    [
        # too few GPUs are free for the second gang, so the third gang waits behind the second gang
        Case(
            [waits(1, 4), waits(2, 8), waits(3, 1)],
            [held("h", a=4, b=1)],
            {"w1": "a"},
            {"w2": reason(GPUS, "h", in_s=100), "w3": reason(BEHIND, "w2")},
            free={"a": 0, "b": 7},
        ),
        # a gang that can never fit does not block later gangs
        Case(
            [waits(1, 8, 3), waits(2, 1)],
            [],
            {"w2": "a"},
            {"w1": replace(reason(GPUS), never_fits_now=True)},
        ),
        # a requeued gang must wait 30 s although enough GPUs are free. Later gangs wait behind this
        # gang
        Case(
            [waits(1, 1, in_s=30), waits(2, 1), waits(3, 1, in_s=60)],
            [],
            {},
            {"w1": reason(RETRY, in_s=30), "w2": reason(BEHIND, "w1"), "w3": reason(RETRY)},
        ),
    ],
)
def test_fifo_follows_its_rules(case: Case) -> None:
    check(case, "fifo")


#: HEAD is the first waiting gang. HEAD needs the nodes a and b. Node b is free now. Node a will be
#: free in 100 s, when the running gang OTHER ends.
HEAD, OTHER = waits(1, 8, 2), held("h", 100, a=8)


@pytest.mark.parametrize(
    "case",
    [
        # the first gang, HEAD, can start in 100 s. A later gang that ends within 100 s may start
        # now
        Case([HEAD, waits(2, 8, for_s=99)], [OTHER], {"w2": "b"}, {"w1": GPUS}),
        Case([HEAD, waits(2, 8, for_s=100)], [OTHER], {"w2": "b"}, {"w1": GPUS}),
        # the first gang, HEAD, can start in 100 s. A later gang that needs 101 s would delay HEAD,
        # so the later gang waits
        Case(
            [HEAD, waits(2, 8, for_s=101)],
            [OTHER],
            {},
            {"w1": GPUS, "w2": reason(WOULD_DELAY, "w1")},
        ),
        # w1 needs only the 8 GPUs of node a, which are free at 100 s. So the other gangs may use
        # node b for longer than 100 s
        Case(
            [waits(1, 8), waits(2, 3, for_s=9000), waits(3, 1), waits(4, 1)],
            [held("h1", 100, a=8), held("h2", 5000, b=4)],
            {"w2": "b", "w3": "b"},
            {"w1": GPUS, "w4": BEHIND},
        ),
        # w1 will start at 100 s, and will leave two GPUs of node b unused. w2 takes these two GPUs.
        # If w3 or w4 started now, it would still run at 100 s, and would delay w1
        Case(
            [waits(1, 6, 2), waits(2, 2), waits(3, 2), waits(4, 1)],
            [held("h1", 100, a=8), held("h2", 100, b=4)],
            {"w2": "b"},
            {"w1": GPUS, "w3": WOULD_DELAY, "w4": WOULD_DELAY},
        ),
        # w1 starts at 100 s and leaves two GPUs of node b unused. w2 ends earlier and does not
        # delay w1. w3 runs longer, but needs only the two unused GPUs
        Case(
            [waits(1, 6, 2), waits(2, 2, for_s=50), waits(3, 2)],
            [held("h1", 100, a=8), held("h2", 100, b=4)],
            {"w2": "b", "w3": "b"},
            {"w1": GPUS},
        ),
        # w1 will start at 100 s, with all GPUs of node a. w2, w3 and w4 each try only the fullest
        # node that has enough free GPUs. For w2 and w3, this is node a. w2 would still run at 100 s
        # and delay w1, so w2 waits. w3 ends before 100 s, so w3 starts. Then only one GPU of node a
        # is free, so w4 starts on node b
        Case(
            [waits(1, 8), waits(2, 2), waits(3, 2, for_s=50), waits(4, 2)],
            [held("h1", 100, a=5), held("h2", 5000, b=4)],
            {"w3": "a", "w4": "b"},
            {"w1": GPUS, "w2": WOULD_DELAY},
        ),
        # too few GPUs are free for w1 and w2. Only the first waiting gang, w1, is reported to wait
        # for GPUs. w2 is reported to wait behind w1
        Case(
            [HEAD, waits(2, 8, 2, for_s=1)], [OTHER], {}, {"w1": GPUS, "w2": reason(BEHIND, "w1")}
        ),
        # w1 starts now, so w2 does not fit until w1 ends in 300 s. w3 ends at the same time and
        # does not delay w2
        Case(
            [waits(1, 8, for_s=300), waits(2, 8, 2), waits(3, 8, for_s=300)],
            [],
            {"w1": "a", "w3": "b"},
            {"w2": reason(GPUS, "w1", in_s=300)},
        ),
        # h1 (on node a) and h2 (on node b) end at the same time. w1 needs only the GPUs of h1, so
        # no GPUs of node b are reserved for w1, and w2 may start on node b
        Case(
            [waits(1, 8), waits(2, 2)],
            [held("h2", place=2, b=6), held("h1", place=1, a=8)],
            {"w2": "b"},
            {"w1": reason(GPUS, "h1", in_s=100)},
        ),
        Case(
            [waits(1, 8), waits(2, 2)],
            [held("h2", b=6), held("h1", 200, a=8)],
            {},
            {"w1": reason(GPUS, "h2", in_s=100), "w2": WOULD_DELAY},
        ),
        # CPUs are reserved for the first waiting gang in the same way as GPUs
        Case(
            [waits(1, 6, cpus=1), waits(2, 1, cpus=3)],
            [held("h", 100, a=4, cpus=1)],
            {},
            {"w1": GPUS, "w2": WOULD_DELAY},
            nodes=cluster(8, cpus=8),
        ),
        # later gangs may start if the first gang can never fit
        Case(
            [waits(1, 8, 3), waits(2, 8, for_s=9000), waits(3, 8)],
            [OTHER],
            {"w2": "b"},
            {"w1": reason(GPUS), "w3": reason(BEHIND, "w1")},
        ),
        # GPUs are reserved for a requeued gang that is the first in the queue
        Case(
            [
                *(waits(1, 8, 2, in_s=30), waits(2, 4, for_s=30)),
                *(waits(3, 4, for_s=31), waits(4, 4, in_s=10)),
            ],
            [],
            {"w2": "a"},
            {"w1": RETRY, "w3": WOULD_DELAY, "w4": RETRY},
        ),
        # the first gang must not start before 30 s have passed. The gang h ends in 20 s, so node a
        # will be free for the first gang. Node b is not reserved, so the second gang starts there
        Case(
            [waits(1, 8, in_s=30), waits(2, 8)],
            [held("h", 20, a=8)],
            {"w2": "b"},
            {"w1": reason(RETRY, in_s=30)},
        ),
        # All gangs with the tag `red` together may use 10 GPUs. At 100 s, w1 can start with 8 GPUs
        # while w2 uses 2. With w3, the limit would be exceeded, so w3 waits although GPUs are free
        Case(
            [
                *(waits(1, 8, tags="red"), waits(2, 2, tags="red"), waits(3, 2, tags="red")),
                *(waits(4, 1), waits(5, 2, for_s=50, tags="red")),
            ],
            [held("h", 100, a=8), held("r", 50, b=2, tags="red"), held("l", 5000, b=1)],
            {"w2": "b", "w4": "b", "w5": "b"},
            {"w1": GPUS, "w3": WOULD_DELAY},
            limits={"red": 10},
        ),
    ],
)
def test_backfill_follows_its_rules(case: Case) -> None:
    check(case, "backfill")


def test_default_policy_is_fifo_and_arguments_are_not_modified() -> None:
    line, gangs, nodes, limits = (
        [waits(2, 1), waits(1, 8)],
        [held("h", a=1)],
        [*cluster(8)],
        {"t": 1},
    )
    before = (list(line), list(gangs), list(nodes), dict(limits))

    computed = plan(line, gangs, nodes, NOW, limits=limits)

    assert computed.admitted == {}
    assert (line, gangs, nodes, limits) == before


@pytest.mark.parametrize("is_assumed", [True, False])
def test_start_that_depends_on_an_assumed_end_is_marked(is_assumed: bool) -> None:
    running = replace(held("r0", a=8), is_end_assumed=is_assumed)
    other = replace(held("r1", left_s=900, b=4), is_end_assumed=True)

    computed = plan([waits(1, 8)], [running, other], cluster(8, 8), NOW, policy="fifo")

    assert computed.reasons["w1"].waits_for == ("r0",)
    assert computed.reasons["w1"].is_start_assumed is is_assumed
