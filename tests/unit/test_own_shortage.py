"""Tests that no component fails because Muster itself lacks resources, such as open files."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.processes.probes import ComponentProbe, HttpProbe, LogProbe, TcpProbe, make_client
from tasks.processes.shortage import NotChecked
from tasks.processes.sockets import SocketTable, listening_inodes
from tasks.record.log_file import HeldLog
from tasks.record.states import GroupState
from tasks.rollout.admission import user_of_connection
from tasks.rollout.backends import Ask
from tasks.rollout.probing import HttpProber, NoReply, Reply
from tasks.rollout.sync import InFlight
from tests.support.fleet_clock import run
from tests.support.fleet_fakes import FleetHarness, make_topology
from tests.support.open_files import full_table_of_files

SHORTAGE = NotChecked("this machine could not send the request: [Errno 24] Too many open files")


@pytest.mark.parametrize("kind", ["http", "tcp", "log"])
def test_probe_without_free_files_is_not_a_failure_of_its_component(
    kind: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("here\n")

    async def ask(server: socket.socket) -> tuple[str | None, object]:
        host, port = server.getsockname()
        client = make_client()
        probe: ComponentProbe = {
            "http": lambda: HttpProbe(f"http://{host}:{port}/", client),
            "tcp": lambda: TcpProbe(host, port),
            "log": lambda: LogProbe(HeldLog(log), "here"),
        }[kind]()
        with full_table_of_files():
            answer = await probe.ask(5.0)
            glance = probe.glance()
        await client.aclose()
        return answer, glance

    with socket.create_server(("127.0.0.1", 0)) as server:
        answer, _ = asyncio.run(ask(server))

    assert isinstance(answer, NotChecked), answer


def test_engine_is_not_silent_if_muster_cannot_send_requests() -> None:
    async def ask(server: socket.socket) -> tuple[str | None, Reply]:
        url = "http://{}:{}".format(*server.getsockname())
        prober = HttpProber()
        question = Ask(method="GET", path="/health")
        with full_table_of_files():
            answer = await prober.ask(url, question, 5.0)
            reply = await prober.call(url, question, 0.1)
        return answer, reply

    with socket.create_server(("127.0.0.1", 0)) as server:
        answer, reply = asyncio.run(ask(server))

    assert isinstance(answer, NotChecked) and isinstance(reply.body, NotChecked)
    assert not isinstance(answer, NoReply)


def test_listeners_of_a_port_are_unknown_without_free_files() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        full_table_of_files(),
        pytest.raises(OSError, match="Too many open files"),
    ):
        listening_inodes(server.getsockname()[1])


def test_open_socket_table_finds_listeners_without_free_files() -> None:
    table = SocketTable()
    table.open()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, full_table_of_files():
            listeners = table.listeners(port)
            user = user_of_connection(table, client.getsockname(), ("127.0.0.1", port))
    table.close()

    assert len(listeners) == 1
    assert {user} == set(listeners.values())


def test_listener_on_the_port_of_a_client_does_not_give_the_user() -> None:
    table = SocketTable()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        assert user_of_connection(table, ("127.0.0.1", port), ("127.0.0.1", 9)) is None
    table.close()


def played(story: Callable[[FleetHarness], object], **settings: object) -> FleetHarness:
    """Run a fleet of two engines in virtual time, and return the simulated environment.

    Args:
        story: Function that causes the events of the test. Its argument is the environment.
        settings: Settings of the environment.
    """
    stages: list[FleetHarness] = []

    async def play() -> None:
        harness = FleetHarness(make_topology(2), **settings)  # type: ignore[arg-type]
        stages.append(harness)
        await harness.fleet.start()
        answer = story(harness)
        if asyncio.iscoroutine(answer):
            await answer
        await harness.fleet.stop()

    run(play())
    return stages[0]


def test_engines_stay_active_without_recoveries_during_a_shortage() -> None:
    states: list[list[GroupState]] = []

    async def story(harness: FleetHarness) -> None:
        harness.prober.shortage = SHORTAGE
        await asyncio.sleep(600)
        states.append([group.state for group in harness.fleet.registry.view.groups])
        answer = await harness.fleet.check()
        assert answer["failed"] == []
        harness.prober.shortage = None
        await asyncio.sleep(120)

    harness = played(story, interval_s=10.0, timeout_s=5.0, misses=3, budget=1)

    assert states == [[GroupState.ACTIVE] * 2]
    assert [group.recoveries for group in harness.fleet.registry.view.groups] == [0, 0]
    warnings = [
        fields["message"] for _, event, fields in harness.events if event == "rollout.warning"
    ]
    assert any("Too many open files" in message for message in warnings)


def test_recovery_without_free_files_waits() -> None:
    async def story(harness: FleetHarness) -> None:
        harness.host[0].shortages = 30
        harness.host.die(0, "killed by SIGKILL")
        await asyncio.sleep(120)

    harness = played(story, budget=1)

    # The first 30 starts failed, because Muster had no free file descriptor. These failed starts do
    # not count as recoveries of the engine. Only the next start counts, which succeeded.
    assert harness.fleet.registry.view.groups[0].recoveries == 1
    outcomes = [
        fields["outcome"]
        for _, event, fields in harness.events
        if event == "rollout.recovery.ended"
    ]
    assert outcomes == ["recovered"]


def test_engine_is_stale_but_not_ended_if_muster_cannot_send_weights() -> None:
    results: list[object] = []

    async def story(harness: FleetHarness) -> None:
        sync = await harness.fleet.begin_sync(600.0, InFlight.WAIT)
        harness.prober.shortage = SHORTAGE
        ask = Ask(method="POST", path="/update_weights", body={})
        answers = await harness.fleet.syncs.broadcast(sync["sync"], ask, 5.0)
        harness.prober.shortage = None
        answer = await harness.fleet.syncs.commit(sync["sync"], 1, {0: 1, 1: 1})
        results.extend([answers["answers"][0]["status"], answer["serving"], answer["stale"]])
        results.append([group.recoveries for group in harness.fleet.registry.view.groups])

    played(story)

    assert results == [None, [], [0, 1], [0, 0]]
