"""The exit and the end time of a Ray job follow from the state that Ray reports."""

from __future__ import annotations

import pytest

from tasks.ray.dashboard import JobState
from tasks.ray.end import RAY_POLLS_EACH_S, earliest_end, job_exit


@pytest.mark.parametrize(
    ("status", "driver_exit_code", "exit_code", "signal"),
    [
        ("SUCCEEDED", 0, 0, None),
        # older Ray releases report no exit code for a successful job
        ("SUCCEEDED", None, 0, None),
        ("FAILED", 3, 3, None),
        ("FAILED", -9, None, 9),
        # an exit code of 137 (128 + 9) is not interpreted as SIGKILL, because the program itself
        # exited with this code
        ("FAILED", 137, 137, None),
        ("FAILED", None, None, None),
        ("STOPPED", None, None, None),
    ],
)
def test_negative_exit_code_is_a_signal(
    status: str, driver_exit_code: int | None, exit_code: int | None, signal: int | None
) -> None:
    state = JobState(status=status, driver_exit_code=driver_exit_code)

    ended = job_exit(state, at_monotonic_s=5.0, was_stopped_by_us=False)

    assert (ended.exit_code, ended.signal, ended.at_monotonic_s) == (exit_code, signal, 5.0)


@pytest.mark.parametrize(
    ("status", "message", "was_stopped_by_us", "note"),
    [
        ("STOPPED", "Job was intentionally stopped.", True, "stopped by Muster"),
        (
            "STOPPED",
            "Job was intentionally stopped.",
            False,
            "stopped by a person or a program other than Muster",
        ),
        ("FAILED", "\n  Job supervisor actor died: gone\nmore", False, "supervisor actor died"),
        ("FAILED", "", False, "FAILED, and Ray gives no reason"),
    ],
)
def test_exit_without_code_and_signal_has_rays_reason(
    status: str, message: str, was_stopped_by_us: bool, note: str
) -> None:
    state = JobState(status=status, message=message)

    ended = job_exit(state, at_monotonic_s=0.0, was_stopped_by_us=was_stopped_by_us)

    assert note in ended.note
    assert "\n" not in ended.note


def test_lost_node_is_named_first() -> None:
    state = JobState(status="FAILED", message="Job supervisor actor died")

    ended = job_exit(state, at_monotonic_s=0.0, was_stopped_by_us=False, lost_node="node 10.0.0.2")

    assert ended.note.startswith("node 10.0.0.2 left the cluster")


@pytest.mark.parametrize(
    ("ended_at", "seen_running_s", "expected"),
    [
        # the end time 998 from Ray is 98 on the monotonic clock. Ray may notice the end of a job
        # late, so the maximum delay is subtracted
        (998.0, 90.0, 98.0 - 0.301 - RAY_POLLS_EACH_S),
        # Ray's end time (900 s, which is 0 s on the monotonic clock) is too early, because a
        # request at 99 s found the job still running. So 99 s replaces Ray's end time
        (900.0, 99.0, 99.0 - 0.301 - RAY_POLLS_EACH_S),
        # the end time from Ray is in the future, because the node's clock is fast. So the current
        # time is used
        (2000.0, 99.0, 100.0),
        # no request found the job running, so only Ray's end time is known: 998 s, which is 98 s on
        # the monotonic clock
        (998.0, None, 98.0 - 0.301 - RAY_POLLS_EACH_S),
        # Ray reports no end time, so the time of the last request that found the job running is
        # used
        (None, 99.0, 99.0 - 0.301 - RAY_POLLS_EACH_S),
        # Ray reports no end time, and no request found the job running, so the result is the
        # current time
        (None, None, 100.0),
    ],
)
def test_end_is_between_the_last_running_state_and_now(
    ended_at: float | None, seen_running_s: float | None, expected: float
) -> None:
    state = JobState(status="FAILED", driver_exit_code=1, ended_at=ended_at)

    at = earliest_end(
        state, wall_s=1000.0, monotonic_s=100.0, seen_running_s=seen_running_s, wrapper_s=0.3
    )

    assert at == pytest.approx(expected)


@pytest.mark.parametrize(("is_node_lost", "late_s"), [(False, 2.5), (True, 70.0)])
def test_unobserved_death_may_be_as_old_as_rays_detection_delay(
    is_node_lost: bool, late_s: float
) -> None:
    state = JobState(status="FAILED", ended_at=998.0)

    at = earliest_end(
        state,
        wall_s=1000.0,
        monotonic_s=100.0,
        seen_running_s=98.0,
        wrapper_s=0.3,
        is_node_lost=is_node_lost,
    )

    assert at == pytest.approx(98.0 - 0.301 - RAY_POLLS_EACH_S - late_s)
