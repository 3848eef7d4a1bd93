"""The one owner of a fleet's state: which moves are legal, and what is shown of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.record.states import LEGAL_GROUP_TRANSITIONS, RUNNING_STATES, SERVING_STATES, GroupState
from tasks.rollout.registry import FleetView, GroupView, Registry
from tasks.spec.errors import IllegalTransition
from tests.support.fleet_fakes import plan_of, slot_of

G = GroupState
A, U, X, R, S = G.ACTIVE, G.SUSPECT, G.INACTIVE, G.RECOVERING, G.STALE


def begun(engines: int = 2, servers: int = 1) -> Registry:
    """All groups serve."""
    registry = Registry(plan_of(engines, servers))
    for group in range(engines):
        registry.mark_started(group, registry.begin(group))
    return registry


def serving(registry: Registry) -> list[int]:
    return [group.index for group in registry.view.serving]


def brought(to: GroupState) -> Registry:
    """Of one group, which is in that state, at epoch 1 or 2."""
    registry = Registry(plan_of(1), serves_as_loaded=to is not G.STALE)
    path: dict[GroupState, list[Callable[[], object]]] = {
        G.STARTING: [],
        G.ACTIVE: [lambda: registry.mark_started(0, 1)],
        G.SUSPECT: [
            lambda: registry.mark_started(0, 1),
            lambda: registry.suspect(0, 1, "slow"),
        ],
        G.STALE: [lambda: registry.mark_started(0, 1)],
        G.INACTIVE: [lambda: registry.fail(0, 1, "dead")],
        G.RECOVERING: [
            lambda: registry.fail(0, 1, "dead"),
            lambda: registry.claim(0),
            lambda: registry.begin(0),
        ],
        G.RETIRED: [lambda: registry.retire(0, "enough")],
    }
    registry.begin(0)
    for step in path[to]:
        step()
    assert registry.view.groups[0].state is to
    return registry


#: Each verb by the states out of which it may be called; elsewhere it raises, or changes nothing.
VERBS: dict[str, tuple[set[GroupState], Callable[[Registry, int], object]]] = {
    "mark_started": ({G.STARTING, R}, lambda it, epoch: it.mark_started(0, epoch)),
    "suspect": ({A, U, S}, lambda it, epoch: it.suspect(0, epoch, "slow")),
    "claim": ({X}, lambda it, epoch: it.claim(0)),
    "give_up": ({R}, lambda it, epoch: it.give_up(0, "no GPU")),
    "retire": (set(G) - {G.RETIRED}, lambda it, epoch: it.retire(0, "enough")),
    "bring_back": ({G.RETIRED}, lambda it, epoch: it.bring_back(0, "wanted")),
    "begin": (set(), lambda it, epoch: it.begin(0)),
}


@pytest.mark.parametrize(("verb", "state"), list(itertools.product(VERBS, G)))
def test_a_verb_is_obeyed_in_its_states_and_in_no_other(verb: str, state: GroupState) -> None:
    legal, call = VERBS[verb]
    registry = brought(state)
    before = registry.view
    epoch = before.groups[0].epoch

    if state in legal:
        call(registry, epoch)
    elif verb in ("mark_started", "suspect") and state in (X, G.RETIRED):
        # Nothing of this incarnation is left, so the word of it comes late.
        call(registry, epoch)
        assert registry.view is before
    else:
        with pytest.raises(IllegalTransition, match="group 0"):
            call(registry, epoch)
        assert registry.view is before


@pytest.mark.parametrize("state", G)
def test_what_an_old_incarnation_says_changes_nothing(state: GroupState) -> None:
    registry = brought(state)
    before = registry.view
    old = before.groups[0].epoch - 1

    registry.mark_started(0, old)
    registry.suspect(0, old, "slow")
    registry.clear(0, old)
    registry.unreachable(0, old, "cut")
    registry.reachable(0, old)

    assert not registry.fail(0, old, "dead")
    assert registry.view is before


def test_a_second_failure_of_a_group_changes_nothing() -> None:
    registry = begun(servers=2)

    assert registry.fail(0, 1, "rank 0 died")
    assert not registry.fail(1, 1, "rank 1 died")
    registry.claim(0)
    # Claimed, and not begun: the epoch is still the one that has died.
    assert not registry.fail(1, 1, "rank 1 died")

    [group, _] = registry.view.groups
    assert (group.state, group.cause) == (R, "rank 0 died")


def test_a_server_that_cannot_be_reached_is_no_entrypoint_and_its_group_stays() -> None:
    registry = begun()

    registry.unreachable(0, 1, "no answer")

    assert [slot.rank for slot in registry.view.entrypoints] == [1]
    assert registry.view.groups[0].state is A
    assert registry.view.groups[0].cause == "no answer"
    registry.reachable(0, 1)
    assert [slot.rank for slot in registry.view.entrypoints] == [0, 1]
    assert registry.view.groups[0].cause == ""


def test_new_addresses_come_with_a_new_incarnation() -> None:
    registry = begun()
    registry.fail(0, 1, "port taken")
    registry.claim(0)

    epoch = registry.begin(0, slots=[slot_of(0, 0, port=9)])

    assert epoch == 2
    assert registry.view.servers[0].port == 9


def test_a_snapshot_stays_as_it_is_and_is_the_same_while_nothing_changes() -> None:
    registry = begun()
    before = registry.view

    assert registry.view is before
    registry.fail(0, 1, "dead")

    assert before.groups[0].state is A
    assert registry.view.epoch == before.epoch + 1


def test_listeners_are_told_of_each_change_in_turn_and_may_cause_more() -> None:
    registry = begun()
    told: list[tuple[str, GroupState, GroupState]] = []

    def first(before: GroupView, after: GroupView) -> None:
        told.append(("first", before.state, after.state))
        if after.state is X:
            registry.claim(after.index)

    registry.listen(first)
    registry.listen(lambda before, after: told.append(("second", before.state, after.state)))
    registry.fail(0, 1, "dead")

    assert told == [("first", A, X), ("second", A, X), ("first", X, R), ("second", X, R)]


def test_a_listener_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    registry = begun()
    told: list[GroupState] = []

    def fails(before: GroupView, after: GroupView) -> None:
        raise RuntimeError("a bug")

    registry.listen(fails)
    registry.listen(lambda before, after: told.append(after.state))
    registry.fail(0, 1, "dead")

    assert told == [X]
    assert "a bug" in caplog.text


@pytest.mark.parametrize(
    ("epochs", "synced"),
    [
        pytest.param({0: 1, 1: 1}, (0, 1), id="all"),
        pytest.param({0: 1, 1: 9}, (0,), id="another incarnation of one"),
        pytest.param({0: 1}, (0,), id="one that is not named"),
        pytest.param({}, (), id="nobody"),
    ],
)
def test_who_has_the_committed_weights_serves_and_nobody_else(
    epochs: dict[int, int], synced: tuple[int, ...]
) -> None:
    registry = begun(servers=2)

    registry.commit(3, epochs)

    assert registry.view.version == 3
    for group in registry.view.groups:
        is_synced = group.index in synced
        assert group.state is (A if is_synced else S)
        assert group.version == (3 if is_synced else 0)


def test_no_listener_sees_old_weights_serve() -> None:
    registry = begun(4)
    seen: list[FleetView] = []
    registry.listen(lambda before, after: seen.append(registry.view))

    registry.commit(1, {0: 1})

    assert seen
    for view in seen:
        assert [group.index for group in view.serving] == [0]


def test_an_engine_that_there_is_not_is_refused_before_anything_changes() -> None:
    registry = begun()
    before = registry.view

    with pytest.raises(KeyError, match="no engine 5"):
        registry.commit(1, {0: 1, 5: 1})

    assert registry.view is before


def test_a_version_goes_back_only_by_force() -> None:
    registry = begun()
    registry.commit(3, {0: 1, 1: 1})
    before = registry.view

    with pytest.raises(IllegalTransition, match="version 2 is older than the fleet's, 3"):
        registry.commit(2, {0: 1, 1: 1})
    assert registry.view is before
    registry.commit(2, {0: 1, 1: 1}, force=True)

    assert [group.version for group in registry.view.serving] == [2, 2]


@pytest.mark.parametrize("version", [0, 1])
def test_what_starts_after_a_commit_is_stale_whatever_the_version(version: int) -> None:
    registry = begun()
    registry.fail(0, 1, "dead")
    registry.claim(0)
    epoch = registry.begin(0)

    registry.commit(version, {0: epoch, 1: 1})
    assert serving(registry) == [1]
    registry.mark_started(0, epoch)

    assert registry.view.groups[0].state is S
    registry.commit(version, {0: epoch, 1: 1})
    assert serving(registry) == [0, 1]


def test_before_the_first_commit_what_starts_serves_as_it_was_loaded_or_not_at_all() -> None:
    awaiting = Registry(plan_of(1), serves_as_loaded=False)
    awaiting.mark_started(0, awaiting.begin(0))

    assert [one.version for one in begun().view.serving] == [0, 0]
    assert awaiting.view.serving == ()
    assert [one.index for one in awaiting.view.up] == [0]
    awaiting.commit(0, {0: 1})
    assert [one.version for one in awaiting.view.serving] == [0]


def test_what_has_a_part_of_new_weights_is_stale_until_a_commit_names_it() -> None:
    registry = begun()

    registry.mark_stale(0, 1, "given up")
    registry.mark_stale(1, 7, "another incarnation")

    assert [(one.state, one.version) for one in registry.view.groups] == [(S, None), (A, 0)]
    registry.commit(1, {0: 1})
    assert [(one.state, one.version) for one in registry.view.groups] == [(A, 1), (S, 0)]


def test_a_group_that_cannot_be_reached_is_no_target_and_does_not_serve_when_it_is_back() -> None:
    registry = begun()
    registry.unreachable(0, 1, "no answer")

    assert registry.view.training["mesh"] == [[1]]
    registry.commit(1, {1: 1})
    assert serving(registry) == [1]
    registry.reachable(0, 1)

    assert registry.view.groups[0].state is S
    assert [slot.rank for slot in registry.view.entrypoints] == [1]


def test_training_metadata_names_what_can_take_weights_and_nothing_else() -> None:
    registry = begun(4, servers=2)
    registry.suspect(0, 1, "slow")
    registry.commit(1, {0: 1, 2: 1})
    registry.fail(4, 1, "dead")

    training = registry.view.training

    assert training["mesh"] == [[0, 1], [2, 3], [6, 7]]
    assert set(training["urls"]) == {"0", "2", "6"}
    assert (training["epoch"], training["version"]) == (registry.view.epoch, 1)


ACTIONS = st.tuples(
    st.sampled_from(
        [
            *("begin", "mark_started", "suspect", "clear", "fail", "claim", "give_up", "retire"),
            *("unreachable", "reachable", "commit", "mark_stale"),
        ]
    ),
    st.integers(0, 2),
    st.integers(0, 4),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_whatever_is_called_only_legal_moves_happen(actions: list[tuple[str, int, int]]) -> None:
    registry = Registry(plan_of(3))
    moves: list[tuple[GroupView, GroupView]] = []
    registry.listen(lambda before, after: moves.append((before, after)))
    calls: dict[str, Callable[[int, int], object]] = {
        "begin": lambda group, n: registry.begin(group),
        "mark_started": lambda group, n: registry.mark_started(group, n),
        "suspect": lambda group, n: registry.suspect(group, n, "slow"),
        "clear": registry.clear,
        "fail": lambda group, n: registry.fail(group, n, "dead"),
        "claim": lambda group, n: registry.claim(group),
        "give_up": lambda group, n: registry.give_up(group, "no"),
        "retire": lambda group, n: registry.retire(group, "enough"),
        "unreachable": lambda group, n: registry.unreachable(group, n, "cut"),
        "reachable": registry.reachable,
        "commit": lambda group, n: registry.commit(n % 3, {group: n}),
        "mark_stale": lambda group, n: registry.mark_stale(group, n, "given up"),
    }

    for verb, group, n in actions:
        before = registry.view
        try:
            calls[verb](group, n)
        except IllegalTransition:
            assert registry.view is before

    for earlier, later in moves:
        assert later.state is earlier.state or later.state in LEGAL_GROUP_TRANSITIONS[earlier.state]
        assert later.epoch >= earlier.epoch
    for one in registry.view.groups:
        # Only what has the fleet's weights serves.
        assert (one.version == registry.view.version) or one.state not in SERVING_STATES
        assert one.version is None or one.state in RUNNING_STATES - {G.STARTING}
