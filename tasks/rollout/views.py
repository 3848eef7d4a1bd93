"""What the registry shows of a fleet: frozen snapshots, each of one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.record.states import RUNNING, SERVING, GroupState
from tasks.rollout.topology import ServerSlot


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
