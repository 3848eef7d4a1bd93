"""What became of the runs of a gang queue, judged without the queue's word.

The evidence is the history that the server has of each flow run, and what the components of the
runs have written down of themselves. Pure: what fetches the evidence is `gang_pool`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

WAITING = "PendingResources"
FINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
#: A run that is cancelled has its grace periods, and then gives its GPUs back; a server on SQLite
#: may keep its word for 60 s.
_CANCELLED_WITHIN_S = 120.0
#: How many faults of one sort are told.
_TOLD = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One state of a flow run, as its server has it."""

    #: UTC epoch seconds, by the server's clock.
    at: float
    type: str
    name: str
    #: Not to start before, UTC epoch seconds.
    due: float = 0.0

    @property
    def is_wait(self) -> bool:
        """It has no GPUs: without a process, or in its own."""
        return self.type == "SCHEDULED" or (self.type == "RUNNING" and self.name == WAITING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One life of a component, by its own word."""

    attempt: int
    pid: int
    began: float
    #: None: it was killed before it could say so.
    ended: float | None = None
    #: `gpus[node]` that its run had by then; None where it did not come to ask.
    nodes: Mapping[str, int] | None = None
    #: Where it ran.
    host: str = ""
    #: What it saw of the GPUs there; None: nobody has said which it may see.
    devices: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run, from its submission on."""

    name: str
    #: What it asks for.
    nodes: int
    gpus: int
    #: Its place in the line, by rank of its queue and number of its submission.
    place: tuple[int, int]
    states: Sequence[State]
    parts: Sequence[Part] = ()
    #: `gpus[node]` that it was given last.
    placed: Mapping[str, int] | None = None
    #: How it may end.
    may_end: frozenset[str] = frozenset({"COMPLETED"})

    @property
    def submitted_at(self) -> float:
        return self.states[0].at if self.states else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A time in which a run had its gang."""

    run: str
    since: float
    #: Infinite where it has it still.
    until: float
    #: In all.
    gpus: int
    #: None where nobody can say on which nodes.
    nodes: Mapping[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was found."""

    #: What must not be; empty where all is well.
    faults: tuple[str, ...]
    #: The most that was held at once: `peak[node]`, and `GPUs` and `runs` in all.
    peak: Mapping[str, float]
    #: Runs that were admitted at least once, and admissions in all.
    admitted: int
    admissions: int
    #: Runs that were admitted after a younger one beside which they fitted, and the longest time
    #: that they came after it, in seconds: of one pass, the answers may come in any order.
    late: int = 0
    late_s: float = 0.0

    def __str__(self) -> str:
        peak = ", ".join(f"{amount:g} {what}" for what, amount in self.peak.items())
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
    """Hold the histories against what a queue of gangs promises.

    Args:
        nodes: `gpus[node]` that there are.
        most_runs: how many may hold their gang at once.
        late_s: how long a run may start after a younger one of the same pass.
        in_order: whether nobody may pass: strict FIFO within a rank.
        by_states: whether a gang is held for as long as the states say, and where it was promised.
            Ray places by itself, and has GPUs back before a run that ends has said so: then only
            what the components say of GPUs and nodes counts.
    """
    holds = {run.name: list(holds_of(run)) for run in runs}
    everything = [hold for of_run in holds.values() for hold in of_run]
    limits = {"GPUs": float(sum(nodes.values())), "runs": most_runs, **nodes}
    peak, too_much = _peaks(map(_taken, everything), limits) if by_states else ({}, [])
    peak_of_parts, too_much_by_parts = _peaks(_taken_by_parts(runs, holds), nodes)
    known = nodes if by_states else None
    twice = _seen_twice(runs, holds) if by_states else []
    late, passed = _passing(runs, holds, known, late_s) if in_order else ([], [])
    sorts = (
        [fault for run in runs for fault in _endings(run)],
        [fault for run in runs for fault in _doubles(run, holds[run.name])],
        [f"by their states: {fault}" for fault in too_much],
        [f"by the components: {fault}" for fault in too_much_by_parts],
        [fault for run in runs for fault in _strays(run)] if by_states else [],
        [f"by what they saw: {fault}" for fault in twice],
        passed,
    )
    return Judgement(
        faults=tuple(fault for sort in sorts for fault in _few(sort)),
        peak=peak if by_states else peak_of_parts,
        admitted=sum(bool(of_run) for of_run in holds.values()),
        admissions=len(everything),
        late=len(late),
        late_s=max(late, default=0.0),
    )


def holds_of(run: History) -> Iterator[Hold]:
    """When a run had its gang: from Pending, or the end of a wait in its own process, until it
    waits again or has ended."""
    stretches: list[tuple[float, float]] = []
    since: float | None = None
    for state in run.states:
        if state.is_wait or state.type in FINAL:
            # Before it waits in its process it has only looked whether there is room.
            has_looked = state.type == "RUNNING" and not any(
                since is not None and since <= part.began <= state.at for part in run.parts
            )
            if since is not None and not has_looked:
                stretches.append((since, state.at))
            since = None
        elif since is None and state.type in ("PENDING", "RUNNING"):
            since = state.at
    if since is not None:
        stretches.append((since, math.inf))
    for index, (began, ended) in enumerate(stretches):
        of_parts = [part.nodes for part in run.parts if began <= part.began <= ended and part.nodes]
        last = run.placed if index == len(stretches) - 1 else None
        nodes = of_parts[-1] if of_parts else last
        gpus = run.nodes * run.gpus
        yield Hold(run=run.name, since=began, until=ended, gpus=gpus, nodes=nodes)


def _endings(run: History) -> Iterator[str]:
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
    return len(placed) == run.nodes and set(placed.values()) == {run.gpus}


def _doubles(run: History, holds: Sequence[Hold]) -> Iterator[str]:
    """What was started twice, or without its gang."""
    for before, after in pairwise(state for state in run.states if state.type != "RUNNING"):
        # Prefect's own next one, "Submitting", is no admission.
        if before.type == after.type == "PENDING" and after.name == "Pending":
            yield f"{run.name} was admitted again {after.at - before.at:.2f} s after it had been"
    parts = sorted(run.parts, key=lambda part: part.began)
    for one, next_one in pairwise(parts):
        pids = f"{one.pid}, {next_one.pid}"
        if one.attempt == next_one.attempt:
            yield f"attempt {one.attempt} of {run.name} ran twice: {pids}"
        elif one.ended is not None and one.ended > next_one.began:
            yield f"{run.name} ran twice at once: {pids}"
    for part in parts:
        hold = next((h for h in holds if h.since <= part.began <= h.until), None)
        if hold is None:
            yield f"a component of {run.name} (pid {part.pid}) ran without a gang"
        elif part.ended is not None and part.ended > hold.until:
            over_s = part.ended - hold.until
            yield f"a component of {run.name} ran {over_s:.2f} s after its gang was given back"
    if parts and parts[-1].ended is None and run.states[-1].type == "COMPLETED":
        yield f"{run.name} completed, and its component (pid {parts[-1].pid}) never ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    who: str
    since: float
    until: float
    what: Mapping[str, float] = field(default_factory=dict)


def _taken(hold: Hold) -> _Taken:
    what = {"GPUs": hold.gpus, "runs": 1, **(hold.nodes or {})}
    return _Taken(who=hold.run, since=hold.since, until=hold.until, what=what)


def _strays(run: History) -> Iterator[str]:
    """Components that ran elsewhere than was granted, or saw too many devices or too few."""
    for part in run.parts:
        if part.devices is None or len(set(part.devices)) != run.gpus:
            yield f"{run.name} has {run.gpus} GPUs, and its component saw {part.devices}"
        if part.nodes is not None and part.host not in part.nodes:
            yield f"{run.name} was granted {dict(part.nodes)}, and ran on {part.host}"


def _seen_twice(runs: Iterable[History], holds: Mapping[str, Sequence[Hold]]) -> list[str]:
    """The devices that two components saw at one time."""
    seen = [
        replace(one, what={f"device {device} of {part.host}": 1 for device in part.devices or ()})
        for run in runs
        for part, one in zip(run.parts, _taken_by_parts([run], holds), strict=True)
    ]
    limits = {what: 1.0 for one in seen for what in one.what}
    return _peaks(seen, limits)[1]


def _taken_by_parts(
    runs: Iterable[History], holds: Mapping[str, Sequence[Hold]]
) -> Iterator[_Taken]:
    for run in runs:
        for part in run.parts:
            ends = (hold.until for hold in holds[run.name] if hold.until >= part.began)
            # It ended with its gang at the latest; that it did is another matter.
            until = part.ended if part.ended is not None else next(ends, part.began)
            nodes = dict(part.nodes or {})
            yield _Taken(who=run.name, since=part.began, until=until, what=nodes)


def _peaks(
    taken: Iterable[_Taken], limits: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """The most of everything, and each time that it was more than there is."""
    moments = [
        (at, step, one)
        for one in taken
        for at, step in ((one.since, 1), (one.until, -1))
        if one.until > one.since
    ]
    # At an instant, all ends come first.
    moments.sort(key=lambda moment: moment[:2])
    used: dict[str, float] = dict.fromkeys(limits, 0)
    peak, faults = dict(used), []
    by: list[str] = []
    for at, step, one in moments:
        by.append(one.who) if step > 0 else by.remove(one.who)
        for what, amount in one.what.items():
            used[what] = used.get(what, 0) + step * amount
            peak[what] = max(peak.get(what, 0), used[what])
            if step > 0 and used[what] > limits.get(what, 0):
                most = limits.get(what, 0)
                faults.append(f"{used[what]:g} of {most:g} {what} at {at:.3f}: {', '.join(by)}")
    return peak, faults


def _passing(
    runs: Sequence[History],
    holds: Mapping[str, Sequence[Hold]],
    nodes: Mapping[str, int] | None,
    late_s: float,
) -> tuple[list[float], list[str]]:
    """How late runs were after younger ones of their pass (s), and who was passed unduly.

    A run that fitted beside the younger one at that moment was not passed: the same pass has
    admitted both, or had to count its gang, which it gave back just then, as held.

    Args:
        nodes: None: nobody can say what fitted.
    """
    everything = [hold for of_run in holds.values() for hold in of_run]
    late: list[float] = []
    faults: list[str] = []
    for run in runs:
        for since, until, due in _waits(run, holds[run.name]):
            came_after: list[Hold] = []
            for other in runs:
                if other.place <= run.place:
                    continue
                # The pass that admitted the other may have begun before this one came.
                began = since if other.submitted_at > run.submitted_at else since + late_s
                for hold in holds[other.name]:
                    if not began < hold.since < until:
                        continue
                    beside = [one for one in everything if one.since <= hold.since < one.until]
                    if nodes is None or _fits(run, nodes, beside):
                        came_after.append(hold)
                    else:
                        text = f"{hold.run} passed {run.name}, for which there was no room"
                        faults.append(text)
            if came_after and any(hold.since == until for hold in holds[run.name]):
                first = min(came_after, key=lambda hold: hold.since)
                took_s = until - max(due, first.since)
                if took_s > 0:
                    late.append(took_s)
                if took_s > late_s:
                    text = f"{run.name} was admitted {took_s:.2f} s after {first.run}"
                    faults.append(text)
    return late, faults


def _waits(run: History, holds: Sequence[Hold]) -> Iterator[tuple[float, float, float]]:
    """Since when, until when, and not to start before when (s): the times it stood in line."""
    since: float | None = None
    due = 0.0
    for state in run.states:
        starts = any(hold.since == state.at for hold in holds)
        if state.is_wait:
            since = state.at if since is None else since
            due = max(due, state.due)
        elif since is not None and (starts or state.type in FINAL):
            yield since, state.at, due
            since, due = None, 0.0


def _fits(run: History, nodes: Mapping[str, int], holds: Iterable[Hold]) -> bool:
    free = dict(nodes)
    for hold in holds:
        for node, gpus in (hold.nodes or {}).items():
            free[node] = free.get(node, 0) - gpus
    return sum(gpus >= run.gpus for gpus in free.values()) >= run.nodes


def _few(faults: Sequence[str]) -> Iterator[str]:
    yield from faults[:_TOLD]
    if len(faults) > _TOLD:
        yield f"... and {len(faults) - _TOLD} more like the last"
