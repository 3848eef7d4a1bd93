"""Attacks on a gateway by another user of the machine and by web pages in a browser."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tasks.processes import tree
from tasks.rollout import http1
from tasks.rollout.gateway import Gateway
from tests.integration.test_gateway import (
    FakeFleet,
    GatewaySetup,
    connected,
    event_loop_policy,
    exchange,
    gateway_setup,
    until,
)
from tests.support.attack_programs import FLOODS, only_as_root, start_as_another_user
from tests.support.open_files import full_table_of_files

pytestmark = pytest.mark.asyncio
# The tests of this file use the pytest fixture `event_loop_policy`, so the file must import the
# fixture.
__all__ = ("event_loop_policy",)

#: A program that sends each line of its standard input as a request, and prints the status.
#:
#: All requests use one connection, which the program opens at its start.
REQUESTER = """
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
for line in sys.stdin:
    head = f"{line.strip()} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}"
    connection.sendall(head.encode())
    print((connection.recv(65536).split() or [b"", b"closed"])[1].decode(), flush=True)
"""


def read_port(gateway: Gateway) -> int:
    """Return the port of the gateway."""
    return int(gateway.url.rpartition(":")[2])


async def read_line(process: subprocess.Popen[bytes], line_to_send: str = "") -> str:
    """Return the next line that the program prints.

    If `line_to_send` is not empty, first send this line to the program.
    """
    assert process.stdin is not None and process.stdout is not None
    if line_to_send:
        process.stdin.write(f"{line_to_send}\n".encode())
        process.stdin.flush()
    return (await asyncio.to_thread(process.stdout.readline)).decode().strip()


@asynccontextmanager
async def start_attacker(
    setup: GatewaySetup, script: str, *arguments: object
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run a script as another user while the context is open.

    The first argument of the script is the port of the gateway.
    """
    process = start_as_another_user(script, read_port(setup.gateway), *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def count_client_sockets(gateway: Gateway) -> int:
    """Return the number of this process's sockets that are connected to the gateway's port.

    The kernel's table of TCP connections lists the sockets.
    """
    own_sockets = set(tree.list_open_files(os.getpid()).values())
    with open("/proc/self/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    gateway_address = f"0100007F:{read_port(gateway):04X}"
    return sum(
        row[1] == gateway_address and row[3] != "0A" and f"socket:[{row[9]}]" in own_sockets
        for row in rows
    )


@only_as_root
async def test_another_user_is_refused_while_no_file_can_be_opened() -> None:
    async with gateway_setup(1) as setup, start_attacker(setup, REQUESTER) as attacker:
        assert await read_line(attacker) == "connected"
        own_reader, own_writer = await connected(setup.gateway)
        own_writer.write(b"GET /muster/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        # The attacker connected before this client. So the answer to this client shows that the
        # gateway has accepted both connections.
        await own_reader.readuntil(b"}")
        with full_table_of_files():
            order = await read_line(attacker, "POST /muster/rollout/sync")
            own_writer.write(b"GET /muster/rollout HTTP/1.1\r\nHost: localhost\r\n\r\n")
            own_response = await own_reader.readuntil(b"}")
        own_writer.close()

        assert order == "403"
        assert setup.fleet.orders == []
        assert own_response.startswith(b"HTTP/1.1 200 ")


@only_as_root
async def test_another_user_is_refused_if_the_kernel_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_to_ask_kernel(*ends: object) -> int | None:
        raise OSError(1, "not allowed here")

    async with gateway_setup(1) as setup:
        table = setup.gateway._admission._table
        monkeypatch.setattr(table, "find_connection", fail_to_ask_kernel)
        async with start_attacker(setup, REQUESTER) as attacker:
            assert await read_line(attacker) == "connected"
            statuses = [await read_line(attacker, "POST /muster/rollout/sync")]

        assert statuses == ["503"]
        assert setup.fleet.orders == []


@only_as_root
async def test_silent_connections_of_another_user_are_few_and_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "SILENT_AT_MOST_S", 1.0)
    async with gateway_setup(1) as setup, start_attacker(setup, FLOODS, 1500, 0) as attacker:
        await read_line(attacker)

        assert count_client_sockets(setup.gateway) <= setup.gateway._admission.bounds.strangers + 2
        assert await setup.request_rank() == 0
        await until(
            lambda: count_client_sockets(setup.gateway) <= 2, "the silent connections are closed"
        )
        assert await read_line(attacker, "how many") == "0"


@only_as_root
async def test_incomplete_heads_of_another_user_are_refused_or_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "HEAD_WITHIN_S", 1.0)
    monkeypatch.setattr(http1, "_LINGER_S", 0.2)
    for size in (120_000, 30_000):
        async with gateway_setup(1) as setup, start_attacker(setup, FLOODS, 100, size) as attacker:
            await read_line(attacker)

            await until(
                lambda: count_client_sockets(setup.gateway) == 0, "the half heads are closed"
            )
            assert await read_line(attacker, "how many") == "0"


async def test_incomplete_head_of_the_same_user_is_refused_by_size_and_by_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "HEAD_WITHIN_S", 0.2)
    async with gateway_setup(1) as setup:
        statuses = []
        for size in (100_000, 10_000):
            reader, writer = await connected(setup.gateway)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * size)
            statuses.append((await reader.read()).split()[1])
            writer.close()

    assert statuses == [b"431", b"408"]


async def test_request_is_refused_if_the_rest_of_its_body_does_not_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "BODY_PIECE_WITHIN_S", 0.2)
    async with gateway_setup(1) as setup:
        reader, writer = await connected(setup.gateway)
        writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert not setup.servers[0].counts.total


async def test_idle_connections_are_closed_after_a_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "IDLE_AT_MOST_S", 0.2)
    async with gateway_setup(1) as setup:
        reader, writer = await connected(setup.gateway)
        writer.write(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_requests_after_a_refused_request_get_no_answer() -> None:
    async with gateway_setup(1, token="secret") as setup:
        reader, writer = await connected(setup.gateway)
        pipelined_request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
        writer.write(
            pipelined_request % b"" + pipelined_request % b"Authorization: Bearer secret\r\n" * 3
        )
        answer = await reader.read()
        writer.close()

        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert not setup.servers[0].counts.total


async def test_number_of_connections_is_limited_and_leaves_file_descriptors_for_the_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree, "allow_files", lambda wanted: None)
    monkeypatch.setattr(http1, "_LINGER_S", 0.2)
    old_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, old_limits[1]))
    try:
        async with gateway_setup(1) as setup:
            count = setup.gateway._admission.bounds.in_all
            connections = [await connected(setup.gateway) for _ in range(count + 1)]

            refused_reader, _ = connections.pop()
            answer = await refused_reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert count_client_sockets(setup.gateway) * 2 < 200
            connections.pop()[1].close()
            await until(
                lambda: count_client_sockets(setup.gateway) < count, "a connection is free again"
            )
            assert await setup.request_rank() == 0
            for _, writer in connections:
                writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old_limits)


# Tests of requests with unusual paths.


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../flush_cache",
        "/v1/models/..%2f..%2fflush_cache",
        "/v1/models/%2e%2e/%2e%2e/flush_cache",
        "/v1/models/%252e%252e%252f%252e%252e%252fflush_cache",
        "/v1/models/%25252e%25252e/x",
        "/v1/models/..\\..\\flush_cache",
        "/v1/models/..%5c..%5cflush_cache",
        "/v1/models/..;/..;/flush_cache",
        "/v1/models/x;y",
        "/v1/models/x%00",
        "/v1/models/x%0d%0aX:%20y",
        "/v1/models/%c0%ae%c0%ae/flush_cache",
        "/v1/models/x%3f/y",
        "/v1/models/./x",
        "/v1/models/",
        "/v1/modelsX/flush_cache",
        "/v1/models;/flush_cache",
        "/v1/models../flush_cache",
        "/v1/models%2f..%2fflush_cache",
        "/V1/models",
        "//v1/models",
        "/get_model_info/../flush_cache",
        "/get_model_infoX",
        "/model_info/x",
        "/v1/completions/../../flush_cache",
        "/./flush_cache",
        "/x/../muster/rollout/check",
    ],
)
async def test_path_that_a_server_could_resolve_to_another_path_is_refused(path: str) -> None:
    async with gateway_setup(1, settings={"paths": None}) as setup:
        for method in ("GET", "POST"):
            request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
            head, _ = await exchange(setup.gateway, request.encode())

            assert head.split()[1] in ("400", "404")
        assert not setup.servers[0].counts.total and not setup.fleet.orders


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models?x=/../../flush_cache",
        "/v1/models/Qwen/Qwen3-8B",
        "/v1/models/Qwen%2FQwen3-8B",
        "/v1/models//data/models/my%20model",
        "/v1/models/base:lora-1@2",
        "/model_info",
    ],
)
async def test_requests_with_model_names_in_the_path_are_forwarded(path: str) -> None:
    async with gateway_setup(1, settings={"paths": None}) as setup:
        head, _ = await exchange(
            setup.gateway, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )

        assert head.split()[1] == "200"
        assert setup.servers[0].counts.total == 1


# Tests of requests from web pages in a browser.


@pytest.mark.parametrize(
    "header",
    [
        "Host: evil.example",
        "Host: localhost:1",
        "Host: localhost\r\nOrigin: http://evil.example",
        "Host: localhost\r\nOrigin: http://localhost:1",
        "Host: localhost\r\nOrigin: null",
        "Host: localhost\r\nSec-Fetch-Site: cross-site",
    ],
)
async def test_requests_from_pages_of_other_origins_are_refused(header: str) -> None:
    lines = (
        "GET /v1/models",
        "GET /health",
        "GET /metrics",
        "GET /muster/health",
        "GET /muster/rollout",
        "GET /workers",
        "POST /v1/chat/completions",
        "POST /muster/rollout/sync",
        "OPTIONS /v1/chat/completions",
        "HEAD /v1/models",
    )
    async with gateway_setup(1) as setup:
        for line in lines:
            reader, writer = await connected(setup.gateway)
            writer.write(f"{line} HTTP/1.1\r\n{header}\r\nContent-Length: 0\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()

            assert answer.startswith(b"HTTP/1.1 403 "), line
            assert b"access-control-" not in answer.lower()
        assert not setup.servers[0].counts.total and not setup.fleet.orders


async def test_preflight_request_of_a_browser_gets_no_permission() -> None:
    async with gateway_setup(1, token="secret") as setup:
        reader, writer = await connected(setup.gateway)
        writer.write(
            b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"access-control-" not in answer.lower()


async def test_gateway_without_servers_answers_its_own_user() -> None:
    gateway = Gateway(FakeFleet())
    await gateway.start()
    try:
        head, _ = await exchange(
            gateway, b"GET /muster/rollout HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
    finally:
        await gateway.stop(0)

    assert head.startswith("HTTP/1.1 200 ")
