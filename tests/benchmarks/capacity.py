"""Benchmark of reading the resources of a Ray cluster and their users.

Each way is measured in its own process: the first answer, which includes the imports, and then many
further answers. The ways are:

- Muster;
- a connected Ray driver that calls `ray.nodes()` and reads the free resources of each node;
- Ray's state API, which lists nodes, actors and placement groups;
- `GcsClient`, Ray's client of its control store. It returns the free resources, but not who uses
  the occupied resources.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.report import Result, Row, say
from tests.support.ray_cluster import RAY_ENV, ROOT, RayCluster

#: Number of measured readings of a cluster's free resources. The first reading is not counted: it
#: is slower, because it imports modules.
_ANSWERS, _QUICK_ANSWERS = 200, 5
#: Sizes of the measured Ray clusters, in nodes.
_SIZES, _QUICK_SIZES = (1, 4), (1,)
#: Time limit on the process that measures one client of a Ray cluster, in seconds.
_LIMIT_S = 120.0
#: Time limit on one reading of a cluster's free resources, in seconds.
_WITHIN_S = 30.0
_WAYS = ("Muster", "a driver", "state API", "GcsClient")
_NOTES = {
    "a driver": "free and total, without users",
    "GcsClient": "free and total, without users",
}


def measure(*, quick: bool) -> Result:
    """Measure how fast Muster and Ray's clients read the free resources of Ray clusters."""
    rows: dict[str, list[Row]] = {}
    with RayCluster.run(nodes=0) as cluster:
        for size in _QUICK_SIZES if quick else _SIZES:
            while len(cluster.nodes) < size:
                cluster.add_node()
            nodes = f"{size} node{'s' if size > 1 else ''}"
            for way in _WAYS:
                say(f"  {nodes}: {way}")
                for figure, values, unit in _measure_way(cluster, way, quick=quick):
                    group = f"{figure}, {nodes}"
                    row = Row(
                        way=f"{way}, {group}",
                        values=values,
                        unit=unit,
                        group=group,
                        note=_NOTES.get(way, ""),
                    )
                    rows.setdefault(group, []).append(row)
    return Result(
        name="capacity",
        question="Time, CPU time and memory that a process needs to read the free resources of a "
        "Ray cluster, and the jobs that use the other resources. The first reading of a process "
        "also imports Ray, so the first reading is measured separately from further readings",
        rows=[row for group in rows.values() for row in group],
    )


def _measure_way(
    cluster: RayCluster, way: str, *, quick: bool
) -> list[tuple[str, list[float], str]]:
    """Measure in a new process how fast one client (see `_WAYS`) reads a cluster's resources.

    Returns:
        The name, the values and the unit of each figure.
    """
    answers = _QUICK_ANSWERS if quick else _ANSWERS
    completed = subprocess.run(
        (
            *(sys.executable, "-m", "tests.benchmarks.capacity"),
            *(way, cluster.address, cluster.gcs_address, str(answers)),
        ),
        cwd=ROOT,
        env={**os.environ, **RAY_ENV},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=_LIMIT_S,
        check=True,
    )
    # The figures are in the last line. Ray may have printed other lines before the last line.
    figures = json.loads(completed.stdout.splitlines()[-1])
    return [
        ("first answer", [figures["first_ms"]], "ms"),
        ("further answer", figures["each_ms"], "ms"),
        ("its CPU time", [figures["cpu_ms"]], "ms"),
        ("memory", [figures["memory_mb"]], "MB"),
    ]


def _memory_mb() -> float:
    """Return the resident memory of this process, in megabytes."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _time_answers(
    ask: Callable[[], Any], answers: int, began: float, before_mb: float
) -> dict[str, Any]:
    """Measure the first reading of a cluster's resources, and further readings.

    Args:
        ask: Function that reads the resources of all nodes. The function returns a false value if
            the cluster still reports no node.
        answers: Number of further readings.
        began: Start of this process's work, on the clock of `time.perf_counter`.
        before_mb: Resident memory at the start, in megabytes.

    Returns:
        A dict with the keys "first_ms" (time of the first reading), "each_ms" (times of the further
        readings), "cpu_ms" (CPU time of a further reading), and "memory_mb" (additional memory
        since the start).
    """
    while not ask():
        # For a moment, a new head node is not in its own list of nodes. So ask again until the list
        # contains a node.
        assert time.perf_counter() - began < _LIMIT_S
    first_ms = 1000 * (time.perf_counter() - began)
    each_ms = []
    cpu_began = time.process_time()
    for _ in range(answers):
        at = time.perf_counter()
        assert ask()
        each_ms.append(1000 * (time.perf_counter() - at))
    return {
        "first_ms": first_ms,
        "each_ms": each_ms,
        "cpu_ms": 1000 * (time.process_time() - cpu_began) / answers,
        "memory_mb": _memory_mb() - before_mb,
    }


def _muster(address: str, gcs_address: str, *measured: Any) -> dict[str, Any]:
    from tasks.ray.dashboard import Credentials, NoAnswer
    from tasks.ray.usage import ClusterReader

    reader = ClusterReader(address, Credentials(has_token=False))
    with asyncio.Runner() as runner:

        def ask() -> bool:
            try:
                return bool(runner.run(reader.look(within_s=_WITHIN_S)).nodes)
            except NoAnswer:
                return False

        figures = _time_answers(ask, *measured)
        runner.run(reader.close())
    return figures


def _driver(address: str, gcs_address: str, *measured: Any) -> dict[str, Any]:
    import ray
    from ray._private.state import available_resources_per_node

    ray.init(gcs_address, log_to_driver=False, logging_level="ERROR")
    return _time_answers(lambda: ray.nodes() and available_resources_per_node(), *measured)


def _state_api(address: str, gcs_address: str, *measured: Any) -> dict[str, Any]:
    from ray.util.state import StateApiClient
    from ray.util.state.common import ListApiOptions, StateResource

    client = StateApiClient(address=address)
    kinds = (StateResource.NODES, StateResource.ACTORS, StateResource.PLACEMENT_GROUPS)
    options = ListApiOptions(limit=10_000, detail=True)

    def ask() -> Any:
        nodes, *_ = [client.list(kind, options, raise_on_missing_output=False) for kind in kinds]
        return nodes

    return _time_answers(ask, *measured)


def _gcs_client(address: str, gcs_address: str, *measured: Any) -> dict[str, Any]:
    from ray._raylet import GcsClient

    client = GcsClient(address=gcs_address)
    return _time_answers(lambda: client.get_all_resource_usage(timeout=_WITHIN_S), *measured)


def _main(way: str, address: str, gcs_address: str, answers: str) -> None:
    """Measure how fast one client reads a Ray cluster's resources, and print the times as JSON.

    Args:
        way: Name of the client, for example "GcsClient". See `_WAYS`.
        address: Address of the cluster's dashboard.
        gcs_address: Address of the cluster's GCS server.
        answers: Number of further readings after the first.
    """
    ways = dict(zip(_WAYS, (_muster, _driver, _state_api, _gcs_client), strict=True))
    figures = ways[way](address, gcs_address, int(answers), time.perf_counter(), _memory_mb())
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
