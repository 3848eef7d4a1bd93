"""Start a worker on this host, after cleaning up the runs that an earlier worker left behind.

`python -m deployments.worker OPTION...` takes the options of `prefect worker start`, and replaces
itself by that program (exec). `--name` should be the name of the host, because `muster reconcile`
recognises the runs of a host by this name.

Exit: 1 if the Prefect server requires a password that is missing or wrong; 2 if another user may
write into MUSTER_HOME; otherwise the exit code of `prefect worker start`.
"""

from __future__ import annotations

import os
import signal
import sys

from prefect.settings import PREFECT_API_URL

from tasks.processes.own_modules import make_own_command
from tasks.record.places import keep_private
from tasks.server.flow_runs import ServerAway, ServerRefuses, connect_to_server
from tasks.server.trusted_clients import GUARDED_PREFECT
from tasks.spec.own_settings import InvalidVariable, require_valid_settings
from tasks.spec.ownership import UntrustedPath
from tasks.upkeep.reconcile import publish, reconcile_host


def main() -> None:
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__, flush=True)
    else:
        try:
            require_valid_settings(lambda warning: print(warning, file=sys.stderr))
            keep_private()
        except (InvalidVariable, UntrustedPath) as error:
            print(error, file=sys.stderr)
            raise SystemExit(error.exit_code) from None
        _refuse_wrong_password()
        publish(reconcile_host())
    # With this variable, Python does not add the working directory of a run to `sys.path`. This
    # directory is the folder of a project, which may contain folders with the names of Muster's
    # packages.
    os.environ["PYTHONSAFEPATH"] = "1"
    # With these variables, Prefect loads Muster's plugin. The plugin makes Prefect's clients check
    # which user listens at the server's port. The worker's flow runs inherit the variables.
    os.environ.update(GUARDED_PREFECT)
    # Do not ignore SIGINT, even if a shell without job control has started this process in the
    # background. After SIGTERM, a Prefect worker sends SIGINT to itself, and would never end if it
    # ignored SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Do not ignore SIGCHLD, even if the parent of this process ignores SIGCHLD. Otherwise, the
    # kernel would discard the exit codes of the worker's child processes, which execute the runs.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker = (*make_own_command("deployments.prefect_worker"), *sys.argv[1:])
    os.execv(worker[0], worker)


def _refuse_wrong_password() -> None:
    """Exit with a message if the server rejects the password.

    Prefect's worker would print a traceback instead. If the server does not answer, the function
    does nothing, because the worker waits for the server.
    """
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return
    try:
        with connect_to_server(api_url) as client:
            client.hello().raise_for_status()
    except ServerRefuses as error:
        raise SystemExit(str(error)) from None
    except ServerAway:
        pass


if __name__ == "__main__":
    main()
