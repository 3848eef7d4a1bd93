"""What a Prefect server needs before a worker starts: the work pool, every deployment, and no run
that only its record says is alive.

`python -m deployments.stack_setup` does it on the server of PREFECT_API_URL, any number of times.
"""

from __future__ import annotations

import subprocess
import sys

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker

from deployments.stack_env import POOL, ROOT, SET_UP
from tasks.reconciling import publish, reconcile_host

#: How many runs the pool lets run at once, until somebody changes it.
POOL_LIMIT = 8


def ensure_pool(client: SyncPrefectClient) -> None:
    """The work pool is there. One that was there before is left as it is."""
    pool = WorkPoolCreate(
        name=POOL,
        type="process",
        description="Runs of the flow train, at most so many at once as the concurrency limit.",
        base_job_template=ProcessWorker.get_default_base_job_template(),
        concurrency_limit=POOL_LIMIT,
    )
    try:
        client.create_work_pool(pool)
    except ObjectAlreadyExists:
        print(f"The work pool {POOL} is there already, and left as it is.", flush=True)


def main() -> int:
    with get_client(sync_client=True) as client:
        ensure_pool(client)
    # What an earlier stack was lost with would hold its places in the pool for ever.
    publish(reconcile_host())
    deploy = (sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all")
    # Prefect finds prefect.yaml, and the paths in it, from its working directory.
    code = subprocess.run(deploy, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    if code != 0:
        print(f"`prefect deploy --all` exited {code}; it says above why.", file=sys.stderr)
        return 1
    print(f"{SET_UP} work pool {POOL}, deployments of {ROOT / 'prefect.yaml'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
