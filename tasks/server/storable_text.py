"""Replace NUL characters in the text that is sent to the Prefect server.

PostgreSQL cannot store U+0000. A Prefect server on PostgreSQL refuses each state, log and artifact
that contains it. A NUL can come from a program: a training that reads a damaged file often prints
bytes of that file in its error message.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection

#: Matches the characters `\u0000` together with all backslashes before them, if there is an even
#: number of these backslashes. Then `\u0000` is the JSON escape of NUL. After an odd number of
#: backslashes, `\u0000` does not stand for a NUL.
_NUL_IN_JSON = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")
#: Text that replaces a match of `_NUL_IN_JSON`: the backslashes of group 1 of the match, then the
#: JSON escape `\ufffd` of U+FFFD (the replacement character).
_REPLACEMENT = rb"\1\\ufffd"


def replace_nul(json_text: bytes) -> bytes:
    """Return JSON text in which each NUL character of a string is replaced by U+FFFD.

    Args:
        json_text: JSON in UTF-8, as a request or a websocket message contains it.
    """
    return _NUL_IN_JSON.sub(_REPLACEMENT, json_text)


def replace_nul_in_requests(
    build_request: Callable[..., httpx.Request],
) -> Callable[..., httpx.Request]:
    """Return a replacement for `httpx.Client.build_request` whose JSON bodies contain no NUL.

    Args:
        build_request: The original method of the client class.
    """

    @functools.wraps(build_request)
    def build(self: Any, *arguments: Any, **options: Any) -> httpx.Request:
        request = build_request(self, *arguments, **options)
        if not isinstance(request.stream, httpx.ByteStream):
            return request
        body = request.read()
        storable_body = replace_nul(body)
        if storable_body == body:
            return request
        headers = {
            name: value for name, value in request.headers.items() if name != "content-length"
        }
        return httpx.Request(
            request.method,
            request.url,
            headers=headers,
            content=storable_body,
            extensions=request.extensions,
        )

    return build


def replace_nul_in_messages(connection: ClientConnection) -> None:
    """Change a websocket so that its sent text messages contain no NUL.

    Args:
        connection: The opened websocket. Its `send` method is replaced.
    """
    send = connection.send

    @functools.wraps(send)
    async def send_storable(message: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(message, str):
            message = replace_nul(message.encode()).decode()
        await send(message, *arguments, **options)

    connection.send = send_storable  # type: ignore[method-assign]
