"""The one owner of the state of a fleet's servers.

Everybody else calls its verbs and gets frozen snapshots. It has no clock, no I/O and no lock: it
lives in one asyncio loop, and a verb takes effect at once, for all servers of a group.

A verb that names an incarnation (`epoch`) says whether it applied: one of an older incarnation
changes nothing. An illegal move raises IllegalTransition, a rank or group that the fleet does not
have KeyError.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tasks.record.states import MOVES, RUNNING, SERVING, GroupState
from tasks.rollout.topology import ServerSlot, TopologyPlan
from tasks.spec.errors import IllegalTransition
from tasks.spec.words import commas


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One lifecycle group at one moment."""

    #: Index into the fleet's groups, which is that of its engine.
    index: int
    #: Of its servers.
    ranks: tuple[int, ...]
    state: GroupState
    #: Which incarnation this is, from 1; what is known of an older one is void. 0: never started.
    epoch: int
    #: Of its weights; None while none are known to be there.
    version: int | None
    #: Why it left its last serving state; empty while it is well.
    cause: str
    #: How often it was started again.
    recoveries: int
    #: Those of its servers that work, as their own machine says, and that nobody gets through to
    #: from here: no requests are sent there, and nothing is restarted.
    unreachable: tuple[int, ...] = ()

    @property
    def is_serving(self) -> bool:
        """As far as the group is concerned; whether it can be reached is another matter."""
        return self.state in SERVING

    @property
    def is_running(self) -> bool:
        return self.state in RUNNING

    def routes(self, rank: int) -> bool:
        """Whether requests may be sent to this server of it, if it is an entrypoint."""
        return self.state in SERVING and rank not in self.unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The whole fleet at one moment."""

    #: Counts every change of any state; two views of one epoch are equal.
    epoch: int
    #: Of the weights that a server must have to serve: as the model was loaded, 0.
    version: int
    groups: tuple[GroupView, ...]
    #: By rank, with the addresses that they have now.
    servers: Mapping[int, ServerSlot]

    def group_of(self, rank: int) -> GroupView:
        """Raises: KeyError, for a rank that has no server."""
        return self.groups[self.servers[rank].engine]

    @property
    def serving(self) -> tuple[GroupView, ...]:
        return tuple(group for group in self.groups if group.is_serving)

    @property
    def entrypoints(self) -> tuple[ServerSlot, ...]:
        """Of the groups that serve, less those that cannot be reached."""
        return tuple(
            slot
            for slot in self.servers.values()
            if slot.is_entrypoint and self.groups[slot.engine].routes(slot.rank)
        )

    @property
    def is_ready(self) -> bool:
        """Every group serves that is not retired."""
        left = [group for group in self.groups if group.state is not GroupState.RETIRED]
        return bool(left) and all(group.is_serving and not group.unreachable for group in left)

    @property
    def why_none(self) -> str:
        """Why no group serves, for a client that gets no answer; empty where one does."""
        if self.entrypoints:
            return ""
        return "; ".join(
            f"ranks {commas(group.ranks)} are {group.state.value}"
            + (" and cannot be reached" if group.unreachable else "")
            + (f" ({group.cause})" if group.cause else "")
            for group in self.groups
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMetadata:
    """What a trainer needs for one sync of the weights, all of one moment.

    `mesh[engine][rank]`: global ranks of the engines that can take weights, serving or stale.
    """

    epoch: int
    version: int
    mesh: tuple[tuple[int, ...], ...]
    #: By the rank of the server through which they are updated: its URL and the ranks.
    urls: Mapping[int, str]
    weight_ranks: Mapping[int, tuple[int, ...]]
    #: The incarnation of each of those servers, for `weights_synced`.
    epochs: Mapping[int, int]

    def as_json(self) -> dict[str, Any]:
        """As JSON has it: the keys that are ranks are texts."""
        return {
            "epoch": self.epoch,
            "version": self.version,
            "mesh": [list(ranks) for ranks in self.mesh],
            "urls": {str(rank): url for rank, url in self.urls.items()},
            "weight_ranks": {str(rank): list(ranks) for rank, ranks in self.weight_ranks.items()},
            "epochs": {str(rank): epoch for rank, epoch in self.epochs.items()},
        }


_log = logging.getLogger(__name__)

Listener = Callable[[GroupView, GroupView], None]

#: Its weights are known, so that they can be replaced.
_CAN_TAKE_WEIGHTS = frozenset({GroupState.ACTIVE, GroupState.SUSPECT, GroupState.STALE})


@dataclass(slots=True, kw_only=True)
class _Group:
    """What only this module changes."""

    index: int
    ranks: tuple[int, ...]
    state: GroupState = GroupState.STARTING
    epoch: int = 0
    #: Something of this incarnation may run: from `begin` to its end.
    is_begun: bool = False
    version: int | None = None
    cause: str = ""
    recoveries: int = 0
    suspects: frozenset[int] = frozenset()
    unreachable: frozenset[int] = frozenset()

    def view(self) -> GroupView:
        return GroupView(
            index=self.index,
            ranks=self.ranks,
            state=self.state,
            epoch=self.epoch,
            version=self.version,
            cause=self.cause,
            recoveries=self.recoveries,
            unreachable=tuple(sorted(self.unreachable)),
        )


class Registry:
    """The states of a fleet's groups, from before their first start until they are retired."""

    def __init__(self, plan: TopologyPlan) -> None:
        self._plan = plan
        self._groups = [
            _Group(index=index, ranks=engine.group) for index, engine in enumerate(plan.engines)
        ]
        self._of_rank = {rank: one.index for one in self._groups for rank in one.ranks}
        self._servers = {slot.rank: slot for engine in plan.engines for slot in engine.servers}
        self._version = 0
        self._epoch = 0
        self._view: FleetView | None = None
        #: What the view is made of, kept: of a thousand groups one changes at a time.
        self._views = [group.view() for group in self._groups]
        self._slots: Mapping[int, ServerSlot] = MappingProxyType(dict(self._servers))
        self._listeners: list[Listener] = []
        self._untold: deque[tuple[GroupView, GroupView]] = deque()
        self._is_telling = False

    @property
    def view(self) -> FleetView:
        """The fleet as it is now; the same object as long as nothing changes."""
        if self._view is None:
            self._view = FleetView(
                epoch=self._epoch,
                version=self._version,
                groups=tuple(self._views),
                servers=self._slots,
            )
        return self._view

    def listen(self, *listeners: Listener) -> None:
        """Have them told each change of a group, before and after, once it is in the view: one
        after the other, in this order.

        A listener may call verbs: what it causes is told after what is being told now.
        """
        self._listeners += listeners

    def group_of(self, rank: int) -> int:
        """Raises: KeyError, for a rank that has no server."""
        try:
            return self._of_rank[rank]
        except KeyError:
            known = ", ".join(map(str, sorted(self._of_rank)))
            raise KeyError(f"rank {rank} has no server; those that have: {known}") from None

    def is_current(self, rank: int, epoch: int) -> bool:
        """Whether this incarnation of a server is the one that is known and has not ended."""
        group = self._groups[self.group_of(rank)]
        return group.is_begun and group.epoch == epoch

    def training_metadata(self) -> TrainingMetadata:
        """Everything for one sync of the weights, of this moment."""
        able = [
            one for one in self._groups if one.state in _CAN_TAKE_WEIGHTS and not one.unreachable
        ]
        updated = [
            self._servers[rank]
            for group in able
            for rank in group.ranks
            if self._servers[rank].weight_ranks
        ]
        return TrainingMetadata(
            epoch=self._epoch,
            version=self._version,
            mesh=tuple(self._plan.engines[group.index].ranks for group in able),
            urls={slot.rank: slot.url for slot in updated if slot.url is not None},
            weight_ranks={slot.rank: slot.weight_ranks for slot in updated},
            epochs={slot.rank: self._groups[slot.engine].epoch for slot in updated},
        )

    def begin(self, group: int, *, slots: Sequence[ServerSlot] | None = None) -> int:
        """A new incarnation of a group that starts for the first time, or that was claimed.

        Args:
            slots: its servers at new addresses; None: at those they had.

        Returns: its epoch.
        """
        one = self._get(group)
        if one.is_begun or one.state not in (GroupState.STARTING, GroupState.RECOVERING):
            raise IllegalTransition(f"{_named(one)} is {one.state.value}: nothing can begin there")
        if slots is not None and tuple(slot.rank for slot in slots) != one.ranks:
            raise KeyError(f"{_named(one)} has no servers {[slot.rank for slot in slots]}")
        if slots is not None:
            self._servers.update({slot.rank: slot for slot in slots})
            self._slots = MappingProxyType(dict(self._servers))
        one.epoch += 1
        one.is_begun = True
        one.version = None
        one.recoveries += one.state is GroupState.RECOVERING
        self._changed(one)
        return one.epoch

    def started(self, group: int, epoch: int, *, version: int) -> bool:
        """It works: it serves where its weights are the fleet's, else it is stale."""
        one = self._get(group)
        if not _is_current(one, epoch):
            return False
        if one.state not in (GroupState.STARTING, GroupState.RECOVERING):
            raise IllegalTransition(f"{_named(one)} is {one.state.value}: it has started before")
        is_new = version == self._version
        self._move(
            one, GroupState.ACTIVE if is_new else GroupState.STALE, cause="", version=version
        )
        return True

    def suspect(self, rank: int, epoch: int, why: str) -> bool:
        """Answers of this server are missing; a group that serves goes on doing so."""
        one = self._groups[self.group_of(rank)]
        if not _is_current(one, epoch):
            return False
        if one.state is GroupState.STALE:
            return True
        if one.state is not GroupState.SUSPECT:
            self._move(one, GroupState.SUSPECT, cause=why)
        one.suspects |= {rank}
        return True

    def clear(self, rank: int, epoch: int) -> bool:
        """This server is well again; the group is, once all its servers are."""
        one = self._groups[self.group_of(rank)]
        if not _is_current(one, epoch):
            return False
        one.suspects -= {rank}
        if one.state is GroupState.SUSPECT and not one.suspects:
            self._move(one, GroupState.ACTIVE, cause="")
        return True

    def unreachable(self, rank: int, epoch: int, why: str) -> bool:
        """Nobody gets through to this server: it gets no requests, and its state stays."""
        return self._set_reachable(rank, epoch, False, why)

    def reachable(self, rank: int, epoch: int) -> bool:
        """It can be reached again, and gets requests where its group serves."""
        return self._set_reachable(rank, epoch, True, "")

    def fail(self, rank: int, epoch: int, cause: str) -> bool:
        """One server is lost, so its whole group is inactive at once.

        Returns: False too where the group had failed already: the first cause stands.
        """
        one = self._groups[self.group_of(rank)]
        if not _is_current(one, epoch):
            return False
        self._move(one, GroupState.INACTIVE, cause=cause)
        return True

    def claim(self, group: int) -> None:
        """A recovery takes charge of a group that has failed."""
        self._move(self._get(group), GroupState.RECOVERING)

    def give_up(self, group: int, cause: str) -> None:
        """A recovery has ended without a group that works."""
        one = self._get(group)
        if one.state is not GroupState.RECOVERING:
            raise IllegalTransition(f"{_named(one)} is {one.state.value}: no recovery has it")
        self._move(one, GroupState.INACTIVE, cause=cause)

    def retire(self, group: int, why: str) -> None:
        """It is not started again."""
        self._move(self._get(group), GroupState.RETIRED, cause=why)

    def weights_synced(
        self,
        version: int,
        *,
        ranks: Collection[int] | None = None,
        epochs: Mapping[int, int] | None = None,
    ) -> tuple[int, ...]:
        """The fleet's weights are those of `version` now, and so are those of the synced groups.

        Args:
            ranks: whose weights were replaced; None: those of all groups that can take weights.
                A group that cannot be reached is not among these unless `epochs` names it.
            epochs: by server, which incarnation was synced; a group with another one, or that is
                not in it, was not. None: the one that runs now.

        Returns: the groups that were synced. Those that serve and were not are stale.
        """
        known = {rank for slot in self._servers.values() for rank in slot.weight_ranks}
        if ranks is not None and (strange := sorted(set(ranks) - known)):
            raise KeyError(f"ranks {strange} have no weights to update; those that have: {known}")
        if epochs is not None:
            for rank in epochs:
                self.group_of(rank)
        synced = tuple(
            group.index
            for group in self._groups
            if group.state in _CAN_TAKE_WEIGHTS and self._is_synced(group, ranks, epochs)
        )
        self._version = version
        self._epoch += 1
        self._view = None
        for group in self._groups:
            if group.index in synced:
                group.version = version
            if group.state not in _CAN_TAKE_WEIGHTS:
                continue
            # Nothing is told before all are right: no listener sees an old one that serves.
            to = GroupState.STALE if group.version != version else GroupState.ACTIVE
            if to is GroupState.ACTIVE and group.state is GroupState.SUSPECT:
                continue
            if to is not group.state:
                self._require(group, to)
                group.state, group.suspects = to, frozenset()
        for group in self._groups:
            self._note(group)
        self._tell()
        return synced

    def _is_synced(
        self,
        group: _Group,
        ranks: Collection[int] | None,
        epochs: Mapping[int, int] | None,
    ) -> bool:
        slots = [slot for rank in group.ranks if (slot := self._servers[rank]).weight_ranks]
        if ranks is not None and not all(set(slot.weight_ranks) <= set(ranks) for slot in slots):
            return False
        if epochs is None:
            return not group.unreachable
        return all(epochs.get(slot.rank) == group.epoch for slot in slots)

    def _get(self, group: int) -> _Group:
        if not 0 <= group < len(self._groups):
            raise KeyError(f"the fleet has no group {group}: it has {len(self._groups)}")
        return self._groups[group]

    def _set_reachable(self, rank: int, epoch: int, is_reachable: bool, why: str) -> bool:
        one = self._groups[self.group_of(rank)]
        if not _is_current(one, epoch):
            return False
        if (rank not in one.unreachable) is not is_reachable:
            one.unreachable = one.unreachable - {rank} if is_reachable else one.unreachable | {rank}
            if not is_reachable:
                one.cause = why
            elif not one.unreachable and one.state is not GroupState.SUSPECT:
                one.cause = ""
            self._changed(one)
        return True

    def _require(self, one: _Group, state: GroupState) -> None:
        if state not in MOVES[one.state]:
            legal = ", ".join(sorted(to.value for to in MOVES[one.state])) or "nothing"
            raise IllegalTransition(
                f"{_named(one)} cannot go from {one.state.value} to {state.value}, only to {legal}"
            )

    def _move(
        self,
        one: _Group,
        state: GroupState,
        *,
        cause: str | None = None,
        version: int | None = None,
    ) -> None:
        self._require(one, state)
        one.state = state
        one.cause = one.cause if cause is None else cause
        one.version = one.version if version is None else version
        if state in (GroupState.INACTIVE, GroupState.RETIRED):
            one.is_begun = False
            one.version = None
            one.suspects = one.unreachable = frozenset()
        self._changed(one)

    def _changed(self, one: _Group) -> None:
        self._note(one)
        self._tell()

    def _note(self, one: _Group) -> None:
        before, after = self._views[one.index], one.view()
        if after != before:
            self._views[one.index] = after
            self._epoch += 1
            self._view = None
            self._untold.append((before, after))

    def _tell(self) -> None:
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._untold:
                before, after = self._untold.popleft()
                for listener in self._listeners:
                    try:
                        listener(before, after)
                    except Exception:
                        # The state has changed: whoever else lives by it must know.
                        _log.exception("group %d: not told: %s", after.index, after.state.value)
        finally:
            self._is_telling = False


def _is_current(one: _Group, epoch: int) -> bool:
    return one.is_begun and one.epoch == epoch


def _named(one: _Group) -> str:
    return f"group {one.index} (ranks {commas(one.ranks)})"
