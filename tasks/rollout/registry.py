"""The one owner of the state of a fleet's servers.

Everybody else calls its verbs and gets frozen snapshots. It has no clock, no I/O and no lock: it
lives in one asyncio loop, and a verb takes effect at once, for all servers of a group.

A verb that names an older incarnation (`epoch`) changes nothing. An illegal move raises
IllegalTransition, a rank or group that the fleet does not have KeyError.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tasks.record.states import LEGAL_GROUP_TRANSITIONS, RUNNING_STATES, SERVING_STATES, GroupState
from tasks.rollout.topology import ServerSlot, TopologyPlan
from tasks.spec.errors import IllegalTransition
from tasks.spec.formatting import join_commas


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One lifecycle group at one moment."""

    #: Index into the fleet's groups, which is that of its engine.
    index: int
    #: Of its servers.
    ranks: tuple[int, ...]
    state: GroupState = GroupState.STARTING
    #: Which incarnation this is, from 1. 0: never started.
    epoch: int = 0
    #: Something of this incarnation may run: from `begin` to its end.
    is_begun: bool = False
    #: Of its weights; None while it is not known which they are.
    version: int | None = None
    #: Why it left its last serving state; empty while it is well.
    cause: str = ""
    #: How often it was started again.
    recoveries: int = 0
    #: Its servers that work, as their own machine says, and that nobody gets through to from here:
    #: no requests are sent there, and nothing is restarted.
    unreachable: tuple[int, ...] = ()

    @property
    def is_serving(self) -> bool:
        """Whether it can be reached is another matter."""
        return self.state in SERVING_STATES

    @property
    def is_running(self) -> bool:
        return self.state in RUNNING_STATES

    def is_current(self, epoch: int) -> bool:
        """Whether this incarnation is the last one, and has not ended."""
        return self.is_begun and self.epoch == epoch

    def routes(self, rank: int) -> bool:
        """Whether requests may be sent to this server of it, if it is an entrypoint."""
        return self.state in SERVING_STATES and rank not in self.unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The whole fleet at one moment."""

    #: Counts every change of any state; two views of one epoch are equal.
    epoch: int
    #: Of the weights that a server must have to serve: as the model was loaded, 0.
    version: int
    #: Nobody serves before the first commit.
    awaits_weights: bool
    groups: tuple[GroupView, ...]
    #: By rank, with the addresses that they have now.
    servers: Mapping[int, ServerSlot]

    @property
    def serving(self) -> tuple[GroupView, ...]:
        return tuple(group for group in self.groups if group.is_serving)

    @property
    def up(self) -> tuple[GroupView, ...]:
        """The groups that serve, or that will once the first weights are there."""
        up = SERVING_STATES | {GroupState.STALE} if self.awaits_weights else SERVING_STATES
        return tuple(group for group in self.groups if group.state in up)

    @property
    def entrypoints(self) -> tuple[ServerSlot, ...]:
        """Of the groups that serve, less those that cannot be reached."""
        return tuple(
            slot
            for slot in self.servers.values()
            if slot.is_entrypoint and self.groups[slot.engine].routes(slot.rank)
        )

    @property
    def targets(self) -> tuple[GroupView, ...]:
        """The groups that can take weights, serving or stale."""
        return tuple(
            one for one in self.groups if one.state in _CAN_TAKE_WEIGHTS and not one.unreachable
        )

    @property
    def training(self) -> dict[str, Any]:
        """What can take weights, as JSON has it: `mesh[server][rank]`, global ranks, by the server
        through which they are updated; and by the rank of that server, as a text, its URL."""
        slots = [slot for group in self.targets for slot in self.updated(group)]
        return {
            "epoch": self.epoch,
            "version": self.version,
            "mesh": [list(slot.weight_ranks) for slot in slots],
            "urls": {str(slot.rank): slot.url for slot in slots},
        }

    def updated(self, group: GroupView) -> tuple[ServerSlot, ...]:
        """The servers through which the weights of a group are updated."""
        slots = (self.servers[rank] for rank in group.ranks)
        return tuple(slot for slot in slots if slot.weight_ranks and slot.url is not None)

    @property
    def is_ready(self) -> bool:
        """Every group is up that is not retired."""
        left = [group for group in self.groups if group.state is not GroupState.RETIRED]
        return bool(left) and all(group in self.up and not group.unreachable for group in left)

    @property
    def why_none(self) -> str:
        """Why no group serves, for a client that gets no answer; empty where one does."""
        if self.entrypoints:
            return ""
        return "; ".join(
            f"ranks {join_commas(group.ranks)} are {group.state.value}"
            + (" and cannot be reached" if group.unreachable else "")
            + (f" ({group.cause})" if group.cause else "")
            for group in self.groups
        )


_log = logging.getLogger(__name__)

Listener = Callable[[GroupView, GroupView], None]

#: Of the model as a server loads it at its start.
_AS_LOADED = 0
#: It has started, so that its weights can be replaced.
_CAN_TAKE_WEIGHTS = frozenset({GroupState.ACTIVE, GroupState.SUSPECT, GroupState.STALE})


class Registry:
    """The states of a fleet's groups.

    Args:
        serves_as_loaded: until the first commit, a group serves with the model as it was loaded,
            version 0; else it is stale.
    """

    def __init__(self, plan: TopologyPlan, *, serves_as_loaded: bool = True) -> None:
        self._groups = [
            GroupView(index=index, ranks=engine.group) for index, engine in enumerate(plan.engines)
        ]
        self._servers: Mapping[int, ServerSlot] = MappingProxyType(
            {slot.rank: slot for engine in plan.engines for slot in engine.servers}
        )
        self._version = 0
        self._serves_as_loaded = serves_as_loaded
        self._awaits_weights = not serves_as_loaded
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
                awaits_weights=self._awaits_weights,
                groups=tuple(self._groups),
                servers=self._servers,
            )
        return self._view

    def listen(self, *listeners: Listener) -> None:
        """Have them told each change of a group, before and after, once it is in the view, in this
        order. What a listener causes by verbs is told after what is being told now."""
        self._listeners += listeners

    def group(self, index: int) -> GroupView:
        """Raises: KeyError, for an engine that the fleet does not have."""
        if not 0 <= index < len(self._groups):
            raise KeyError(f"the fleet has no engine {index}: it has {len(self._groups)}")
        return self._groups[index]

    def group_of(self, rank: int) -> int:
        """Raises: KeyError, for a rank that has no server."""
        if rank not in self._servers:
            known = join_commas(sorted(self._servers))
            raise KeyError(f"rank {rank} has no server; those that have: {known}")
        return self._servers[rank].engine

    def begin(self, group: int, *, slots: Sequence[ServerSlot] | None = None) -> int:
        """A new incarnation of a group that starts for the first time, or that was claimed.

        Args:
            slots: its servers at new addresses; None: at those they had.

        Returns: its epoch.
        """
        one = self.group(group)
        if one.is_begun or one.state not in (GroupState.STARTING, GroupState.RECOVERING):
            raise IllegalTransition(f"{_named(one)} is {one.state.value}: nothing can begin there")
        if slots is not None:
            moved = {slot.rank: slot for slot in slots}
            self._servers = MappingProxyType({**self._servers, **moved})
        self._change(
            one,
            epoch=one.epoch + 1,
            is_begun=True,
            version=None,
            recoveries=one.recoveries + (one.state is GroupState.RECOVERING),
        )
        return one.epoch + 1

    def started(self, group: int, epoch: int) -> None:
        """It works: it serves as long as the model as it was loaded does, else it is stale."""
        one = self.group(group)
        if not one.is_current(epoch):
            return
        if one.state not in (GroupState.STARTING, GroupState.RECOVERING):
            raise IllegalTransition(f"{_named(one)} is {one.state.value}: it has started before")
        state = GroupState.ACTIVE if self._serves_as_loaded else GroupState.STALE
        self._move(one, state, cause="", version=_AS_LOADED)

    def suspect(self, rank: int, epoch: int, why: str) -> None:
        """Answers of this server are missing; a group that serves goes on doing so."""
        one = self._current(rank, epoch)
        if one is not None and one.state not in (GroupState.SUSPECT, GroupState.STALE):
            self._move(one, GroupState.SUSPECT, cause=why)

    def clear(self, rank: int, epoch: int) -> None:
        """The servers of its group are well again."""
        one = self._current(rank, epoch)
        if one is not None and one.state is GroupState.SUSPECT:
            self._move(one, GroupState.ACTIVE, cause="")

    def unreachable(self, rank: int, epoch: int, why: str) -> None:
        """Nobody gets through to this server: it gets no requests, and its state stays."""
        one = self._current(rank, epoch)
        if one is not None and rank not in one.unreachable:
            self._change(one, unreachable=tuple(sorted([*one.unreachable, rank])), cause=why)

    def reachable(self, rank: int, epoch: int) -> None:
        """It can be reached again, and gets requests where its group serves."""
        one = self._current(rank, epoch)
        if one is not None and rank in one.unreachable:
            left = tuple(other for other in one.unreachable if other != rank)
            keeps_cause = left or one.state is GroupState.SUSPECT
            self._change(one, unreachable=left, cause=one.cause if keeps_cause else "")

    def fail(self, rank: int, epoch: int, cause: str) -> bool:
        """One server is lost, so its whole group is inactive at once.

        Returns: False too where the group had failed already: the first cause stands.
        """
        if (one := self._current(rank, epoch)) is None:
            return False
        self._move(one, GroupState.INACTIVE, cause=cause)
        return True

    def claim(self, group: int) -> None:
        """A recovery takes charge of a group that has failed."""
        self._move(self.group(group), GroupState.RECOVERING)

    def give_up(self, group: int, cause: str) -> None:
        """A recovery has ended without a group that works."""
        one = self.group(group)
        if one.state is not GroupState.RECOVERING:
            raise IllegalTransition(f"{_named(one)} is {one.state.value}: no recovery has it")
        self._move(one, GroupState.INACTIVE, cause=cause)

    def retire(self, group: int, why: str) -> None:
        """It is not started again, unless it is brought back."""
        self._move(self.group(group), GroupState.RETIRED, cause=why)

    def bring_back(self, group: int, why: str) -> None:
        """One that is retired is to be started again."""
        one = self.group(group)
        if one.state is not GroupState.RETIRED:
            raise IllegalTransition(f"{_named(one)} is {one.state.value}: it was not retired")
        self._move(one, GroupState.INACTIVE, cause=why)

    def commit(self, version: int, epochs: Mapping[int, int], *, force: bool = False) -> None:
        """The fleet's weights are those of `version`; whoever has them serves, and nobody else.

        Args:
            epochs: by group that has them, which incarnation of it. One that is another by now,
                or that is not named, is stale.
            force: the version may be lower than that of the fleet.
        """
        for index in epochs:
            self.group(index)
        if version < self._version and not force:
            raise IllegalTransition(
                f"version {version} is older than the fleet's, {self._version}; to go back all the "
                "same, say force"
            )
        self._version, self._serves_as_loaded, self._awaits_weights = version, False, False
        self._epoch += 1
        self._view = None
        # Nothing is told before all are right: no listener sees an old one that serves.
        for group in [one for one in self._groups if one.state in _CAN_TAKE_WEIGHTS]:
            if epochs.get(group.index) != group.epoch:
                self._note(group, state=GroupState.STALE)
            elif group.state is GroupState.SUSPECT:
                self._note(group, version=version)
            else:
                self._note(group, version=version, state=GroupState.ACTIVE, cause="")
        self._tell()

    def spoil(self, group: int, epoch: int, why: str) -> None:
        """Nobody knows which weights it has: it is stale until a commit names it."""
        one = self.group(group)
        if one.is_current(epoch) and one.state in _CAN_TAKE_WEIGHTS:
            self._change(one, state=GroupState.STALE, version=None, cause=why)

    def _current(self, rank: int, epoch: int) -> GroupView | None:
        one = self._groups[self.group_of(rank)]
        return one if one.is_current(epoch) else None

    def _move(self, one: GroupView, state: GroupState, **more: Any) -> None:
        if state not in LEGAL_GROUP_TRANSITIONS[one.state]:
            legal = (
                ", ".join(sorted(to.value for to in LEGAL_GROUP_TRANSITIONS[one.state]))
                or "nothing"
            )
            raise IllegalTransition(
                f"{_named(one)} cannot go from {one.state.value} to {state.value}, only to {legal}"
            )
        if state in (GroupState.INACTIVE, GroupState.RETIRED):
            more |= {"is_begun": False, "version": None, "unreachable": ()}
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
    return f"group {one.index} (ranks {join_commas(one.ranks)})"
