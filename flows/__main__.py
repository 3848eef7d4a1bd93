"""The process of a flow run, as the gang worker starts it: `python -P -m flows`.

Prefect puts the working directory on the path while it imports a flow by its module's name. A run
works in its project, which may have a folder of the same name, so ours is imported before.
"""

import runpy

import flows.train  # noqa: F401
from tasks.server.flow_process import outlast_server_starts

if __name__ == "__main__":
    outlast_server_starts()
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
