"""Start a Prefect worker that uses its own temporary folder.

`python -m deployments.prefect_worker OPTION...` takes the options of `prefect worker start`.
"""

from __future__ import annotations

import runpy
import sys

from tasks.processes.temporary import use_own_temporary_folder


def main() -> None:
    if not {"-h", "--help"} & {*sys.argv[1:]}:
        use_own_temporary_folder()
    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
