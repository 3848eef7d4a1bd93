"""What is done on each node of a Ray cluster: short, idempotent tasks, pinned to one node each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

from tasks.processes.ending import end_carriers
from tasks.processes.machine import forget, look, names_unseen


@task(name="sweep", persist_result=False, cache_policy=NO_CACHE)
def sweep_node(wanted: Mapping[str, str]) -> dict[str, Any]:
    """End what escaped; see `end_carriers`."""
    return end_carriers(wanted)


@task(name="look", persist_result=False, cache_policy=NO_CACHE)
def look_at_node(shared: str, folder: str, name: str, ray_dir: str) -> dict[str, Any]:
    """See `machine_look.look`."""
    return look(shared, folder, name, ray_dir)


@task(name="compare", persist_result=False, cache_policy=NO_CACHE)
def compare_shared(folder: str, names: Sequence[str]) -> dict[str, Any]:
    """See `names_unseen`."""
    return names_unseen(folder, names)


@task(name="tidy", persist_result=False, cache_policy=NO_CACHE)
def tidy_node(folder: str) -> dict[str, Any]:
    """See `forget`."""
    return forget(folder)


def clock() -> float:
    """UTC epoch seconds by the node's clock. No task: its overhead would be the measurement."""
    return time.time()


#: By the name that a visitor asks for.
VISITS: Mapping[str, Task[..., dict[str, Any]]] = {
    each.name: each for each in (sweep_node, look_at_node, compare_shared, tidy_node)
}
