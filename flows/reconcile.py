"""The flow `reconcile`: finish the runs of this host whose process is gone."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.upkeep.reconcile import publish, reconcile_host


@flow(name="reconcile", persist_result=False)
def reconcile() -> State[None]:
    """Clean up after killed runs of this host, record the end of each run, and publish a report.

    Waiting runs and runs with a living process are not changed. Several flow runs of `reconcile`
    may run at the same time.
    """
    report = reconcile_host()
    publish(report)
    return Completed(message=report.summary)
