"""What the queue writes to flow runs on the Prefect server: grants (as labels) and states.

A grant belongs to the state in which it was given. If the flow run has since got another Scheduled
state, by a requeue or by a retry in the UI, the grant is void.

Prefect has no compare-and-set for states, and the server lets a cancelled run of a deployment wait
again. A cancel can therefore be overwritten. So the history is read after each write, and an
overwritten cancel is restored. If a gate is killed in between, a trace stays on the flow run, and
the next scheduling pass restores the cancel.

Functions that ask the server may raise httpx.HTTPError and PrefectException, also for a flow run
that was deleted meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import Scheduled
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from tasks.processes.identity import ProcessId, boot_id, host_name

#: Label with a `Grant` as JSON. Empty: no grant.
GRANT = "muster.gang.grant"
#: Label with the host of the process that waits for a gang. The run can start only on that host.
HOST = "muster.gang.host"
#: Label that this process changes every BEAT_EVERY_S seconds while it is alive.
BEAT = "muster.gang.beat"
#: Label of a run that was sent back: earliest time of its next start, in UTC epoch seconds.
_NOT_BEFORE = "muster.gang.not_before"
#: Label with the nodes on which attempts of the run failed for a reason that a node can cause, and
#: the times of the last failures in UTC epoch seconds: `{"node-1": 1763900000}`.
_FAILED_ON = "muster.gang.failed_on"
_FAILURES = TypeAdapter(dict[str, int])
#: Label with the number of processes that the flow run has had, set when the last one exited while
#: its jobs still run.
_HANDED_OVER = "muster.gang.goes_on"

#: Seconds between two changes of the BEAT label.
BEAT_EVERY_S = 10.0

#: Name of the state of a run that waits for its gang.
PENDING_RESOURCES = "PendingResources"


class SchedulerProcess(ProcessId):
    """The process of a gate, which gives grants."""

    host: str

    @staticmethod
    def current() -> SchedulerProcess:
        """Return this process."""
        return SchedulerProcess(host=host_name(), **ProcessId.of(os.getpid()).model_dump())

    def is_surely_gone(self) -> bool:
        """Return True if the process has certainly ended.

        A process on another host cannot be checked, so it never counts as ended.
        """
        is_here = self.host == host_name() and self.boot_id == boot_id()
        return is_here and not self.is_alive()


class Grant(BaseModel):
    """The nodes and devices that a flow run may use."""

    model_config = ConfigDict(frozen=True)

    #: `gpus[node name]`.
    nodes: dict[str, int]
    #: `devices[node name]`: device numbers. Empty if Ray assigns the devices.
    devices: dict[str, tuple[int, ...]] = {}
    #: Address of the Ray cluster of the nodes, or an empty string.
    cluster: str = ""
    #: Id of the state in which the grant was given.
    state_id: str = ""
    #: Time of the grant, in UTC epoch seconds.
    at: float = 0.0
    #: The process that gave the grant.
    by: SchedulerProcess | None = None

    def __str__(self) -> str:
        return ", ".join(self.nodes) or "no node"

    def moved_to(self, nodes: Mapping[str, int]) -> Grant:
        """Return this grant with other nodes."""
        return self.model_copy(update={"nodes": dict(nodes)})

    def label(self) -> dict[str, Any]:
        """Return the label that stores this grant."""
        return {GRANT: self.model_dump_json()}


def state_of(flow_run: FlowRun) -> State[Any]:
    """Return the flow run's state. A flow run that was read from a server always has one."""
    assert flow_run.state is not None
    return flow_run.state


def failed_nodes(flow_run: FlowRun) -> dict[str, int]:
    """Return the nodes on which the run failed, and the last time in UTC epoch seconds."""
    # Everybody who may submit a flow run can set its labels, so the content may be invalid.
    with suppress(ValidationError):
        return _FAILURES.validate_json(str(flow_run.labels.get(_FAILED_ON) or "{}"))
    return {}


def failure_labels(flow_run: FlowRun, nodes: Iterable[str], at: float) -> dict[str, Any]:
    """Return the label that adds failures on these nodes."""
    return {_FAILED_ON: json.dumps(failed_nodes(flow_run) | dict.fromkeys(nodes, int(at)))}


def grant_of(flow_run: FlowRun) -> Grant | None:
    """Return the grant of a flow run, or None if it has none or the grant is void."""
    label = flow_run.labels.get(GRANT)
    if not label:
        return None
    state = state_of(flow_run)
    try:
        grant = Grant.model_validate_json(str(label))
    except ValidationError:
        return None
    is_waiting = state.type is StateType.SCHEDULED or state.name == PENDING_RESOURCES
    is_void = is_waiting and grant.state_id != str(state.id) and not is_handed_over(flow_run)
    return None if is_void else grant


def no_grant_labels() -> dict[str, Any]:
    """Return the labels that take back a grant."""
    return {GRANT: "", _HANDED_OVER: ""}


def beat_labels() -> dict[str, Any]:
    """Return the labels of a flow run whose process waits on this host and is alive now."""
    return {HOST: host_name(), BEAT: time.time()}


def requeue_labels(*, not_before: float = 0.0) -> dict[str, Any]:
    """Return the labels of a flow run that is about to wait for its gang again.

    The grant is not removed. It becomes void when the state changes, so at any moment the flow run
    counts either as holding or as waiting.
    """
    return {_NOT_BEFORE: not_before}


def not_before(flow_run: FlowRun) -> float:
    """Return the earliest start of a run that was sent back, in UTC epoch seconds; 0 if none."""
    return _number(flow_run.labels.get(_NOT_BEFORE))


def handover_labels(flow_run: FlowRun) -> dict[str, Any]:
    """Return the labels of a flow run whose process exits while its jobs keep its gang."""
    return {_HANDED_OVER: str(flow_run.run_count)}


def is_handed_over(flow_run: FlowRun) -> bool:
    """Return True if the flow run waits for a new process, and its running jobs keep its gang."""
    # The number of processes differs if somebody has retried the flow run in the UI after its end.
    is_scheduled = state_of(flow_run).is_scheduled()
    return is_scheduled and str(flow_run.labels.get(_HANDED_OVER) or "") == str(flow_run.run_count)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


#: Retry type that the server records on a flow run that changes from a final to a scheduled state.
#: Source: prefect/server/orchestration/core_policy.py, HandleFlowTerminalStateTransitions.
_RESCHEDULED = "reschedule"


async def set_state(
    client: PrefectClient, flow_run: FlowRun, state: State[Any]
) -> State[Any] | None:
    """Give a flow run a new state, unless it has changed since it was read.

    If another state was set just before the write, that state is restored.

    Args:
        client: Client of the Prefect server.
        flow_run: The flow run as it was read.
        state: The new state.

    Returns:
        The state as the server has it, or None if the flow run has another state.
    """
    current_run = await client.read_flow_run(flow_run.id)
    current = state_of(current_run)
    # A new state would make a grant void, so leave a flow run that was granted meanwhile.
    if current.id != state_of(flow_run).id or grant_of(current_run) != grant_of(flow_run):
        return None
    answer = await client.set_flow_run_state(flow_run.id, state)
    if answer.status is not SetStateStatus.ACCEPT or answer.state is None:
        return None

    history = await _history_of(client, flow_run)
    # The history is empty if the flow run was deleted meanwhile.
    if not history or history[-1].id != answer.state.id:
        return None
    overwritten = [
        earlier
        for earlier in history[:-1]
        # A state of the same name comes from this request, which the client may have sent twice.
        if current.timestamp < earlier.timestamp
        and earlier.name != state.name
        and earlier.id != current.id
    ]
    if overwritten:
        await client.set_flow_run_state(flow_run.id, overwritten[-1], force=True)
        return None
    return history[-1]


def may_have_been_cancelled(flow_run: FlowRun) -> bool:
    """Return True if a cancel of this waiting flow run may have been overwritten.

    The trace for this is also on a flow run that somebody retried after its end.
    """
    state = state_of(flow_run)
    is_waiting = state.is_scheduled() and state.name == PENDING_RESOURCES
    return is_waiting and flow_run.empirical_policy.retry_type == _RESCHEDULED


async def find_lost_cancel(client: PrefectClient, flow_run: FlowRun) -> State[Any] | None:
    """Return the Cancelled state that a gate has overwritten and not restored, or None."""
    history = await _history_of(client, flow_run)
    final_indexes = [index for index, state in enumerate(history) if state.is_final()]
    if not final_indexes:
        return None
    last_final = final_indexes[-1]
    if not history[last_final].is_cancelled():
        return None
    # Only a gate sets this state. A retry or a requeue sets another state first.
    names_after = {state.name for state in history[last_final + 1 :]}
    return history[last_final] if names_after == {PENDING_RESOURCES} else None


async def restore_state(client: PrefectClient, flow_run: FlowRun, end: State[Any]) -> None:
    """Restore the final state of a flow run, unless its state has changed since it was read."""
    if await is_unchanged(client, flow_run):
        await client.set_flow_run_state(flow_run.id, end, force=True)


async def forget_process(client: PrefectClient, flow_run: FlowRun) -> None:
    """Remove the recorded process of a flow run that is about to wait again.

    Otherwise a cancel of the flow run would wait for that process without end.
    """
    path_parameters = {"id": flow_run.id}
    content = {"infrastructure_pid": None}
    await client.request("PATCH", "/flow_runs/{id}", path_params=path_parameters, json=content)


def waiting_state(flow_run: FlowRun, message: str) -> State[Any]:
    """Return the state of a run that waits for its gang."""
    # The scheduled time stays, because it decides the run's position in the queue.
    due = flow_run.next_scheduled_start_time or flow_run.expected_start_time
    return Scheduled(name=PENDING_RESOURCES, scheduled_time=due, message=message)


async def is_unchanged(client: PrefectClient, flow_run: FlowRun) -> bool:
    """Return True if the flow run still has the state with which it was read."""
    return state_of(await client.read_flow_run(flow_run.id)).id == state_of(flow_run).id


async def _history_of(client: PrefectClient, flow_run: FlowRun) -> list[State[Any]]:
    """Return all states of a flow run, oldest first."""
    history = await client.read_flow_run_states(flow_run.id)
    return sorted(history, key=lambda state: state.timestamp)
