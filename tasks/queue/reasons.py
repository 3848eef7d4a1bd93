"""The reason why a run waits, in one line: its demand, what it waits for, and what is free.

The functions have no side effects. Details that change often stand at the end of the line,
after the part that `steady_part` returns. A run's state is only rewritten if that part has changed,
because every rewrite adds a state to the history of its flow run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tasks.queue.packing import Demand
from tasks.queue.policy import Reason, Why
from tasks.queue.settings import LEFT_OUT
from tasks.spec.formatting import format_count, format_minute, format_time, join_commas, join_words

#: Number of runs at the front of the queue whose reason names the first run. With all runs, every
#: start of a run would rewrite the reasons of the whole queue.
TOLD_THE_FIRST = 10

#: Parts of a reason. The text that follows them changes often.
FREE_NOW = "; free now: "
_SILENT = ", which does not answer"

#: Largest number of names in a list.
_MAX_NAMES = 4
_MAX_ERROR_CHARACTERS = 200
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The reason why a run waits, as its state shows it."""

    #: What the run needs; None if it needs no GPUs.
    demand: Demand | None
    #: Why the run waits.
    reason: str
    #: Text about free GPUs, which changes often.
    free: str = ""
    #: Expected start in UTC epoch seconds. None if unknown.
    starts_at: float | None = None
    #: True if the run waits for something other than the end of a run, such as a limit. More runs
    #: behind it are then examined.
    is_held_back: bool = False

    @property
    def text(self) -> str:
        return f"asks for {describe_gang(self.demand)}; {self.reason}{self.free}"


def steady_part(text: str) -> str:
    """Return the part of a reason that changes seldom. If it changes, the state is rewritten."""
    return text.partition(FREE_NOW)[0].partition(_SILENT)[0]


def explain_wait(
    demand: Demand | None,
    reason: Reason,
    names: Mapping[str, str],
    *,
    free: Mapping[str, int],
    now: float,
    drained: Mapping[str, int] | None = None,
    unserved_free: Mapping[str, int] | None = None,
    pool: str = "",
    others: float = 0.0,
    number: int = 1,
    limit: int = 0,
    not_before: float | None = None,
) -> Message:
    """Explain why the policy does not start a run.

    Args:
        demand: What the run needs.
        reason: The decision of the policy.
        names: `name[id]` of runs. A run without an entry is named by its id.
        free: Free GPUs of each node of the run's cluster after the pass; 0 for a drained node.
        now: Current time in UTC epoch seconds.
        drained: For each drained node, the GPUs that would be free without the drain.
        unserved_free: For each node without a worker of the run's pool, the free GPUs.
        pool: Name of the run's pool.
        others: GPUs on all nodes that are used by anything but Muster's runs.
        number: Position in the queue, from 1.
        limit: Limit of GPUs of the tag, if that is the reason.
        not_before: For a run that was sent back, when it is tried again, in UTC epoch seconds.
    """
    is_held_back = False
    names_waited_for = [names.get(id, id) for id in reason.waits_for]
    first = next(iter(names_waited_for), "")
    match reason.why:
        case Why.GPUS:
            assert demand is not None
            text, is_held_back = _lack_of_gpus(
                demand,
                reason,
                names_waited_for,
                free=free,
                now=now,
                drained=drained or {},
                unserved_free=unserved_free or {},
                pool=pool,
                others=others,
            )
        case Why.LIMIT:
            text = f"waits for GPUs of the tag {reason.tag}, which has reached its limit of {limit}"
            is_held_back = True
        case Why.RETRY:
            retry_time = f", and is tried again at {format_time(not_before)}" if not_before else ""
            text = f"was sent back, as its GPUs were not free after all{retry_time}"
        case _ if number > TOLD_THE_FIRST or not reason.waits_for:
            text = "waits behind earlier runs of the line"
        case Why.BEHIND:
            text = f"waits behind {first}, which is first in line"
        case Why.WOULD_DELAY:
            text = f"would fit, but delay {first}, which is first in line"
    return Message(
        demand=demand,
        reason=text,
        free=f"{FREE_NOW}{describe_free(free)}",
        starts_at=reason.starts_at,
        is_held_back=is_held_back,
    )


def _lack_of_gpus(
    demand: Demand,
    reason: Reason,
    names_waited_for: list[str],
    *,
    free: Mapping[str, int],
    now: float,
    drained: Mapping[str, int],
    unserved_free: Mapping[str, int],
    pool: str,
    others: float,
) -> tuple[str, bool]:
    """Explain why the first run of the queue has no GPUs.

    Returns:
        The text, and the value of `Message.is_held_back`.
    """
    is_held_back = False
    parts = []
    if names_waited_for:
        expected = "nobody can say when"
        if reason.starts_at is not None:
            # A time in the near future would change with every pass, so it is not named.
            is_near = reason.starts_at < now + _MINUTE_S
            when = "any moment" if is_near else f"{format_minute(reason.starts_at, now)} UTC"
            expected = f"expected {when}"
        parts.append(f"waits for {_listed(names_waited_for)} to end, {expected}")

    if _fits(demand, free):
        parts.append(f"too few nodes have {demand.cpus_per_node:g} CPUs free with the GPUs")
    elif _fits(demand, {**free, **unserved_free}):
        nodes = _listed(sorted(name for name, gpus in unserved_free.items() if gpus))
        command = f"prefect worker start --pool {pool}"
        parts.append(f"would fit where no worker runs: {nodes} (run there: {command})")
        is_held_back = True
    elif _fits(demand, {**free, **drained}):
        parts.append(f"would fit but for what is drained: {_listed(sorted(drained))}")
    elif not names_waited_for and others:
        parts.append(f"others than the runs of this queue have {others:g} GPUs")
    elif not names_waited_for:
        parts.append("waits for nodes to come back: no run's end makes room enough")
    if reason.is_passed:
        parts.append("others pass it meanwhile")
    return "; ".join(parts), is_held_back


def paused_message(demand: Demand | None, pool: str, queue: str = "") -> Message:
    """Return the message for a run whose pool, or whose queue of the pool, is paused."""
    place = f"the queue {queue} of the work pool {pool}" if queue else f"the work pool {pool}"
    return Message(demand=demand, reason=f"waits, as {place} is paused")


def unserved_message(demand: Demand | None, pool: str, queue: str) -> Message:
    """Return the message for a run in a queue of the pool that no worker serves."""
    place = f"the queue {queue} of the work pool {pool}"
    text = f"waits for a worker: none serves {place} (prefect worker start --pool {pool})"
    return Message(demand=demand, reason=text, is_held_back=True)


def offered_message(demand: Demand | None, gpus: Mapping[str, int]) -> Message:
    """Return the message for a run that fits, but that another worker must start."""
    wait = f"waits for the worker of {_listed(gpus)}" if gpus else "waits for a worker of its pool"
    text = f"{wait} to start it, which is full or finds GPUs there leased or unfit"
    return Message(demand=demand, reason=text)


def pool_limit_message(demand: Demand | None, pool: str, limit: int) -> Message:
    """Return the message for a run whose pool has reached its limit of runs."""
    at_limit = f"the work pool {pool} is at its limit of {format_count(limit, 'run')}"
    return Message(demand=demand, reason=f"waits for a run to end: {at_limit}")


def no_answer_message(demand: Demand | None, address: str, error: object) -> Message:
    """Return the message for a run whose cluster or table of nodes cannot be read.

    Args:
        demand: What the run needs.
        address: Address of the run's cluster, LEFT_OUT, or an empty string for a node table.
        error: Why it cannot be read.
    """
    why = one_line(error)
    text = f"waits for its cluster, {address}{_SILENT} ({why})"
    if address == LEFT_OUT:
        text = f"waits for its cluster, as {why}"
    if not address:
        text = f"waits for nodes: {why}"
    return Message(demand=demand, reason=text, is_held_back=True)


def describe_gang(demand: Demand | None) -> str:
    """Describe the GPUs of a demand: `2 nodes with 8 GPUs each`."""
    if demand is None:
        return "no GPUs"
    each = "" if demand.nodes == 1 else " each"
    nodes = format_count(demand.nodes, "node")
    return f"{nodes} with {format_count(demand.gpus_per_node, 'GPU')}{each}"


def describe_free(free: Mapping[str, int]) -> str:
    """Describe the free GPUs of nodes, largest first: `8 on 2 nodes, 0 on 1 node`."""
    sizes = sorted(Counter(max(0, gpus) for gpus in free.values()).items(), reverse=True)
    return (
        join_commas(f"{gpus} on {format_count(nodes, 'node')}" for gpus, nodes in sizes) or "none"
    )


def one_line(error: object) -> str:
    """Return an error as one line that the UI can show."""
    # The UI would take <urlopen error ...> for an HTML tag and hide it.
    line = " ".join(str(error).split()).translate(str.maketrans("<>", "[]"))
    if len(line) <= _MAX_ERROR_CHARACTERS:
        return line
    return f"{line[: _MAX_ERROR_CHARACTERS - 1]}…"


def _fits(demand: Demand, free: Mapping[str, int]) -> bool:
    return sum(gpus >= demand.gpus_per_node for gpus in free.values()) >= demand.nodes


def _listed(items: Iterable[object]) -> str:
    return join_words(items, at_most=_MAX_NAMES)
