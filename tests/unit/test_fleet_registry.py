"""Tests of the fleet's registry: legal transitions of groups, listeners, and snapshots."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.record.states import LEGAL_GROUP_TRANSITIONS, RUNNING_STATES, SERVING_STATES, GroupState
from tasks.rollout.registry import FleetView, GroupView, Registry
from tasks.spec.errors import IllegalTransition
from tests.support.fleet_fakes import make_slot, make_topology

G = GroupState
A, U, X, R, S = G.ACTIVE, G.SUSPECT, G.INACTIVE, G.RECOVERING, G.STALE


def start_all(engines: int = 2, servers: int = 1) -> Registry:
    """Return the registry of a fleet whose engines are all in the state ACTIVE.

    Args:
        engines: Number of engines.
        servers: Number of servers of each engine.
    """
    registry = Registry(make_topology(engines, servers))
    for group in range(engines):
        registry.mark_started(group, registry.begin(group))
    return registry


def serving(registry: Registry) -> list[int]:
    return [group.index for group in registry.view.serving]


def registry_with_group_in(state: GroupState) -> Registry:
    """Return a registry with one group, which is in this state.

    The group was started twice if the state is RECOVERING, and once otherwise.
    """
    registry = Registry(make_topology(1), serves_as_loaded=state is not G.STALE)
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
    for step in path[state]:
        step()
    assert registry.view.groups[0].state is state
    return registry


#: For each method of the registry: the states of a group in which the method may be called, and a
#: function that calls the method. In all other states, the method raises IllegalTransition or
#: changes nothing.
METHODS: dict[str, tuple[set[GroupState], Callable[[Registry, int], object]]] = {
    "mark_started": ({G.STARTING, R}, lambda registry, epoch: registry.mark_started(0, epoch)),
    "suspect": ({A, U, S}, lambda registry, epoch: registry.suspect(0, epoch, "slow")),
    "claim": ({X}, lambda registry, epoch: registry.claim(0)),
    "give_up": ({R}, lambda registry, epoch: registry.give_up(0, "no GPU")),
    "retire": (set(G) - {G.RETIRED}, lambda registry, epoch: registry.retire(0, "enough")),
    "bring_back": ({G.RETIRED}, lambda registry, epoch: registry.bring_back(0, "wanted")),
    "begin": (set(), lambda registry, epoch: registry.begin(0)),
}


@pytest.mark.parametrize(("method", "state"), list(itertools.product(METHODS, G)))
def test_method_changes_a_group_only_in_its_legal_states(method: str, state: GroupState) -> None:
    legal, call = METHODS[method]
    registry = registry_with_group_in(state)
    before = registry.view
    epoch = before.groups[0].epoch

    if state in legal:
        call(registry, epoch)
    elif method in ("mark_started", "suspect") and state in (X, G.RETIRED):
        # The servers of the group are stopped, so a late report about these servers is ignored.
        call(registry, epoch)
        assert registry.view is before
    else:
        with pytest.raises(IllegalTransition, match="engine 0"):
            call(registry, epoch)
        assert registry.view is before


@pytest.mark.parametrize("state", G)
def test_reports_of_an_old_epoch_change_nothing(state: GroupState) -> None:
    registry = registry_with_group_in(state)
    before = registry.view
    old = before.groups[0].epoch - 1

    registry.mark_started(0, old)
    registry.suspect(0, old, "slow")
    registry.clear(0, old)
    registry.unreachable(0, old, "cut")
    registry.reachable(0, old)

    assert not registry.fail(0, old, "dead")
    assert registry.view is before


def test_second_failure_of_a_group_changes_nothing() -> None:
    registry = start_all(servers=2)

    assert registry.fail(0, 1, "rank 0 died")
    assert not registry.fail(1, 1, "rank 1 died")
    registry.claim(0)
    # The group has failed, and the new servers of the group have not started yet. So a second
    # failure of the old servers is ignored.
    assert not registry.fail(1, 1, "rank 1 died")

    [group, _] = registry.view.groups
    assert (group.state, group.cause) == (R, "rank 0 died")


def test_unreachable_server_is_no_entrypoint_and_its_group_stays_active() -> None:
    registry = start_all()

    registry.unreachable(0, 1, "no answer")

    assert [slot.rank for slot in registry.view.entrypoints] == [1]
    assert registry.view.groups[0].state is A
    assert registry.view.groups[0].cause == "no answer"
    registry.reachable(0, 1)
    assert [slot.rank for slot in registry.view.entrypoints] == [0, 1]
    assert registry.view.groups[0].cause == ""


def test_new_epoch_can_have_new_addresses() -> None:
    registry = start_all()
    registry.fail(0, 1, "port taken")
    registry.claim(0)

    epoch = registry.begin(0, slots=[make_slot(0, 0, port=9)])

    assert epoch == 2
    assert registry.view.servers[0].port == 9


def test_snapshot_is_frozen_and_reused_until_a_group_changes() -> None:
    registry = start_all()
    before = registry.view

    assert registry.view is before
    registry.fail(0, 1, "dead")

    assert before.groups[0].state is A
    assert registry.view.epoch == before.epoch + 1


def test_all_listeners_receive_a_change_before_the_next_change() -> None:
    registry = start_all()
    received: list[tuple[str, GroupState, GroupState]] = []

    def first(before: GroupView, after: GroupView) -> None:
        received.append(("first", before.state, after.state))
        if after.state is X:
            registry.claim(after.index)

    registry.listen(first)
    registry.listen(lambda before, after: received.append(("second", before.state, after.state)))
    registry.fail(0, 1, "dead")

    assert received == [("first", A, X), ("second", A, X), ("first", X, R), ("second", X, R)]


def test_error_in_a_listener_does_not_stop_other_listeners(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = start_all()
    received: list[GroupState] = []

    def raise_error(before: GroupView, after: GroupView) -> None:
        raise RuntimeError("a bug")

    registry.listen(raise_error)
    registry.listen(lambda before, after: received.append(after.state))
    registry.fail(0, 1, "dead")

    assert received == [X]
    assert "a bug" in caplog.text


@pytest.mark.parametrize(
    ("epochs", "synced"),
    [
        pytest.param({0: 1, 1: 1}, (0, 1), id="all"),
        pytest.param({0: 1, 1: 9}, (0,), id="one has a newer epoch"),
        pytest.param({0: 1}, (0,), id="one is not named"),
        pytest.param({}, (), id="none"),
    ],
)
def test_only_groups_with_the_committed_weights_serve(
    epochs: dict[int, int], synced: tuple[int, ...]
) -> None:
    registry = start_all(servers=2)

    registry.commit(3, epochs)

    assert registry.view.version == 3
    for group in registry.view.groups:
        is_synced = group.index in synced
        assert group.state is (A if is_synced else S)
        assert group.version == (3 if is_synced else 0)


def test_no_listener_sees_a_group_serve_old_weights() -> None:
    registry = start_all(4)
    views: list[FleetView] = []
    registry.listen(lambda before, after: views.append(registry.view))

    registry.commit(1, {0: 1})

    assert views
    for view in views:
        assert [group.index for group in view.serving] == [0]


def test_commit_with_an_unknown_engine_changes_nothing() -> None:
    registry = start_all()
    before = registry.view

    with pytest.raises(KeyError, match="no engine 5"):
        registry.commit(1, {0: 1, 5: 1})

    assert registry.view is before


def test_lower_version_requires_force() -> None:
    registry = start_all()
    registry.commit(3, {0: 1, 1: 1})
    before = registry.view

    with pytest.raises(IllegalTransition, match="version 2 is lower than the current version 3"):
        registry.commit(2, {0: 1, 1: 1})
    assert registry.view is before
    registry.commit(2, {0: 1, 1: 1}, force=True)

    assert [group.version for group in registry.view.serving] == [2, 2]


@pytest.mark.parametrize("version", [0, 1])
def test_group_that_starts_after_a_commit_is_stale(version: int) -> None:
    registry = start_all()
    registry.fail(0, 1, "dead")
    registry.claim(0)
    epoch = registry.begin(0)

    registry.commit(version, {0: epoch, 1: 1})
    assert serving(registry) == [1]
    registry.mark_started(0, epoch)

    assert registry.view.groups[0].state is S
    registry.commit(version, {0: epoch, 1: 1})
    assert serving(registry) == [0, 1]


def test_serves_as_loaded_decides_if_groups_serve_before_the_first_commit() -> None:
    awaiting = Registry(make_topology(1), serves_as_loaded=False)
    awaiting.mark_started(0, awaiting.begin(0))

    assert [group.version for group in start_all().view.serving] == [0, 0]
    assert awaiting.view.serving == ()
    assert [group.index for group in awaiting.view.up] == [0]
    awaiting.commit(0, {0: 1})
    assert [group.version for group in awaiting.view.serving] == [0]


def test_group_marked_stale_serves_after_a_commit_names_it() -> None:
    registry = start_all()

    registry.mark_stale(0, 1, "given up")
    registry.mark_stale(1, 7, "another incarnation")

    assert [(group.state, group.version) for group in registry.view.groups] == [(S, None), (A, 0)]
    registry.commit(1, {0: 1})
    assert [(group.state, group.version) for group in registry.view.groups] == [(A, 1), (S, 0)]


def test_unreachable_group_is_no_sync_target_and_returns_as_stale() -> None:
    registry = start_all()
    registry.unreachable(0, 1, "no answer")

    assert registry.view.training["mesh"] == [[1]]
    registry.commit(1, {1: 1})
    assert serving(registry) == [1]
    registry.reachable(0, 1)

    assert registry.view.groups[0].state is S
    assert [slot.rank for slot in registry.view.entrypoints] == [1]


def test_training_metadata_names_only_groups_that_can_take_weights() -> None:
    registry = start_all(4, servers=2)
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
            "begin",
            "mark_started",
            "suspect",
            "clear",
            "fail",
            "claim",
            "give_up",
            "retire",
            "unreachable",
            "reachable",
            "commit",
            "mark_stale",
        ]
    ),
    st.integers(0, 2),
    st.integers(0, 4),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_random_calls_make_only_legal_transitions(actions: list[tuple[str, int, int]]) -> None:
    registry = Registry(make_topology(3))
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

    for method, group, n in actions:
        before = registry.view
        try:
            calls[method](group, n)
        except IllegalTransition:
            assert registry.view is before

    for earlier, later in moves:
        assert later.state is earlier.state or later.state in LEGAL_GROUP_TRANSITIONS[earlier.state]
        assert later.epoch >= earlier.epoch
    for group_view in registry.view.groups:
        # A group may serve only if it has the weight version of the fleet.
        has_fleet_version = group_view.version == registry.view.version
        assert has_fleet_version or group_view.state not in SERVING_STATES
        assert group_view.version is None or group_view.state in RUNNING_STATES - {G.STARTING}
