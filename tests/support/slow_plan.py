"""The queue's policy once more, slow and obvious: `plan` is held against it.

It shares the types with `tasks.queue.policy`, and no rule. For each gang it counts all that is held
anew, looks at every node, and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tasks.queue.packing import Demand, Policy
from tasks.queue.policy import Held, Plan, Reason, Waiting, Why
from tasks.ray.usage import ClusterNode


@dataclass
class Free:
    """What is free on one node."""

    index: int
    gpus: int
    cpus: float | None

    def suffices(self, demand: Demand) -> bool:
        cpus = demand.gpus_per_node * demand.cpus_per_gpu
        return self.gpus >= demand.gpus_per_node and (self.cpus is None or self.cpus + 1e-6 >= cpus)

    def add(self, gpus: int, cpus_per_gpu: float) -> None:
        self.gpus += gpus
        if self.cpus is not None:
            self.cpus += gpus * cpus_per_gpu


Vector = dict[str, Free]


def slow_plan(
    waiting: Sequence[Waiting],
    held: Sequence[Held],
    nodes: Sequence[ClusterNode],
    now: float,
    *,
    policy: Policy = "fifo",
    limits: Mapping[str, int] | None = None,
) -> Plan:
    """The same as `tasks.queue.policy.plan`."""
    running = list(held)
    admitted: dict[str, tuple[str, ...]] = {}
    reasons: dict[str, Reason] = {}
    head: Waiting | None = None
    for run in sorted(waiting, key=lambda run: run.place):
        free = free_now(nodes, running)
        chosen = choose(free, run)
        tag = limit_reached(run, running, limits or {})
        if tag:
            reasons[run.id] = Reason(why=Why.LIMIT, tag=tag)
            continue
        if head is None and (run.not_before > now or not chosen):
            head = run
            shadow, ahead, still, waits_for = reserve(head, running, free, now)
            why = Why.RETRY if run.not_before > now else Why.GPUS
            starts_at = None if shadow is None else max(shadow, now)
            is_passed = policy == "fifo" and shadow is None
            reasons[run.id] = Reason(
                why=why, waits_for=waits_for, starts_at=starts_at, is_passed=is_passed
            )
            if is_passed:
                head = None
            continue
        if head is not None:
            if run.not_before > now:
                reasons[run.id] = Reason(why=Why.RETRY)
                continue
            if policy == "fifo" or not chosen:
                reasons[run.id] = Reason(why=Why.BEHIND, waits_for=(head.id,))
                continue
            if shadow is not None and now + run.estimate_s > shadow:
                after = less(ahead, chosen, run.demand)
                is_negative = any(after[name].gpus < 0 for name in chosen)
                still_with_it = [*still, granted(run, chosen, now)]
                if (
                    is_negative
                    or not choose(after, head)
                    or limit_reached(head, still_with_it, limits or {})
                ):
                    reasons[run.id] = Reason(why=Why.WOULD_DELAY, waits_for=(head.id,))
                    continue
                ahead, still = after, still_with_it
        admitted[run.id] = tuple(sorted(chosen, key=lambda name: free[name].index))
        running.append(granted(run, chosen, now))
    left = {name: max(0, node.gpus) for name, node in free_now(nodes, running).items()}
    return Plan(admitted=admitted, reasons=reasons, free=left)


def free_now(nodes: Sequence[ClusterNode], running: Sequence[Held]) -> Vector:
    free = {node.name: Free(i, node.gpus, node.cpus) for i, node in enumerate(nodes)}
    for gang in running:
        for name, gpus in gang.gpus.items():
            if name in free:
                free[name].add(-gpus, gang.cpus_per_gpu)
    return free


def choose(free: Vector, run: Waiting) -> list[str]:
    """The nodes it gets; none where it does not fit."""
    fitting = [name for name, node in free.items() if node.suffices(run.demand)]
    if run.among is not None:
        fitting = [name for name in fitting if name in run.among]
    others = [name for name in fitting if name not in run.avoid]
    fitting = (
        others
        + [name for name in fitting if name in run.avoid][: max(0, run.demand.nodes - len(others))]
    )
    fitting.sort(key=lambda name: (free[name].gpus, free[name].index))
    return fitting[: run.demand.nodes] if len(fitting) >= run.demand.nodes else []


def limit_reached(run: Waiting, running: Sequence[Held], limits: Mapping[str, int]) -> str:
    """The first tag by name that would go over its limit; or empty."""
    for tag in sorted(run.tags):
        used = sum(sum(gang.gpus.values()) for gang in running if tag in gang.tags)
        if tag in limits and used + run.demand.gpus > limits[tag]:
            return tag
    return ""


def reserve(
    head: Waiting, running: Sequence[Held], free: Vector, now: float
) -> tuple[float | None, Vector, list[Held], tuple[str, ...]]:
    """The shadow time, what is free then, what still runs then, and whose ends it takes.

    The time is None where the head would never fit.
    """
    ahead, ended = copied(free), []
    still = sorted(running, key=lambda gang: (gang.ends_at, gang.place))
    shadow = head.not_before if head.not_before > now else None
    before_it_fitted = 0
    while still:
        does_fit = bool(choose(ahead, head))
        is_gone_by_then = head.not_before > now and still[0].ends_at <= head.not_before
        if does_fit and not is_gone_by_then:
            break
        before_it_fitted += not does_fit
        gang = still.pop(0)
        ended.append(gang)
        for name, gpus in gang.gpus.items():
            if name in ahead:
                ahead[name].add(gpus, gang.cpus_per_gpu)
        shadow = gang.ends_at if shadow is None else max(shadow, gang.ends_at)
    if not choose(ahead, head):
        return None, ahead, still, ()
    large = {name for name, node in ahead.items() if node.suffices(head.demand)}
    if head.among is not None:
        large &= head.among
    small_now = {name for name, node in free.items() if not node.suffices(head.demand)}
    waits_for = [g.id for g in ended[:before_it_fitted] if large & small_now & set(g.gpus)]
    return shadow, ahead, still, tuple(waits_for)


def copied(free: Vector) -> Vector:
    return {name: replace(node) for name, node in free.items()}


def less(free: Vector, chosen: Sequence[str], demand: Demand) -> Vector:
    after = copied(free)
    for name in chosen:
        after[name].add(-demand.gpus_per_node, demand.cpus_per_gpu)
    return after


def granted(run: Waiting, chosen: Sequence[str], now: float) -> Held:
    return Held(
        id=run.id,
        gpus=dict.fromkeys(chosen, run.demand.gpus_per_node),
        cpus_per_gpu=run.demand.cpus_per_gpu,
        place=run.place,
        ends_at=now + run.estimate_s,
        tags=run.tags,
    )
