"""Health checks find servers whose process runs and whose engine does not work."""

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

ACTIVE = GroupState.ACTIVE
SUSPECT = GroupState.SUSPECT
RECOVERING = GroupState.RECOVERING


def hang(stage: Stage, *ranks: int) -> None:
    """Make servers hang, as after SIGSTOP: the process exists and answers no request."""
    for rank in ranks:
        stage.host[rank].answers = "hang"
        stage.host[rank].at_home = "hang"


def cut_off(stage: Stage, *ranks: int) -> None:
    """Cut the network to servers. They still answer requests from their own machine."""
    for rank in ranks:
        stage.host[rank].answers = "hang"


async def repeat(seconds: float, piece: bytes) -> AsyncIterator[bytes]:
    """Yield the same piece of an answer repeatedly, each time after a pause of some seconds."""
    while True:
        await asyncio.sleep(seconds)
        yield piece


@dataclass(kw_only=True)
class Answer:
    """Fake `ServedConnection` with the response of a server.

    If `whole` is False, the response never ends after its last piece.
    """

    status: int = 200
    whole: bytes | None = None
    pieces: Iterable[bytes] | AsyncIterator[bytes] | None = None
    reason: str = "As Told"
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)

    def __post_init__(self) -> None:
        self.content = self
        self.content_length = None if self.whole is None else len(self.whole)
        self.is_waiting = True
        self.is_complete = False
        self._unread_pieces = self._yield_pieces()

    async def _yield_pieces(self) -> AsyncIterator[bytes]:
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
        return await anext(self._unread_pieces, b"")

    async def upto(self, most: int) -> tuple[bytes, bool]:
        return b"".join([piece async for piece in self._unread_pieces]), True

    def close(self) -> None:
        pass


class DiscardingRequest(HttpRequest):
    """A request without a body, whose response is discarded."""

    async def upto(self, most: int) -> tuple[bytes, bool]:
        return b"", True

    def _prepare_head(self, *_: Any) -> None:
        self.is_begun = True

    def _send_after_head(self, data: bytes) -> None:
        pass

    async def write(self, piece: bytes) -> None:
        pass


class Clients:
    """Sends requests through a `Forwarder` to servers whose responses the test chooses."""

    def __init__(self, stage: Stage) -> None:
        self.forwarder = Forwarder(stage.fleet, is_token_own=False)
        self.tasks: list[asyncio.Task[Any]] = []

    def send(
        self, *, method: str = "POST", path: str = "/v1/chat/completions", **answer: Any
    ) -> None:
        """Start a request. The keyword arguments are the fields of the server's `Answer`."""

        async def return_answer(*_: Any, **__: Any) -> Answer:
            return Answer(**answer)

        self.forwarder.client.request = return_answer  # type: ignore[method-assign,assignment]
        request = DiscardingRequest(
            wire=None, method=method, target=path, headers=CIMultiDict(), content=None
        )
        self.tasks.append(asyncio.create_task(self.forwarder.forward(request)))


@asynccontextmanager
async def open_clients(stage: Stage) -> AsyncIterator[Clients]:
    """Yield clients of the fleet, and cancel their requests at the end."""
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
        # timeout equal to the interval
        (1, 30.0),
        # timeout longer than the interval
        (2, 45.0),
        (1, 100.0),
        *(
            pytest.param(misses, timeout_s, marks=pytest.mark.thorough)
            for misses, timeout_s in [(1, 15.0), (2, 15.0), (2, 30.0), (3, 30.0), (3, 45.0)]
        ),
    ],
)
def test_hanging_server_leaves_the_routing_in_time(misses: int, timeout_s: float) -> None:
    async def measure_detection_s(seed: int) -> float:
        stage = await serving(interval_s=30.0, timeout_s=timeout_s, misses=misses, seed=seed)
        await asyncio.sleep(Random(seed).uniform(30.0, 200.0))
        hang(stage, 0)
        return await stage.until(lambda: stage.routed() == [1])

    latest_s = max(run(measure_detection_s(seed)) for seed in range(600 // int(timeout_s)))

    assert latest_s <= misses * 30.0 + timeout_s + 0.02


@in_virtual_time
async def test_hanging_server_is_stopped_after_a_probe_from_its_own_machine() -> None:
    stage = await serving()
    hang(stage, 0)
    await stage.until_out()

    assert stage.cause_of() == "rank 0 does not answer: no answer within 15 s"
    assert stage.host.times("stop", 0)


@pytest.mark.parametrize(
    ("first_after_s", "first_s"),
    [
        # default: one interval
        (None, 30.0),
        (5.0, 5.0),
        (300.0, 300.0),
    ],
)
@in_virtual_time
async def test_first_probe_comes_after_the_grace_period(
    first_after_s: float | None, first_s: float
) -> None:
    stage = await serving(engines=5, interval_s=30.0, first_after_s=first_after_s)
    active_s = stage.when("rollout.group.state", group=3, after="active")
    count_before = len(stage.prober.times(3))
    await asyncio.sleep(first_s + 100.0)

    first, second, third, *_ = [at - active_s for at in stage.prober.times(3)[count_before:]]

    assert first == pytest.approx(first_s)
    assert 15.0 <= second - first <= 30.0
    assert third - second == pytest.approx(30.0)


@in_virtual_time
async def test_probes_of_servers_that_started_together_spread() -> None:
    stage = await serving(engines=20)
    await asyncio.sleep(200.0)

    last_probes_s = [stage.prober.times(rank)[-1] for rank in range(20)]
    assert len({round(probe_s, 3) for probe_s in last_probes_s}) == 20


@in_virtual_time
async def test_group_is_suspect_from_a_miss_until_a_successful_probe() -> None:
    stage = await serving()
    stage.host[0].answers = "503"
    await stage.until(lambda: stage.states() == [SUSPECT, ACTIVE])
    assert stage.routed() == [0, 1]
    preferred = {
        entrypoint.rank: entrypoint.is_preferred for entrypoint in stage.fleet.router.entrypoints
    }
    assert preferred == {0: False, 1: True}
    stage.host[0].answers = "yes"
    await stage.until_active()
    await asyncio.sleep(1000.0)

    assert stage.states() == [ACTIVE, ACTIVE]


@in_virtual_time
async def test_misses_of_zero_turn_periodic_probes_off() -> None:
    stage = await serving(misses=0)
    count_before = len(stage.prober.asked)
    await asyncio.sleep(1000.0)
    periodic_probes = len(stage.prober.asked) - count_before
    stage.fleet.note_failure(0, 1, "500")
    stage.host.die(0)
    await stage.until_active()
    stage.host[1].answers = "503"
    failed = (await stage.fleet.check())["failed"]

    assert periodic_probes == 0
    assert [failure["engine"] for failure in failed] == [1]


@in_virtual_time
async def test_missing_answer_is_excused_while_another_stream_gets_tokens() -> None:
    stage = await serving(engines=1)
    async with open_clients(stage) as clients:
        clients.send(pieces=repeat(1.0, b"data: {}\n\n"))
        stage.host[0].answers = "hang"
        await asyncio.sleep(1000.0)

    assert stage.states() == [ACTIVE]
    assert stage.told("rollout.probe.failed") == []


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param({"method": "GET", "path": "/v1/models", "whole": b"{}"}, id="models"),
        pytest.param({"method": "GET", "path": "/metrics", "pieces": [b"up 1"]}, id="metrics"),
        # the HTTP server sends the headers of a stream, but the engine generates nothing
        pytest.param({"pieces": None}, id="heads of streams"),
        pytest.param({"pieces": [b": ping\r\n\r\n"]}, id="comments of streams"),
        pytest.param({"status": 400, "whole": b"{}"}, id="refusals"),
        pytest.param({"whole": b""}, id="empty body"),
    ],
)
@in_virtual_time
async def test_responses_without_tokens_do_not_excuse_a_hanging_engine(
    request_: dict[str, Any],
) -> None:
    stage = await serving(engines=1, interval_s=30.0, timeout_s=15.0, misses=3)
    async with open_clients(stage) as clients:
        await asyncio.sleep(100.0)
        hang(stage, 0)
        began_s = now_s()
        while not stage.host.times("stop", 0) and now_s() < began_s + 500.0:
            clients.send(**request_)
            await asyncio.sleep(1.0)

    assert now_s() - began_s <= 3 * 30.0 + 15.0 + 1.0


@pytest.mark.parametrize(
    ("method", "target", "paths", "expected"),
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
        # paths that the spec names
        ("POST", "/act", ("/act",), True),
        ("POST", "/act", ("*",), True),
        ("GET", "/act", ("/act",), False),
    ],
)
def test_generations_are_recognized_by_method_and_path(
    method: str, target: str, paths: tuple[str, ...], expected: bool
) -> None:
    assert is_generation(method, target, paths) is expected


@in_virtual_time
async def test_complete_response_with_a_body_counts_as_generated() -> None:
    stage = await serving(engines=1)
    async with open_clients(stage) as clients:
        stage.host[0].answers = "hang"
        for _ in range(200):
            clients.send(whole=b'{"choices": []}')
            await asyncio.sleep(5.0)

        assert clients.forwarder.generated_pieces == {(0, 1): 200}
    assert stage.states() == [ACTIVE]


@in_virtual_time
async def test_failed_request_triggers_a_probe_at_once() -> None:
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
async def test_server_with_some_failed_requests_stays_suspect_with_few_events() -> None:
    stage = await serving()
    states = []
    for count in range(1000):
        stage.fleet.note_failure(0, 1, "it answered 503")
        stage.fleet.note_tokens(0, 1, count)
        states.append(stage.states()[0])
        await asyncio.sleep(0.001)

    assert set(states) == {SUSPECT}
    assert len(stage.told("rollout.group.state")) < 10


@pytest.mark.parametrize(
    "working_ranks",
    [
        pytest.param((1, 2), id="other servers generate"),
        pytest.param((), id="other servers fail, too"),
    ],
)
@in_virtual_time
async def test_server_without_successful_requests_fails_despite_good_probes(
    working_ranks: tuple[int, ...],
) -> None:
    stage = await serving(engines=3, misses=3, interval_s=30.0)
    began_s = now_s()
    second = 0
    while not stage.host.times("stop", 0) and second < 500:
        second += 1
        for rank in range(3):
            if rank in working_ranks:
                stage.fleet.note_tokens(rank, 1, second)
            else:
                stage.fleet.note_failure(rank, 1, "it answered 500")
        await asyncio.sleep(1.0)

    assert stage.cause_of(0) == (
        "rank 0: it answers probes, but its requests fail and generate no token; "
        "last failure: it answered 500"
    )
    assert 90.0 <= now_s() - began_s <= 93.0
    stopped_ranks = {rank for rank in range(3) if len(stage.host.times("stop", rank))}
    assert stopped_ranks == {0, 1, 2} - set(working_ranks)


@pytest.mark.parametrize("misses", [1, 2, 3])
@in_virtual_time
async def test_lost_connections_do_not_end_a_server(misses: int) -> None:
    stage = await serving(misses=misses)
    for loss in range(misses):
        for _ in range(50):
            stage.fleet.note_failure(0, 1, NoReply("its answer broke off"))
        await asyncio.sleep(200.0 * (loss + 1))

    assert stage.states() == [ACTIVE, ACTIVE]
    assert len(stage.host.times("start", 0)) == 1


@in_virtual_time
async def test_failed_requests_during_network_faults_do_not_end_a_server() -> None:
    stage = await serving(interval_s=1.0, timeout_s=15.0)
    for _ in range(5):
        cut_off(stage, 0)
        for _ in range(14):
            stage.fleet.note_failure(0, 1, NoReply("no connection"))
            await asyncio.sleep(1.0)
        stage.host[0].answers = "yes"
        await stage.until_active()
        stage.fleet.note_tokens(0, 1, 1)

    assert len(stage.host.times("start", 0)) == 1


@in_virtual_time
async def test_server_that_answers_some_requests_is_kept() -> None:
    stage = await serving(engines=2)
    for second in range(500):
        stage.fleet.note_failure(0, 1, "it answered 500")
        if second % 50 == 0:
            stage.fleet.note_tokens(0, 1, second)
        await asyncio.sleep(1.0)

    assert stage.host.times("stop", 0) == []


@in_virtual_time
async def test_slow_server_gets_a_timeout_longer_than_the_interval() -> None:
    stage = await serving(interval_s=1.0, timeout_s=5.0, misses=2)
    stage.host[0].answers = "slow"
    await asyncio.sleep(300.0)

    assert stage.states() == [ACTIVE, ACTIVE]
    assert stage.told("rollout.probe.failed") == []


@in_virtual_time
async def test_burst_of_failed_requests_does_not_end_a_server_with_good_probes() -> None:
    stage = await serving()
    for _ in range(100):
        for _ in range(50):
            stage.fleet.note_failure(0, 1, "connection reset")
        await asyncio.sleep(0.3)
    await asyncio.sleep(100.0)

    assert stage.states() == [ACTIVE, ACTIVE]
    assert len(stage.host.times("start", 0)) == 1
    assert stage.host.faults == []
    # There were 5,000 failed requests. They must not cause a probe each.
    assert len(stage.prober.times(0)) < 60


@in_virtual_time
async def test_reports_about_earlier_incarnations_are_ignored() -> None:
    stage = await serving()
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [RECOVERING, ACTIVE])
    for count in range(10):
        stage.fleet.note_failure(0, 1, "connection reset")
        stage.fleet.note_tokens(0, 1, count)
    await stage.until_active()
    stage.fleet.note_failure(0, 1, "connection reset")

    assert stage.states() == [ACTIVE, ACTIVE]


@in_virtual_time
async def test_late_probe_result_of_an_earlier_incarnation_is_ignored() -> None:
    stage = await serving(misses=1, timeout_s=15.0)
    count_before = len(stage.prober.times(0))
    hang(stage, 0)
    await stage.until(lambda: len(stage.prober.times(0)) > count_before)
    stage.host.die(0)
    await stage.until(lambda: stage.states() == [RECOVERING, ACTIVE])
    await stage.until_active()
    await asyncio.sleep(300.0)

    assert stage.states() == [ACTIVE, ACTIVE]
    assert len(stage.host.times("start", 0)) == 2


@in_virtual_time
async def test_group_is_suspect_until_all_its_servers_answer() -> None:
    stage = await serving(1, servers=2, are_experts=True)

    def misses() -> list[int]:
        return [server["misses"] for server in stage.fleet.snapshot()["servers"]]

    stage.host[0].answers = "503"
    stage.host[1].answers = "503"
    await stage.until(lambda: misses() == [1, 1])
    stage.host[0].answers = "yes"
    await stage.until(lambda: misses()[0] == 0)
    assert stage.states() == [SUSPECT]
    stage.host[1].answers = "yes"
    await stage.until(lambda: misses() == [0, 0])

    assert stage.states() == [ACTIVE]


@in_virtual_time
async def test_server_behind_a_cut_network_is_not_restarted() -> None:
    stage = await serving()
    cut_off(stage, 0)
    await stage.until(lambda: stage.routed() == [1], within_s=106.0)
    await asyncio.sleep(3600.0)
    assert stage.fleet.snapshot()["servers"][0]["reachable"] is False
    stage.host[0].answers = "yes"
    await stage.until_active()

    assert stage.routed() == [0, 1]
    assert len(stage.host.times("start", 0)) == 1
    assert stage.host.times("stop", 0) == []
    [warning] = stage.told("rollout.warning")
    assert warning["message"].startswith("rank 0 works, but cannot be reached")


@in_virtual_time
async def test_cut_network_to_all_servers_causes_one_warning_and_no_restart() -> None:
    stage = await serving(engines=8)
    cut_off(stage, *range(8))
    await stage.until(lambda: stage.routed() == [], within_s=106.0)
    await asyncio.sleep(600.0)
    for rank in range(8):
        stage.host[rank].answers = "yes"
    await stage.until_active()

    assert stage.routed() == list(range(8))
    assert [verb for _, verb, _ in stage.host.log] == ["start"] * 8
    assert len(stage.told("rollout.warning")) == 1


@in_virtual_time
async def test_snapshot_names_the_unreachable_servers() -> None:
    stage = await serving(engines=1)
    cut_off(stage, 0)
    await stage.until(lambda: stage.routed() == [])

    reason = stage.fleet.snapshot()["reason"]
    assert reason == "ranks 0 are suspect and cannot be reached (no answer within 15 s)"


@pytest.mark.parametrize(
    ("lost_count", "is_restarted"),
    [
        # if few machines are unreachable, these machines count as failed
        pytest.param(1, True, id="one of five"),
        pytest.param(2, True, id="two of five"),
        # if more than half of the machines are unreachable, the network counts as failed, not the
        # machines
        pytest.param(3, False, id="three of five"),
        pytest.param(5, False, id="all"),
    ],
)
@in_virtual_time
async def test_unreachable_machines_are_restarted_unless_most_are_unreachable(
    lost_count: int, is_restarted: bool
) -> None:
    stage = await serving(engines=5)
    for rank in range(lost_count):
        stage.host[rank].answers = "hang"
        stage.host[rank].at_home = "lost"
    await asyncio.sleep(200.0)

    assert bool(stage.host.times("stop", 0)) is is_restarted
    assert stage.routed() == list(range(5) if is_restarted else range(lost_count, 5))


@in_virtual_time
async def test_cut_off_server_that_starts_to_hang_is_recovered() -> None:
    stage = await serving()
    cut_off(stage, 0)
    await stage.until(lambda: stage.routed() == [1])
    await asyncio.sleep(60.0)
    stage.host[0].at_home = "hang"
    await stage.until_out()
    await stage.until_active()

    assert stage.routed() == [0, 1]


@in_virtual_time
async def test_exception_in_a_probe_does_not_end_the_health_checks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = await serving()
    working_ask = stage.prober.ask
    monkeypatch.setattr(stage.prober, "ask", _raise_bug)
    await asyncio.sleep(100.0)
    monkeypatch.setattr(stage.prober, "ask", working_ask)
    assert stage.states() == [ACTIVE, ACTIVE]
    hang(stage, 0)
    await stage.until_out()
    await stage.until_active()
    monkeypatch.setattr(stage.prober, "ask", _raise_bug)
    assert (await stage.fleet.check())["failed"] == []

    assert "rank 0, epoch 1: the probe could not be sent" in caplog.text


async def _raise_bug(*_: object) -> str:
    raise RuntimeError("a bug")
