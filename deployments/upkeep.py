"""What keeps the runs of this host true: `python -m deployments.upkeep` serves `reconcile/<host>`.

The flow `reconcile` then runs each minute, on the Prefect server of PREFECT_API_URL, until this
process is ended. One for each host on which runs are started.
"""

from __future__ import annotations

import logging
import time

from flows.reconcile import reconcile
from tasks.reconciling import publish, reconcile_host
from tasks.supervise.identity import host_name

INTERVAL_S = 60
_AGAIN_AFTER_S = 5.0

_log = logging.getLogger(__name__)


def main() -> int:
    while True:
        # Before the first scheduled one: what was lost together with this process's predecessor
        # may be a flow run of `reconcile` itself.
        publish(reconcile_host())
        try:
            reconcile.serve(
                name=host_name(),
                description="Finishes the runs of this host whose process is gone.",
                tags=["upkeep"],
                interval=INTERVAL_S,
                # Kept by this process. A limit of the deployment's own is kept by the server,
                # which never gives back what was held when it was killed.
                limit=1,
            )
            return 0
        except Exception as error:
            # Prefect's runner gives up when its server has not answered a few times.
            _log.warning("served no more, and again soon: %r", error)
            time.sleep(_AGAIN_AFTER_S)


if __name__ == "__main__":
    raise SystemExit(main())
