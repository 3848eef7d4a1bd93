"""What the page of a run is made of: plain data, gathered by whoever shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tasks.record.places import AttemptPlace, RunPlace
from tasks.spec.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one artifact shows."""

    #: Short paragraphs, which are all that the run's own page shows of it, on a card that cuts each
    #: after some 40 letters; older pages show the first only. Markdown.
    headline: str
    #: Markdown, JSON of a table, or a percentage.
    data: str | float
    type: Literal["markdown", "table", "progress"] = "markdown"
    #: SVG, shown on the card in place of the headline, which is then its words; empty for none.
    picture: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeen:
    """One server of a fleet, as its events tell."""

    rank: int
    #: Of its lifecycle group: `active`, `recovering`, ...
    state: str
    #: Empty while it has none.
    url: str = ""
    #: How often it was started again.
    restarts: int = 0
    #: Why it does not serve; empty where it does.
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as it is at one moment."""

    #: UTC epoch seconds.
    at: float
    #: With its placeholders filled in, once an attempt has begun.
    spec: RunSpec
    #: The content of `run.json`.
    record: Mapping[str, Any]
    place: RunPlace
    #: The machine of its flow process.
    host: str = ""
    #: What it does just now, as its state says.
    doing: str = ""
    #: Why it has ended without an attempt; empty where it has not.
    message: str = ""
    #: The step last seen.
    step: float | None = None
    #: `unready[component] ->` the last answer to the question whether it is ready.
    unready: Mapping[str, str] = field(default_factory=dict)
    servers: tuple[ServerSeen, ...] = ()

    @property
    def state(self) -> str:
        return str(self.record["state"])

    @property
    def is_over(self) -> bool:
        return self.state in ("completed", "failed", "cancelled")

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.record["attempts"]
        return found

    @property
    def attempt(self) -> Mapping[str, Any] | None:
        """The one under way, or the last."""
        return self.attempts[-1] if self.attempts else None

    @property
    def attempt_place(self) -> AttemptPlace | None:
        return self.place.attempt(self.attempt["number"]) if self.attempt else None

    def log(self, component: str) -> Path | None:
        """Of a component in the last attempt."""
        return self.attempt_place.log(component) if self.attempt_place else None


def clock(at: float) -> str:
    """`14:20:03 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def moment(at: float) -> str:
    """`2026-01-02 14:20:03 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def seconds(duration: float) -> str:
    """`0.42 s`, `7.5 s`, `42 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    duration = max(0.0, duration)
    if duration < 59.5:
        digits = 2 if duration < 1 else 1 if duration < 9.95 else 0
        return f"{duration:.{digits}f} s"
    whole = round(duration)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


#: With these a run stops its own components.
_STOPS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL"})


def ending_of(component: Mapping[str, Any]) -> str:
    """How something ended by itself: `killed by SIGSEGV`, `exit code 1`."""
    if component["signal"]:
        return f"killed by {component['signal']}"
    code = component["exit_code"]
    return f"exit code {'unknown' if code is None else code}"


def has_ended(failure: Mapping[str, Any]) -> bool:
    """Whether the component to blame had ended; another one was alive, and then stopped."""
    return failure["exit_code"] is not None or failure["signal"] is not None


def end_of(attempt: Mapping[str, Any], name: str) -> str:
    """How a component of an attempt ended, which may be by the run's own hand."""
    seen, failure = attempt["components"][name], attempt["failure"]
    is_first = failure is not None and failure["component"] == name and has_ended(failure)
    if seen["signal"] in _STOPS and not is_first:
        return f"stopped by {seen['signal']}"
    return ending_of(seen)
