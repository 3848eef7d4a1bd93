"""A slow and simple implementation of the queue's scheduling policy.

Tests compare its plans with those of `tasks.queue.policy.plan`. The two implementations share data
types, but no rules. For each gang, this implementation counts all held GPUs again and checks every
node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tasks.queue.packing import Demand, Policy
from tasks.queue.policy import Held, Plan, Reason, Waiting, Why
from tasks.ray.usage import ClusterNode


@dataclass
class FreeNode:
    """The free GPUs and CPUs of one node."""

    #: Position of the node in the list of nodes.
    index: int
    gpus: int
    #: Number of free CPUs. None if unknown; then only the GPUs of the node are checked.
    cpus: float | None

    def suffices(self, demand: Demand) -> bool:
        """Return True if the node's free GPUs and CPUs cover a gang's demand per node."""
        cpus = demand.gpus_per_node * demand.cpus_per_gpu
        return self.gpus >= demand.gpus_per_node and (self.cpus is None or self.cpus + 1e-6 >= cpus)

    def add(self, gpus: int, cpus_per_gpu: float) -> None:
        """Add free GPUs and their CPUs to the node; a negative number of GPUs subtracts them."""
        self.gpus += gpus
        if self.cpus is not None:
            self.cpus += gpus * cpus_per_gpu


#: Mapping from the name of a node to its free GPUs and CPUs.
FreeNodes = dict[str, FreeNode]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expected situation at the start of the first waiting gang of the queue."""

    #: Expected start of the first waiting gang, in seconds. None if the gang can never start.
    at: float | None
    #: Free GPUs and CPUs of each node at the expected start of the first waiting gang.
    free: FreeNodes
    #: Gangs that will still run at the expected start of the first waiting gang.
    running: list[Held]
    #: Ids of the gangs that must end before the first waiting gang has enough GPUs.
    waits_for: tuple[str, ...] = ()


def slow_plan(
    waiting: Sequence[Waiting],
    held: Sequence[Held],
    nodes: Sequence[ClusterNode],
    now: float,
    *,
    policy: Policy = "fifo",
    limits: Mapping[str, int] | None = None,
) -> Plan:
    """Return which waiting gangs start now, and why the other gangs wait.

    This function is a simple and slow version of `tasks.queue.policy.plan`. Tests check that both
    functions return the same result.
    """
    limits = limits or {}
    running = list(held)
    admitted: dict[str, tuple[str, ...]] = {}
    reasons: dict[str, Reason] = {}
    head: Waiting | None = None
    forecast: Forecast | None = None
    for run in sorted(waiting, key=lambda run: run.place):
        free = count_free(nodes, running)
        chosen = choose(free, run)
        tag = find_exceeded_limit(run, running, limits)
        if tag:
            reasons[run.id] = Reason(why=Why.LIMIT, tag=tag)
            continue

        # The first gang that cannot start is the head of the queue. Later gangs must not delay the
        # start of the head.
        if head is None and (run.not_before > now or not chosen):
            forecast = forecast_start(run, running, free, now)
            starts_at = None if forecast.at is None else max(forecast.at, now)
            never_fits_now = policy == "fifo" and forecast.at is None
            reasons[run.id] = Reason(
                why=Why.RETRY if run.not_before > now else Why.GPUS,
                waits_for=forecast.waits_for,
                starts_at=starts_at,
                never_fits_now=never_fits_now,
            )
            if not never_fits_now:
                head = run
            continue

        if head is not None:
            assert forecast is not None
            if run.not_before > now:
                reasons[run.id] = Reason(why=Why.RETRY)
                continue
            if policy == "fifo" or not chosen:
                reasons[run.id] = Reason(why=Why.BEHIND, waits_for=(head.id,))
                continue
            runs_past_start = forecast.at is not None and now + run.estimate_s > forecast.at
            if runs_past_start:
                free_with_run = subtract(forecast.free, chosen, run.demand)
                running_with_run = [*forecast.running, hold(run, chosen, now)]
                if (
                    any(free_with_run[name].gpus < 0 for name in chosen)
                    or not choose(free_with_run, head)
                    or find_exceeded_limit(head, running_with_run, limits)
                ):
                    reasons[run.id] = Reason(why=Why.WOULD_DELAY, waits_for=(head.id,))
                    continue
                forecast = replace(forecast, free=free_with_run, running=running_with_run)

        admitted[run.id] = tuple(sorted(chosen, key=lambda name: free[name].index))
        running.append(hold(run, chosen, now))

    unused = {name: max(0, node.gpus) for name, node in count_free(nodes, running).items()}
    return Plan(admitted=admitted, reasons=reasons, free=unused)


def count_free(nodes: Sequence[ClusterNode], running: Sequence[Held]) -> FreeNodes:
    """Return the GPUs and CPUs that the running gangs leave free on each node."""
    free = {node.name: FreeNode(index, node.gpus, node.cpus) for index, node in enumerate(nodes)}
    for gang in running:
        for name, gpus in gang.gpus.items():
            if name in free:
                free[name].add(-gpus, gang.cpus_per_gpu)
    return free


def choose(free: FreeNodes, run: Waiting) -> list[str]:
    """Return the names of the nodes that a gang gets; an empty list if too few nodes are free."""
    sufficient = [name for name, node in free.items() if node.suffices(run.demand)]
    if run.among is not None:
        sufficient = [name for name in sufficient if name in run.among]

    # Nodes to avoid are taken only if there are too few other nodes.
    preferred = [name for name in sufficient if name not in run.avoid]
    avoided = [name for name in sufficient if name in run.avoid]
    missing = max(0, run.demand.nodes - len(preferred))
    candidates = preferred + avoided[:missing]

    candidates.sort(key=lambda name: (free[name].gpus, free[name].index))
    if len(candidates) < run.demand.nodes:
        return []
    return candidates[: run.demand.nodes]


def find_exceeded_limit(run: Waiting, running: Sequence[Held], limits: Mapping[str, int]) -> str:
    """Return the alphabetically first tag whose GPU limit a gang would exceed.

    Args:
        run: The waiting gang.
        running: Running gangs. Their GPUs count for the limits of their tags.
        limits: Mapping from a tag to the largest number of GPUs of its gangs.

    Returns:
        The tag, or an empty string if the gang exceeds no limit.
    """
    for tag in sorted(run.tags):
        used = sum(sum(gang.gpus.values()) for gang in running if tag in gang.tags)
        if tag in limits and used + run.demand.gpus > limits[tag]:
            return tag
    return ""


def forecast_start(head: Waiting, running: Sequence[Held], free: FreeNodes, now: float) -> Forecast:
    """Return the expected start of the first waiting gang, from the ends of the running gangs.

    Args:
        head: The first waiting gang.
        running: The running gangs, with their expected ends.
        free: The currently free GPUs and CPUs of each node.
        now: Current time, in seconds.
    """
    free_then = copy_nodes(free)
    running_then = sorted(running, key=lambda gang: (gang.ends_at, gang.place))
    #: Gangs that end before the first waiting gang starts, in the order of their ends.
    ended: list[Held] = []
    #: Number of gangs in `ended` that end before the first waiting gang has enough GPUs. The other
    #: gangs in `ended` end later, but not after `not_before`, the earliest start of the first
    #: waiting gang.
    ended_before_fit = 0
    at = head.not_before if head.not_before > now else None
    while running_then:
        fits = bool(choose(free_then, head))
        ends_before_retry = head.not_before > now and running_then[0].ends_at <= head.not_before
        if fits and not ends_before_retry:
            break
        if not fits:
            ended_before_fit += 1
        gang = running_then.pop(0)
        ended.append(gang)
        for name, gpus in gang.gpus.items():
            if name in free_then:
                free_then[name].add(gpus, gang.cpus_per_gpu)
        at = gang.ends_at if at is None else max(at, gang.ends_at)
    if not choose(free_then, head):
        return Forecast(at=None, free=free_then, running=running_then)

    # Find the nodes that have too few free GPUs or CPUs now, but will have enough when the first
    # waiting gang starts. The first waiting gang waits for the running gangs on these nodes.
    sufficient_then = {name for name, node in free_then.items() if node.suffices(head.demand)}
    if head.among is not None:
        sufficient_then &= head.among
    insufficient_now = {name for name, node in free.items() if not node.suffices(head.demand)}
    became_sufficient = sufficient_then & insufficient_now
    waits_for = [gang.id for gang in ended[:ended_before_fit] if became_sufficient & set(gang.gpus)]
    return Forecast(at=at, free=free_then, running=running_then, waits_for=tuple(waits_for))


def copy_nodes(free: FreeNodes) -> FreeNodes:
    """Return a copy whose nodes can be changed without an effect on the original."""
    return {name: replace(node) for name, node in free.items()}


def subtract(free: FreeNodes, chosen: Sequence[str], demand: Demand) -> FreeNodes:
    """Return the free GPUs and CPUs after a gang with this demand took the chosen nodes."""
    remaining = copy_nodes(free)
    for name in chosen:
        remaining[name].add(-demand.gpus_per_node, demand.cpus_per_gpu)
    return remaining


def hold(run: Waiting, chosen: Sequence[str], now: float) -> Held:
    """Return the record of a gang that starts now, and then holds GPUs of the chosen nodes."""
    return Held(
        id=run.id,
        gpus=dict.fromkeys(chosen, run.demand.gpus_per_node),
        cpus_per_gpu=run.demand.cpus_per_gpu,
        place=run.place,
        ends_at=now + run.estimate_s,
        tags=run.tags,
    )
