"""The flow `prune`: delete old files of ended runs on this host."""

# This file has no `from __future__ import annotations`. The upkeep process sends the flow function
# by value to the process of the flow run, together with the names that the function body uses.
# Names that occur only in annotations are not sent, so the annotations must be evaluated here.
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.upkeep.prune import Retention, prune_host, publish


@flow(name="prune", persist_result=False)
def prune(keep: Retention | None = None, dry_run: bool = False) -> State[None]:
    """Delete old files of ended runs on this host. Several flow runs may do so at the same time.

    Args:
        keep: How long the files of ended runs are kept. Default: the host's environment variables.
        dry_run: Delete no files, only report which files would be deleted.
    """
    pruned = prune_host(keep, dry_run=dry_run)
    publish(pruned)
    conclude = Failed if pruned.open else Completed
    return conclude(message=pruned.summary)
