"""Another user listens on the port of a Prefect or Ray server that has ended.

No client sends its password or token to that user.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.events.clients import PrefectEventsClient, PrefectEventSubscriber
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from tasks.processes import trusted_server
from tasks.processes.trusted_server import (
    ListenerCheck,
    UntrustedListener,
    check_listeners,
    require_trusted_listener,
)
from tasks.ray.control_store import open_channel
from tasks.ray.dashboard import Dashboard, NoAnswer
from tasks.ray.submit import _client
from tasks.server.flow_runs import ServerAway, connect_to_server
from tests.support.another_user import NOBODY, foreign_server, needs_another_user
from tests.support.host_environment import wait_for

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "muster:the-password-of-the-stack"
#: Environment variables that make a Prefect process load Muster's plugin. The plugin checks which
#: user owns the process that listens on the port of the Prefect server.
GUARDED = {"PREFECT_PLUGINS_ENABLED": "true", "PREFECT_PLUGINS_ALLOW": "muster"}


def ask_by_muster(url: str) -> None:
    with connect_to_server(url) as client:
        client.hello()


def ask_by_sync_client(url: str) -> None:
    with get_client(sync_client=True) as client:
        client.hello()


async def ask_by_async_client() -> None:
    async with get_client() as client:
        await client.hello()


async def send_events() -> None:
    async with PrefectEventsClient(reconnection_attempts=0):
        pass


async def subscribe_to_events() -> None:
    async with PrefectEventSubscriber(reconnection_attempts=0):
        pass


CLIENTS: dict[str, Callable[[str], object]] = {
    "muster": ask_by_muster,
    "sync": ask_by_sync_client,
    "async": lambda url: asyncio.run(ask_by_async_client()),
    "events": lambda url: asyncio.run(send_events()),
    "subscriber": lambda url: asyncio.run(subscribe_to_events()),
}


@needs_another_user
@pytest.mark.parametrize("client", CLIENTS)
def test_no_client_of_the_server_sends_a_byte_to_another_user(client: str) -> None:
    with foreign_server() as stranger:
        url = f"http://127.0.0.1:{stranger.port}/api"
        settings = {
            PREFECT_API_URL: url,
            PREFECT_API_AUTH_STRING: PASSWORD,
            PREFECT_CLIENT_MAX_RETRIES: 0,
        }
        with temporary_settings(settings), suppress(Exception):
            CLIENTS[client](url)

    assert stranger.received == []


@needs_another_user
def test_message_names_the_user_and_the_remedy() -> None:
    with foreign_server() as stranger, pytest.raises(ServerAway) as caught:
        ask_by_muster(f"http://127.0.0.1:{stranger.port}/api")

    assert "who is neither you nor root. So Muster sent no data" in str(caught.value)
    assert "MUSTER_SERVER_USERS" in str(caught.value)


@needs_another_user
@pytest.mark.parametrize(
    "module",
    [
        "deployments.worker",
        pytest.param("deployments.upkeep", marks=pytest.mark.thorough),
        pytest.param("prefect.engine", marks=pytest.mark.thorough),
    ],
)
def test_no_process_of_the_stack_sends_a_byte_to_another_user(tmp_path: Path, module: str) -> None:
    options = ["--pool", "pipelines", "--name", "here", "--type", "process"]
    output = tmp_path / "output.txt"
    with foreign_server() as stranger, output.open("w") as stdout:
        process = subprocess.Popen(
            (sys.executable, "-m", module, *(options if module.endswith("worker") else ())),
            cwd=ROOT,
            env={
                **os.environ,
                **(GUARDED if module == "prefect.engine" else {}),
                "PREFECT__FLOW_RUN_ID": "00000000-0000-0000-0000-000000000001",
                "MUSTER_HOME": str(tmp_path / "home"),
                "PREFECT_HOME": str(tmp_path / "prefect"),
                "PREFECT_API_URL": f"http://127.0.0.1:{stranger.port}/api",
                "PREFECT_API_AUTH_STRING": PASSWORD,
                "PREFECT_CLIENT_MAX_RETRIES": "0",
            },
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for(
                lambda: "Muster sent no data" in output.read_text(),
                "the process reports the server of another user",
            )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    assert stranger.received == []


@needs_another_user
def test_no_client_of_ray_sends_the_token_to_another_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the-token-of-the-cluster")

    async def ask(address: str) -> None:
        dashboard = Dashboard(address)
        try:
            await dashboard.nodes()
        finally:
            await dashboard.aclose()

    with foreign_server() as stranger:
        with pytest.raises(NoAnswer, match="Muster sent no data"):
            asyncio.run(ask(f"http://127.0.0.1:{stranger.port}"))
        with pytest.raises(NoAnswer, match="Muster sent no data"):
            open_channel(f"127.0.0.1:{stranger.port}")
        with pytest.raises(UntrustedListener, match="Muster sent no data"):
            _client(f"http://127.0.0.1:{stranger.port}").list_jobs()

    assert stranger.received == []


@needs_another_user
def test_operator_can_trust_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_SERVER_USERS", f"root, {NOBODY}")
    with foreign_server() as stranger:
        require_trusted_listener("127.0.0.1", stranger.port)
        ask_by_muster(f"http://127.0.0.1:{stranger.port}/api")

    assert stranger.received != []


def test_listener_that_was_replaced_is_not_trusted() -> None:
    first_listener = socket.create_server(("127.0.0.1", 0))
    address = first_listener.getsockname()
    check = ListenerCheck()
    first_listener.close()

    with (
        socket.create_server(address),
        socket.create_connection(address) as client,
        pytest.raises(UntrustedListener, match="another process opened the port"),
    ):
        check.require_trusted(client.getsockname(), client.getpeername())


def test_nothing_is_sent_when_the_kernel_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[object]:
        raise OSError(24, "Too many open files")

    with socket.create_server(("127.0.0.1", 0)) as server, httpx.Client(trust_env=False) as client:
        check_listeners(client)
        monkeypatch.setattr(trusted_server, "listening_sockets", fail)
        with pytest.raises(httpx.ConnectError, match="Too many open files"):
            client.get(f"http://127.0.0.1:{server.getsockname()[1]}/")
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(100) == b""


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0", "::"])
def test_own_server_is_trusted_on_every_kind_of_address(listens_on: str) -> None:
    family = socket.AF_INET6 if ":" in listens_on else socket.AF_INET
    server = socket.create_server((listens_on, 0), family=family, dualstack_ipv6=":" in listens_on)
    with server:
        check = ListenerCheck()
        with socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client:
            check.require_trusted(client.getsockname(), client.getpeername())
