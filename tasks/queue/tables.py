"""The queue as people see it: in a terminal, as two artifacts on the server, and one run of it."""

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
from tasks.queue.ledger import parse_request
from tasks.queue.reasons import describe_gang
from tasks.queue.scheduling_pass import QueuedRun, QueueView
from tasks.queue.settings import NotThere
from tasks.ray.usage import ClusterNode
from tasks.server.artifacts import Artifacts
from tasks.server.flow_runs import HELD, SILENT_AFTER_S, talking_to, worker_of
from tasks.show.output import line_of, one_line
from tasks.show.view import Shown
from tasks.spec.formatting import (
    escape_cell,
    escape_markdown,
    format_count,
    format_date_minute,
    format_datetime,
    format_minutes,
    join_commas,
)

#: Largest number of rows of a table on the server.
ROWS_AT_MOST = 200
#: Width of the field names of `muster why`; further lines of a field are indented by more.
_NAME_WIDTH = 14
_FIELD_INDENT = " " * (_NAME_WIDTH + 3)
#: A start within this many seconds counts as now.
_SOON_S = 60.0

#: `cell[column]`.
Row = dict[str, object]

#: Columns that are aligned to the right.
_NUMBERS = ("place", "GPUs", "free", "others", "CPUs")
_EMPTY = "No run waits."
_TROUBLE = "trouble:"
#: Indentation of a reason below its run: the width of the first column and the gap after it.
_REASON_INDENT = 7


def summarize(view: QueueView) -> tuple[str, ...]:
    """Return the state of the pool in some lines."""
    limit = "" if view.limit is None else f" of at most {view.limit}"
    free_gpus = sum(node.free_gpus for node in view.nodes)
    gpus = sum(node.gpus for node in view.nodes)
    node_text = "no node is seen"
    if view.nodes:
        nodes = format_count(len(view.nodes), "node")
        node_text = f"{free_gpus} of {gpus} GPUs are free on {nodes}"
    name = f"work pool {view.pool}" if view.pool else "no work pool"
    lines = [
        f"{name}, {view.policy}: {view.running}{limit} running, {len(view.line)} waiting; "
        f"{node_text}"
    ]
    if view.is_paused:
        lines.append("paused: no run starts until the pool is resumed")
    if view.paused_queues:
        lines.append(f"paused queues: {join_commas(view.paused_queues)}")
    if view.tags:
        uses = (f"{tag} {used} of {limit} GPUs" for tag, (used, limit) in sorted(view.tags.items()))
        lines.append(f"tags: {join_commas(uses)}")
    if drained := [node.name for node in view.nodes if node.is_drained]:
        lines.append(f"drained: {join_commas(drained)}")
    lines += [
        f"{faulty.node} is drained until {format_date_minute(faulty.until)} by {faulty.by}: "
        f"{faulty.reason}"
        for faulty in view.faulty
    ]
    return (*lines, *(f"{_TROUBLE} {trouble}" for trouble in view.troubles))


def queue_rows(view: QueueView) -> list[Row]:
    """Return one row for each waiting run, without columns that carry no information."""
    rows = [_queue_row(run) for run in view.line]
    return _drop_columns(rows, if_equal=("cluster", "queue"), if_empty="tags")


def node_rows(view: QueueView) -> list[Row]:
    """Return one row for each node, with the runs that hold its GPUs."""
    rows = [_node_row(node) for node in view.nodes]
    return _drop_columns(rows, if_equal=("cluster",), if_empty="CPUs")


def as_json(view: QueueView) -> str:
    """Return the view as JSON for programs. Times are UTC epoch seconds."""
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
        first, *others = summarize(self.view)
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
            yield Padding.indent(line_of(reason, "dim"), _REASON_INDENT)
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
        "asks": describe_gang(run.demand),
        "cluster": run.cluster or "-",
        # The UI cuts off the last columns of a wide table, so the important ones come first.
        "reason": run.reason,
        "waiting since": format_date_minute(run.waiting_since),
        "expected start": "-" if run.starts_at is None else format_date_minute(run.starts_at),
        "queue": run.queue or "-",
        "tags": join_commas(run.tags) or "-",
    }


def _node_row(node: ClusterNode) -> Row:
    return {
        "cluster": node.cluster or "-",
        "node": f"{node.name} (drained)" if node.is_drained else node.name,
        "GPUs": node.gpus,
        "free": node.free_gpus,
        "others": f"{node.others_gpus:g}",
        "CPUs": "-" if node.cpus is None else f"{node.cpus:g}",
        "held by": join_commas(f"{run}: {gpus}" for run, gpus in sorted(node.held.items())) or "-",
    }


def _drop_columns(rows: list[Row], *, if_equal: Sequence[str], if_empty: str) -> list[Row]:
    """Return the rows without some columns.

    Args:
        rows: The rows.
        if_equal: Columns to drop if all rows have the same value.
        if_empty: Column to drop if no row has a value.
    """
    dropped = {name for name in if_equal if len({row[name] for row in rows}) < 2}
    if all(row[if_empty] == "-" for row in rows):
        dropped.add(if_empty)
    return [{name: cell for name, cell in row.items() if name not in dropped} for row in rows]


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
        yield Padding.indent(line_of("; ".join(said), "dim"), _REASON_INDENT)


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
    """Keeps the two tables of each work pool up to date. For one asyncio task at a time."""

    _api_url: str
    #: Smallest number of seconds between two writes of a table.
    every_s: float = 2.0
    #: Seconds after which an unchanged table is written again, because another gate may have
    #: written it meanwhile.
    renewed_every_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    #: The artifacts by pool.
    _artifacts: dict[str, Artifacts] = field(default_factory=dict)
    #: By key: the content that was written last, without its time, and when it was written.
    _written: dict[str, tuple[Shown, float]] = field(default_factory=dict)

    async def show(self, view: QueueView) -> None:
        """Update the tables, if they have changed and were not written just now.

        Raises:
            ServerAway: The server did not answer. The next call tries again.
        """
        tables = tables_of(view)
        outdated = {key: table for key, table in tables.items() if self._is_outdated(key, table)}
        if outdated:
            artifacts = self._artifacts.setdefault(view.pool, Artifacts(None, tables))
            await asyncio.to_thread(self._write, artifacts, outdated, view.at)

    def _is_outdated(self, key: str, table: Shown) -> bool:
        written_table, written_at = self._written.get(key, (None, -math.inf))
        limit_s = self.renewed_every_s if written_table == table else self.every_s
        return self.clock() - written_at >= limit_s

    def _write(self, artifacts: Artifacts, tables: Mapping[str, Shown], at: float) -> None:
        as_of = f"As of {format_datetime(at)}; rewritten when it changes, and each minute."
        with talking_to(self._api_url) as client:
            for key, table in tables.items():
                headline = f"{table.headline}\n\n{as_of}"
                artifacts.show(client, key, replace(table, headline=headline))
                self._written[key] = table, self.clock()


def artifact_keys(pool: str) -> tuple[str, str]:
    """Return the keys of a pool's two artifacts, for the queue and for the nodes.

    They are `gang-queue` and `gang-nodes`, with the pool's name in front if it is not `gang`.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", pool.lower()).strip("-")
    prefix = "" if pool in ("", "gang") else f"{slug}-"
    if prefix and slug != pool:
        # A key cannot hold all characters. The digest separates names such as `a b` and `a/b`.
        prefix = f"{slug}-{sha256(pool.encode()).hexdigest()[:6]}-".lstrip("-")
    return f"{prefix}gang-queue", f"{prefix}gang-nodes"


def tables_of(view: QueueView) -> dict[str, Shown]:
    """Return the two tables of a pool by their keys."""
    queue_key, nodes_key = artifact_keys(view.pool)
    return {
        queue_key: _table(view, queue_rows(view), "waiting runs"),
        nodes_key: _table(view, node_rows(view), "nodes"),
    }


def _table(view: QueueView, rows: Sequence[Row], what: str) -> Shown:
    """Return an artifact with the state of the pool and the first rows. `what` names the rows."""
    lines = [f"- {escape_markdown(line)}" for line in summarize(view)]
    if len(rows) > ROWS_AT_MOST:
        lines.append(f"- the first {ROWS_AT_MOST} of {len(rows)} {what}")
    cells = [{name: escape_cell(said) for name, said in row.items()} for row in rows[:ROWS_AT_MOST]]
    return Shown(type="table", headline="\n".join(lines), data=json.dumps(cells))


async def explain(
    client: PrefectClient, flow_run_id: str, pool: str, look: Callable[[str], Awaitable[QueueView]]
) -> str:
    """Describe in some lines what a run does or why it waits.

    Args:
        client: Client of the Prefect server.
        flow_run_id: Id of the flow run.
        pool: Work pool whose queue counts if the run was started directly.
        look: Reads the queue of a work pool.

    Raises:
        NotThere: The server has no such flow run.
    """
    try:
        flow_run = await client.read_flow_run(UUID(flow_run_id))
    except ObjectNotFound:
        raise NotThere(f"the Prefect server has no flow run of the id {flow_run_id}") from None
    view = await look(flow_run.work_pool_name or pool)
    lines = describe_run(flow_run, view)
    if silence := await _worker_silence(client, flow_run, view.at):
        lines.append(_field("host", silence))
    return "\n".join(lines)


async def _worker_silence(client: PrefectClient, flow_run: FlowRun, now: float) -> str:
    """Return a warning if the worker of an active run is silent, else an empty string."""
    pool = flow_run.work_pool_name
    name = worker_of(flow_run)
    if state_of(flow_run).type not in HELD or pool is None or name is None:
        return ""
    workers = await client.read_workers_for_work_pool(pool)
    heartbeats = [
        worker.last_heartbeat_time.timestamp()
        for worker in workers
        if worker.name == name and worker.last_heartbeat_time is not None
    ]
    silent_s = now - max(heartbeats, default=now)
    if silent_s < SILENT_AFTER_S:
        return ""
    return (
        f"its worker {name} was last heard of {format_minutes(silent_s)} ago; "
        f"if that host is off for good: muster reconcile --lost-host {name}"
    )


def describe_run(flow_run: FlowRun, view: QueueView) -> list[str]:
    """Describe a flow run in some lines.

    Args:
        flow_run: The flow run.
        view: The queue of its pool.
    """
    queued = next((run for run in view.line if run.flow_run_id == str(flow_run.id)), None)
    if queued is not None:
        lines = [f"{queued.name} waits, number {queued.number} of {len(view.line)} in the line."]
        fields = {name: str(cell) for name, cell in _queue_row(queued).items() if cell != "-"}
        del fields["place"]
        del fields["run"]
    else:
        lines = [f"{flow_run.name} {_state_text(flow_run, view.at)}."]
        fields = {
            "has": _held_nodes(flow_run, view),
            "says": (state_of(flow_run).message or "").replace("\n", f"\n{_FIELD_INDENT}"),
        }
    lines += [_field(name, text) for name, text in fields.items() if text]
    return lines + [_field("trouble", trouble) for trouble in view.troubles]


def _state_text(flow_run: FlowRun, now: float) -> str:
    """Describe the state of a flow run that is not in the queue."""
    state = state_of(flow_run)
    due = flow_run.next_scheduled_start_time
    if state.is_scheduled() and due is not None and due.timestamp() > now + _SOON_S:
        return f"is to start at {format_date_minute(due.timestamp())}, and waits for that time"
    return f"is {state.name} since {format_date_minute(state.timestamp.timestamp())}"


def _held_nodes(flow_run: FlowRun, view: QueueView) -> str:
    """Return the nodes on which a flow run holds GPUs, as text."""
    # The flow run may not be renamed to its run id yet, so look for both names.
    names = {flow_run.name, parse_request(flow_run).name}
    return join_commas(
        f"{node.name} ({node.held[name]} GPUs)"
        for node in view.nodes
        for name in sorted(names & node.held.keys())
    )


def _field(name: str, text: str) -> str:
    return f"  {name:<{_NAME_WIDTH}} {text}"
