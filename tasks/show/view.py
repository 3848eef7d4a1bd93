"""What the page of a run is made of: plain data, gathered by whoever shows it.

The servers of a fleet as they are shown, from its events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tasks.record.events import Event
from tasks.record.outcome import Failure
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, ComponentRecord, RunJson
from tasks.record.states import SERVING, GroupState
from tasks.spec.run import FLEET, RunSpec


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
    record: RunJson
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
    def failed(self) -> tuple[AttemptRecord, Failure] | None:
        """The last attempt, where it failed and nothing else has begun since."""
        attempt = self.record.attempt
        return (attempt, attempt.failure) if attempt and attempt.failure else None


#: With these a run stops its own components.
_STOPS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL"})


def ending_of(one: ComponentRecord | Failure) -> str:
    """How something ended by itself: `killed by SIGSEGV`, `exit code 1`."""
    if one.signal:
        return f"killed by {one.signal}"
    return f"exit code {'unknown' if one.exit_code is None else one.exit_code}"


def end_of(attempt: AttemptRecord, name: str) -> str:
    """How a component of an attempt ended, which may be by the run's own hand."""
    seen, failure = attempt.components[name], attempt.failure
    is_first = failure is not None and failure.component == name and failure.has_ended
    if seen.signal in _STOPS and not is_first:
        return f"stopped by {seen.signal}"
    return ending_of(seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    url: str = ""
    starts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    state: GroupState
    cause: str
    ranks: tuple[int, ...]


class FleetSeen:
    """What is known of each server of the attempt under way."""

    def __init__(self) -> None:
        self._servers: dict[int, _Server] = {}
        self._groups: dict[int, _Group] = {}

    def observe(self, event: Event) -> bool:
        """Take in an event of the run; whether what is shown may have changed."""
        match event.name:
            case "attempt.begun":
                self._servers.clear()
                self._groups.clear()
            case "rollout.server.started":
                rank = event.fields["rank"]
                before = self._servers.get(rank, _Server())
                self._servers[rank] = replace(
                    before, url=event.fields.get("url") or "", starts=before.starts + 1
                )
            case "rollout.group.state":
                self._groups[event.fields["group"]] = _Group(
                    state=GroupState(event.fields["after"]),
                    cause=event.fields.get("cause") or "",
                    ranks=tuple(event.fields["ranks"]),
                )
            case _:
                return False
        return True

    @property
    def servers(self) -> tuple[ServerSeen, ...]:
        """In the order of their ranks."""
        groups = {rank: group for group in self._groups.values() for rank in group.ranks}
        return tuple(
            _seen(rank, self._servers.get(rank, _Server()), groups.get(rank))
            for rank in sorted({*groups, *self._servers})
        )


def _seen(rank: int, server: _Server, group: _Group | None) -> ServerSeen:
    state = group.state if group else GroupState.STARTING
    return ServerSeen(
        rank=rank,
        state=state.value,
        url=server.url,
        restarts=max(0, server.starts - 1),
        cause=group.cause if group and state not in SERVING else "",
    )


class FleetWords:
    """How many engines of a fleet serve, in words, from its events."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._states: dict[int, GroupState] = {}

    def observe(self, event: Event) -> bool:
        """Take in an event of the run; whether the words may have changed by it."""
        if event.name == "attempt.begun":
            self._states.clear()
        elif event.name == "rollout.group.state":
            self._states[event.fields["group"]] = GroupState(event.fields["after"])
            return True
        return False

    @property
    def serving(self) -> int:
        """How many do."""
        return sum(state in SERVING for state in self._states.values())

    def __str__(self) -> str:
        """`rollout 2 of 3 engines serve`; empty while all do."""
        if not self._states or self.serving == self._engines:
            return ""
        return f"{FLEET} {self.serving} of {self._engines} engines serve"
