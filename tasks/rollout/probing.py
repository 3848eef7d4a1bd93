"""One question to one server over HTTP, with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from tasks.rollout.evidence import Silence
from tasks.rollout.topology import Ask

#: Of a bad answer's text.
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The whole answer of a server, or why there is none."""

    #: Of HTTP; None: no answer came.
    status: int | None
    #: Its text; without an answer, the reason.
    body: str


class Prober(Protocol):
    """Asks servers from where the gateway is: what it cannot reach gets no requests either."""

    async def ask(self, url: str, question: Ask, timeout_s: float) -> str | None:
        """
        Args:
            url: `http://host:port` of the server.

        Returns: None for a yes, else why not: a `Silence` where no answer came.
        """

    async def call(self, url: str, ask: Ask, timeout_s: float) -> Reply:
        """What a server answers, whatever it is."""


class HttpProber:
    """A Prober with one client session, made at the first question; `close` ends it.

    Each question has a connection of its own: one that was kept would prove less, for it may be
    served by a process that accepts no new ones, or just have been closed.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def ask(self, url: str, question: Ask, timeout_s: float) -> Coroutine[Any, Any, str | None]:
        """See `Prober`. A cancel closes the connection.

        The time counts from this call on: of a thousand questions at once the last one begins a
        tenth of a second after the first, and would end so much later.
        """
        return self._ask(url, question, timeout_s, _moment_in(timeout_s))

    async def _ask(self, url: str, question: Ask, timeout_s: float, until_s: float) -> str | None:
        what = f"{question.method} {question.path}"
        try:
            reply = await self._reply(url, question, until_s)
        except TimeoutError:
            return Silence(f"{what}: no answer within {timeout_s:g} s")
        except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError) as error:
            return f"{what}: an answer that is not HTTP: {_shown(str(error))}"
        except (aiohttp.ClientError, OSError) as error:
            return Silence(f"{what}: {_shown(str(error)) or type(error).__name__}")
        if reply.status == 200:
            return None
        return f"{what}: {reply.status} {_shown(reply.body)}".rstrip()

    async def call(self, url: str, ask: Ask, timeout_s: float) -> Reply:
        """See `Prober`."""
        try:
            return await self._reply(url, ask, _moment_in(timeout_s))
        except TimeoutError:
            return Reply(status=None, body=f"no answer within {timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Reply(status=None, body=str(error) or type(error).__name__)

    async def close(self) -> None:
        """Any number of times."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _reply(self, url: str, ask: Ask, until_s: float) -> Reply:
        async with (
            asyncio.timeout_at(until_s),
            self._client().request(
                ask.method, url + ask.path, json=ask.body, allow_redirects=False
            ) as response,
        ):
            text = await response.text(errors="replace")
        return Reply(status=response.status, body=text)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Its own limit of 100 would let one hung server delay the question to another.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _moment_in(seconds: float) -> float:
    """By the clock of the loop."""
    return asyncio.get_running_loop().time() + seconds


def _shown(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARACTERS]
