"""What is done on every node of a Ray cluster, by the number of nodes.

The other way is a script with plain Ray tasks, pinned to the same nodes, that call the same
functions: no child process to supervise, no answer where a node hangs. All nodes are on this
machine, so that what grows with their number is also the work of its few cores. Where the agents of
the nodes have died, Muster does as the script, and puts them back.
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
    rows: list[Row] = []
    os.environ.update(RAY_ENV)
    with (
        RayCluster.started(nodes=0) as cluster,
        tempfile.TemporaryDirectory(prefix="muster-bench-") as shared,
    ):
        os.environ["MUSTER_HOME"] = shared
        for count in _QUICK_COUNTS if quick else _COUNTS:
            while len(cluster.nodes) < count:
                cluster.add_node()
            say(f"  {count} nodes and the head")
            # Before the first end of a job they are there: the upkeep has seen to it.
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
            for what in ("sweep", "preflight"):
                group = f"{what} {count}"
                rows += [
                    Row(way=f"Muster, {what}, {count} nodes", values=values[what], group=group),
                    Row(
                        way=f"plain Ray tasks, {what}, {count} nodes",
                        values=values[f"plain {what}"],
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
        question="a sweep and a preflight of every node, from the call to the answer",
        rows=rows,
    )


def _took_ms(do: Callable[[], None]) -> float:
    began = time.monotonic()
    do()
    return 1000 * (time.monotonic() - began)


def _without_agents(cluster: RayCluster) -> float:
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


def _plain(what: str, cluster: RayCluster, shared: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.nodes", what, cluster.gcs_address, shared],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
        timeout=_LIMIT_S,
    )


def plain(what: str, gcs_address: str, shared: str) -> None:
    """The same with Ray alone."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tasks.processes.ending import end_carriers
    from tasks.processes.machine import look, names_unseen

    ray.init(gcs_address, log_to_driver=False, logging_level=40)
    options = {
        node["NodeID"]: {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        }
        for node in ray.nodes()
        if node["Alive"]
    }
    if what == "sweep":
        wanted = {"MUSTER_RUN_ID": _RUN_ID}
        ray.get([ray.remote(**o)(end_carriers).remote(wanted) for o in options.values()])
        return
    folder = Path(shared) / ".plain"
    folder.mkdir(exist_ok=True)
    looked = [
        ray.remote(**o)(look).remote(shared, str(folder), node, shared)
        for node, o in options.items()
    ]
    ray.get(looked)
    compare = [
        ray.remote(**o)(names_unseen).remote(str(folder), list(options)) for o in options.values()
    ]
    ray.get(compare)


if __name__ == "__main__":
    plain(*sys.argv[1:])
