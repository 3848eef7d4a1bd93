"""Show the queue to people: in a terminal, in two artifacts of the Prefect UI, and for one run."""

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

from tasks.queue.grants import grant_of, state_of
from tasks.queue.ledger import parse_request
from tasks.queue.reasons import describe_gang, is_part_of_reason
from tasks.queue.scheduling_pass import QueuedRun, QueueView
from tasks.queue.settings import MissingFromServer
from tasks.ray.usage import ClusterNode
from tasks.server.artifacts import Artifacts
from tasks.server.flow_runs import HELD, SILENT_AFTER_S, connect_to_server, find_worker
from tasks.show.markdown import escape_cell, escape_markdown
from tasks.show.output import line_of, one_line
from tasks.show.run_view import Shown
from tasks.spec.formatting import (
    format_count,
    format_date_minute,
    format_datetime,
    format_minutes,
    join_commas,
)

#: Largest number of rows in an artifact.
ROWS_AT_MOST = 200
#: Width of the field names in the output of `muster why`, in characters.
_NAME_WIDTH = 14
#: Indentation of the second and further lines of a field in the output of `muster why`.
_FIELD_INDENT = " " * (_NAME_WIDTH + 3)
#: `muster why` shows a scheduled start only if the start is more than this number of seconds in the
#: future.
_SOON_S = 60.0

#: A row of a table: a mapping from the name of a column to the content of the cell.
Row = dict[str, object]

#: Names of the columns that are aligned to the right.
_NUMBERS = ("position", "GPUs", "free", "others", "CPUs")
#: Text in place of the table of waiting runs if no run waits.
_EMPTY = "No run waits."
#: First word of a line about a problem.
_PROBLEM = "problem:"
#: Indentation, in characters, of the reason that is shown below a waiting run. This is the width of
#: the first column plus a space.
_REASON_INDENT = 10


def summarize(view: QueueView) -> tuple[str, ...]:
    """Return some lines about a work pool: running runs, free GPUs, limits, drains and problems."""
    limit = "" if view.limit is None else f" of at most {view.limit}"
    listed_nodes = [node for node in view.nodes if not node.is_missing]
    free_gpus = sum(node.free_gpus for node in listed_nodes)
    gpus = sum(node.gpus for node in listed_nodes)
    node_text = "no nodes are known"
    if listed_nodes:
        nodes = format_count(len(listed_nodes), "node")
        node_text = f"{free_gpus} of {gpus} GPUs are free on {nodes}"
    name = f"work pool {view.pool}" if view.pool else "no work pool"
    lines = [
        f"{name}, {view.policy}: {view.running}{limit} running, {len(view.line)} waiting; "
        f"{node_text}"
    ]
    if view.is_paused:
        lines.append("paused: no run starts until you resume the pool")
    if view.paused_queues:
        lines.append(f"paused queues: {join_commas(view.paused_queues)}")
    if view.tags:
        uses = (
            f"{tag} {used} of at most {limit}" for tag, (used, limit) in sorted(view.tags.items())
        )
        lines.append(f"GPUs of runs with a tag: {join_commas(uses)}")
    if drained := [node.name for node in view.nodes if node.is_drained]:
        lines.append(f"drained: {join_commas(drained)}")
    lines += [
        f"{faulty.node} is drained until {format_date_minute(faulty.until)}, because the run "
        f"{faulty.by} failed: {faulty.reason}"
        for faulty in view.faulty
    ]
    return (*lines, *(f"{_PROBLEM} {trouble}" for trouble in view.troubles))


def queue_rows(view: QueueView) -> list[Row]:
    """Return one row for each waiting run.

    The columns `cluster` and `queue` are left out if all rows have the same value. The column
    `tags` is left out if no run has a tag.
    """
    rows = [_make_queue_row(run) for run in view.line]
    return _drop_columns(rows, if_equal=("cluster", "queue"), if_empty="tags")


def node_rows(view: QueueView) -> list[Row]:
    """Return one row for each node, with the runs that hold its GPUs.

    The column `cluster` is left out if all nodes are in the same cluster. The column `CPUs` is left
    out if no node has a known number of CPUs.
    """
    rows = [_make_node_row(node) for node in view.nodes]
    return _drop_columns(rows, if_equal=("cluster",), if_empty="CPUs")


def as_json(view: QueueView) -> str:
    """Return the queue and the nodes as JSON, for programs. Times are UTC epoch seconds."""
    nodes = [{**asdict(node), "free": node.free_gpus} for node in view.nodes]
    for node in nodes:
        # Leave out the internal field `run_ids`, which was only needed to compute `other_holders`.
        del node["run_ids"]
    return json.dumps({**asdict(view), "nodes": nodes}, indent=2, default=dict)


@dataclass(frozen=True, slots=True)
class QueueTables:
    """The output of `muster queue`: the waiting runs and the nodes, for any width of the terminal.

    The reason for waiting is printed below each run. Columns that do not fit into the width are
    printed below the run, too. Run ids are never cut.
    """

    #: The waiting runs and the nodes to print.
    view: QueueView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        headline, *other_lines = summarize(self.view)
        yield line_of(headline, "bold")
        for line in other_lines:
            yield line_of(line, "red" if line.startswith(_PROBLEM) else "yellow")
        yield Text()
        yield from self._print_queue(width)
        if self.view.nodes:
            yield Text()
            yield from self._print_nodes(width)

    def _print_queue(self, width: int) -> Iterator[RenderableType]:
        """Yield the lines of the table of waiting runs."""
        rows = queue_rows(self.view)
        if not rows:
            yield _make_line(_EMPTY, "green")
            return
        reasons = [str(row.pop("reason")) for row in rows]
        columns = _choose_columns(rows, width, until="run")
        header, *lines = _align_columns(rows, columns)
        yield _make_line(header, "bold")
        for row, line, reason in zip(rows, lines, reasons, strict=True):
            yield _make_line(line)
            yield Padding.indent(line_of(reason, "dim"), _REASON_INDENT)
            yield from _print_other_columns(row, columns)

    def _print_nodes(self, width: int) -> Iterator[RenderableType]:
        """Yield the lines of the table of nodes."""
        rows = node_rows(self.view)
        columns = _choose_columns(rows, width, until="node")
        header, *lines = _align_columns(rows, columns)
        yield _make_line(header, "bold")
        for node, row, line in zip(self.view.nodes, rows, lines, strict=True):
            yield _make_line(line, "yellow" if node.is_drained else "")
            yield from _print_other_columns(row, columns)


def _make_queue_row(run: QueuedRun) -> Row:
    """Return the table row of a waiting run."""
    expected_start = "-" if run.starts_at is None else format_date_minute(run.starts_at)
    if run.starts_at is not None and run.is_start_assumed:
        expected_start += " (assumed)"
    return {
        "position": run.number,
        "run": run.name,
        "needs": describe_gang(run.demand),
        "cluster": run.cluster or "-",
        # Put the reason before less important columns, because the Prefect UI cuts off the last
        # columns of a wide table.
        "reason": run.reason,
        "waiting since": format_date_minute(run.waiting_since),
        "expected start": expected_start,
        "queue": run.queue or "-",
        "tags": join_commas(run.tags) or "-",
    }


def _make_node_row(node: ClusterNode) -> Row:
    """Return the table row of a node."""
    holders = [*sorted(node.held.items()), *sorted(node.other_holders.items())]
    name = node.name
    if node.is_drained:
        name += " (drained)"
    if node.is_missing:
        name += " (missing)"
    return {
        "cluster": node.cluster or "-",
        "node": name,
        "GPUs": node.gpus,
        "free": node.free_gpus,
        "others": f"{node.others_gpus:g}",
        "CPUs": "-" if node.cpus is None else f"{node.cpus:g}",
        "held by": join_commas(f"{name}: {gpus:g}" for name, gpus in holders) or "-",
    }


def _drop_columns(rows: list[Row], *, if_equal: Sequence[str], if_empty: str) -> list[Row]:
    """Remove the columns that contain no information, and return the new rows.

    Args:
        rows: The rows.
        if_equal: Columns to remove if all rows have the same value in that column.
        if_empty: Column to remove if all rows have the value "-" in that column.
    """
    dropped = {name for name in if_equal if len({row[name] for row in rows}) < 2}
    if all(row[if_empty] == "-" for row in rows):
        dropped.add(if_empty)
    return [{name: cell for name, cell in row.items() if name not in dropped} for row in rows]


def _choose_columns(rows: Sequence[Row], width: int, *, until: str) -> list[str]:
    """Return the names of the first columns of a table, as many as fit into a width.

    Args:
        rows: The rows of the table.
        width: The width in characters.
        until: Name of a column. This column and the columns before it are always returned.
    """
    columns = list(rows[0])
    min_count = columns.index(until) + 1
    while len(columns) > min_count and max(map(cell_len, _align_columns(rows, columns))) > width:
        columns.pop()
    return columns


def _print_other_columns(row: Row, columns: Sequence[str]) -> Iterator[RenderableType]:
    """Yield a line with those cells of a row that do not fit into the table.

    Args:
        row: The row with all its cells.
        columns: Names of the columns that fit into the table. The line contains only the cells of
            other columns.
    """
    cells = {name: one_line(str(cell)) for name, cell in row.items() if name not in columns}
    if texts := [f"{name} {cell}" for name, cell in cells.items() if cell != "-"]:
        yield Padding.indent(line_of("; ".join(texts), "dim"), _REASON_INDENT)


def _align_columns(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return the lines of a table with aligned columns. The first line has the column names."""
    cells = [columns, *([one_line(str(row[name])) for name in columns] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            _pad(cell, width, is_right_aligned=name in _NUMBERS)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in cells
    ]


def _pad(cell: str, width: int, *, is_right_aligned: bool) -> str:
    space = " " * (width - cell_len(cell))
    return space + cell if is_right_aligned else cell + space


def _make_line(text: str, style: str = "") -> Text:
    """Return a line for the terminal that is never wrapped and never cut."""
    return Text(text, style=style, no_wrap=True, overflow="ignore")


@dataclass(slots=True)
class QueueArtifacts:
    """Writes the two Prefect artifacts of each work pool: the waiting runs and the nodes.

    Only one asyncio task at a time may use an instance.
    """

    #: URL of the Prefect API.
    _api_url: str
    #: Shortest time, in seconds, between two writes of an artifact.
    every_s: float = 2.0
    #: Time, in seconds, between two writes of an unchanged artifact. An unchanged artifact is
    #: written again because another scheduler may have overwritten the artifact.
    renewed_every_s: float = 60.0
    #: Function that returns the current time in seconds, by a monotonic clock.
    clock: Callable[[], float] = time.monotonic
    #: Mapping from pool name to the two artifacts of the work pool.
    _artifacts: dict[str, Artifacts] = field(default_factory=dict)
    #: Mapping from an artifact key to two values: the last written content, without the time in the
    #: headline, and the time of that write (a value of `clock`).
    _written: dict[str, tuple[Shown, float]] = field(default_factory=dict)

    async def show(self, view: QueueView) -> None:
        """Write those artifacts of a work pool whose content has changed.

        An artifact that was written less than `every_s` seconds ago is written by a later call.

        Raises:
            ServerAway: The server did not answer. The next call tries again.
        """
        tables = tables_of(view)
        outdated = {key: table for key, table in tables.items() if self._is_outdated(key, table)}
        if outdated:
            artifacts = self._artifacts.setdefault(view.pool, Artifacts(None, tables))
            await asyncio.to_thread(self._write, artifacts, outdated, view.at)

    def _is_outdated(self, key: str, table: Shown) -> bool:
        """Return True if an artifact must be written now.

        A changed artifact is written at most every `every_s` seconds. An unchanged artifact is
        written every `renewed_every_s` seconds.

        Args:
            key: Key of the artifact.
            table: Present content of the artifact.
        """
        written_table, written_at = self._written.get(key, (None, -math.inf))
        limit_s = self.renewed_every_s if written_table == table else self.every_s
        return self.clock() - written_at >= limit_s

    def _write(self, artifacts: Artifacts, tables: Mapping[str, Shown], at: float) -> None:
        as_of = (
            f"As of {format_datetime(at)}. Muster updates this page after each change, and once "
            "a minute."
        )
        with connect_to_server(self._api_url) as client:
            for key, table in tables.items():
                headline = f"{table.headline}\n\n{as_of}"
                artifacts.show(client, key, replace(table, headline=headline))
                self._written[key] = table, self.clock()


def artifact_keys(pool: str) -> tuple[str, str]:
    """Return the keys of the two artifacts of a work pool.

    The first artifact shows the waiting runs, and the second artifact shows the nodes.

    The keys of the pool `gang` are `gang-queue` and `gang-nodes`. The keys of another pool begin
    with the name of the pool.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", pool.lower()).strip("-")
    prefix = "" if pool in ("", "gang") else f"{slug}-"
    if prefix and slug != pool:
        # Only lower-case letters, digits and hyphens are allowed in a key. Because of the digest,
        # pools such as `a b` and `a/b` get different keys.
        prefix = f"{slug}-{sha256(pool.encode()).hexdigest()[:6]}-".lstrip("-")
    return f"{prefix}gang-queue", f"{prefix}gang-nodes"


def tables_of(view: QueueView) -> dict[str, Shown]:
    """Return the contents of a work pool's two artifacts: the waiting runs, and the nodes.

    The keys of the result are the keys of the artifacts.
    """
    queue_key, nodes_key = artifact_keys(view.pool)
    return {
        queue_key: _make_table(view, queue_rows(view), "waiting runs"),
        nodes_key: _make_table(view, node_rows(view), "nodes"),
    }


def _make_table(view: QueueView, rows: Sequence[Row], row_name: str) -> Shown:
    """Return the content of an artifact: a summary of the work pool, and a table.

    Args:
        view: The queue and the nodes of the work pool.
        rows: The rows of the table. Only the first 200 rows are used.
        row_name: Name of the rows in the plural, for example `nodes`.
    """
    lines = [f"- {escape_markdown(line)}" for line in summarize(view)]
    if len(rows) > ROWS_AT_MOST:
        lines.append(f"- This table has only the first {ROWS_AT_MOST} of {len(rows)} {row_name}.")
    cells = [{name: escape_cell(cell) for name, cell in row.items()} for row in rows[:ROWS_AT_MOST]]
    return Shown(type="table", headline="\n".join(lines), data=json.dumps(cells))


async def explain(
    client: PrefectClient,
    flow_run_id: str,
    pool: str,
    read_view: Callable[[str], Awaitable[QueueView]],
) -> str:
    """Return the output of `muster why`: why a run waits, or its state and its GPUs.

    Args:
        client: Client of the Prefect server.
        flow_run_id: Id of the flow run.
        pool: Name of the work pool whose queue is read if the run was started without a worker.
        read_view: Function that reads the queue and the nodes of the work pool with the given name.

    Raises:
        MissingFromServer: The server has no such flow run.
    """
    try:
        flow_run = await client.read_flow_run(UUID(flow_run_id))
    except ObjectNotFound:
        raise MissingFromServer(
            f"the Prefect server has no flow run with the id {flow_run_id}"
        ) from None
    view = await read_view(flow_run.work_pool_name or pool)
    lines = describe_run(flow_run, view)
    if warning := await _warn_of_silent_worker(client, flow_run, view.at):
        lines.append(_format_field("host", warning))
    return "\n".join(lines)


async def _warn_of_silent_worker(client: PrefectClient, flow_run: FlowRun, now: float) -> str:
    """Return a warning if the worker of an active run sends no heartbeats to the server.

    Args:
        client: Client of the Prefect server.
        flow_run: The flow run.
        now: Current time in UTC epoch seconds.

    Returns:
        The warning. Empty if the worker sends heartbeats, or if the run has no process.
    """
    pool = flow_run.work_pool_name
    name = find_worker(flow_run)
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
        f"the run's worker {name} last reported {format_minutes(silent_s)} ago; if its host is "
        f"permanently lost, run: muster reconcile --lost-host {name}"
    )


def describe_run(flow_run: FlowRun, view: QueueView) -> list[str]:
    """Return some lines about a flow run: its position and reason, or its state and its GPUs.

    Args:
        flow_run: The flow run.
        view: The queue and the nodes of the run's work pool.
    """
    problems = [*view.troubles]
    queued = next((run for run in view.line if run.flow_run_id == str(flow_run.id)), None)
    if queued is not None:
        problems = [text for text in problems if not is_part_of_reason(text, queued.reason)]
        lines = [
            f"The run {queued.name} waits at position {queued.number} of {len(view.line)} in the "
            "queue."
        ]
        fields = {name: str(cell) for name, cell in _make_queue_row(queued).items() if cell != "-"}
        del fields["position"]
        del fields["run"]
    else:
        uses_no_nodes = state_of(flow_run).is_running() and grant_of(flow_run) is None
        if state_of(flow_run).is_final() or uses_no_nodes:
            # Problems of the queue and of the nodes concern only runs that wait for GPUs or use
            # GPUs. This run has ended, or it runs without GPUs.
            problems = []
        lines = [f"{flow_run.name} {_describe_state(flow_run, view.at)}."]
        fields = {
            "holds": _describe_held_nodes(flow_run, view),
            "message": (state_of(flow_run).message or "").replace("\n", f"\n{_FIELD_INDENT}"),
        }
    lines += [_format_field(name, text) for name, text in fields.items() if text]
    return lines + [_format_field("problem", problem) for problem in problems]


def _describe_state(flow_run: FlowRun, now: float) -> str:
    """Return a text about the state of a flow run that is not in the queue.

    Args:
        flow_run: The flow run.
        now: Current time in UTC epoch seconds.
    """
    state = state_of(flow_run)
    due = flow_run.next_scheduled_start_time
    if state.is_scheduled() and due is not None and due.timestamp() > now + _SOON_S:
        return f"is scheduled to start at {format_date_minute(due.timestamp())}"
    return f"has been {state.name} since {format_date_minute(state.timestamp.timestamp())}"


def _describe_held_nodes(flow_run: FlowRun, view: QueueView) -> str:
    """Return a text with the nodes on which a flow run holds GPUs, or "" if it holds no GPUs."""
    # The keys of a node's field `held` are run ids. The name of a flow run is usually its run id,
    # but a new flow run may still have a random name from Prefect. So search for the name and for
    # the run id.
    names = {flow_run.name, parse_request(flow_run).name}
    return join_commas(
        f"{node.name} ({format_count(node.held[name], 'GPU')})"
        for node in view.nodes
        for name in sorted(names & node.held.keys())
    )


def _format_field(name: str, text: str) -> str:
    """Return a line of the output of `muster why`: the name of a field and its text."""
    return f"  {name:<{_NAME_WIDTH}} {text}"
