"""A worker of this host that first finishes what an earlier one has left.

`python -m deployments.worker OPTION...` takes the options of `prefect worker start`, and becomes
that program. Its `--name` should be the host's: by that, `reconcile` tells whose runs are whose.
"""

from __future__ import annotations

import os
import signal
import sys

from tasks.reconciling import publish, reconcile_host


def main() -> None:
    publish(reconcile_host())
    # A shell without job control starts what it puts in the background with SIGINT ignored. Prefect
    # ends a worker by a SIGINT to itself, also at SIGTERM: it would never leave.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    worker = (sys.executable, "-m", "prefect", "worker", "start", *sys.argv[1:])
    os.execv(sys.executable, worker)


if __name__ == "__main__":
    main()
