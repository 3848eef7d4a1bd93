"""Tests of the texts of an exit, and of verdicts with leftovers."""

from __future__ import annotations

import json
import signal

import pytest

from tasks.record.outcome import (
    Exit,
    Failure,
    Verdict,
    join_problems,
    list_problems,
    signal_name,
)
from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind


@pytest.mark.parametrize(
    ("code", "signum", "note", "text"),
    [
        (0, None, "", "exit code 0"),
        (137, None, "", "exit code 137"),
        (None, signal.SIGSEGV, "", "killed by SIGSEGV"),
        # A real-time signal has no name, so its number is shown.
        (None, 40, "", "killed by signal 40"),
        (None, None, "", "exit status unknown"),
        (None, None, "its guardian died", "exit status unknown: its guardian died"),
    ],
)
def test_exit_is_described_by_its_code_or_signal(
    code: int | None, signum: int | None, note: str, text: str
) -> None:
    exit = Exit(exit_code=code, signal=signum, at_monotonic_s=1.0, note=note)

    assert str(exit) == text
    assert exit.is_zero == (code == 0)
    assert exit.signal_name == (signal_name(signum) if signum else None)


FAILURE = Failure(kind=FailureKind.CUDA_OOM, component="trainer", message="trainer left", rule="x")


def test_failed_verdict_begins_with_its_kind() -> None:
    verdict = Verdict.failed(FAILURE, 1.0)

    assert verdict.state is RunState.FAILED
    assert verdict.message == "CUDA_OOM: trainer left"
    assert verdict.failure is FAILURE


def test_each_further_warning_of_a_verdict_is_on_its_own_line() -> None:
    verdict = Verdict(state=RunState.COMPLETED, message="step 9 of 9")

    warned = verdict.with_warning("loss is nan").with_warning("no checkpoint; folder a is empty")

    problems = [
        "warning: step 9 of 9, but loss is nan",
        "warning: no checkpoint; folder a is empty",
    ]
    assert warned.message == "\n".join(problems)
    assert list_problems(warned.message) == problems
    assert join_problems(warned.message) == (
        "warning: step 9 of 9, but loss is nan; no checkpoint; folder a is empty"
    )


@pytest.mark.parametrize("message", ["", "step 9 of 9", "the spec has 2 faults:\n  - a\n  - b"])
def test_message_without_warnings_is_a_single_problem(message: str) -> None:
    assert list_problems(message) == [message]
    assert join_problems(message) == message


def test_failure_has_all_documented_keys() -> None:
    content = json.loads(json.dumps(FAILURE.as_json()))

    assert content.keys() >= {
        "kind",
        "component",
        "exit_code",
        "signal",
        "message",
        "rule",
        "log_tail",
    }
    assert content["kind"] == "CUDA_OOM"


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.CANCELLED])
def test_verdict_with_leftovers_is_a_failure(state: RunState) -> None:
    left = {"trainer": ("pid 7 (train.py) survived SIGKILL", "pid 8 survived SIGKILL")}

    verdict = Verdict(state=state, message="step 60").with_leftovers(left)

    assert verdict.state is RunState.FAILED
    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert verdict.failure.rule == "teardown-incomplete"
    assert "step 60" in verdict.message
    assert "trainer: pid 7 (train.py) survived SIGKILL, pid 8 survived" in verdict.message
    assert verdict.left == left


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.CANCELLED])
def test_verdict_with_unchecked_nodes_keeps_its_state(state: RunState) -> None:
    verdict = Verdict(state=state, message="step 60").with_unseen({"trainer": ("node 7 gone",)})

    assert (verdict.state, verdict.failure) == (state, None)
    assert (
        verdict.message
        == "step 60; processes of the run may still be running on nodes that were not checked "
        "(trainer: node 7 gone)"
    )


def test_failure_message_names_unchecked_nodes() -> None:
    verdict = Verdict.failed(FAILURE, 1.0).with_unseen({"trainer": ("node 7 gone",)})

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.CUDA_OOM
    assert verdict.message == str(verdict.failure)
    assert verdict.message.endswith(
        "processes of the run may still be running on nodes that were not checked "
        "(trainer: node 7 gone)"
    )
    assert Verdict.failed(FAILURE, 1.0).with_unseen({}) == Verdict.failed(FAILURE, 1.0)


def test_failure_with_leftovers_keeps_its_cause() -> None:
    verdict = Verdict.failed(FAILURE, 1.0).with_leftovers({"api": ("pid 7",)})

    assert verdict.failure is not None
    assert (verdict.failure.kind, verdict.failure.component) == (FailureKind.CUDA_OOM, "trainer")
    assert "trainer left" in verdict.message and "api: pid 7" in verdict.message
    assert verdict.at_monotonic_s == 1.0
