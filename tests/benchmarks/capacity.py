"""What a Ray cluster has and who uses it, asked by Muster and in other ways.

Each way is measured in a process of its own: the first answer, with all that is imported for it,
and then many more. The other ways: a driver that is connected once and kept, `ray.nodes()` and what
is available per node; Ray's state API, lists of nodes, actors and placement groups; and Ray's own
client of its control store, which tells what is free and not who has the rest.
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

_LOOKS, _QUICK_LOOKS = 200, 5
_SIZES, _QUICK_SIZES = (1, 4), (1,)
_LIMIT_S = 120.0
_WITHIN_S = 30.0
_WAYS = ("Muster", "a driver", "state API", "GcsClient")
_NOTES = {
    "a driver": "free and all, not who",
    "GcsClient": "free and all, not who",
}


def measure(*, quick: bool) -> Result:
    rows: dict[str, list[Row]] = {}
    with RayCluster.started(nodes=0) as cluster:
        for size in _QUICK_SIZES if quick else _SIZES:
            while len(cluster.nodes) < size:
                cluster.add_node()
            nodes = f"{size} node{'s' if size > 1 else ''}"
            for way in _WAYS:
                say(f"  {nodes}: {way}")
                for what, values, unit in _measured(cluster, way, quick=quick):
                    group = f"{what}, {nodes}"
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
        question="what a Ray cluster has and who uses it: the first answer of a process and each "
        "further one, the CPU time of that, and the memory that asking takes",
        rows=[row for group in rows.values() for row in group],
    )


def _measured(cluster: RayCluster, way: str, *, quick: bool) -> list[tuple[str, list[float], str]]:
    looks = _QUICK_LOOKS if quick else _LOOKS
    done = subprocess.run(
        (
            *(sys.executable, "-m", "tests.benchmarks.capacity"),
            *(way, cluster.address, cluster.gcs_address, str(looks)),
        ),
        cwd=ROOT,
        env={**os.environ, **RAY_ENV},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=_LIMIT_S,
        check=True,
    )
    # Ray may have said something before.
    found = json.loads(done.stdout.splitlines()[-1])
    return [
        ("first answer", [found["first_ms"]], "ms"),
        ("further answer", found["each_ms"], "ms"),
        ("its CPU time", [found["cpu_ms"]], "ms"),
        ("memory", [found["memory_mb"]], "MB"),
    ]


def _memory_mb() -> float:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _asked(ask: Callable[[], Any], looks: int, began: float, before_mb: float) -> dict[str, Any]:
    while not ask():
        # A head that has just started does not know itself.
        assert time.perf_counter() - began < _LIMIT_S
    first_ms = 1000 * (time.perf_counter() - began)
    each_ms = []
    cpu_began = time.process_time()
    for _ in range(looks):
        at = time.perf_counter()
        assert ask()
        each_ms.append(1000 * (time.perf_counter() - at))
    return {
        "first_ms": first_ms,
        "each_ms": each_ms,
        "cpu_ms": 1000 * (time.process_time() - cpu_began) / looks,
        "memory_mb": _memory_mb() - before_mb,
    }


def _muster(address: str, gcs_address: str, *measured: Any) -> dict[str, Any]:
    from tasks.ray.dashboard import Credentials, NoAnswer
    from tasks.ray.usage import ClusterReader

    look = ClusterReader(address, Credentials(has_token=False))
    with asyncio.Runner() as runner:

        def ask() -> bool:
            try:
                return bool(runner.run(look.look(within_s=_WITHIN_S)).nodes)
            except NoAnswer:
                return False

        found = _asked(ask, *measured)
        runner.run(look.close())
    return found


def _driver(address: str, gcs_address: str, *measured: Any) -> dict[str, Any]:
    import ray
    from ray._private.state import available_resources_per_node

    ray.init(gcs_address, log_to_driver=False, logging_level="ERROR")
    return _asked(lambda: ray.nodes() and available_resources_per_node(), *measured)


def _state_api(address: str, gcs_address: str, *measured: Any) -> dict[str, Any]:
    from ray.util.state import StateApiClient
    from ray.util.state.common import ListApiOptions, StateResource

    client = StateApiClient(address=address)
    what = (StateResource.NODES, StateResource.ACTORS, StateResource.PLACEMENT_GROUPS)
    options = ListApiOptions(limit=10_000, detail=True)

    def ask() -> Any:
        nodes, *_ = [client.list(one, options, raise_on_missing_output=False) for one in what]
        return nodes

    return _asked(ask, *measured)


def _gcs_client(address: str, gcs_address: str, *measured: Any) -> dict[str, Any]:
    from ray._raylet import GcsClient

    client = GcsClient(address=gcs_address)
    return _asked(lambda: client.get_all_resource_usage(timeout=_WITHIN_S), *measured)


def _main(way: str, address: str, gcs_address: str, looks: str) -> None:
    ways = dict(zip(_WAYS, (_muster, _driver, _state_api, _gcs_client), strict=True))
    found = ways[way](address, gcs_address, int(looks), time.perf_counter(), _memory_mb())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
