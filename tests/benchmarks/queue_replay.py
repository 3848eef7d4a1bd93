"""Jobs through the queue's policy in virtual time: the very `plan` that the gate calls.

At an instant all ends are applied, then all arrivals in order of submission, then one pass.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tasks.queue.nodes import explain_infeasible
from tasks.queue.packing import Policy
from tasks.queue.policy import Held, Plan, Waiting, duration_class_s, plan
from tasks.ray.usage import Cluster, ClusterNode
from tests.benchmarks.queue_trace import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What became of the jobs."""

    #: In order of submission, without those that can never fit.
    jobs: Sequence[Job]
    #: `starts_s[job id]`, on the clock of the submissions.
    starts_s: Mapping[str, float]
    #: Jobs that the cluster can never hold; they were left out.
    infeasible: Sequence[Job]
    #: GPUs of the cluster.
    gpus: int
    #: How long each pass took, in seconds of this machine.
    passes_s: Sequence[float] = field(repr=False)

    @property
    def waits_s(self) -> list[float]:
        return [self.starts_s[job.id] - job.submit_s for job in self.jobs]

    @property
    def utilisation(self) -> float:
        """Share of the cluster's GPU time in use, from the first submission to the last end."""
        if not self.jobs:
            return 0.0
        used = sum(job.demand.gpus * job.duration_s for job in self.jobs)
        last = max(self.starts_s[job.id] + job.duration_s for job in self.jobs)
        return used / (self.gpus * (last - self.jobs[0].submit_s))


def replay(
    jobs: Sequence[Job],
    nodes: Sequence[ClusterNode],
    policy: Policy,
    *,
    estimate_s: Callable[[Job], float] = lambda job: duration_class_s(job.duration_s),
    plan: Callable[..., Plan] = plan,
) -> Replay:
    """Submit each job at its time, and let it go once it has run for its duration.

    Args:
        jobs: in order of submission.
        nodes: the free cluster.
        estimate_s: how long a job is expected to run; never less than it does.
        plan: called as `tasks.queue.policy.plan`.
    """
    cluster = Cluster(
        nodes=tuple(ClusterNode(name=node.name, gpus=node.gpus, cpus=node.cpus) for node in nodes)
    )
    infeasible = [job for job in jobs if explain_infeasible(job.demand, cluster)]
    left_out = {job.id for job in infeasible}
    feasible = [job for job in jobs if job.id not in left_out]
    by_id = {job.id: job for job in feasible}
    waiting: dict[str, Waiting] = {}
    held: dict[str, Held] = {}
    ends: list[tuple[float, str]] = []
    starts_s: dict[str, float] = {}
    passes_s = []
    arrived = 0
    while arrived < len(feasible) or ends:
        next_arrival = feasible[arrived].submit_s if arrived < len(feasible) else math.inf
        now = min(next_arrival, ends[0][0] if ends else math.inf)
        while ends and ends[0][0] <= now:
            del held[heapq.heappop(ends)[1]]
        while arrived < len(feasible) and feasible[arrived].submit_s <= now:
            job = feasible[arrived]
            waiting[job.id] = Waiting(
                id=job.id, demand=job.demand, place=(arrived,), estimate_s=estimate_s(job)
            )
            arrived += 1
        began = time.perf_counter()
        decided = plan(list(waiting.values()), list(held.values()), nodes, now, policy=policy)
        passes_s.append(time.perf_counter() - began)
        for id, names in decided.admitted.items():
            run, job = waiting.pop(id), by_id[id]
            held[id] = Held(
                id=id,
                gpus=dict.fromkeys(names, job.demand.gpus_per_node),
                cpus_per_gpu=job.demand.cpus_per_gpu,
                place=run.place,
                ends_at=now + run.estimate_s,
            )
            starts_s[id] = now
            heapq.heappush(ends, (now + job.duration_s, id))
    return Replay(
        jobs=feasible,
        starts_s=starts_s,
        infeasible=infeasible,
        gpus=sum(node.gpus for node in nodes),
        passes_s=passes_s,
    )
