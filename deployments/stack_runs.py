"""The runs of a stack's worker: ended before it ends, and closed where their process was lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Cancelled, Crashed, Scheduled

from deployments.stack_env import POOL
from tasks.supervise import tree

_LOOK_EVERY_S = 0.1
_PAGE = 200
_HELD = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
#: In the environment of the process of a flow run. Source: prefect/runner/_starter_engine.py.
_FLOW_RUN_VARIABLE = b"PREFECT__FLOW_RUN_ID="


def end_runs(worker: int, *, within_s: float, is_hurried: Callable[[], bool]) -> None:
    """Interrupt every run of a worker, and wait until each has taken itself down.

    A worker that is stopped kills its runs on the spot: they would stay Running on the server, and
    keep their places in the pool, for ever. So it is held (SIGSTOP) first, and left so: it begins
    none of the runs that wait, and goes on, to its own end, with the next signal of its guardian.

    Args:
        worker: its pid.
        is_hurried: whether nobody wants to wait any longer.
    """
    tree.signal_process(worker, signal.SIGSTOP, parent=tree.parent_of(worker))
    for run in tree.children(worker):
        tree.signal_process(run, signal.SIGTERM, parent=worker)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and not is_hurried():
        # The worker, held, reaps none of them.
        if all(tree.is_zombie(run) for run in tree.children(worker)):
            return
        time.sleep(_LOOK_EVERY_S)


def close_lost_runs(client: SyncPrefectClient, before: datetime) -> list[str]:
    """Give the runs of the pool whose process went with an earlier stack a state to go on from.

    Left alone, they would hold their places in the pool for ever. The server is on loopback, so a
    run that has no process on this machine has none.

    Args:
        before: states that a run has had since then are not touched: this stack's own.

    Returns: a line for each.
    """
    alive = _flow_runs_alive()
    told = []
    for run in _held_runs(client):
        if run.state is None or run.state.timestamp >= before or str(run.id) in alive:
            continue
        state = _state_of_lost(run.state)
        client.set_flow_run_state(run.id, state, force=True)
        told.append(f"{run.name}: {run.state.name} before the stack ended, now {state.name}")
    return told


def _state_of_lost(state: State[object]) -> State[None]:
    match state.type:
        case StateType.PENDING:
            # Not started, so nothing stands against starting it.
            return Scheduled()
        case StateType.CANCELLING:
            return Cancelled(message="its process has ended")
        case _:
            return Crashed(message="its process was ended together with the stack")


def _held_runs(client: SyncPrefectClient) -> list[FlowRun]:
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(_HELD)))
            ),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])),
            limit=_PAGE,
            offset=len(found),
        )
        found += page
        if len(page) < _PAGE:
            return found


def _flow_runs_alive() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ids = (v.partition(b"=")[2] for v in variables if v.startswith(_FLOW_RUN_VARIABLE))
        found |= {id.decode(errors="replace") for id in ids}
    return found
