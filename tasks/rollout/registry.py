"""The registry of a fleet: the only owner of the states of its lifecycle groups.

A lifecycle group holds the servers of one engine, which are stopped and started together. Other
modules change a group's state with the methods of `Registry`, and read frozen snapshots.

The registry needs no lock, because it is used in one asyncio loop only. A method that receives an
older epoch of a group changes nothing. The epoch counts the starts of the group. An illegal change
of state raises IllegalTransition. A rank or a group that the fleet does not have raises KeyError.
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

_log = logging.getLogger(__name__)

#: Weight version of a server that has received no new weights since its start.
_LOADED_VERSION = 0
#: States in which a server group can receive new weights, because its servers have started.
_CAN_TAKE_WEIGHTS = frozenset({GroupState.ACTIVE, GroupState.SUSPECT, GroupState.STALE})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Snapshot of one lifecycle group: the servers of an engine, which start and stop together."""

    #: Index of the server group in the fleet. The group's engine has the same index.
    index: int
    #: Ranks of the servers in the group.
    ranks: tuple[int, ...]
    state: GroupState = GroupState.STARTING
    #: Number of starts of the server group, including failed starts. 0 if it was never started.
    epoch: int = 0
    #: True if processes from the last start of the server group may still run.
    is_begun: bool = False
    #: Version of the server group's weights, or None if it is unknown.
    version: int | None = None
    #: Reason why the server group does not serve requests or is suspect. Empty if the group is
    #: healthy.
    cause: str = ""
    #: Number of times that a recovery has restarted the server group.
    recoveries: int = 0
    #: Ranks of working servers that the gateway cannot reach over the network. These servers
    #: receive no requests, and are not restarted.
    unreachable: tuple[int, ...] = ()

    @property
    def is_serving(self) -> bool:
        """True if the group's state allows requests. The gateway may still be unable to reach a
        server.
        """
        return self.state in SERVING_STATES

    @property
    def is_running(self) -> bool:
        """True if the server group's state says that its servers run."""
        return self.state in RUNNING_STATES

    def is_current(self, epoch: int) -> bool:
        """Return True if `epoch` is the group's latest start, and the group has not failed since.

        Args:
            epoch: Number of a start of the group. 1 is the first start.
        """
        return self.is_begun and self.epoch == epoch

    def may_receive_requests(self, rank: int) -> bool:
        """Return True if the gateway may send requests to this server of the group.

        The caller must also check that the server is an entrypoint.
        """
        return self.state in SERVING_STATES and rank not in self.unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """Frozen snapshot of a fleet of inference servers."""

    #: Number of changes of server groups so far. Two snapshots with the same number are equal.
    epoch: int
    #: Weight version that a server group needs to serve requests. 0 stands for the weights that
    #: servers load at their start.
    version: int
    #: True if no server group may serve before the trainer commits the first weights.
    awaits_weights: bool
    #: All server groups of the fleet, in the order of their indexes.
    groups: tuple[GroupView, ...]
    #: Mapping from rank to server, for all servers of the fleet, with their current addresses.
    servers: Mapping[int, ServerSlot]

    @property
    def serving(self) -> tuple[GroupView, ...]:
        """The server groups whose state allows requests."""
        return tuple(group for group in self.groups if group.is_serving)

    @property
    def up(self) -> tuple[GroupView, ...]:
        """The server groups that serve requests.

        If no group may serve before the first weight commit, STALE groups are included, too.
        """
        up_states = SERVING_STATES
        if self.awaits_weights:
            up_states = SERVING_STATES | {GroupState.STALE}
        return tuple(group for group in self.groups if group.state in up_states)

    @property
    def entrypoints(self) -> tuple[ServerSlot, ...]:
        """The entrypoints that the gateway may send requests to."""
        return tuple(
            slot
            for slot in self.servers.values()
            if slot.is_entrypoint and self.groups[slot.engine].may_receive_requests(slot.rank)
        )

    @property
    def targets(self) -> tuple[GroupView, ...]:
        """The serving and stale server groups that can receive new weights."""
        return tuple(
            group
            for group in self.groups
            if group.state in _CAN_TAKE_WEIGHTS and not group.unreachable
        )

    @property
    def training(self) -> dict[str, Any]:
        """The servers that can receive new weights, as JSON for the trainer.

        `mesh` has one list for each server: the ranks of the GPUs whose weights are updated through
        this server.
        `urls` maps the rank of the server, as a string, to the URL of the server.
        """
        slots = [slot for group in self.targets for slot in self.updated(group)]
        return {
            "epoch": self.epoch,
            "version": self.version,
            "mesh": [list(slot.weight_ranks) for slot in slots],
            "urls": {str(slot.rank): slot.url for slot in slots},
        }

    def updated(self, group: GroupView) -> tuple[ServerSlot, ...]:
        """Return the servers of a group that receive requests to update the group's weights."""
        slots = (self.servers[rank] for rank in group.ranks)
        return tuple(slot for slot in slots if slot.weight_ranks and slot.url is not None)

    @property
    def is_ready(self) -> bool:
        """True if the gateway can reach all server groups and all of them are up.

        Retired groups do not count.
        """
        kept = [group for group in self.groups if group.state is not GroupState.RETIRED]
        return bool(kept) and all(group in self.up and not group.unreachable for group in kept)

    @property
    def why_none(self) -> str:
        """Reason why no server accepts requests; empty if a server accepts requests."""
        if self.entrypoints:
            return ""
        return "; ".join(_describe_unavailable(group) for group in self.groups)


def _describe_unavailable(group: GroupView) -> str:
    """Return the state of a server group and the reason for the state, for an error message."""
    description = f"the servers of ranks {join_commas(group.ranks)} are {group.state.value}"
    if group.unreachable:
        description += " and cannot be reached"
    if group.cause:
        description += f" ({group.cause})"
    return description


#: Function that is called after each change of a server group. Its arguments are the snapshots
#: before and after the change.
Listener = Callable[[GroupView, GroupView], None]


class Registry:
    """Owner of the states of a fleet's lifecycle groups.

    A lifecycle group holds the servers of one engine, which are stopped and started together.
    """

    def __init__(self, plan: TopologyPlan, *, serves_as_loaded: bool = True) -> None:
        """
        Args:
            plan: Topology of the fleet.
            serves_as_loaded: True if servers accept requests as soon as they have started, with
                weight version 0. False if they first wait for weights from the trainer.
        """
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
        #: Cached snapshot of the current state. None if the state has changed since the last
        #: snapshot.
        self._view: FleetView | None = None
        self._listeners: list[Listener] = []
        #: Changes that the listeners have not received yet. A change is a pair of snapshots of a
        #: server group: before and after the change.
        self._pending_changes: deque[tuple[GroupView, GroupView]] = deque()
        self._is_notifying = False

    @property
    def view(self) -> FleetView:
        """Snapshot of the fleet's current state. The snapshot is cached until the next change."""
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
        """Add functions that are called, in this order, after each change of a group of servers.

        During the call, `view` already shows the change. If a listener itself changes a group, all
        listeners first receive the earlier change.
        """
        self._listeners += listeners

    def group(self, index: int) -> GroupView:
        """Return the current snapshot of a server group.

        Raises:
            KeyError: The fleet has no engine with this index.
        """
        if not 0 <= index < len(self._groups):
            raise KeyError(
                f"there is no engine {index}: the run has {len(self._groups)} engines, counted "
                "from 0"
            )
        return self._groups[index]

    def group_of(self, rank: int) -> int:
        """Return the index of the server group that the server with this rank belongs to.

        Raises:
            KeyError: The fleet has no server with this rank.
        """
        if rank not in self._servers:
            known = join_commas(sorted(self._servers))
            raise KeyError(
                f"there is no server with rank {rank}. The ranks with a server are: {known}"
            )
        return self._servers[rank].engine

    def begin(self, group: int, *, slots: Sequence[ServerSlot] | None = None) -> int:
        """Record that the start of a server group begins, and return the new epoch of the group.

        The group must be new, or `claim` must have been called for it.

        Args:
            group: Index of the group.
            slots: The group's servers with new addresses. None to keep the present addresses.

        Returns:
            The epoch: 1 for the first start of the group, 2 for the second start, and so on.

        Raises:
            IllegalTransition: The group still runs, or `claim` was not called for it.
        """
        view = self.group(group)
        if view.is_begun or view.state not in (GroupState.STARTING, GroupState.RECOVERING):
            reason = (
                "their start has already begun"
                if view.is_begun
                else f"the state of the engine is {view.state.value}"
            )
            raise IllegalTransition(
                f"the servers of {_describe(view)} cannot be started, because {reason}"
            )
        if slots is not None:
            moved = {slot.rank: slot for slot in slots}
            self._servers = MappingProxyType({**self._servers, **moved})
        self._change(
            view,
            epoch=view.epoch + 1,
            is_begun=True,
            version=None,
            recoveries=view.recoveries + (view.state is GroupState.RECOVERING),
        )
        return view.epoch + 1

    def mark_started(self, group: int, epoch: int) -> None:
        """Record that the servers of a group have started successfully.

        If servers may serve with the weights that they load at their start, the group becomes
        ACTIVE. Otherwise, the group becomes STALE.

        Raises:
            IllegalTransition: The group has already started.
        """
        view = self.group(group)
        if not view.is_current(epoch):
            return
        if view.state not in (GroupState.STARTING, GroupState.RECOVERING):
            raise IllegalTransition(
                f"the start of {_describe(view)} has already ended: the state of the engine is "
                f"{view.state.value}"
            )
        state = GroupState.ACTIVE if self._serves_as_loaded else GroupState.STALE
        self._move(view, state, cause="", version=_LOADED_VERSION)

    def suspect(self, rank: int, epoch: int, why: str) -> None:
        """Record that a server failed to answer.

        An ACTIVE group becomes SUSPECT. A SUSPECT group still gets requests.

        Args:
            rank: Rank of the server.
            epoch: Epoch of the server. The epoch counts the starts of the server's group.
            why: Description of the failure.
        """
        view = self._find_current(rank, epoch)
        if view is not None and view.state not in (GroupState.SUSPECT, GroupState.STALE):
            self._move(view, GroupState.SUSPECT, cause=why)

    def clear(self, rank: int, epoch: int) -> None:
        """Record that a group of servers works again after a server of the group failed to answer.

        A SUSPECT group becomes ACTIVE. A group in another state does not change. Call this method
        only if all servers of the group answer.

        Args:
            rank: Rank of any server of the group.
            epoch: Epoch of this server. The epoch counts the starts of the server's group.
        """
        view = self._find_current(rank, epoch)
        if view is not None and view.state is GroupState.SUSPECT:
            self._move(view, GroupState.ACTIVE, cause="")

    def unreachable(self, rank: int, epoch: int, why: str) -> None:
        """Record that the gateway cannot reach a working server. The server then gets no requests.

        The state of the server's group does not change.
        """
        view = self._find_current(rank, epoch)
        if view is not None and rank not in view.unreachable:
            self._change(view, unreachable=tuple(sorted([*view.unreachable, rank])), cause=why)

    def reachable(self, rank: int, epoch: int) -> None:
        """Record that the gateway can reach a server again.

        The state of the server's group does not change.
        """
        view = self._find_current(rank, epoch)
        if view is not None and rank in view.unreachable:
            still_unreachable = tuple(other for other in view.unreachable if other != rank)
            keeps_cause = still_unreachable or view.state is GroupState.SUSPECT
            cause = view.cause if keeps_cause else ""
            self._change(view, unreachable=still_unreachable, cause=cause)

    def fail(self, rank: int, epoch: int, cause: str) -> bool:
        """Record that a server has failed. Its whole server group becomes INACTIVE at once.

        Returns:
            True if the group became INACTIVE. False if nothing changed, because the group had
            already failed or has been started again.
        """
        view = self._find_current(rank, epoch)
        if view is None:
            return False
        self._move(view, GroupState.INACTIVE, cause=cause)
        return True

    def claim(self, group: int) -> None:
        """Record that the recovery restarts a failed server group, which becomes RECOVERING."""
        self._move(self.group(group), GroupState.RECOVERING)

    def give_up(self, group: int, cause: str) -> None:
        """Record that a restart of a server group has failed.

        Raises:
            IllegalTransition: `claim` was not called for the group.
        """
        view = self.group(group)
        if view.state is not GroupState.RECOVERING:
            raise IllegalTransition(
                f"no restart of {_describe(view)} is in progress: the state of the engine is "
                f"{view.state.value}"
            )
        self._move(view, GroupState.INACTIVE, cause=cause)

    def retire(self, group: int, why: str) -> None:
        """Record that a group of servers is not restarted any more, except after `bring_back`."""
        self._move(self.group(group), GroupState.RETIRED, cause=why)

    def bring_back(self, group: int, why: str) -> None:
        """Make a retired group of servers INACTIVE, so that it can be restarted.

        Raises:
            IllegalTransition: The group is not retired.
        """
        view = self.group(group)
        if view.state is not GroupState.RETIRED:
            raise IllegalTransition(f"{_describe(view)} is {view.state.value}: it was not retired")
        self._move(view, GroupState.INACTIVE, cause=why)

    def commit(self, version: int, epochs: Mapping[int, int], *, force: bool = False) -> None:
        """Set the weight version of the fleet. Server groups with this version accept requests.

        All other server groups that have started become STALE.

        Args:
            version: Version of the new weights.
            epochs: Mapping from each group that got the new weights to the group's epoch at that
                time. The epoch counts the starts of the group. A group that was restarted since
                then becomes STALE.
            force: True to allow a version lower than the current version.

        Raises:
            IllegalTransition: The version is lower than the current version.
        """
        for index in epochs:
            self.group(index)
        if version < self._version and not force:
            raise IllegalTransition(
                f"the weight version {version} is lower than the current version {self._version}. "
                f"To go back to version {version}, send the commit of the weight sync with "
                "`force: true`"
            )
        self._version = version
        self._serves_as_loaded = False
        self._awaits_weights = False
        self._epoch += 1
        self._view = None
        # Change all server groups before notifying the listeners. Otherwise, a listener could see
        # one group with new weights while another group still serves old weights.
        for group in [group for group in self._groups if group.state in _CAN_TAKE_WEIGHTS]:
            if epochs.get(group.index) != group.epoch:
                self._record(group, state=GroupState.STALE)
            elif group.state is GroupState.SUSPECT:
                self._record(group, version=version)
            else:
                self._record(group, version=version, state=GroupState.ACTIVE, cause="")
        self._notify()

    def mark_stale(self, group: int, epoch: int, why: str) -> None:
        """Record that the weights of a server group are unknown.

        The group is STALE until the trainer commits new weights for it.
        """
        view = self.group(group)
        if view.is_current(epoch) and view.state in _CAN_TAKE_WEIGHTS:
            self._change(view, state=GroupState.STALE, version=None, cause=why)

    def _find_current(self, rank: int, epoch: int) -> GroupView | None:
        """Return the group of a server, or None if the group has ended or was started again.

        Args:
            rank: Rank of the server.
            epoch: Epoch of the group when the caller observed the server. The epoch counts the
                starts of the group.
        """
        view = self._groups[self.group_of(rank)]
        return view if view.is_current(epoch) else None

    def _move(self, before: GroupView, state: GroupState, **fields: Any) -> None:
        """Change the state and other fields of a server group's snapshot, and notify listeners.

        Raises:
            IllegalTransition: The group cannot change from its current state to the new state.
        """
        if state not in LEGAL_GROUP_TRANSITIONS[before.state]:
            legal_states = LEGAL_GROUP_TRANSITIONS[before.state]
            legal = ", ".join(sorted(legal_state.value for legal_state in legal_states))
            raise IllegalTransition(
                f"the state of {_describe(before)} cannot change from {before.state.value} to "
                f"{state.value}. The possible next states are: {legal or 'none'}"
            )
        if state in (GroupState.INACTIVE, GroupState.RETIRED):
            fields |= {"is_begun": False, "version": None, "unreachable": ()}
        self._change(before, state=state, **fields)

    def _change(self, before: GroupView, **fields: Any) -> None:
        """Change fields of a server group's snapshot, and notify the listeners."""
        self._record(before, **fields)
        self._notify()

    def _record(self, before: GroupView, **fields: Any) -> None:
        """Change a server group's snapshot. The next call of `_notify` informs the listeners."""
        after = self._groups[before.index] = replace(before, **fields)
        if after != before:
            self._epoch += 1
            self._view = None
            self._pending_changes.append((before, after))

    def _notify(self) -> None:
        """Call the listeners for all pending changes, in the order of the changes."""
        if self._is_notifying:
            # This method is already running, and one of the listeners that it called has changed a
            # server group. The running call also reports this change.
            return
        self._is_notifying = True
        try:
            while self._pending_changes:
                before, after = self._pending_changes.popleft()
                for listener in self._listeners:
                    try:
                        listener(before, after)
                    except Exception:
                        # The state of the group has changed, so the other listeners must be called
                        # even if this listener has failed.
                        _log.exception(
                            "an error occurred while Muster processed the new state of "
                            "engine %d: %s",
                            after.index,
                            after.state.value,
                        )
        finally:
            self._is_notifying = False


def _describe(group: GroupView) -> str:
    """Return the index and the ranks of a server group, for messages."""
    return f"engine {group.index} (ranks {join_commas(group.ranks)})"
