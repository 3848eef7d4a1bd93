"""The gate's lease among real processes on a real Prefect server: never two at once, whatever is
killed, suspended or ended.

How many write while one has the lease is read from a journal that all append to.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.support.gates import Gates, Nursery, overlaps
from tests.support.ground import Server, until
from tests.support.prefect_api import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: So long that a handover which waits for it fails its test.
NEVER = {"hold_s": 600.0, "expire_s": 900.0}
SOON = {"hold_s": 1.0, "expire_s": 3.0}


@pytest.fixture(scope="module")
def api(prefect_url: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


@pytest.fixture(scope="module")
def nursery(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with closing(Nursery(api, tmp_path_factory.mktemp("gates") / "log")) as nursery:
        yield nursery


@pytest.fixture
def gates(nursery: Nursery, tmp_path: Path) -> Iterator[Gates]:
    with Gates.of(tmp_path, nursery) as gates:
        yield gates


def leases(api: str) -> list[Any]:
    found: list[Any] = ask("POST", f"{api}/variables/filter", {})
    return [one["value"] for one in found if one["name"].startswith("muster")]


def has_ended(pid: int) -> bool:
    """Whether it lives no more; its parent may not have noticed."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_killed_gate_is_followed_at_once_on_its_host(gates: Gates) -> None:
    for _ in range(3):
        gates.start(**NEVER)

    for _ in range(5):
        victim = gates.holder()
        os.kill(victim, signal.SIGKILL)
        gates.until_decided_without(victim)
        gates.start(**NEVER)

    assert overlaps(gates.lines()) == []


@pytest.mark.thorough
def test_killed_gate_is_followed_by_another_hosts(gates: Gates) -> None:
    first = gates.start("here", **SOON)
    gates.until_decided_without()
    second = gates.start("there", **SOON)
    gates.until_decided_without(first)

    victim = gates.holder()
    os.kill(victim, signal.SIGKILL)
    gates.until_decided_without(victim)

    assert overlaps(gates.lines()) == []
    assert {pid for pid, _taking, _what in gates.lines()} == {first, second}


@pytest.mark.thorough
@pytest.mark.parametrize("host", ["there", "here"])
def test_suspended_gate_writes_nothing_once_another_may_decide(gates: Gates, host: str) -> None:
    victim = gates.start("here", **SOON, writes=1000)
    os.kill(gates.holder(), signal.SIGSTOP)
    written = len(gates.lines())
    gates.start(host, **SOON)

    gates.until_decided_without(victim)
    os.kill(victim, signal.SIGCONT)
    until(lambda: (victim, "lost") in [(p, w) for p, _t, w in gates.lines()[written:]], "lost")

    assert overlaps(gates.lines()) == []


@pytest.mark.thorough
def test_gate_that_is_ended_gives_it_back(gates: Gates, api: str) -> None:
    first = gates.start("here", **NEVER, writes=1000, pause_s=0.1)
    assert gates.holder() == first
    held = leases(api)

    os.kill(first, signal.SIGTERM)
    until(lambda: has_ended(first), "the gate has ended")

    assert [lease["pid"] for lease in held] == [first]
    assert leases(api) == []


@pytest.mark.thorough
def test_server_may_be_killed_and_come_back(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    server.start()
    try:
        with (
            closing(Nursery(server.api, tmp_path / "log")) as nursery,
            Gates.of(tmp_path, nursery) as gates,
        ):
            pids = [gates.start(host, **SOON) for host in ("here", "here", "there")]
            for pid in pids:
                gates.until_decided_without(*(other for other in pids if other != pid))

            gates.holder()
            server.kill()
            server.start()
            for pid in pids:
                gates.until_decided_without(*(other for other in pids if other != pid))

            assert overlaps(gates.lines()) == []
    finally:
        server.kill()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_never_two_at_once_among_gates_that_are_killed_and_suspended(gates: Gates) -> None:
    chance = random.Random(5)
    hosts = ("a", "a", "b", "b", "c")
    living = [gates.start(host, **SOON, pause_s=0.02) for host in hosts]
    suspended: list[int] = []

    for _ in range(30):
        victim = gates.holder()
        match chance.choice(("kill", "kill", "suspend", "end")):
            case "suspend" if victim in living:
                os.kill(victim, signal.SIGSTOP)
                suspended.append(victim)
            case "end":
                os.kill(victim, signal.SIGTERM)
            case _:
                os.kill(victim, signal.SIGKILL)
        living.append(gates.start(chance.choice(hosts), **SOON, pause_s=0.02))
        gates.until_decided_without(victim)
        if len(suspended) > 1:
            os.kill(suspended.pop(0), signal.SIGCONT)

    assert overlaps(gates.lines()) == []
