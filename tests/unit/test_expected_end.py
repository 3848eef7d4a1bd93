"""Tests of `ExpectedEnd`: when a run reports its expected end to the queue."""

from __future__ import annotations

from tasks.train.expected_end import ExpectedEnd


def list_reports(*steps_s: float, total: int) -> list[tuple[float, float]]:
    """Return the reports of a run: the time of each report, and the expected end.

    Args:
        steps_s: Durations of the steps in seconds.
        total: Number of steps of the whole training. The remaining steps are expected to take as
            long as the last step.
    """
    expected_end = ExpectedEnd()
    now = 0.0
    reports = []
    for count, duration_s in enumerate(steps_s, start=1):
        now += duration_s
        end = expected_end.take_step(now, (total - count) * duration_s)
        if end is not None:
            reports.append((now, end))
    return reports


def test_end_of_a_steady_training_is_reported_once() -> None:
    assert list_reports(*[10.0] * 100, total=100) == [(50.0, 1000.0)]


def test_small_changes_of_the_speed_are_not_reported() -> None:
    assert len(list_reports(*[10.0, 10.5] * 50, total=1000)) == 1


def test_slower_training_reports_a_later_end() -> None:
    reports = list_reports(*[10.0] * 10, *[20.0] * 10, total=100)

    assert reports == [(50.0, 1000.0), (120.0, 1900.0)]


def test_changes_within_a_minute_are_not_reported() -> None:
    reports = list_reports(*[1.0] * 5, *[2.0, 1.0] * 10, total=1000)

    assert len(reports) == 1


def test_unknown_remaining_time_is_not_reported() -> None:
    expected_end = ExpectedEnd()

    assert [expected_end.take_step(float(at), None) for at in range(20)] == [None] * 20


def test_new_attempt_reports_its_end_again() -> None:
    expected_end = ExpectedEnd()
    first = [expected_end.take_step(at, 100.0 - at) for at in range(1, 8)]

    expected_end.restart()
    second = [expected_end.take_step(at, 100.0 - at) for at in range(11, 18)]

    assert [end for end in first if end is not None] == [100.0]
    assert [end for end in second if end is not None] == [100.0]
