"""Why one run waits, or what else has become of it, for whoever asks by its name or id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound

from tasks.queue.asks import ask_of
from tasks.queue.operating import NotThere
from tasks.queue.reasons import SOON, asks, is_soon, lasting, when
from tasks.queue.view import QueuedRun, QueueView
from tasks.server.flow_runs import HELD, SILENT_AFTER_S, worker_of

_WIDTH = 10


async def explain(
    client: PrefectClient,
    asked: str,
    pool: str,
    look: Callable[[str], Awaitable[QueueView]],
) -> str:
    """What is to be said of a run, in some lines.

    Args:
        asked: Name or id of its flow run.
        pool: Where a run that was started directly waits.
        look: At the queue of a work pool.

    Raises: NotThere.
    """
    found = await _found(client, asked)
    view = await look((found[0].work_pool_name if found else None) or pool)
    if not found:
        # A run that waits is called by its run id, before its flow run is.
        named = [run.flow_run_id for run in view.line if run.name == asked]
        if not named:
            raise NotThere(
                f"the Prefect server has no flow run called {asked}, and none of that id; "
                f"{len(view.line)} wait in the work pool {view.pool or pool}"
            )
        found = [await client.read_flow_run(UUID(named[0]))]
    lines = told(found[0], view) + await _silence(client, found[0], view.at)
    if others := [str(run.id) for run in found[1:]]:
        lines.append(_field("others", f"of that name, older: {', '.join(others)}"))
    return "\n".join(lines)


async def _silence(client: PrefectClient, flow_run: FlowRun, now: float) -> list[str]:
    """That the worker which has the run is not heard of; nothing where it is, or nobody knows."""
    state, pool, name = flow_run.state, flow_run.work_pool_name, worker_of(flow_run)
    if state is None or state.type not in HELD or pool is None or name is None:
        return []
    workers = await client.read_workers_for_work_pool(pool)
    heard = [one.last_heartbeat_time for one in workers if one.name == name]
    silent_s = now - max((at.timestamp() for at in heard if at is not None), default=now)
    if silent_s < SILENT_AFTER_S:
        return []
    said = f"its worker {name} was last heard of {lasting(silent_s)} ago"
    remedy = f"if that host is off for good: python -m flows.reconcile --lost-host {name}"
    return [_field("host", f"{said}; {remedy}")]


def told(flow_run: FlowRun, view: QueueView) -> list[str]:
    """What is to be said of a flow run, by one look at its queue."""
    queued = [run for run in view.line if run.flow_run_id == str(flow_run.id)]
    if queued:
        return _waiting(queued[0], view)
    state, name = flow_run.state, flow_run.name
    if state is None:
        return [f"{name} has no state yet."]
    # A run is called by its run id, which its flow run may not have got yet.
    called = {name, ask_of(flow_run).name}
    held = [
        f"{node.name} ({node.held[run]} GPUs)"
        for node in view.nodes
        for run in sorted(called & {*node.held})
    ]
    lines = [f"{name} {_what(flow_run, state, view.at, has_gang=bool(held))}"]
    if held:
        lines.append(_field("has", ", ".join(held)))
    if state.message:
        first, *rest = state.message.splitlines() or [""]
        lines += [_field("says", first), *(" " * (_WIDTH + 3) + line for line in rest)]
    return lines + [_field("trouble", trouble) for trouble in view.troubles]


def _what(flow_run: FlowRun, state: State[Any], now: float, *, has_gang: bool) -> str:
    since = _when(state.timestamp)
    due = flow_run.next_scheduled_start_time
    match state.type:
        case StateType.SCHEDULED if due is not None and not is_soon(due.timestamp(), now):
            return f"is to start at {_when(due)}, and waits for that time."
        case StateType.SCHEDULED if has_gang:
            return f"is next: the nodes are there for it ({state.name} since {since})."
        case StateType.SCHEDULED:
            return f"is due ({state.name} since {since}), and not in the line at this moment."
        case StateType.PENDING:
            return f"has been admitted, and is about to start, since {since}."
        case StateType.RUNNING:
            return f"runs, since {_when(flow_run.start_time or state.timestamp)}."
        case StateType.CANCELLING:
            return f"is being cancelled, since {since}."
        case _ if state.is_final():
            return f"has ended: {state.name} at {since}."
        case _:
            return f"is {state.name} since {since}."


def _waiting(run: QueuedRun, view: QueueView) -> list[str]:
    where = f"of the work pool {view.pool}" if view.pool else "of the runs started directly"
    lines = [
        f"{run.name} waits, number {run.number} of {len(view.line)} in the line {where}.",
        _field("asks for", asks(run.demand)),
        _field(
            "since", f"{when(run.waiting_since)}, {lasting(view.at - run.waiting_since)} by now"
        ),
        _field("reason", run.reason),
    ]
    if run.starts_at is not None:
        soon = is_soon(run.starts_at, view.at)
        lines.append(_field("expected", SOON if soon else f"to start at {when(run.starts_at)}"))
    lines += [_field("queue", run.queue)] if run.queue else []
    lines += [_field("cluster", run.cluster)] if run.cluster else []
    lines += [_field("tags", ", ".join(run.tags))] if run.tags else []
    return lines + [_field("trouble", trouble) for trouble in view.troubles]


async def _found(client: PrefectClient, asked: str) -> list[FlowRun]:
    """The flow runs of that id or name, newest first."""
    try:
        return [await client.read_flow_run(UUID(asked))]
    except (ValueError, ObjectNotFound):
        pass
    return await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[asked])),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=5,
    )


def _field(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}} {text}"


def _when(time: datetime) -> str:
    return when(time.timestamp())
