"""Processes that take the address of an engine before the engine does: nothing is sent to them."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import httpx
import pytest

from tasks.processes.ports import listeners
from tests.integration.test_fleet_process import COMMAND, SERVER, FleetProcess, fleet
from tests.support.attack_programs import FLOODS, OTHER_USER, only_as_root, start_as_another_user
from tests.support.stage import DEADLINE_S, free_port, wait_until

__all__ = ("fleet",)  # a fixture

#: Listens on a port, says so, and prints what it was sent. It answers everything with 200.
IMPOSTOR = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=64) as server:
    print("listens", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(5)
            try:
                if received := connection.recv(65536):
                    print(received, flush=True)
                    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
            except OSError:
                pass
"""
#: An engine that takes its time before it binds its port.
SLOW = ["sh", "-c", f"sleep 2; exec {' '.join(COMMAND)}"]
#: An engine whose server is forked twice and has a session of its own.
DAEMON = ["sh", "-c", f"(setsid {' '.join(COMMAND)} &) ; exec sleep 600"]


def start_of(fleet: FleetProcess, port: int, command: list[str]) -> None:
    plan = fleet.plan(fleet={"engines": 1, "command": command}, ports={"server.0": port})
    fleet.start(plan)


def refused_and_moved(fleet: FleetProcess, impostor: subprocess.Popen[bytes], port: int) -> str:
    """What the impostor was sent, once the engine serves at another port."""
    try:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == b"listens\n"
        start_of(fleet, port, SLOW)

        seen = fleet.until_ready(epoch=2)
    finally:
        impostor.kill()
        assert impostor.stdout is not None
        sent = impostor.stdout.read().decode()
        impostor.wait()
    assert seen["servers"][0]["port"] != port
    return sent


@only_as_root
def test_another_user_who_binds_an_engines_port_first_gets_nothing(fleet: FleetProcess) -> None:
    port = free_port()
    impostor = start_as_another_user(IMPOSTOR, port)

    sent = refused_and_moved(fleet, impostor, port)

    assert sent == ""
    assert f"port {port} is taken by a process of user nobody ({OTHER_USER})" in fleet.log


@pytest.mark.thorough
def test_a_process_of_the_same_user_that_is_not_the_engines_gets_nothing(
    fleet: FleetProcess,
) -> None:
    port = free_port()
    impostor = subprocess.Popen(
        (sys.executable, "-I", "-c", IMPOSTOR, str(port)), stdout=subprocess.PIPE
    )

    sent = refused_and_moved(fleet, impostor, port)

    assert sent == ""
    assert f"port {port} is taken by a process of user" in fleet.log
    assert f"pid {impostor.pid}" in fleet.log


def test_a_server_that_its_engine_has_made_a_daemon_is_the_engines(fleet: FleetProcess) -> None:
    port = free_port()
    start_of(fleet, port, DAEMON)

    seen = fleet.until_ready()

    [server] = seen["servers"]
    [listener] = listeners(port)
    assert (server["port"], server["epoch"]) == (port, 1)
    assert str(SERVER) in listener.command
    answer = fleet.post(f"http://127.0.0.1:{fleet.port}/v1/completions", prompt="x")
    assert json.dumps(answer)


@pytest.mark.thorough
@only_as_root
def test_who_takes_the_port_of_an_engine_that_died_gets_no_request(fleet: FleetProcess) -> None:
    port = free_port()
    start_of(fleet, port, SLOW)
    fleet.until_ready()
    [engine] = listeners(port)
    impostor = start_as_another_user(
        "import errno\n"
        "while True:\n"
        "    try:\n"
        "        socket.create_server(('127.0.0.1', int(sys.argv[1]))).close()\n"
        "        break\n"
        "    except OSError:\n"
        "        pass\n" + IMPOSTOR,
        port,
    )

    subprocess.run(("kill", "-9", str(engine.pid)), check=True)

    sent = refused_and_moved_after_death(fleet, impostor)
    assert sent == "listens\n"
    assert fleet.snapshot()["servers"][0]["port"] != port


@pytest.mark.thorough
@only_as_root
def test_silent_connections_of_another_user_end_no_engine(fleet: FleetProcess) -> None:
    """The fleet may open few files: twenty thousand connections fill any table."""
    port = free_port()
    plan = fleet.plan(fleet={"engines": 1}, ports={"server.0": port})
    fleet.start(plan)
    assert fleet.process is not None
    resource.prlimit(fleet.process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
    fleet.until_ready()
    flood = start_as_another_user(FLOODS, fleet.port, 1500, 0)
    try:
        assert flood.stdout is not None
        assert int(flood.stdout.readline()) == 1500
        asked = questions_to(port)
        wait_until(lambda: questions_to(port) >= asked + 12, "the engine is asked all the same")

        seen = fleet.snapshot()
        answer = fleet.post(f"http://127.0.0.1:{fleet.port}/v1/completions", prompt="x")
    finally:
        flood.kill()
        flood.communicate()
    assert [(one["epoch"], one["recoveries"]) for one in seen["engines"]] == [(1, 0)]
    assert answer["choices"]


def questions_to(port: int) -> int:
    """How many requests the engine itself has counted."""
    url = f"http://127.0.0.1:{port}/counts"
    return int(httpx.get(url, trust_env=False, timeout=DEADLINE_S).json()["total"])


def refused_and_moved_after_death(fleet: FleetProcess, impostor: subprocess.Popen[bytes]) -> str:
    try:
        fleet.until_ready(epoch=2)
    finally:
        impostor.kill()
        assert impostor.stdout is not None
        sent = impostor.stdout.read().decode()
        impostor.wait()
    return sent
