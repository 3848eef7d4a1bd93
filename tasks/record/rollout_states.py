"""The states of a lifecycle group of servers, and the moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class GroupState(Enum):
    """Of all servers of a group at once: one that fails takes the others out with it."""

    #: Its processes are being started for the first time, or load the model.
    STARTING = "starting"
    #: Serves requests.
    ACTIVE = "active"
    #: Serves requests, and some of the last answers of one of its servers were missing.
    SUSPECT = "suspect"
    #: Has failed; its processes are ended, or are about to be.
    INACTIVE = "inactive"
    #: Claimed by a recovery, which is under way or waits for its back-off.
    RECOVERING = "recovering"
    #: Works, with other weights than the fleet has now: serves once they are synced.
    STALE = "stale"
    #: Is not started again.
    RETIRED = "retired"


_G = GroupState

#: From each state, where a group may go.
MOVES: Mapping[GroupState, frozenset[GroupState]] = {
    _G.STARTING: frozenset({_G.ACTIVE, _G.STALE, _G.INACTIVE, _G.RETIRED}),
    _G.ACTIVE: frozenset({_G.SUSPECT, _G.STALE, _G.INACTIVE, _G.RETIRED}),
    _G.SUSPECT: frozenset({_G.ACTIVE, _G.STALE, _G.INACTIVE, _G.RETIRED}),
    _G.INACTIVE: frozenset({_G.RECOVERING, _G.RETIRED}),
    _G.RECOVERING: frozenset({_G.ACTIVE, _G.STALE, _G.INACTIVE, _G.RETIRED}),
    _G.STALE: frozenset({_G.ACTIVE, _G.INACTIVE, _G.RETIRED}),
    _G.RETIRED: frozenset(),
}

#: Requests may be sent there.
SERVING = frozenset({_G.ACTIVE, _G.SUSPECT})
#: Its processes run, and are watched.
RUNNING = frozenset({_G.STARTING, _G.ACTIVE, _G.SUSPECT, _G.STALE})
