"""The servers of a fleet as they are shown, from its events."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.record.events import Event
from tasks.record.states import SERVING, GroupState
from tasks.show.view import ServerSeen
from tasks.spec.run import FLEET


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
