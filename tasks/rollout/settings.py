"""The numbers of a fleet's health and recovery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tasks.spec.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """As its spec has them, with what was left out filled in."""

    #: Between two questions to a server.
    interval_s: float = 30.0
    #: An answer that takes longer is a miss; less than the interval, or detection takes longer.
    timeout_s: float = 15.0
    #: So many in a row end a server's group; 0: no periodic questions, barriers ask nevertheless.
    misses: int = 3
    #: From when a server began to serve to its first question; None: one interval.
    first_after_s: float | None = None
    #: Recoveries in all, an incident of many groups counted once; None: no limit.
    budget: int | None = None
    #: Before the second recovery in a row of one group; it then grows.
    backoff_s: float = 1.0
    #: No pause between tries is longer.
    max_backoff_s: float = 60.0
    #: Groups that recover at once.
    parallel: int = 4
    #: Fewer groups that serve: the run has failed; None: while any can be recovered, it has not.
    min_active: int | None = None
    #: From the start of a group to its first token, at most.
    start_within_s: float = 1800.0
    #: From the stop signal to SIGKILL.
    grace_s: float = 10.0
    #: Requests that one entrypoint takes at once; None: any number.
    concurrency: int | None = None

    @property
    def first_s(self) -> float:
        """From when a server began to serve to its first question."""
        return self.interval_s if self.first_after_s is None else self.first_after_s

    @property
    def stop_within_s(self) -> float:
        """By then a host has answered a `stop`; its own bound is shorter."""
        return self.grace_s + 20.0


def settings_of(fleet: Rollout) -> FleetSettings:
    """The numbers of a fleet, as its spec says them; what that leaves out, by their defaults."""
    health, recovery = fleet.health, fleet.recovery
    given: dict[str, Any] = {
        "interval_s": health.interval_s,
        "timeout_s": health.timeout_s,
        "misses": health.misses,
        "first_after_s": health.first_after_s,
        "budget": recovery.budget,
        "backoff_s": recovery.backoff_s,
        "max_backoff_s": recovery.max_backoff_s,
        "parallel": recovery.parallel,
        "min_active": recovery.min_active,
        "start_within_s": fleet.start_within_s,
        "grace_s": fleet.stop.grace_s,
        "concurrency": fleet.concurrency,
    }
    return FleetSettings(**{name: one for name, one in given.items() if one is not None})
