"""The jobs of a cluster's trace, from a CSV file.

Columns: `job_id,submit_s,duration_s,gpus,nodes,gpus_per_node`, others are passed over. An empty
cell is unknown: without `nodes` or `gpus_per_node` a job spans as few nodes as its GPUs need, an
even share on each.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.queue.packing import Demand

#: A trace has no job of no length; some were too short for its clock.
_SHORTEST_S = 1.0
_NEEDED = ("job_id", "submit_s", "duration_s")
_SHAPE = ("gpus", "nodes", "gpus_per_node")


class BadTrace(Exception):
    """The file is no trace; the message says where and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job, as it was submitted and ran."""

    id: str
    #: From the beginning of the trace (s).
    submit_s: float
    duration_s: float
    demand: Demand


def read_trace(path: Path, *, gpus_per_node: int, compress: float = 1.0) -> list[Job]:
    """The jobs in order of submission; those of one instant as they stand in the file.

    Args:
        gpus_per_node: of the cluster, for jobs whose own is unknown.
        compress: the times of submission are divided by this.

    Raises: BadTrace.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as f:
            reader = csv.DictReader(f)
            _check_columns(path, reader.fieldnames or ())
            jobs = []
            for row in reader:
                at = f"{path}, line {reader.line_num}"
                jobs.append(_job(row, at, gpus_per_node, compress))
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadTrace(f"{path} is no CSV file: {error}") from error
    if not jobs:
        raise BadTrace(f"{path} has no jobs")
    ids = [job.id for job in jobs]
    if len(set(ids)) < len(ids):
        double = next(id for number, id in enumerate(ids) if id in ids[:number])
        raise BadTrace(f"{path}: job_id {double!r} stands there more than once")
    return sorted(jobs, key=lambda job: job.submit_s)


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    missing = [name for name in _NEEDED if name not in columns]
    if "gpus" not in columns and not {"nodes", "gpus_per_node"} <= set(columns):
        missing.append("gpus, or nodes and gpus_per_node")
    if missing:
        there = ", ".join(columns) or "none"
        raise BadTrace(f"{path}: missing columns: {', '.join(missing)}; there are: {there}")


def _job(row: Mapping[str, str | None], at: str, gpus_per_node: int, compress: float) -> Job:
    cells = {name: (row.get(name) or "").strip() for name in (*_NEEDED, *_SHAPE)}
    for name in _NEEDED:
        if not cells[name]:
            raise BadTrace(f"{at}: {name} is empty; a job without it can't be replayed")
    nodes, per_node = _shape(cells, at, gpus_per_node)
    return Job(
        id=cells["job_id"],
        submit_s=_number(cells, "submit_s", at) / compress,
        duration_s=max(_SHORTEST_S, _number(cells, "duration_s", at)),
        demand=Demand(nodes=nodes, gpus_per_node=per_node, cpus_per_gpu=0),
    )


def _shape(cells: Mapping[str, str], at: str, of_cluster: int) -> tuple[int, int]:
    gpus, nodes, per_node = (_count(cells, name, at) for name in _SHAPE)
    if nodes is not None and per_node is not None:
        return nodes, per_node
    if gpus is None:
        raise BadTrace(f"{at}: gpus is empty, and so is nodes or gpus_per_node")
    if nodes is None:
        nodes = math.ceil(gpus / (per_node or of_cluster))
    return nodes, per_node or math.ceil(gpus / nodes)


def _number(cells: Mapping[str, str], name: str, at: str) -> float:
    try:
        number = float(cells[name])
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise BadTrace(f"{at}: {name} is {cells[name]!r}, no number from 0 on")
    return number


def _count(cells: Mapping[str, str], name: str, at: str) -> int | None:
    if not cells[name]:
        return None
    number = _number(cells, name, at)
    if number < 1 or number != int(number):
        raise BadTrace(f"{at}: {name} is {cells[name]!r}, no whole number from 1 on")
    return int(number)
