"""Which of the waiting gangs start now, where, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tasks.queue.packing import Demand
from tasks.queue.policy import Held, NodeFree, Plan, Policy, Reason, Waiting, Why, plan

NOW = 1000.0
BOTH: tuple[Policy, ...] = ("fifo", "backfill")


def cluster(*gpus: int, cpus: float | None = None) -> list[NodeFree]:
    """Nodes a, b, c, ... with so many GPUs each."""
    return [NodeFree(name="abcdefgh"[i], gpus=count, cpus=cpus) for i, count in enumerate(gpus)]


def held(
    id: str,
    gpus: Mapping[str, int],
    left_s: float = 100,
    *,
    place: int = 0,
    cpus_per_gpu: float = 0,
    tags: Sequence[str] = (),
) -> Held:
    """A gang that is expected to end in so many seconds."""
    return Held(
        id=id,
        gpus=gpus,
        cpus_per_gpu=cpus_per_gpu,
        place=(0, place),
        ends_at=NOW + left_s,
        tags=frozenset(tags),
    )


def waits(
    place: int,
    gpus: int,
    *,
    nodes: int = 1,
    estimate_s: float = 1000,
    in_s: float = -1,
    cpus_per_gpu: float = 0,
    tags: Sequence[str] = (),
) -> Waiting:
    """The gang `w<place>`, at that place of the line; not to start within the next `in_s`."""
    return Waiting(
        id=f"w{place}",
        demand=Demand(nodes=nodes, gpus_per_node=gpus, cpus_per_gpu=cpus_per_gpu),
        place=(1, place),
        estimate_s=estimate_s,
        not_before=NOW + in_s,
        tags=frozenset(tags),
    )


def look(
    waiting: Sequence[Waiting],
    gangs: Sequence[Held] = (),
    *,
    nodes: Sequence[NodeFree] | None = None,
    policy: Policy = "backfill",
    limits: Mapping[str, int] | None = None,
) -> Plan:
    return plan(waiting, gangs, nodes or cluster(8, 8), NOW, policy=policy, limits=limits)


def why(found: Plan) -> dict[str, Why]:
    return {id: reason.why for id, reason in found.reasons.items()}


@pytest.mark.parametrize("policy", BOTH)
def test_an_empty_line_starts_nobody_and_says_what_is_free(policy: Policy) -> None:
    found = look([], [held("h", {"a": 3})], policy=policy)

    assert found == Plan(free={"a": 5, "b": 8})


@pytest.mark.parametrize("policy", BOTH)
def test_all_that_fit_start_in_the_order_of_the_line(policy: Policy) -> None:
    found = look([waits(3, 8), waits(1, 4), waits(2, 4)], policy=policy)

    assert list(found.admitted) == ["w1", "w2", "w3"]
    assert found.admitted == {"w1": ("a",), "w2": ("a",), "w3": ("b",)}
    assert found.reasons == {}
    assert found.free == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    ("free", "gpus", "nodes", "expected"),
    [
        # the fewest free that suffice
        ((8, 4, 6), 3, 1, ("b",)),
        # of equal ones the first
        ((8, 4, 4), 3, 1, ("b",)),
        # a node that is too small is none
        ((2, 8, 1), 3, 1, ("b",)),
        # the same on several nodes; they are named in the order of the cluster
        ((8, 4, 2, 4), 3, 2, ("b", "d")),
        ((8, 8, 4, 1), 3, 2, ("a", "c")),
        # all there are
        ((3, 3, 3), 3, 3, ("a", "b", "c")),
    ],
)
def test_a_gang_gets_the_nodes_with_the_fewest_free_that_suffice(
    free: tuple[int, ...], gpus: int, nodes: int, expected: tuple[str, ...]
) -> None:
    found = look([waits(1, gpus, nodes=nodes)], nodes=cluster(*free))

    assert found.admitted == {"w1": expected}


def test_free_gpus_of_two_nodes_are_not_added_up() -> None:
    found = look([waits(1, 8)], [held("h1", {"a": 4}), held("h2", {"b": 4})])

    assert found.admitted == {}
    assert found.free == {"a": 4, "b": 4}


@pytest.mark.parametrize("policy", BOTH)
def test_a_node_without_enough_cpus_is_none(policy: Policy) -> None:
    nodes = [
        NodeFree(name="a", gpus=8, cpus=7.9),
        NodeFree(name="b", gpus=8, cpus=8.0),
        NodeFree(name="c", gpus=8),
    ]
    gangs = [held("h", {"b": 1}, cpus_per_gpu=1)]

    found = look([waits(1, 4, cpus_per_gpu=2)], gangs, nodes=nodes, policy=policy)

    assert found.admitted == {"w1": ("c",)}


def test_cpus_are_counted_while_gangs_start() -> None:
    line = [waits(1, 2, cpus_per_gpu=3), waits(2, 2, cpus_per_gpu=3)]

    found = look(line, nodes=cluster(8, cpus=11))

    assert list(found.admitted) == ["w1"]
    assert why(found) == {"w2": Why.GPUS}


def test_fractions_of_cpus_that_add_up_suffice() -> None:
    gangs = [held(f"h{i}", {"a": 1}, cpus_per_gpu=0.1) for i in range(3)]

    found = look([waits(1, 1, cpus_per_gpu=0.7)], gangs, nodes=cluster(4, cpus=1.0))

    assert list(found.admitted) == ["w1"]


class TestFifo:
    def test_nobody_passes_the_first_that_does_not_fit(self) -> None:
        gangs = [held("h", {"a": 4, "b": 1})]

        found = look([waits(1, 4), waits(2, 8), waits(3, 1)], gangs, policy="fifo")

        assert found.admitted == {"w1": ("a",)}
        assert found.reasons == {
            "w2": Reason(why=Why.GPUS, waits_for=("h",), starts_at=NOW + 100),
            "w3": Reason(why=Why.BEHIND, waits_for=("w2",)),
        }
        assert found.free == {"a": 0, "b": 7}

    def test_one_that_would_never_fit_blocks(self) -> None:
        found = look([waits(1, 8, nodes=3), waits(2, 1)], policy="fifo")

        assert found.admitted == {}
        assert found.reasons["w1"] == Reason(why=Why.GPUS)
        assert found.reasons["w2"] == Reason(why=Why.BEHIND, waits_for=("w1",))


class TestBackfill:
    #: Node b is free now, node a in 100 s; the head needs both.
    GANGS = (held("h", {"a": 8}, 100),)
    HEAD = waits(1, 8, nodes=2)

    @pytest.mark.parametrize(
        ("estimate_s", "starts"),
        [
            (99, True),
            # it ends just when the head starts
            (100, True),
            (101, False),
        ],
    )
    def test_one_that_ends_before_the_head_can_start_passes(
        self, estimate_s: float, starts: bool
    ) -> None:
        found = look([self.HEAD, waits(2, 8, estimate_s=estimate_s)], self.GANGS)

        assert ("w2" in found.admitted) is starts
        assert why(found) == {"w1": Why.GPUS} | ({} if starts else {"w2": Why.WOULD_DELAY})

    def test_one_beside_which_the_head_still_fits_passes_however_long_it_is(self) -> None:
        gangs = [held("h1", {"a": 8}, 100), held("h2", {"b": 4}, 5000)]
        line = [waits(1, 8), waits(2, 3, estimate_s=9000), waits(3, 1), waits(4, 1)]

        found = look(line, gangs)

        assert found.admitted == {"w2": ("b",), "w3": ("b",)}
        assert why(found) == {"w1": Why.GPUS, "w4": Why.BEHIND}

    def test_those_that_are_let_in_beside_the_head_are_counted_together(self) -> None:
        gangs = [held("h1", {"a": 8}, 100), held("h2", {"b": 4}, 100)]
        line = [waits(1, 6, nodes=2), waits(2, 2), waits(3, 2), waits(4, 1)]

        found = look(line, gangs)

        assert found.admitted == {"w2": ("b",)}
        assert why(found) == {"w1": Why.GPUS, "w3": Why.WOULD_DELAY, "w4": Why.WOULD_DELAY}

    def test_one_that_ends_in_time_takes_nothing_from_those_that_do_not(self) -> None:
        gangs = [held("h1", {"a": 8}, 100), held("h2", {"b": 4}, 100)]
        line = [waits(1, 6, nodes=2), waits(2, 2, estimate_s=50), waits(3, 2)]

        found = look(line, gangs)

        assert list(found.admitted) == ["w2", "w3"]

    def test_one_that_would_delay_now_may_pass_when_another_has_taken_the_node_it_would_get(
        self,
    ) -> None:
        # w2 would get two of the three free on node a, which the head needs; once w3 has one of
        # them for a while, w4, which asks the same, gets node b.
        gangs = [held("h1", {"a": 5}, 100), held("h2", {"b": 4}, 5000)]
        line = [waits(1, 8), waits(2, 2), waits(3, 2, estimate_s=50), waits(4, 2)]

        found = look(line, gangs)

        assert found.admitted == {"w3": ("a",), "w4": ("b",)}
        assert why(found) == {"w1": Why.GPUS, "w2": Why.WOULD_DELAY}

    def test_one_that_does_not_fit_now_is_behind_the_head(self) -> None:
        found = look([self.HEAD, waits(2, 8, nodes=2, estimate_s=1)], self.GANGS)

        assert found.reasons["w2"] == Reason(why=Why.BEHIND, waits_for=("w1",))

    def test_those_started_in_the_same_pass_make_room_for_the_head_by_their_end(self) -> None:
        line = [waits(1, 8, estimate_s=300), waits(2, 8, nodes=2), waits(3, 8, estimate_s=300)]

        found = look(line)

        assert list(found.admitted) == ["w1", "w3"]
        assert found.reasons["w2"] == Reason(why=Why.GPUS, waits_for=("w1",), starts_at=NOW + 300)

    def test_of_gangs_that_end_at_once_only_those_that_the_head_needs_are_counted_as_gone(
        self,
    ) -> None:
        # h1 stands before h2: with its end the head fits, on node a. What h2 gives back on node b
        # is not promised to anybody.
        gangs = [held("h2", {"b": 6}, place=2), held("h1", {"a": 8}, place=1)]

        beside = look([waits(1, 8), waits(2, 2)], gangs)
        before = look([waits(1, 8), waits(2, 2)], [held("h2", {"b": 6}), held("h1", {"a": 8}, 200)])

        assert beside.admitted == {"w2": ("b",)}
        assert beside.reasons["w1"].waits_for == ("h1",)
        assert before.admitted == {}
        assert before.reasons["w1"].waits_for == ("h2",)

    def test_cpus_of_the_head_are_kept_for_it(self) -> None:
        gangs = [held("h", {"a": 4}, 100, cpus_per_gpu=1)]
        line = [waits(1, 6, cpus_per_gpu=1), waits(2, 1, cpus_per_gpu=3)]

        found = look(line, gangs, nodes=cluster(8, cpus=8))

        assert found.admitted == {}
        assert why(found) == {"w1": Why.GPUS, "w2": Why.WOULD_DELAY}

    def test_a_head_that_would_not_fit_even_in_the_end_is_passed_by_all(self) -> None:
        line = [waits(1, 8, nodes=3), waits(2, 8, estimate_s=9000), waits(3, 8)]

        found = look(line, self.GANGS)

        assert found.admitted == {"w2": ("b",)}
        assert found.reasons["w1"] == Reason(why=Why.GPUS)
        assert found.reasons["w3"] == Reason(why=Why.BEHIND, waits_for=("w1",))


class TestWhatTheHeadWaitsFor:
    @pytest.mark.parametrize("policy", BOTH)
    def test_the_gangs_whose_ends_make_its_room_in_the_order_of_their_ends(
        self, policy: Policy
    ) -> None:
        gangs = [
            held("late", {"a": 4}, 300),
            held("never needed", {"b": 8}, 400),
            held("early", {"a": 4}, 200),
        ]

        found = look([waits(1, 8)], gangs, policy=policy)

        assert found.reasons["w1"] == Reason(
            why=Why.GPUS, waits_for=("early", "late"), starts_at=NOW + 300
        )

    @pytest.mark.parametrize("policy", BOTH)
    def test_not_one_that_ends_earlier_on_a_node_too_small_for_it(self, policy: Policy) -> None:
        gangs = [held("small", {"b": 2}, 50), held("large", {"a": 8}, 100)]

        found = look([waits(1, 8)], gangs, nodes=cluster(8, 4), policy=policy)

        assert found.reasons["w1"].waits_for == ("large",)

    @pytest.mark.parametrize("policy", BOTH)
    def test_a_start_is_never_expected_in_the_past(self, policy: Policy) -> None:
        found = look([waits(1, 8, nodes=2)], [held("outrun", {"a": 1}, -50)], policy=policy)

        assert found.reasons["w1"].starts_at == NOW


class TestNotYet:
    def test_the_first_holds_the_line_though_it_fits(self) -> None:
        found = look([waits(1, 1, in_s=30), waits(2, 1), waits(3, 1, in_s=60)], policy="fifo")

        assert found.admitted == {}
        assert found.reasons == {
            "w1": Reason(why=Why.RETRY, starts_at=NOW + 30),
            "w2": Reason(why=Why.BEHIND, waits_for=("w1",)),
            "w3": Reason(why=Why.RETRY),
        }

    @pytest.mark.parametrize("policy", BOTH)
    def test_it_starts_when_its_time_has_come(self, policy: Policy) -> None:
        found = look([waits(1, 1, in_s=0)], policy=policy)

        assert list(found.admitted) == ["w1"]

    def test_with_backfill_it_has_a_reservation(self) -> None:
        line = [
            waits(1, 8, nodes=2, in_s=30),
            waits(2, 4, estimate_s=30),
            waits(3, 4, estimate_s=31),
            waits(4, 4, in_s=10),
        ]

        found = look(line)

        assert list(found.admitted) == ["w2"]
        assert why(found) == {"w1": Why.RETRY, "w3": Why.WOULD_DELAY, "w4": Why.RETRY}

    def test_its_reservation_counts_what_has_ended_by_then(self) -> None:
        # Without h's end the head would have to have node b.
        line = [waits(1, 8, in_s=30), waits(2, 8)]

        found = look(line, [held("h", {"a": 8}, 20)])

        assert found.admitted == {"w2": ("b",)}
        assert found.reasons["w1"] == Reason(why=Why.RETRY, starts_at=NOW + 30)

    def test_it_may_wait_for_longer_for_its_gpus(self) -> None:
        found = look([waits(1, 8, nodes=2, in_s=30)], [held("h", {"a": 8}, 100)])

        assert found.reasons["w1"] == Reason(why=Why.RETRY, waits_for=("h",), starts_at=NOW + 100)


class TestLimits:
    @pytest.mark.parametrize("policy", BOTH)
    def test_one_over_the_limit_of_a_tag_is_passed_over_and_blocks_nobody(
        self, policy: Policy
    ) -> None:
        line = [waits(1, 8, tags=["red"]), waits(2, 4, tags=["red"]), waits(3, 8, tags=["blue"])]

        found = look(line, policy=policy, limits={"red": 7})

        assert found.admitted == {"w2": ("a",), "w3": ("b",)}
        assert found.reasons == {"w1": Reason(why=Why.LIMIT, tag="red")}

    @pytest.mark.parametrize("policy", BOTH)
    def test_what_is_held_counts_wherever_it_is(self, policy: Policy) -> None:
        gangs = [held("h", {"a": 2, "a node that is gone": 4}, tags=["red"])]
        line = [waits(1, 3, tags=["red"]), waits(2, 2, tags=["red"])]

        found = look(line, gangs, policy=policy, limits={"red": 8})

        assert list(found.admitted) == ["w2"]
        assert why(found) == {"w1": Why.LIMIT}

    @pytest.mark.parametrize("policy", BOTH)
    def test_one_with_several_tags_must_be_within_each(self, policy: Policy) -> None:
        line = [waits(1, 4, tags=["red", "blue", "free"]), waits(2, 4, tags=["blue"])]

        found = look(line, policy=policy, limits={"red": 8, "blue": 3})

        assert found.reasons == {
            "w1": Reason(why=Why.LIMIT, tag="blue"),
            "w2": Reason(why=Why.LIMIT, tag="blue"),
        }

    def test_the_head_is_not_delayed_by_those_that_use_up_its_limit(self) -> None:
        # At the head's time two more GPUs of its tag may be in use, by w2: then w3 would be too
        # many, for all that it fits beside the head.
        gangs = [
            held("h", {"a": 8}, 100),
            held("red", {"b": 2}, 50, tags=["red"]),
            held("long", {"b": 1}, 5000),
        ]
        line = [
            waits(1, 8, tags=["red"]),
            waits(2, 2, tags=["red"]),
            waits(3, 2, tags=["red"]),
            waits(4, 1),
            waits(5, 2, estimate_s=50, tags=["red"]),
        ]

        found = look(line, gangs, limits={"red": 10})

        assert list(found.admitted) == ["w2", "w4", "w5"]
        assert why(found) == {"w1": Why.GPUS, "w3": Why.WOULD_DELAY}


class TestNodes:
    @pytest.mark.parametrize("policy", BOTH)
    def test_a_drained_node_gets_nobody_and_what_runs_there_goes_on(self, policy: Policy) -> None:
        gangs = [held("h", {"a": 6}, 100)]

        found = look([waits(1, 4), waits(2, 8)], gangs, nodes=cluster(0, 8), policy=policy)

        assert found.admitted == {"w1": ("b",)}
        assert found.reasons["w2"] == Reason(why=Why.GPUS, waits_for=("w1",), starts_at=NOW + 1000)
        assert found.free == {"a": 0, "b": 4}

    @pytest.mark.parametrize("policy", BOTH)
    def test_what_is_held_on_a_node_that_is_gone_takes_no_room(self, policy: Policy) -> None:
        found = look([waits(1, 8, nodes=2)], [held("h", {"z": 8})], policy=policy)

        assert found.admitted == {"w1": ("a", "b")}

    @pytest.mark.parametrize("policy", BOTH)
    def test_without_nodes_everybody_waits(self, policy: Policy) -> None:
        found = plan([waits(1, 1), waits(2, 1)], [held("h", {"a": 1})], [], NOW, policy=policy)

        assert why(found) == {"w1": Why.GPUS, "w2": Why.BEHIND}
        assert found.free == {}


def test_by_default_the_line_is_strictly_in_order() -> None:
    found = plan([waits(1, 9), waits(2, 1)], [], cluster(8), NOW)

    assert found.admitted == {}


def test_nothing_that_is_handed_in_is_changed() -> None:
    line, gangs, nodes, limits = (
        [waits(2, 1), waits(1, 8)],
        [held("h", {"a": 1})],
        cluster(8),
        {"t": 1},
    )
    before = (list(line), list(gangs), list(nodes), dict(limits))

    plan(line, gangs, nodes, NOW, policy="backfill", limits=limits)

    assert (line, gangs, nodes, limits) == before
