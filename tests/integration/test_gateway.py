"""The gateway on real sockets, before real servers: what is passed on, retried, cut and refused."""

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
from tests.support.fleet_fakes import settings_of

pytestmark = pytest.mark.asyncio

_DEADLINE_S = 30.0
_CHAT = "/v1/chat/completions"


class FakeFleet:
    """Stands in for the fleet: says who serves, and hears what the gateway found."""

    def __init__(self, *, limit: int | None = None, **settings: Any) -> None:
        self.settings = settings_of(**{"paths": (ANY_PATH,), **settings})
        self.router = Router(limit=limit, queue_size=self.settings.queue_size)
        self.failures: list[tuple[int, int, str]] = []
        #: By rank and epoch.
        self.tokens: dict[tuple[int, int], int] = {}
        self.orders: list[tuple[Any, ...]] = []
        self.version: int | None = None
        self.seen: dict[str, Any] = {"state": "serving"}
        #: By URL: they answer, and their engine has died.
        self.dying: set[str] = set()
        self.hold: asyncio.Event | None = None
        self.refuses: Exception | None = None

    def serve(self, *servers: DummyServer, why_none: str = "", epoch: int = 1) -> None:
        self.router.set(
            (
                Entrypoint(rank=one.rank, epoch=epoch, url=one.url, version=self.version)
                for one in servers
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


class Scene:
    """A gateway, its fleet, servers and a client."""

    def __init__(self, fleet: FakeFleet, gateway: Gateway, servers: list[DummyServer]) -> None:
        self.fleet, self.gateway, self.servers = fleet, gateway, servers
        self.client = aiohttp.ClientSession(gateway.url, auto_decompress=False)

    def ask(self, path: str = _CHAT, *, id: str = "a", **more: Any) -> Any:
        """A request whose id the servers count."""
        more["headers"] = {"X-Request-Id": id, **more.get("headers", {})}
        method = more.pop("method", "POST")
        if method == "POST" and "data" not in more:
            more.setdefault("json", {"prompt": "x"})
        return self.client.request(method, path, **more)

    async def rank_of(self, **more: Any) -> int:
        async with self.ask(**more) as answer:
            content = await answer.json()
            assert answer.status == 200, content
            return int(answer.headers["X-Muster-Rank"])

    def counted(self, what: str, id: str = "a") -> list[int]:
        return [getattr(server.counts, what)[id] for server in self.servers]


@asynccontextmanager
async def scene(
    count: int = 2,
    *,
    limit: int | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> AsyncIterator[Scene]:
    servers = [DummyServer(rank) for rank in range(count)]
    for server in servers:
        await server.start()
    fleet = FakeFleet(limit=limit, **settings)
    gateway = Gateway(fleet, **more)
    await gateway.start()
    fleet.serve(*servers)
    found = Scene(fleet, gateway, servers)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            yield found
    finally:
        await found.client.close()
        await gateway.stop(0)
        for server in servers:
            await server.stop()
        assert fleet.router.outstanding == 0


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that a fleet's process has."""
    return uvloop.EventLoopPolicy()


async def until(is_so: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.002)


# What is passed on


@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "QUERY"]
)
async def test_any_method_and_path_reaches_a_server_as_it_is(method: str) -> None:
    async with scene(1) as at, at.ask("/a%2Fb//c?x=1&x=%20", method=method, data=b"z") as answer:
        content = await answer.read()

        assert answer.status == 200
        assert answer.reason == "As Told"
        if method == "HEAD":
            assert (content, int(answer.headers["Content-Length"]) > 0) == (b"", True)
        else:
            got = json.loads(content)
            assert (got["method"], got["target"]) == (method, "/a%2Fb//c?x=1&x=%20")
            assert (got["bytes"], got["rank"]) == (1, 0)


@pytest.mark.parametrize(
    ("method", "path", "is_passed_on"),
    [
        ("POST", "/v1/completions", True),
        ("POST", "/generate?x=1", True),
        ("POST", "/act", True),
        ("GET", "/v1/models", True),
        ("GET", "/v1/models/policy", True),
        # of one server of many: nothing that a client should see, or change
        ("POST", "/v1/models", False),
        ("POST", "/update_weights_from_disk", False),
        ("POST", "/collective_rpc", False),
        ("POST", "/sleep", False),
        ("GET", "/", False),
    ],
)
async def test_only_what_is_for_any_one_server_is_passed_on(
    method: str, path: str, is_passed_on: bool
) -> None:
    async with scene(1, settings={"paths": ("/act",)}) as at:
        async with at.client.request(method, path, json={}) as answer:
            text = await answer.text()

        assert at.servers[0].counts.total == int(is_passed_on)
        if not is_passed_on:
            assert answer.status == 404
            assert "POST /muster/rollout/sync" in text and "components.rollout.paths" in text


async def test_prometheus_is_told_of_requests_engines_and_weights() -> None:
    async with scene(2, token="secret", settings={"paths": None}) as at:
        engine = {"engine": 0, "state": "active", "version": 7, "recoveries": 2}
        at.fleet.seen = {"version": 7, "engines": [engine, {**engine, "engine": 1}]}
        bearer = {"Authorization": "Bearer secret"}
        for _ in range(3):
            async with at.ask(headers=bearer) as answer:
                await answer.read()
        async with at.client.get("/sleep", headers=bearer):
            pass
        async with at.client.get("/metrics", headers=bearer) as answer:
            text = await answer.text()
        async with at.client.get("/metrics") as refused:
            assert refused.status == 401

    said = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    told = {name.removeprefix("muster_rollout_"): float(value) for name, value in said.items()}
    assert told['requests_total{code="200"}'] == 3
    assert told['engines{state="active"}'] == 2
    assert told['restarts_total{engine="1"}'] == 2
    assert told['engine_version{engine="0"}'] == told["version"] == 7
    assert told["request_seconds_count"] == 4
    assert sum(told[f'tokens_total{{rank="{rank}"}}'] for rank in range(2)) == 3
    assert (told["waiting"], told["outstanding"]) == (0, 0)


async def test_clients_of_one_server_find_the_fleet_well_as_long_as_any_of_it_serves() -> None:
    async with scene(1, token="secret") as at:
        async with at.client.get("/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        at.fleet.serve()
        async with at.client.get("/health") as answer:
            assert answer.status == 503
        # In a sync requests wait.
        at.fleet.router.close()
        async with at.client.get("/health") as answer:
            assert answer.status == 200
        assert not at.servers[0].counts.total


async def test_a_user_is_a_session_where_that_is_asked_for() -> None:
    async with scene(3, settings={"paths": None, "session_by_user": True}) as at:
        ranks = [await at.rank_of(json={"user": "me"}) for _ in range(3)]

    assert len(set(ranks)) == 1


async def test_headers_pass_in_both_directions_but_those_of_the_connection() -> None:
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
    async with scene(1) as at:
        raw = "".join(f"{name}: {value}\r\n" for name, value in sent).encode("latin-1")
        head, body = await exchange(
            at.gateway, b"GET /x HTTP/1.1\r\nHost: localhost\r\n" + raw + b"\r\n"
        )

    got = [(name, value) for name, value in json.loads(body)["headers"] if name != "Host"]
    assert got == sent[:6]
    names = [line.partition(":")[0].lower() for line in head.split("\r\n")[1:]]
    assert names.count("x-twice") == names.count("set-cookie") == 2
    assert {"x-muster-rank", "x-muster-epoch", "content-length"} <= set(names)


async def exchange(gateway: Gateway, request: bytes) -> tuple[str, bytes]:
    """Head and body of the answer, of which Content-Length says how long it is."""
    reader, writer = await connected(gateway)
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = head.lower().partition("content-length:")[2].partition("\r")[0]
    body = await reader.readexactly(int(length))
    writer.close()
    return head, body


async def connected(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    ("size", "is_chunked"),
    [(0, False), (100_000, False), (3_000_000, False), (100_000, True), (3_000_000, True)],
)
async def test_a_body_arrives_whole(size: int, is_chunked: bool) -> None:
    body = bytes(range(256)) * (size // 256)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 100_000):
            yield body[at : at + 100_000]

    async with (
        scene(1) as at,
        at.ask("/x", data=pieces() if is_chunked else body) as answer,
    ):
        got = await answer.json()

    assert got["bytes"] == len(body)
    assert got["sha256"] == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("framing", [b"Content-Length: 1001", b"Transfer-Encoding: chunked"])
async def test_a_body_that_is_too_large_to_be_held_is_refused(
    framing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "_LONGEST_BODY", 1000)
    async with scene(1) as at:
        reader, writer = await connected(at.gateway)
        writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % framing)
        writer.write(b"3e9\r\n" + bytes(1001))
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 413 ")
        assert not at.servers[0].counts.total


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async with scene(1) as at:
        reader, writer = await connected(at.gateway)
        writer.write(
            b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        first = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"hi")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()

    assert first.startswith(b"HTTP/1.1 100 ")
    assert head.startswith(b"HTTP/1.1 200 ")


async def test_a_large_answer_arrives_whole() -> None:
    async with scene(1) as at, at.ask("/large?bytes=20000000", method="GET") as answer:
        assert len(await answer.read()) == 20_000_000


async def test_a_slow_client_slows_its_server_and_is_not_buffered_for() -> None:
    async with scene(1) as at:
        counts = at.servers[0].counts
        async with at.ask("/large?bytes=200000000", method="GET") as answer:
            await answer.content.readexactly(1)
            stuck = -1
            while counts.bytes_sent != stuck:  # until everything in between is full
                stuck = counts.bytes_sent
                for _ in range(20):
                    await asyncio.sleep(0.005)
            assert stuck < 50_000_000
            assert at.servers[0].counts.now == 1


async def test_a_stream_arrives_piece_by_piece() -> None:
    async with scene(1) as at:
        at.servers[0].misbehave(kind="step")
        async with at.ask(json={"stream": True, "max_tokens": 3}) as answer:
            lines = []
            for _ in range(3):
                at.servers[0].step()  # the next piece does not exist before
                lines.append(await answer.content.readuntil(b"\n\n"))
            rest = await answer.read()

    assert answer.headers["Content-Type"] == "text/event-stream"
    assert all(json.loads(line.removeprefix(b"data: "))["rank"] == 0 for line in lines)
    assert rest == b"data: [DONE]\n\n: X-Muster-Version: None\n\n"


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 502])
async def test_an_answer_is_passed_on_whatever_it_says(status: int) -> None:
    async with scene(2) as at:
        at.servers[0].misbehave(kind="status", status=status)
        async with at.ask() as answer:
            content = await answer.json()

        assert (answer.status, content) == (status, {"error": f"told to answer {status}"})
        assert at.counted("begun") == [1, 0]
        assert [one[:2] for one in at.fleet.failures] == ([(0, 1)] if status >= 500 else [])
        assert not at.fleet.tokens


async def test_the_last_words_of_a_front_end_whose_engine_has_died_are_not_the_answer() -> None:
    async with scene(2) as at:
        at.servers[0].misbehave(kind="status", status=500)
        at.fleet.dying.add(at.servers[0].url)

        assert await at.rank_of() == 1
        assert at.counted("begun") == [1, 1]
        [(rank, _, why)] = at.fleet.failures
        assert (rank, why) == (0, "it answered 500, and is not ready any more")


async def test_what_a_server_has_generated_is_counted_and_nothing_else() -> None:
    async with scene(1) as at:
        for path in ("/v1/models", "/large?bytes=200000"):
            async with at.ask(path, method="GET") as answer:
                assert answer.status == 200 and await answer.read()
        assert not at.fleet.tokens

        for count in range(5):
            await at.rank_of()
            assert at.fleet.tokens == {(0, 1): count + 1}

        at.servers[0].misbehave(kind="step")
        async with at.ask(json={"stream": True, "max_tokens": 3}) as answer:
            assert at.fleet.tokens == {(0, 1): 5}  # its head alone
            for count in range(3):
                at.servers[0].step()
                await answer.content.readuntil(b"\n\n")
                assert at.fleet.tokens[0, 1] >= 6 + count
        assert not at.fleet.failures


# Sessions


@pytest.mark.parametrize(
    "session",
    [
        {"headers": {"X-Session-Id": "s"}},
        {"headers": {"X-SMG-Routing-Key": "s"}},  # of sglang-router's clients
        {"json": {"prompt": "x", "session_id": "s"}},
        {"json": {"messages": [{"role": "user", "content": '"user": 1'}], "session_id": "s"}},
        {"json": {"session_id": 7}},
        {"json": {"session_id": "s", "user": "other"}},
    ],
)
async def test_a_session_stays_with_its_server_and_gets_another_when_that_is_gone(
    session: dict[str, Any],
) -> None:
    async with scene(3) as at:
        before = [await at.rank_of(**session) for _ in range(4)]
        at.fleet.serve(*(one for one in at.servers if one.rank != before[0]))
        after = [await at.rank_of(**session) for _ in range(4)]

    assert len(set(before)) == len(set(after)) == 1
    assert before[0] != after[0]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "hi"}]}',  # a role is no session
        b'{"nested": {"user": "s"}}',
        b'{"session_id": null}',
        b'{"session_id": ""}',
        b'{"session_id": broken',  # for the server to refuse
        b'{"user": "one name for all"}',
    ],
)
async def test_without_a_session_requests_go_round(body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with scene(3) as at:
        ranks = [await at.rank_of(path="/x", data=body, headers=headers) for _ in range(3)]

    assert sorted(ranks) == [0, 1, 2]


# What is tried again


@pytest.mark.parametrize("kind", ["reset", "garbage"])
async def test_a_request_whose_answer_has_not_begun_is_answered_elsewhere_once(kind: str) -> None:
    async with scene(2) as at:
        at.servers[0].misbehave(kind=kind)

        assert await at.rank_of() == 1
        assert at.counted("begun") == [1, 1]
        assert at.counted("finished")[1] == 1
        assert [one[:2] for one in at.fleet.failures] == [(0, 1)]


async def test_a_server_that_nobody_listens_for_is_passed_over() -> None:
    async with scene(2) as at:
        await at.servers[0].stop()

        assert await at.rank_of() == 1
        assert at.fleet.failures[0][0] == 0
        assert "no connection" in at.fleet.failures[0][2]


async def test_a_server_that_is_busy_leaves_the_request_to_one_other() -> None:
    async with scene(3) as at:
        at.servers[0].misbehave(kind="status", status=503)

        assert await at.rank_of() == 1
        for server in at.servers:
            server.misbehave(kind="status", status=503)
        async with at.ask(id="b") as answer:
            assert answer.status == 503
            assert await answer.json() == {"error": "told to answer 503"}

        assert sum(at.counted("begun", "b")) == 2


async def test_a_server_that_is_busy_answers_the_last_try() -> None:
    async with scene(4) as at:
        for server in at.servers[:2]:
            server.misbehave(kind="reset")
        for server in at.servers[2:]:
            server.misbehave(kind="status", status=503)

        async with at.ask() as answer:
            assert await answer.json() == {"error": "told to answer 503"}


async def test_tries_are_bounded_and_their_end_says_that_it_may_be_sent_again() -> None:
    async with scene(5) as at:
        for server in at.servers:
            server.misbehave(kind="reset")
        async with at.ask() as answer:
            error = (await answer.json())["error"]

        assert (answer.status, error["type"], error["retryable"]) == (502, "server_lost", True)
        assert sum(at.counted("begun")) == 3


async def test_no_try_begins_when_the_time_for_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "_RETRY_FOR_S", -1.0)
    async with scene(3) as at:
        at.servers[0].misbehave(kind="reset")
        async with at.ask() as answer:
            assert answer.status == 502

        assert at.counted("begun") == [1, 0, 0]


async def test_the_only_server_is_asked_again() -> None:
    async with scene(1) as at:
        at.servers[0].misbehave(kind="reset", times=1)

        assert await at.rank_of() == 0
        assert at.counted("begun") == [2]


async def test_a_stream_that_breaks_off_is_cut_and_never_sent_again() -> None:
    async with scene(2) as at:
        at.servers[0].misbehave(kind="die_mid_stream", after=2)
        async with at.ask(json={"stream": True}) as answer:
            got = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                while piece := await answer.content.readany():
                    got += piece

        assert got.count(b"data: {") == 3
        last = got.rstrip().rpartition(b"\n\n")[2]
        assert last.startswith(b"event: error\ndata: ")
        error = json.loads(last.partition(b"data: ")[2])["error"]
        assert (error["type"], error["retryable"]) == ("server_lost", True)
        assert at.counted("begun") == [1, 0]
        assert [one[:2] for one in at.fleet.failures] == [(0, 1)]


async def test_an_answer_that_breaks_off_is_seen_to_be_incomplete() -> None:
    async with scene(2) as at, at.ask("/large?bytes=50000000", method="GET") as answer:
        await answer.content.readexactly(1)
        await at.servers[0].stop()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()

        assert at.counted("begun") == [1, 0]


async def test_a_client_of_http_1_0_is_reset_when_its_answer_breaks_off() -> None:
    async with scene(1) as at:
        at.servers[0].misbehave(kind="step")
        reader, writer = await connected(at.gateway)
        body = b'{"stream": true}'
        writer.write(b"POST %b HTTP/1.0\r\nContent-Length: 16\r\n\r\n%b" % (_CHAT.encode(), body))
        at.servers[0].step()
        await reader.readuntil(b"data: {")
        await at.servers[0].stop()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


# What leaves the routing


async def test_a_group_that_leaves_takes_its_requests_with_it_at_once() -> None:
    async with scene(2) as at:
        first, second = at.servers
        first.misbehave(kind="hang")
        asked = asyncio.create_task(at.rank_of())
        await until(lambda: first.counts.now, "a request at rank 0")

        at.fleet.serve(second)

        assert await asked == 1
        await until(lambda: first.counts.cancelled["a"], "the request at rank 0 is given up")
        assert at.counted("finished") == [0, 1]
        assert not at.fleet.failures  # the fleet knows


async def test_a_new_incarnation_takes_what_the_old_one_had_not_begun() -> None:
    async with scene(1) as at:
        at.servers[0].misbehave(kind="hang", times=1)
        asked = asyncio.create_task(at.rank_of())
        await until(lambda: at.servers[0].counts.now, "a request")

        at.fleet.serve(at.servers[0], epoch=2)

        assert await asked == 0
        assert at.counted("finished") == [1]


async def test_requests_of_a_fleet_of_which_nobody_is_left_are_answered_with_why() -> None:
    async with scene(2) as at:
        for server in at.servers:
            server.misbehave(kind="hang")
        asked = [asyncio.create_task(refusal_of(at, id=str(i))) for i in range(8)]
        await until(lambda: sum(one.counts.now for one in at.servers) == 8, "8 requests")

        at.fleet.serve(why_none="all groups are being started again")

        for status, _, error in await asyncio.gather(*asked):
            assert (status, error["type"], error["retryable"]) == (503, "no_active_server", True)
            assert "all groups are being started again" in error["message"]


async def refusal_of(at: Scene, **more: Any) -> tuple[int, Mapping[str, str], dict[str, Any]]:
    async with at.ask(**more) as answer:
        return answer.status, answer.headers, (await answer.json())["error"]


async def test_a_killed_servers_requests_are_answered_by_the_others() -> None:
    script = Path(__file__).parents[1] / "support" / "dummy_server.py"
    victim = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(script), "--rank", "9", "--token-s", "60"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with scene(2) as at:
            assert victim.stdout is not None
            killed = DummyServer(9)
            killed.port = int(await victim.stdout.readline())
            at.fleet.serve(killed)
            asked = [asyncio.create_task(at.rank_of(id=str(i))) for i in range(20)]
            await until(lambda: at.fleet.router.outstanding == 20, "20 requests")
            await until_counted(killed.url, 20)
            at.fleet.serve(killed, *at.servers)

            victim.kill()

            ranks = await asyncio.gather(*asked)
            assert set(ranks) == {0, 1}
            for i in range(20):
                assert sum(at.counted("begun", str(i))) == sum(at.counted("finished", str(i))) == 1
            assert {one[:2] for one in at.fleet.failures} == {(9, 1)}
    finally:
        if victim.returncode is None:
            victim.kill()
        await victim.wait()


async def until_counted(url: str, total: int) -> None:
    async with aiohttp.ClientSession(url) as client:
        while True:
            async with client.get("/counts") as answer:
                if (await answer.json())["total"] >= total:
                    return
            await asyncio.sleep(0.01)


async def test_every_request_gets_one_end_that_it_can_tell_whatever_the_servers_do() -> None:
    dice = random.Random(3)
    kinds = ["ok", "reset", "garbage", "die_mid_stream", "status", "hang"]
    ends: Counter[str] = Counter()

    async def asks(at: Scene, id: str) -> None:
        body = {"stream": dice.random() < 0.5, "session_id": f"s{dice.randrange(9)}"}
        async with at.ask(id=id, json=body) as answer:
            try:
                content = await answer.read()
            except aiohttp.ClientPayloadError:
                ends["cut"] += 1
                return
        if answer.status == 200:
            is_whole = content.count(b'"id": "%b"' % id.encode()) == (4 if body["stream"] else 1)
            assert is_whole and (not body["stream"] or b"[DONE]\n\n" in content)
            ends["answered"] += 1
        elif b"told to answer 503" in content:
            ends["busy"] += 1
        else:
            assert json.loads(content)["error"]["retryable"] is True
            ends["refused"] += 1

    async with scene(4, limit=8) as at:
        asked = []
        for number in range(400):
            asked.append(asyncio.create_task(asks(at, f"r{number}")))
            if number % 10 == 0:
                dice.choice(at.servers).misbehave(kind=dice.choice(kinds))
                serving = [one for one in at.servers if dice.random() < 0.8]
                at.fleet.serve(*serving, epoch=number)  # all that is under way is ended
            await asyncio.sleep(0.001)
        for server in at.servers:
            server.misbehave(kind="ok")
        await asyncio.gather(*asked)

        assert sum(ends.values()) == 400
        assert ends["answered"] > 100 and ends["cut"] and ends["refused"]
        assert max(sum(at.counted("begun", f"r{n}")) for n in range(400)) <= 3


# Nobody there


async def test_without_an_active_server_a_request_is_refused_at_once_with_the_reason() -> None:
    async with scene(1) as at:
        at.fleet.serve(why_none="rank 0 is being started again: killed by SIGKILL")
        status, headers, error = await refusal_of(at)

    assert (status, headers["Retry-After"]) == (503, "1")
    assert error == {
        "type": "no_active_server",
        "message": "no active rollout worker: rank 0 is being started again: killed by SIGKILL",
        "retryable": True,
    }


async def test_while_the_routing_is_closed_new_requests_wait_and_old_ones_end() -> None:
    async with scene(1) as at:
        at.servers[0].misbehave(kind="hang")
        old = asyncio.create_task(at.rank_of(id="old"))
        await until(lambda: at.servers[0].counts.now, "the old request")

        at.fleet.router.close()
        new = asyncio.create_task(at.rank_of(id="new"))
        await until(lambda: at.fleet.router.waiting == 1, "the new one waits")
        at.servers[0].misbehave(kind="ok")
        assert await old == 0
        async with at.client.get("/v1/models") as answer:
            assert answer.status == 200
        assert at.counted("begun", "new") == [0]
        at.fleet.router.open()

        assert await new == 0


async def test_requests_that_are_aborted_are_tried_again_once_the_routing_opens() -> None:
    async with scene(1) as at:
        at.servers[0].misbehave(kind="hang")
        asked = asyncio.create_task(at.rank_of())
        await until(lambda: at.servers[0].counts.now, "a request")

        at.fleet.router.close()
        at.fleet.router.abort()
        await at.fleet.router.idle()
        await until(lambda: at.servers[0].counts.cancelled["a"], "the server sees it")
        at.servers[0].misbehave(kind="ok")
        at.fleet.router.open()

        assert await asked == 0
        assert at.counted("begun") == [2]


async def test_an_answer_says_which_engine_gave_it_with_which_weights() -> None:
    async with scene(1) as at:
        at.fleet.version = 7
        at.fleet.serve(*at.servers, epoch=3)
        async with at.ask() as answer:
            head = answer.headers
        async with at.ask(json={"prompt": "x", "stream": True}) as stream:
            text = await stream.text()

    for found in (head, stream.headers):
        assert [found[f"X-Muster-{name}"] for name in ("Engine", "Epoch", "Version")] == [
            "0",
            "3",
            "7",
        ]
    # Readers of events leave it out.
    assert text.endswith("data: [DONE]\n\n: X-Muster-Version: 7\n\n")


async def test_a_gateway_without_a_socket_left_blames_no_server() -> None:
    async with scene(1) as at:
        reader, writer = await connected(at.gateway)
        writer.write(b"GET /muster/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}")  # it has taken the connection
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
        assert not at.fleet.failures


async def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    async with scene(1) as at:
        at.servers[0].misbehave(kind="hang")
        asked = asyncio.create_task(at.rank_of())
        await until(lambda: at.servers[0].counts.now, "a request")

        asked.cancel()

        await until(lambda: at.servers[0].counts.cancelled["a"], "the server sees it")
        await until(lambda: not at.fleet.router.outstanding, "it is no longer outstanding")
        assert not at.fleet.failures


async def test_a_gateway_that_stops_lets_end_what_ends_and_cuts_the_rest() -> None:
    async with scene(2) as at:
        for server in at.servers:
            server.misbehave(kind="hang")
        cut = asyncio.create_task(refusal_of(at, id="0"))
        await until(lambda: at.servers[0].counts.now == 1, "1 request")
        ends = asyncio.create_task(at.rank_of())
        await until(lambda: at.servers[1].counts.now == 1, "2 requests")
        stopping = asyncio.create_task(at.gateway.stop(1.0))
        at.servers[1].misbehave(kind="ok")

        assert await ends == 1
        status, error = (refusal := await cut)[0], refusal[2]
        await stopping
        assert (status, error["type"]) == (503, "stopping")
        with pytest.raises(aiohttp.ClientConnectionError):
            await at.rank_of()


async def test_idle_connections_of_clients_do_not_keep_a_gateway_from_stopping() -> None:
    async with scene(1) as at:
        assert await at.rank_of() == 0  # and keeps its connection
        reader, writer = await connected(at.gateway)

        await asyncio.wait_for(at.gateway.stop(600), 10)

        assert await reader.read() == b""
        writer.close()


async def test_an_address_that_is_taken_is_an_error_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = Gateway(FakeFleet(), port=taken.getsockname()[1])
        with pytest.raises(OSError):
            await gateway.start()


# Orders


async def test_the_snapshot_is_the_fleets() -> None:
    async with scene(1) as at:
        async with at.client.get("/muster/rollout") as answer:
            assert await answer.json() == {"state": "serving"}
        async with at.client.get("/muster/health") as answer:
            assert answer.status == 200
        assert not at.servers[0].counts.total


async def ordered(at: Scene, name: str, body: Any = None) -> tuple[int, Any]:
    async with at.client.post(f"/muster/rollout/{name}", json=body) as answer:
        return answer.status, await answer.json()


async def test_the_checks_result_reaches_the_caller() -> None:
    async with scene(1) as at:
        status, answer = await ordered(at, "check", {})

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
                *("broadcast", "1a"),
                *(Ask(method="POST", path="/pause", body={"mode": "abort", "n": [1]}), 5.0),
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
async def test_an_order_forwards_its_arguments(
    name: str, body: dict[str, Any], order: tuple[Any, ...]
) -> None:
    async with scene(0) as at:
        status, _ = await ordered(at, name, body)

        assert status == 200
        assert at.fleet.orders[-1] == order


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
async def test_an_order_is_for_what_its_path_names(
    method: str, path: str, body: Any, order: tuple[Any, ...]
) -> None:
    async with scene(0) as at:
        async with at.client.request(method, path, json=body) as answer:
            assert answer.status == (202 if path.startswith("/workers") else 200)

        assert at.fleet.orders[-1] == order


async def test_workers_are_listed_as_sglangs_router_lists_its_own() -> None:
    async with scene(0) as at, at.client.get("/workers") as answer:
        assert (answer.status, await answer.json()) == (200, {"workers": [], "total": 0})


#: As the user nobody: the statuses of a request and of an order.
_ELSE = """
import encodings.idna, http.client, os, sys
os.setuid(65534)
for method, path in (("POST", "/v1/chat/completions"), ("DELETE", "/workers/0")):
    client = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    client.request(method, path, "{}")
    print(client.getresponse().status)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_of_the_machine_may_nothing_without_a_token() -> None:
    async with scene(1) as at:
        port = at.gateway.url.rpartition(":")[2]
        words = (sys.executable, "-I", "-c", _ELSE, port)
        them = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        said, _ = await them.communicate()

        assert said.split() == [b"403", b"403"]
        assert at.fleet.orders == []
        assert (await at.rank_of()) == 0


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
async def test_a_bad_order_is_told_what_is_wrong(name: str, body: Any, complaint: str) -> None:
    async with scene(0) as at:
        status, answer = await ordered(at, name, body)

        assert status == 422
        assert complaint in answer["error"]["message"]
        assert not at.fleet.orders


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (MusterError("a sync is open"), 409),
        (KeyError("the fleet has no engine 7"), 422),
        (NoSuchSync("the sync 1a is over"), 404),
        (RuntimeError("a bug"), 500),
    ],
)
async def test_an_order_that_the_fleet_refuses_says_why(raised: Exception, status: int) -> None:
    async with scene(0) as at:
        at.fleet.refuses = raised
        found, answer = await ordered(at, "check", {})

    assert found == status
    assert str(raised.args[0]) in answer["error"]["message"]


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
        ("GET", "/musterhaft", 200),  # not the gateway's own
    ],
)
async def test_what_the_gateway_knows_not_is_refused(method: str, path: str, status: int) -> None:
    async with scene(1) as at, at.client.request(method, path) as answer:
        assert answer.status == status


async def test_an_order_goes_on_when_its_client_leaves() -> None:
    async with scene(0) as at:
        at.fleet.hold = asyncio.Event()
        asked = asyncio.create_task(ordered(at, "check", {}))
        await until(lambda: at.fleet.orders, "the order has begun")

        asked.cancel()
        async with at.client.get("/muster/health"):
            pass
        at.fleet.hold.set()

        await until(lambda: at.fleet.orders[-1] == ("check",), "the order has ended")


# Access


async def test_with_a_token_nothing_is_answered_without_it() -> None:
    async with scene(1, token="secret") as at:
        for path in ("/v1/models", "/muster/rollout"):
            async with at.client.get(path) as answer:
                assert answer.status == 401
        status, _ = await ordered(at, "check", {})

        assert status == 401
        assert not at.servers[0].counts.total and not at.fleet.orders


async def test_whether_the_gateway_lives_is_told_without_a_token() -> None:
    async with scene(1, token="secret") as at, at.client.get("/muster/health") as answer:
        assert answer.status == 200
        assert await answer.json() == {"ok": True, "ready": False}


async def test_the_gateways_token_stays_with_the_gateway() -> None:
    headers = {"Authorization": "Bearer secret"}
    async with scene(1, token="secret") as at, at.ask("/x", headers=headers) as answer:
        got = await answer.json()

    assert answer.status == 200
    assert "authorization" not in [name.lower() for name, _ in got["headers"]]


async def test_a_foreign_page_cannot_order_the_fleet() -> None:
    async with scene(0) as at:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            async with at.client.post("/muster/rollout/sync", headers=headers) as answer:
                assert answer.status == 403

        assert not at.fleet.orders
