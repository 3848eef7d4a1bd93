"""What the queue writes on flow runs: grants, as labels, and states, without losing a cancel.

A grant is bound to the state it was given in: a flow run that got another Scheduled state since, by
a requeue or by a retry from the UI, has none.

For states Prefect has no compare-and-set, and the server lets a cancelled run of a deployment wait
again. So the history is read after each write, and what was passed over is put back. A gate that is
killed between the two leaves a trace on the flow run: the next look goes by that.

Whatever asks the server may raise httpx.HTTPError and PrefectException, for a flow run that was
deleted meanwhile, too: the next look knows nothing of it.
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

#: A `Grant` as JSON; empty for none.
GRANT = "muster.gang.grant"
#: The host of the process that waits for it, and so the one that it can start on.
HOST = "muster.gang.host"
#: What that process changes each BEAT_EVERY_S as long as it lives.
BEAT = "muster.gang.beat"
#: The run was sent back. Not to start again before this time (UTC epoch seconds).
_NOT_BEFORE = "muster.gang.not_before"
#: `{"node-1": 1763900000}`: where attempts of the run failed of what a node can be blamed for, and
#: when last (UTC epoch seconds).
_FAILED_ON = "muster.gang.failed_on"
_FAILURES = TypeAdapter(dict[str, int])
#: How many processes the flow run has had when the last one left with its jobs running.
_GOES_ON = "muster.gang.goes_on"

#: How often the process of a run that waits says that it lives.
BEAT_EVERY_S = 10.0

#: The name of the state of a run that waits for its gang.
PENDING_RESOURCES = "PendingResources"


class Giver(ProcessId):
    """The process of a gate."""

    host: str

    @staticmethod
    def me() -> Giver:
        return Giver(host=host_name(), **ProcessId.of(os.getpid()).model_dump())

    def is_surely_gone(self) -> bool:
        """Whether it has ended, as far as this machine can know."""
        is_here = self.host == host_name() and self.boot_id == boot_id()
        return is_here and not self.is_alive()


class Grant(BaseModel):
    """The gang of a flow run."""

    model_config = ConfigDict(frozen=True)

    #: `gpus[node name]`.
    nodes: dict[str, int]
    #: `devices[node name]`, as the driver there numbers them; empty where Ray gives them.
    devices: dict[str, tuple[int, ...]] = {}
    #: The address of their Ray cluster; empty for none.
    cluster: str = ""
    #: Of the state in which it was given.
    state_id: str = ""
    #: When it was given, UTC epoch seconds.
    at: float = 0.0
    by: Giver | None = None

    def __str__(self) -> str:
        return ", ".join(self.nodes) or "no node"

    def moved_to(self, nodes: Mapping[str, int]) -> Grant:
        return self.model_copy(update={"nodes": dict(nodes)})

    def label(self) -> dict[str, Any]:
        return {GRANT: self.model_dump_json()}


def state_of(flow_run: FlowRun) -> State[Any]:
    """A server has no flow run without one."""
    assert flow_run.state is not None
    return flow_run.state


def failed_on(flow_run: FlowRun) -> dict[str, int]:
    """The nodes that failures of the run are blamed on, and when each last was (UTC epoch s)."""
    # Anybody who may submit a flow run can give it labels.
    with suppress(ValidationError):
        return _FAILURES.validate_json(str(flow_run.labels.get(_FAILED_ON) or "{}"))
    return {}


def failed(flow_run: FlowRun, nodes: Iterable[str], at: float) -> dict[str, Any]:
    """The label of a flow run that has failed on these nodes, too."""
    return {_FAILED_ON: json.dumps(failed_on(flow_run) | dict.fromkeys(nodes, int(at)))}


def grant_of(flow_run: FlowRun) -> Grant | None:
    """The gang that the flow run has; None where it has none, or none any more."""
    if not (written := flow_run.labels.get(GRANT)):
        return None
    state = state_of(flow_run)
    try:
        grant = Grant.model_validate_json(str(written))
    except ValidationError:
        return None
    waits = state.type is StateType.SCHEDULED or state.name == PENDING_RESOURCES
    is_over = waits and grant.state_id != str(state.id) and not goes_on(flow_run)
    return None if is_over else grant


def no_grant() -> dict[str, Any]:
    """The labels of a flow run whose grant is taken back."""
    return {GRANT: "", _GOES_ON: ""}


def waits_here() -> dict[str, Any]:
    """The labels of a flow run whose process waits for its gang on this host, and lives now."""
    return {HOST: host_name(), BEAT: time.time()}


def sent_back(*, not_before: float = 0.0) -> dict[str, Any]:
    """The labels of a flow run that is about to wait for its gang again: its grant ends with the
    state that it has, so that it always is among those that hold or those that wait."""
    return {_NOT_BEFORE: not_before}


def not_before(flow_run: FlowRun) -> float:
    """When a run that was sent back may start again, UTC epoch seconds; 0: at any time."""
    return _number(flow_run.labels.get(_NOT_BEFORE))


def left_with_its_jobs(flow_run: FlowRun) -> dict[str, Any]:
    """The labels of a flow run whose process leaves while its jobs, and so its gang, go on."""
    return {_GOES_ON: str(flow_run.run_count)}


def goes_on(flow_run: FlowRun) -> bool:
    """Whether the flow run waits for a new process for jobs that hold its gang."""
    # The count tells it from a flow run that somebody retries from the UI after its end.
    is_scheduled = state_of(flow_run).is_scheduled()
    return is_scheduled and str(flow_run.labels.get(_GOES_ON) or "") == str(flow_run.run_count)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


#: What the server notes on a flow run that goes from a final state to a scheduled one.
#: Source: prefect/server/orchestration/core_policy.py, HandleFlowTerminalStateTransitions.
_CAME_BACK = "reschedule"


async def set_state(
    client: PrefectClient, flow_run: FlowRun, state: State[Any]
) -> State[Any] | None:
    """Give a flow run a state, unless it has left the one that was looked at, or been granted its
    gang meanwhile. What comes just before the state is put back.

    Returns: the state, as the server has it; None where the flow run has another one.
    """
    found = await client.read_flow_run(flow_run.id)
    now = state_of(found)
    # A grant is bound to the state: it would end with it.
    if now.id != state_of(flow_run).id or grant_of(found) != grant_of(flow_run):
        return None
    answer = await client.set_flow_run_state(flow_run.id, state)
    if answer.status is not SetStateStatus.ACCEPT or answer.state is None:
        return None
    history = await _history_of(client, flow_run)
    # Empty: it was deleted meanwhile.
    if not history or history[-1].id != answer.state.id:
        return None
    passed_over = [
        one
        for one in history[:-1]
        # One of the same name is this very state, of a request that was sent twice.
        if now.timestamp < one.timestamp and one.name != state.name and one.id != now.id
    ]
    if passed_over:
        await client.set_flow_run_state(flow_run.id, passed_over[-1], force=True)
        return None
    return history[-1]


def may_have_been_cancelled(flow_run: FlowRun) -> bool:
    """Whether a flow run that waits may have been cancelled before that, by the trace on it, which
    one has, too, that somebody retries after its end."""
    state = state_of(flow_run)
    waits = state.is_scheduled() and state.name == PENDING_RESOURCES
    return waits and flow_run.empirical_policy.retry_type == _CAME_BACK


async def lost_cancel(client: PrefectClient, flow_run: FlowRun) -> State[Any] | None:
    """The cancel that a gate has written over, and did not put back; None for none."""
    history = await _history_of(client, flow_run)
    ends = [number for number, state in enumerate(history) if state.is_final()]
    if not ends or not history[ends[-1]].is_cancelled():
        return None
    # Who retries a run, or sends it back, does not give it this state.
    is_lost = {state.name for state in history[ends[-1] + 1 :]} == {PENDING_RESOURCES}
    return history[ends[-1]] if is_lost else None


async def put_back(client: PrefectClient, flow_run: FlowRun, end: State[Any]) -> None:
    """Give a flow run the end that it had, unless it has left the state that was looked at."""
    if await is_unchanged(client, flow_run):
        await client.set_flow_run_state(flow_run.id, end, force=True)


async def forget_process(client: PrefectClient, flow_run: FlowRun) -> None:
    """Before a flow run is to wait again: a cancel of it would wait for a process on record for
    ever."""
    which, nothing = {"id": flow_run.id}, {"infrastructure_pid": None}
    await client.request("PATCH", "/flow_runs/{id}", path_params=which, json=nothing)


def waiting_state(flow_run: FlowRun, message: str) -> State[Any]:
    # With its time left as it was, the run keeps its place.
    due = flow_run.next_scheduled_start_time or flow_run.expected_start_time
    return Scheduled(name=PENDING_RESOURCES, scheduled_time=due, message=message)


async def is_unchanged(client: PrefectClient, flow_run: FlowRun) -> bool:
    """Whether a flow run has the state still that was looked at."""
    return state_of(await client.read_flow_run(flow_run.id)).id == state_of(flow_run).id


async def _history_of(client: PrefectClient, flow_run: FlowRun) -> list[State[Any]]:
    history = await client.read_flow_run_states(flow_run.id)
    return sorted(history, key=lambda one: one.timestamp)
