"""Replay jobs through the queue's policy in virtual time.

The replay calls the same function `plan` as the scheduler. At each point in time, jobs that end are
removed first. Then jobs are submitted in their order. Then one scheduling pass runs.
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
    """Result of replaying a trace of jobs through the queue's policy in virtual time."""

    #: Jobs that fit on the empty cluster, in the order of their submission.
    jobs: Sequence[Job]
    #: Mapping from the id of a job to its start time, in seconds from the beginning of the trace.
    starts_s: Mapping[str, float]
    #: Jobs that do not fit on the empty cluster. The simulation did not submit these jobs.
    infeasible: Sequence[Job]
    #: Number of GPUs of the cluster.
    gpus: int
    #: Duration of each scheduling pass on this machine, in seconds.
    passes_s: Sequence[float] = field(repr=False)

    @property
    def waits_s(self) -> list[float]:
        """Time from the submission to the start of each job, in seconds."""
        return [self.starts_s[job.id] - job.submit_s for job in self.jobs]

    @property
    def utilisation(self) -> float:
        """Share of the GPU time in use, 0 to 1, from the first submission to the last end."""
        if not self.jobs:
            return 0.0
        used = sum(job.demand.gpus * job.duration_s for job in self.jobs)
        last_end = max(self.starts_s[job.id] + job.duration_s for job in self.jobs)
        return used / (self.gpus * (last_end - self.jobs[0].submit_s))


def replay(
    jobs: Sequence[Job],
    nodes: Sequence[ClusterNode],
    policy: Policy,
    *,
    estimate_s: Callable[[Job], float] = lambda job: duration_class_s(job.duration_s),
    plan: Callable[..., Plan] = plan,
) -> Replay:
    """Simulate, in virtual time, how the queue would schedule the jobs of a trace.

    Each job is submitted at its time in the trace, and ends after its recorded duration.

    Args:
        jobs: Jobs in the order of their submission.
        nodes: Nodes of the empty cluster.
        policy: Policy of the queue.
        estimate_s: Function that returns the expected duration of a job, in seconds. The expected
            duration must not be shorter than the actual duration.
        plan: Function for one scheduling pass, with the signature of `tasks.queue.policy.plan`.
    """
    cluster = Cluster(
        nodes=tuple(ClusterNode(name=node.name, gpus=node.gpus, cpus=node.cpus) for node in nodes)
    )
    infeasible = [job for job in jobs if explain_infeasible(job.demand, cluster)]
    infeasible_ids = {job.id for job in infeasible}
    feasible = [job for job in jobs if job.id not in infeasible_ids]
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
