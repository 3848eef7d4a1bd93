"""The queue as tables: their content, and when they change."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from tasks.queue.packing import Demand
from tasks.queue.scheduling_pass import QueuedRun, QueueView
from tasks.queue.settings import FaultyNode
from tasks.queue.tables import (
    QueueTables,
    as_json,
    node_rows,
    queue_rows,
    summarize,
)
from tasks.ray.usage import ClusterNode
from tasks.show.output import SafeConsole

NOW = datetime(2026, 1, 2, 13, 5, 30, tzinfo=UTC).timestamp()


def demand(nodes: int, gpus: int) -> Demand:
    return Demand(nodes=nodes, gpus_per_node=gpus, cpus_per_gpu=3)


def queued(number: int = 1, **more: Any) -> QueuedRun:
    fields: dict[str, Any] = {
        "number": number,
        "flow_run_id": f"id-{number}",
        "name": f"run-{number}",
        "demand": demand(2, 8),
        "cluster": "",
        "queue": "default",
        "waiting_since": NOW - 1230,
        "reason": "waits behind run-1, which is first in the queue",
        **more,
    }
    return QueuedRun(**fields)


def node(name: str, **more: Any) -> ClusterNode:
    return ClusterNode(**{"name": name, "gpus": 8, **more})


def view(*line: QueuedRun, nodes: tuple[ClusterNode, ...] = (), **more: Any) -> QueueView:
    fields: dict[str, Any] = {
        "at": NOW,
        "pool": "gang",
        "policy": "fifo",
        "is_paused": False,
        "limit": 8,
        "running": 2,
        **more,
    }
    return QueueView(line=line, nodes=nodes, **fields)


BUSY = view(
    queued(1, reason="waits for run-0 to end", starts_at=NOW + 4500, tags=("red",)),
    queued(2, demand=demand(1, 4), queue="low", waiting_since=NOW - 86400),
    nodes=(
        node("gpu-1", held={"run-0": 8}, cpus=32.0),
        node("gpu-2", held={"run-9": 3}, others_gpus=2.0),
        node("gpu-3", is_drained=True),
    ),
    tags={"team-a": (8, 16)},
    faulty=(FaultyNode(node="gpu-3", reason="two runs failed", by="run-7", until=NOW + 3600),),
    troubles=("http://ray:8265 does not answer",),
)

PLAIN = """\
work pool gang, fifo: 2 of at most 8 running, 2 waiting; 3 of 24 GPUs are free on 3 nodes
GPUs of runs with a tag: team-a 8 of at most 16
drained: gpu-3
gpu-3 is drained until 2026-01-02 14:05 UTC, because the run run-7 failed: two runs failed
problem: http://ray:8265 does not answer

position  run    needs                     waiting since         expected start        queue    tags
       1  run-1  2 nodes with 8 GPUs each  2026-01-02 12:45 UTC  2026-01-02 14:20 UTC  default  red
          waits for run-0 to end
       2  run-2  1 node with 4 GPUs        2026-01-01 13:05 UTC  -                     low      -
          waits behind run-1, which is first in the queue

node             GPUs  free  others  CPUs  held by
gpu-1               8     0       0    32  run-0: 8
gpu-2               8     3       2     -  run-9: 3
gpu-3 (drained)     8     0       0     -  -"""


def printed(view: QueueView, **console: Any) -> str:
    out = io.StringIO()
    Console(file=out, **console).print(QueueTables(view), crop=False)
    return out.getvalue()


def test_plain_text_has_aligned_columns() -> None:
    assert printed(BUSY, width=10_000) == f"{PLAIN}\n"


def test_empty_queue_is_shown() -> None:
    assert printed(view()).splitlines() == [
        "work pool gang, fifo: 2 of at most 8 running, 0 waiting; no nodes are known",
        "",
        "No run waits.",
    ]


@pytest.mark.parametrize("width", [80, 200])
def test_terminal_shows_each_reason_below_its_run(width: int) -> None:
    shown = [line.rstrip() for line in printed(BUSY, width=width).splitlines()]

    runs = [
        i for i, line in enumerate(shown) if line.startswith(("       1  run-1", "       2  run-2"))
    ]
    assert [shown[i + 1].strip() for i in runs] == [run.reason for run in BUSY.line]
    assert max(map(len, shown)) <= width
    assert "gpu-2               8     3       2     -  run-9: 3" in shown


@pytest.mark.parametrize("width", [20, 40, 80])
def test_narrow_terminal_shows_every_cell_and_whole_run_ids(width: int) -> None:
    run_id = "quickstart-grpo-20260102-130530-0a1b2c3d-of-the-team"
    run = queued(7, name=run_id, reason="[/x] [red] \x1b[2J", queue="low", tags=("team-a",))
    large_node = node("node-17.cluster", held={run_id: 8}, cpus=32.0)
    out = io.StringIO()
    console = SafeConsole(file=out, width=width, color_system=None)

    console.print(QueueTables(view(queued(1), run, nodes=(large_node,))), crop=False)

    lines = out.getvalue().splitlines()
    words = "".join(out.getvalue().split())
    assert any(run_id in line for line in lines)
    for cell in ("2026-01-0212:45UTC", "queuelow", "tagsteam-a", "[/x][red]", f"{run_id}:8"):
        assert cell in words, cell
    assert "\x1b" not in out.getvalue()


def test_only_terminals_get_colours() -> None:
    assert "\x1b" not in printed(BUSY)
    assert "\x1b" in printed(BUSY, force_terminal=True, color_system="standard")


def test_artifact_rows_do_not_change_with_time() -> None:
    assert queue_rows(BUSY) == queue_rows(replace(BUSY, at=NOW + 1))


def test_row_of_a_run_has_position_demand_and_reason() -> None:
    first = queue_rows(BUSY)[0]

    assert first == {
        "position": 1,
        "run": "run-1",
        "needs": "2 nodes with 8 GPUs each",
        "waiting since": "2026-01-02 12:45 UTC",
        "expected start": "2026-01-02 14:20 UTC",
        "queue": "default",
        "tags": "red",
        "reason": "waits for run-0 to end",
    }


def test_columns_with_equal_values_are_left_out() -> None:
    alike = view(queued(1), queued(2), nodes=(node("a"), node("b")))
    apart = view(
        queued(1, cluster="http://a"), queued(2, queue="", cluster="http://b"), nodes=alike.nodes
    )

    assert not {"cluster", "queue", "tags"} & queue_rows(alike)[0].keys()
    assert {"cluster", "queue"} <= queue_rows(apart)[1].keys()
    assert queue_rows(apart)[1]["queue"] == "-"
    assert not {"cluster", "CPUs"} & node_rows(alike)[0].keys()


def test_missing_node_is_listed_with_its_holders_and_is_not_counted() -> None:
    missing = node("gone", gpus=2, held={"run-0": 2}, is_missing=True)
    both = view(nodes=(node("a"), missing))

    assert summarize(both)[0].endswith("; 8 of 8 GPUs are free on 1 node")
    assert [(row["node"], row["held by"]) for row in node_rows(both)] == [
        ("a", "-"),
        ("gone (missing)", "run-0: 2"),
    ]
    assert summarize(view(nodes=(missing,)))[0].endswith("no nodes are known")


def test_nodes_of_several_clusters_name_their_cluster() -> None:
    both = view(nodes=(node("a"), node("a", cluster="http://ray:8265")))

    assert [row["cluster"] for row in node_rows(both)] == ["-", "http://ray:8265"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"limit": None}, "work pool gang, fifo: 2 running, 0 waiting; no nodes are known"),
        ({"pool": ""}, "no work pool, fifo: 2 of at most 8 running, 0 waiting; no nodes are known"),
        ({"is_paused": True}, "paused: no run starts until you resume the pool"),
        ({"paused_queues": ("high", "low")}, "paused queues: high, low"),
        (
            {"tags": {"b": (0, 4), "a": (8, 8)}},
            "GPUs of runs with a tag: a 8 of at most 8, b 0 of at most 4",
        ),
        ({"troubles": ("it rains",)}, "problem: it rains"),
    ],
)
def test_summary_describes_the_pool(changes: dict[str, Any], expected: str) -> None:
    assert summarize(view(**changes))[-1] == expected


def test_json_contains_the_whole_view() -> None:
    read = json.loads(as_json(BUSY))

    assert read["line"][0]["demand"] == {"nodes": 2, "gpus_per_node": 8, "cpus_per_gpu": 3}
    assert read["line"][0]["starts_at"] == NOW + 4500
    assert read["nodes"][1]["held"] == {"run-9": 3}
    assert read["tags"] == {"team-a": [8, 16]}


def test_assumed_start_is_marked_in_the_table() -> None:
    [known, assumed] = queue_rows(
        view(
            queued(1, starts_at=NOW + 4500),
            queued(2, starts_at=NOW + 4500, is_start_assumed=True),
        )
    )

    assert assumed["expected start"] == f"{known['expected start']} (assumed)"
