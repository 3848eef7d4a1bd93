"""The states of a run and of a lifecycle group of servers, and the moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import pairwise

from tasks.spec.errors import IllegalTransition


class RunState(Enum):
    """Where a run stands, as `run.json` and the event `run.state` say it."""

    #: Submitted; nobody has looked at it yet.
    QUEUED = "queued"
    #: Waits, without a process, for its whole gang of GPUs.
    PENDING_RESOURCES = "pending_resources"
    #: Has its gang; its flow process is on its way.
    ADMITTED = "admitted"
    #: Components are being started in order.
    STARTING = "starting"
    #: Every component is ready.
    RUNNING = "running"
    #: How it ends is decided; components are being stopped in reverse order.
    STOPPING = "stopping"
    #: Did what its spec asks as evidence of success, and left nothing behind.
    COMPLETED = "completed"
    #: Did not; the failure says why.
    FAILED = "failed"
    #: Was ended by a person, or with the process that ran it.
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return not LEGAL_MOVES[self]


_S = RunState
#: `LEGAL_MOVES[from] -> to`. Every way out of a state in which components may live leads through
#: STOPPING, so no run is final with a component alive.
LEGAL_MOVES: dict[RunState, frozenset[RunState]] = {
    _S.QUEUED: frozenset({_S.PENDING_RESOURCES, _S.ADMITTED, _S.FAILED, _S.CANCELLED}),
    _S.PENDING_RESOURCES: frozenset({_S.ADMITTED, _S.FAILED, _S.CANCELLED}),
    _S.ADMITTED: frozenset({_S.STARTING, _S.PENDING_RESOURCES, _S.FAILED, _S.CANCELLED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.STOPPING}),
    _S.RUNNING: frozenset({_S.STOPPING}),
    # A failed attempt whose kind is retried goes back to wait for its next one. One whose process
    # was killed before it had ended a job is gone on with by the next process.
    _S.STOPPING: frozenset(
        {_S.COMPLETED, _S.FAILED, _S.CANCELLED, _S.PENDING_RESOURCES, _S.STARTING}
    ),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


def moves_of_recovery(before: RunState, after: RunState) -> tuple[RunState, ...]:
    """The legal moves by which whoever finishes a run without a process brings it to a state.

    Through STOPPING where components may have lived: they have been ended by then.

    Raises: IllegalTransition, when no such moves lead there.
    """
    if before is after:
        return ()
    # The last: its first component may have begun before the record could say so.
    for moves in ((after,), (_S.STOPPING, after), (_S.STARTING, _S.STOPPING, after)):
        if all(to in LEGAL_MOVES[state] for state, to in pairwise((before, *moves))):
            return moves
    raise IllegalTransition(f"a lost run can't go from {before.value} to {after.value}")


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
    #: Is not started again, but by order.
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
    _G.RETIRED: frozenset({_G.INACTIVE}),
}

#: Requests may be sent there.
SERVING = frozenset({_G.ACTIVE, _G.SUSPECT})
#: Its processes run, and are watched.
RUNNING = frozenset({_G.STARTING, _G.ACTIVE, _G.SUSPECT, _G.STALE})
