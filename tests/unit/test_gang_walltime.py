"""How long a gang is expected to run: coarse classes, that no run is ever ended by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.queue.policy import CLASSES_S, class_s

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@pytest.mark.parametrize(
    ("hours", "expected_s"),
    [
        (0.01, 10 * MINUTE),
        # just the class, and a little more
        (1 / 6, 10 * MINUTE),
        (0.17, HOUR),
        (1, HOUR),
        (1.01, 4 * HOUR),
        (5, 12 * HOUR),
        # what a spec says that says nothing
        (24, DAY),
        (25, 3 * DAY),
        (100, 7 * DAY),
        (169, 14 * DAY),
        (337, 60 * DAY),
        (60 * 24, 60 * DAY),
        # beyond the classes: whole days
        (60 * 24 + 1, 61 * DAY),
        (2400, 100 * DAY),
    ],
)
def test_hours_are_rounded_up_to_a_class(hours: float, expected_s: float) -> None:
    assert class_s(hours * HOUR) == expected_s


@pytest.mark.parametrize(
    ("hours", "elapsed_s", "expected_s"),
    [
        (1, HOUR - 1, HOUR),
        # its class is over: the next one up, even when that is over at once
        (1, HOUR, 4 * HOUR),
        (1, 5 * HOUR, 12 * HOUR),
        (24, 59 * DAY, 60 * DAY),
        # beyond the classes: a day or two more, in whole days
        (24, 60 * DAY, 62 * DAY),
        (24, 60.9 * DAY, 62 * DAY),
        (2400, 99 * DAY, 100 * DAY),
        (2400, 100 * DAY, 102 * DAY),
    ],
)
def test_a_gang_that_has_outrun_its_class_is_in_the_next_one_up(
    hours: float, elapsed_s: float, expected_s: float
) -> None:
    assert class_s(hours * HOUR, elapsed_s) == expected_s


@given(seconds=st.floats(0.1, 1e8), elapsed_s=st.floats(0, 1e8))
def test_an_estimate_is_neither_too_short_nor_past(seconds: float, elapsed_s: float) -> None:
    found = class_s(seconds, elapsed_s)

    assert found >= seconds
    assert found > elapsed_s
    assert found in CLASSES_S or found % DAY == 0
