"""Duration classes: the estimated duration of a run is rounded up to one of a few values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.queue.policy import CLASSES_S, duration_class_s

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@pytest.mark.parametrize(
    ("hours", "expected_s"),
    [
        (0.01, 10 * MINUTE),
        # an estimate of exactly 10 minutes belongs to the shortest duration class, and a slightly
        # longer estimate to the next class
        (1 / 6, 10 * MINUTE),
        (0.17, HOUR),
        (1, HOUR),
        (1.01, 4 * HOUR),
        (5, 12 * HOUR),
        # one duration class is exactly 24 hours, because Muster assumes 24 hours for a run without
        # an estimate
        (24, DAY),
        (25, 3 * DAY),
        (100, 7 * DAY),
        (169, 14 * DAY),
        (337, 60 * DAY),
        (60 * 24, 60 * DAY),
        # an estimate that is longer than all duration classes is rounded up to whole days
        (60 * 24 + 1, 61 * DAY),
        (2400, 100 * DAY),
    ],
)
def test_estimated_hours_are_rounded_up_to_a_duration_class(
    hours: float, expected_s: float
) -> None:
    assert duration_class_s(hours * HOUR) == expected_s


@given(seconds=st.floats(0.1, 1e8))
def test_estimate_is_never_too_short(seconds: float) -> None:
    found = duration_class_s(seconds)

    assert found >= seconds
    assert found in CLASSES_S or found % DAY == 0
