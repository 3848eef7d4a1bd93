"""Tests of `make_failure`: it builds a failure from a component's exit and its log."""

from __future__ import annotations

import pytest

from tasks.processes.attempt import make_failure
from tasks.processes.descendant_watch import DeathEvidence
from tasks.record.outcome import Exit
from tasks.spec.failure_kinds import FailureKind

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
NCCL = "[rank0]:[E ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout: x"
KILLED = "  traceback : Signal 9 (SIGKILL) received by PID 14750"


def ended(code: int | None = 1, signal: int | None = None) -> Exit:
    """Return an `Exit` with this exit code and signal."""
    return Exit(exit_code=code, signal=signal, at_monotonic_s=0.0)


def test_failure_has_the_rule_the_log_line_and_a_hint() -> None:
    text = f"step 8\n[rank3]: {OOM}\n{NCCL}\n"

    failure = make_failure("trainer", text, message="left", rule="exit", exit=ended())

    assert (failure.kind, failure.rule) == (FailureKind.CUDA_OOM, "cuda-oom")
    assert failure.line == f"[rank3]: {OOM}"
    assert "micro-batches" in failure.hint
    assert failure.message == f"left: [rank3]: {OOM}"


@pytest.mark.parametrize(
    ("text", "signal", "kind", "rule"),
    [
        # The log names a cause, which is more precise than the signal.
        (OOM, 6, FailureKind.CUDA_OOM, "cuda-oom"),
        (NCCL, 6, FailureKind.COLLECTIVE_TIMEOUT, "collective-timeout"),
        # The log reports only that a process was killed, but not the reason. So the rule is
        # `sigkill`, and the failure kind follows from the signal.
        (KILLED, 11, FailureKind.RUNTIME_ERROR, "sigkill"),
        (KILLED, None, FailureKind.UNKNOWN, "sigkill"),
        # The log names no cause. So the rule is `exit`, and the failure kind follows from the
        # signal.
        ("step 8", 11, FailureKind.RUNTIME_ERROR, "exit"),
        ("step 8", 9, FailureKind.UNKNOWN, "exit"),
    ],
)
def test_kind_comes_from_the_log_or_from_the_signal(
    text: str, signal: int | None, kind: FailureKind, rule: str
) -> None:
    exit = ended(None if signal else 1, signal)

    failure = make_failure("trainer", text, message="left", rule="exit", exit=exit)

    assert (failure.kind, failure.rule) == (kind, rule)


def test_failure_by_bare_sigkill_points_to_the_kernel_log() -> None:
    exit = ended(None, 9)

    failure = make_failure("trainer", "", message="left", rule="exit", exit=exit)

    assert "dmesg" in failure.hint


#: Sentence of the hint if the kernel's OOM killer has killed no process.
NO_OOM_KILL = "The kernel's OOM killer has killed no process in the cgroup of the component."


@pytest.mark.parametrize(
    ("exit", "observation"),
    [
        (ended(None, 9), "SIGKILL ended trainer."),
        (
            ended(137),
            "Exit code 137 means that the component is a shell or launcher, and SIGKILL ended the "
            "program that the shell or launcher had started.",
        ),
    ],
)
def test_sender_of_sigkill_is_only_named_as_probable(exit: Exit, observation: str) -> None:
    evidence = DeathEvidence(no_oom_kill=NO_OOM_KILL)

    failure = make_failure(
        "trainer", "step 8", message="left", rule="exit", exit=exit, evidence=evidence
    )

    assert failure.hint.startswith(f"{observation} {NO_OOM_KILL} So SIGKILL probably")
    assert "the program itself" in failure.hint
    assert "from outside" not in failure.hint


@pytest.mark.parametrize(
    ("reached_own_limit", "remedy"),
    [
        (True, "raise `memory_gib`"),
        (False, "a higher memory limit, or a machine with more"),
    ],
)
def test_advice_after_an_oom_kill_names_the_limit_of_the_component(
    reached_own_limit: bool, remedy: str
) -> None:
    # The words of the clause do not decide about the advice.
    clause = "the kernel's OOM killer killed python3 (pid 8), because a limit was reached"
    evidence = DeathEvidence(oom_kill=clause, reached_own_limit=reached_own_limit)

    failure = make_failure(
        "trainer", "step 8", message="left", rule="exit", exit=ended(1), evidence=evidence
    )

    assert failure.kind is FailureKind.HOST_OOM
    assert failure.hint.startswith("Use fewer worker processes")
    assert remedy in failure.hint


@pytest.mark.parametrize("signal", [9, 15])
def test_signal_without_further_evidence_has_no_certain_sender(signal: int) -> None:
    failure = make_failure("a", "", message="left", rule="exit", exit=ended(None, signal))

    assert "sent from outside" not in failure.hint
    assert "robably" in failure.hint or "may have sent" in failure.hint


def test_explicit_kind_is_not_replaced_by_the_log() -> None:
    failure = make_failure("api", NCCL, message="silent", rule="live", kind=FailureKind.STALLED)

    assert (failure.kind, failure.rule) == (FailureKind.STALLED, "live")
