"""One question to one server over HTTP, with an end."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp

from tasks.rollout.evidence import Silence
from tasks.rollout.topology import Ask

#: Of a bad answer's text.
_SHOWN_CHARACTERS = 300


class Prober(Protocol):
    """Asks servers from where the gateway is: what it cannot reach gets no requests either."""

    async def ask(self, url: str, question: Ask, timeout_s: float) -> str | None:
        """
        Args:
            url: `http://host:port` of the server.

        Returns: None for a yes, else why not: a `Silence` where no answer came.
        """


class HttpProber:
    """A Prober with one client session, made at the first question; `close` ends it.

    Each question has a connection of its own: one that was kept would prove less, for it may be
    served by a process that accepts no new ones, or just have been closed.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, url: str, question: Ask, timeout_s: float) -> str | None:
        """See `Prober`. A cancel closes the connection."""
        what = f"{question.method} {question.path}"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._client().request(
                    question.method,
                    url + question.path,
                    json=question.body,
                    allow_redirects=False,
                ) as response:
                    text = await response.text(errors="replace")
        except TimeoutError:
            return Silence(f"{what}: no answer within {timeout_s:g} s")
        except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError) as error:
            return f"{what}: an answer that is not HTTP: {_shown(str(error))}"
        except (aiohttp.ClientError, OSError) as error:
            return Silence(f"{what}: {_shown(str(error)) or type(error).__name__}")
        if response.status == 200:
            return None
        return f"{what}: {response.status} {_shown(text)}".rstrip()

    async def close(self) -> None:
        """Any number of times."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Its own limit of 100 would let one hung server delay the question to another.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _shown(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARACTERS]
