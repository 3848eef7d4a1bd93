"""What one look found, as people are shown it."""

from __future__ import annotations

from tasks.queue.ledger import Entry
from tasks.queue.look import Look
from tasks.queue.nodes import Cluster
from tasks.queue.view import NodeUse, QueuedRun, QueueView


def view_of(look: Look, pool: str) -> QueueView:
    """The line and the nodes of a work pool."""
    doomed = {one.entry.id for one in look.doomed}
    line = [entry for entry in look.line if entry.id not in doomed]
    work_pool = look.pool.work_pool if look.pool else None
    return QueueView(
        at=look.at,
        pool=pool if work_pool else "",
        policy=look.settings.policy,
        is_paused=bool(work_pool and work_pool.is_paused),
        limit=work_pool.concurrency_limit if work_pool else None,
        running=look.ledger.running_in(pool),
        line=tuple(_queued(look, entry, number) for number, entry in enumerate(line, start=1)),
        nodes=tuple(
            node for key in sorted(look.clusters) for node in _nodes(look, look.clusters[key], key)
        ),
        tags={
            tag: (look.used.get(tag, 0), limit)
            for tag, limit in sorted(look.settings.limits.items())
        },
        paused_queues=tuple(
            sorted(queue.name for queue in look.pool.queues.values() if queue.is_paused)
            if look.pool
            else ()
        ),
        troubles=look.troubles,
    )


def _queued(look: Look, entry: Entry, number: int) -> QueuedRun:
    message = look.messages.get(entry.id)
    given = {one.id: gpus for one, gpus in look.admitted}.get(entry.id)
    starts = f"starts now{', on ' + ', '.join(given) if given else ''}"
    expected = entry.flow_run.expected_start_time or entry.since
    return QueuedRun(
        number=number,
        flow_run_id=str(entry.id),
        name=entry.ask.name,
        demand=entry.ask.demand,
        cluster=entry.ask.cluster,
        queue=entry.queue,
        waiting_since=expected.timestamp(),
        reason=message.reason if message else starts if given is not None else "",
        starts_at=look.at if given is not None else look.starts_at.get(entry.id),
        tags=tuple(sorted(entry.ask.tags)),
    )


def _nodes(look: Look, cluster: Cluster, key: str) -> list[NodeUse]:
    holders = {entry.id: entry for entry in look.ledger.holding if entry.ask.cluster == key}
    starting = [(entry.ask.name, gpus) for entry, gpus in look.admitted if entry.ask.cluster == key]
    free = look.free.get(key, {})
    shown = []
    for node in cluster.nodes:
        if not node.gpus:
            continue
        held = {
            holders[id].ask.name: gpus[node.name]
            for id, gpus in look.held.items()
            if id in holders and gpus.get(node.name)
        }
        held |= {name: gpus[node.name] for name, gpus in starting if gpus.get(node.name)}
        shown.append(
            NodeUse(
                cluster=key,
                name=node.name,
                gpus=node.gpus,
                free=0 if node.is_drained else max(0, free.get(node.name, 0)),
                held=held,
                others=node.others_gpus,
                is_drained=node.is_drained,
                cpus=node.cpus,
                resources=node.resources,
            )
        )
    return shown
