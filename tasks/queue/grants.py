"""Labels and states that the scheduler writes to flow runs on the Prefect server.

A grant is a label that names the nodes and GPUs of a flow run. It contains the id of the state that
the flow run had at that time. If the flow run later gets a new Scheduled state, by a requeue or by
a retry in the UI, the grant is void.

Prefect cannot set a state on the condition that the state has not changed since it was read. A
scheduler can therefore overwrite the Cancelled state of a waiting flow run. So the scheduler reads
the history of states after each write, and sets an overwritten Cancelled state again. If the
scheduler is killed between these steps, the next scheduling pass finds the overwritten state and
sets it again.

Functions that use the server raise httpx.HTTPError or PrefectException if it does not answer or if
the flow run was deleted.
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
from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter, ValidationError

from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.server.concurrency_lease import set_state_and_release_lease_async
from tasks.server.flow_runs import find_process_tags

#: Name of the label that contains the `Grant` of a flow run as JSON. The label is empty if the flow
#: run has no grant.
GRANT = "muster.gang.grant"
#: Name of the label with the host of the process that waits for the GPUs of a run. A run without
#: Ray can use only the GPUs of that host.
HOST = "muster.gang.host"
#: Name of the label that the process of a waiting run changes every HEARTBEAT_EVERY_S seconds. A
#: label that no longer changes shows that the process has ended.
HEARTBEAT = "muster.gang.beat"
#: Name of the label with the earliest time of a requeued run's next start, in UTC epoch seconds.
_NOT_BEFORE = "muster.gang.not_before"
#: Name of the label with the nodes that may have caused failures of the run. The label contains a
#: mapping from node name to the time of the last failure, in UTC epoch seconds. Example:
#: `{"node-1": 1763900000}`.
_FAILED_ON = "muster.gang.failed_on"
#: Parser of the content of the label _FAILED_ON.
_FAILURES = TypeAdapter(dict[str, int])
#: Name of the label that marks a flow run whose process has exited while its Ray jobs continue. The
#: value is the number of processes that the flow run has had so far. A new process of the flow run
#: makes the label outdated.
_HANDED_OVER = "muster.gang.goes_on"

#: Name of the label with the expected end of a run, which is computed from the progress of the
#: training.
_EXPECTED_END = "muster.gang.expected_end"

#: Time, in seconds, between two changes of the label `HEARTBEAT`. The changes show that the process
#: of a waiting run is alive.
HEARTBEAT_EVERY_S = 10.0

#: Name of the Prefect state of a run that waits for its GPUs.
PENDING_RESOURCES = "PendingResources"


class SchedulerProcess(ProcessId):
    """Identity of a process that runs a scheduler and grants GPUs."""

    #: Name of the host on which the process runs.
    host: str

    @staticmethod
    def current() -> SchedulerProcess:
        """Return the identity of the calling process."""
        return SchedulerProcess(host=host_name(), **ProcessId.of(os.getpid()).model_dump())

    def has_surely_ended(self) -> bool:
        """Return True if the process has certainly ended.

        The result is False for a process on another host, because such a process cannot be checked.
        """
        is_here = self.host == host_name() and self.boot_id == boot_id()
        return is_here and not self.is_alive()


class Grant(BaseModel):
    """A GPU grant: the nodes and GPU devices that a flow run may use."""

    model_config = ConfigDict(frozen=True)

    #: Mapping from node name to the number of GPUs that the run may use on the node.
    nodes: dict[str, int]
    #: Mapping from node name to the numbers of the GPU devices. Empty if Ray assigns the devices.
    devices: dict[str, tuple[int, ...]] = {}
    #: Address of the Ray cluster that contains the nodes. Empty if the run does not use Ray.
    cluster: str = ""
    #: Id of the state that the flow run had when the GPU grant was written. If the state of a
    #: waiting flow run changes, the flow run loses the grant.
    state_id: str = ""
    #: Time of the GPU grant, in UTC epoch seconds.
    at: float = 0.0
    #: The process that wrote the GPU grant, or None if unknown.
    by: SchedulerProcess | None = None
    #: True if other runs still used the GPUs at the time of the grant. Ray starts the program of
    #: the granted run when the GPUs become free.
    is_early: bool = False

    def __str__(self) -> str:
        return ", ".join(self.nodes) or "no node"

    def moved_to(self, nodes: Mapping[str, int]) -> Grant:
        """Return a copy of this grant for other nodes.

        Args:
            nodes: Mapping from node name to the number of GPUs.
        """
        return self.model_copy(update={"nodes": dict(nodes)})

    def label(self) -> dict[str, Any]:
        """Return the name and the value of the flow run label that stores this grant."""
        return {GRANT: self.model_dump_json()}


class _ExpectedEnd(BaseModel):
    """Expected end of a run. The label _EXPECTED_END contains this object in JSON format."""

    model_config = ConfigDict(frozen=True)

    #: Expected end of the run, in UTC epoch seconds.
    ends_at: FiniteFloat
    #: Time at which the run reported its expected end, in UTC epoch seconds.
    at: FiniteFloat


def state_of(flow_run: FlowRun) -> State[Any]:
    """Return the state of a flow run that was read from the server.

    In Prefect's type the state is optional, but the server always sends a state.
    """
    assert flow_run.state is not None
    return flow_run.state


def failed_nodes(flow_run: FlowRun) -> dict[str, int]:
    """Return the nodes that may have caused failures of a run.

    Returns:
        Mapping from node name to the time of the last failure on the node, in UTC epoch seconds.
    """
    # Users can set any labels when they submit a flow run, so the content may be invalid.
    with suppress(ValidationError):
        return _FAILURES.validate_json(str(flow_run.labels.get(_FAILED_ON) or "{}"))
    return {}


def failure_labels(flow_run: FlowRun, nodes: Iterable[str], at: float) -> dict[str, Any]:
    """Return the label that lists the failures of a run, with a new failure added.

    Args:
        flow_run: The flow run. Its label lists the earlier failures.
        nodes: Names of the nodes that may have caused the new failure.
        at: Time of the new failure, in UTC epoch seconds.

    Returns:
        A dictionary with the name and the new value of the label.
    """
    return {_FAILED_ON: json.dumps(failed_nodes(flow_run) | dict.fromkeys(nodes, int(at)))}


def grant_of(flow_run: FlowRun) -> Grant | None:
    """Return the GPU grant of a flow run.

    Returns:
        The grant. None without a grant, or if a change of the flow run's state has made the grant
        void.
    """
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
    """Return the labels that remove the GPU grant of a flow run."""
    return {GRANT: "", _HANDED_OVER: ""}


def heartbeat_labels() -> dict[str, Any]:
    """Return the labels that show that the process of a waiting run is alive on this host."""
    return {HOST: host_name(), HEARTBEAT: time.time()}


def requeue_labels(*, not_before: float = 0.0) -> dict[str, Any]:
    """Return the labels to set on a flow run just before it is requeued.

    The labels do not remove the GPU grant. The requeue itself makes the grant void, because it
    changes the flow run's state. So the run loses its GPUs at the moment at which it begins to
    wait.

    Args:
        not_before: Earliest next start, in UTC epoch seconds. 0 for a start at any time.
    """
    return {_NOT_BEFORE: not_before}


def not_before(flow_run: FlowRun) -> float:
    """Return the earliest next start of a requeued run.

    Returns:
        The time in UTC epoch seconds, or 0 if the run may start at any time.
    """
    return _to_number(flow_run.labels.get(_NOT_BEFORE))


def expected_end_labels(ends_at: float, at: float) -> dict[str, Any]:
    """Return the label with the expected end of a run.

    Args:
        ends_at: Expected end in UTC epoch seconds.
        at: Present time in UTC epoch seconds.
    """
    return {_EXPECTED_END: _ExpectedEnd(ends_at=ends_at, at=at).model_dump_json()}


def read_expected_end(flow_run: FlowRun, since: float) -> float | None:
    """Return the expected end of a run, computed from its progress, in UTC epoch seconds.

    Args:
        flow_run: The flow run.
        since: Start of the present attempt in UTC epoch seconds. An expected end that was reported
            before this time belongs to an earlier attempt and is ignored.

    Returns:
        None if the run has reported no expected end in this attempt.
    """
    # Users can set any labels when they submit a flow run, so the content may be invalid.
    with suppress(ValidationError):
        label = str(flow_run.labels.get(_EXPECTED_END) or "")
        expected_end = _ExpectedEnd.model_validate_json(label)
        return expected_end.ends_at if expected_end.at >= since else None
    return None


def handover_labels(flow_run: FlowRun) -> dict[str, Any]:
    """Return the labels of a run that keeps its GPUs and Ray jobs after the exit of its process.

    The labels must be set before the exit.
    """
    return {_HANDED_OVER: str(flow_run.run_count)}


def is_handed_over(flow_run: FlowRun) -> bool:
    """Return True if a flow run waits for a new process while its Ray jobs keep its GPUs."""
    # The label contains the number of processes that the flow run has had. A new process, for
    # example after a retry in the UI, makes the label outdated.
    is_scheduled = state_of(flow_run).is_scheduled()
    return is_scheduled and str(flow_run.labels.get(_HANDED_OVER) or "") == str(flow_run.run_count)


def _to_number(value: object) -> float:
    """Return the content of a label as a number, or 0 if the content is not a number."""
    return float(value) if isinstance(value, int | float) else 0.0


#: Retry type that the server records on a flow run that changes from a final to a scheduled state.
#: Source: prefect/server/orchestration/core_policy.py, HandleFlowTerminalStateTransitions.
_RESCHEDULED = "reschedule"


async def set_state(
    client: PrefectClient, flow_run: FlowRun, state: State[Any]
) -> State[Any] | None:
    """Set the state of a flow run, unless its state or grant has changed since it was read.

    If another process has set a state at the same time, and this function has overwritten that
    state, the function restores it.

    Args:
        client: Client of the Prefect server.
        flow_run: The flow run as it was read.
        state: The new state.

    Returns:
        The new state as the server stored it. None if the new state was not set, or if another
        state has replaced it.
    """
    current_run = await client.read_flow_run(flow_run.id)
    current = state_of(current_run)
    # Change nothing if the flow run has changed since the last read. For example, another scheduler
    # may have granted GPUs to the run. A new state would make that grant void.
    if current.id != state_of(flow_run).id or grant_of(current_run) != grant_of(flow_run):
        return None
    answer = await set_state_and_release_lease_async(client, flow_run.id, state)
    if answer.status is not SetStateStatus.ACCEPT or answer.state is None:
        return None

    history = await _read_history(client, flow_run)
    # Stop if the new state is not the last state of the flow run. Either another process has set a
    # newer state, or the flow run was deleted meanwhile and has no history.
    if not history or history[-1].id != answer.state.id:
        return None
    # Find the states that other processes have set since `current_run` was read. Ignore states with
    # the name `state.name`, because this function may have set such a state twice: Prefect's client
    # may send the same request twice.
    overwritten = [
        earlier
        for earlier in history[:-1]
        if current.timestamp < earlier.timestamp
        and earlier.name != state.name
        and earlier.id != current.id
    ]
    if overwritten:
        await client.set_flow_run_state(flow_run.id, overwritten[-1], force=True)
        return None
    return history[-1]


def may_have_been_cancelled(flow_run: FlowRun) -> bool:
    """Return True if a waiting flow run may have been cancelled.

    A scheduler may have replaced the state Cancelled with the state of a waiting flow run. The
    result is also True for a flow run that was retried after its end. `find_lost_cancel` tells the
    two cases apart.
    """
    state = state_of(flow_run)
    is_waiting = state.is_scheduled() and state.name == PENDING_RESOURCES
    return is_waiting and flow_run.empirical_policy.retry_type == _RESCHEDULED


async def find_lost_cancel(client: PrefectClient, flow_run: FlowRun) -> State[Any] | None:
    """Return the Cancelled state that a scheduler has overwritten and not restored.

    Returns:
        The Cancelled state, or None if no scheduler has overwritten a Cancelled state of the flow
        run.
    """
    history = await _read_history(client, flow_run)
    final_indexes = [index for index, state in enumerate(history) if state.is_final()]
    if not final_indexes:
        return None
    last_final = final_indexes[-1]
    if not history[last_final].is_cancelled():
        return None
    # If all states after Cancelled are PendingResources, a scheduler has overwritten the Cancelled
    # state. A retry or a requeue would first set a state with another name.
    names_after = {state.name for state in history[last_final + 1 :]}
    return history[last_final] if names_after == {PENDING_RESOURCES} else None


def may_have_process(flow_run: FlowRun) -> bool:
    """Return True if a scheduled flow run may have a process that is still running.

    The result is True if the server still has a record of a process. Muster deletes this record
    when it requeues a flow run. So if the record exists, a user has either set the state Scheduled
    by hand, or retried an ended flow run. `was_set_back` tells these two cases apart.
    """
    is_recorded = flow_run.infrastructure_pid is not None or bool(find_process_tags(flow_run.tags))
    return state_of(flow_run).is_scheduled() and is_recorded and not is_handed_over(flow_run)


async def was_set_back(client: PrefectClient, flow_run: FlowRun) -> bool:
    """Return True if a user has set a Running flow run to Scheduled by hand.

    The result is True if the last state before Scheduled was Running. The function does not check
    whether the process of the flow run is still running.
    """
    history = await _read_history(client, flow_run)
    earlier = [state for state in history if not state.is_scheduled()]
    return bool(earlier) and earlier[-1].is_running()


async def restore_state(client: PrefectClient, flow_run: FlowRun, final_state: State[Any]) -> None:
    """Set a flow run back to its final state, which another state has replaced.

    Do nothing if the state on the server has changed since `flow_run` was read.

    Args:
        client: Client of the Prefect server.
        flow_run: The flow run, as it was read earlier.
        final_state: The final state that was replaced.
    """
    if await is_unchanged(client, flow_run):
        await client.set_flow_run_state(flow_run.id, final_state, force=True)


async def forget_process(client: PrefectClient, flow_run: FlowRun) -> None:
    """Delete the recorded process id of a flow run that no longer has a process.

    If the server kept the process id, and a user cancelled the flow run, Prefect would wait forever
    for the end of this process.
    """
    path_parameters = {"id": flow_run.id}
    content = {"infrastructure_pid": None}
    await client.request("PATCH", "/flow_runs/{id}", path_params=path_parameters, json=content)


async def requeue_unstarted(client: PrefectClient, flow_run: FlowRun, message: str) -> bool:
    """Requeue a flow run that has not started, unless its state has changed.

    Args:
        client: Client of the Prefect server.
        flow_run: The flow run as it was read.
        message: Message of the new state.

    Returns:
        True if the flow run waits again.
    """
    if not await is_unchanged(client, flow_run):
        return False
    await forget_process(client, flow_run)
    if await set_state(client, flow_run, waiting_state(flow_run, message)) is None:
        return False
    await client.update_flow_run_labels(flow_run.id, no_grant_labels())
    return True


def waiting_state(flow_run: FlowRun, message: str) -> State[Any]:
    """Return the new state of a run that waits for its GPUs, with the reason as its message."""
    # Keep the scheduled time, so that the run keeps its position in the queue.
    due = flow_run.next_scheduled_start_time or flow_run.expected_start_time
    return Scheduled(name=PENDING_RESOURCES, scheduled_time=due, message=message)


async def is_unchanged(client: PrefectClient, flow_run: FlowRun) -> bool:
    """Return True if the state on the server is still the state in the object `flow_run`."""
    return state_of(await client.read_flow_run(flow_run.id)).id == state_of(flow_run).id


async def _read_history(client: PrefectClient, flow_run: FlowRun) -> list[State[Any]]:
    """Return all states that a flow run has had, oldest first."""
    history = await client.read_flow_run_states(flow_run.id)
    return sorted(history, key=lambda state: state.timestamp)
