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
from dataclasses import dataclass, field, replace
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
    state: GroupState = GroupState.STARTING
    #: Which incarnation this is, from 1; what is known of an older one is void. 0: never started.
    epoch: int = 0
    #: Something of this incarnation may run: from `begin` to its end.
    is_begun: bool = False
    #: Of its weights; None while none are known to be there.
    version: int | None = None
    #: Why it left its last serving state; empty while it is well.
    cause: str = ""
    #: How often it was started again.
    recoveries: int = 0
    #: Those of its servers whose answers are missing; a change of them alone is told to nobody.
    suspects: frozenset[int] = field(default=frozenset(), compare=False)
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

    def is_current(self, epoch: int) -> bool:
        """Whether this incarnation is the one that is known and has not ended."""
        return self.is_begun and self.epoch == epoch

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


class Registry:
    """The states of a fleet's groups, from before their first start until they are retired."""

    def __init__(self, plan: TopologyPlan) -> None:
        self._plan = plan
        self._groups = [
            GroupView(index=index, ranks=engine.group) for index, engine in enumerate(plan.engines)
        ]
        self._servers: Mapping[int, ServerSlot] = MappingProxyType(
            {slot.rank: slot for engine in plan.engines for slot in engine.servers}
        )
        self._version = 0
        self._epoch = 0
        self._view: FleetView | None = None
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
                groups=tuple(self._groups),
                servers=self._servers,
            )
        return self._view

    def listen(self, *listeners: Listener) -> None:
        """Have them told each change of a group, before and after, once it is in the view: one
        after the other, in this order.

        What a listener causes by verbs is told after what is being told now.
        """
        self._listeners += listeners

    def group_of(self, rank: int) -> int:
        """Raises: KeyError, for a rank that has no server."""
        if rank not in self._servers:
            known = commas(sorted(self._servers))
            raise KeyError(f"rank {rank} has no server; those that have: {known}")
        return self._servers[rank].engine

    def is_current(self, rank: int, epoch: int) -> bool:
        """Of a server; see `GroupView.is_current`."""
        return self._groups[self.group_of(rank)].is_current(epoch)

    def training_metadata(self) -> TrainingMetadata:
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
            self._servers = MappingProxyType(
                {**self._servers, **{slot.rank: slot for slot in slots}}
            )
        self._change(
            one,
            epoch=one.epoch + 1,
            is_begun=True,
            version=None,
            recoveries=one.recoveries + (one.state is GroupState.RECOVERING),
        )
        return one.epoch + 1

    def started(self, group: int, epoch: int, *, version: int) -> bool:
        """It works: it serves where its weights are the fleet's, else it is stale."""
        one = self._get(group)
        if not one.is_current(epoch):
            return False
        if one.state not in (GroupState.STARTING, GroupState.RECOVERING):
            raise IllegalTransition(f"{_named(one)} is {one.state.value}: it has started before")
        state = GroupState.ACTIVE if version == self._version else GroupState.STALE
        self._move(one, state, cause="", version=version)
        return True

    def suspect(self, rank: int, epoch: int, why: str) -> bool:
        """Answers of this server are missing; a group that serves goes on doing so."""
        one = self._groups[self.group_of(rank)]
        if not one.is_current(epoch):
            return False
        suspects = one.suspects | {rank}
        if one.state is GroupState.SUSPECT:
            self._change(one, suspects=suspects)
        elif one.state is not GroupState.STALE:
            self._move(one, GroupState.SUSPECT, cause=why, suspects=suspects)
        return True

    def clear(self, rank: int, epoch: int) -> bool:
        """This server is well again; the group is, once all its servers are."""
        one = self._groups[self.group_of(rank)]
        if not one.is_current(epoch):
            return False
        if one.state is GroupState.SUSPECT:
            if suspects := one.suspects - {rank}:
                self._change(one, suspects=suspects)
            else:
                self._move(one, GroupState.ACTIVE, cause="", suspects=suspects)
        return True

    def unreachable(self, rank: int, epoch: int, why: str) -> bool:
        """Nobody gets through to this server: it gets no requests, and its state stays."""
        one = self._groups[self.group_of(rank)]
        if not one.is_current(epoch):
            return False
        if rank not in one.unreachable:
            self._change(one, unreachable=tuple(sorted([*one.unreachable, rank])), cause=why)
        return True

    def reachable(self, rank: int, epoch: int) -> bool:
        """It can be reached again, and gets requests where its group serves."""
        one = self._groups[self.group_of(rank)]
        if not one.is_current(epoch):
            return False
        if rank in one.unreachable:
            left = tuple(other for other in one.unreachable if other != rank)
            keeps_cause = left or one.state is GroupState.SUSPECT
            self._change(one, unreachable=left, cause=one.cause if keeps_cause else "")
        return True

    def fail(self, rank: int, epoch: int, cause: str) -> bool:
        """One server is lost, so its whole group is inactive at once.

        Returns: False too where the group had failed already: the first cause stands.
        """
        one = self._groups[self.group_of(rank)]
        if not one.is_current(epoch):
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
        # Nothing is told before all are right: no listener sees an old one that serves.
        for group in self._groups:
            if group.state not in _CAN_TAKE_WEIGHTS:
                continue
            its_version = version if group.index in synced else group.version
            if its_version != version:
                self._note(group, state=GroupState.STALE, suspects=frozenset())
            elif group.state is GroupState.SUSPECT:
                self._note(group, version=version)
            else:
                self._note(group, version=version, state=GroupState.ACTIVE)
        self._tell()
        return synced

    def _is_synced(
        self,
        group: GroupView,
        ranks: Collection[int] | None,
        epochs: Mapping[int, int] | None,
    ) -> bool:
        slots = [slot for rank in group.ranks if (slot := self._servers[rank]).weight_ranks]
        if ranks is not None and not all(set(slot.weight_ranks) <= set(ranks) for slot in slots):
            return False
        if epochs is None:
            return not group.unreachable
        return all(epochs.get(slot.rank) == group.epoch for slot in slots)

    def _get(self, group: int) -> GroupView:
        if not 0 <= group < len(self._groups):
            raise KeyError(f"the fleet has no group {group}: it has {len(self._groups)}")
        return self._groups[group]

    def _move(self, one: GroupView, state: GroupState, **more: Any) -> None:
        if state not in MOVES[one.state]:
            legal = ", ".join(sorted(to.value for to in MOVES[one.state])) or "nothing"
            raise IllegalTransition(
                f"{_named(one)} cannot go from {one.state.value} to {state.value}, only to {legal}"
            )
        if state in (GroupState.INACTIVE, GroupState.RETIRED):
            more |= {"is_begun": False, "version": None}
            more |= {"suspects": frozenset(), "unreachable": ()}
        self._change(one, state=state, **more)

    def _change(self, one: GroupView, **fields: Any) -> None:
        self._note(one, **fields)
        self._tell()

    def _note(self, before: GroupView, **fields: Any) -> None:
        after = self._groups[before.index] = replace(before, **fields)
        if after != before:
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


def _named(one: GroupView) -> str:
    return f"group {one.index} (ranks {commas(one.ranks)})"
