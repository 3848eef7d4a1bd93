"""The flow `reconcile`: the runs of this host whose process is gone come to an end that is true."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.upkeep.reconcile import publish, reconcile_host


@flow(name="reconcile", persist_result=False)
def reconcile() -> State[None]:
    """Finish what killed runs have left on this host, close their records, and say what was done.

    Safe to run at any time, and twice at once: what lives or waits is left as it is.
    """
    report = reconcile_host()
    publish(report)
    return Completed(message=report.summary)
