"""The process of a flow run: `python -P -m flows FLOW_RUN_ID`. The gang worker starts it.

With `--template`, the process waits until it is told to become such a process, or to execute a
`muster train`; see tasks/queue/zygote.py.

While Prefect imports a flow by its module's name, it puts the working directory on the import path.
A run works in its project, which may have a folder `flows` too. So Muster's is imported before.
"""

import runpy
import sys
import warnings

import flows.train  # noqa: F401
from tasks import command
from tasks.processes.signals import expect_one_run
from tasks.queue.zygote import TEMPLATE, serve
from tasks.server.flow_process import outlast_server_starts, trust_once

if __name__ == "__main__":
    outlast_server_starts()
    trust_once()
    if sys.argv[1:2] == [TEMPLATE] and (caller := serve(int(sys.argv[3]), sys.argv[2])):
        raise SystemExit(caller.answer(command.do(caller.order["words"])))
    expect_one_run()
    # runpy warns about a module that is already imported.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
