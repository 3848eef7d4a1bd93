"""Health checks find servers whose process runs, but whose engine does not work."""

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
from tests.support.fleet_fakes import FleetHarness, start_fake_fleet

ACTIVE = GroupState.ACTIVE
SUSPECT = GroupState.SUSPECT
RECOVERING = GroupState.RECOVERING


def hang(harness: FleetHarness, *ranks: int) -> None:
    """Make servers hang, as after SIGSTOP: the process exists and answers no request."""
    for rank in ranks:
        harness.host[rank].answers = "hang"
        harness.host[rank].at_home = "hang"


def cut_off(harness: FleetHarness, *ranks: int) -> None:
    """Cut the network to servers. The servers still answer requests from their own machine."""
    for rank in ranks:
        harness.host[rank].answers = "hang"


async def repeat(seconds: float, piece: bytes) -> AsyncIterator[bytes]:
    """Yield the same piece of an answer repeatedly, after a pause of `seconds` each time."""
    while True:
        await asyncio.sleep(seconds)
        yield piece


@dataclass(kw_only=True)
class Answer:
    """Fake `ServedConnection` with the response of a server.

    If `whole` is None, the response contains the `pieces`. After the last piece, the response stays
    incomplete.
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

    async def read_up_to(self, most: int) -> tuple[bytes, bool]:
        return b"".join([piece async for piece in self._unread_pieces]), True

    def close(self) -> None:
        pass


class DiscardingRequest(HttpRequest):
    """A request without a body, whose response is discarded."""

    async def read_up_to(self, most: int) -> tuple[bytes, bool]:
        return b"", True

    def _prepare_head(self, *_: Any) -> None:
        self.is_begun = True

    def _send_after_head(self, data: bytes) -> None:
        pass

    async def write(self, piece: bytes) -> None:
        pass


class Clients:
    """Sends requests to servers through a `Forwarder`. The test chooses the servers' responses."""

    def __init__(self, harness: FleetHarness) -> None:
        self.forwarder = Forwarder(harness.fleet, is_token_own=False)
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
async def open_clients(harness: FleetHarness) -> AsyncIterator[Clients]:
    """Yield clients of the fleet, and cancel their requests at the end."""
    clients = Clients(harness)
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
        # the timeout of a probe equals the interval between two probes
        (1, 30.0),
        # the timeout of a probe is longer than the interval between two probes
        (2, 45.0),
        (1, 100.0),
        *(
            pytest.param(misses, timeout_s, marks=pytest.mark.thorough)
            for misses in (1, 2, 3)
            for timeout_s in (15.0, 30.0, 45.0)
            if (misses, timeout_s) not in {(1, 30.0), (2, 45.0)}
        ),
    ],
)
def test_hanging_server_leaves_the_routing_in_time(misses: int, timeout_s: float) -> None:
    async def measure_detection_s(seed: int) -> float:
        harness = await start_fake_fleet(
            interval_s=30.0, timeout_s=timeout_s, misses=misses, seed=seed
        )
        await asyncio.sleep(Random(seed).uniform(30.0, 200.0))
        hang(harness, 0)
        return await harness.wait_until(lambda: harness.list_routed_ranks() == [1])

    latest_s = max(run(measure_detection_s(seed)) for seed in range(600 // int(timeout_s)))

    assert latest_s <= misses * 30.0 + timeout_s + 0.02


@in_virtual_time
async def test_hanging_server_is_stopped_after_a_probe_from_its_own_machine() -> None:
    harness = await start_fake_fleet()
    hang(harness, 0)
    await harness.wait_until_failed()

    assert (
        harness.last_failure_cause()
        == "the server of rank 0 does not answer: no answer within 15 s"
    )
    assert harness.host.times("stop", 0)


@pytest.mark.parametrize(
    ("first_after_s", "first_s"),
    [
        # by default, the first probe comes one interval after the start
        (None, 30.0),
        (5.0, 5.0),
        (300.0, 300.0),
    ],
)
@in_virtual_time
async def test_first_probe_comes_after_the_grace_period(
    first_after_s: float | None, first_s: float
) -> None:
    harness = await start_fake_fleet(engines=5, interval_s=30.0, first_after_s=first_after_s)
    active_s = harness.time_of_event("rollout.group.state", group=3, after="active")
    count_before = len(harness.prober.times(3))
    await asyncio.sleep(first_s + 100.0)

    first, second, third, *_ = [at - active_s for at in harness.prober.times(3)[count_before:]]

    assert first == pytest.approx(first_s)
    assert 15.0 <= second - first <= 30.0
    assert third - second == pytest.approx(30.0)


@in_virtual_time
async def test_probes_of_servers_that_started_together_spread() -> None:
    harness = await start_fake_fleet(engines=20)
    await asyncio.sleep(200.0)

    last_probes_s = [harness.prober.times(rank)[-1] for rank in range(20)]
    assert len({round(probe_s, 3) for probe_s in last_probes_s}) == 20


@in_virtual_time
async def test_group_is_suspect_from_a_miss_until_a_successful_probe() -> None:
    harness = await start_fake_fleet()
    harness.host[0].answers = "503"
    await harness.wait_until(lambda: harness.states() == [SUSPECT, ACTIVE])
    assert harness.list_routed_ranks() == [0, 1]
    preferred = {
        entrypoint.rank: entrypoint.is_preferred for entrypoint in harness.fleet.router.entrypoints
    }
    assert preferred == {0: False, 1: True}
    harness.host[0].answers = "yes"
    await harness.wait_until_active()
    await asyncio.sleep(1000.0)

    assert harness.states() == [ACTIVE, ACTIVE]


@in_virtual_time
async def test_misses_of_zero_turn_periodic_probes_off() -> None:
    harness = await start_fake_fleet(misses=0)
    count_before = len(harness.prober.asked)
    await asyncio.sleep(1000.0)
    periodic_probes = len(harness.prober.asked) - count_before
    harness.fleet.note_failure(0, 1, "500")
    harness.host.die(0)
    await harness.wait_until_active()
    harness.host[1].answers = "503"
    failed = (await harness.fleet.check())["failed"]

    assert periodic_probes == 0
    assert [failure["engine"] for failure in failed] == [1]


@in_virtual_time
async def test_missing_answer_is_excused_while_another_stream_gets_tokens() -> None:
    harness = await start_fake_fleet(engines=1)
    async with open_clients(harness) as clients:
        clients.send(pieces=repeat(1.0, b"data: {}\n\n"))
        harness.host[0].answers = "hang"
        await asyncio.sleep(1000.0)

    assert harness.states() == [ACTIVE]
    assert harness.list_events("rollout.probe.failed") == []


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param({"method": "GET", "path": "/v1/models", "whole": b"{}"}, id="models"),
        pytest.param({"method": "GET", "path": "/metrics", "pieces": [b"up 1"]}, id="metrics"),
        # the server sends the HTTP headers of a streamed response, and nothing else
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
    harness = await start_fake_fleet(engines=1, interval_s=30.0, timeout_s=15.0, misses=3)
    async with open_clients(harness) as clients:
        await asyncio.sleep(100.0)
        hang(harness, 0)
        began_s = now_s()
        while not harness.host.times("stop", 0) and now_s() < began_s + 500.0:
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
        # the spec names further paths whose requests generate tokens
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
    harness = await start_fake_fleet(engines=1)
    async with open_clients(harness) as clients:
        harness.host[0].answers = "hang"
        for _ in range(200):
            clients.send(whole=b'{"choices": []}')
            await asyncio.sleep(5.0)

        assert clients.forwarder.generated_pieces == {(0, 1): 200}
    assert harness.states() == [ACTIVE]


@in_virtual_time
async def test_failed_request_triggers_a_probe_at_once() -> None:
    harness = await start_fake_fleet()
    await asyncio.sleep(100.0)
    hang(harness, 0)
    harness.host[0].answers = "refuse"
    began_s = now_s()
    while 0 in harness.list_routed_ranks():
        harness.fleet.note_failure(0, 1, "connection reset")
        await asyncio.sleep(0.1)

    assert now_s() - began_s < 3.0


@in_virtual_time
async def test_server_with_some_failed_requests_stays_suspect_with_few_events() -> None:
    harness = await start_fake_fleet()
    states = []
    for count in range(1000):
        harness.fleet.note_failure(0, 1, "the server answered 503")
        harness.fleet.note_tokens(0, 1, count)
        states.append(harness.states()[0])
        await asyncio.sleep(0.001)

    assert set(states) == {SUSPECT}
    assert len(harness.list_events("rollout.group.state")) < 10


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
    harness = await start_fake_fleet(engines=3, misses=3, interval_s=30.0)
    began_s = now_s()
    second = 0
    while not harness.host.times("stop", 0) and second < 500:
        second += 1
        for rank in range(3):
            if rank in working_ranks:
                harness.fleet.note_tokens(rank, 1, second)
            else:
                harness.fleet.note_failure(rank, 1, "the server answered 500")
        await asyncio.sleep(1.0)

    assert harness.last_failure_cause(0) == (
        "the server of rank 0 passes its health checks, but every request to this server fails "
        "before the first generated token; last failure: the server answered 500"
    )
    assert 90.0 <= now_s() - began_s <= 93.0
    stopped_ranks = {rank for rank in range(3) if len(harness.host.times("stop", rank))}
    assert stopped_ranks == {0, 1, 2} - set(working_ranks)


@pytest.mark.parametrize("misses", [1, 2, 3])
@in_virtual_time
async def test_lost_connections_do_not_end_a_server(misses: int) -> None:
    harness = await start_fake_fleet(misses=misses)
    for loss in range(misses):
        for _ in range(50):
            harness.fleet.note_failure(0, 1, NoReply("the server's answer broke off"))
        await asyncio.sleep(200.0 * (loss + 1))

    assert harness.states() == [ACTIVE, ACTIVE]
    assert len(harness.host.times("start", 0)) == 1


@in_virtual_time
async def test_failed_requests_during_network_faults_do_not_end_a_server() -> None:
    harness = await start_fake_fleet(interval_s=1.0, timeout_s=15.0)
    for _ in range(5):
        cut_off(harness, 0)
        for _ in range(14):
            harness.fleet.note_failure(0, 1, NoReply("no connection"))
            await asyncio.sleep(1.0)
        harness.host[0].answers = "yes"
        await harness.wait_until_active()
        harness.fleet.note_tokens(0, 1, 1)

    assert len(harness.host.times("start", 0)) == 1


@in_virtual_time
async def test_server_that_answers_some_requests_is_kept() -> None:
    harness = await start_fake_fleet(engines=2)
    for second in range(500):
        harness.fleet.note_failure(0, 1, "the server answered 500")
        if second % 50 == 0:
            harness.fleet.note_tokens(0, 1, second)
        await asyncio.sleep(1.0)

    assert harness.host.times("stop", 0) == []


@in_virtual_time
async def test_slow_server_gets_a_timeout_longer_than_the_interval() -> None:
    harness = await start_fake_fleet(interval_s=1.0, timeout_s=5.0, misses=2)
    harness.host[0].answers = "slow"
    await asyncio.sleep(300.0)

    assert harness.states() == [ACTIVE, ACTIVE]
    assert harness.list_events("rollout.probe.failed") == []


@in_virtual_time
async def test_burst_of_failed_requests_does_not_end_a_server_with_good_probes() -> None:
    harness = await start_fake_fleet()
    for _ in range(100):
        for _ in range(50):
            harness.fleet.note_failure(0, 1, "connection reset")
        await asyncio.sleep(0.3)
    await asyncio.sleep(100.0)

    assert harness.states() == [ACTIVE, ACTIVE]
    assert len(harness.host.times("start", 0)) == 1
    assert harness.host.faults == []
    # There were 5,000 failed requests. The fleet must not send a probe for each failed request.
    assert len(harness.prober.times(0)) < 60


@in_virtual_time
async def test_reports_about_earlier_epochs_are_ignored() -> None:
    harness = await start_fake_fleet()
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states() == [RECOVERING, ACTIVE])
    for count in range(10):
        harness.fleet.note_failure(0, 1, "connection reset")
        harness.fleet.note_tokens(0, 1, count)
    await harness.wait_until_active()
    harness.fleet.note_failure(0, 1, "connection reset")

    assert harness.states() == [ACTIVE, ACTIVE]


@in_virtual_time
async def test_late_probe_result_of_an_earlier_epoch_is_ignored() -> None:
    harness = await start_fake_fleet(misses=1, timeout_s=15.0)
    count_before = len(harness.prober.times(0))
    hang(harness, 0)
    await harness.wait_until(lambda: len(harness.prober.times(0)) > count_before)
    harness.host.die(0)
    await harness.wait_until(lambda: harness.states() == [RECOVERING, ACTIVE])
    await harness.wait_until_active()
    await asyncio.sleep(300.0)

    assert harness.states() == [ACTIVE, ACTIVE]
    assert len(harness.host.times("start", 0)) == 2


@in_virtual_time
async def test_group_is_suspect_until_all_its_servers_answer() -> None:
    harness = await start_fake_fleet(1, servers=2, are_experts=True)

    def misses() -> list[int]:
        return [server["misses"] for server in harness.fleet.snapshot()["servers"]]

    harness.host[0].answers = "503"
    harness.host[1].answers = "503"
    await harness.wait_until(lambda: misses() == [1, 1])
    harness.host[0].answers = "yes"
    await harness.wait_until(lambda: misses()[0] == 0)
    assert harness.states() == [SUSPECT]
    harness.host[1].answers = "yes"
    await harness.wait_until(lambda: misses() == [0, 0])

    assert harness.states() == [ACTIVE]


@in_virtual_time
async def test_server_behind_a_cut_network_is_not_restarted() -> None:
    harness = await start_fake_fleet()
    cut_off(harness, 0)
    await harness.wait_until(lambda: harness.list_routed_ranks() == [1], within_s=106.0)
    await asyncio.sleep(3600.0)
    assert harness.fleet.snapshot()["servers"][0]["reachable"] is False
    harness.host[0].answers = "yes"
    await harness.wait_until_active()

    assert harness.list_routed_ranks() == [0, 1]
    assert len(harness.host.times("start", 0)) == 1
    assert harness.host.times("stop", 0) == []
    [warning] = harness.list_events("rollout.warning")
    assert warning["message"].startswith(
        "the server of rank 0 works, but the machine of the gateway cannot"
    )


@in_virtual_time
async def test_cut_network_to_all_servers_causes_one_warning_and_no_restart() -> None:
    harness = await start_fake_fleet(engines=8)
    cut_off(harness, *range(8))
    await harness.wait_until(lambda: harness.list_routed_ranks() == [], within_s=106.0)
    await asyncio.sleep(600.0)
    for rank in range(8):
        harness.host[rank].answers = "yes"
    await harness.wait_until_active()

    assert harness.list_routed_ranks() == list(range(8))
    assert [verb for _, verb, _ in harness.host.log] == ["start"] * 8
    assert len(harness.list_events("rollout.warning")) == 1


@in_virtual_time
async def test_snapshot_names_the_unreachable_servers() -> None:
    harness = await start_fake_fleet(engines=1)
    cut_off(harness, 0)
    await harness.wait_until(lambda: harness.list_routed_ranks() == [])

    reason = harness.fleet.snapshot()["reason"]
    assert (
        reason == "the servers of ranks 0 are suspect and cannot be reached (no answer within 15 s)"
    )


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
    harness = await start_fake_fleet(engines=5)
    for rank in range(lost_count):
        harness.host[rank].answers = "hang"
        harness.host[rank].at_home = "lost"
    await asyncio.sleep(200.0)

    assert bool(harness.host.times("stop", 0)) is is_restarted
    assert harness.list_routed_ranks() == list(range(5) if is_restarted else range(lost_count, 5))


@in_virtual_time
async def test_cut_off_server_that_starts_to_hang_is_recovered() -> None:
    harness = await start_fake_fleet()
    cut_off(harness, 0)
    await harness.wait_until(lambda: harness.list_routed_ranks() == [1])
    await asyncio.sleep(60.0)
    harness.host[0].at_home = "hang"
    await harness.wait_until_failed()
    await harness.wait_until_active()

    assert harness.list_routed_ranks() == [0, 1]


@in_virtual_time
async def test_exception_in_a_probe_does_not_end_the_health_checks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await start_fake_fleet()
    working_ask = harness.prober.ask
    monkeypatch.setattr(harness.prober, "ask", _raise_bug)
    await asyncio.sleep(100.0)
    monkeypatch.setattr(harness.prober, "ask", working_ask)
    assert harness.states() == [ACTIVE, ACTIVE]
    hang(harness, 0)
    await harness.wait_until_failed()
    await harness.wait_until_active()
    monkeypatch.setattr(harness.prober, "ask", _raise_bug)
    assert (await harness.fleet.check())["failed"] == []

    assert (
        "Muster could not send a health check to the server of rank 0 (starts of the engine "
        "so far: 1)"
    ) in caplog.text


async def _raise_bug(*_: object) -> str:
    raise RuntimeError("a bug")
