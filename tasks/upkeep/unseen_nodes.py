"""Asking nodes of Ray clusters again that were not seen after a job's end: once they answer, what
they still run of it is ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import groupby

from tasks.ray.dashboard import Dashboard, Denied, NoAnswer
from tasks.ray.nodes import sweep
from tasks.ray.unseen import UnseenNote, told_apart, unseen_notes
from tasks.record.events import EventLog
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.spec.words import commas
from tasks.upkeep.report import Reconciled

#: For one more question: a node that answers at all does so in a few seconds.
_AGAIN_WITHIN_S = 20.0
#: A cluster of which no node could be asked for so long is not asked any more.
_GIVES_UP_AFTER_S = 24 * 3600.0


def unseen_asked_again(host: str) -> Iterator[Reconciled]:
    """The runs after whose end not every node was seen, whether or not they go on since. Nodes that
    answer now, and those that have left their cluster, are noted no more."""
    by_cluster = groupby(sorted(unseen_notes(host), key=_cluster_of), key=_cluster_of)
    for address, notes in by_cluster:
        yield from asyncio.run(_ask_cluster(address, [*notes]))


def _cluster_of(note: UnseenNote) -> str:
    return note.job.address


async def _ask_cluster(address: str, notes: Sequence[UnseenNote]) -> list[Reconciled]:
    async with aclosing(Dashboard(address)) as dashboard:
        try:
            gcs_address = await dashboard.gcs_address()
        except (NoAnswer, Denied) as error:
            # To find that it is away takes a while, which not every job there waits for.
            return [_not_asked(note, str(error)) for note in notes]
        return [await _ask(note, dashboard, gcs_address) for note in notes]


async def _ask(note: UnseenNote, dashboard: Dashboard, gcs_address: str) -> Reconciled:
    job = note.job
    report = await sweep(
        gcs_address,
        run_id=job.run_id,
        attempt=job.attempt,
        component=job.component,
        only=note.nodes,
        within_s=_AGAIN_WITHIN_S,
    )
    if away := [node for node in report.unreached if not node.node_id]:
        return _not_asked(note, away[0].why)
    if report.killed:
        # Nothing is masked here, and secrets may stand in a command line.
        fields = report.fields(lambda one: one.place)
        EventLog(note.events).emit("job.swept", job.component, **fields)
    unseen, lost = await told_apart(dashboard, report.unreached)
    open = commas(unseen)
    if report.left:
        open = f"outlived SIGKILL: {commas(one.place for one in report.left)}"
    elif unseen:
        note.of(unseen).write()
    else:
        note.forget()
    silent = {node.node_id for node in report.unreached}
    seen = [f"node {name}" for node_id, name in note.nodes.items() if node_id not in silent]
    if not note.nodes and not silent:
        seen = ["every node"]
    found = [f"{commas(seen)} was seen"] if seen else []
    found += [f"ended {one.place}" for one in report.killed]
    return _told(note, (*found, *lost), open)


def _not_asked(note: UnseenNote, why: str) -> Reconciled:
    if time.time() - note.since < _GIVES_UP_AFTER_S:
        return _told(note, (), f"no node was seen ({why})")
    note.forget()
    by_hand = f"muster sweep --address {note.job.address} --run-id {note.job.run_id}"
    said = f"no node was seen for a day ({why}), and none is asked any more: `{by_hand}` does"
    return _told(note, (said,), "")


def _told(note: UnseenNote, found: tuple[str, ...], open: str) -> Reconciled:
    """`found` is what is known by now, and was not before."""
    flow_run_id = None
    with suppress(OSError, ValueError):
        flow_run_id = RunJson.read(RunPlace.of(note.job.run_id).record).flow_run_id
    return Reconciled(
        name=note.job.run_id,
        flow_run_id=flow_run_id,
        found=f"nodes were not seen after the end of {note.job.submission_id}",
        nodes=found,
        open=open,
    )
