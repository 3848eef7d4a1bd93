"""Another user takes a port that was reserved for a component of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.processes.attempt import SupervisedAttempt
from tasks.processes.component import AttemptPlan, ComponentPlan, RunningComponent
from tasks.processes.ports import PortsReserved
from tasks.processes.supervisor import Supervisor
from tasks.record.outcome import Verdict
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import ReadyProbe
from tests.support.another_user import (
    ForeignServer,
    end_process,
    foreign_server,
    needs_another_user,
    start_as_another_user,
)
from tests.support.host_environment import wait_for, with_absolute_cwd
from tests.support.supervised_components import DEADLINE_S, RUN_ID, ComponentHarness, python, sh

ROOT = Path(__file__).resolve().parents[2]
pytestmark = needs_another_user

#: A program that binds its port when the file `go` exists, and answers every GET with 200.
SERVER = """
import pathlib, socket, sys, time
directory = pathlib.Path(sys.argv[1])
port = int(sys.argv[2])
while not (directory / "go").exists():
    time.sleep(0.01)
server = socket.create_server(("127.0.0.1", port))
while True:
    connection, _ = server.accept()
    connection.recv(65536)
    connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n{}")
    connection.close()
"""
#: A program that searches the names of abstract Unix sockets for reserved port numbers, and prints
#: the numbers as JSON.
READ_REGISTER = """
print(json.dumps(re.findall(r"@muster/port/(\\d+)$", open("/proc/net/unix").read(), re.M)))
"""


@pytest.fixture
def start_stranger(harness: ComponentHarness) -> Iterator[Callable[..., ForeignServer]]:
    """Yield a function that starts a server of another user on a port.

    The servers are stopped at the end of the test.
    """
    with ExitStack() as servers:

        def start(port: int, **disguise: Any) -> ForeignServer:
            server = servers.enter_context(foreign_server(port, **disguise))
            harness.others.add(server.process.pid)
            return server

        yield start


def take_once_spawned(
    harness: ComponentHarness, start_stranger: Callable[..., ForeignServer], port: int
) -> threading.Thread:
    """Start a thread that lets another user listen on the api's port as soon as the api runs.

    The thread then creates the file `go`. The api binds its port only after this file exists.
    """

    def take_port() -> None:
        harness.wait_for_event("component.spawned", "api")
        start_stranger(port)
        (harness.directory / "go").touch()

    thread = threading.Thread(target=take_port)
    thread.start()
    return thread


def test_other_users_cannot_read_which_ports_are_reserved() -> None:
    ports = PortsReserved(f"api.ports.p{number}" for number in range(5))
    process = start_as_another_user(READ_REGISTER)
    assert process.wait(30) == 0

    # Other installations of Muster on this machine may also have reserved ports. So only the ports
    # of this test are compared.
    read_ports = {int(number) for number in json.loads(end_process(process))}

    ports.close()
    assert read_ports & {*ports.numbers.values()} == set()


@pytest.mark.parametrize(
    "ready",
    [None, {"alive_s": 1.0}, {"log": "up"}, {"file": "up"}],
    ids=["none", "alive_s", "log", "file"],
)
def test_component_whose_port_another_user_has_is_not_ready(
    harness: ComponentHarness,
    start_stranger: Callable[..., ForeignServer],
    ready: dict[str, object] | None,
) -> None:
    ports = PortsReserved(["api.port"])
    port = ports.numbers["api.port"]
    probe = ReadyProbe.model_validate({**ready, "within_s": DEADLINE_S}) if ready else None
    api = harness.component(
        "api", sh("until [ -e go ]; do sleep 0.01; done; echo up; touch up; sleep 600")
    )
    trainer = harness.component("trainer", sh("echo started; sleep 600"))
    supervisor = harness.supervise(replace(api, ready=probe), trainer, ports=ports)
    if probe is None:
        # Without a readiness probe, the component is ready as soon as it runs. So a server of
        # another user must take the port before the component starts.
        ports.release("api")
        start_stranger(port)
    else:
        thread = take_once_spawned(harness, start_stranger, port)

    with pytest.raises(RunEnded):
        supervisor.start("api")
        supervisor.start("trainer")

    verdict = harness.end(supervisor)
    if probe is not None:
        thread.join()
    assert_port_conflict(verdict)
    assert harness.list_events("component.spawned", "trainer") == []


@pytest.mark.parametrize(
    "disguise",
    [{"env": {"MUSTER_RUN_ID": RUN_ID}}, {"name": "docker-proxy"}],
    ids=["run id", "container runtime"],
)
def test_disguised_server_of_another_user_does_not_answer_for_a_component(
    harness: ComponentHarness,
    start_stranger: Callable[..., ForeignServer],
    disguise: dict[str, Any],
) -> None:
    ports = PortsReserved(["api.port"])
    port = ports.numbers["api.port"]
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/", within_s=DEADLINE_S)
    supervisor = harness.supervise(harness.component("api", ready=ready), ports=ports)
    thread = take_once_spawned(harness, lambda port: start_stranger(port, **disguise), port)

    with pytest.raises(RunEnded):
        supervisor.start("api")

    verdict = harness.end(supervisor)
    thread.join()
    assert_port_conflict(verdict)
    assert harness.list_events("component.ready") == []


def test_port_that_another_user_takes_later_ends_the_run(
    harness: ComponentHarness, start_stranger: Callable[..., ForeignServer]
) -> None:
    ports = PortsReserved(["api.port"])
    supervisor = harness.start_all(
        harness.component("api"), harness.component("trainer"), ports=ports
    )

    start_stranger(ports.numbers["api.port"])

    assert_port_conflict(harness.wait_for_verdict(supervisor))


def assert_port_conflict(verdict: Verdict) -> None:
    """Check that the attempt failed because another process holds a component's port."""
    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.PORT_CONFLICT
    assert "is already used by" in verdict.failure.message


def supervise_with_moves(
    harness: ComponentHarness,
    ports: PortsReserved,
    list_components: Callable[[ComponentPlan, int], tuple[ComponentPlan, ...]],
) -> Supervisor:
    """Supervise a server `api`, which Muster may start again on another port.

    Args:
        ports: The reserved ports, with the port `api.port`.
        list_components: Function that returns the plans of all components, in the order of their
            start. Its arguments are the plan of `api` and the current port of `api`.
    """

    def plan() -> AttemptPlan:
        port = ports.numbers["api.port"]
        ready = ReadyProbe(http=f"http://127.0.0.1:{port}/", within_s=DEADLINE_S)
        api = harness.component(
            "api", (*python(SERVER), str(harness.directory), str(port)), ready=ready
        )
        return AttemptPlan(
            run_id="run-1",
            number=1,
            cwd=harness.directory,
            components=list_components(api, port),
        )

    def replan(component: str) -> AttemptPlan:
        ports.move(component)
        return plan()

    return harness.supervise(*plan().components, ports=ports, replan=replan)


def test_component_whose_port_was_taken_restarts_with_another_port(
    harness: ComponentHarness, start_stranger: Callable[..., ForeignServer]
) -> None:
    ports = PortsReserved(["api.port"])

    first_port = ports.numbers["api.port"]

    def list_components(api: ComponentPlan, port: int) -> tuple[ComponentPlan, ...]:
        return api, harness.component("trainer", sh(f"echo {port}"), on_exit_zero="complete")

    supervisor = supervise_with_moves(harness, ports, list_components)
    thread = take_once_spawned(harness, start_stranger, first_port)

    supervisor.start("api")
    with suppress(RunEnded):  # The trainer may end before `start` returns.
        supervisor.start("trainer")

    verdict = harness.wait_for_verdict(supervisor)
    thread.join()
    assert verdict.state is RunState.COMPLETED
    assert ports.numbers["api.port"] != first_port
    assert harness.read_log("trainer") == f"{ports.numbers['api.port']}\n"
    assert [event.component for event in harness.list_events("component.moved")] == ["api"]


def test_component_restarts_although_its_port_changes_while_its_log_is_read(
    harness: ComponentHarness,
    start_stranger: Callable[..., ForeignServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = PortsReserved(["api.port"])
    first_port = ports.numbers["api.port"]
    read = SupervisedAttempt._port_conflict_of

    def read_after_move(attempt: SupervisedAttempt, component: RunningComponent) -> str:
        """Search the log for a port conflict, but only after the component got another port."""
        wait_for(lambda: ports.numbers["api.port"] != first_port, "another port", DEADLINE_S)
        return read(attempt, component)

    monkeypatch.setattr(SupervisedAttempt, "_port_conflict_of", read_after_move)

    supervisor = supervise_with_moves(harness, ports, lambda api, port: (api,))
    thread = take_once_spawned(harness, start_stranger, first_port)

    supervisor.start("api")

    thread.join()
    assert [event.component for event in harness.list_events("component.moved")] == ["api"]
    assert harness.list_events("component.ready", "api") != []


def test_port_used_by_an_earlier_component_is_not_replaced(
    harness: ComponentHarness, start_stranger: Callable[..., ForeignServer]
) -> None:
    ports = PortsReserved(["api.port"])

    def list_components(api: ComponentPlan, port: int) -> tuple[ComponentPlan, ...]:
        return harness.component("trainer", sh(f"sleep 600 # {port}")), api

    supervisor = supervise_with_moves(harness, ports, list_components)
    thread = take_once_spawned(harness, start_stranger, ports.numbers["api.port"])

    supervisor.start("trainer")
    with pytest.raises(RunEnded):
        supervisor.start("api")

    verdict = harness.end(supervisor)
    thread.join()
    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.PORT_CONFLICT
    assert "trainer was already started with this port" in verdict.failure.message


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_run_completes_although_another_user_took_a_port(
    tmp_path: Path, start_stranger: Callable[..., ForeignServer]
) -> None:
    directory = tmp_path / "place"
    output = tmp_path / "output.txt"
    directory.mkdir()
    ready = {"http": "http://127.0.0.1:${api.port}/"}
    server = [sys.executable, "-c", SERVER, str(directory), "${api.port}"]
    spec = {
        "name": "taken",
        "workload": "sft",
        "components": {
            "api": {"command": server, "ready": ready},
            "trainer": {"command": ["sh", "-c", "echo ${api.port}"]},
        },
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(with_absolute_cwd(spec), sort_keys=False))
    with output.open("w") as stdout:
        process = subprocess.Popen(
            (sys.executable, "-m", "flows.train", str(tmp_path / "spec.yaml")),
            cwd=ROOT,
            env={**os.environ, "MUSTER_HOME": str(tmp_path / "home")},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
        )
    try:
        [first_port] = wait_for(
            lambda: find_spawned_ports(tmp_path), "the api was spawned", within_s=200
        )
        start_stranger(first_port)
        (directory / "go").touch()

        assert process.wait(100) == 0, output.read_text()
    finally:
        process.kill()
        process.wait(30)

    [record] = (tmp_path / "home").rglob("run.json")
    [attempt] = json.loads(record.read_text())["attempts"]
    [log] = (tmp_path / "home").rglob("trainer.log")
    assert attempt["ports"]["api.port"] != first_port
    assert log.read_text() == f"{attempt['ports']['api.port']}\n"


def find_spawned_ports(directory: Path) -> list[int]:
    """Return the ports of all processes of the component `api`, from the event files of the runs.

    The port is the last argument in the command of the process.
    """
    ports = []
    for events in directory.rglob("events.jsonl"):
        for line in events.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "component.spawned" and event["component"] == "api":
                ports.append(int(event["argv"][-1]))
    return ports
