"""What a fleet asks of the world: of a server, over HTTP, whether it works; of whatever runs its
servers, processes of this machine or actors of Ray, to start and to stop them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol
from urllib.parse import quote

from multidict import CIMultiDict

from tasks.processes.shortage import Unasked
from tasks.record.events import Emit
from tasks.rollout.backends import Ask, Questions
from tasks.rollout.clock import now_s
from tasks.rollout.http1 import Malformed
from tasks.rollout.ownership import EngineListenerCheck
from tasks.rollout.registry import Registry
from tasks.rollout.topology import ServerSlot
from tasks.rollout.upstream import BrokenOff, Unconnected, Upstreams
from tasks.spec.errors import MusterError
from tasks.spec.rollout import Rollout

#: Of a bad answer's text.
_SHOWN_CHARACTERS = 300
#: More of an answer is not read.
_LONGEST_BYTES = 64 * 1024 * 1024
#: Seconds between two tries of a request that this machine could not send.
_ASK_AGAIN_S = 0.5
#: Of a path: the rest would not be read as one.
_AS_IT_IS = "%/:?[]@!$&'()*+,;="


class NoReply(str):
    """Why no answer came: a timeout, a refused connection. Any other text is a bad answer's.

    Only silence may be the network's fault, and only a silence may be excused.
    """

    __slots__ = ()


class Foreign(str):
    """Why nothing was sent: a process that is not of the engine's tree has the server's address."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The whole answer of a server, or why there is none."""

    #: Of HTTP; None: no answer came.
    status: int | None
    #: Its text; without an answer, the reason: a `NoReply`, an `Unasked` or a `Foreign`.
    body: str


class HttpProber:
    """Asks servers from where the gateway is: what it cannot reach gets no requests either.

    Each question has a connection of its own: a process that accepts no new ones may still serve
    one that was kept.

    Args:
        listeners: tells whose server a connection has reached; None: any server is right.
    """

    def __init__(self, listeners: EngineListenerCheck | None = None) -> None:
        self._servers = Upstreams(connect_s=None, listeners=listeners)

    def ask(self, url: str, question: Ask, timeout_s: float) -> Coroutine[Any, Any, str | None]:
        """None for a yes, else why not: a `NoReply`, an `Unasked`, a `Foreign`, or an answer.

        The time counts from this call on: of a thousand questions at once the last one begins a
        tenth of a second after the first. A cancel closes the connection.
        """
        return self._ask(url, question, timeout_s, now_s() + timeout_s)

    async def _ask(self, url: str, question: Ask, timeout_s: float, until_s: float) -> str | None:
        reply = await self._reply(url, question, timeout_s, until_s)
        if reply.status == 200:
            return None
        status = "" if reply.status is None else f" {reply.status}"
        why = f"{question.method} {question.path}:{status} {_shown(reply.body)}".rstrip()
        kinds = (kind for kind in (NoReply, Unasked, Foreign) if isinstance(reply.body, kind))
        return next(kinds, str)(why)

    async def call(self, url: str, ask: Ask, timeout_s: float) -> Reply:
        """What a server answers, whatever it is.

        While this machine lacks something to ask with, it is asked again until the time is over:
        nothing was sent yet.
        """
        until_s = now_s() + timeout_s
        while True:
            reply = await self._reply(url, ask, timeout_s, until_s)
            if not isinstance(reply.body, Unasked) or now_s() + _ASK_AGAIN_S >= until_s:
                return reply
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _reply(self, url: str, ask: Ask, timeout_s: float, until_s: float) -> Reply:
        try:
            return await self._asked(url, ask, until_s)
        except TimeoutError:
            why: str = NoReply(f"no answer within {timeout_s:g} s")
        except Unconnected as error:
            why = _why_unconnected(error)
        except BrokenOff as error:
            why = NoReply(error)
        except Malformed as error:
            why = f"an answer that is not HTTP: {error}"
        return Reply(status=None, body=why)

    async def _asked(self, url: str, ask: Ask, until_s: float) -> Reply:
        headers = CIMultiDict({"Connection": "close"})
        body = b""
        if ask.body is not None:
            headers["Content-Type"], body = "application/json", json.dumps(ask.body).encode()
        target = quote(ask.path, safe=_AS_IT_IS)
        async with asyncio.timeout_at(until_s):
            server = await self._servers.request(
                ask.method, url, target, headers=headers, body=body, is_last_try=True
            )
            try:
                said, _ = await server.content.upto(_LONGEST_BYTES)
            except BrokenOff as error:
                raise Malformed(str(error)) from error
            finally:
                server.transport.abort()
        return Reply(status=server.status, body=said.decode(errors="replace"))


def _why_unconnected(error: Unconnected) -> str:
    if error.is_impostor:
        return Foreign(error)
    return Unasked(f"this machine cannot ask: {error}") if error.is_own_fault else NoReply(error)


def _shown(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARACTERS]


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


class StartFailed(Exception):
    """A server could not be started at all; nothing of it is left. The message says why."""


class NoRoomToStart(StartFailed):
    """This machine lacked something, such as open files: the same start may succeed later."""


class ServerHost(Protocol):
    """Runs the servers of a fleet. Lives in the fleet's asyncio loop and never blocks it."""

    #: Told each death at once, in the loop's thread; set by the fleet before the first start.
    on_death: Callable[[Death], None]

    @property
    def listeners(self) -> EngineListenerCheck:
        """Tells whose server listens at the URL of a slot that was started."""

    async def hosts(self) -> tuple[str, ...]:
        """The address of each node of the plan, by its index, as it is now."""

    async def hold_ports(self, node: int, names: Sequence[str]) -> list[int]:
        """A port of a node for each name that nobody else has, and that is kept for its server."""

    async def start(self, slot: ServerSlot, epoch: int) -> None:
        """Start the process of a server; returns once it executes its program, not once it serves.

        Raises: StartFailed, of which NoRoomToStart is one.
        """

    async def stop(self, ranks: Collection[int], *, grace_s: float) -> tuple[str, ...]:
        """Ask these servers to end, and end what is left of them after the grace period.

        Returns, within the grace period and a bound of the host's own: what could not be ended, by
        node and pid; empty when nothing is left of them and their GPUs are free. Safe for servers
        that never started or have ended. Deaths that it causes are not told. After a cancel, stop
        them again.
        """

    async def ask(self, rank: int, question: Ask, timeout_s: float) -> str | None:
        """Ask a server from its own machine, where no network is between: None for a yes, else why
        not.

        Raises: LostContact, when its machine cannot be asked, so that nothing is known.
        """

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        """The ranks of which somebody else listens on a port, on its own machine, just now."""

    async def close(self) -> None:
        """End whatever is left. The host is of no use after that."""


#: New servers of a group, at addresses that nobody has.
Rebind = Callable[[int], Awaitable[Sequence[ServerSlot]]]


class FleetRefused(MusterError):
    """What was asked of a fleet can't be done now; nothing has changed. The message says why."""


class NoHost(Exception):
    """The servers can't be placed anywhere; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetParts:
    """What health, recovery and the fleet itself work with; all of one fleet."""

    #: Of its groups.
    states: Registry
    settings: Rollout
    questions: Questions
    host: ServerHost
    prober: HttpProber
    #: Takes an event's name and its fields; never raises.
    emit: Emit
    random: Random
