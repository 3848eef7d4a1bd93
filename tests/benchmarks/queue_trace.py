"""Read the jobs of a cluster's trace from a CSV file.

The file has the columns `job_id,submit_s,duration_s,gpus,nodes,gpus_per_node`. Other columns are
ignored. An empty cell means that the value is unknown. If `nodes` or `gpus_per_node` is unknown, a
job uses the smallest number of nodes that have its GPUs. Each node then has the same number.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.queue.packing import Demand

#: Shortest duration of a job, in seconds. A trace may record the duration 0 for a very short job.
_SHORTEST_S = 1.0
_NEEDED = ("job_id", "submit_s", "duration_s")
_SHAPE = ("gpus", "nodes", "gpus_per_node")


class BadTrace(Exception):
    """The file does not contain a valid trace of jobs. The message names the line and the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of a trace: a list of the jobs that the users of a real cluster submitted."""

    #: Value of the column `job_id`.
    id: str
    #: Time of the submission, in seconds from the beginning of the trace.
    submit_s: float
    #: Duration of the job, in seconds.
    duration_s: float
    #: Number of nodes and of GPUs that the job requests.
    demand: Demand


def read_trace(path: Path, *, gpus_per_node: int, compress: float = 1.0) -> list[Job]:
    """Read a trace, and return its jobs in the order of submission.

    Jobs with the same time of submission keep the order of the file.

    Args:
        path: CSV file with the trace.
        gpus_per_node: Number of GPUs on each node of the cluster. This number is used for rows
            without values in the columns `nodes` and `gpus_per_node`.
        compress: Divisor of the times of submission. A larger number makes the cluster busier.

    Raises:
        BadTrace: The file cannot be read or is not a trace.
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
        duplicate = next(id for number, id in enumerate(ids) if id in ids[:number])
        raise BadTrace(f"{path}: job_id {duplicate!r} occurs more than once")
    return sorted(jobs, key=lambda job: job.submit_s)


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    """Raise `BadTrace` if the file lacks a column."""
    missing = [name for name in _NEEDED if name not in columns]
    if "gpus" not in columns and not {"nodes", "gpus_per_node"} <= set(columns):
        missing.append("gpus, or nodes and gpus_per_node")
    if missing:
        present = ", ".join(columns) or "none"
        raise BadTrace(f"{path}: missing columns: {', '.join(missing)}; there are: {present}")


def _job(row: Mapping[str, str | None], at: str, gpus_per_node: int, compress: float) -> Job:
    """Return the job that one row of a CSV trace describes.

    Args:
        row: Mapping from the name of a column to the cell in this row.
        at: File and line of the row, for error messages.
        gpus_per_node: GPUs of each node of the cluster.
        compress: Divisor of the time of submission.
    """
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


def _shape(cells: Mapping[str, str], at: str, gpus_per_cluster_node: int) -> tuple[int, int]:
    """Return the number of nodes of a job, and the number of GPUs on each node.

    Args:
        cells: Mapping from the name of a column to the cell in the job's row.
        at: File and line of the row, for error messages.
        gpus_per_cluster_node: GPUs of each node of the cluster. If the row does not contain the
            number of nodes, this function computes the number of nodes from this argument.
    """
    gpus, nodes, per_node = (_count(cells, name, at) for name in _SHAPE)
    if nodes is not None and per_node is not None:
        return nodes, per_node
    if gpus is None:
        raise BadTrace(f"{at}: gpus is empty, and so is nodes or gpus_per_node")
    if nodes is None:
        nodes = math.ceil(gpus / (per_node or gpus_per_cluster_node))
    return nodes, per_node or math.ceil(gpus / nodes)


def _number(cells: Mapping[str, str], name: str, at: str) -> float:
    """Return the number in a cell. The number must not be negative."""
    try:
        number = float(cells[name])
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise BadTrace(f"{at}: {name} is {cells[name]!r}, no number from 0 on")
    return number


def _count(cells: Mapping[str, str], name: str, at: str) -> int | None:
    """Return the positive whole number in a cell, or None if the cell is empty."""
    if not cells[name]:
        return None
    number = _number(cells, name, at)
    if number < 1 or number != int(number):
        raise BadTrace(f"{at}: {name} is {cells[name]!r}, no whole number from 1 on")
    return int(number)
