"""The flow `prune`: delete files that ended runs have left on this host."""

# There is no `from __future__ import annotations` here. The upkeep serves this flow and sends it by
# value to the process of its flow run. Only names that the function body uses are sent with it, so
# annotations that are resolved later would fail there.
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.upkeep.prune import Retention, prune_host, publish


@flow(name="prune", persist_result=False)
def prune(keep: Retention | None = None, dry_run: bool = False) -> State[None]:
    """Prune the runs of this host. Safe at any time, also twice at once.

    Args:
        keep: How long the files of ended runs are kept. Default: as the host's environment says.
        dry_run: Delete nothing, only report what would be deleted.
    """
    pruned = prune_host(keep, dry_run=dry_run)
    publish(pruned)
    conclude = Failed if pruned.open else Completed
    return conclude(message=pruned.summary)
