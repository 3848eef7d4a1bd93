"""Check that a gang queue kept its rules, from evidence that does not come from the queue.

The evidence has two sources. The Prefect server has the history of states of each flow run. The
components of the runs wrote the hosts and the times of their processes. `gang_evidence` collects
the evidence; this module only computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

#: Name of the state of a run whose process has started and waits for GPUs.
WAITING = "PendingResources"
#: Types of the final states of a flow run.
FINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
#: Longest time from the cancellation of a run to its final state, in seconds. The limit includes
#: the grace periods, and up to 60 s until a server with SQLite has stored the state.
_CANCELLED_WITHIN_S = 120.0
#: Maximum number of error messages of each kind that are reported separately.
_MAX_FAULTS_OF_KIND = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One state in the history of a flow run on the Prefect server."""

    #: Time at which the flow run entered the state, by the server's clock, in UTC epoch seconds.
    at: float
    type: str
    name: str
    #: Scheduled start of a run in a Scheduled state, in UTC epoch seconds. 0 in other states.
    due: float = 0.0

    @property
    def is_wait(self) -> bool:
        """True if the run waits for GPUs, before or after the start of its process."""
        return self.type == "SCHEDULED" or (self.type == "RUNNING" and self.name == WAITING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentProcess:
    """One process of a component of a run, described by the lines that the process wrote."""

    #: Number of the attempt in which the process ran.
    attempt: int
    pid: int
    #: Start of the process, in UTC epoch seconds.
    began: float
    #: End of the process, in UTC epoch seconds. None if the process was killed and could not write
    #: its end.
    ended: float | None = None
    #: Mapping from the name of a node to the number of GPUs that were granted to the run. None if
    #: the process did not read the grant from the Prefect server.
    nodes: Mapping[str, int] | None = None
    #: Name of the host on which the process ran.
    host: str = ""
    #: GPUs in CUDA_VISIBLE_DEVICES of the process. None if the variable was not set.
    devices: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The evidence about one run: the requested GPUs, the states and the component processes."""

    name: str
    #: Number of nodes that the run requests.
    nodes: int
    #: Number of GPUs that the run requests on each node.
    gpus: int
    #: Place in the queue: the priority of the run's work queue, then the number of earlier
    #: submissions.
    place: tuple[int, int]
    #: States of the flow run, the oldest first.
    states: Sequence[State]
    #: Component processes of the run.
    parts: Sequence[ComponentProcess] = ()
    #: Last grant of the run: mapping from the name of a node to the number of GPUs. None if there
    #: was no grant.
    placed: Mapping[str, int] | None = None
    #: Types of the final states that the run may have.
    may_end: frozenset[str] = frozenset({"COMPLETED"})

    @property
    def submitted_at(self) -> float:
        """Time of the run's first state, in UTC epoch seconds; infinity if the run has no state."""
        return self.states[0].at if self.states else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A period in which a run held its GPUs."""

    #: Name of the run.
    run: str
    #: Time at which the run got its GPUs, in UTC epoch seconds.
    since: float
    #: Time at which the run gave its GPUs back, in UTC epoch seconds. Infinity if the run still
    #: holds its GPUs.
    until: float
    #: Number of held GPUs, on all nodes together.
    gpus: int
    #: Mapping from the name of a node to the number of held GPUs. None if the nodes are unknown.
    nodes: Mapping[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of the check of a queue: the broken rules, and statistics of the runs."""

    #: Descriptions of the rules of the queue that were broken. Empty if the queue kept all rules.
    faults: tuple[str, ...]
    #: Largest values during the check. The key NODE is the number of used GPUs of the node with
    #: this name. The key `GPUs` is the number of used GPUs of all nodes. The key `runs` is the
    #: number of runs with GPUs.
    peak: Mapping[str, float]
    #: Number of runs that were admitted at least once.
    admitted: int
    #: Number of admissions of all runs. A requeued run is admitted several times.
    admissions: int
    #: Number of late runs. A run is late if a run behind it in the queue was admitted first, and
    #: enough GPUs for both runs were free at that moment.
    late: int = 0
    #: Longest delay of a late run, in seconds. 0 if no run was late. The delay begins when the run
    #: behind the late run is admitted, and ends when the late run is admitted.
    late_s: float = 0.0

    def __str__(self) -> str:
        peak = ", ".join(f"{amount:g} {resource}" for resource, amount in self.peak.items())
        return (
            f"{self.admitted} runs admitted {self.admissions} times, at most {peak} at once, "
            f"{self.late} late by up to {self.late_s:.2f} s; {len(self.faults)} faults"
        )


def judge(
    runs: Sequence[History],
    nodes: Mapping[str, int],
    *,
    most_runs: float = math.inf,
    late_s: float = 3.0,
    in_order: bool = True,
    by_states: bool = True,
) -> Judgement:
    """Check whether the histories of runs show broken rules of the gang queue.

    Args:
        runs: Histories of all runs of the queue.
        nodes: Mapping from the name of each existing node to its number of GPUs.
        most_runs: Number of runs that may hold GPUs at the same time.
        late_s: Longest allowed time, in seconds, from the admission of an overtaking run to the
            admission of the overtaken run. A short delay is no fault, because one scheduling
            pass may admit both runs in any order.
        in_order: True if no run may overtake another run of the same priority (strict FIFO).
        by_states: True if the states of the runs show when GPUs were held, and the grants show the
            nodes. Use False for Ray, which chooses the nodes of a run itself. Then only the lines
            of the components are checked.
    """
    holds = {run.name: list(list_holds(run)) for run in runs}
    all_holds = [hold for holds_of_run in holds.values() for hold in holds_of_run]

    peak: dict[str, float] = {}
    state_faults: list[str] = []
    stray_faults: list[str] = []
    device_faults: list[str] = []
    if by_states:
        limits = {"GPUs": float(sum(nodes.values())), "runs": most_runs, **nodes}
        peak, state_faults = _find_peaks(map(_usage_of_hold, all_holds), limits)
        stray_faults = [fault for run in runs for fault in _find_strays(run)]
        device_faults = _find_shared_devices(runs, holds)

    component_peak, component_faults = _find_peaks(_usages_of_components(runs, holds), nodes)

    delays_s: list[float] = []
    order_faults: list[str] = []
    if in_order:
        known_nodes = nodes if by_states else None
        delays_s, order_faults = _find_overtaking(runs, holds, known_nodes, late_s)

    faults_by_kind = (
        [fault for run in runs for fault in _find_wrong_ends(run)],
        [fault for run in runs for fault in _find_double_starts(run, holds[run.name])],
        [f"by their states: {fault}" for fault in state_faults],
        [f"by the components: {fault}" for fault in component_faults],
        stray_faults,
        [f"by what they saw: {fault}" for fault in device_faults],
        order_faults,
    )
    return Judgement(
        faults=tuple(fault for faults in faults_by_kind for fault in _shorten(faults)),
        peak=peak if by_states else component_peak,
        admitted=sum(bool(holds_of_run) for holds_of_run in holds.values()),
        admissions=len(all_holds),
        late=len(delays_s),
        late_s=max(delays_s, default=0.0),
    )


def list_holds(run: History) -> Iterator[Hold]:
    """Yield the periods in which a run held its GPUs, the earliest first.

    If the run gets its GPUs before its process starts, the period starts with the state Pending. If
    the process starts earlier and waits for GPUs, the period starts when the process gets GPUs. The
    period ends when the run waits again, or has its final state.
    """
    periods: list[tuple[float, float]] = []
    since: float | None = None
    for state in run.states:
        if state.is_wait or state.type in FINAL:
            # A flow process may start, find that its GPUs are not free, and end. The flow run was
            # then RUNNING, but held no GPUs. The sign of this case: no component started.
            has_only_asked = state.type == "RUNNING" and not any(
                since is not None and since <= part.began <= state.at for part in run.parts
            )
            if since is not None and not has_only_asked:
                periods.append((since, state.at))
            since = None
        elif since is None and state.type in ("PENDING", "RUNNING"):
            since = state.at
    if since is not None:
        periods.append((since, math.inf))

    for index, (began, ended) in enumerate(periods):
        nodes_of_parts = [
            part.nodes for part in run.parts if began <= part.began <= ended and part.nodes
        ]
        is_last = index == len(periods) - 1
        nodes: Mapping[str, int] | None = None
        if nodes_of_parts:
            nodes = nodes_of_parts[-1]
        elif is_last:
            nodes = run.placed
        gpus = run.nodes * run.gpus
        yield Hold(run=run.name, since=began, until=ended, gpus=gpus, nodes=nodes)


def _find_wrong_ends(run: History) -> Iterator[str]:
    """Yield messages about a wrong final state, a slow cancellation, or a grant of wrong size."""
    last = run.states[-1] if run.states else None
    if last is None or last.type not in FINAL:
        shown = f"{last.type} {last.name}" if last else "never seen"
        yield f"{run.name} never ended: it is {shown}"
    elif last.type not in run.may_end:
        yield f"{run.name} ended as {last.type}"
    for state in run.states:
        if state.type == "CANCELLING" and last and last.at - state.at > _CANCELLED_WITHIN_S:
            yield f"{run.name} was Cancelling for {last.at - state.at:.0f} s"
            break
    if run.placed is not None and run.placed and not _is_gang(run.placed, run):
        yield f"{run.name} asks for {run.nodes} x {run.gpus} GPUs and was given {dict(run.placed)}"


def _is_gang(placed: Mapping[str, int], run: History) -> bool:
    """Return True if a grant has the number of nodes and of GPUs that the run requests."""
    return len(placed) == run.nodes and set(placed.values()) == {run.gpus}


def _find_double_starts(run: History, holds: Sequence[Hold]) -> Iterator[str]:
    """Yield a message if a run was admitted twice in a row, or if an attempt ran twice.

    Also yield a message for each component that ran while its run held no GPUs.

    Args:
        run: History of the run.
        holds: Periods in which the run held its GPUs.
    """
    for before, after in pairwise(state for state in run.states if state.type != "RUNNING"):
        # An admission sets the state "Pending". Prefect then sets the state "Submitting", which has
        # the same type PENDING, but is no second admission. So only the name "Pending" counts.
        if before.type == after.type == "PENDING" and after.name == "Pending":
            yield f"{run.name} was admitted again {after.at - before.at:.2f} s after it had been"
    parts = sorted(run.parts, key=lambda part: part.began)
    for part, next_part in pairwise(parts):
        pids = f"{part.pid}, {next_part.pid}"
        if part.attempt == next_part.attempt:
            yield f"attempt {part.attempt} of {run.name} ran twice: {pids}"
        elif part.ended is not None and part.ended > next_part.began:
            yield f"{run.name} ran twice at once: {pids}"
    for part in parts:
        hold = next((hold for hold in holds if hold.since <= part.began <= hold.until), None)
        if hold is None:
            yield f"a component of {run.name} (pid {part.pid}) ran without a gang"
        elif part.ended is not None and part.ended > hold.until:
            over_s = part.ended - hold.until
            yield f"a component of {run.name} ran {over_s:.2f} s after its gang was given back"
    if parts and parts[-1].ended is None and run.states[-1].type == "COMPLETED":
        yield f"{run.name} completed, and its component (pid {parts[-1].pid}) never ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Usage:
    """Resources that a run used in a period, for example the GPUs of a node."""

    run: str
    #: Start of the period in which the run used the resources, in UTC epoch seconds.
    since: float
    #: End of the period in which the run used the resources, in UTC epoch seconds.
    until: float
    #: Used amount of each resource, for example GPUs of a node (key: name of the node), GPUs of all
    #: nodes (key: `GPUs`), or runs with GPUs (key: `runs`).
    amounts: Mapping[str, float] = field(default_factory=dict)


def _usage_of_hold(hold: Hold) -> _Usage:
    """Return the resources that a run used in a period in which the run held GPUs."""
    amounts = {"GPUs": hold.gpus, "runs": 1, **(hold.nodes or {})}
    return _Usage(run=hold.run, since=hold.since, until=hold.until, amounts=amounts)


def _find_strays(run: History) -> Iterator[str]:
    """Yield a message for each component that ran on a wrong host or saw a wrong number of GPUs."""
    for part in run.parts:
        if part.devices is None or len(set(part.devices)) != run.gpus:
            yield f"{run.name} has {run.gpus} GPUs, and its component saw {part.devices}"
        if part.nodes is not None and part.host not in part.nodes:
            yield f"{run.name} was granted {dict(part.nodes)}, and ran on {part.host}"


def _find_shared_devices(runs: Iterable[History], holds: Mapping[str, Sequence[Hold]]) -> list[str]:
    """Return a message for each GPU that two components saw at the same time.

    Args:
        runs: Histories of the runs.
        holds: Mapping from the name of a run to the periods in which the run held its GPUs.
    """
    usages = []
    for run in runs:
        for part, usage in zip(run.parts, _usages_of_components([run], holds), strict=True):
            devices = {f"device {device} of {part.host}": 1 for device in part.devices or ()}
            usages.append(replace(usage, amounts=devices))
    limits = {device: 1.0 for usage in usages for device in usage.amounts}
    return _find_peaks(usages, limits)[1]


def _usages_of_components(
    runs: Iterable[History], holds: Mapping[str, Sequence[Hold]]
) -> Iterator[_Usage]:
    """Yield a `_Usage` per component process: the run's GPUs, and the start and end of the process.

    Args:
        runs: Histories of the runs.
        holds: Mapping from the name of a run to the periods in which the run held its GPUs.
    """
    for run in runs:
        for part in run.parts:
            ends = (hold.until for hold in holds[run.name] if hold.until >= part.began)
            # The end of a killed component is unknown. Assume that the component ended when its run
            # gave the GPUs back.
            until = part.ended if part.ended is not None else next(ends, part.began)
            nodes = dict(part.nodes or {})
            yield _Usage(run=run.name, since=part.began, until=until, amounts=nodes)


def _find_peaks(
    usages: Iterable[_Usage], limits: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Return the largest used amount of each resource, and a message for each exceeded limit.

    Args:
        usages: Used resources, in any order.
        limits: Existing amount of each resource.
    """
    changes = [
        (at, sign, usage)
        for usage in usages
        for at, sign in ((usage.since, 1), (usage.until, -1))
        if usage.until > usage.since
    ]
    # If one usage ends and another begins at the same time, the end comes first in the list: ends
    # have the sign -1, and beginnings have the sign 1.
    changes.sort(key=lambda change: change[:2])

    used: dict[str, float] = dict.fromkeys(limits, 0)
    peak = dict(used)
    faults = []
    users: list[str] = []
    for at, sign, usage in changes:
        if sign > 0:
            users.append(usage.run)
        else:
            users.remove(usage.run)
        for resource, amount in usage.amounts.items():
            used[resource] = used.get(resource, 0) + sign * amount
            peak[resource] = max(peak.get(resource, 0), used[resource])
            limit = limits.get(resource, 0)
            if sign > 0 and used[resource] > limit:
                shown = f"{used[resource]:g} of {limit:g} {resource}"
                faults.append(f"{shown} at {at:.3f}: {', '.join(users)}")
    return peak, faults


def _find_overtaking(
    runs: Sequence[History],
    holds: Mapping[str, Sequence[Hold]],
    nodes: Mapping[str, int] | None,
    late_s: float,
) -> tuple[list[float], list[str]]:
    """Find overtaken runs. A run is overtaken if a run behind it in the queue is admitted earlier.

    Overtaking is a fault if the free GPUs did not suffice for both runs. If the GPUs sufficed for
    both runs, overtaking is a fault only if the overtaken run is admitted more than `late_s`
    seconds after the other run. A shorter delay is allowed, because one scheduling pass may admit
    both runs in any order.

    Args:
        runs: Histories of all runs of the queue.
        holds: Mapping from the name of a run to the periods in which the run held its GPUs.
        nodes: Mapping from the name of each node to its number of GPUs. None if the nodes of the
            runs are unknown. Then only delays are checked.
        late_s: Longest allowed delay of a run, in seconds, after the admission of a run behind it
            in the queue.

    Returns:
        The delays in seconds, and the descriptions of the faults.
    """
    all_holds = [hold for holds_of_run in holds.values() for hold in holds_of_run]
    delays_s: list[float] = []
    faults: list[str] = []
    for run in runs:
        for since, until, due in _list_waits(run, holds[run.name]):
            earlier_holds: list[Hold] = []
            for other in runs:
                if other.place <= run.place:
                    continue
                # When the wait of `run` begins, a scheduling pass may be in progress that does not
                # know `run` yet. The pass may admit `other`, if `other` was submitted before `run`.
                # So ignore admissions of `other` in the first `late_s` seconds of the wait.
                began = since if other.submitted_at > run.submitted_at else since + late_s
                for hold in holds[other.name]:
                    if not began < hold.since < until:
                        continue
                    current_holds = [
                        current
                        for current in all_holds
                        if current.since <= hold.since < current.until
                    ]
                    if nodes is None or _fits(run, nodes, current_holds):
                        earlier_holds.append(hold)
                    else:
                        text = f"{hold.run} passed {run.name}, for which there was no room"
                        faults.append(text)
            if earlier_holds and any(hold.since == until for hold in holds[run.name]):
                first = min(earlier_holds, key=lambda hold: hold.since)
                delay_s = until - max(due, first.since)
                if delay_s > 0:
                    delays_s.append(delay_s)
                if delay_s > late_s:
                    text = f"{run.name} was admitted {delay_s:.2f} s after {first.run}"
                    faults.append(text)
    return delays_s, faults


def _list_waits(run: History, holds: Sequence[Hold]) -> Iterator[tuple[float, float, float]]:
    """Yield the periods in which a run waited in the queue.

    Args:
        run: History of the run.
        holds: Periods in which the run held its GPUs. The start of a period with GPUs ends a wait.

    Yields:
        Start of the wait, end of the wait, and scheduled start of the run, in UTC epoch seconds.
    """
    since: float | None = None
    due = 0.0
    for state in run.states:
        starts = any(hold.since == state.at for hold in holds)
        if state.is_wait:
            since = state.at if since is None else since
            due = max(due, state.due)
        elif since is not None and (starts or state.type in FINAL):
            yield since, state.at, due
            since = None
            due = 0.0


def _fits(run: History, nodes: Mapping[str, int], holds: Iterable[Hold]) -> bool:
    """Return True if enough GPUs for a run are free on the nodes.

    Args:
        run: History of the run, with the requested nodes and GPUs.
        nodes: Mapping from the name of a node to its number of GPUs.
        holds: Periods in which other runs hold GPUs. These GPUs are not free.
    """
    free = dict(nodes)
    for hold in holds:
        for node, gpus in (hold.nodes or {}).items():
            free[node] = free.get(node, 0) - gpus
    return sum(gpus >= run.gpus for gpus in free.values()) >= run.nodes


def _shorten(faults: Sequence[str]) -> Iterator[str]:
    """Yield the first `_MAX_FAULTS_OF_KIND` messages, and then the number of omitted messages."""
    yield from faults[:_MAX_FAULTS_OF_KIND]
    if len(faults) > _MAX_FAULTS_OF_KIND:
        yield f"... and {len(faults) - _MAX_FAULTS_OF_KIND} more like the last"
