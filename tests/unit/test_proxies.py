"""Tests of proxies in the environment variables, for the clients of a Prefect server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from prefect._internal.version_checking import check_server_version
from prefect._internal.websockets import websocket_connect
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from websockets.asyncio.server import ServerConnection, serve

from deployments.stack.env import client_env
from tasks.queue.command import app as queue
from tasks.server.flow_runs import ProxyAway, ServerRefuses, connect_to_server
from tasks.server.proxies import find_proxy, is_on_this_machine
from tasks.server.server import NoServer, prefect_server
from tasks.show.arguments import run
from tests.support.web import serving

#: URL of a server on another machine. No request of a test reaches this server.
REMOTE = "http://prefect.example:4200/api"
#: URL with a port of this machine on which no program listens.
DEAD = "http://127.0.0.1:9"
#: Environment variables that name a proxy which is invalid or does not answer.
BROKEN = (
    {"http_proxy": DEAD, "https_proxy": DEAD},
    {"HTTP_PROXY": DEAD, "HTTPS_PROXY": DEAD},
    {"all_proxy": "socks5://127.0.0.1:7890"},
    {"ALL_PROXY": "socks5h://127.0.0.1:7890", "no_proxy": "localhost,127.0.0.1"},
    {"all_proxy": "http://user:p@ss@host:port", "no_proxy": "localhost,127.0.0.1"},
    {"http_proxy": "ftp://proxy.example", "no_proxy": "internal.example"},
)


def set_proxies(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    """Remove all proxy variables of this process, and then set the given variables."""
    for scheme in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme}_PROXY".upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", BROKEN)
def test_client_asks_a_server_on_this_machine_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]
) -> None:
    set_proxies(monkeypatch, variables)

    with serving(lambda *_: (200, "hello")) as url, connect_to_server(f"{url}/api") as client:
        answer = client.hello()

    assert answer.json() == "hello"


@pytest.mark.parametrize("variables", BROKEN)
def test_asynchronous_clients_ask_a_server_on_this_machine_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]
) -> None:
    set_proxies(monkeypatch, variables)

    async def ask(url: str) -> object:
        with temporary_settings({PREFECT_API_URL: url}):
            await check_server_version(url, logging.getLogger(__name__))
            async with get_client() as client:
                return (await client.hello()).json()

    with serving(lambda *_: (200, "3.8.8")) as url:
        answer = asyncio.run(ask(f"{url}/api"))

    assert answer == "3.8.8"


@pytest.mark.parametrize("variables", BROKEN)
def test_websocket_to_this_machine_uses_no_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]
) -> None:
    set_proxies(monkeypatch, variables)

    async def greet(connection: ServerConnection) -> None:
        await connection.send("hello")

    async def ask() -> object:
        async with serve(greet, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with websocket_connect(f"ws://127.0.0.1:{port}") as connection:
                return await connection.recv()

    assert asyncio.run(ask()) == "hello"


def test_request_to_another_host_uses_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def pass_on(method: str, path: str, body: bytes) -> tuple[int, object]:
        requested.append(path)
        return 200, "hello"

    with serving(pass_on) as proxy:
        set_proxies(monkeypatch, {"http_proxy": proxy, "all_proxy": "http://user:p@ss@host:port"})
        with connect_to_server(REMOTE) as client:
            client.hello()

    assert requested == [f"{REMOTE}/hello"]


@pytest.mark.parametrize(
    ("variables", "named", "advice"),
    [
        (
            {"all_proxy": "socks5://127.0.0.1:7890"},
            "all_proxy=socks5://127.0.0.1:7890",
            "a SOCKS proxy needs the Python package socksio",
        ),
        (
            {"HTTP_PROXY": "http://me:hunter2@host:port"},
            "HTTP_PROXY=http://me:***",
            "HTTP_PROXY must have the form http://HOST:PORT",
        ),
        (
            {"http_proxy": "ftp://proxy"},
            "http_proxy=ftp://proxy",
            "http_proxy must have the form http://",
        ),
    ],
)
def test_unusable_proxy_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], named: str, advice: str
) -> None:
    set_proxies(monkeypatch, variables)

    with pytest.raises(ServerRefuses) as error_info, connect_to_server(REMOTE):
        raise AssertionError("a client was made")

    message = str(error_info.value)
    assert named in message
    assert advice in message
    assert "hunter2" not in message
    assert "add prefect.example to the variable no_proxy" in message
    assert "\n" not in message


def test_proxy_without_an_answer_is_blamed_instead_of_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_proxies(monkeypatch, {"http_proxy": DEAD})

    with temporary_settings({PREFECT_API_URL: REMOTE}):
        with pytest.raises(NoServer) as error_info, prefect_server():
            raise AssertionError("a server answered")
        exit_code = run(queue, [])

    problem = f"the proxy http_proxy={DEAD} for the Prefect server at {REMOTE} does not answer"
    for message in (str(error_info.value), capsys.readouterr().err):
        assert problem in message
        assert "muster up" not in message
    assert exit_code == 1


def test_error_of_a_proxy_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda *_: (502, None)) as proxy:
        set_proxies(monkeypatch, {"http_proxy": proxy})
        with pytest.raises(ProxyAway) as error_info, connect_to_server(REMOTE) as client:
            client.hello().raise_for_status()

    assert f"through the proxy http_proxy={proxy}" in str(error_info.value)


@pytest.mark.parametrize(
    ("url", "environment", "variable"),
    [
        (REMOTE, {}, None),
        (REMOTE, {"http_proxy": "p:1"}, "http_proxy"),
        (REMOTE, {"HTTP_PROXY": "p:1"}, "HTTP_PROXY"),
        (REMOTE, {"http_proxy": "p:1", "HTTP_PROXY": "q:1"}, "http_proxy"),
        (REMOTE, {"http_proxy": "", "HTTP_PROXY": "q:1"}, None),
        (REMOTE, {"http_proxy": "", "all_proxy": "q:1"}, "all_proxy"),
        (REMOTE, {"https_proxy": "p:1"}, None),
        (REMOTE, {"http_proxy": "p:1", "no_proxy": ".example"}, None),
        (REMOTE, {"http_proxy": "p:1", "NO_PROXY": "*"}, None),
        (REMOTE, {"http_proxy": "p:1", "no_proxy": "", "NO_PROXY": "*"}, "http_proxy"),
        ("http://127.0.0.1:4200/api", {"http_proxy": "p:1"}, None),
    ],
)
def test_environment_selects_the_proxy_of_a_url(
    url: str, environment: Mapping[str, str], variable: str | None
) -> None:
    proxy = find_proxy(url, environment)

    assert (proxy and proxy.variable) == variable


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://127.0.0.1:4200/api", True),
        ("http://127.8.9.1:4200/api", True),
        ("http://localhost:4200/api", True),
        ("http://prefect.localhost/api", True),
        ("http://[::1]:4200/api", True),
        ("ws://0.0.0.0:4200/api", True),
        ("http://192.0.2.1:4200/api", False),
        ("http://localhost.example/api", False),
        ("http://prefect.example/api", False),
        ("http://[::1/api", False),
        ("", False),
    ],
)
def test_addresses_of_this_machine_are_recognised(url: str, is_local: bool) -> None:
    assert is_on_this_machine(url) is is_local


def test_stack_leaves_the_proxy_variables_unchanged(
    monkeypatch: pytest.MonkeyPatch, muster_home: Path
) -> None:
    variables = {"http_proxy": DEAD, "NO_PROXY": "internal.example"}
    set_proxies(monkeypatch, variables)

    env = client_env(muster_home, "http://127.0.0.1:4200/api")

    names = {name for name in env if name.lower().endswith("_proxy")}
    assert {name: env[name] for name in names} == variables
