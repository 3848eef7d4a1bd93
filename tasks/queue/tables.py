"""The queue as people see it: rows in a terminal, two artifacts on the server, a run explained."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from tasks.queue.grants import state_of
from tasks.queue.ledger import request_of
from tasks.queue.look import QueuedRun, QueueView
from tasks.queue.reasons import gang_in_words
from tasks.queue.settings import NotThere
from tasks.ray.usage import ClusterNode
from tasks.server.artifacts import Artifacts
from tasks.server.flow_runs import HELD, SILENT_AFTER_S, talking_to, worker_of
from tasks.show.output import line_of, one_line
from tasks.show.view import Shown
from tasks.spec.words import cell, commas, counted, lasting, minute, moment, text

#: A table on the server shows no more rows.
ROWS_AT_MOST = 200
#: Of the names of what is said of one run; further lines stand below what is said.
_WIDTH = 14
_BELOW = " " * (_WIDTH + 3)
#: What is due so soon is as good as due.
_SOON_S = 60.0

#: A column each key.
Row = dict[str, object]

#: Their cells stand to the right.
_NUMBERS = ("place", "GPUs", "free", "others", "CPUs")
_EMPTY = "No run waits."
_TROUBLE = "trouble:"
#: Of a reason below its run: the width of the first column and the gap after it.
_INDENT = 7


def summary_of(view: QueueView) -> tuple[str, ...]:
    """The state of the pool, a line each thing to say."""
    limit = "" if view.limit is None else f" of at most {view.limit}"
    free = sum(node.free_gpus for node in view.nodes)
    gpus = sum(node.gpus for node in view.nodes)
    nodes = counted(len(view.nodes), "node")
    there = f"{free} of {gpus} GPUs are free on {nodes}" if view.nodes else "no node is seen"
    name = f"work pool {view.pool}" if view.pool else "no work pool"
    lines = [
        f"{name}, {view.policy}: {view.running}{limit} running, {len(view.line)} waiting; {there}"
    ]
    if view.is_paused:
        lines.append("paused: no run starts until the pool is resumed")
    if view.paused_queues:
        lines.append(f"paused queues: {commas(view.paused_queues)}")
    if view.tags:
        used = (f"{tag} {has} of {most} GPUs" for tag, (has, most) in sorted(view.tags.items()))
        lines.append(f"tags: {commas(used)}")
    if drained := [node.name for node in view.nodes if node.is_drained]:
        lines.append(f"drained: {commas(drained)}")
    lines += [
        f"{one.node} is drained until {minute(one.until)} by {one.by}: {one.reason}"
        for one in view.faulty
    ]
    return (*lines, *(f"{_TROUBLE} {trouble}" for trouble in view.troubles))


def queue_rows(view: QueueView) -> list[Row]:
    """The line, a row each run, without columns that say nothing."""
    return _trimmed(
        [_queue_row(run) for run in view.line], alike=("cluster", "queue"), empty="tags"
    )


def node_rows(view: QueueView) -> list[Row]:
    """The nodes, a row each, with who holds what."""
    return _trimmed([_node_row(node) for node in view.nodes], alike=("cluster",), empty="CPUs")


def as_json(view: QueueView) -> str:
    """The whole look, for programs; times are UTC epoch seconds."""
    nodes = [{**asdict(node), "free": node.free_gpus} for node in view.nodes]
    return json.dumps({**asdict(view), "nodes": nodes}, indent=2, default=dict)


@dataclass(frozen=True, slots=True)
class QueueTables:
    """The queue and the nodes for people, on a terminal of any width.

    Each reason stands below its run. Columns without room stand below it, too: no run id is cut.
    """

    view: QueueView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        first, *others = summary_of(self.view)
        yield line_of(first, "bold")
        for line in others:
            yield line_of(line, "red" if line.startswith(_TROUBLE) else "yellow")
        yield Text()
        yield from self._queue(width)
        if self.view.nodes:
            yield Text()
            yield from self._nodes(width)

    def _queue(self, width: int) -> Iterator[RenderableType]:
        rows = queue_rows(self.view)
        if not rows:
            yield _line(_EMPTY, "green")
            return
        reasons = [str(row.pop("reason")) for row in rows]
        columns = _fitting_columns(rows, width, until="run")
        head, *lines = _aligned(rows, columns)
        yield _line(head, "bold")
        for row, line, reason in zip(rows, lines, reasons, strict=True):
            yield _line(line)
            yield Padding.indent(line_of(reason, "dim"), _INDENT)
            yield from _other_columns(row, columns)

    def _nodes(self, width: int) -> Iterator[RenderableType]:
        rows = node_rows(self.view)
        columns = _fitting_columns(rows, width, until="node")
        head, *lines = _aligned(rows, columns)
        yield _line(head, "bold")
        for node, row, line in zip(self.view.nodes, rows, lines, strict=True):
            yield _line(line, "yellow" if node.is_drained else "")
            yield from _other_columns(row, columns)


def _queue_row(run: QueuedRun) -> Row:
    return {
        "place": run.number,
        "run": run.name,
        "asks": gang_in_words(run.demand),
        "cluster": run.cluster or "-",
        # Of a table that is cut to the width of a page, the last columns are the ones not seen.
        "reason": run.reason,
        "waiting since": minute(run.waiting_since),
        "expected start": "-" if run.starts_at is None else minute(run.starts_at),
        "queue": run.queue or "-",
        "tags": commas(run.tags) or "-",
    }


def _node_row(node: ClusterNode) -> Row:
    return {
        "cluster": node.cluster or "-",
        "node": f"{node.name} (drained)" if node.is_drained else node.name,
        "GPUs": node.gpus,
        "free": node.free_gpus,
        "others": f"{node.others_gpus:g}",
        "CPUs": "-" if node.cpus is None else f"{node.cpus:g}",
        "held by": commas(f"{run}: {gpus}" for run, gpus in sorted(node.held.items())) or "-",
    }


def _trimmed(rows: list[Row], *, alike: Sequence[str], empty: str) -> list[Row]:
    """Without the columns of `alike` that tell no row from another, and without `empty` where no
    row says anything there."""
    out = {name for name in alike if len({row[name] for row in rows}) < 2}
    out |= {empty} if all(row[empty] == "-" for row in rows) else set()
    return [{name: cell for name, cell in row.items() if name not in out} for row in rows]


def _fitting_columns(rows: Sequence[Row], width: int, *, until: str) -> list[str]:
    """Return the first columns of a table that fit into a width.

    Args:
        until: The columns up to this one are returned even if they do not fit.
    """
    columns = list(rows[0])
    at_least = columns.index(until) + 1
    while len(columns) > at_least and max(map(cell_len, _aligned(rows, columns))) > width:
        columns.pop()
    return columns


def _other_columns(row: Row, columns: Sequence[str]) -> Iterator[RenderableType]:
    """Yield the cells of a row that are not among the columns, each with its name."""
    cells = {name: one_line(str(cell)) for name, cell in row.items() if name not in columns}
    if said := [f"{name} {cell}" for name, cell in cells.items() if cell != "-"]:
        yield Padding.indent(line_of("; ".join(said), "dim"), _INDENT)


def _aligned(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return columns of a table as lines, the head first."""
    cells = [columns, *([one_line(str(row[name])) for name in columns] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            _padded(cell, width, to_the_right=name in _NUMBERS)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in cells
    ]


def _padded(cell: str, width: int, *, to_the_right: bool) -> str:
    space = " " * (width - cell_len(cell))
    return space + cell if to_the_right else cell + space


def _line(text: str, style: str = "") -> Text:
    """Return a line that is never wrapped and never cut."""
    return Text(text, style=style, no_wrap=True, overflow="ignore")


@dataclass(slots=True)
class QueueArtifacts:
    """Keeps the two tables of each work pool current. For one asyncio task at a time."""

    _api_url: str
    #: What changes sooner after the last change than so is left to a later `show`.
    every_s: float = 2.0
    #: What was written so long ago is written again: another gate may have written meanwhile.
    renewed_every_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    #: By pool.
    _kept: dict[str, Artifacts] = field(default_factory=dict)
    #: By key: what it shows but for the time, and when that was written.
    _written: dict[str, tuple[Shown, float]] = field(default_factory=dict)

    async def show(self, view: QueueView) -> None:
        """Have the tables show this. Raises: ServerAway; the next call tries again."""
        tables = tables_of(view)
        if news := {key: one for key, one in tables.items() if self._is_news(key, one)}:
            kept = self._kept.setdefault(view.pool, Artifacts(None, tables))
            await asyncio.to_thread(self._write, kept, news, view.at)

    def _is_news(self, key: str, shown: Shown) -> bool:
        before, written_at = self._written.get(key, (None, -math.inf))
        limit_s = self.renewed_every_s if before == shown else self.every_s
        return self.clock() - written_at >= limit_s

    def _write(self, kept: Artifacts, news: Mapping[str, Shown], at: float) -> None:
        as_of = f"As of {moment(at)}; rewritten when it changes, and each minute."
        with talking_to(self._api_url) as client:
            for key, shown in news.items():
                kept.show(client, key, replace(shown, headline=f"{shown.headline}\n\n{as_of}"))
                self._written[key] = shown, self.clock()


def keys_of(pool: str) -> tuple[str, str]:
    """The keys of a pool's artifacts, queue and nodes: `gang-queue` and `gang-nodes`; others begin
    with their pool's name."""
    slug = re.sub(r"[^a-z0-9]+", "-", pool.lower()).strip("-")
    before = "" if pool in ("", "gang") else f"{slug}-"
    if before and slug != pool:
        # What a key can't hold is gone: the digest keeps `a b` and `a/b` apart.
        before = f"{slug}-{sha256(pool.encode()).hexdigest()[:6]}-".lstrip("-")
    return f"{before}gang-queue", f"{before}gang-nodes"


def tables_of(view: QueueView) -> dict[str, Shown]:
    """Return the two tables of a pool by their keys."""
    queue, nodes = keys_of(view.pool)
    return {
        queue: _shown(view, queue_rows(view), "waiting runs"),
        nodes: _shown(view, node_rows(view), "nodes"),
    }


def _shown(view: QueueView, rows: Sequence[Row], what: str) -> Shown:
    lines = [f"- {text(line)}" for line in summary_of(view)]
    if len(rows) > ROWS_AT_MOST:
        lines.append(f"- the first {ROWS_AT_MOST} of {len(rows)} {what}")
    cells = [{name: cell(said) for name, said in row.items()} for row in rows[:ROWS_AT_MOST]]
    return Shown(type="table", headline="\n".join(lines), data=json.dumps(cells))


async def explain(
    client: PrefectClient, flow_run_id: str, pool: str, look: Callable[[str], Awaitable[QueueView]]
) -> str:
    """What is to be said of a run, in some lines.

    Args:
        pool: Where a run that was started directly waits.
        look: At the queue of a work pool.

    Raises: NotThere.
    """
    try:
        flow_run = await client.read_flow_run(UUID(flow_run_id))
    except ObjectNotFound:
        raise NotThere(f"the Prefect server has no flow run of the id {flow_run_id}") from None
    view = await look(flow_run.work_pool_name or pool)
    lines = told(flow_run, view)
    if silence := await _silence(client, flow_run, view.at):
        lines.append(_field("host", silence))
    return "\n".join(lines)


async def _silence(client: PrefectClient, flow_run: FlowRun, now: float) -> str:
    """That the worker which has the run is not heard of; empty where it is, or nobody knows."""
    pool, name = flow_run.work_pool_name, worker_of(flow_run)
    if state_of(flow_run).type not in HELD or pool is None or name is None:
        return ""
    workers = await client.read_workers_for_work_pool(pool)
    heard = [one.last_heartbeat_time for one in workers if one.name == name]
    silent_s = now - max((at.timestamp() for at in heard if at is not None), default=now)
    if silent_s < SILENT_AFTER_S:
        return ""
    said = f"its worker {name} was last heard of {lasting(silent_s)} ago"
    return f"{said}; if that host is off for good: muster reconcile --lost-host {name}"


def told(flow_run: FlowRun, view: QueueView) -> list[str]:
    """What is to be said of a flow run, by one look at its queue."""
    name, state = flow_run.name, state_of(flow_run)
    queued = next((run for run in view.line if run.flow_run_id == str(flow_run.id)), None)
    due = flow_run.next_scheduled_start_time
    if queued is not None:
        lines = [f"{queued.name} waits, number {queued.number} of {len(view.line)} in the line."]
        said = {name: str(cell) for name, cell in _queue_row(queued).items() if cell != "-"}
        del said["place"], said["run"]
    else:
        since = f"is {state.name} since {minute(state.timestamp.timestamp())}"
        if state.is_scheduled() and due is not None and due.timestamp() > view.at + _SOON_S:
            since = f"is to start at {minute(due.timestamp())}, and waits for that time"
        lines = [f"{name} {since}."]
        # A run is called by its run id, which its flow run may not have got yet.
        called = {name, request_of(flow_run).name}
        held = (
            f"{node.name} ({node.held[run]} GPUs)"
            for node in view.nodes
            for run in sorted(called & {*node.held})
        )
        said = {"has": commas(held), "says": (state.message or "").replace("\n", f"\n{_BELOW}")}
    lines += [_field(what, text) for what, text in said.items() if text]
    return lines + [_field("trouble", trouble) for trouble in view.troubles]


def _field(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}} {text}"
