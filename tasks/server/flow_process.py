"""Cancelling from the Prefect UI or CLI, seen by the run itself.

A worker passes a cancel on as SIGTERM, but a run started directly has none, and a worker may be
dead. So a run asks the server about itself.
"""

from __future__ import annotations

import contextvars
import logging
import os
import signal as signals
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from tasks.server.flow_runs import (
    FLOW_RUN_VARIABLE,
)

_log = logging.getLogger(__name__)
_POLL_EVERY_S = 2.0


@contextmanager
def cancel_watched(flow_run_id: UUID, on_cancel: Callable[[str], None]) -> Iterator[None]:
    """While open, `on_cancel` is told, once and from another thread, of a cancel on the server.

    A server that does not answer means nothing: the run goes on, and is asked about again.
    """
    left = threading.Event()

    def watch() -> None:
        while not left.wait(_POLL_EVERY_S):
            why = why_cancelled(flow_run_id)
            if why:
                on_cancel(why)
                return

    # The server's address may be a setting of this context only, which a new thread lacks.
    context = contextvars.copy_context()
    watcher = threading.Thread(target=context.run, args=(watch,), name="cancel-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        watcher.join()


def why_cancelled(flow_run_id: UUID) -> str:
    """Why the flow run should end, in words; empty while it should not, or nobody can say.

    A server that does not know the flow run has lost its record: no reason to lose the training.
    """
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
    except Exception as error:
        _log.debug("state of flow run %s not known: %r", flow_run_id, error)
        return ""
    if state is not None and (state.is_cancelling() or state.is_cancelled()):
        return "cancelled from Prefect"
    return ""


class Interruptible(Protocol):
    """What can be ended from a signal handler: a run, or a pipeline of them."""

    def interrupt(self, why: str) -> None: ...


@contextmanager
def interrupting(
    session: Interruptible, on_term: Callable[[], None] | None = None
) -> Iterator[None]:
    """While open, SIGINT, SIGTERM and SIGHUP interrupt the run instead of this process.

    Nothing is raised where the signal happens to land: the run ends through its supervisor, and
    the caller, who waits for that, goes on to its teardown. Outside the main thread, where Python
    can't handle signals, it changes nothing.

    Args:
        on_term: called at SIGTERM instead, where that may mean something else.
    """

    def on_signal(signum: int, frame: object) -> None:
        if signum == signals.SIGTERM and on_term is not None:
            on_term()
            return
        session.interrupt(f"interrupted by {signals.Signals(signum).name}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signum: signals.signal(signum, on_signal)
        for signum in (signals.SIGINT, signals.SIGTERM, signals.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            # None stands for a handler that was not installed from Python.
            signals.signal(signum, signals.SIG_DFL if handler is None else handler)


def started_by_others() -> FlowRun | None:
    """The flow run, where a worker or a server of deployments has started this process for it, and
    will start another one when it is due again."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    if flow_run is None or flow_run.deployment_id is None:
        return None
    return flow_run if os.environ.get(FLOW_RUN_VARIABLE) == str(flow_run.id) else None
