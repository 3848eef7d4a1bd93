"""The flow `prune`: delete old files of ended runs on this host."""

# Do not add `from __future__ import annotations` to this file. The annotations would then be
# strings, which are evaluated later. The upkeep process pickles the flow function by value, without
# the types in the annotations. So the strings could not be evaluated after unpickling.
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.upkeep.prune import Retention, prune_host, publish


@flow(name="prune", persist_result=False)
def prune(keep: Retention | None = None, dry_run: bool = False) -> State[None]:
    """Delete old files of ended runs on this host. Several flow runs of `prune` may overlap.

    Args:
        keep: Time to keep the files of ended runs. Default: the value in the host's environment
            variables.
        dry_run: Delete no files, only report which files would be deleted.
    """
    pruned = prune_host(keep, dry_run=dry_run)
    publish(pruned)
    conclude = Failed if pruned.open else Completed
    return conclude(message=pruned.summary)
