"""Decide whether a run is retried after an attempt, and which nodes are to blame for a failure."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tasks.record.checkpoint_blame import CUT_SHORT, find_attempts_failed_by_checkpoint
from tasks.record.outcome import Failure, Verdict
from tasks.record.run_json import AttemptRecord, JobRecord
from tasks.record.states import RunState
from tasks.spec.failure_kinds import REQUEUED, FailureKind, NodeBlame
from tasks.spec.formatting import format_datetime
from tasks.spec.run import Retry, RunSpec

#: After each failed attempt, the delay before the next attempt is multiplied by this number.
_GROWTH = 2.0
#: Largest random change of a delay, as a share of the delay. Without a random change, runs that
#: were requeued at the same time would all be retried at the same time.
_JITTER = 0.1
#: Largest exponent of `_GROWTH`, to avoid an overflow of the float. The delay before the next
#: attempt reaches its maximum with a much smaller exponent.
_MAX_EXPONENT = 64
#: Delay before a run is retried from an older checkpoint, in seconds.
_OLDER_CHECKPOINT_DELAY_S = 5.0

#: Name of the rule for failures that Muster finds before any component starts, when it checks the
#: nodes of the run.
PREFLIGHT = "preflight"
_RANK = re.compile(r"\brank\W{0,3}\d", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDecision:
    """Decision whether a run is retried after one of its attempts has ended."""

    #: Text for the user, such as `requeued: INSUFFICIENT_RESOURCES, next try in 61 s`.
    text: str
    #: Delay before the next attempt in seconds, or None if there will be no further attempt.
    delay_s: float | None = None
    #: True if the run returns to the queue and waits for resources. The failed attempt then does
    #: not count against the limit `attempts` of a retry policy.
    is_requeue: bool = False
    #: Phrase about the checkpoint of the next attempt: `from PATH`. Empty if the attempt starts
    #: without a checkpoint.
    start: str = ""


def decide_retry(
    verdict: Verdict,
    before: Sequence[FailureKind | None],
    policy: Retry | None,
    *,
    start: str = "",
    is_unloadable: bool = False,
    uniform: Callable[[float, float], float] = random.uniform,
) -> RetryDecision:
    """Decide whether the run is retried after an attempt.

    A failure of a kind in `REQUEUED` is not caused by the run itself. After such a failure, the run
    returns to the queue. For the retry limit, each of these kinds is counted separately. The
    failures of all other kinds are counted together.

    Args:
        verdict: Result of the attempt.
        before: Kind of failure of each earlier attempt that counts against the retry limit, in the
            order of the attempts. None for an attempt that did not fail; see
            `list_counted_failures`.
        policy: Retry policy of the spec for this kind of failure. None if a run is never retried
            after a failure of this kind.
        start: Phrase about the checkpoint of the next attempt: `from PATH`. Empty if the next
            attempt starts without a checkpoint.
        is_unloadable: True if the attempt failed before its first step, and its checkpoint may be
            the cause. The run is then retried even if `policy` does not allow it.
        uniform: Function that returns a random number between two bounds.
    """
    if verdict.state is not RunState.FAILED or verdict.failure is None:
        return RetryDecision(text=f"final: {verdict.state.value}")

    kind = verdict.failure.kind
    if is_unloadable and not verdict.left:
        delay_s = _OLDER_CHECKPOINT_DELAY_S
        next_start = start or "from the beginning"
        text = (
            f"retried: {kind.value} (the attempt failed before its first step), next try in "
            f"{delay_s:.0f} s, {next_start}"
        )
        return RetryDecision(text=text, delay_s=delay_s, start=start)
    if policy is None:
        return RetryDecision(text=f"final: the key `retry` of the spec does not list {kind.value}")
    if verdict.left:
        # Do not retry the run, because a leftover process still uses GPUs, ports and files.
        return RetryDecision(
            text=f"final: {kind.value}. Muster starts no new attempt, because processes of this "
            "attempt are still running"
        )

    is_requeue = kind in REQUEUED
    if is_requeue:
        used_attempts = 1 + sum(earlier is kind for earlier in before)
    else:
        used_attempts = 1 + sum(earlier not in REQUEUED for earlier in before)
    if policy.attempts is not None and used_attempts >= policy.attempts:
        text = f"final: {kind.value}, {used_attempts} of {policy.attempts} attempts used"
        return RetryDecision(text=text)

    # Some kinds of failure end an attempt before its components start. In this case, the delay
    # depends only on the number of consecutive attempts that ended in this way.
    delay_step = used_attempts
    if kind.properties.ends_before_components_run:
        delay_step = 1 + sum(1 for _ in takewhile(_has_never_run, reversed(before)))
    grown_delay_s = policy.delay_s * _GROWTH ** min(delay_step - 1, _MAX_EXPONENT)
    longest_delay_s = max(policy.delay_s, policy.max_delay_s)
    delay_s = min(grown_delay_s, longest_delay_s) * uniform(1 - _JITTER, 1 + _JITTER)

    verb = "requeued" if is_requeue else "retried"
    count = f" ({used_attempts + 1} of {policy.attempts})" if policy.attempts else ""
    suffix = f", {start}" if start else ""
    return RetryDecision(
        text=f"{verb}: {kind.value}, next try{count} in {delay_s:.0f} s{suffix}",
        delay_s=delay_s,
        is_requeue=is_requeue,
        start=start,
    )


def _has_never_run(kind: FailureKind | None) -> bool:
    """Return True if attempts with this kind of failure end before their components run."""
    return kind is not None and kind.properties.ends_before_components_run


def list_counted_failures(
    spec: RunSpec, attempts: Sequence[AttemptRecord]
) -> list[FailureKind | None]:
    """Return the kind of failure of each earlier attempt that counts against the retry limit.

    The limit is the key `attempts` of a retry policy. Attempts that failed because of their
    checkpoint do not count. Counting starts again in two cases:

    - An attempt reached a higher training step than all attempts before it.
    - A person has retried the run after its end.

    Args:
        spec: The spec of the run.
        attempts: All attempts of the run. The result does not include the last attempt.

    Returns:
        The kinds in the order of the attempts, with None for an attempt that did not fail.
    """
    first = 0
    best_step = float("-inf")
    for index, attempt in enumerate(attempts):
        if index > 0 and attempts[index - 1].is_last:
            first = index
        if attempt.number == spec.first_counted_attempt:
            best_step = float("-inf")
        step = attempt.highest_step
        if step is not None and step > best_step:
            first = index
            best_step = step

    excluded = find_attempts_failed_by_checkpoint(spec, attempts)
    counted = (attempt for attempt in attempts[first:-1] if attempt not in excluded)
    return [attempt.failure.kind if attempt.failure else None for attempt in counted]


def has_failed_by_checkpoint(spec: RunSpec, attempts: Sequence[AttemptRecord]) -> bool:
    """Return True if the last attempt failed and its checkpoint may be the cause."""
    return attempts[-1] in find_attempts_failed_by_checkpoint(spec, attempts)


def find_blamed_nodes(failure: Failure | None, nodes: Iterable[str]) -> list[str]:
    """Return the nodes that probably caused the failure of an attempt.

    - If failures of this kind are never caused by a node, the result is empty.
    - If the log line or the message of the failure contains nodes, these nodes are returned.
    - After a timeout of a collective operation, the result is empty if neither the log line nor
      the message contains a rank.
    - Otherwise, all nodes of the attempt are returned.

    Args:
        failure: Cause of the failed attempt, or None.
        nodes: All nodes of the attempt.
    """
    if failure is None or failure.rule == CUT_SHORT:
        return []
    blame = failure.kind.properties.blames_node
    if blame is NodeBlame.NEVER and failure.rule != PREFLIGHT:
        return []
    text = f"{failure.line} {failure.message}"
    if blame is NodeBlame.IF_RANK_IS_NAMED and not _RANK.search(text):
        return []
    all_nodes = [*nodes]
    return [node for node in all_nodes if _names_node(text, node)] or all_nodes


def _names_node(text: str, node: str) -> bool:
    # Remove the suffix after a slash. The suffix distinguishes nodes with the same host name, but
    # does not occur in logs.
    host_name = re.escape(node.partition("/")[0])
    return re.search(rf"(?<![\w.-]){host_name}(?![\w-]|\.\w)", text) is not None


def build_attempt_table(attempts: Sequence[AttemptRecord]) -> list[dict[str, object]]:
    """Return a table of the attempts for the user, as a list of rows. Empty cells are None."""
    rows: list[dict[str, object]] = []
    for attempt in attempts:
        failure = attempt.failure
        job = next(iter(attempt.jobs.values()), JobRecord())
        rows.append(
            {
                "attempt": attempt.number,
                "submission": job.submission_id or None,
                "nodes": ", ".join(job.nodes) or None,
                "started": format_datetime(attempt.started_at),
                "ended": format_datetime(attempt.ended_at)
                if attempt.ended_at is not None
                else None,
                "state": attempt.state.value,
                "kind": failure.kind.value if failure else None,
                "line": (failure.line or failure.message) if failure else None,
                "resumed from": attempt.resume_from,
                "decided": attempt.decision,
            }
        )
    return rows
