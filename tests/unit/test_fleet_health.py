"""How it is found out that a server lives and does not work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from multidict import CIMultiDict

from tasks.record.states import GroupState
from tasks.rollout.forwarding import Forwarder, is_generation
from tasks.rollout.http1 import HttpRequest
from tasks.rollout.probing import NoReply
from tests.support.fleet_clock import in_virtual_time, now_s, run
from tests.support.fleet_fakes import Stage, serving

A, U, X, R = GroupState.ACTIVE, GroupState.SUSPECT, GroupState.INACTIVE, GroupState.RECOVERING


def hang(stage: Stage, *ranks: int) -> None:
    """As by SIGSTOP: the process lives, and answers nobody."""
    for rank in ranks:
        stage.host[rank].answers = stage.host[rank].at_home = "hang"


def cut(stage: Stage, *ranks: int) -> None:
    """The network between is gone; asked from its own machine it answers."""
    for rank in ranks:
        stage.host[rank].answers = "hang"


async def every(seconds: float, piece: bytes) -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(seconds)
        yield piece


@dataclass(kw_only=True)
class Answer:
    """Of a server, as `Upstreams` gives it; what is not `whole` never ends."""

    status: int = 200
    whole: bytes | None = None
    pieces: Iterable[bytes] | AsyncIterator[bytes] | None = None
    reason: str = "As Told"
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)

    def __post_init__(self) -> None:
        self.content = self
        self.content_length = None if self.whole is None else len(self.whole)
        self.is_waiting, self.is_complete = True, False
        self._left = self._all()

    async def _all(self) -> AsyncIterator[bytes]:
        if self.whole is not None:
            yield self.whole
            return
        if isinstance(self.pieces, AsyncIterator):
            async for piece in self.pieces:
                yield piece
        for piece in self.pieces or ():
            yield piece
        await asyncio.Event().wait()

    async def read_available(self) -> bytes:
        return await anext(self._left, b"")

    async def upto(self, most: int) -> tuple[bytes, bool]:
        return b"".join([piece async for piece in self._left]), True

    def close(self) -> None:
        pass


class Unheard(HttpRequest):
    """Has no body, and nobody reads the answer."""

    async def upto(self, most: int) -> tuple[bytes, bool]:
        return b"", True

    def _prepare_head(self, *_: Any) -> None:
        self.is_begun = True

    def _send_after_head(self, data: bytes) -> None:
        pass

    async def write(self, piece: bytes) -> None:
        pass


class Clients:
    """Send requests through the gateway's forwarding to servers that answer as a test says."""

    def __init__(self, stage: Stage) -> None:
        self.forwarder = Forwarder(stage.fleet, is_token_own=False)
        self.tasks: list[asyncio.Task[Any]] = []

    def send(
        self, *, method: str = "POST", path: str = "/v1/chat/completions", **answer: Any
    ) -> None:
        async def answered(*_: Any, **__: Any) -> Answer:
            return Answer(**answer)

        self.forwarder.client.request = answered  # type: ignore[method-assign,assignment]
        request = Unheard(
            wire=None, method=method, target=path, headers=CIMultiDict(), content=None
        )
        self.tasks.append(asyncio.create_task(self.forwarder.forward(request)))


@asynccontextmanager
async def requests_to(stage: Stage) -> AsyncIterator[Clients]:
    clients = Clients(stage)
    try:
        yield clients
    finally:
        for task in clients.tasks:
            task.cancel()
        await asyncio.gather(*clients.tasks, return_exceptions=True)
        clients.forwarder.client.close()


@pytest.mark.parametrize(
    ("misses", "timeout_s"),
    [
        (3, 15.0),
        # no longer than the interval
        (1, 30.0),
        # the next question is due while the last one is still waited for
        (2, 45.0),
        (1, 100.0),
        *(
            pytest.param(misses, timeout_s, marks=pytest.mark.thorough)
            for misses, timeout_s in [(1, 15.0), (2, 15.0), (2, 30.0), (3, 30.0), (3, 45.0)]
        ),
    ],
)
def test_a_server_that_hangs_is_out_of_routing_within_misses_intervals_and_a_timeout(
    misses: int, timeout_s: float
) -> None:
    async def history(seed: int) -> float:
        stage = await serving(interval_s=30.0, timeout_s=timeout_s, misses=misses, seed=seed)
        await asyncio.sleep(Random(seed).uniform(30.0, 200.0))
        hang(stage, 0)
        return await stage.until(lambda: stage.routed() == [1])

    latest_s = max(run(history(seed)) for seed in range(600 // int(timeout_s)))

    assert latest_s <= misses * 30.0 + timeout_s + 0.02


@in_virtual_time
async def test_a_server_that_hangs_is_stopped_after_it_was_asked_from_its_own_machine() -> None:
    stage = await serving()
    hang(stage, 0)
    await stage.until_out()

    assert stage.cause_of() == "rank 0 does not answer: no answer within 15 s"
    assert stage.host.times("stop", 0)


@pytest.mark.parametrize(
    ("first_after_s", "first_s"),
    [
        # left out: an interval
        (None, 30.0),
        (5.0, 5.0),
        (300.0, 300.0),
    ],
)
@in_virtual_time
async def test_the_grace_comes_first(first_after_s: float | None, first_s: float) -> None:
    stage = await serving(engines=5, interval_s=30.0, first_after_s=first_after_s)
    active_s = stage.when("rollout.group.state", group=3, after="active")
    asked = len(stage.prober.times(3))
    await asyncio.sleep(first_s + 100.0)

    first, second, third, *_ = [at - active_s for at in stage.prober.times(3)[asked:]]

    assert first == pytest.approx(first_s)
    assert 15.0 <= second - first <= 30.0
    assert third - second == pytest.approx(30.0)


@in_virtual_time
async def test_servers_that_began_together_are_asked_at_different_times_later() -> None:
    stage = await serving(engines=20)
    await asyncio.sleep(200.0)

    assert len({round(at, 3) for at in [stage.prober.times(rank)[-1] for rank in range(20)]}) == 20


@in_virtual_time
async def test_a_miss_makes_a_group_suspect_and_a_good_answer_clears_it() -> None:
    stage = await serving()
    stage.host[0].answers = "503"
    await stage.until(lambda: stage.states() == [U, A])
    assert stage.routed() == [0, 1]
    preferred = {one.rank: one.is_preferred for one in stage.fleet.router.entrypoints}
    assert preferred == {0: False, 1: True}
    stage.host[0].answers = "yes"
    await stage.until_active()
    await asyncio.sleep(1000.0)

    assert stage.states() == [A, A]


@in_virtual_time
async def test_without_misses_nobody_is_asked_but_by_checks_and_deaths_are_seen() -> None:
    stage = await serving(misses=0)
    asked = len(stage.prober.asked)
    await asyncio.sleep(1000.0)
    asked_since = len(stage.prober.asked) - asked
    stage.fleet.note_failure(0, 1, "500")
    stage.host.die(0)
    await stage.until_active()
    stage.host[1].answers = "503"
    failed = (await stage.fleet.check())["failed"]

    assert asked_since == 0
    assert [one["engine"] for one in failed] == [1]


@in_virtual_time
async def test_a_long_prefill_is_excused_where_tokens_of_another_stream_flow() -> None:
    stage = await serving(engines=1)
    async with requests_to(stage) as clients:
        clients.send(pieces=every(1.0, b"data: {}\n\n"))
        stage.host[0].answers = "hang"
        await asyncio.sleep(1000.0)

    assert stage.states() == [A]
    assert stage.told("rollout.probe.failed") == []


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param({"method": "GET", "path": "/v1/models", "whole": b"{}"}, id="models"),
        pytest.param({"method": "GET", "path": "/metrics", "pieces": [b"up 1"]}, id="metrics"),
        # its front end takes each, and nothing comes
        pytest.param({"pieces": None}, id="heads of streams"),
        pytest.param({"pieces": [b": ping\r\n\r\n"]}, id="comments of streams"),
        pytest.param({"status": 400, "whole": b"{}"}, id="refusals"),
        pytest.param({"whole": b""}, id="nothing"),
    ],
)
@in_virtual_time
async def test_what_needs_no_engine_excuses_none_that_hangs(request_: dict[str, Any]) -> None:
    stage = await serving(engines=1, interval_s=30.0, timeout_s=15.0, misses=3)
    async with requests_to(stage) as clients:
        await asyncio.sleep(100.0)
        hang(stage, 0)
        began_s = now_s()
        while not stage.host.times("stop", 0) and now_s() < began_s + 500.0:
            clients.send(**request_)
            await asyncio.sleep(1.0)

    assert now_s() - began_s <= 3 * 30.0 + 15.0 + 1.0


@pytest.mark.parametrize(
    ("method", "target", "paths", "is_one"),
    [
        ("POST", "/v1/completions", (), True),
        ("POST", "/v1/chat/completions?a=1", (), True),
        ("POST", "/v1/responses", (), True),
        ("POST", "/generate", (), True),
        ("POST", "/v1/chat/interactive", (), True),
        ("GET", "/v1/completions", (), False),
        ("GET", "/v1/models", (), False),
        ("POST", "/update_weights_from_disk", (), False),
        ("POST", "/generate/more", (), False),
        # those that the spec names
        ("POST", "/act", ("/act",), True),
        ("POST", "/act", ("*",), True),
        ("GET", "/act", ("/act",), False),
    ],
)
def test_what_a_generation_is(
    method: str, target: str, paths: tuple[str, ...], is_one: bool
) -> None:
    assert is_generation(method, target, paths) is is_one


@in_virtual_time
async def test_a_plain_answer_tells_of_its_engine_once_its_body_came() -> None:
    stage = await serving(engines=1)
    async with requests_to(stage) as clients:
        stage.host[0].answers = "hang"
        for _ in range(200):
            clients.send(whole=b'{"choices": []}')
            await asyncio.sleep(5.0)

        assert clients.forwarder.generated_pieces == {(0, 1): 200}
    assert stage.states() == [A]


@in_virtual_time
async def test_a_failed_request_brings_a_probe_at_once() -> None:
    stage = await serving()
    await asyncio.sleep(100.0)
    hang(stage, 0)
    stage.host[0].answers = "refuse"
    began_s = now_s()
    while 0 in stage.routed():
        stage.fleet.note_failure(0, 1, "connection reset")
        await asyncio.sleep(0.1)

    assert now_s() - began_s < 3.0


@in_virtual_time
async def test_a_server_that_fails_some_requests_is_suspect_and_not_told_each_time() -> None:
    stage = await serving()
    seen = []
    for count in range(1000):
        stage.fleet.note_failure(0, 1, "it answered 503")
        stage.fleet.note_tokens(0, 1, count)
        seen.append(stage.states()[0])
        await asyncio.sleep(0.001)

    assert set(seen) == {GroupState.SUSPECT}
    assert len(stage.told("rollout.group.state")) < 10


@pytest.mark.parametrize(
    "others",
    [
        pytest.param((1, 2), id="others generate"),
        # it has generated nothing all the same
        pytest.param((), id="others fail, too"),
    ],
)
@in_virtual_time
async def test_a_server_whose_requests_all_fail_is_sick_whatever_it_says_to_probes(
    others: tuple[int, ...],
) -> None:
    stage = await serving(engines=3, misses=3, interval_s=30.0)
    began_s, second = now_s(), 0
    while not stage.host.times("stop", 0) and second < 500:
        second += 1
        for rank in range(3):
            if rank in others:
                stage.fleet.note_tokens(rank, 1, second)
            else:
                stage.fleet.note_failure(rank, 1, "it answered 500")
        await asyncio.sleep(1.0)

    assert stage.cause_of(0) == (
        "rank 0: it answers probes, and its requests fail one after the other, with no token out; "
        "the last one: it answered 500"
    )
    assert 90.0 <= now_s() - began_s <= 93.0
    assert {0, 1, 2} - set(others) == {
        rank for rank in range(3) if len(stage.host.times("stop", rank))
    }


@pytest.mark.parametrize("misses", [1, 2, 3])
@in_virtual_time
async def test_requests_on_connections_that_are_lost_at_times_end_no_server(misses: int) -> None:
    stage = await serving(misses=misses)
    for lost in range(misses):
        for _ in range(50):
            stage.fleet.note_failure(0, 1, NoReply("its answer broke off"))
        await asyncio.sleep(200.0 * (lost + 1))

    assert stage.states() == [A, A]
    assert len(stage.host.times("start", 0)) == 1


@in_virtual_time
async def test_requests_that_fail_while_the_network_is_cut_end_no_server() -> None:
    stage = await serving(interval_s=1.0, timeout_s=15.0)
    for _ in range(5):
        cut(stage, 0)
        for _ in range(14):
            stage.fleet.note_failure(0, 1, NoReply("no connection"))
            await asyncio.sleep(1.0)
        stage.host[0].answers = "yes"
        await stage.until_active()
        stage.fleet.note_tokens(0, 1, 1)

    assert len(stage.host.times("start", 0)) == 1


@in_virtual_time
async def test_a_server_that_answers_now_and_then_is_kept() -> None:
    stage = await serving(engines=2)
    for second in range(500):
        stage.fleet.note_failure(0, 1, "it answered 500")
        if second % 50 == 0:
            stage.fleet.note_tokens(0, 1, second)
        await asyncio.sleep(1.0)

    assert stage.host.times("stop", 0) == []


@in_virtual_time
async def test_a_slow_server_whose_timeout_is_longer_than_the_interval_has_all_of_it() -> None:
    stage = await serving(interval_s=1.0, timeout_s=5.0, misses=2)
    stage.host[0].answers = "slow"
    await asyncio.sleep(300.0)

    assert stage.states() == [A, A]
    assert stage.told("rollout.probe.failed") == []


@in_virtual_time
async def test_a_burst_of_failed_requests_does_not_end_a_server_that_answers_probes() -> None:
    stage = await serving()
    for _ in range(100):
        for _ in range(50):
            stage.fleet.note_failure(0, 1, "connection reset")
        await asyncio.sleep(0.3)
    await asyncio.sleep(100.0)

    assert stage.states() == [A, A]
    assert len(stage.host.times("start", 0)) == 1
    assert stage.host.faults == []
    # Not a probe for each.
    assert len(stage.prober.times(0)) < 60


@in_virtual_time
async def test_what_is_noted_of_an_old_incarnation_or_an_unwatched_server_changes_nothing() -> None:
    stage = await serving()
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [R, A])
    for count in range(10):
        stage.fleet.note_failure(0, 1, "connection reset")
        stage.fleet.note_tokens(0, 1, count)
    await stage.until_active()
    stage.fleet.note_failure(0, 1, "connection reset")

    assert stage.states() == [A, A]


@in_virtual_time
async def test_an_answer_that_comes_after_a_restart_is_of_the_old_incarnation_and_ignored() -> None:
    stage = await serving(misses=1, timeout_s=15.0)
    asked = len(stage.prober.times(0))
    hang(stage, 0)
    await stage.until(lambda: len(stage.prober.times(0)) > asked)
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [R, A])
    await stage.until_active()
    await asyncio.sleep(300.0)

    assert stage.states() == [A, A]
    assert len(stage.host.times("start", 0)) == 2


@in_virtual_time
async def test_a_group_is_suspect_until_the_last_of_its_servers_is_well() -> None:
    stage = await serving(1, servers=2, are_experts=True)

    def misses() -> list[int]:
        return [one["misses"] for one in stage.fleet.snapshot()["servers"]]

    stage.host[0].answers = stage.host[1].answers = "503"
    await stage.until(lambda: misses() == [1, 1])
    stage.host[0].answers = "yes"
    await stage.until(lambda: misses()[0] == 0)
    assert stage.states() == [U]
    stage.host[1].answers = "yes"
    await stage.until(lambda: misses() == [0, 0])

    assert stage.states() == [A]


@in_virtual_time
async def test_a_server_behind_a_cut_network_is_not_restarted_and_comes_back() -> None:
    stage = await serving()
    cut(stage, 0)
    await stage.until(lambda: stage.routed() == [1], within_s=106.0)
    await asyncio.sleep(3600.0)
    assert stage.fleet.snapshot()["servers"][0]["reachable"] is False
    stage.host[0].answers = "yes"
    await stage.until_active()

    assert stage.routed() == [0, 1]
    assert len(stage.host.times("start", 0)) == 1
    assert stage.host.times("stop", 0) == []
    [warning] = stage.told("rollout.warning")
    assert warning["message"].startswith("rank 0 works and cannot be reached")


@in_virtual_time
async def test_a_switch_that_cuts_the_network_restarts_nobody_and_is_told_once() -> None:
    stage = await serving(engines=8)
    cut(stage, *range(8))
    await stage.until(lambda: stage.routed() == [], within_s=106.0)
    await asyncio.sleep(600.0)
    for rank in range(8):
        stage.host[rank].answers = "yes"
    await stage.until_active()

    assert stage.routed() == list(range(8))
    assert [verb for _, verb, _ in stage.host.log] == ["start"] * 8
    assert len(stage.told("rollout.warning")) == 1


@in_virtual_time
async def test_clients_are_told_that_nobody_can_be_reached() -> None:
    stage = await serving(engines=1)
    cut(stage, 0)
    await stage.until(lambda: stage.routed() == [])

    why = stage.fleet.snapshot()["reason"]
    assert why == "ranks 0 are suspect and cannot be reached (no answer within 15 s)"


@pytest.mark.parametrize(
    ("lost", "is_restarted"),
    [
        # a machine that cannot be asked either, alone: it is as good as gone
        pytest.param(1, True, id="one of five"),
        pytest.param(2, True, id="two of five"),
        # more than half of them at one time: it is what is between
        pytest.param(3, False, id="three of five"),
        pytest.param(5, False, id="all"),
    ],
)
@in_virtual_time
async def test_machines_not_to_be_asked_are_a_cut_if_most(lost: int, is_restarted: bool) -> None:
    stage = await serving(engines=5)
    for rank in range(lost):
        stage.host[rank].answers, stage.host[rank].at_home = "hang", "lost"
    await asyncio.sleep(200.0)

    assert bool(stage.host.times("stop", 0)) is is_restarted
    assert stage.routed() == list(range(5) if is_restarted else range(lost, 5))


@in_virtual_time
async def test_a_cut_server_that_dies_meanwhile_is_recovered() -> None:
    stage = await serving()
    cut(stage, 0)
    await stage.until(lambda: stage.routed() == [1])
    await asyncio.sleep(60.0)
    stage.host[0].at_home = "hang"
    await stage.until_out()
    await stage.until_active()

    assert stage.routed() == [0, 1]


@in_virtual_time
async def test_a_fault_of_our_own_ends_no_watch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = await serving()
    asked = stage.prober.ask
    monkeypatch.setattr(stage.prober, "ask", _breaks)
    await asyncio.sleep(100.0)
    monkeypatch.setattr(stage.prober, "ask", asked)
    assert stage.states() == [A, A]
    hang(stage, 0)
    await stage.until_out()
    await stage.until_active()
    monkeypatch.setattr(stage.prober, "ask", _breaks)
    assert (await stage.fleet.check())["failed"] == []

    assert "rank 0, epoch 1: not asked" in caplog.text


async def _breaks(*_: object) -> str:
    raise RuntimeError("a bug")
