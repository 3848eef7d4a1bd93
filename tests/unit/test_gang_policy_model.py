"""Properties of every pass and every replay, tested on thousands of random small clusters.

The most important property: the policy computes the same plan as a slow and simple function.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.queue.packing import Demand, Policy
from tasks.queue.policy import Held, Plan, Waiting, Why, plan
from tasks.ray.usage import ClusterNode
from tests.benchmarks.queue_replay import replay
from tests.benchmarks.queue_trace import Job
from tests.support.slow_plan import slow_plan


def pass_of(seed: int, nodes: int, held: int, waiting: int) -> dict[str, Any]:
    """Return random arguments of `plan` for a cluster.

    Times and demands have few different values, so that ties are frequent. Faults of `plan` show
    most often in ties. Some gangs hold too many GPUs, or GPUs of a node that has disappeared.

    Args:
        seed: Seed of the random draws.
        nodes: Number of nodes.
        held: Number of running gangs.
        waiting: Number of waiting gangs.
    """
    roll = random.Random(seed)
    tags = ["red", "blue"] if roll.random() < 0.3 else []
    counts_cpus, sends_back, is_sane = (roll.random() < share for share in (0.3, 0.1, 0.9))
    is_pinned = roll.random() < 0.3
    cluster = [
        ClusterNode(
            name=f"n{index}",
            gpus=roll.choice([2, 4, 4, 8]),
            cpus=roll.choice([None, 0.3, 4.0, 12.0]) if counts_cpus else None,
        )
        for index in range(nodes)
    ]
    places = iter(roll.sample(range(held + waiting), held + waiting))
    left = {node.name: node.gpus for node in cluster}
    gangs = []
    for number in range(held):
        names = roll.sample(sorted(left), roll.randint(1, min(2, nodes)))
        taken = {name: roll.choice([1, 2, 2, 4]) for name in names}
        if is_sane:
            taken = {name: min(gpus, left[name]) for name, gpus in taken.items() if left[name]}
        for name, gpus in taken.items():
            left[name] -= gpus
        if not is_sane:
            taken["gone"] = 1
        gangs.append(
            Held(
                id=f"h{number}",
                gpus=taken,
                cpus_per_gpu=roll.choice([0.0, 0.1, 1.0]),
                place=(next(places),),
                ends_at=roll.choice([NOW - 1, NOW, NOW + 1, NOW + 2, NOW + 3, NOW + 5]),
                tags=frozenset(tag for tag in tags if roll.random() < 0.5),
            )
        )
    line = [
        Waiting(
            id=f"w{number}",
            demand=Demand(
                nodes=roll.choice([1, 1, roll.randint(1, nodes), roll.randint(1, nodes + 1)]),
                gpus_per_node=roll.choice([1, 1, 2, 3, 4]),
                cpus_per_gpu=roll.choice([0.0, 0.1, 1.0, 3.0]),
            ),
            place=(next(places),),
            estimate_s=roll.choice([1.0, 2.0, 6.0, 9.0]),
            not_before=roll.choice([0.0, NOW, NOW + 1, NOW + 2]) if sends_back else 0.0,
            tags=frozenset(tag for tag in tags if roll.random() < 0.5),
            among=frozenset(roll.sample([*left, "gone"], roll.randint(1, len(left))))
            if is_pinned and roll.random() < 0.4
            else None,
            avoid=frozenset(roll.sample(sorted(left), roll.randint(1, len(left))))
            if roll.random() < 0.3
            else frozenset(),
        )
        for number in range(waiting)
    ]
    return dict(
        waiting=line,
        held=gangs,
        nodes=cluster,
        now=NOW,
        policy=roll.choice(["fifo", "backfill", "backfill"]),
        limits={tag: roll.randint(2, 20) for tag in tags},
    )


NOW = 10.0
#: Random scheduling passes. The numbers of nodes and gangs are drawn separately, so that Hypothesis
#: shrinks a failing example to few nodes and gangs.
passes = st.builds(
    pass_of,
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 6),
    held=st.integers(0, 8),
    waiting=st.integers(1, 12),
)


#: Settings of Hypothesis. There is no deadline, because the tests do not check the speed of `plan`.
thousands = settings(max_examples=1500, deadline=None)
hundreds = settings(max_examples=400, deadline=None)


def is_same(found: Plan, expected: Plan) -> bool:
    """Return True if two plans are equal and contain the gangs in the same order.

    The gangs are the keys of dicts, and the operator `==` ignores the order of keys.
    """
    orders = [(list(one.admitted), list(one.reasons)) for one in (found, expected)]
    return found == expected and orders[0] == orders[1]


@thousands
@given(arguments=passes, order=st.randoms(use_true_random=True))
def test_plan_equals_the_slow_plan_in_any_input_order(
    arguments: dict[str, Any], order: random.Random
) -> None:
    shuffled = dict(arguments)
    for name in ("waiting", "held"):
        shuffled[name] = order.sample(arguments[name], len(arguments[name]))

    found = plan(**arguments)

    assert is_same(found, slow_plan(**arguments))
    assert is_same(found, plan(**shuffled))


@thousands
@given(passes)
def test_no_node_and_no_limit_is_exceeded(arguments: dict[str, Any]) -> None:
    found = plan(**arguments)

    line = {run.id: run for run in arguments["waiting"]}
    started = [
        Held(
            id=id,
            gpus=dict.fromkeys(names, line[id].demand.gpus_per_node),
            cpus_per_gpu=line[id].demand.cpus_per_gpu,
            place=(),
            ends_at=0.0,
            tags=line[id].tags,
        )
        for id, names in found.admitted.items()
    ]
    gangs = [*arguments["held"], *started]
    assert all(len(gang.gpus) == line[gang.id].demand.nodes for gang in started)
    for node in arguments["nodes"]:
        gpus = sum(gang.gpus.get(node.name, 0) for gang in gangs)
        cpus = sum(gang.gpus.get(node.name, 0) * gang.cpus_per_gpu for gang in gangs)
        assert found.free[node.name] == max(0, node.gpus - gpus)
        if any(node.name in gang.gpus for gang in started):
            assert gpus <= node.gpus
            assert node.cpus is None or cpus <= node.cpus + 1e-6
    for tag in {tag for gang in started for tag in gang.tags}:
        used = sum(sum(gang.gpus.values()) for gang in gangs if tag in gang.tags)
        assert used <= arguments["limits"][tag]


def trace_of(seed: int, nodes: int, jobs: int) -> tuple[list[ClusterNode], list[Job]]:
    """Return a random cluster and random jobs.

    Some jobs may be too large for the cluster. Several jobs arrive or end at the same time.
    """
    roll = random.Random(seed)
    counts_cpus = roll.random() < 0.3
    cluster = [
        ClusterNode(name=f"n{i}", gpus=roll.choice([2, 4, 4, 8]), cpus=8.0 if counts_cpus else None)
        for i in range(nodes)
    ]
    line = [
        Job(
            id=f"job-{number}",
            submit_s=float(roll.randint(0, jobs)),
            duration_s=float(roll.randint(1, 8)),
            demand=Demand(
                nodes=roll.choice([1, 1, roll.randint(1, nodes)]),
                gpus_per_node=roll.choice([1, 2, 3, 4, 8]),
                cpus_per_gpu=roll.choice([0.0, 0.5, 2.0]),
            ),
        )
        for number in range(jobs)
    ]
    return cluster, sorted(line, key=lambda job: job.submit_s)


def guess_s(job: Job) -> float:
    """Return an estimate of a job's duration: 0 to 3 s longer than the actual duration."""
    return job.duration_s + int(job.id.removeprefix("job-")) % 4


traces = st.builds(
    trace_of, seed=st.integers(0, 2**32), nodes=st.integers(1, 5), jobs=st.integers(1, 25)
)
policies = st.sampled_from(["fifo", "backfill"])


@hundreds
@given(traces, policies)
def test_feasible_runs_start_in_order_and_as_promised(
    trace: tuple[list[ClusterNode], list[Job]], policy: Policy
) -> None:
    cluster, jobs = trace
    promised: dict[str, float] = {}

    def noted(*arguments: Any, **options: Any) -> Plan:
        decided = plan(*arguments, **options)
        assert is_same(decided, slow_plan(*arguments, **options))
        for id, reason in decided.reasons.items():
            if reason.why is Why.GPUS and reason.starts_at is not None:
                promised.setdefault(id, reason.starts_at)
        return decided

    found = replay(jobs, cluster, policy, estimate_s=guess_s, plan=noted)

    assert set(found.starts_s) == {job.id for job in found.jobs}
    assert len(found.jobs) + len(found.infeasible) == len(jobs)
    assert all(wait >= 0 for wait in found.waits_s)
    # A gang never starts later than the first start time that was planned for the gang.
    assert all(found.starts_s[id] <= at for id, at in promised.items())
    if policy == "fifo":
        assert list(found.starts_s) == [job.id for job in found.jobs]
