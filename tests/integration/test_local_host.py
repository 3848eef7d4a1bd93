"""Servers of a fleet as processes of this machine, below real guardians."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tasks.processes import tree
from tasks.processes.guarded import GuardedProcess
from tasks.processes.guards import Guards
from tasks.processes.ports import has_listener
from tasks.processes.registry import ProcessEntry
from tasks.record.disk import DiskThread
from tasks.rollout.backends import Ask
from tasks.rollout.local_host import LocalHost
from tasks.rollout.probing import Death, StartFailed
from tasks.rollout.topology import ServerSlot
from tests.support.fleet_fakes import find_server_pid, make_fleet_plan
from tests.support.supervised_components import (
    DEADLINE_S,
    RUN_ID,
    ComponentHarness,
    free_port,
    is_alive,
)

pytestmark = pytest.mark.asyncio

#: A program that answers GET /health with 200, and every other GET with 503 and a reason.
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()
        self.wfile.write(b"the engine is dead")
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("up", flush=True)
server.serve_forever()
"""
HEALTH = Ask(method="GET", path="/health")
#: A shell script that ignores SIGTERM.
STUBBORN = "trap '' TERM; echo up; while :; do sleep 0.05; done"


class Hosts:
    """Makes `LocalHost` objects, which run servers, and collects the reports about dead servers.

    The hosts write their logs to the test's directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.deaths: list[Death] = []
        self.created_hosts: list[LocalHost] = []
        self.disk = DiskThread("disk")

    def __call__(
        self, *, grace_s: float = 0.3, register_at: Path | None = None, **fleet: Any
    ) -> LocalHost:
        """Return a new host, which runs servers as processes of this machine.

        Args:
            grace_s: Grace period of the servers, in seconds.
            register_at: Directory of the run in the process registry. None for a host that does not
                register its servers.
            **fleet: Further settings of the inference servers in the run spec.
        """
        plan = make_fleet_plan(
            self.directory, run_id=RUN_ID, grace_s=grace_s, fleet=fleet, register_at=register_at
        )
        env = {"PATH": os.environ["PATH"], "FROM": "the run"}
        host = LocalHost(plan, env, self.disk)
        host.on_death = self.deaths.append
        self.created_hosts.append(host)
        return host

    def find_log(self, rank: int) -> Path:
        return self.directory / f"rollout-r{rank}.log"

    def has_printed(self, rank: int, text: str) -> bool:
        """Return True if the log of the server contains the text."""
        log = self.find_log(rank)
        return log.exists() and text in log.read_text()

    async def until_deaths(self, count: int) -> None:
        await until(lambda: len(self.deaths) == count, f"{count} deaths are reported")


@pytest_asyncio.fixture
async def hosts(tmp_path: Path, harness: ComponentHarness) -> AsyncIterator[Hosts]:
    """Yield an object that makes `LocalHost` objects, which run servers.

    No process of a server may remain after the test.
    """
    tree.become_subreaper()
    hosts = Hosts(tmp_path)
    yield hosts
    for host in hosts.created_hosts:
        await host.close()
    assert harness.list_survivors() == {}


def build_slot(rank: int = 0, *argv: str, port: int | None = None, **env: str) -> ServerSlot:
    """Return the plan of a server with the command `argv`.

    Without a command, the server runs `sleep 600`.
    """
    return ServerSlot(
        ranks=(rank,),
        engine=rank,
        index=0,
        node=0,
        bundles=(),
        weight_ranks=(rank,),
        is_entrypoint=True,
        host="127.0.0.1",
        port=port,
        argv=argv or ("sleep", "600"),
        env=env,
    )


def build_http_slot(port: int, rank: int = 0) -> ServerSlot:
    """Return the plan of a server that runs the program SERVER on the port."""
    return build_slot(rank, sys.executable, "-I", "-S", "-c", SERVER, str(port), port=port)


async def until(is_true: Callable[[], object], description: str) -> None:
    """Wait until the function returns a true value; raise TimeoutError at the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_true():
            await asyncio.sleep(0.01)
    assert is_true(), description


async def test_server_gets_the_environments_of_the_run_and_of_its_slot(hosts: Hosts) -> None:
    host = hosts()
    slot = build_slot(3, "sh", "-c", "echo $FROM $TO; exec sleep 600", TO="the slot")
    await host.start(slot, 1)
    assert find_server_pid(host, 3)
    await until(
        lambda: hosts.has_printed(3, "the run the slot"), "the server has printed its variables"
    )
    assert await host.stop([3], grace_s=1.0) == ()
    assert not find_server_pid(host, 3)

    assert hosts.deaths == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        # The server exits with an error code, or is killed by SIGKILL.
        ("echo no memory; exit 3", "exit code 3"),
        ("echo no memory; kill -9 $$", "killed by SIGKILL"),
        # A server must never exit by itself, so exit code 0 is also a death.
        ("echo no memory", "exit code 0"),
    ],
)
async def test_reported_death_has_the_epoch_and_the_last_output(
    hosts: Hosts, script: str, why: str
) -> None:
    host = hosts()
    await host.start(build_slot(1, "sh", "-c", script), 7)
    await hosts.until_deaths(1)

    [death] = hosts.deaths
    assert (death.rank, death.epoch, death.why) == (1, 7, why)
    assert death.log_end == "no memory\n"


async def test_server_that_exits_during_its_start_is_reported_before_the_first_health_check(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_command = Guards.running

    @asynccontextmanager
    async def run_until_exit(*args: Any) -> AsyncIterator[GuardedProcess]:
        async with run_command(*args) as process:
            await process.empty
            yield process

    monkeypatch.setattr(Guards, "running", run_until_exit)

    # The first health check begins when `start` returns.
    await hosts().start(build_slot(1, "sh", "-c", "echo no memory; exit 3"), 1)

    [death] = hosts.deaths
    assert (death.why, death.log_end) == ("exit code 3", "no memory\n")


async def test_last_output_contains_no_output_of_an_earlier_epoch(hosts: Hosts) -> None:
    host = hosts()
    for epoch, word in enumerate(("first", "second"), start=1):
        await host.start(build_slot(0, "sh", "-c", f"echo {word}; exit 1"), epoch)
        await hosts.until_deaths(epoch)
        await host.stop([0], grace_s=0.0)

    words = [death.log_end for death in hosts.deaths]
    assert words == ["first\n", "second\n"]


async def test_last_output_of_a_server_is_read_after_its_log_was_moved(hosts: Hosts) -> None:
    host = hosts()
    log = hosts.find_log(0)
    script = f"echo before; mv {log} {log}.1; echo after; exit 1"

    await host.start(build_slot(0, "sh", "-c", script), 1)
    await hosts.until_deaths(1)

    [death] = hosts.deaths
    assert death.log_end == "before\nafter\n"


async def test_last_output_of_a_server_is_read_after_its_log_was_truncated(hosts: Hosts) -> None:
    host = hosts()
    log = hosts.find_log(0)
    log.write_text("a long line of an earlier server\n")
    script = f"echo before; : > {log}; echo after; exit 1"

    await host.start(build_slot(0, "sh", "-c", script), 1)
    await hosts.until_deaths(1)

    [death] = hosts.deaths
    assert death.log_end == "after\n"


async def test_log_of_a_running_server_is_kept_below_its_bound(hosts: Hosts) -> None:
    host = hosts(log_max_bytes=1 << 20)
    log = hosts.find_log(0)
    program = (
        "import time\n"
        "for number in range(100_000): print(f'line {number:08d}', 'x' * 40)\n"
        "print('all written', flush=True)\n"
        "time.sleep(600)\n"
    )

    await host.start(build_slot(0, sys.executable, "-I", "-S", "-c", program), 1)
    await until(lambda: hosts.has_printed(0, "all written"), "all lines are written")

    await until(lambda: log.stat().st_blocks * 512 < 1.1 * (1 << 20), "the log is bounded")
    content = log.read_bytes()
    assert content.startswith(b"line 00000000 ")
    assert b"bytes of this log were left out" in content
    assert content.endswith(b"all written\n")


async def test_server_whose_port_is_taken_dies_of_a_port_conflict(hosts: Hosts) -> None:
    host = hosts()
    port = free_port()
    await host.start(build_http_slot(port, 0), 1)
    await until(lambda: has_listener(port), "the first server listens")
    assert await host.ports_taken([build_http_slot(port, 0)]) == frozenset()
    assert await host.ports_taken([build_http_slot(port, 1)]) == {1}
    await host.start(build_http_slot(port, 1), 1)
    await hosts.until_deaths(1)

    [death] = hosts.deaths
    assert death.rank == 1 and "in use" in death.log_end


async def test_missing_program_is_named_and_no_process_remains(hosts: Hosts) -> None:
    host = hosts()
    with pytest.raises(StartFailed, match="no-such-program: No such file"):
        await host.start(build_slot(0, "no-such-program"), 1)
    assert not find_server_pid(host, 0)
    await host.start(build_slot(0), 2)
    assert find_server_pid(host, 0)

    assert hosts.deaths == []


async def test_server_that_cannot_be_registered_does_not_start(hosts: Hosts) -> None:
    host = hosts(register_at=hosts.directory / "not-there")
    with pytest.raises(StartFailed, match="No such file"):
        await host.start(build_slot(0, "sh", "-c", "touch ran; sleep 600"), 1)

    assert not (hosts.directory / "ran").exists()


async def test_server_is_registered_until_its_last_process_has_ended(hosts: Hosts) -> None:
    entry = hosts.directory / ProcessEntry.file_of("rollout.r4")
    host = hosts(register_at=hosts.directory)

    await host.start(build_slot(4), 1)
    assert json.loads(entry.read_text())["process"]["pid"] == find_server_pid(host, 4)
    await host.stop([4], grace_s=1.0)
    await until(lambda: not entry.exists(), "the server's entry in the registry is gone")


async def test_stop_ends_all_servers_and_kills_servers_that_ignore_sigterm(hosts: Hosts) -> None:
    host = hosts(grace_s=60.0)
    slots = [build_slot(rank, "sh", "-c", STUBBORN) for rank in range(3)]
    for slot in slots:
        await host.start(slot, 1)
    pids = [find_server_pid(host, rank) for rank in range(3)]
    # Each script prints "up" after it has begun to ignore SIGTERM.
    await until(
        lambda: all(hosts.has_printed(rank, "up") for rank in range(3)),
        "all servers ignore SIGTERM",
    )
    assert await host.stop(range(3), grace_s=0.2) == ()
    assert not any(is_alive(pid) for pid in pids if pid)

    assert hosts.deaths == []


async def test_server_with_a_killed_guardian_ends_and_counts_as_dead(hosts: Hosts) -> None:
    host = hosts()
    await host.start(build_slot(0, "sh", "-c", "sleep 600 & sleep 600"), 1)
    pid = find_server_pid(host, 0)
    assert pid is not None
    os.kill(tree.read_parent(pid), signal.SIGKILL)
    await hosts.until_deaths(1)
    assert await host.stop([0], grace_s=0.0) == ()
    assert not is_alive(pid)

    [death] = hosts.deaths
    assert "guardian" in death.why


async def test_probe_returns_the_answer_of_the_server(hosts: Hosts) -> None:
    host = hosts()
    port = free_port()
    assert await host.ask(0, HEALTH, 1.0) == "the server of rank 0 has no URL for health checks"
    await host.start(build_http_slot(port), 1)
    await until(lambda: has_listener(port), "the server listens")
    assert await host.ask(0, HEALTH, DEADLINE_S) is None
    why = await host.ask(0, Ask(method="GET", path="/generate"), DEADLINE_S)
    assert why == "GET /generate: 503 the engine is dead"
    pid = find_server_pid(host, 0)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert await host.ask(0, HEALTH, 0.05) == "GET /health: no answer within 0.05 s"
