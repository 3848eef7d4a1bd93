"""What the fleet asks of whatever runs its servers: processes of this machine, or actors of Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.rollout.topology import Ask, ServerSlot, TopologyPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a server that nobody asked for."""

    rank: int
    #: The incarnation that has died.
    epoch: int
    #: In words: `exit 1`, `killed by SIGKILL`, `its actor died: node 10.0.0.7 is gone`.
    why: str
    #: The end of its log; may be empty.
    last_words: str = ""
    #: The server's port was held by another process, so that it could not listen.
    is_port_conflict: bool = False


class StartFailed(Exception):
    """A server could not be started at all; nothing of it is left. The message says why."""


class ServerHost(Protocol):
    """Runs the servers of a fleet. Lives in the fleet's asyncio loop and never blocks it."""

    #: Told each death at once, in the loop's thread; set by the fleet before the first start.
    on_death: Callable[[Death], None]

    async def start(self, slot: ServerSlot, epoch: int) -> None:
        """Start the process of a server; returns once it executes its program, not once it serves.

        Raises: StartFailed.
        """

    async def stop(self, ranks: Collection[int], *, grace_s: float) -> tuple[str, ...]:
        """Ask these servers to end, and end what is left of them after the grace period.

        Returns, within the grace period and a bound of the host's own: what could not be ended, by
        node and pid; empty when nothing is left of them and their GPUs are free. Safe for servers
        that never started or have ended. Deaths that it causes are not told. A cancel leaves
        nothing half done: stop them again.
        """

    def is_alive(self, rank: int) -> bool:
        """Whether its process runs, as far as is known without asking anybody."""

    async def ask(self, rank: int, question: Ask, timeout_s: float) -> str | None:
        """Ask a server from its own machine, where no network is between.

        Returns: None for a yes, else why not.

        Raises: LostContact, when its machine cannot be asked, so that nothing is known.
        """

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        """The ranks whose port somebody else listens on, on its own machine, just now."""


class NoHost(Exception):
    """The servers can't be placed anywhere; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedHost:
    """What runs the servers of one fleet, and where they are at first."""

    host: ServerHost
    topology: TopologyPlan
    #: The servers of a group at new addresses.
    rebind: Callable[[int], Sequence[ServerSlot] | Awaitable[Sequence[ServerSlot]]]
    #: Ends whatever is left.
    close: Callable[[], Awaitable[None]]
