"""States of a run and of a lifecycle group of servers, and the legal transitions between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import pairwise

from tasks.spec.errors import IllegalTransition


class RunState(Enum):
    """State of a run, as stored in `run.json` and in the event `run.state`."""

    #: The run was submitted, and no scheduling pass has evaluated it yet.
    QUEUED = "queued"
    #: The run has no process, and waits until all needed GPUs are free.
    PENDING_RESOURCES = "pending_resources"
    #: The run has its GPUs, and its flow process is starting.
    ADMITTED = "admitted"
    #: The components are being started in order.
    STARTING = "starting"
    #: All components are ready.
    RUNNING = "running"
    #: The result of the attempt is known. The components are being stopped in reverse order.
    STOPPING = "stopping"
    #: The run met the success criteria of its spec, and all its processes have ended.
    COMPLETED = "completed"
    #: The run failed. The cause is in the field `failure` of its last attempt.
    FAILED = "failed"
    #: A user cancelled the run, or another process stopped the flow process of the run.
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return not LEGAL_TRANSITIONS[self]


_S = RunState
#: Legal transitions of a run: `LEGAL_TRANSITIONS[old_state]` is the set of possible new states. A
#: run with live components must pass through STOPPING, so a run in a final state has no live
#: component.
LEGAL_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    _S.QUEUED: frozenset({_S.PENDING_RESOURCES, _S.ADMITTED, _S.FAILED, _S.CANCELLED}),
    _S.PENDING_RESOURCES: frozenset({_S.ADMITTED, _S.FAILED, _S.CANCELLED}),
    _S.ADMITTED: frozenset({_S.STARTING, _S.PENDING_RESOURCES, _S.FAILED, _S.CANCELLED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.STOPPING}),
    _S.RUNNING: frozenset({_S.STOPPING}),
    # STOPPING changes to PENDING_RESOURCES if the run waits for its next attempt after a failed
    # attempt. STOPPING changes to STARTING if the flow process was killed while a Ray job was
    # alive, and the next flow process continues the attempt.
    _S.STOPPING: frozenset(
        {_S.COMPLETED, _S.FAILED, _S.CANCELLED, _S.PENDING_RESOURCES, _S.STARTING}
    ),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


def find_recovery_transitions(before: RunState, after: RunState) -> tuple[RunState, ...]:
    """Return the states that lead from one state to another after a flow process has died.

    If components may have been alive, one of these states is STOPPING.

    Returns:
        The states after `before`, ending with `after`. Empty if `before` and `after` are equal.

    Raises:
        IllegalTransition: No sequence of legal transitions leads to the new state.
    """
    if before is after:
        return ()
    # Try three sequences of states, and return the first sequence with only legal transitions. The
    # third sequence is necessary if the flow process was killed after it started a component, but
    # before it wrote the state STARTING.
    for moves in ((after,), (_S.STOPPING, after), (_S.STARTING, _S.STOPPING, after)):
        states = (before, *moves)
        if all(new in LEGAL_TRANSITIONS[old] for old, new in pairwise(states)):
            return moves
    raise IllegalTransition(
        f"the state of a lost run cannot change from {before.value} to {after.value}"
    )


class GroupState(Enum):
    """State of a lifecycle group: inference servers that are started and stopped together.

    If one of the servers fails, the whole group is INACTIVE.
    """

    #: The inference servers of the group are starting, or load their language model.
    STARTING = "starting"
    #: The servers of the group serve inference requests.
    ACTIVE = "active"
    #: The servers of the group serve requests, but one of them did not pass its last health checks.
    SUSPECT = "suspect"
    #: A server of the group has failed. All servers of the group are being ended or have ended.
    INACTIVE = "inactive"
    #: Muster restarts the failed servers of the group now, or after a delay.
    RECOVERING = "recovering"
    #: The servers of the group run with outdated model weights, so they get no requests. When the
    #: trainer has sent new weights, the servers get requests again.
    STALE = "stale"
    #: The group was taken out of service. Its servers restart only after a command of an operator.
    RETIRED = "retired"


_G = GroupState

#: Legal transitions of a lifecycle group: `LEGAL_GROUP_TRANSITIONS[old_state]` is the set of
#: possible new states. A lifecycle group consists of inference servers that are started together.
LEGAL_GROUP_TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = {
    _G.STARTING: frozenset({_G.ACTIVE, _G.STALE, _G.INACTIVE, _G.RETIRED}),
    _G.ACTIVE: frozenset({_G.SUSPECT, _G.STALE, _G.INACTIVE, _G.RETIRED}),
    _G.SUSPECT: frozenset({_G.ACTIVE, _G.STALE, _G.INACTIVE, _G.RETIRED}),
    _G.INACTIVE: frozenset({_G.RECOVERING, _G.RETIRED}),
    _G.RECOVERING: frozenset({_G.ACTIVE, _G.STALE, _G.INACTIVE, _G.RETIRED}),
    _G.STALE: frozenset({_G.ACTIVE, _G.INACTIVE, _G.RETIRED}),
    _G.RETIRED: frozenset({_G.INACTIVE}),
}

#: States of a lifecycle group in which its inference servers receive requests.
SERVING_STATES = frozenset({_G.ACTIVE, _G.SUSPECT})
#: States of a lifecycle group in which its inference servers are running and are supervised.
RUNNING_STATES = frozenset({_G.STARTING, _G.ACTIVE, _G.SUSPECT, _G.STALE})
