"""Texts that explain why a run waits.

A text has a single line: demand, reason and free GPUs. The functions have no side effects. Details
that change often come last in a text. The function `steady_part` removes these details. The
scheduler rewrites the state of a waiting run only if the steady part has changed. Every rewrite
adds a state to the history of the flow run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tasks.queue.packing import Demand
from tasks.queue.policy import Reason, Why
from tasks.queue.settings import CLUSTER_OF_POOL
from tasks.spec.formatting import format_count, format_minute, format_time, join_commas, join_words

#: Only runs up to this position of the queue get a message that names the first run of the queue.
#: Otherwise every start of a run would change the messages of all waiting runs.
MAX_POSITION_WITH_FIRST_RUN = 3

#: Beginning of the text about free GPUs in a message. The text changes often, so `steady_part`
#: removes it.
FREE_NOW = "; free now: "
#: Part of the message for a run whose Ray cluster does not answer. The error follows these words.
#: The error changes often, so `steady_part` removes these words and the error.
_SILENT = ", which does not answer"

#: Largest number of run or node names in a text.
_MAX_NAMES = 4
#: Largest number of characters of an error in a message. A longer error is shortened.
_MAX_ERROR_CHARACTERS = 300
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The message in the state of a waiting run on the Prefect server."""

    #: GPUs and CPUs that the run needs, or None if the run needs no GPUs.
    demand: Demand | None
    #: Text of the reason for waiting.
    reason: str
    #: Text about the free GPUs of the nodes. The text changes often.
    free: str = ""
    #: Expected start of the run in UTC epoch seconds, or None if unknown.
    starts_at: float | None = None
    #: True if the expected start is uncertain, because it depends on a run whose spec names no
    #: duration. A default duration was assumed for that run.
    is_start_assumed: bool = False
    #: True if the run cannot start even after other runs have ended, for example because no worker
    #: serves its queue. The scheduler does not count such a run as startable.
    waits_for_no_end: bool = False

    @property
    def text(self) -> str:
        """Complete message of the state: demand, reason and free GPUs."""
        return f"needs {describe_gang(self.demand)}; {self.reason}{self.free}"


def steady_part(text: str) -> str:
    """Return the message of a waiting run without the details that change often.

    These details are the free GPUs, and the error of a Ray cluster that does not answer. The
    scheduler rewrites the state of the run only if the rest of the message has changed.
    """
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
    """Return the message of a run that the scheduling policy does not start in this pass.

    Args:
        demand: GPUs and CPUs that the run needs.
        reason: The policy's reason for not starting the run.
        names: Mapping from run id to the name of the run. A run that is not in the mapping is named
            by its id.
        free: Mapping from node name to the number of free GPUs after the scheduling pass, for the
            nodes of the run's cluster. The number is 0 for a drained node.
        now: Current time in UTC epoch seconds.
        drained: Mapping from the name of a drained node to the number of GPUs that would be free
            without the drain.
        unserved_free: Mapping from the name of a node without a worker of the run's work pool to
            the number of free GPUs.
        pool: Name of the run's work pool.
        others: Number of GPUs on all nodes together that programs other than Muster's runs use.
        number: Position of the run in the queue. The first position is 1.
        limit: Largest number of GPUs for the run's tag. Used only if the tag is the reason.
        not_before: Earliest next start of a requeued run in UTC epoch seconds. None if the run was
            not requeued.
    """
    waits_for_no_end = False
    names_waited_for = [names.get(id, id) for id in reason.waits_for]
    first_run = next(iter(names_waited_for), "")
    match reason.why:
        case Why.GPUS:
            assert demand is not None
            text, waits_for_no_end = _explain_missing_gpus(
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
            text = (
                f"waits because all runs with the tag {reason.tag} together may use at most "
                f"{limit} GPUs"
            )
            waits_for_no_end = True
        case Why.RETRY:
            retry_time = f"; next try at {format_time(not_before)}" if not_before else ""
            text = f"was requeued because its GPUs were not free{retry_time}"
        case _ if number > MAX_POSITION_WITH_FIRST_RUN or not reason.waits_for:
            text = "waits behind earlier runs in the queue"
        case Why.BEHIND:
            text = f"waits behind {first_run}, which is first in the queue"
        case Why.WOULD_DELAY:
            text = (
                f"its GPUs are free, but its start would delay {first_run}, which is first in the "
                "queue"
            )
    return Message(
        demand=demand,
        reason=text,
        free=f"{FREE_NOW}{describe_free(free)}",
        starts_at=reason.starts_at,
        is_start_assumed=reason.is_start_assumed,
        waits_for_no_end=waits_for_no_end,
    )


def _explain_missing_gpus(
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
    """Explain why the first run of the queue does not get its GPUs.

    For the arguments, see `explain_wait`.

    Returns:
        Two values: the explanation, and the value of the field `waits_for_no_end` for the `Message`
            of the run.
    """
    waits_for_no_end = False
    parts = []
    if names_waited_for:
        expected = "expected time unknown"
        if reason.starts_at is not None:
            # Show no time if the expected start is near or in the past. Otherwise the text would
            # change with every scheduling pass, and each change would cause a write to the Prefect
            # server.
            is_near = reason.starts_at < now + _MINUTE_S
            when = "soon" if is_near else f"{format_minute(reason.starts_at, now)} UTC"
            expected = f"expected {when}"
            if reason.is_start_assumed:
                # The parts of the message are separated by semicolons, so this part must not
                # contain a semicolon.
                expected += " (a guess, because at least one of these runs has no `gang.hours`)"
        parts.append(f"waits for {_join_names(names_waited_for)} to end, {expected}")

    if _has_enough_gpus(demand, free):
        cpus = f"{demand.cpus_per_node:g}"
        parts.append(
            f"enough nodes have free GPUs, but too few of these nodes have {cpus} free CPUs"
        )
    elif _has_enough_gpus(demand, {**free, **unserved_free}):
        nodes = _join_names(sorted(name for name, gpus in unserved_free.items() if gpus))
        command = f"prefect worker start --pool {pool}"
        parts.append(
            f"the run would fit on nodes without a worker: {nodes} (start a worker there: "
            f"{command})"
        )
        waits_for_no_end = True
    elif _has_enough_gpus(demand, {**free, **drained}):
        command = "muster queue undrain NODE"
        nodes = _join_names(sorted(drained))
        parts.append(f"would fit on drained nodes: {nodes} (to use them: {command})")
    elif not names_waited_for and others:
        parts.append(f"programs that are not in this queue use {others:g} GPUs")
    elif not names_waited_for:
        parts.append("waits for missing nodes to return, because the present nodes are too few")
    if reason.never_fits_now:
        parts.append("later runs may start before it")
    return "; ".join(parts), waits_for_no_end


def paused_message(demand: Demand | None, pool: str, queue: str = "") -> Message:
    """Return the message for a run whose work pool is paused.

    Args:
        demand: GPUs and CPUs that the run needs.
        pool: Name of the work pool.
        queue: Name of the paused queue of the pool. Empty if the whole pool is paused.
    """
    paused = f"the queue {queue} of the work pool {pool}" if queue else f"the work pool {pool}"
    return Message(demand=demand, reason=f"waits because {paused} is paused")


def no_pool_message(demand: Demand | None, pool: str) -> Message:
    """Return the message for a run that no worker of type `gang` can start.

    Args:
        demand: GPUs and CPUs that the run needs.
        pool: Name of the run's work pool, which is of another type. Empty if the queue of the run,
            or its whole work pool, was deleted.
    """
    cause = (
        f"its work pool {pool} is not of the type gang" if pool else "its work queue was deleted"
    )
    text = f"cannot start, because {cause}: cancel the run, and submit it again"
    return Message(demand=demand, reason=text, waits_for_no_end=True)


def unserved_message(demand: Demand | None, pool: str, queue: str) -> Message:
    """Return the message for a run if no worker serves the run's queue of the work pool."""
    unserved = f"the queue {queue} of the work pool {pool}"
    command = f"prefect worker start --pool {pool}"
    text = f"waits for a worker: no worker serves {unserved} (start a worker: {command})"
    return Message(demand=demand, reason=text, waits_for_no_end=True)


def offered_message(demand: Demand | None, gpus: Mapping[str, int]) -> Message:
    """Return the message for a run that could start now, but that another worker must start.

    Args:
        demand: GPUs and CPUs that the run needs.
        gpus: Mapping from node name to the number of GPUs that the run gets on the node. Empty if
            the run needs no GPUs.
    """
    wait = (
        f"waits for the worker of {_join_names(gpus)}" if gpus else "waits for a worker of its pool"
    )
    cause = (
        "perhaps the worker has reached its limit of runs, other runs use GPUs of that host, or "
        "GPUs are faulty"
    )
    return Message(demand=demand, reason=f"{wait} to start it: {cause}")


def pool_limit_message(demand: Demand | None, pool: str, limit: int) -> Message:
    """Return the message for a run whose work pool has reached its limit of simultaneous runs."""
    at_limit = f"the work pool {pool} is at its limit of {format_count(limit, 'run')}"
    return Message(demand=demand, reason=f"waits for a run to end: {at_limit}")


def deployment_limit_message(demand: Demand | None, limit: int) -> Message:
    """Return the message for a run whose deployment has reached its concurrency limit."""
    text = f"waits because its deployment has reached its limit of {format_count(limit, 'run')}"
    return Message(demand=demand, reason=text, waits_for_no_end=True)


def explain_skip(limit: int, name: str) -> str:
    """Return the reason for the cancellation of a run whose deployment has reached its limit.

    Args:
        limit: Concurrency limit of the deployment.
        name: Name of another run of the deployment that has not ended.
    """
    if limit == 0:
        return "skipped: the deployment allows no runs (its concurrency limit is 0)"
    runs = format_count(limit, "run")
    return f"skipped: the deployment allows {runs} at a time, and {name} has not ended"


def no_answer_message(demand: Demand | None, address: str, error: object) -> Message:
    """Return the message for a run if the nodes that the run could use cannot be read.

    Args:
        demand: GPUs and CPUs that the run needs.
        address: Address of the run's Ray cluster. CLUSTER_OF_POOL if the spec names no address.
            Empty if the run does not use Ray. The run's work pool then lists the nodes.
        error: Cause of the failure.
    """
    cause = one_line(error)
    text = f"waits for its Ray cluster, {address}{_SILENT} ({cause})"
    if address == CLUSTER_OF_POOL:
        text = f"waits for a Ray cluster: {cause}"
    if not address:
        text = f"waits for nodes: {cause}"
    return Message(demand=demand, reason=text, waits_for_no_end=True)


def is_part_of_reason(problem: str, reason: str) -> bool:
    """Return True if the explanation for a waiting run already contains the cause of a problem.

    In that case the problem need not be shown next to the explanation.

    Args:
        problem: Text about a problem of the queue, such as `http://10.0.0.1:8265: timed out`.
        reason: Explanation for the waiting run, which `explain_wait` or another function of this
            module returned.
    """
    _, _, cause = problem.partition(": ")
    return bool(cause) and one_line(cause) in reason


def describe_gang(demand: Demand | None) -> str:
    """Return a text with the nodes and GPUs of a demand, such as `2 nodes with 8 GPUs each`."""
    if demand is None:
        return "no GPUs"
    each = "" if demand.nodes == 1 else " each"
    nodes = format_count(demand.nodes, "node")
    return f"{nodes} with {format_count(demand.gpus_per_node, 'GPU')}{each}"


def describe_free(free: Mapping[str, int]) -> str:
    """Return a text about the free GPUs of nodes, for example `8 on 2 nodes, 0 on 1 node`.

    Args:
        free: Mapping from node name to the number of free GPUs.
    """
    sizes = sorted(Counter(max(0, gpus) for gpus in free.values()).items(), reverse=True)
    return (
        join_commas(f"{gpus} on {format_count(nodes, 'node')}" for gpus, nodes in sizes) or "none"
    )


def one_line(error: object) -> str:
    """Return an error as one line of at most 300 characters that the Prefect UI can show."""
    # Replace `<` and `>` with square brackets. The Prefect UI would take a text such as `<urlopen
    # error ...>` for an HTML tag and not show the text.
    line = " ".join(str(error).split()).translate(str.maketrans("<>", "[]"))
    if len(line) <= _MAX_ERROR_CHARACTERS:
        return line
    return f"{line[: _MAX_ERROR_CHARACTERS - 1]}…"


def _has_enough_gpus(demand: Demand, free: Mapping[str, int]) -> bool:
    """Return True if enough nodes have enough free GPUs for a run. CPUs are not checked."""
    return sum(gpus >= demand.gpus_per_node for gpus in free.values()) >= demand.nodes


def _join_names(names: Iterable[object]) -> str:
    return join_words(names, at_most=_MAX_NAMES)
