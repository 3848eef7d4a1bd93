"""Check nodes of Ray clusters again that could not be checked for leftovers after a job had ended.

When a node answers, the leftover processes of the job on it are killed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import groupby

from tasks.ray.dashboard import Dashboard, Denied, NoAnswer
from tasks.ray.nodes import sweep
from tasks.ray.unchecked_nodes import UncheckedNodesNote, read_notes, split_departed_nodes
from tasks.record.events import EventLog
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.spec.formatting import join_commas
from tasks.upkeep.report import Reconciled

#: Deadline of one check, in seconds. A node that answers at all does so within a few seconds.
_CHECK_TIMEOUT_S = 20.0
#: Seconds after which a cluster is given up if no node of it could be checked.
_GIVES_UP_AFTER_S = 24 * 3600.0


def check_nodes_again(host: str) -> Iterator[Reconciled]:
    """Check the nodes that this host has notes about, and yield a report for each note.

    A node that was checked or has left its cluster is removed from its note. The runs of the notes
    may have new attempts by now.
    """
    by_cluster = groupby(sorted(read_notes(host), key=_cluster_of), key=_cluster_of)
    for address, notes in by_cluster:
        yield from asyncio.run(_ask_cluster(address, [*notes]))


def _cluster_of(note: UncheckedNodesNote) -> str:
    return note.job.address


async def _ask_cluster(address: str, notes: Sequence[UncheckedNodesNote]) -> list[Reconciled]:
    async with aclosing(Dashboard(address)) as dashboard:
        try:
            gcs_address = await dashboard.gcs_address()
        except (NoAnswer, Denied) as error:
            # The timeout is long, so it is not repeated for every note of this cluster.
            return [_report_unchecked(note, str(error)) for note in notes]
        return [await _check_nodes(note, dashboard, gcs_address) for note in notes]


async def _check_nodes(
    note: UncheckedNodesNote, dashboard: Dashboard, gcs_address: str
) -> Reconciled:
    job = note.job
    report = await sweep(
        gcs_address,
        run_id=job.run_id,
        attempt=job.attempt,
        component=job.component,
        only=note.nodes,
        within_s=_CHECK_TIMEOUT_S,
    )
    # An entry without a node id means that no node of the cluster could be asked.
    unreached_clusters = [node for node in report.unreached if not node.node_id]
    if unreached_clusters:
        return _report_unchecked(note, unreached_clusters[0].why)

    if report.killed:
        # Command lines can contain secrets, and nothing masks them here. So log only the pids.
        fields = report.fields(lambda process: process.place)
        EventLog(note.events).emit("job.swept", job.component, **fields)
    unseen, departures = await split_departed_nodes(dashboard, report.unreached)
    open = join_commas(unseen)
    if report.left:
        open = f"outlived SIGKILL: {join_commas(process.place for process in report.left)}"
    elif unseen:
        note.of(unseen).write()
    else:
        note.forget()

    unreached_ids = {node.node_id for node in report.unreached}
    checked = [
        f"node {name}" for node_id, name in note.nodes.items() if node_id not in unreached_ids
    ]
    if not note.nodes and not unreached_ids:
        checked = ["every node"]
    results = [f"{join_commas(checked)} was seen"] if checked else []
    results += [f"ended {process.place}" for process in report.killed]
    return _report(note, (*results, *departures), open)


def _report_unchecked(note: UncheckedNodesNote, why: str) -> Reconciled:
    """Report that no node could be checked. After a day, the note is deleted."""
    if time.time() - note.since < _GIVES_UP_AFTER_S:
        return _report(note, (), f"no node was seen ({why})")
    note.forget()
    command = f"muster sweep --address {note.job.address} --run-id {note.job.run_id}"
    result = f"no node was seen for a day ({why}), and none is asked any more: `{command}` does"
    return _report(note, (result,), "")


def _report(note: UncheckedNodesNote, results: tuple[str, ...], open: str) -> Reconciled:
    """Return the report about a note. `results` says what this check has found out or done."""
    flow_run_id = None
    with suppress(OSError, ValueError):
        flow_run_id = RunJson.read(RunPlace.of(note.job.run_id).record).flow_run_id
    return Reconciled(
        name=note.job.run_id,
        flow_run_id=flow_run_id,
        found=f"nodes were not seen after the end of {note.job.submission_id}",
        nodes=results,
        open=open,
    )
