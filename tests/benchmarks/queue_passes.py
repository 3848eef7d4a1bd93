"""How long one pass over a long line takes, against the slow and obvious way to the same plan."""

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
class Line:
    """A line of gangs before a cluster."""

    name: str
    policy: Policy
    waiting: Sequence[Waiting]
    held: Sequence[Held]
    nodes: Sequence[ClusterNode]


def measure(*, quick: bool) -> Result:
    rows: list[Row] = []
    for line in _lines(200) if quick else [*_lines(1_000), *_lines(10_000)]:
        many = len(line.waiting) > 1_000
        rounds = 1 if quick or many else 3
        muster = f"Muster, {line.name}"
        slow = "each gang by itself, nothing remembered"
        ways = {muster: _sample(plan, line), slow: _sample(slow_plan, line)}
        values = interleaved(ways, rounds, per_round={muster: 3 if quick else 50 // rounds})
        rows += [
            Row(way=muster, values=values[muster], group=line.name),
            Row(way=slow, values=values[slow], group=line.name, how="modelled"),
        ]
    return Result(
        name="queue",
        question=f"time of a pass of the queue's policy, {_NODES} nodes with {_GPUS} GPUs each",
        rows=rows,
    )


def _sample(way: Callable[..., Plan], line: Line) -> Sample:
    def sample() -> float:
        began = time.perf_counter()
        way(line.waiting, line.held, line.nodes, 0.0, policy=line.policy)
        return 1000 * (time.perf_counter() - began)

    return sample


def _lines(count: int) -> list[Line]:
    """Lines that are hard on a pass: nobody passes the head, or each is a case of its own."""
    nodes = [ClusterNode(name=f"node-{i}", gpus=_GPUS) for i in range(_NODES)]
    with_cpus = [ClusterNode(name=node.name, gpus=node.gpus, cpus=64.0) for node in nodes]
    one_taken = [_held(node.name, 0) for node in nodes]
    one_left = [_held(node.name, i) for node in nodes for i in range(_GPUS - 1)]
    size = f"{count:,} waiting"
    return [
        Line(
            name=f"{size}, fifo: the head blocks",
            policy="fifo",
            waiting=_waiting(count, least_gpus=1),
            held=one_left,
            nodes=nodes,
        ),
        Line(
            name=f"{size}, backfill: nobody fits",
            policy="backfill",
            waiting=_waiting(count, least_gpus=2),
            held=one_left,
            nodes=nodes,
        ),
        Line(
            name=f"{size}, backfill: all but the head fit and would delay it",
            policy="backfill",
            waiting=_waiting(count, least_gpus=1),
            held=one_taken,
            nodes=with_cpus,
        ),
        Line(
            name=f"{size}, backfill: each tenth starts between such",
            policy="backfill",
            waiting=_waiting(count, least_gpus=1, small_every=10),
            held=one_taken,
            nodes=with_cpus,
        ),
    ]


def _waiting(count: int, *, least_gpus: int, small_every: int | None = None) -> list[Waiting]:
    """A head that needs the whole cluster, then long gangs of all sizes, small short ones between.

    They hardly ever ask for the same, so that little is known of one from another.
    """
    roll = random.Random(count)
    line = [_run(0, _NODES, _GPUS, _DAY_S)]
    for number in range(1, count):
        if small_every and number % small_every == 0:
            line.append(_run(number, 1, 1, 600.0))
        else:
            gpus = roll.randint(least_gpus, _GPUS - 1)
            line.append(_run(number, roll.randint(1, _NODES), gpus, 7 * _DAY_S))
    return line


def _run(number: int, nodes: int, gpus: int, seconds: float) -> Waiting:
    demand = Demand(nodes=nodes, gpus_per_node=gpus, cpus_per_gpu=3)
    return Waiting(id=f"run-{number}", demand=demand, place=(number,), estimate_s=seconds)


def _held(node: str, number: int) -> Held:
    """One GPU of a node for a day."""
    return Held(
        id=f"{node}-{number}",
        gpus={node: 1},
        cpus_per_gpu=3,
        place=(-1, node, number),
        ends_at=_DAY_S,
    )
