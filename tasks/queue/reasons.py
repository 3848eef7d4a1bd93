"""Why a run waits, in one line: what it asks, what is free, what it waits for. Pure.

What changes often stands at the end: every rewrite is one more state in the history of its flow
run, and is done only where the `steady` part of the line has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tasks.queue.packing import Demand
from tasks.queue.policy import Reason, Why
from tasks.queue.settings import LEFT_OUT
from tasks.spec.words import clock, commas, counted, listed, minute_seen

#: Only so many of the line are told who is first: all the others would be told anew each time that
#: the line moves.
TOLD_THE_FIRST = 10

#: What stands after them changes often.
FREE_NOW = "; free now: "
_SILENT = ", which does not answer"

#: How many names a line lists.
_LISTED = 4
_ERROR_CHARACTERS = 200
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What the state of a run that waits says."""

    #: What the run asks for.
    demand: Demand | None
    #: Why it waits.
    reason: str
    #: What is free meanwhile, which changes often.
    free: str = ""
    #: When it is expected to start, UTC epoch seconds; None: nobody can say.
    starts_at: float | None = None
    #: It is kept whatever ends: runs behind it are looked for.
    is_held_back: bool = False

    @property
    def text(self) -> str:
        return f"asks for {gang_in_words(self.demand)}; {self.reason}{self.free}"


def steady(text: str) -> str:
    """As long as it is the same, the state is not worth a rewrite."""
    return text.partition(FREE_NOW)[0].partition(_SILENT)[0]


def message_of(
    demand: Demand | None,
    reason: Reason,
    names: Mapping[str, str],
    *,
    free: Mapping[str, int],
    now: float,
    drained: Mapping[str, int] | None = None,
    unserved: Mapping[str, int] | None = None,
    pool: str = "",
    others: float = 0.0,
    number: int = 1,
    limit: int = 0,
    not_before: float | None = None,
) -> Message:
    """Why the policy lets a run wait.

    Args:
        names: Of flow runs, by id; one that is missing is called by its id.
        free: GPUs free on each node of its cluster after the pass; 0 on a drained one.
        now: UTC epoch seconds, as are the times of `reason`.
        drained: GPUs that would be free on each drained node.
        unserved: GPUs that are free on each node whose host has no worker of its pool to start it.
        others: GPUs in use by others than our runs, on all nodes.
        number: Its place in the line, from 1 on.
        limit: GPUs that its tag may have, where that is the reason.
        not_before: When a run that was sent back is tried again.
    """
    drained, unserved, is_held_back = drained or {}, unserved or {}, False
    ended = [names.get(id, id) for id in reason.waits_for]
    first = next(iter(ended), "")
    match reason.why:
        case Why.GPUS:
            assert demand is not None
            parts = []
            if ended:
                expected, at = "nobody can say when", reason.starts_at
                if at is not None:
                    # What is near has no time, which would move with the clock.
                    is_near = at < now + _MINUTE_S
                    when = "any moment" if is_near else f"{minute_seen(at, now)} UTC"
                    expected = f"expected {when}"
                parts.append(f"waits for {_listed(ended)} to end, {expected}")
            if _fits(demand, free):
                cpus = f"{demand.cpus_per_node:g}"
                parts.append(f"too few nodes have {cpus} CPUs free with the GPUs")
            elif _fits(demand, {**free, **unserved}):
                there = _listed(sorted(name for name, gpus in unserved.items() if gpus))
                start = f"prefect worker start --pool {pool}"
                parts.append(f"would fit where no worker runs: {there} (run there: {start})")
                is_held_back = True
            elif _fits(demand, {**free, **drained}):
                parts.append(f"would fit but for what is drained: {_listed(sorted(drained))}")
            elif not ended and others:
                parts.append(f"others than the runs of this queue have {others:g} GPUs")
            elif not ended:
                parts.append("waits for nodes to come back: no run's end makes room enough")
            if reason.is_passed:
                parts.append("others pass it meanwhile")
            text = "; ".join(parts)
        case Why.LIMIT:
            text = f"waits for GPUs of the tag {reason.tag}, which has reached its limit of {limit}"
            is_held_back = True
        case Why.RETRY:
            again = f", and is tried again at {clock(not_before)}" if not_before else ""
            text = f"was sent back, as its GPUs were not free after all{again}"
        case _ if number > TOLD_THE_FIRST or not reason.waits_for:
            text = "waits behind earlier runs of the line"
        case Why.BEHIND:
            text = f"waits behind {first}, which is first in line"
        case Why.WOULD_DELAY:
            text = f"would fit, but delay {first}, which is first in line"
    return Message(
        demand=demand,
        reason=text,
        free=f"{FREE_NOW}{free_on(free)}",
        starts_at=reason.starts_at,
        is_held_back=is_held_back,
    )


def paused(demand: Demand | None, pool: str, queue: str = "") -> Message:
    """Why a run waits whose pool, or whose queue of the pool, is paused."""
    what = f"the queue {queue} of the work pool {pool}" if queue else f"the work pool {pool}"
    return Message(demand=demand, reason=f"waits, as {what} is paused")


def unserved(demand: Demand | None, pool: str, queue: str) -> Message:
    """Why a run waits in a queue of the pool that no worker takes runs from."""
    what = f"the queue {queue} of the work pool {pool}"
    text = f"waits for a worker: none serves {what} (prefect worker start --pool {pool})"
    return Message(demand=demand, reason=text, is_held_back=True)


def offered(demand: Demand | None, gpus: Mapping[str, int]) -> Message:
    """Why a run waits for which there is room, where that is another worker's to give."""
    who = f"waits for the worker of {_listed(gpus)}" if gpus else "waits for a worker of its pool"
    text = f"{who} to start it, which is full or finds GPUs there leased or unfit"
    return Message(demand=demand, reason=text)


def at_pool_limit(demand: Demand | None, pool: str, limit: int) -> Message:
    """Why a run waits whose pool runs as many as it may."""
    at_limit = f"the work pool {pool} is at its limit of {counted(limit, 'run')}"
    return Message(demand=demand, reason=f"waits for a run to end: {at_limit}")


def no_answer(demand: Demand | None, address: str, error: object) -> Message:
    """Why a run waits whose cluster, or where it names none whose pool's nodes, can't be seen."""
    why = one_line(error)
    text = f"waits for its cluster, {address}{_SILENT} ({why})"
    if address == LEFT_OUT:
        text = f"waits for its cluster, as {why}"
    if not address:
        text = f"waits for nodes: {why}"
    return Message(demand=demand, reason=text, is_held_back=True)


def gang_in_words(demand: Demand | None) -> str:
    """`2 nodes with 8 GPUs each`."""
    if demand is None:
        return "no GPUs"
    each = "" if demand.nodes == 1 else " each"
    return f"{counted(demand.nodes, 'node')} with {counted(demand.gpus_per_node, 'GPU')}{each}"


def free_on(free: Mapping[str, int]) -> str:
    """`8 on 2 nodes, 0 on 1 node`: GPUs free on each node, largest first."""
    sizes = sorted(Counter(max(0, gpus) for gpus in free.values()).items(), reverse=True)
    return commas(f"{gpus} on {counted(nodes, 'node')}" for gpus, nodes in sizes) or "none"


def one_line(error: object) -> str:
    """An error as the UI can show it within a line."""
    # The UI would take <urlopen error ...> for HTML, and show nothing.
    words = " ".join(str(error).split()).translate(str.maketrans("<>", "[]"))
    return words if len(words) <= _ERROR_CHARACTERS else f"{words[: _ERROR_CHARACTERS - 1]}…"


def _fits(demand: Demand, free: Mapping[str, int]) -> bool:
    return sum(gpus >= demand.gpus_per_node for gpus in free.values()) >= demand.nodes


def _listed(items: Iterable[object]) -> str:
    return listed(items, at_most=_LISTED)
