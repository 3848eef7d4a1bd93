"""Giving a flow run a state, without a cancel being lost to it.

Prefect has no compare-and-set: whatever comes between a look at a flow run and the new state is
written over, and the server lets a cancelled run of a deployment wait again. So the history is read
after each write, and what was passed over is put back. A gate that is killed between the two leaves
a trace on the flow run: the next look goes by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import ObjectNotFound

from tasks.queue.grants import PENDING_RESOURCES, grant_of

#: What the server notes on a flow run that goes from a final state to a scheduled one.
#: Source: prefect/server/orchestration/core_policy.py, HandleFlowTerminalStateTransitions.
_CAME_BACK = "reschedule"


async def set_state(
    client: PrefectClient, flow_run: FlowRun, state: State[Any]
) -> State[Any] | None:
    """Give a flow run a state, unless it has left the one that was looked at, or been granted its
    gang meanwhile. What comes just before the state is put back.

    Args:
        flow_run: as it was looked at.

    Returns: the state, as the server has it; None where the flow run has another one.

    Raises: httpx.HTTPError, PrefectException.
    """
    before = flow_run.state
    try:
        found = await client.read_flow_run(flow_run.id)
        now = found.state
        if before is None or now is None or now.id != before.id:
            return None
        if grant_of(found) != grant_of(flow_run):
            # A grant is bound to the state: it would end with it.
            return None
        answer = await client.set_flow_run_state(flow_run.id, state)
        if answer.status is not SetStateStatus.ACCEPT or answer.state is None:
            return None
        history = _in_order(await client.read_flow_run_states(flow_run.id))
    except ObjectNotFound:
        return None
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
    """Whether a flow run that waits may have been cancelled before that, by the trace on it.

    One that somebody retries after its end has the same trace: its history tells the two apart.
    """
    state = flow_run.state
    waits = state is not None and state.is_scheduled() and state.name == PENDING_RESOURCES
    return waits and flow_run.empirical_policy.retry_type == _CAME_BACK


async def lost_cancel(client: PrefectClient, flow_run: FlowRun) -> State[Any] | None:
    """The cancel that a gate has written over, and did not put back; None for none.

    Raises: httpx.HTTPError, PrefectException.
    """
    try:
        history = _in_order(await client.read_flow_run_states(flow_run.id))
    except ObjectNotFound:
        return None
    ends = [number for number, state in enumerate(history) if state.is_final()]
    if not ends or not history[ends[-1]].is_cancelled():
        return None
    # Who retries a run, or sends it back, does not give it this state.
    after = [state.name for state in history[ends[-1] + 1 :]]
    is_lost = bool(after) and set(after) == {PENDING_RESOURCES}
    return history[ends[-1]] if is_lost else None


async def put_back(client: PrefectClient, flow_run: FlowRun, end: State[Any]) -> None:
    """Give a flow run the end that it had, unless it has left the state that was looked at.

    Raises: httpx.HTTPError, PrefectException.
    """
    if await is_unchanged(client, flow_run):
        await client.set_flow_run_state(flow_run.id, end, force=True)


async def is_unchanged(client: PrefectClient, flow_run: FlowRun) -> bool:
    """Whether a flow run has the state still that was looked at.

    Raises: httpx.HTTPError, PrefectException.
    """
    try:
        now = (await client.read_flow_run(flow_run.id)).state
    except ObjectNotFound:
        return False
    return now is not None and flow_run.state is not None and now.id == flow_run.state.id


def _in_order(history: Sequence[State[Any]]) -> list[State[Any]]:
    return sorted(history, key=lambda one: one.timestamp)
