"""What a backend is told of a server, and what it has to say about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tasks.rollout.topology import Answers, Questions
from tasks.spec.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One server of an engine: where it is, before it is known what it runs."""

    #: Index into the fleet's engines.
    engine: int
    #: Which of its engine's servers it is, from 0.
    index: int
    #: One for each of its GPUs; the first is the server's own.
    ranks: tuple[int, ...]
    #: Index into the fleet's nodes.
    node: int
    #: Where it listens; empty as long as nobody has given out addresses.
    host: str = ""
    #: None where it has no API.
    port: int | None = None
    #: Host and port at which the processes of its engine find each other.
    meeting: tuple[str, int] | None = None

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def meets_at(self) -> str:
        """`host:port` of the meeting; empty where there is none."""
        return "" if self.meeting is None else f"{self.meeting[0]}:{self.meeting[1]}"


class Backend(Protocol):
    """The module of a backend. All of it is a function of the spec and of the place."""

    def answers(self, fleet: Rollout, index: int) -> Answers:
        """What an answer of this server of an engine proves."""

    def is_entrypoint(self, fleet: Rollout, index: int) -> bool:
        """Whether this server of an engine accepts rollout requests."""

    def meets(self, fleet: Rollout) -> bool:
        """Whether the processes of an engine need an address at which they find each other."""

    def questions(self, fleet: Rollout) -> Questions:
        """What its servers are asked."""

    def argv(self, fleet: Rollout, place: Place) -> tuple[str, ...]:
        """The server's program and its arguments, those that the user adds last."""

    def env(self, fleet: Rollout, place: Place) -> dict[str, str]:
        """Variables that the server needs to be what it is planned as."""


def option_in(words: tuple[str, ...], *names: str) -> str | None:
    """The value of an option among arguments, `--name VALUE` or `--name=VALUE`; the last counts."""
    found: str | None = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else "".join(words[index + 1 : index + 2])
    return found or None
