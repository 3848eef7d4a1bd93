"""Servers of a fleet as processes of this machine: real guardians, real deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tasks.processes import tree
from tasks.processes.ports import is_listened
from tasks.processes.registry import RegisterEntry
from tasks.record.disk import DiskThread
from tasks.rollout.backends import Ask
from tasks.rollout.local_host import LocalHost
from tasks.rollout.probing import Death, StartFailed
from tasks.rollout.topology import ServerSlot
from tests.support.fleet_fakes import pid_of, plan_in
from tests.support.stage import DEADLINE_S, RUN_ID, Stage, free_port, is_alive

pytestmark = pytest.mark.asyncio

#: Answers 200 on /health and 503 with a reason on anything else, until it is told to end.
SERVER = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 503); self.end_headers()
        self.wfile.write(b"the engine is dead")
    def log_message(self, *a): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H)
print("up", flush=True)
server.serve_forever()
"""
HEALTH = Ask(method="GET", path="/health")
STUBBORN = "trap '' TERM; echo up; while :; do sleep 0.05; done"


class Hosts:
    """Makes hosts in a directory of the test's own, and hears of their servers' deaths."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.deaths: list[Death] = []
        self.made: list[LocalHost] = []
        self.disk = DiskThread("disk")

    def __call__(self, *, grace_s: float = 0.3, register_at: Path | None = None) -> LocalHost:
        plan = plan_in(self.directory, run_id=RUN_ID, grace_s=grace_s, register_at=register_at)
        env = {"PATH": os.environ["PATH"], "FROM": "the run"}
        host = LocalHost(plan, env, self.disk)
        host.on_death = self.deaths.append
        self.made.append(host)
        return host

    def log_of(self, rank: int) -> Path:
        return self.directory / f"rollout-r{rank}.log"

    def said(self, rank: int, text: str) -> bool:
        log = self.log_of(rank)
        return log.exists() and text in log.read_text()

    async def until_deaths(self, count: int) -> None:
        await until(lambda: len(self.deaths) == count, f"death {count} is told")


@pytest_asyncio.fixture
async def hosts(tmp_path: Path, stage: Stage) -> AsyncIterator[Hosts]:
    tree.become_subreaper()
    hosts = Hosts(tmp_path)
    yield hosts
    for host in hosts.made:
        await host.close()
    assert stage.left() == {}


def slot_of(rank: int = 0, *argv: str, port: int | None = None, **env: str) -> ServerSlot:
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


def server_on(port: int, rank: int = 0) -> ServerSlot:
    return slot_of(rank, sys.executable, "-I", "-S", "-c", SERVER, str(port), port=port)


async def until(is_so: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():
            await asyncio.sleep(0.01)
    assert is_so(), what


async def test_server_runs_its_slots_program_with_both_environments(hosts: Hosts) -> None:
    host = hosts()
    slot = slot_of(3, "sh", "-c", "echo $FROM $TO; exec sleep 600", TO="the slot")
    await host.start(slot, 1)
    assert pid_of(host, 3)
    await until(lambda: hosts.said(3, "the run the slot"), "it has said")
    assert await host.stop([3], grace_s=1.0) == ()
    assert not pid_of(host, 3)

    assert hosts.deaths == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        # a crash, and what SIGKILL leaves
        ("echo no memory; exit 3", "exit code 3"),
        ("echo no memory; kill -9 $$", "killed by SIGKILL"),
        # a server never leaves in good order by itself
        ("echo no memory", "exit code 0"),
    ],
)
async def test_death_has_its_epoch_and_last_words(hosts: Hosts, script: str, why: str) -> None:
    host = hosts()
    await host.start(slot_of(1, "sh", "-c", script), 7)
    await hosts.until_deaths(1)

    [death] = hosts.deaths
    assert (death.rank, death.epoch, death.why) == (1, 7, why)
    assert death.last_words == "no memory\n"


async def test_last_words_are_those_of_this_incarnation_only(hosts: Hosts) -> None:
    host = hosts()
    for epoch, word in enumerate(("first", "second"), start=1):
        await host.start(slot_of(0, "sh", "-c", f"echo {word}; exit 1"), epoch)
        await hosts.until_deaths(epoch)
        await host.stop([0], grace_s=0.0)

    words = [death.last_words for death in hosts.deaths]
    assert words == ["first\n", "second\n"]


async def test_server_whose_port_is_taken_dies_of_a_port_conflict(hosts: Hosts) -> None:
    host = hosts()
    port = free_port()
    await host.start(server_on(port, 0), 1)
    await until(lambda: is_listened(port), "it listens")
    assert await host.ports_taken([server_on(port, 0)]) == frozenset()
    assert await host.ports_taken([server_on(port, 1)]) == {1}
    await host.start(server_on(port, 1), 1)
    await hosts.until_deaths(1)

    [death] = hosts.deaths
    assert death.rank == 1 and "in use" in death.last_words


async def test_program_that_is_not_there_is_named_and_nothing_is_left(hosts: Hosts) -> None:
    host = hosts()
    with pytest.raises(StartFailed, match="no-such-program: No such file"):
        await host.start(slot_of(0, "no-such-program"), 1)
    assert not pid_of(host, 0)
    await host.start(slot_of(0), 2)
    assert pid_of(host, 0)

    assert hosts.deaths == []


async def test_server_that_cannot_be_registered_does_not_start(hosts: Hosts) -> None:
    host = hosts(register_at=hosts.directory / "not-there")
    with pytest.raises(StartFailed, match="No such file"):
        await host.start(slot_of(0, "sh", "-c", "touch ran; sleep 600"), 1)

    assert not (hosts.directory / "ran").exists()


async def test_server_is_registered_until_nothing_of_it_is_left(hosts: Hosts) -> None:
    entry = hosts.directory / RegisterEntry.file_of("rollout.r4")
    host = hosts(register_at=hosts.directory)

    await host.start(slot_of(4), 1)
    assert json.loads(entry.read_text())["process"]["pid"] == pid_of(host, 4)
    await host.stop([4], grace_s=1.0)
    await until(lambda: not entry.exists(), "its entry is gone")


async def test_stop_ends_all_side_by_side_and_kills_what_ignores_it(hosts: Hosts) -> None:
    host = hosts(grace_s=60.0)
    slots = [slot_of(rank, "sh", "-c", STUBBORN) for rank in range(3)]
    for slot in slots:
        await host.start(slot, 1)
    pids = [pid_of(host, rank) for rank in range(3)]
    # Said once the signal is ignored.
    await until(lambda: all(hosts.said(rank, "up") for rank in range(3)), "they are deaf")
    assert await host.stop(range(3), grace_s=0.2) == ()
    assert not any(is_alive(pid) for pid in pids if pid)

    assert hosts.deaths == []


async def test_server_with_a_killed_guardian_is_a_death_and_ends(hosts: Hosts) -> None:
    host = hosts()
    await host.start(slot_of(0, "sh", "-c", "sleep 600 & sleep 600"), 1)
    pid = pid_of(host, 0)
    assert pid is not None
    os.kill(tree.parent_of(pid), signal.SIGKILL)
    await hosts.until_deaths(1)
    assert await host.stop([0], grace_s=0.0) == ()
    assert not is_alive(pid)

    [death] = hosts.deaths
    assert "guardian" in death.why


async def test_a_question_is_answered_by_the_server_itself(hosts: Hosts) -> None:
    host = hosts()
    port = free_port()
    assert await host.ask(0, HEALTH, 1.0) == "rank 0 has no address to be asked at"
    await host.start(server_on(port), 1)
    await until(lambda: is_listened(port), "it listens")
    assert await host.ask(0, HEALTH, DEADLINE_S) is None
    why = await host.ask(0, Ask(method="GET", path="/generate"), DEADLINE_S)
    assert why == "GET /generate: 503 the engine is dead"
    pid = pid_of(host, 0)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert await host.ask(0, HEALTH, 0.05) == "GET /health: no answer within 0.05 s"
