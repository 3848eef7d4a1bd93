"""Reconciling this host again and again, without a flow run for each look.

Nearly all looks find nothing, and a flow run of each would bury the runs that people look for, and
start a process.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.upkeep.reconcile import publish, reconcile_host

_log = logging.getLogger(__name__)

_EVERY_S = 60.0
#: A look that is cut short by the end of its process is done again by whoever comes next.
_END_WITHIN_S = 5.0


def _look() -> None:
    publish(reconcile_host())


@contextmanager
def reconciled_each_minute(
    every_s: float = _EVERY_S, look: Callable[[], None] = _look
) -> Iterator[None]:
    """While open, this host is reconciled from a thread, the first time after `every_s`.

    Nothing else of this process may reconcile meanwhile: the registry's locks are the process's,
    and keep two of its threads not apart.

    Args:
        every_s: from the end of one look to the begin of the next.
        look: an error of it is logged, and the next look comes in its time.
    """
    ending = threading.Event()
    # The server's address may be a setting of this context only, which a new thread lacks.
    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(_look_until, ending, every_s, look), name="reconcile", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(_END_WITHIN_S)


def _look_until(ending: threading.Event, every_s: float, look: Callable[[], None]) -> None:
    while not ending.wait(every_s):
        try:
            look()
        except Exception:
            _log.exception("this host was not reconciled, and is again in %g s", every_s)
