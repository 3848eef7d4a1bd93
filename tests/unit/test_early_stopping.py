"""Runs of a parameter sweep are stopped early if other runs have better metric values.

The code calls each run a point of a matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tasks.pipeline.early_stopping import (
    PointHistory,
    find_reason_to_stop,
    require_optuna,
)
from tasks.spec.errors import InvalidSpec
from tasks.spec.matrix import StopEarly
from tasks.spec.pipeline import parse_pipeline


def rule(**more: Any) -> StopEarly:
    return StopEarly.model_validate({"by": "reward", "after_step": 10, **more})


def history(
    values: Sequence[float],
    *,
    begin: int = 1,
    last_step: int | None = None,
    has_ended: bool = False,
) -> PointHistory:
    """Return the metric values of one run.

    Args:
        values: One value for each step.
        begin: Step of the first value.
        last_step: Last step that the run has reported. If None, the step of the last value.
        has_ended: True if the run has ended.
    """
    figures = {float(begin + index): value for index, value in enumerate(values)}
    return PointHistory(
        figures=figures,
        last_step=max(figures, default=0.0) if last_step is None else last_step,
        has_ended=has_ended,
    )


def constant(value: float, until: int = 20, *, has_ended: bool = False) -> PointHistory:
    """Return a run with the same metric value at each step up to `until`."""
    return history([value] * until, has_ended=has_ended)


FIVE = [constant(value) for value in (0.2, 0.3, 0.4, 0.5, 0.6)]


def test_reason_names_figure_median_step_and_number_of_points() -> None:
    reason = find_reason_to_stop(rule(), constant(0.12, 23), FIVE)

    assert (
        reason
        == "the best reward until step 23 is 0.12, which is below 0.35, the median of 6 points of "
        "the matrix at step 20"
    )


@pytest.mark.parametrize(
    ("mode", "figure", "is_stopped"),
    [
        ("max", 0.39, True),
        ("max", 0.4, False),
        ("max", 0.41, False),
        ("min", 0.41, True),
        ("min", 0.4, False),
        ("min", 0.39, False),
    ],
)
def test_only_a_figure_worse_than_the_median_is_a_reason(
    mode: str, figure: float, is_stopped: bool
) -> None:
    reason = find_reason_to_stop(rule(mode=mode), constant(figure), FIVE)

    assert bool(reason) is is_stopped
    assert not reason or ("below" if mode == "max" else "above") in reason


@pytest.mark.parametrize(
    ("point", "others"),
    [
        # the run has no value of the metric, so the run continues
        (history([]), FIVE),
        # the run has not reached the step `after_step`, so the run continues
        (constant(0.1, 9), FIVE),
        # fewer than three other runs have a metric value at or after the step `after_step`, so the
        # run continues
        (constant(0.1), FIVE[:2]),
        (constant(0.1), [*FIVE[:2], constant(0.9, 9)]),
        (constant(0.1), [*FIVE[:2], history([], last_step=30)]),
    ],
)
@pytest.mark.parametrize("name", ["median", "halving"])
def test_points_are_not_compared_too_early(
    name: str, point: PointHistory, others: list[PointHistory]
) -> None:
    assert find_reason_to_stop(rule(rule=name), point, others) == ""


def test_point_is_compared_at_the_last_common_step() -> None:
    """A run that is ahead is compared at the last step that all runs have reached."""
    others = [history([step / 100 for step in range(1, 13)]) for _ in range(3)]

    slow = find_reason_to_stop(rule(), constant(0.11, 40), others)
    good = find_reason_to_stop(rule(), constant(0.13, 40), others)

    assert "0.12, the median of 4 points of the matrix at step 12" in slow
    assert good == ""


def test_best_figure_so_far_counts() -> None:
    """A run is judged by its best reward, even if its last rewards are bad."""
    noisy = history([0.1] * 9 + [0.5] + [0.1] * 10)

    assert find_reason_to_stop(rule(), noisy, FIVE) == ""


def test_diverged_point_is_compared_though_it_has_no_new_figure() -> None:
    others = [history([5.0 - step / 10 for step in range(20)]) for _ in range(3)]
    diverged = history([5.0, 4.9, 4.8], last_step=20)

    reason = find_reason_to_stop(rule(by="loss", mode="min"), diverged, others)

    assert (
        reason
        == "the best loss until step 20 is 4.8, which is above 3.1, the median of 4 points of the "
        "matrix at step 20"
    )


def test_figure_that_is_reported_rarely_counts_until_the_next_figure() -> None:
    rare = [
        PointHistory(figures={5.0: 0.1, 15.0: value}, last_step=20) for value in (0.3, 0.4, 0.5)
    ]

    reason = find_reason_to_stop(rule(), constant(0.2, 12), rare)

    assert reason == ""
    assert "0.35, the median of 4 points of the matrix at step 18" in find_reason_to_stop(
        rule(), constant(0.2, 18), rare
    )


def stop_until_stable(name: str, points: dict[int, PointHistory], **more: Any) -> set[int]:
    """Apply an early-stopping rule to all active runs, until the rule stops no further run.

    Returns:
        The numbers of the runs that are still active.
    """
    active = {number for number, point in points.items() if not point.has_ended}
    while True:
        stopped = {
            number
            for number in active
            if find_reason_to_stop(
                rule(rule=name, **more),
                points[number],
                [point for other, point in points.items() if other != number],
            )
        }
        if not stopped:
            return active
        active -= stopped
        for number in stopped:
            point = points[number]
            points[number] = PointHistory(
                figures=point.figures, last_step=point.last_step, has_ended=True
            )


def advance(points: dict[int, PointHistory], active: set[int], until: int) -> None:
    """Let the active runs reach the step `until` with unchanged metric values."""
    for number in active:
        points[number] = constant(next(iter(points[number].figures.values())), until)


@pytest.mark.parametrize("order", [1, -1])
def test_median_keeps_the_better_points_at_all_later_steps(order: int) -> None:
    points = {number: constant(number / 10, 10) for number in [*range(8)][::order]}

    first = stop_until_stable("median", points)
    advance(points, first, 11)
    second = stop_until_stable("median", points)
    advance(points, second, 80)
    third = stop_until_stable("median", points)

    assert first == second == third == {4, 5, 6, 7}


@pytest.mark.parametrize("mode", ["max", "min"])
def test_halving_keeps_the_better_half_at_each_doubled_step(mode: str) -> None:
    sign = 1 if mode == "max" else -1
    points = {number: constant(sign * number, 10) for number in range(16)}
    remaining = []

    for step in (10, 19, 20, 39, 40, 80):
        active = stop_until_stable("halving", points, mode=mode)
        advance(points, active, step)
        active = stop_until_stable("halving", points, mode=mode)
        remaining.append(len(active))

    assert remaining == [8, 8, 4, 4, 2, 2]
    assert active == {14, 15}


def test_point_at_the_median_is_not_stopped_by_a_rounding_error() -> None:
    others = [constant(value) for value in (0.1, 0.2, 0.4, 0.5)]

    assert find_reason_to_stop(rule(), constant(0.3), others) == ""


def test_reason_of_halving_names_the_number_of_points() -> None:
    reason = find_reason_to_stop(rule(rule="halving"), constant(0.12, 25), FIVE)

    assert reason == (
        "the best reward until step 25 is 0.12, which is not in the better half of 6 points of the "
        "matrix at step 20"
    )


def test_missing_package_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = {"command": ["true"]}
    spec = {"name": "r", "workload": "sft", "components": {"trainer": trainer}, "env": {"A": "0"}}
    stage = {
        "name": "grid",
        "spec": {**spec, "progress": {"jsonl": "m.jsonl", "step": "step"}},
        "matrix": {"env.A": ["1", "2", "3", "4"]},
        "stop_early": {"by": "reward", "after_step": 3},
    }
    with_rule = parse_pipeline({"name": "a", "stages": [{"name": "first", "spec": spec}, stage]})
    without_rule = parse_pipeline({"name": "a", "stages": [{"name": "first", "spec": spec}]})
    require_optuna(with_rule)
    monkeypatch.setitem(sys.modules, "optuna", None)

    require_optuna(without_rule)
    with pytest.raises(InvalidSpec) as caught:
        require_optuna(with_rule)

    [fault] = caught.value.faults
    assert fault.path == "stages.1.stop_early"
    assert 'pip install "muster[sweeps]"' in fault.remedy
