"""Interfaces between a fleet and its servers: HTTP requests, and the host of their processes.

A host starts and stops servers as processes of this machine or as actors of a Ray cluster.
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

from tasks.processes.shortage import NotChecked
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

#: Number of characters of a server's response that a message quotes.
_QUOTED_CHARACTERS = 300
#: Largest number of bytes that are read of one response.
_MAX_BODY_BYTES = 64 * 1024 * 1024
#: Seconds between two attempts to send a request that this machine could not send.
_RETRY_EVERY_S = 0.5
#: Characters of a request's path that are not percent-encoded.
_UNQUOTED_CHARACTERS = "%/:?[]@!$&'()*+,;="


class NoReply(str):
    """Reason why a server gave no answer, such as a timeout or a refused connection.

    The cause may be the server or the network. If the server answers with an error, the
    reason is a plain `str`, because the network works.
    """

    __slots__ = ()


class Foreign(str):
    """Reason why a request was not sent: a foreign process listens at the server's address.

    A process is foreign if it does not belong to the process tree of the server's engine.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Complete answer of a server, or the reason for the missing answer."""

    #: HTTP status of the answer, or None if no answer came.
    status: int | None
    #: Body of the answer as text. If no answer came, the reason for the missing answer, usually as
    #: a `NoReply`, a `NotChecked` or a `Foreign`.
    body: str


class HttpProber:
    """Sends HTTP requests to servers from the gateway's machine.

    If this machine cannot reach a server, the server cannot receive rollout requests either. Each
    request uses a new connection, because a broken server may still answer on an existing
    connection.
    """

    def __init__(self, listeners: EngineListenerCheck | None = None) -> None:
        """
        Args:
            listeners: Object that checks which process has accepted a connection. None to allow
                any process.
        """
        self._servers = Upstreams(connect_s=None, listeners=listeners)

    def ask(self, url: str, question: Ask, timeout_s: float) -> Coroutine[Any, Any, str | None]:
        """Send a request, and check that the answer has status 200.

        If the returned coroutine is cancelled, the connection is closed.

        The timeout begins with this call, not with the start of the coroutine. So several servers
        that are asked together have the same deadline.

        Args:
            url: `http://host:port` of the server.
            question: The request.
            timeout_s: Seconds to wait for the answer.

        Returns:
            None if the status was 200. Otherwise the problem: a `NoReply`, a `NotChecked`, a
            `Foreign`, or a plain string for any other answer.
        """
        return self._ask(url, question, timeout_s, now_s() + timeout_s)

    async def _ask(self, url: str, question: Ask, timeout_s: float, until_s: float) -> str | None:
        """Send a request, and return None if the answer has status 200, else the problem.

        Args:
            url: `http://host:port` of the server.
            question: The request.
            timeout_s: Length of the timeout in seconds, as the error message shows it.
            until_s: End of the timeout, in seconds of the event loop's clock.
        """
        reply = await self._send(url, question, timeout_s, until_s)
        if reply.status == 200:
            return None
        status = "" if reply.status is None else f" {reply.status}"
        problem = f"{question.method} {question.path}:{status} {_quote(reply.body)}".rstrip()
        # Convert `problem` to the class of `reply.body`, because callers distinguish kinds of
        # problems by subclasses of `str`, such as `NoReply`.
        for kind in (NoReply, NotChecked, Foreign):
            if isinstance(reply.body, kind):
                return kind(problem)
        return problem

    async def call(self, url: str, ask: Ask, timeout_s: float) -> Reply:
        """Send a request and return the answer, even if its status is an error.

        If the request cannot be sent because this machine lacks resources, such as file
        descriptors, the method tries again until the timeout.

        Args:
            url: `http://host:port` of the server.
            ask: The request.
            timeout_s: Seconds to wait for the answer.
        """
        until_s = now_s() + timeout_s
        while True:
            reply = await self._send(url, ask, timeout_s, until_s)
            if not isinstance(reply.body, NotChecked) or now_s() + _RETRY_EVERY_S >= until_s:
                return reply
            await asyncio.sleep(_RETRY_EVERY_S)

    async def _send(self, url: str, ask: Ask, timeout_s: float, until_s: float) -> Reply:
        """Send a request once, and return the answer or the reason for the missing answer.

        Args:
            url: `http://host:port` of the server.
            ask: The request.
            timeout_s: Length of the timeout in seconds, as the error message shows it.
            until_s: End of the timeout, in seconds of the event loop's clock.
        """
        try:
            return await self._exchange(url, ask, until_s)
        except TimeoutError:
            why: str = NoReply(f"no answer within {timeout_s:g} s")
        except Unconnected as error:
            why = _describe_unconnected(error)
        except BrokenOff as error:
            why = NoReply(error)
        except Malformed as error:
            why = f"the answer is not HTTP: {error}"
        return Reply(status=None, body=why)

    async def _exchange(self, url: str, ask: Ask, until_s: float) -> Reply:
        """Send a request on a new connection, and return the answer.

        Raises:
            TimeoutError: The answer was not complete at `until_s`.
            Unconnected: There was no connection, so nothing was sent.
            BrokenOff: The connection was lost before an answer.
            Malformed: The answer is not HTTP, or its body is incomplete.
        """
        headers = CIMultiDict({"Connection": "close"})
        body = b""
        if ask.body is not None:
            headers["Content-Type"] = "application/json"
            body = json.dumps(ask.body).encode()
        target = quote(ask.path, safe=_UNQUOTED_CHARACTERS)
        async with asyncio.timeout_at(until_s):
            server = await self._servers.request(
                ask.method, url, target, headers=headers, body=body, is_last_try=True
            )
            try:
                content, _ = await server.content.read_up_to(_MAX_BODY_BYTES)
            except BrokenOff as error:
                raise Malformed(str(error)) from error
            finally:
                server.transport.abort()
        return Reply(status=server.status, body=content.decode(errors="replace"))


def _describe_unconnected(error: Unconnected) -> str:
    """Return the reason for the missing connection, as a `Foreign`, `NotChecked` or `NoReply`."""
    if error.is_impostor:
        return Foreign(error)
    return (
        NotChecked(f"this machine could not send the request: {error}")
        if error.is_own_fault
        else NoReply(error)
    )


def _quote(text: str) -> str:
    """Return the beginning of a text, without line breaks."""
    return " ".join(text.split())[:_QUOTED_CHARACTERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Unexpected end of a server's process."""

    #: Rank of the server.
    rank: int
    #: Epoch of the server. The epoch counts the starts of the server's group.
    epoch: int
    #: Description of the end of the process, such as `exit 1`, `killed by SIGKILL` or `its Ray
    #: actor died: node 10.0.0.7 is gone`.
    why: str
    #: Last part of the server's log; may be empty.
    log_end: str = ""


class StartFailed(Exception):
    """A server could not be started, and none of its processes runs. The message says why."""


class NoRoomToStart(StartFailed):
    """A server could not be started: this machine lacked resources, such as file descriptors.

    The same start may succeed later.
    """


class ServerHost(Protocol):
    """Starts and stops the servers of a fleet, and sends requests to them.

    No method blocks the asyncio event loop.
    """

    #: Function that is called when a server has died, in the thread of the asyncio event loop. The
    #: fleet sets this function before the first start.
    on_death: Callable[[Death], None]

    @property
    def listeners(self) -> EngineListenerCheck:
        """Checker that finds out which processes listen at the URLs of started servers."""

    async def hosts(self) -> tuple[str, ...]:
        """Return the current address of each node in the fleet's plan, in the plan's order."""

    async def hold_ports(self, node: int, names: Sequence[str]) -> list[int]:
        """Reserve a free port on a node for each name, and return the ports in the same order.

        Args:
            node: Index of the node.
            names: Names of the ports, such as `server.0` for the server with rank 0.
        """

    async def start(self, slot: ServerSlot, epoch: int) -> None:
        """Start the process of a server, and return when the process executes the server's program.

        At that time, the server may not answer requests yet.

        Raises:
            StartFailed: The server could not be started.
            NoRoomToStart: The server could not be started, because this machine lacked resources.
        """

    async def stop(self, ranks: Collection[int], *, grace_s: float) -> tuple[str, ...]:
        """Ask servers to end, and kill their remaining processes after the grace period.

        The call may take some seconds longer than the grace period (`recovery.STOPPED_WITHIN_S`).

        Servers that do not run are ignored. `on_death` is not called for servers that this method
        ends. After a cancelled call, processes may still run: call this method again.

        Args:
            ranks: Ranks of the servers.
            grace_s: Grace period in seconds.

        Returns:
            Description of each process that could not be ended, with node and pid. Empty if all
            processes have ended and their GPUs are free.
        """

    async def ask(self, rank: int, question: Ask, timeout_s: float) -> str | None:
        """Send a request to a server from the server's own machine, without the network.

        Returns:
            None if the status was 200, otherwise the problem.

        Raises:
            LostContact: The server's machine could not be reached, so the answer is unknown.
        """

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        """Return the ranks of the servers whose ports another program uses on their machine now."""

    async def close(self) -> None:
        """End all servers. This object cannot be used afterwards."""


#: Function that returns the servers of a group with new, free addresses. Its argument is the index
#: of the group.
Rebind = Callable[[int], Awaitable[Sequence[ServerSlot]]]


class FleetRefused(MusterError):
    """A request to change the fleet was refused. The fleet is unchanged. The message says why."""


class NoHost(Exception):
    """No machine can run the servers. The message gives the reason and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetParts:
    """The objects of one fleet that its health checks, recovery and weight syncs share."""

    #: Registry with the states of the fleet's groups of servers.
    states: Registry
    #: The fleet's section of the run spec.
    settings: Rollout
    #: Requests that the fleet's backend understands, such as health checks.
    questions: Questions
    host: ServerHost
    prober: HttpProber
    #: Function that emits an event. Its arguments are the event's name and fields. The function
    #: never raises an error.
    emit: Emit
    random: Random
