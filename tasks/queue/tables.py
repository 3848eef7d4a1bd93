"""The queue as rows: those of the artifacts, and the tables of a terminal, plain or rich."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tasks.queue.demand import Demand
from tasks.queue.reasons import SOON, clock, is_soon, lasting, when
from tasks.queue.view import NodeUse, QueuedRun, QueueView

#: A table of rows, a column each key.
Rows = Sequence[Mapping[str, object]]

#: Their cells stand to the right.
_NUMBERS = ("place", "GPUs", "free", "others", "CPUs")
_EMPTY = "No run waits."
_TROUBLE = "trouble:"
#: Of a reason below its run: the width of the first column and the gap after it.
_INDENT = 7


def summary_of(view: QueueView) -> tuple[str, ...]:
    """The state of the pool, a line each thing to say."""
    limit = "" if view.limit is None else f" of at most {view.limit}"
    free = sum(node.free for node in view.nodes)
    gpus = sum(node.gpus for node in view.nodes)
    nodes = "1 node" if len(view.nodes) == 1 else f"{len(view.nodes)} nodes"
    there = f"{free} of {gpus} GPUs are free on {nodes}" if view.nodes else "no node is seen"
    name = f"work pool {view.pool}" if view.pool else "no work pool"
    lines = [
        f"{name}, {view.policy}: {view.running}{limit} running, {len(view.line)} waiting; {there}"
    ]
    if view.is_paused:
        lines.append("paused: no run starts until the pool is resumed")
    if view.paused_queues:
        lines.append(f"paused queues: {', '.join(view.paused_queues)}")
    if view.tags:
        used = (f"{tag} {has} of {most} GPUs" for tag, (has, most) in sorted(view.tags.items()))
        lines.append(f"tags: {', '.join(used)}")
    if drained := [node.name for node in view.nodes if node.is_drained]:
        lines.append(f"drained: {', '.join(drained)}")
    return (*lines, *(f"{_TROUBLE} {trouble}" for trouble in view.troubles))


def queue_rows(view: QueueView, *, for_a_look: bool = False) -> list[dict[str, object]]:
    """The line, a row each run; a column whose cells would all be the same may be left out.

    Args:
        for_a_look: As it is now: with the time that each has waited, which changes all the time.
    """
    columns = _Columns(
        cluster=len({run.cluster for run in view.line}) > 1,
        queue=len({run.queue for run in view.line}) > 1,
        tags=any(run.tags for run in view.line),
    )
    return [_queue_row(run, columns, view.at, for_a_look) for run in view.line]


def node_rows(view: QueueView) -> list[dict[str, object]]:
    """The nodes, a row each, with who holds what."""
    several = len({node.cluster for node in view.nodes}) > 1
    counts_cpus = any(node.cpus is not None for node in view.nodes)
    return [_node_row(node, several, counts_cpus) for node in view.nodes]


def asks_shortly(demand: Demand | None) -> str:
    """`2 x 8 GPUs`: nodes, and GPUs on each."""
    if demand is None:
        return "no GPUs"
    if demand.nodes == 1:
        return "1 GPU" if demand.gpus == 1 else f"{demand.gpus} GPUs"
    return f"{demand.nodes} x {demand.gpus_per_node} GPU{'s' if demand.gpus_per_node > 1 else ''}"


def as_json(view: QueueView) -> str:
    """The whole look, for programs; times are UTC epoch seconds."""
    return json.dumps(asdict(view), indent=2, default=dict)


def as_plain(view: QueueView) -> str:
    """For a file or a pipe: no colours, no wrapped lines."""
    queue, nodes = queue_rows(view, for_a_look=True), node_rows(view)
    parts = ["\n".join(summary_of(view))]
    parts.append("\n".join(_aligned(queue)) if queue else _EMPTY)
    if nodes:
        parts.append("\n".join(_aligned(nodes)))
    return "\n\n".join(parts)


def as_rich(view: QueueView, at_most: int | None = None) -> RenderableType:
    """For a terminal, be it narrow: each reason stands below its run.

    Args:
        at_most: So many runs are shown, and how many more there are.
    """
    first, *others = summary_of(view)
    parts: list[RenderableType] = [Text(first, style="bold")]
    for line in others:
        parts.append(Text(line, style="red" if line.startswith(_TROUBLE) else "yellow"))
    parts.append(Text())
    rows = queue_rows(view, for_a_look=True)
    reasons = [str(row.pop("reason")) for row in rows]
    head, *lines = _aligned(rows) or [_EMPTY]
    parts.append(_line(head, "bold" if lines else "green"))
    for line, reason in list(zip(lines, reasons, strict=True))[:at_most]:
        parts += [_line(line), Padding(Text(reason, style="dim"), (0, 0, 0, _INDENT))]
    if at_most is not None and len(lines) > at_most:
        parts.append(_line(f"and {len(lines) - at_most} more", "dim"))
    if view.nodes:
        head, *lines = _aligned(node_rows(view))
        parts += [Text(), _line(head, "bold")]
        for node, line in zip(view.nodes, lines, strict=True):
            parts.append(_line(line, "yellow" if node.is_drained else ""))
    return Group(*parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Which of the columns that may be left out are there."""

    cluster: bool
    queue: bool
    tags: bool


def _queue_row(
    run: QueuedRun, columns: _Columns, now: float, for_a_look: bool
) -> dict[str, object]:
    row: dict[str, object] = {
        "place": run.number,
        "run": run.name,
        "asks": asks_shortly(run.demand),
    }
    if columns.cluster:
        row["cluster"] = run.cluster or "-"
    starts_at = run.starts_at
    expected = "-" if starts_at is None else SOON if is_soon(starts_at, now) else ""
    if not for_a_look:
        # Of a table that is cut to the width of a page, the last columns are the ones not seen.
        row["reason"] = run.reason
    if for_a_look:
        row["since (UTC)"] = clock(run.waiting_since, now)
        row["for"] = lasting(now - run.waiting_since)
        row["expected (UTC)"] = expected or clock(starts_at or now, now)
    else:
        row["waiting since"] = when(run.waiting_since)
        row["expected start"] = expected or when(starts_at or now)
    if columns.queue:
        row["queue"] = run.queue or "-"
    if columns.tags:
        row["tags"] = ", ".join(run.tags) or "-"
    return row | {"reason": run.reason}


def _node_row(node: NodeUse, several: bool, counts_cpus: bool) -> dict[str, object]:
    return {
        **({"cluster": node.cluster or "-"} if several else {}),
        "node": f"{node.name} (drained)" if node.is_drained else node.name,
        "GPUs": node.gpus,
        "free": node.free,
        "others": f"{node.others:g}",
        **({"CPUs": "-" if node.cpus is None else f"{node.cpus:g}"} if counts_cpus else {}),
        "held by": ", ".join(f"{run}: {gpus}" for run, gpus in sorted(node.held.items())) or "-",
    }


def _aligned(rows: Rows) -> list[str]:
    """The table as lines, its head first; none where there is no row."""
    if not rows:
        return []
    columns = list(rows[0])
    cells = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in cells
    ]


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
