"""Benchmark of the sweep and the preflight on all nodes of a Ray cluster.

The other way is a script with plain Ray tasks that call the same functions on the same nodes. The
script supervises no child process, and does not end if a node hangs. All nodes run on this machine,
so the time grows with the number of nodes also because they share its cores. If Muster's agents on
the nodes have died, Muster also uses plain Ray tasks, and starts new agents.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.benchmarks.report import Result, Row, interleaved, say
from tests.support.ray_cluster import RAY_ENV, RayCluster

_COUNTS, _QUICK_COUNTS = (2, 4, 8), (1,)
_ROUNDS, _QUICK_ROUNDS = 5, 1
_LIMIT_S = 180.0
_RUN_ID = "benchmark-of-nodes"


def measure(*, quick: bool) -> Result:
    """Measure two operations on all nodes of Ray clusters of different sizes.

    A sweep searches a node for leftover processes. A preflight checks a node before a run.
    """
    rows: list[Row] = []
    os.environ.update(RAY_ENV)
    with (
        RayCluster.run(nodes=0) as cluster,
        tempfile.TemporaryDirectory(prefix="muster-bench-") as shared,
    ):
        os.environ["MUSTER_HOME"] = shared
        for count in _QUICK_COUNTS if quick else _COUNTS:
            while len(cluster.nodes) < count:
                cluster.add_node()
            say(f"  {count} nodes and the head")
            # The first search for leftover processes is not measured, because it starts Muster's
            # agents on the nodes. In production, the upkeep process starts the agents.
            _sweep(cluster)
            values = interleaved(
                {
                    "sweep": lambda: _took_ms(lambda: _sweep(cluster)),
                    "plain sweep": lambda: _took_ms(lambda: _plain("sweep", cluster, shared)),
                    "preflight": lambda: _took_ms(lambda: _preflight(cluster, shared)),
                    "plain preflight": lambda: _took_ms(lambda: _plain("look", cluster, shared)),
                    "mended sweep": lambda: _without_agents(cluster),
                },
                _QUICK_ROUNDS if quick else _ROUNDS,
            )
            for task in ("sweep", "preflight"):
                group = f"{task} {count}"
                rows += [
                    Row(way=f"Muster, {task}, {count} nodes", values=values[task], group=group),
                    Row(
                        way=f"plain Ray tasks, {task}, {count} nodes",
                        values=values[f"plain {task}"],
                        group=group,
                        how="modelled",
                    ),
                ]
            rows.append(
                Row(
                    way=f"Muster, its agents dead, sweep, {count} nodes",
                    values=values["mended sweep"],
                    group=f"sweep {count}",
                )
            )
    return Result(
        name="nodes",
        question="Duration of two operations on all nodes of a Ray cluster, from the call to the "
        "answer: a sweep, which ends leftover processes of a run, and a preflight, which checks "
        "whether the nodes are fit",
        rows=rows,
    )


def _took_ms(call: Callable[[], None]) -> float:
    """Call a function, and return its duration in milliseconds."""
    began = time.monotonic()
    call()
    return 1000 * (time.monotonic() - began)


def _without_agents(cluster: RayCluster) -> float:
    """Kill Muster's agents on all nodes, and measure a search for leftover processes.

    Returns:
        The duration of the search in milliseconds.
    """
    for pid in cluster.pids():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::NodeAgent"):
                os.kill(pid, signal.SIGKILL)
    return _took_ms(lambda: _sweep(cluster))


def _sweep(cluster: RayCluster) -> None:
    from tasks.ray.nodes import sweep

    report = asyncio.run(sweep(cluster.gcs_address, run_id=_RUN_ID, within_s=_LIMIT_S))
    assert report.is_clean, report


def _preflight(cluster: RayCluster, shared: str) -> None:
    from tasks.upkeep.preflight import survey_cluster

    survey = survey_cluster.fn(cluster.address, shared, _LIMIT_S)
    assert not any(node.unreached for node in survey.nodes), survey


def _plain(task: str, cluster: RayCluster, shared: str) -> None:
    """Search or check all nodes with plain Ray tasks, without Muster.

    A new process calls the function `plain`. The docstring of `plain` describes the
    arguments `task` and `shared`.
    """
    subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.nodes", task, cluster.gcs_address, shared],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
        timeout=_LIMIT_S,
    )


def plain(task: str, gcs_address: str, shared: str) -> None:
    """Search or check all nodes with plain Ray tasks.

    Args:
        task: "sweep" to search the nodes for leftover processes. Any other text, such as "look", to
            check whether the nodes are fit for a run.
        gcs_address: Address of Ray's control store.
        shared: Directory that all nodes share.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tasks.processes.ending import end_carriers
    from tasks.processes.machine import find_unreadable_files, gather_facts

    ray.init(gcs_address, log_to_driver=False, logging_level=40)
    options = {
        node["NodeID"]: {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        }
        for node in ray.nodes()
        if node["Alive"]
    }
    if task == "sweep":
        variables = {"MUSTER_RUN_ID": _RUN_ID}
        ray.get([ray.remote(**o)(end_carriers).remote(variables) for o in options.values()])
        return
    folder = Path(shared) / ".plain"
    folder.mkdir(exist_ok=True)
    node_checks = [
        ray.remote(**o)(gather_facts).remote(shared, str(folder), node, shared)
        for node, o in options.items()
    ]
    ray.get(node_checks)
    comparisons = [
        ray.remote(**o)(find_unreadable_files).remote(str(folder), list(options))
        for o in options.values()
    ]
    ray.get(comparisons)


if __name__ == "__main__":
    plain(*sys.argv[1:])
