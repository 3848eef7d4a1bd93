"""The runs of a stack's worker, ended before it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from tasks.supervise import tree

_LOOK_EVERY_S = 0.1


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
