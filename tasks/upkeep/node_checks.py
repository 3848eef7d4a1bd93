"""Check Ray nodes that could not be checked for leftover processes when a job ended.

As soon as one of these nodes answers, the leftover processes of the job on that node are killed.
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
from tasks.upkeep.report import RunReport

#: Deadline for the check of the nodes of one job, in seconds. A reachable node answers within a few
#: seconds.
_CHECK_TIMEOUT_S = 20.0
#: Muster tries to check the nodes of an unreachable Ray cluster for at most this number of seconds.
_GIVES_UP_AFTER_S = 24 * 3600.0


def check_nodes_again(host: str) -> Iterator[RunReport]:
    """Check nodes for leftover processes of ended Ray jobs, and yield a report for each job.

    A note file on the host lists the unchecked nodes of one ended Ray job. A node that was checked
    or is no longer in its cluster is removed from the note file.

    Args:
        host: Name of the host whose note files are read.
    """
    by_cluster = groupby(sorted(read_notes(host), key=_cluster_of), key=_cluster_of)
    for address, notes in by_cluster:
        yield from asyncio.run(_check_cluster(address, [*notes]))


def _cluster_of(note: UncheckedNodesNote) -> str:
    return note.job.address


async def _check_cluster(address: str, notes: Sequence[UncheckedNodesNote]) -> list[RunReport]:
    """Check the nodes of one Ray cluster, and return a report for each ended job.

    Args:
        address: URL of the cluster's dashboard.
        notes: The note files about ended jobs of this cluster, one for each job.
    """
    async with aclosing(Dashboard(address)) as dashboard:
        try:
            gcs_address = await dashboard.gcs_address()
        except (NoAnswer, Denied) as error:
            # The cluster does not answer, so report that no node was checked. To check the nodes of
            # each job would take too long, because each request would wait for its timeout.
            return [_report_unchecked(note, str(error)) for note in notes]
        return [await _check_nodes(note, dashboard, gcs_address) for note in notes]


async def _check_nodes(
    note: UncheckedNodesNote, dashboard: Dashboard, gcs_address: str
) -> RunReport:
    """Check the nodes of a note file, kill leftover processes on them, and return a report.

    Args:
        note: The note file. It lists the unchecked nodes of one ended Ray job.
        dashboard: Dashboard of the Ray cluster.
        gcs_address: `HOST:PORT` of the cluster's control store (GCS).
    """
    job = note.job
    report = await sweep(
        gcs_address,
        run_id=job.run_id,
        attempt=job.attempt,
        component=job.component,
        only=note.nodes,
        within_s=_CHECK_TIMEOUT_S,
    )
    # An entry without a node id means that no node of the cluster could be reached.
    unreached_clusters = [node for node in report.unreached if not node.node_id]
    if unreached_clusters:
        return _report_unchecked(note, unreached_clusters[0].why)

    if report.killed:
        # Command lines can contain secrets that this process cannot recognize. So log only pids.
        fields = report.fields(lambda process: process.place)
        EventLog(note.events).emit("job.swept", job.component, **fields)
    unchecked, departures = await split_departed_nodes(dashboard, report.unreached)
    open = join_commas(unchecked)
    if report.left:
        open = f"outlived SIGKILL: {join_commas(process.place for process in report.left)}"
    elif unchecked:
        note.with_nodes(unchecked).write()
    else:
        note.forget()

    unreached_ids = {node.node_id for node in report.unreached}
    checked = [
        f"node {name}" for node_id, name in note.nodes.items() if node_id not in unreached_ids
    ]
    if not note.nodes and not unreached_ids:
        checked = ["every node"]
    results = [f"checked {join_commas(checked)}"] if checked else []
    results += [f"ended {process.place}" for process in report.killed]
    return _report(note, (*results, *departures), open)


def _report_unchecked(note: UncheckedNodesNote, why: str) -> RunReport:
    """Return a report that no node of the cluster could be checked.

    The note file lists nodes that must still be checked. If the note file is older than a day, this
    function also deletes it. Later checks then ignore these nodes.

    Args:
        note: The note file. It lists the unchecked nodes of one ended Ray job.
        why: Reason why the nodes could not be checked.
    """
    if time.time() - note.since < _GIVES_UP_AFTER_S:
        return _report(note, (), f"Muster could not check any node of the cluster ({why})")
    note.forget()
    command = f"muster cleanup --address {note.job.address} --run-id {note.job.run_id}"
    result = (
        f"for a day, Muster could not check any node of the cluster ({why}). Muster has stopped "
        f"these checks. To search the nodes for remaining processes yourself, run `{command}`"
    )
    return _report(note, (result,), "")


def _report(note: UncheckedNodesNote, results: tuple[str, ...], open: str) -> RunReport:
    """Return the report about the check of the nodes that a note file lists.

    Args:
        note: The note file. It lists the unchecked nodes of one ended Ray job.
        results: Phrases about the checked nodes and the killed processes.
        open: Phrase about nodes that must be checked again, or an empty string.
    """
    flow_run_id = None
    with suppress(OSError, ValueError):
        flow_run_id = RunJson.read(RunPlace.of(note.job.run_id).record).flow_run_id
    return RunReport(
        name=note.job.run_id,
        flow_run_id=flow_run_id,
        found="Muster could not check all nodes for remaining processes of the Ray job "
        f"{note.job.submission_id}",
        nodes=results,
        open=open,
    )
