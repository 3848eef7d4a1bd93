"""The process of a flow run: `python -P -m flows FLOW_RUN_ID`. Muster's worker starts the process.

With `--template`, the process is a fork server, which imports all modules in advance. The processes
that are forked from it each execute a flow run or a `muster` command. The module
tasks/queue/fork_server.py explains this.

This module imports Muster's package `flows` before Prefect imports a flow. Prefect puts the working
directory of the run, which is the project of a user, first on the import path. If the project has
its own folder `flows`, Prefect would otherwise import that folder.
"""

import runpy
import sys
import warnings

import flows.train  # noqa: F401
from tasks import command
from tasks.processes.signals import expect_one_run
from tasks.queue.fork_server import TEMPLATE, serve
from tasks.server.concurrency_lease import exit_if_lease_was_lost, keep_runs_without_lease
from tasks.server.flow_parameters import fail_on_wrong_names
from tasks.server.flow_process import (
    hide_errors_of_ended_runs,
    read_flow_run_id,
    retry_while_server_starts,
    share_ssl_contexts,
)

if __name__ == "__main__":
    share_ssl_contexts()
    keep_runs_without_lease()
    if sys.argv[1:2] == [TEMPLATE] and (caller := serve(int(sys.argv[3]), sys.argv[2])):
        raise SystemExit(caller.send_exit_code(command.do(caller.order["words"])))
    retry_while_server_starts()
    expect_one_run()
    hide_errors_of_ended_runs()
    # Hide a harmless warning: `run_module` below would warn that `prefect.engine` is already
    # imported.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    flow_run_id = read_flow_run_id()
    exit_if_lease_was_lost(flow_run_id)
    with fail_on_wrong_names(flow_run_id):
        runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
