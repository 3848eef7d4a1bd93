"""How fast a training goes, from the steps that were seen."""

from __future__ import annotations

from collections import deque

#: A step counts for the rate so long; the last few count however old they are.
_WINDOW_S = 120.0
_KEPT_AT_LEAST = 6


class Pace:
    """The rate of the last steps, and the time that is left."""

    def __init__(self, total: float | None = None) -> None:
        self._total = total
        #: `(UTC epoch seconds, step)`, oldest first.
        self._seen: deque[tuple[float, float]] = deque()

    @property
    def step(self) -> float | None:
        return self._seen[-1][1] if self._seen else None

    def see(self, at: float, step: float) -> None:
        if self._seen and step < self._seen[-1][1]:
            # It went back to a checkpoint.
            self._seen.clear()
        self._seen.append((at, step))
        while len(self._seen) > _KEPT_AT_LEAST and self._seen[0][0] < at - _WINDOW_S:
            self._seen.popleft()

    def per_second(self, now: float) -> float | None:
        """None while nobody can say. It falls while no step comes that is due."""
        if len(self._seen) < 2:
            return None
        (began, first), (last_at, last) = self._seen[0], self._seen[-1]
        if last <= first or last_at <= began:
            return None
        rate = (last - first) / (last_at - began)
        is_done = self._total is not None and last >= self._total
        is_overdue = not is_done and (now - last_at) * rate > 1
        return (last - first + 1) / (now - began) if is_overdue else rate

    def left_s(self, now: float) -> float | None:
        """Seconds until the last step; None while nobody can say."""
        rate = self.per_second(now)
        if rate is None or self._total is None or self.step is None:
            return None
        return max(0.0, (self._total - self.step) / rate)


def rate_text(per_second: float) -> str:
    """`3.3/s`, `12/min`, `0.5/h`."""
    for unit, seconds in (("s", 1.0), ("min", 60.0)):
        if per_second * seconds >= 1:
            return f"{_short(per_second * seconds)}/{unit}"
    return f"{_short(per_second * 3600)}/h"


def clock_text(seconds: float) -> str:
    """`0:12`, `1:02:03`, `2 d 03:04`."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24:02}:{minutes % 60:02}"
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"
