"""The process of a flow run, as the gang worker starts it: `python -P -m flows FLOW_RUN_ID`; or
with `--template`, what becomes one at once, or does the work of a `muster train`: see
tasks/queue/zygote.py.

Prefect puts the working directory on the path while it imports a flow by its module's name. A run
works in its project, which may have a folder of the same name, so ours is imported before.
"""

import runpy
import sys
import warnings

import flows.train  # noqa: F401
from tasks import command
from tasks.queue.zygote import TEMPLATE, serve
from tasks.server.flow_process import outlast_server_starts, trust_once

if __name__ == "__main__":
    outlast_server_starts()
    trust_once()
    if sys.argv[1:2] == [TEMPLATE] and (caller := serve(int(sys.argv[3]), sys.argv[2])):
        raise SystemExit(caller.answer(command.do(caller.order["words"])))
    # As of a module that is there already.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
