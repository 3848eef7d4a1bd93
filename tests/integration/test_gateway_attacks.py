"""Attacks on a gateway by another user of the machine, and by pages in a browser."""

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
    Scene,
    connected,
    event_loop_policy,
    exchange,
    scene,
    until,
)
from tests.support.attack_programs import FLOODS, only_as_root, start_as_another_user
from tests.support.open_files import full_table_of_files

pytestmark = pytest.mark.asyncio
__all__ = ("event_loop_policy",)  # a fixture

#: Sends each line of stdin as a request over a connection made before, and prints the status.
ASKS = """
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
for line in sys.stdin:
    head = f"{line.strip()} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}"
    connection.sendall(head.encode())
    print((connection.recv(65536).split() or [b"", b"closed"])[1].decode(), flush=True)
"""


def port_of(gateway: Gateway) -> int:
    return int(gateway.url.rpartition(":")[2])


async def line_of(process: subprocess.Popen[bytes], asked: str = "") -> str:
    """The next line of a program, after a line was written to it."""
    assert process.stdin is not None and process.stdout is not None
    if asked:
        process.stdin.write(f"{asked}\n".encode())
        process.stdin.flush()
    return (await asyncio.to_thread(process.stdout.readline)).decode().strip()


@asynccontextmanager
async def attacker(
    at: Scene, script: str, *arguments: object
) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = start_as_another_user(script, port_of(at.gateway), *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def client_sockets(gateway: Gateway) -> int:
    """Sockets of this process that are its end of a connection to the gateway, by the kernel."""
    own = set(tree.open_files(os.getpid()).values())
    with open("/proc/self/net/tcp", encoding="ascii") as f:
        rows = [line.split() for line in f.readlines()[1:]]
    end = f"0100007F:{port_of(gateway):04X}"
    return sum(row[1] == end and row[3] != "0A" and f"socket:[{row[9]}]" in own for row in rows)


@only_as_root
async def test_another_user_is_refused_while_no_file_can_be_opened() -> None:
    async with scene(1) as at, attacker(at, ASKS) as them:
        assert await line_of(them) == "connected"
        own_reader, own_writer = await connected(at.gateway)
        own_writer.write(b"GET /muster/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await own_reader.readuntil(b"}")  # its connection was taken, and so was theirs
        with full_table_of_files():
            order = await line_of(them, "POST /muster/rollout/sync")
            own_writer.write(b"GET /muster/rollout HTTP/1.1\r\nHost: localhost\r\n\r\n")
            own = await own_reader.readuntil(b"}")
        own_writer.close()

        assert order == "403"
        assert at.fleet.orders == []
        assert own.startswith(b"HTTP/1.1 200 ")


@only_as_root
async def test_another_user_is_refused_if_the_kernel_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unanswered(*ends: object) -> int | None:
        raise OSError(1, "not allowed here")

    async with scene(1) as at:
        table = at.gateway._admission._table
        monkeypatch.setattr(table, "user_of_connection", unanswered)
        async with attacker(at, ASKS) as them:
            assert await line_of(them) == "connected"
            statuses = [await line_of(them, "POST /muster/rollout/sync")]

        assert statuses == ["503"]
        assert at.fleet.orders == []


@only_as_root
async def test_silent_connections_of_another_user_are_few_and_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "SILENT_AT_MOST_S", 1.0)
    async with scene(1) as at, attacker(at, FLOODS, 1500, 0) as them:
        await line_of(them)

        assert client_sockets(at.gateway) <= at.gateway._admission.bounds.strangers + 2
        assert await at.rank_of() == 0
        await until(lambda: client_sockets(at.gateway) <= 2, "the silent ones are closed")
        assert await line_of(them, "how many") == "0"


@only_as_root
async def test_half_heads_of_another_user_are_refused_or_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "HEAD_WITHIN_S", 1.0)
    monkeypatch.setattr(http1, "_LINGER_S", 0.2)
    for size in (120_000, 30_000):
        async with scene(1) as at, attacker(at, FLOODS, 100, size) as them:
            await line_of(them)

            await until(lambda: client_sockets(at.gateway) == 0, "the half heads are closed")
            assert await line_of(them, "how many") == "0"


async def test_a_half_head_of_the_same_user_is_refused_by_size_and_by_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "HEAD_WITHIN_S", 0.2)
    async with scene(1) as at:
        statuses = []
        for size in (100_000, 10_000):
            reader, writer = await connected(at.gateway)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * size)
            statuses.append((await reader.read()).split()[1])
            writer.close()

    assert statuses == [b"431", b"408"]


async def test_a_body_that_stops_coming_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "BODY_PIECE_WITHIN_S", 0.2)
    async with scene(1) as at:
        reader, writer = await connected(at.gateway)
        writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert not at.servers[0].counts.total


async def test_idle_connections_are_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "IDLE_AT_MOST_S", 0.2)
    async with scene(1) as at:
        reader, writer = await connected(at.gateway)
        writer.write(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_nothing_is_answered_after_a_refusal() -> None:
    async with scene(1, token="secret") as at:
        reader, writer = await connected(at.gateway)
        ahead = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
        writer.write(ahead % b"" + ahead % b"Authorization: Bearer secret\r\n" * 3)
        answer = await reader.read()
        writer.close()

        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert not at.servers[0].counts.total


async def test_connections_are_bounded_in_all_and_files_are_left_for_the_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree, "allow_files", lambda wanted: None)
    monkeypatch.setattr(http1, "_LINGER_S", 0.2)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        async with scene(1) as at:
            count = at.gateway._admission.bounds.in_all
            made = [await connected(at.gateway) for _ in range(count + 1)]

            refused, _ = made.pop()
            answer = await refused.read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert client_sockets(at.gateway) * 2 < 200
            made.pop()[1].close()
            await until(lambda: client_sockets(at.gateway) < count, "there is room again")
            assert await at.rank_of() == 0
            for _, writer in made:
                writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# Paths


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
async def test_a_path_that_may_lead_elsewhere_is_not_passed_on(path: str) -> None:
    async with scene(1, settings={"paths": None}) as at:
        for method in ("GET", "POST"):
            request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
            head, _ = await exchange(at.gateway, request.encode())

            assert head.split()[1] in ("400", "404")
        assert not at.servers[0].counts.total and not at.fleet.orders


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
async def test_models_are_asked_for_by_their_names(path: str) -> None:
    async with scene(1, settings={"paths": None}) as at:
        head, _ = await exchange(
            at.gateway, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )

        assert head.split()[1] == "200"
        assert at.servers[0].counts.total == 1


# Pages


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
async def test_a_foreign_page_gets_nothing(header: str) -> None:
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
    async with scene(1) as at:
        for line in lines:
            reader, writer = await connected(at.gateway)
            writer.write(f"{line} HTTP/1.1\r\n{header}\r\nContent-Length: 0\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()

            assert answer.startswith(b"HTTP/1.1 403 "), line
            assert b"access-control-" not in answer.lower()
        assert not at.servers[0].counts.total and not at.fleet.orders


async def test_a_preflight_of_a_browser_gets_no_permission() -> None:
    async with scene(1, token="secret") as at:
        reader, writer = await connected(at.gateway)
        writer.write(
            b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"access-control-" not in answer.lower()


async def test_a_fleet_that_answers_nobody_else_still_answers_its_own_user() -> None:
    gateway = Gateway(FakeFleet())
    await gateway.start()
    try:
        head, _ = await exchange(
            gateway, b"GET /muster/rollout HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
    finally:
        await gateway.stop(0)

    assert head.startswith("HTTP/1.1 200 ")
