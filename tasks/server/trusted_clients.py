"""Change Prefect's clients: whom they send the server's password, and when they use a proxy.

On a machine with several users, another user could listen on the port of a server that has ended.
Before a client sends the password, it checks that the listening process belongs to this user, to
root, or to a user that the operator trusts. The clients also ask a server on this machine without
any proxy, whatever the environment variables say (see `tasks/server/proxies.py`). Prefect has no
extension point for these two changes. These parts of Prefect are therefore replaced in memory:

- `PrefectHttpxAsyncClient` and `PrefectHttpxSyncClient`, the base of all clients of `get_client`;
- the HTTP client of the version check, which sends the password, too;
- the function that opens the websockets of events, logs and workers.

The same clients also replace NUL characters, which a server on PostgreSQL cannot store. See
`storable_text`.

If a future release of Prefect does not have one of these parts, an error is raised, and no password
is sent.
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
from prefect.settings import PREFECT_API_URL
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidMessage

from tasks.processes.trusted_server import (
    ListenerCheck,
    check_listeners,
    check_transport,
)
from tasks.record.places import server_password
from tasks.server.proxies import is_on_this_machine, make_proxy_options, name_unusable_proxy
from tasks.server.storable_text import replace_nul_in_messages, replace_nul_in_requests

#: Environment variables that make a program of Prefect load Muster's plugin, which imports this
#: module. The program then checks the server process before sending the password.
GUARDED_PREFECT = {"PREFECT_PLUGINS_ENABLED": "true", "PREFECT_PLUGINS_ALLOW": "muster"}
#: Environment variables for a program that imports `tasks.server` itself. They prevent the loading
#: of plugins. Muster's plugin is not needed, because the import of `tasks.server` has already
#: changed Prefect's clients.
UNPLUGGED_PREFECT = {"PREFECT_PLUGINS_ENABLED": "false"}


def guard_prefect_clients() -> None:
    """Make all Prefect clients of this process check the owner of the server process.

    The clients also connect to a server on this machine without a proxy. Further calls have no
    effect.

    Raises:
        ImportError: This release of Prefect has a different structure, or another Python package
            has replaced the HTTP clients of Prefect.
    """
    websockets_names = vars(prefect_websockets)
    version_names = vars(version_checking)
    if websockets_names["connect"] is _CheckedConnect:
        return
    if websockets_names["connect"] is not connect or version_names["httpx"] is not httpx:
        raise ImportError(
            "another Python package has replaced the HTTP clients of Prefect. Uninstall that "
            "package"
        )
    password = server_password()
    for client in (PrefectHttpxAsyncClient, PrefectHttpxSyncClient):
        client.__init__ = _add_check(client.__init__, password)  # type: ignore[method-assign]
        client.build_request = replace_nul_in_requests(client.build_request)  # type: ignore[method-assign]
    version_names["httpx"] = SimpleNamespace(**{**vars(httpx), "AsyncClient": _CheckedAsyncClient})
    websockets_names["connect"] = _CheckedConnect


def _add_check(constructor: Callable[..., None], password: str) -> Callable[..., None]:
    """Return a constructor for HTTP clients that check the owner of the server process.

    The clients also choose the proxy. The new constructor raises UnusableProxy if the environment
    selects a proxy that cannot be used.

    Args:
        constructor: The original `__init__` of the client class.
        password: The server password of this MUSTER_HOME at the start of this process, or an empty
            string.
    """

    @functools.wraps(constructor)
    def construct(self: Any, *arguments: Any, **options: Any) -> None:
        url = str(options.get("base_url", ""))
        has_own_connection = options.keys() & {"transport", "proxy", "trust_env"}
        if url and not has_own_connection:
            options |= make_proxy_options(url)
        with name_unusable_proxy(url):
            constructor(self, *arguments, **options)
        check_listeners(self)
        if password:
            self.auth = RenewedPassword(password)

    return construct


class RenewedPassword(httpx.Auth):
    """HTTP authentication that reads the server password again after a refused request.

    Each `muster up` starts a Prefect server with a new password. A training that outlives a server
    can send its requests to the next server at the same address, with the new password.
    """

    def __init__(self, password: str) -> None:
        """
        Args:
            password: Password of the server at the start of this process. If the server refuses a
                request with this password, the request is repeated with the server's present
                password. A refused request with a different password is not repeated, because an
                operator has chosen that password.
        """
        self._old_header = make_auth_header(password)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Yield a request. After a refusal, yield the request again with the present password.

        httpx calls this method for each request, and sends each yielded request to the server.
        """
        response = yield request
        is_refused = response.status_code == httpx.codes.UNAUTHORIZED
        if is_refused and request.headers.get("Authorization") == self._old_header:
            request.headers["Authorization"] = make_auth_header(server_password())
            yield request


def make_auth_header(password: str) -> str:
    """Return the value of the HTTP header Authorization.

    Args:
        password: User name and password as `user:password`.
    """
    return f"Basic {base64.b64encode(password.encode()).decode()}"


class _CheckedAsyncClient(httpx.AsyncClient):
    """HTTP client that checks the owner of the server process, and chooses the proxy.

    The owner is checked for each connection. To choose the proxy, the client reads the server's URL
    from Prefect's settings, because Prefect's version check creates the client without the URL.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        url = PREFECT_API_URL.value() or ""
        with name_unusable_proxy(url):
            super().__init__(*arguments, **make_proxy_options(url), **options)
        check_listeners(self)


class _CheckedConnect(connect):
    """Opens a websocket, and checks the owner of the server process before the handshake.

    A websocket to this machine uses no proxy.

    If the server ends during the handshake, awaiting this object raises ConnectionResetError.
    """

    def __init__(self, uri: str, **options: Any) -> None:
        if is_on_this_machine(uri):
            options["proxy"] = None
        super().__init__(uri, **options)

    def __await__(self) -> Generator[Any, None, ClientConnection]:
        try:
            return (yield from super().__await__())
        except InvalidMessage as error:
            if not isinstance(error.__cause__, EOFError):
                raise
            # The server has ended during the handshake, so `websockets` has raised InvalidMessage.
            # Raise an OSError instead: Prefect tries again after an OSError, but InvalidMessage
            # would make the flow run crash.
            raise ConnectionResetError(f"the server has closed the connection: {error}") from error

    async def create_connection(self) -> ClientConnection:
        check = ListenerCheck()
        connection = await super().create_connection()
        try:
            check_transport(check, connection.transport)
        except OSError:
            connection.transport.abort()
            raise
        replace_nul_in_messages(connection)
        return connection
