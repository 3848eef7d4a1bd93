"""How long a gang is expected to hold its GPUs: its hours, rounded up to a class.

An estimate lets shorter runs pass; it never ends a run. Classes are coarse on purpose: exact
estimates make the waits hardly shorter, and nobody can give them.
"""

from __future__ import annotations

import math

_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0

#: In seconds, ascending.
CLASSES_S = (
    10 * _MINUTE_S,
    _HOUR_S,
    4 * _HOUR_S,
    12 * _HOUR_S,
    _DAY_S,
    3 * _DAY_S,
    7 * _DAY_S,
    14 * _DAY_S,
    60 * _DAY_S,
)


def estimate_s(hours: float, elapsed_s: float = 0.0) -> float:
    """How long a gang is expected to hold its GPUs, in seconds from its start.

    Args:
        hours: what the run's spec says.
        elapsed_s: for how long it has held them. One that has outrun its class is in the next one
            up, so that its end is never in the past.
    """
    return class_s(hours * _HOUR_S, elapsed_s)


def class_s(seconds: float, elapsed_s: float = 0.0) -> float:
    """The class that so many seconds are in, as `estimate_s`."""
    for limit_s in CLASSES_S:
        if seconds <= limit_s and elapsed_s < limit_s:
            return limit_s
    # Whole days, so that what is shown of the end changes once a day, not with each look.
    asked_s = math.ceil(seconds / _DAY_S) * _DAY_S
    return asked_s if elapsed_s < asked_s else (elapsed_s // _DAY_S + 2) * _DAY_S
