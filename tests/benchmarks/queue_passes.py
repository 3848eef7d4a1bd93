"""Benchmark of scheduling passes over long queues, against a simple algorithm with the same result.

The simple algorithm plans each gang by itself and remembers nothing between gangs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.queue.packing import Demand, Policy
from tasks.queue.policy import Held, Plan, Waiting, plan
from tasks.ray.usage import ClusterNode
from tests.benchmarks.report import Result, Row, Sample, interleaved
from tests.support.slow_plan import slow_plan

_NODES, _GPUS = 128, 8
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Input of a scheduling pass: waiting runs, running runs, and the nodes of a cluster.

    Each run needs a gang: GPUs that are granted all at once or not at all.
    """

    #: Name of the queue, for the titles of the rows.
    name: str
    #: Policy of the queue.
    policy: Policy
    #: Waiting runs, in the order of the queue.
    waiting: Sequence[Waiting]
    #: Runs that hold GPUs of the cluster.
    held: Sequence[Held]
    #: Nodes of the cluster.
    nodes: Sequence[ClusterNode]


def measure(*, quick: bool) -> Result:
    """Measure scheduling passes over long queues: Muster's policy, and a simple slow algorithm.

    The slow algorithm has no cache, and checks each waiting run separately.
    """
    rows: list[Row] = []
    for queue in _queues(200) if quick else [*_queues(1_000), *_queues(10_000)]:
        is_long = len(queue.waiting) > 1_000
        rounds = 1 if quick or is_long else 3
        muster = f"Muster, {queue.name}"
        slow = "each gang separately, without a cache"
        ways = {muster: _sample(plan, queue), slow: _sample(slow_plan, queue)}
        values = interleaved(ways, rounds, per_round={muster: 3 if quick else 50 // rounds})
        rows += [
            Row(way=muster, values=values[muster], group=queue.name),
            Row(way=slow, values=values[slow], group=queue.name, how="modelled"),
        ]
    return Result(
        name="queue",
        question=f"Time of one pass of the queue's policy, on {_NODES} nodes with {_GPUS} GPUs "
        "each",
        rows=rows,
    )


def _sample(algorithm: Callable[..., Plan], queue: Queue) -> Sample:
    """Return a function that runs one scheduling pass and returns its duration in milliseconds.

    Args:
        algorithm: Function for a scheduling pass: Muster's `plan` or the simple slow algorithm.
        queue: Input of the scheduling pass.
    """

    def sample() -> float:
        began = time.perf_counter()
        algorithm(queue.waiting, queue.held, queue.nodes, 0.0, policy=queue.policy)
        return 1000 * (time.perf_counter() - began)

    return sample


def _queues(count: int) -> list[Queue]:
    """Return queues whose scheduling passes are slow.

    In one queue, the first run blocks all others. In the other queues, a pass must check each run
    separately.

    Args:
        count: Number of waiting runs in each queue.
    """
    nodes = [ClusterNode(name=f"node-{i}", gpus=_GPUS) for i in range(_NODES)]
    with_cpus = [ClusterNode(name=node.name, gpus=node.gpus, cpus=64.0) for node in nodes]
    one_gpu_held = [_held(node.name, 0) for node in nodes]
    one_gpu_free = [_held(node.name, i) for node in nodes for i in range(_GPUS - 1)]
    size = f"{count:,} waiting"
    return [
        Queue(
            name=f"{size}, fifo: the first run blocks",
            policy="fifo",
            waiting=_waiting(count, least_gpus=1),
            held=one_gpu_free,
            nodes=nodes,
        ),
        Queue(
            name=f"{size}, backfill: no run fits",
            policy="backfill",
            waiting=_waiting(count, least_gpus=2),
            held=one_gpu_free,
            nodes=nodes,
        ),
        Queue(
            name=f"{size}, backfill: all others fit and would delay the first",
            policy="backfill",
            waiting=_waiting(count, least_gpus=1),
            held=one_gpu_held,
            nodes=with_cpus,
        ),
        Queue(
            name=f"{size}, backfill: every tenth of these can start",
            policy="backfill",
            waiting=_waiting(count, least_gpus=1, small_every=10),
            held=one_gpu_held,
            nodes=with_cpus,
        ),
    ]


def _waiting(count: int, *, least_gpus: int, small_every: int | None = None) -> list[Waiting]:
    """Return waiting runs: the first needs the whole cluster, the others have different sizes.

    Most runs request different numbers of nodes or GPUs. So a scheduling pass must check most
    runs separately, and can rarely reuse the result of a run with an equal request.

    Args:
        count: Number of runs.
        least_gpus: Smallest number of GPUs per node that a run requests.
        small_every: 10 if every tenth run is small and short. None if no run is small.
    """
    random_draws = random.Random(count)
    runs = [_run(0, _NODES, _GPUS, _DAY_S)]
    for number in range(1, count):
        if small_every and number % small_every == 0:
            runs.append(_run(number, 1, 1, 600.0))
        else:
            gpus = random_draws.randint(least_gpus, _GPUS - 1)
            runs.append(_run(number, random_draws.randint(1, _NODES), gpus, 7 * _DAY_S))
    return runs


def _run(number: int, nodes: int, gpus: int, seconds: float) -> Waiting:
    """Return a waiting run.

    Args:
        number: Position of the run in the queue.
        nodes: Number of nodes that the run needs.
        gpus: Number of GPUs on each of these nodes.
        seconds: Estimated duration of the run.
    """
    demand = Demand(nodes=nodes, gpus_per_node=gpus, cpus_per_gpu=3)
    return Waiting(id=f"run-{number}", demand=demand, place=(number,), estimate_s=seconds)


def _held(node: str, number: int) -> Held:
    """Return a run that holds one GPU of a node for a day."""
    return Held(
        id=f"{node}-{number}",
        gpus={node: 1},
        cpus_per_gpu=3,
        place=(-1, node, number),
        ends_at=_DAY_S,
    )
