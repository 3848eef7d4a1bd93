"""Tests of the decision after an attempt, its delay, and the table of attempts."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.record.outcome import Failure, Verdict
from tasks.record.retries import RetryDecision, build_attempt_table, decide_retry, find_blamed_nodes
from tasks.record.run_json import AttemptRecord
from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import Retry

FULL = FailureKind.INSUFFICIENT_RESOURCES
LATE = FailureKind.START_TIMEOUT
NODE = FailureKind.NODE_LOST
DISK = FailureKind.STORAGE
FLEET = FailureKind.FLEET_LOST
#: Retry policy whose delay starts at 10 s and grows to at most 100 s.
EACH = {"delay_s": 10.0, "max_delay_s": 100.0}


def failed(kind: FailureKind, **more: Any) -> Verdict:
    verdict = Verdict.failed(Failure(kind=kind, message="it happened"), 1.0)
    return verdict.with_leftovers(more["left"]) if more else verdict


def decide_without_jitter(
    kind: FailureKind, *before: FailureKind | None, resume_from: str = "", **policy: Any
) -> RetryDecision:
    """Return the retry decision after a failed attempt, with a delay that has no random part.

    Args:
        kind: Failure kind of the attempt.
        *before: Failure kinds of the earlier attempts. None for an attempt without a failure.
        resume_from: Checkpoint from which the next attempt starts.
        **policy: Further settings of the retry policy for this failure kind.
    """
    return decide_retry(
        failed(kind),
        before,
        Retry(**{**EACH, **policy}),
        start=f"from {resume_from}" if resume_from else "",
        uniform=lambda low, high: (low + high) / 2,
    )


@pytest.mark.parametrize(
    ("kind", "before", "attempts", "text"),
    [
        # attempts that ended because of too few free GPUs do not count, so the run is always
        # requeued
        (FULL, (), None, "requeued: INSUFFICIENT_RESOURCES, next try in 10 s"),
        (LATE, (), None, "requeued: START_TIMEOUT, next try in 10 s"),
        (FULL, (FULL,) * 500, None, "requeued: INSUFFICIENT_RESOURCES, next try in 100 s"),
        # the spec allows two attempts with the failure INSUFFICIENT_RESOURCES. Attempts with other
        # failures do not count against this limit
        (FULL, (), 2, "requeued: INSUFFICIENT_RESOURCES, next try (2 of 2) in 10 s"),
        (FULL, (FULL,), 2, "final: INSUFFICIENT_RESOURCES, 2 of 2 attempts used"),
        (FULL, (LATE, NODE), 2, "requeued: INSUFFICIENT_RESOURCES, next try (2 of 2) in 10 s"),
        # for NODE_LOST, the spec allows three attempts, and in the last case only one
        (NODE, (), 3, "retried: NODE_LOST, next try (2 of 3) in 10 s"),
        (NODE, (NODE,), 3, "retried: NODE_LOST, next try (3 of 3) in 20 s"),
        (NODE, (NODE, NODE), 3, "final: NODE_LOST, 3 of 3 attempts used"),
        (NODE, (), 1, "final: NODE_LOST, 1 of 1 attempts used"),
        # failures of different kinds are counted together
        (NODE, (DISK, NODE), 3, "final: NODE_LOST, 3 of 3 attempts used"),
        # attempts without a failure also count against the limit of attempts. For example, a user
        # cancelled an attempt and later started the run again
        (
            NODE,
            (None, None),
            3,
            "final: NODE_LOST, 3 of 3 attempts used",
        ),
        # after the failure of a node, earlier attempts that ended because of too few free GPUs are
        # not counted
        (NODE, (FULL, LATE, FULL), 2, "retried: NODE_LOST, next try (2 of 2) in 10 s"),
        (NODE, (FULL, NODE, LATE), 2, "final: NODE_LOST, 2 of 2 attempts used"),
        # failures of the kind FLEET_LOST are counted separately from failures of other kinds
        (FLEET, (), 4, "requeued: FLEET_LOST, next try (2 of 4) in 10 s"),
        (FLEET, (NODE, FLEET), 4, "requeued: FLEET_LOST, next try (3 of 4) in 20 s"),
        (FLEET, (FLEET, FULL, FLEET), 4, "requeued: FLEET_LOST, next try (4 of 4) in 40 s"),
        (FLEET, (FLEET, NODE, FLEET, FLEET), 4, "final: FLEET_LOST, 4 of 4 attempts used"),
        (NODE, (FLEET, FLEET), 2, "retried: NODE_LOST, next try (2 of 2) in 10 s"),
    ],
)
def test_decision_follows_from_the_failure_kinds_and_the_limit_of_attempts(
    kind: FailureKind, before: tuple[FailureKind | None, ...], attempts: int | None, text: str
) -> None:
    sequel = decide_without_jitter(kind, *before, attempts=attempts)

    assert sequel.text == text
    assert sequel.is_requeue == text.startswith("requeued")
    assert (sequel.delay_s is None) == text.startswith("final")


@pytest.mark.parametrize(
    ("before", "delay_s"),
    [
        ((), 10),
        ((FULL,), 20),
        ((FULL, LATE), 40),  # both failures mean that too few GPUs were free
        ((FULL, FULL, FULL), 80),
        ((FULL,) * 4, 100),  # the longest delay
        # an attempt with the result NODE, None or FLEET has started its components. After such an
        # attempt, the delay starts at 10 s again
        ((FULL,) * 4 + (NODE,), 10),
        ((FULL,) * 4 + (NODE, FULL), 20),
        ((FULL,) * 4 + (None,), 10),
        ((FULL,) * 4 + (FLEET,), 10),
        ((FULL,) * 5000, 100),  # after a month of attempts, the delay does not overflow
    ],
)
def test_back_off_restarts_after_an_attempt_that_ran(
    before: tuple[FailureKind | None, ...], delay_s: float
) -> None:
    assert decide_without_jitter(FULL, *before).delay_s == delay_s


@pytest.mark.parametrize(("part", "delay_s"), [(0.0, 9.0), (0.5, 10.0), (1.0, 11.0)])
def test_jitter_changes_a_delay_by_up_to_a_tenth(part: float, delay_s: float) -> None:
    sequel = decide_retry(
        failed(FULL), (), Retry(**EACH), uniform=lambda low, high: low + part * (high - low)
    )

    assert sequel.delay_s == pytest.approx(delay_s)


def test_decision_names_the_checkpoint() -> None:
    sequel = decide_without_jitter(NODE, attempts=2, resume_from="/ckpt/step-10")

    assert sequel.text == "retried: NODE_LOST, next try (2 of 2) in 10 s, from /ckpt/step-10"


def test_failure_kind_that_the_spec_does_not_list_is_final() -> None:
    sequel = decide_retry(failed(FailureKind.USER_ERROR), (), None)

    expected = "final: the key `retry` of the spec does not list USER_ERROR"
    assert sequel == RetryDecision(text=expected)


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.CANCELLED])
def test_attempt_that_did_not_fail_is_final(state: RunState) -> None:
    assert decide_retry(Verdict(state=state, message=""), (), None).text == f"final: {state.value}"


def test_run_is_not_retried_while_processes_remain() -> None:
    sequel = decide_retry(failed(FULL, left={"trainer": (812,)}), (), Retry(**EACH))

    assert sequel.delay_s is None
    assert sequel.text == (
        "final: INSUFFICIENT_RESOURCES. Muster starts no new attempt, because processes of this "
        "attempt are still running"
    )


def test_table_has_a_row_for_each_attempt() -> None:
    failure = Failure(kind=NODE, message="trainer: node lost", line="NodeDiedError: 10.0.0.7")
    first = {
        "number": 1,
        "state": "failed",
        "started_at": 0.0,
        "ended_at": 61.0,
        "failure": failure.as_json(),
        "components": {},
        "ray": {"submission_id": "a-run--a01", "nodes": ["10.0.0.7", "10.0.0.8"]},
        "resume_from": None,
        "decision": "retried: NODE_LOST, next try (2 of 3) in 10 s",
    }
    second = {
        **first,
        "number": 2,
        "state": "starting",
        "ended_at": None,
        "failure": None,
        "ray": {},
        "resume_from": "/ckpt/step-10",
        "decision": None,
    }

    rows = build_attempt_table([AttemptRecord.model_validate(one) for one in (first, second)])

    assert rows[0] == {
        "attempt": 1,
        "submission": "a-run--a01",
        "nodes": "10.0.0.7, 10.0.0.8",
        "started": "1970-01-01 00:00:00 UTC",
        "ended": "1970-01-01 00:01:01 UTC",
        "state": "failed",
        "kind": "NODE_LOST",
        "line": "NodeDiedError: 10.0.0.7",
        "resumed from": None,
        "decided": "retried: NODE_LOST, next try (2 of 3) in 10 s",
    }
    assert rows[1]["resumed from"] == "/ckpt/step-10"
    assert (rows[1]["ended"], rows[1]["kind"], rows[1]["nodes"]) == (None, None, None)


def test_record_without_decisions_has_empty_cells() -> None:
    old = {
        "number": 1,
        "state": "failed",
        "started_at": 0.0,
        "ended_at": 1.0,
        "failure": Failure(kind=NODE, message="gone").as_json(),
        "components": {},
        "ray": {},
    }

    [row] = build_attempt_table([AttemptRecord.model_validate(old)])
    assert (row["line"], row["decided"]) == ("gone", None)


@pytest.mark.parametrize(
    ("kind", "line", "nodes"),
    [
        (FailureKind.GPU_HARDWARE, "(Actor pid=7, ip=10.0.0.2) NVRM: Xid 79", ["10.0.0.2"]),
        # the log names no node, so each node of the attempt may be the cause of the failure
        (FailureKind.NODE_LOST, "a node died", ["10.0.0.2", "10.0.0.20", "gpu-1/0a1b2c3d"]),
        (FailureKind.STORAGE, "gpu-1: No space left on device", ["gpu-1/0a1b2c3d"]),
        (FailureKind.PORT_CONFLICT, "address in use: 10.0.0.20:8000", ["10.0.0.20"]),
        (FailureKind.COLLECTIVE_TIMEOUT, "[rank7] on 10.0.0.20 timed out", ["10.0.0.20"]),
        # the log line names no rank such as [rank7], so no node is blamed for the timeout of the
        # collective operation
        (FailureKind.COLLECTIVE_TIMEOUT, "on 10.0.0.20: timed out", []),
        # no node is blamed for a failure of the kind CUDA_OOM
        (FailureKind.CUDA_OOM, "on 10.0.0.20: out of memory", []),
    ],
)
def test_named_nodes_are_blamed(kind: FailureKind, line: str, nodes: list[str]) -> None:
    failure = Failure(kind=kind, message="the trainer failed", line=line)

    assert find_blamed_nodes(failure, ("10.0.0.2", "10.0.0.20", "gpu-1/0a1b2c3d")) == nodes
