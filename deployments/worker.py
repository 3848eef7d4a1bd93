"""A worker of this host that first finishes what an earlier one has left.

`python -m deployments.worker OPTION...` takes the options of `prefect worker start`, and becomes
that program. Its `--name` should be the host's: by that, `reconcile` tells whose runs are whose.

Exit: 1 if the server of PREFECT_API_URL wants a password that it has not; 2 if another user may
write in MUSTER_HOME; else as that program.
"""

from __future__ import annotations

import os
import signal
import sys

from prefect.settings import PREFECT_API_URL

from tasks.record.places import keep_private
from tasks.server.flow_runs import ServerAway, ServerRefuses, talking_to
from tasks.server.trusted_clients import GUARDED_PREFECT
from tasks.spec.ownership import UntrustedPath
from tasks.upkeep.reconcile import publish, reconcile_host


def main() -> None:
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__, flush=True)
    else:
        try:
            keep_private()
        except UntrustedPath as error:
            print(error, file=sys.stderr)
            raise SystemExit(error.exit_code) from None
        _refuse_wrong_password()
        publish(reconcile_host())
    # A run works in its project, which may have folders of our packages' names.
    os.environ["PYTHONSAFEPATH"] = "1"
    # Prefect imports Muster's plugin first, which has its clients check who listens at the server's
    # port. The flow runs that the worker starts inherit this.
    os.environ.update(GUARDED_PREFECT)
    # A shell without job control starts what it puts in the background with SIGINT ignored. Prefect
    # ends a worker by a SIGINT to itself, also at SIGTERM: it would never leave.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Of a child of one that ignores it nobody learns how it ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker = (sys.executable, "-m", "deployments.prefect_worker", *sys.argv[1:])
    os.execv(sys.executable, worker)


def _refuse_wrong_password() -> None:
    """Prefect's worker would say so in a traceback. One that only is away is waited for by it."""
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return
    try:
        with talking_to(api_url) as client:
            client.hello().raise_for_status()
    except ServerRefuses as error:
        raise SystemExit(str(error)) from None
    except ServerAway:
        pass


if __name__ == "__main__":
    main()
