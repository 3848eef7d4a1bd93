"""Processes that bind the address of an engine before the engine does receive no data."""

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
from tests.support.supervised_components import DEADLINE_S, free_port, wait_until

# The tests of this file use the pytest fixture `fleet`, so the file must import the fixture.
__all__ = ("fleet",)

#: A program that listens on a port, prints "listens", then prints all data that it receives.
#:
#: The program answers every request with status 200.
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
#: Command of an engine that waits two seconds before it binds its port.
SLOW = ["sh", "-c", f"sleep 2; exec {' '.join(COMMAND)}"]
#: Command of an engine whose server is a daemon: forked twice, in its own session.
DAEMON = ["sh", "-c", f"(setsid {' '.join(COMMAND)} &) ; exec sleep 600"]


def start_fleet(fleet: FleetProcess, port: int, command: list[str]) -> None:
    """Start a fleet with one engine, whose server gets the given port."""
    plan = fleet.plan(fleet={"engines": 1, "command": command}, ports={"server.0": port})
    fleet.start(plan)


def start_fleet_despite_impostor(
    fleet: FleetProcess, impostor: subprocess.Popen[bytes], port: int
) -> str:
    """Start a fleet whose engine finds its port in use; return the data that the impostor received.

    The impostor is a process of the test that listens on the engine's planned port. The engine must
    use another port.
    """
    try:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == b"listens\n"
        start_fleet(fleet, port, SLOW)

        snapshot = fleet.until_ready(epoch=2)
    finally:
        impostor.kill()
        assert impostor.stdout is not None
        sent = impostor.stdout.read().decode()
        impostor.wait()
    assert snapshot["servers"][0]["port"] != port
    return sent


@only_as_root
def test_another_user_on_the_port_of_an_engine_gets_no_request(fleet: FleetProcess) -> None:
    port = free_port()
    impostor = start_as_another_user(IMPOSTOR, port)

    sent = start_fleet_despite_impostor(fleet, impostor, port)

    assert sent == ""
    assert f"port {port} is taken by a process of user nobody ({OTHER_USER})" in fleet.log


@pytest.mark.thorough
def test_process_of_the_same_user_on_the_port_of_an_engine_gets_no_request(
    fleet: FleetProcess,
) -> None:
    port = free_port()
    impostor = subprocess.Popen(
        (sys.executable, "-I", "-c", IMPOSTOR, str(port)), stdout=subprocess.PIPE
    )

    sent = start_fleet_despite_impostor(fleet, impostor, port)

    assert sent == ""
    assert f"port {port} is taken by a process of user" in fleet.log
    assert f"pid {impostor.pid}" in fleet.log


def test_daemon_server_of_an_engine_is_accepted_as_the_engine(fleet: FleetProcess) -> None:
    port = free_port()
    start_fleet(fleet, port, DAEMON)

    snapshot = fleet.until_ready()

    [server] = snapshot["servers"]
    [listener] = listeners(port)
    assert (server["port"], server["epoch"]) == (port, 1)
    assert str(SERVER) in listener.command
    answer = fleet.post(f"http://127.0.0.1:{fleet.port}/v1/completions", prompt="x")
    assert json.dumps(answer)


@pytest.mark.thorough
@only_as_root
def test_another_user_on_the_port_of_a_dead_engine_gets_no_request(fleet: FleetProcess) -> None:
    port = free_port()
    start_fleet(fleet, port, SLOW)
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

    sent = wait_for_new_engine(fleet, impostor)
    assert sent == "listens\n"
    assert fleet.snapshot()["servers"][0]["port"] != port


@pytest.mark.thorough
@only_as_root
def test_silent_connections_of_another_user_end_no_engine(fleet: FleetProcess) -> None:
    """Another user opens 1,500 connections; the fleet process may have only 1,024 open files."""
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
        requests_before = count_requests(port)
        wait_until(
            lambda: count_requests(port) >= requests_before + 12,
            "the engine still receives requests",
        )

        snapshot = fleet.snapshot()
        answer = fleet.post(f"http://127.0.0.1:{fleet.port}/v1/completions", prompt="x")
    finally:
        flood.kill()
        flood.communicate()
    assert [(engine["epoch"], engine["recoveries"]) for engine in snapshot["engines"]] == [(1, 0)]
    assert answer["choices"]


def count_requests(port: int) -> int:
    """Return the number of requests that the engine's server has counted so far."""
    url = f"http://127.0.0.1:{port}/counts"
    return int(httpx.get(url, trust_env=False, timeout=DEADLINE_S).json()["total"])


def wait_for_new_engine(fleet: FleetProcess, impostor: subprocess.Popen[bytes]) -> str:
    """Wait until the engine was restarted; return the data that the impostor printed.

    The impostor is a process of the test that listens on the engine's previous port.
    """
    try:
        fleet.until_ready(epoch=2)
    finally:
        impostor.kill()
        assert impostor.stdout is not None
        sent = impostor.stdout.read().decode()
        impostor.wait()
    return sent
