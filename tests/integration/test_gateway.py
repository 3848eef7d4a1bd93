"""The gateway forwards, retries, cuts or refuses requests, between real sockets and servers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest
import uvloop

from tasks.rollout import forwarding
from tasks.rollout.backends import Ask
from tasks.rollout.forwarding import ANY_PATH
from tasks.rollout.gateway import Gateway
from tasks.rollout.router import Entrypoint, Router
from tasks.rollout.sync import InFlight, NoSuchSync
from tasks.spec.errors import MusterError
from tests.support.dummy_server import DummyServer
from tests.support.fleet_fakes import make_settings

pytestmark = pytest.mark.asyncio

_DEADLINE_S = 30.0
_CHAT = "/v1/chat/completions"


class FakeFleet:
    """A fake fleet, which lists the active servers and records the reports of the gateway."""

    def __init__(self, *, limit: int | None = None, **settings: Any) -> None:
        self.settings = make_settings(**{"paths": (ANY_PATH,), **settings})
        self.router = Router(limit=limit, queue_size=self.settings.queue_size)
        self.failures: list[tuple[int, int, str]] = []
        #: Mapping from the rank and the epoch of a server to the number of tokens that the gateway
        #: has reported. The epoch counts the starts of the server.
        self.tokens: dict[tuple[int, int], int] = {}
        self.orders: list[tuple[Any, ...]] = []
        self.version: int | None = None
        self.seen: dict[str, Any] = {"state": "serving"}
        #: URLs of servers that still respond although their engine has died.
        self.dying: set[str] = set()
        self.hold: asyncio.Event | None = None
        self.refuses: Exception | None = None

    def serve(self, *servers: DummyServer, why_none: str = "", epoch: int = 1) -> None:
        self.router.set(
            (
                Entrypoint(rank=server.rank, epoch=epoch, url=server.url, version=self.version)
                for server in servers
            ),
            why_none=why_none,
        )

    def note_failure(self, rank: int, epoch: int, why: str) -> None:
        self.failures.append((rank, epoch, why))

    def note_tokens(self, rank: int, epoch: int, count: int) -> None:
        self.tokens[rank, epoch] = count

    def snapshot(self) -> dict[str, Any]:
        return self.seen

    async def stays_ready(self, url: str) -> bool:
        return url not in self.dying

    def version_of(self, engine: int) -> int | None:
        return self.version

    @property
    def syncs(self) -> FakeFleet:
        return self

    has_started = False

    async def check(self) -> dict[str, Any]:
        return await self._order("check", failed=[{"engine": 0, "ranks": [0], "cause": "hangs"}])

    async def begin_sync(self, timeout_s: float, in_flight: InFlight) -> dict[str, Any]:
        return await self._order("begin", timeout_s, in_flight, sync="1a", targets=[])

    async def broadcast(self, sync: str, ask: Ask, timeout_s: float) -> dict[str, Any]:
        return await self._order("broadcast", sync, ask, timeout_s)

    async def commit(
        self, sync: str, version: int, epochs: Mapping[int, int], *, force: bool
    ) -> dict[str, Any]:
        return await self._order("commit", sync, version, epochs, force)

    async def give_up(self, sync: str) -> dict[str, Any]:
        return await self._order("give up", sync)

    def workers(self) -> dict[str, Any]:
        return {"workers": [], "total": 0}

    async def add(self, url: str) -> dict[str, Any]:
        return await self._order("add", url)

    async def restart(self, engine: int) -> dict[str, Any]:
        return await self._order("restart", engine)

    async def retire(self, rank: int) -> dict[str, Any]:
        return await self._order("retire", rank)

    async def _order(self, *order: Any, **answer: Any) -> dict[str, Any]:
        if self.refuses is not None:
            raise self.refuses
        self.orders.append(("begun", *order))
        if self.hold is not None:
            await self.hold.wait()
        self.orders.append(order)
        return answer


class GatewaySetup:
    """The setup of a test: a gateway, a fake fleet with dummy servers, and an HTTP client."""

    def __init__(self, fleet: FakeFleet, gateway: Gateway, servers: list[DummyServer]) -> None:
        self.fleet = fleet
        self.gateway = gateway
        self.servers = servers
        self.client = aiohttp.ClientSession(gateway.url, auto_decompress=False)

    def ask(self, path: str = _CHAT, *, id: str = "a", **options: Any) -> Any:
        """Return a request to the gateway, for use with `async with`.

        The dummy servers count the requests of each `id` separately.
        """
        options["headers"] = {"X-Request-Id": id, **options.get("headers", {})}
        method = options.pop("method", "POST")
        if method == "POST" and "data" not in options:
            options.setdefault("json", {"prompt": "x"})
        return self.client.request(method, path, **options)

    async def request_rank(self, **options: Any) -> int:
        """Send a request that must succeed, and return the rank of the server that answered."""
        async with self.ask(**options) as answer:
            content = await answer.json()
            assert answer.status == 200, content
            return int(answer.headers["X-Muster-Rank"])

    def read_counts(self, counter: str, id: str = "a") -> list[int]:
        """Return each server's counter value for the request `id`, in the order of the ranks.

        `counter` is the name of a field of `dummy_server.Counts`.
        """
        return [getattr(server.counts, counter)[id] for server in self.servers]


@asynccontextmanager
async def gateway_setup(
    count: int = 2,
    *,
    limit: int | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> AsyncIterator[GatewaySetup]:
    """Yield a `GatewaySetup`: a gateway, a fake fleet with dummy servers, and an HTTP client.

    `count` is the number of servers. `limit` and `settings` are arguments of the fake fleet.
    `options` are arguments of the gateway.
    """
    servers = [DummyServer(rank) for rank in range(count)]
    for server in servers:
        await server.start()
    fleet = FakeFleet(limit=limit, **settings)
    gateway = Gateway(fleet, **options)
    await gateway.start()
    fleet.serve(*servers)
    setup = GatewaySetup(fleet, gateway, servers)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            yield setup
    finally:
        await setup.client.close()
        await gateway.stop(0)
        for server in servers:
            await server.stop()
        assert fleet.router.outstanding == 0


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """Return the policy of uvloop, because the fleet process uses this event loop, too."""
    return uvloop.EventLoopPolicy()


async def until(is_true: Callable[[], Any], description: str) -> None:
    """Wait until the function returns a true value; fail with the description at the deadline."""
    deadline = time.monotonic() + _DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"not in time: {description}"
        await asyncio.sleep(0.002)


# Tests of requests that the gateway forwards.


@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "QUERY"]
)
async def test_every_method_and_path_reaches_a_server_unchanged(method: str) -> None:
    async with (
        gateway_setup(1) as setup,
        setup.ask("/a%2Fb//c?x=1&x=%20", method=method, data=b"z") as answer,
    ):
        content = await answer.read()

        assert answer.status == 200
        assert answer.reason == "As Told"
        if method == "HEAD":
            assert (content, int(answer.headers["Content-Length"]) > 0) == (b"", True)
        else:
            received = json.loads(content)
            assert (received["method"], received["target"]) == (method, "/a%2Fb//c?x=1&x=%20")
            assert (received["bytes"], received["rank"]) == (1, 0)


@pytest.mark.parametrize(
    ("method", "path", "is_forwarded"),
    [
        ("POST", "/v1/completions", True),
        ("POST", "/generate?x=1", True),
        ("POST", "/act", True),
        ("GET", "/v1/models", True),
        ("GET", "/v1/models/policy", True),
        # The gateway must not forward these requests, because each of them would read or change a
        # single server.
        ("POST", "/v1/models", False),
        ("POST", "/update_weights_from_disk", False),
        ("POST", "/collective_rpc", False),
        ("POST", "/sleep", False),
        ("GET", "/", False),
    ],
)
async def test_only_requests_that_any_server_can_answer_are_forwarded(
    method: str, path: str, is_forwarded: bool
) -> None:
    async with gateway_setup(1, settings={"paths": ("/act",)}) as setup:
        async with setup.client.request(method, path, json={}) as answer:
            text = await answer.text()

        assert setup.servers[0].counts.total == int(is_forwarded)
        if not is_forwarded:
            assert answer.status == 404
            assert "POST /muster/rollout/sync" in text and "components.rollout.paths" in text


async def test_metrics_report_requests_engines_and_weight_versions() -> None:
    async with gateway_setup(2, token="secret", settings={"paths": None}) as setup:
        engine = {"engine": 0, "state": "active", "version": 7, "recoveries": 2}
        setup.fleet.seen = {"version": 7, "engines": [engine, {**engine, "engine": 1}]}
        bearer = {"Authorization": "Bearer secret"}
        for _ in range(3):
            async with setup.ask(headers=bearer) as answer:
                await answer.read()
        async with setup.client.get("/sleep", headers=bearer):
            pass
        async with setup.client.get("/metrics", headers=bearer) as answer:
            text = await answer.text()
        async with setup.client.get("/metrics") as refused:
            assert refused.status == 401

    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    metrics = {
        name.removeprefix("muster_rollout_"): float(value) for name, value in samples.items()
    }
    assert metrics['requests_total{code="200"}'] == 3
    assert metrics['engines{state="active"}'] == 2
    assert metrics['restarts_total{engine="1"}'] == 2
    assert metrics['engine_version{engine="0"}'] == metrics["version"] == 7
    assert metrics["request_seconds_count"] == 4
    assert sum(metrics[f'tokens_total{{rank="{rank}"}}'] for rank in range(2)) == 3
    assert (metrics["waiting"], metrics["outstanding"]) == (0, 0)


async def test_health_is_ok_if_any_server_is_active() -> None:
    async with gateway_setup(1, token="secret") as setup:
        async with setup.client.get("/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        setup.fleet.serve()
        async with setup.client.get("/health") as answer:
            assert answer.status == 503
        # Close the router, as during a weight update. A closed router delays requests for generated
        # text, but not health requests.
        setup.fleet.router.close()
        async with setup.client.get("/health") as answer:
            assert answer.status == 200
        assert not setup.servers[0].counts.total


async def test_requests_of_a_user_are_one_session_if_configured() -> None:
    async with gateway_setup(3, settings={"paths": None, "session_by_user": True}) as setup:
        ranks = [await setup.request_rank(json={"user": "me"}) for _ in range(3)]

    assert len(set(ranks)) == 1


async def test_all_headers_except_connection_headers_are_forwarded_both_ways() -> None:
    sent = [
        ("X-Many", "1"),
        ("X-Many", "2"),
        ("x-lower", "Ü".encode().decode("latin-1")),
        ("Authorization", "Bearer for-the-server"),
        ("Cookie", "c=1"),
        ("User-Agent", "me"),
        ("Connection", "X-Mine"),
        ("X-Mine", "1"),
        ("TE", "trailers"),
        ("Proxy-Authorization", "secret"),
    ]
    async with gateway_setup(1) as setup:
        raw = "".join(f"{name}: {value}\r\n" for name, value in sent).encode("latin-1")
        head, body = await exchange(
            setup.gateway, b"GET /x HTTP/1.1\r\nHost: localhost\r\n" + raw + b"\r\n"
        )

    received = [(name, value) for name, value in json.loads(body)["headers"] if name != "Host"]
    assert received == sent[:6]
    names = [line.partition(":")[0].lower() for line in head.split("\r\n")[1:]]
    assert names.count("x-twice") == names.count("set-cookie") == 2
    assert {"x-muster-rank", "x-muster-epoch", "content-length"} <= set(names)


async def exchange(gateway: Gateway, request: bytes) -> tuple[str, bytes]:
    """Send a raw request, and return the head and the body of the response.

    The response must have a Content-Length.
    """
    reader, writer = await connected(gateway)
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = head.lower().partition("content-length:")[2].partition("\r")[0]
    body = await reader.readexactly(int(length))
    writer.close()
    return head, body


async def connected(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to the gateway."""
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    ("size", "is_chunked"),
    [(0, False), (100_000, False), (3_000_000, False), (100_000, True), (3_000_000, True)],
)
async def test_request_body_arrives_unchanged(size: int, is_chunked: bool) -> None:
    body = bytes(range(256)) * (size // 256)

    async def stream_body() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    async with (
        gateway_setup(1) as setup,
        setup.ask("/x", data=stream_body() if is_chunked else body) as answer,
    ):
        received = await answer.json()

    assert received["bytes"] == len(body)
    assert received["sha256"] == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("framing", [b"Content-Length: 1001", b"Transfer-Encoding: chunked"])
async def test_request_body_above_the_limit_is_refused(
    framing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "_LONGEST_BODY", 1000)
    async with gateway_setup(1) as setup:
        reader, writer = await connected(setup.gateway)
        writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % framing)
        writer.write(b"3e9\r\n" + bytes(1001))
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 413 ")
        assert not setup.servers[0].counts.total


async def test_client_that_expects_100_continue_gets_it() -> None:
    async with gateway_setup(1) as setup:
        reader, writer = await connected(setup.gateway)
        writer.write(
            b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        interim_head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"hi")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()

    assert interim_head.startswith(b"HTTP/1.1 100 ")
    assert head.startswith(b"HTTP/1.1 200 ")


async def test_large_response_arrives_unchanged() -> None:
    async with (
        gateway_setup(1) as setup,
        setup.ask("/large?bytes=20000000", method="GET") as answer,
    ):
        assert len(await answer.read()) == 20_000_000


async def test_slow_client_slows_its_server_instead_of_filling_a_buffer() -> None:
    async with gateway_setup(1) as setup:
        counts = setup.servers[0].counts
        async with setup.ask("/large?bytes=200000000", method="GET") as answer:
            await answer.content.readexactly(1)
            sent_before = -1
            # Wait until all buffers between the client and the server are full, so that the server
            # stops sending.
            while counts.bytes_sent != sent_before:
                sent_before = counts.bytes_sent
                for _ in range(20):
                    await asyncio.sleep(0.005)
            assert sent_before < 50_000_000
            assert setup.servers[0].counts.now == 1


async def test_stream_arrives_piece_by_piece() -> None:
    async with gateway_setup(1) as setup:
        setup.servers[0].misbehave(kind="step")
        async with setup.ask(json={"stream": True, "max_tokens": 3}) as answer:
            lines = []
            for _ in range(3):
                setup.servers[0].step()  # The server sends the next piece only now.
                lines.append(await answer.content.readuntil(b"\n\n"))
            rest = await answer.read()

    assert answer.headers["Content-Type"] == "text/event-stream"
    assert all(json.loads(line.removeprefix(b"data: "))["rank"] == 0 for line in lines)
    assert rest == b"data: [DONE]\n\n: X-Muster-Version: None\n\n"


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 502])
async def test_response_with_an_error_status_is_forwarded(status: int) -> None:
    async with gateway_setup(2) as setup:
        setup.servers[0].misbehave(kind="status", status=status)
        async with setup.ask() as answer:
            content = await answer.json()

        assert (answer.status, content) == (status, {"error": f"told to answer {status}"})
        assert setup.read_counts("begun") == [1, 0]
        assert [failure[:2] for failure in setup.fleet.failures] == (
            [(0, 1)] if status >= 500 else []
        )
        assert not setup.fleet.tokens


async def test_error_of_a_server_with_a_dead_engine_is_retried_elsewhere() -> None:
    async with gateway_setup(2) as setup:
        setup.servers[0].misbehave(kind="status", status=500)
        setup.fleet.dying.add(setup.servers[0].url)

        assert await setup.request_rank() == 1
        assert setup.read_counts("begun") == [1, 1]
        [(rank, _, why)] = setup.fleet.failures
        assert (rank, why) == (
            0,
            "the server answered with HTTP status 500, and is no longer ready",
        )


async def test_only_responses_to_generation_requests_are_counted() -> None:
    async with gateway_setup(1) as setup:
        for path in ("/v1/models", "/large?bytes=200000"):
            async with setup.ask(path, method="GET") as answer:
                assert answer.status == 200 and await answer.read()
        assert not setup.fleet.tokens

        for count in range(5):
            await setup.request_rank()
            assert setup.fleet.tokens == {(0, 1): count + 1}

        setup.servers[0].misbehave(kind="step")
        async with setup.ask(json={"stream": True, "max_tokens": 3}) as answer:
            # The five tokens are from the requests above. The head of the new response has
            # arrived, but a head does not count as a token.
            assert setup.fleet.tokens == {(0, 1): 5}
            for count in range(3):
                setup.servers[0].step()
                await answer.content.readuntil(b"\n\n")
                assert setup.fleet.tokens[0, 1] >= 6 + count
        assert not setup.fleet.failures


# Tests of sessions. All requests of a session must go to the same server.


@pytest.mark.parametrize(
    "session",
    [
        {"headers": {"X-Session-Id": "s"}},
        {"headers": {"X-SMG-Routing-Key": "s"}},  # Clients of sglang-router send this header.
        {"json": {"prompt": "x", "session_id": "s"}},
        {"json": {"messages": [{"role": "user", "content": '"user": 1'}], "session_id": "s"}},
        {"json": {"session_id": 7}},
        {"json": {"session_id": "s", "user": "other"}},
    ],
)
async def test_session_stays_on_its_server_and_moves_if_the_server_is_gone(
    session: dict[str, Any],
) -> None:
    async with gateway_setup(3) as setup:
        ranks_before = [await setup.request_rank(**session) for _ in range(4)]
        setup.fleet.serve(*(server for server in setup.servers if server.rank != ranks_before[0]))
        ranks_after = [await setup.request_rank(**session) for _ in range(4)]

    assert len(set(ranks_before)) == len(set(ranks_after)) == 1
    assert ranks_before[0] != ranks_after[0]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "hi"}]}',
        b'{"nested": {"user": "s"}}',
        b'{"session_id": null}',
        b'{"session_id": ""}',
        # The gateway forwards invalid JSON, because refusing the request is the task of the server.
        b'{"session_id": broken',
        b'{"user": "one name for all"}',
    ],
)
async def test_requests_without_a_session_rotate_over_the_servers(body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with gateway_setup(3) as setup:
        ranks = [await setup.request_rank(path="/x", data=body, headers=headers) for _ in range(3)]

    assert sorted(ranks) == [0, 1, 2]


# Tests of requests that the gateway sends to a second server.


@pytest.mark.parametrize("kind", ["reset", "garbage"])
async def test_request_without_a_started_response_is_retried_on_another_server_once(
    kind: str,
) -> None:
    async with gateway_setup(2) as setup:
        setup.servers[0].misbehave(kind=kind)

        assert await setup.request_rank() == 1
        assert setup.read_counts("begun") == [1, 1]
        assert setup.read_counts("finished")[1] == 1
        assert [failure[:2] for failure in setup.fleet.failures] == [(0, 1)]


async def test_server_without_a_listener_is_skipped() -> None:
    async with gateway_setup(2) as setup:
        await setup.servers[0].stop()

        assert await setup.request_rank() == 1
        assert setup.fleet.failures[0][0] == 0
        assert "no connection" in setup.fleet.failures[0][2]


async def test_request_refused_by_a_busy_server_is_retried_on_one_other_server() -> None:
    async with gateway_setup(3) as setup:
        setup.servers[0].misbehave(kind="status", status=503)

        assert await setup.request_rank() == 1
        for server in setup.servers:
            server.misbehave(kind="status", status=503)
        async with setup.ask(id="b") as answer:
            assert answer.status == 503
            assert await answer.json() == {"error": "told to answer 503"}

        assert sum(setup.read_counts("begun", "b")) == 2


async def test_response_of_a_busy_server_is_forwarded_after_the_last_retry() -> None:
    async with gateway_setup(4) as setup:
        for server in setup.servers[:2]:
            server.misbehave(kind="reset")
        for server in setup.servers[2:]:
            server.misbehave(kind="status", status=503)

        async with setup.ask() as answer:
            assert await answer.json() == {"error": "told to answer 503"}


async def test_retries_are_limited_and_the_final_error_is_retryable() -> None:
    async with gateway_setup(5) as setup:
        for server in setup.servers:
            server.misbehave(kind="reset")
        async with setup.ask() as answer:
            error = (await answer.json())["error"]

        assert (answer.status, error["type"], error["retryable"]) == (502, "server_lost", True)
        assert sum(setup.read_counts("begun")) == 3


async def test_no_retry_starts_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "_RETRY_FOR_S", -1.0)
    async with gateway_setup(3) as setup:
        setup.servers[0].misbehave(kind="reset")
        async with setup.ask() as answer:
            assert answer.status == 502

        assert setup.read_counts("begun") == [1, 0, 0]


async def test_request_is_retried_on_the_only_server() -> None:
    async with gateway_setup(1) as setup:
        setup.servers[0].misbehave(kind="reset", times=1)

        assert await setup.request_rank() == 0
        assert setup.read_counts("begun") == [2]


async def test_broken_stream_ends_with_an_error_event_and_is_not_retried() -> None:
    async with gateway_setup(2) as setup:
        setup.servers[0].misbehave(kind="die_mid_stream", after=2)
        async with setup.ask(json={"stream": True}) as answer:
            received = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                while piece := await answer.content.readany():
                    received += piece

        assert received.count(b"data: {") == 3
        last_event = received.rstrip().rpartition(b"\n\n")[2]
        assert last_event.startswith(b"event: error\ndata: ")
        error = json.loads(last_event.partition(b"data: ")[2])["error"]
        assert (error["type"], error["retryable"]) == ("server_lost", True)
        assert setup.read_counts("begun") == [1, 0]
        assert [failure[:2] for failure in setup.fleet.failures] == [(0, 1)]


async def test_client_notices_an_incomplete_response() -> None:
    async with (
        gateway_setup(2) as setup,
        setup.ask("/large?bytes=50000000", method="GET") as answer,
    ):
        await answer.content.readexactly(1)
        await setup.servers[0].stop()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()

        assert setup.read_counts("begun") == [1, 0]


async def test_http_1_0_connection_is_reset_if_the_response_is_incomplete() -> None:
    async with gateway_setup(1) as setup:
        setup.servers[0].misbehave(kind="step")
        reader, writer = await connected(setup.gateway)
        body = b'{"stream": true}'
        writer.write(b"POST %b HTTP/1.0\r\nContent-Length: 16\r\n\r\n%b" % (_CHAT.encode(), body))
        setup.servers[0].step()
        await reader.readuntil(b"data: {")
        await setup.servers[0].stop()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


# Tests of servers that are removed from the router.


async def test_requests_to_a_removed_engine_are_retried_on_another_engine_at_once() -> None:
    async with gateway_setup(2) as setup:
        first, second = setup.servers
        first.misbehave(kind="hang")
        request_task = asyncio.create_task(setup.request_rank())
        await until(lambda: first.counts.now, "the server of rank 0 has the request")

        setup.fleet.serve(second)

        assert await request_task == 1
        await until(lambda: first.counts.cancelled["a"], "the request at rank 0 is cancelled")
        assert setup.read_counts("finished") == [0, 1]
        # The fleet has removed the engine, so the gateway must not report a failure of the engine.
        assert not setup.fleet.failures


async def test_unanswered_request_is_retried_on_the_next_epoch_of_the_engine() -> None:
    async with gateway_setup(1) as setup:
        setup.servers[0].misbehave(kind="hang", times=1)
        request_task = asyncio.create_task(setup.request_rank())
        await until(lambda: setup.servers[0].counts.now, "a server has the request")

        setup.fleet.serve(setup.servers[0], epoch=2)

        assert await request_task == 0
        assert setup.read_counts("finished") == [1]


async def test_requests_get_the_reason_if_the_last_server_is_removed() -> None:
    async with gateway_setup(2) as setup:
        for server in setup.servers:
            server.misbehave(kind="hang")
        request_tasks = [asyncio.create_task(request_refusal(setup, id=str(i))) for i in range(8)]
        await until(
            lambda: sum(server.counts.now for server in setup.servers) == 8,
            "the servers have 8 requests",
        )

        setup.fleet.serve(why_none="all groups are being started again")

        for status, _, error in await asyncio.gather(*request_tasks):
            assert (status, error["type"], error["retryable"]) == (503, "no_active_server", True)
            assert "all groups are being started again" in error["message"]


async def request_refusal(
    setup: GatewaySetup, **options: Any
) -> tuple[int, Mapping[str, str], dict[str, Any]]:
    """Send a request that the gateway must refuse; return the status, the headers and the error."""
    async with setup.ask(**options) as answer:
        return answer.status, answer.headers, (await answer.json())["error"]


async def test_requests_of_a_killed_server_are_answered_by_the_other_servers() -> None:
    script = Path(__file__).parents[1] / "support" / "dummy_server.py"
    victim = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        str(script),
        "--rank",
        "9",
        "--token-s",
        "60",
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with gateway_setup(2) as setup:
            assert victim.stdout is not None
            killed_server = DummyServer(9)
            killed_server.port = int(await victim.stdout.readline())
            setup.fleet.serve(killed_server)
            request_tasks = [asyncio.create_task(setup.request_rank(id=str(i))) for i in range(20)]
            await until(
                lambda: setup.fleet.router.outstanding == 20, "the gateway has sent 20 requests"
            )
            await wait_until_counted(killed_server.url, 20)
            setup.fleet.serve(killed_server, *setup.servers)

            victim.kill()

            ranks = await asyncio.gather(*request_tasks)
            assert set(ranks) == {0, 1}
            for i in range(20):
                assert (
                    sum(setup.read_counts("begun", str(i)))
                    == sum(setup.read_counts("finished", str(i)))
                    == 1
                )
            assert {failure[:2] for failure in setup.fleet.failures} == {(9, 1)}
    finally:
        if victim.returncode is None:
            victim.kill()
        await victim.wait()


async def wait_until_counted(url: str, total: int) -> None:
    """Wait until the server at the URL has received at least `total` requests."""
    async with aiohttp.ClientSession(url) as client:
        while True:
            async with client.get("/counts") as answer:
                if (await answer.json())["total"] >= total:
                    return
            await asyncio.sleep(0.01)


async def test_every_request_ends_once_whatever_the_servers_do() -> None:
    random_source = random.Random(3)
    kinds = ["ok", "reset", "garbage", "die_mid_stream", "status", "hang"]
    outcomes: Counter[str] = Counter()

    async def send_request(setup: GatewaySetup, id: str) -> None:
        body = {
            "stream": random_source.random() < 0.5,
            "session_id": f"s{random_source.randrange(9)}",
        }
        async with setup.ask(id=id, json=body) as answer:
            try:
                content = await answer.read()
            except aiohttp.ClientPayloadError:
                outcomes["cut"] += 1
                return
        if answer.status == 200:
            is_complete = content.count(b'"id": "%b"' % id.encode()) == (4 if body["stream"] else 1)
            assert is_complete and (not body["stream"] or b"[DONE]\n\n" in content)
            outcomes["answered"] += 1
        elif b"told to answer 503" in content:
            outcomes["busy"] += 1
        else:
            assert json.loads(content)["error"]["retryable"] is True
            outcomes["refused"] += 1

    async with gateway_setup(4, limit=8) as setup:
        request_tasks = []
        for number in range(400):
            request_tasks.append(asyncio.create_task(send_request(setup, f"r{number}")))
            if number % 10 == 0:
                random_source.choice(setup.servers).misbehave(kind=random_source.choice(kinds))
                serving = [server for server in setup.servers if random_source.random() < 0.8]
                # All servers now count as restarted, because each server has a new epoch. The
                # gateway therefore ends all requests to the servers of the previous epoch.
                setup.fleet.serve(*serving, epoch=number)
            await asyncio.sleep(0.001)
        for server in setup.servers:
            server.misbehave(kind="ok")
        await asyncio.gather(*request_tasks)

        assert sum(outcomes.values()) == 400
        assert outcomes["answered"] > 100 and outcomes["cut"] and outcomes["refused"]
        assert max(sum(setup.read_counts("begun", f"r{n}")) for n in range(400)) <= 3


# Tests without an active server.


async def test_without_an_active_server_a_request_is_refused_at_once_with_the_reason() -> None:
    async with gateway_setup(1) as setup:
        setup.fleet.serve(why_none="rank 0 is being started again: killed by SIGKILL")
        status, headers, error = await request_refusal(setup)

    assert (status, headers["Retry-After"]) == (503, "1")
    assert error == {
        "type": "no_active_server",
        "message": "no inference server can take the request: rank 0 is being started again: "
        "killed by SIGKILL",
        "retryable": True,
    }


async def test_new_requests_wait_and_old_requests_finish_while_the_router_is_closed() -> None:
    async with gateway_setup(1) as setup:
        setup.servers[0].misbehave(kind="hang")
        old_request = asyncio.create_task(setup.request_rank(id="old"))
        await until(lambda: setup.servers[0].counts.now, "the server has the old request")

        setup.fleet.router.close()
        new_request = asyncio.create_task(setup.request_rank(id="new"))
        await until(lambda: setup.fleet.router.waiting == 1, "the new request waits")
        setup.servers[0].misbehave(kind="ok")
        assert await old_request == 0
        async with setup.client.get("/v1/models") as answer:
            assert answer.status == 200
        assert setup.read_counts("begun", "new") == [0]
        setup.fleet.router.open()

        assert await new_request == 0


async def test_aborted_requests_are_retried_after_the_router_opens() -> None:
    async with gateway_setup(1) as setup:
        setup.servers[0].misbehave(kind="hang")
        request_task = asyncio.create_task(setup.request_rank())
        await until(lambda: setup.servers[0].counts.now, "a server has the request")

        setup.fleet.router.close()
        setup.fleet.router.abort()
        await setup.fleet.router.idle()
        await until(lambda: setup.servers[0].counts.cancelled["a"], "the server notices the abort")
        setup.servers[0].misbehave(kind="ok")
        setup.fleet.router.open()

        assert await request_task == 0
        assert setup.read_counts("begun") == [2]


async def test_response_names_its_engine_epoch_and_weight_version() -> None:
    async with gateway_setup(1) as setup:
        setup.fleet.version = 7
        setup.fleet.serve(*setup.servers, epoch=3)
        async with setup.ask() as answer:
            head = answer.headers
        async with setup.ask(json={"prompt": "x", "stream": True}) as stream:
            text = await stream.text()

    for headers in (head, stream.headers):
        assert [headers[f"X-Muster-{name}"] for name in ("Engine", "Epoch", "Version")] == [
            "0",
            "3",
            "7",
        ]
    # The last line begins with a colon. In server-sent events, such a line is a comment, which
    # clients ignore.
    assert text.endswith("data: [DONE]\n\n: X-Muster-Version: 7\n\n")


async def test_no_server_is_blamed_if_the_gateway_has_no_file_descriptor_left() -> None:
    async with gateway_setup(1) as setup:
        reader, writer = await connected(setup.gateway)
        writer.write(b"GET /muster/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}")  # The gateway has accepted the connection.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as probe:
            free = probe.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            writer.write(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readuntil(b"}}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        writer.close()

        assert head.startswith(b"HTTP/1.1 503 ")
        assert b'"overloaded"' in body and b"ulimit -n" in body
        assert not setup.fleet.failures


async def test_request_is_cancelled_if_its_client_disconnects() -> None:
    async with gateway_setup(1) as setup:
        setup.servers[0].misbehave(kind="hang")
        request_task = asyncio.create_task(setup.request_rank())
        await until(lambda: setup.servers[0].counts.now, "a server has the request")

        request_task.cancel()

        await until(
            lambda: setup.servers[0].counts.cancelled["a"], "the server notices the disconnection"
        )
        await until(
            lambda: not setup.fleet.router.outstanding, "the request is no longer outstanding"
        )
        assert not setup.fleet.failures


async def test_stopping_gateway_finishes_requests_until_the_limit_and_cuts_the_rest() -> None:
    async with gateway_setup(2) as setup:
        for server in setup.servers:
            server.misbehave(kind="hang")
        cut_request = asyncio.create_task(request_refusal(setup, id="0"))
        await until(lambda: setup.servers[0].counts.now == 1, "the first server has a request")
        finished_request = asyncio.create_task(setup.request_rank())
        await until(lambda: setup.servers[1].counts.now == 1, "the second server has a request")
        stopping = asyncio.create_task(setup.gateway.stop(1.0))
        setup.servers[1].misbehave(kind="ok")

        assert await finished_request == 1
        status, _, error = await cut_request
        await stopping
        assert (status, error["type"]) == (503, "stopping")
        with pytest.raises(aiohttp.ClientConnectionError):
            await setup.request_rank()


async def test_idle_client_connections_do_not_delay_the_stop_of_the_gateway() -> None:
    async with gateway_setup(1) as setup:
        assert await setup.request_rank() == 0  # Afterwards, the client's connection stays open.
        reader, writer = await connected(setup.gateway)

        await asyncio.wait_for(setup.gateway.stop(600), 10)

        assert await reader.read() == b""
        writer.close()


async def test_gateway_with_a_taken_address_raises_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = Gateway(FakeFleet(), port=taken.getsockname()[1])
        with pytest.raises(OSError):
            await gateway.start()


# Tests of requests that control the fleet.


async def test_snapshot_request_returns_the_snapshot_of_the_fleet() -> None:
    async with gateway_setup(1) as setup:
        async with setup.client.get("/muster/rollout") as answer:
            assert await answer.json() == {"state": "serving"}
        async with setup.client.get("/muster/health") as answer:
            assert answer.status == 200
        assert not setup.servers[0].counts.total


async def send_order(setup: GatewaySetup, name: str, body: Any = None) -> tuple[int, Any]:
    """Send a control request to the gateway; return the status and the JSON of the response."""
    async with setup.client.post(f"/muster/rollout/{name}", json=body) as answer:
        return answer.status, await answer.json()


async def test_check_request_returns_the_failed_engines() -> None:
    async with gateway_setup(1) as setup:
        status, answer = await send_order(setup, "check", {})

    assert status == 200
    assert answer == {"failed": [{"engine": 0, "ranks": [0], "cause": "hangs"}]}


@pytest.mark.parametrize(
    ("name", "body", "order"),
    [
        ("sync", {}, ("begin", 600.0, InFlight.WAIT)),
        ("sync", {"timeout_s": 5, "in_flight": "abort"}, ("begin", 5.0, InFlight.ABORT)),
        (
            "sync/1a/broadcast",
            {"path": "/pause", "body": {"mode": "abort", "n": [1]}, "timeout_s": 5},
            (
                "broadcast",
                "1a",
                Ask(method="POST", path="/pause", body={"mode": "abort", "n": [1]}),
                5.0,
            ),
        ),
        (
            "sync/1a/commit",
            {"version": 3, "epochs": {"0": 1, "2": 4}},
            ("commit", "1a", 3, {0: 1, 2: 4}, False),
        ),
        (
            "sync/1a/commit",
            {"version": 0, "epochs": {}, "force": True},
            ("commit", "1a", 0, {}, True),
        ),
    ],
)
async def test_control_request_forwards_its_arguments(
    name: str, body: dict[str, Any], order: tuple[Any, ...]
) -> None:
    async with gateway_setup(0) as setup:
        status, _ = await send_order(setup, name, body)

        assert status == 200
        assert setup.fleet.orders[-1] == order


@pytest.mark.parametrize(
    ("method", "path", "body", "order"),
    [
        ("DELETE", "/muster/rollout/sync/1a", None, ("give up", "1a")),
        ("POST", "/muster/rollout/engines/2/restart", None, ("restart", 2)),
        (
            "POST",
            "/workers",
            {"url": "http://a:1", "worker_type": "regular"},
            ("add", "http://a:1"),
        ),
        ("DELETE", "/workers/3", None, ("retire", 3)),
    ],
)
async def test_control_request_acts_on_the_object_in_its_path(
    method: str, path: str, body: Any, order: tuple[Any, ...]
) -> None:
    async with gateway_setup(0) as setup:
        async with setup.client.request(method, path, json=body) as answer:
            assert answer.status == (202 if path.startswith("/workers") else 200)

        assert setup.fleet.orders[-1] == order


async def test_workers_are_listed_in_the_format_of_sglang_router() -> None:
    async with gateway_setup(0) as setup, setup.client.get("/workers") as answer:
        assert (answer.status, await answer.json()) == (200, {"workers": [], "total": 0})


#: A program that sends two requests as another user, and prints the statuses of the responses.
_REQUESTS_OF_NOBODY = """
import encodings.idna, http.client, os, sys
os.setuid(65534)
for method, path in (("POST", "/v1/chat/completions"), ("DELETE", "/workers/0")):
    client = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    client.request(method, path, "{}")
    print(client.getresponse().status)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_requests_of_another_user_are_refused_without_a_token() -> None:
    async with gateway_setup(1) as setup:
        port = setup.gateway.url.rpartition(":")[2]
        arguments = (sys.executable, "-I", "-c", _REQUESTS_OF_NOBODY, port)
        process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
        output, _ = await process.communicate()

        assert output.split() == [b"403", b"403"]
        assert setup.fleet.orders == []
        assert (await setup.request_rank()) == 0


@pytest.mark.parametrize(
    ("name", "body", "complaint"),
    [
        (
            "sync/1a/commit",
            {"version": 1},
            "epochs: Field required",
        ),
        ("sync/1a/commit", {"version": -1}, "version: Input should be greater than or equal to 0"),
        ("sync/1a/commit", {"version": "3"}, "version: Input should be a valid integer"),
        ("sync/1a/commit", {"version": True}, "version: Input should be a valid integer"),
        ("sync/1a/commit", {"version": 1, "rank": [0]}, "rank: Extra inputs are not permitted"),
        ("sync/1a/commit", {"version": 1, "epochs": [0]}, "epochs: Input should be an object"),
        ("sync/1a/commit", [1], "the body: "),
        ("sync", {"timeout_s": 0}, "timeout_s"),
        (
            "sync",
            {"in_flight": "drop"},
            "in_flight: Input should be 'wait', 'abort' or 'interrupt'",
        ),
        ("sync/1a/broadcast", {"path": "pause"}, "path: String should match"),
        ("check", {"now": True}, "now: Extra inputs are not permitted"),
    ],
)
async def test_error_of_an_invalid_control_request_names_the_fault(
    name: str, body: Any, complaint: str
) -> None:
    async with gateway_setup(0) as setup:
        status, answer = await send_order(setup, name, body)

        assert status == 422
        assert complaint in answer["error"]["message"]
        assert not setup.fleet.orders


@pytest.mark.parametrize(
    ("exception", "status"),
    [
        (MusterError("a sync is open"), 409),
        (KeyError("the fleet has no engine 7"), 422),
        (NoSuchSync("the sync 1a is over"), 404),
        (RuntimeError("a bug"), 500),
    ],
)
async def test_error_of_a_control_request_has_the_fleets_message_and_a_fitting_status(
    exception: Exception, status: int
) -> None:
    async with gateway_setup(0) as setup:
        setup.fleet.refuses = exception
        response_status, answer = await send_order(setup, "check", {})

    assert response_status == status
    assert str(exception.args[0]) in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/muster/rollout/check", 405),
        ("POST", "/muster/rollout", 405),
        ("POST", "/muster/rollout/sync/1a", 405),
        ("DELETE", "/workers/first", 422),
        ("POST", "/muster/rollout/weights", 404),
        ("GET", "/muster/nothing", 404),
        ("GET", "/muster", 404),
        # This path does not belong to the gateway, so the gateway forwards the request.
        ("GET", "/musterhaft", 200),
    ],
)
async def test_unknown_paths_and_methods_of_the_gateway_are_refused(
    method: str, path: str, status: int
) -> None:
    async with gateway_setup(1) as setup, setup.client.request(method, path) as answer:
        assert answer.status == status


async def test_control_request_continues_if_its_client_disconnects() -> None:
    async with gateway_setup(0) as setup:
        setup.fleet.hold = asyncio.Event()
        order_task = asyncio.create_task(send_order(setup, "check", {}))
        await until(lambda: setup.fleet.orders, "the order has begun")

        order_task.cancel()
        async with setup.client.get("/muster/health"):
            pass
        setup.fleet.hold.set()

        await until(lambda: setup.fleet.orders[-1] == ("check",), "the order has ended")


# Tests of the access to the gateway.


async def test_requests_without_the_required_token_are_refused() -> None:
    async with gateway_setup(1, token="secret") as setup:
        for path in ("/v1/models", "/muster/rollout"):
            async with setup.client.get(path) as answer:
                assert answer.status == 401
        status, _ = await send_order(setup, "check", {})

        assert status == 401
        assert not setup.servers[0].counts.total and not setup.fleet.orders


async def test_health_of_the_gateway_needs_no_token() -> None:
    async with (
        gateway_setup(1, token="secret") as setup,
        setup.client.get("/muster/health") as answer,
    ):
        assert answer.status == 200
        assert await answer.json() == {"ok": True, "ready": False}


async def test_token_of_the_gateway_is_not_forwarded_to_a_server() -> None:
    headers = {"Authorization": "Bearer secret"}
    async with (
        gateway_setup(1, token="secret") as setup,
        setup.ask("/x", headers=headers) as answer,
    ):
        received = await answer.json()

    assert answer.status == 200
    assert "authorization" not in [name.lower() for name, _ in received["headers"]]


async def test_page_of_another_origin_cannot_control_the_fleet() -> None:
    async with gateway_setup(0) as setup:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            async with setup.client.post("/muster/rollout/sync", headers=headers) as answer:
                assert answer.status == 403

        assert not setup.fleet.orders
