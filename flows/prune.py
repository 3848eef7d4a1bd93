"""The flow `prune`: what ended runs have left on this host is removed."""

# Annotations are not postponed: the upkeep, which serves this flow, sends it to the process of its
# flow run by value, and of the names here only those that the body uses go with it.
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.upkeep.prune import Retention, prune_host, publish


@flow(name="prune", persist_result=False)
def prune(keep: Retention | None = None, dry_run: bool = False) -> State[None]:
    """Prune the runs of this host. Safe at any time, and twice at once.

    Args:
        keep: How long what runs leave is kept; left out, as the host's environment says.
        dry_run: Only say what would be done.
    """
    pruned = prune_host(keep, dry_run=dry_run)
    publish(pruned)
    conclude = Failed if pruned.open else Completed
    return conclude(message=pruned.summary)
