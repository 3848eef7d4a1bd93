"""Cancelling from the Prefect UI or CLI, seen by the run itself.

A worker passes a cancel on as SIGTERM, but a run started directly has none, and a worker may be
dead. So a run asks the server about itself.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client

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
