"""Prefect's clients in Muster's processes: none sends the server's password to another user.

Prefect offers no place for such a check, so its client classes are changed in memory:

- `PrefectHttpxAsyncClient` and `PrefectHttpxSyncClient`, of which every `get_client` is made;
- the HTTP client of its version check, which sends the password, too;
- the function that opens the websockets of events, logs and workers.

A release of Prefect that moves one of them raises an error here: nothing is sent unchecked.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import httpx
import prefect._internal.version_checking as version_checking
import prefect._internal.websockets as prefect_websockets
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from websockets.asyncio.client import ClientConnection, connect

from tasks.processes.trusted_server import (
    ListenerCheck,
    check_listeners,
    check_transport,
)
from tasks.record.places import server_password

#: The environment of a program of Prefect's that is to check its servers: it loads Muster's plugin.
GUARDED_PREFECT = {"PREFECT_PLUGINS_ENABLED": "true", "PREFECT_PLUGINS_ALLOW": "muster"}
#: The environment of a program that imports `tasks.server` first and needs no plugin for it.
UNPLUGGED_PREFECT = {"PREFECT_PLUGINS_ENABLED": "false"}


def guard_prefect_clients() -> None:
    """Have all clients of Prefect servers in this process check the listener first; idempotent."""
    websockets_names, version_names = vars(prefect_websockets), vars(version_checking)
    if websockets_names["connect"] is _CheckedConnect:
        return
    if websockets_names["connect"] is not connect or version_names["httpx"] is not httpx:
        raise ImportError("Prefect's clients were replaced: their listeners cannot be checked")
    password = server_password()
    for client in (PrefectHttpxAsyncClient, PrefectHttpxSyncClient):
        client.__init__ = _checking(client.__init__, password)  # type: ignore[method-assign]
    version_names["httpx"] = SimpleNamespace(**{**vars(httpx), "AsyncClient": _CheckedAsyncClient})
    websockets_names["connect"] = _CheckedConnect


def _checking(made: Callable[..., None], password: str) -> Callable[..., None]:
    """The constructor of an HTTP client, whose connections are then checked.

    Args:
        password: that of this home as this process began.
    """

    @functools.wraps(made)
    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        check_listeners(self)
        if password:
            self.auth = RenewedPassword(password)

    return make


class RenewedPassword(httpx.Auth):
    """Follows a change of the home's password, which each start of a stack brings.

    A training that outlives a stack reports to the next one at the same address.
    """

    def __init__(self, password: str) -> None:
        """
        Args:
            password: the one that may have been replaced; another one was set by the operator.
        """
        self._replaced = as_header(password)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        response = yield request
        is_refused = response.status_code == httpx.codes.UNAUTHORIZED
        if is_refused and request.headers.get("Authorization") == self._replaced:
            request.headers["Authorization"] = as_header(server_password())
            yield request


def as_header(password: str) -> str:
    """The value of the header Authorization for `user:password`."""
    return f"Basic {base64.b64encode(password.encode()).decode()}"


class _CheckedAsyncClient(httpx.AsyncClient):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        check_listeners(self)


class _CheckedConnect(connect):
    """Opens a websocket, and checks who listens before the handshake is sent."""

    async def create_connection(self) -> ClientConnection:
        check = ListenerCheck()
        connection = await super().create_connection()
        try:
            check_transport(check, connection.transport)
        except OSError:
            connection.transport.abort()
            raise
        return connection
