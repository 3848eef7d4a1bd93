"""The scheduler lease among real processes on a real Prefect server.

Two schedulers never decide at the same time, even if some are killed, suspended or ended. All
of them append to one journal, in which the tests search for overlapping writers.
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

from tests.support.host_environment import Server, wait_for
from tests.support.prefect_api import send_request
from tests.support.schedulers import Nursery, Schedulers, overlaps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Time limits of the lease, in seconds. The limits are longer than any test, so the lease never
#: expires during a test.
NEVER = {"hold_s": 600.0, "expire_s": 900.0}
#: Short time limits, for tests in which an abandoned lease must pass to another host.
SOON = {"hold_s": 1.0, "expire_s": 3.0}


@pytest.fixture(scope="module")
def api(prefect_url: str) -> Iterator[str]:
    """Yield the address of the Prefect server that all clients in this process use."""
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


@pytest.fixture(scope="module")
def nursery(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Yield the nursery, a process that forks the scheduler processes of all tests."""
    with closing(Nursery(api, tmp_path_factory.mktemp("schedulers") / "log")) as nursery:
        yield nursery


@pytest.fixture
def schedulers(nursery: Nursery, tmp_path: Path) -> Iterator[Schedulers]:
    """Yield an object that starts scheduler processes.

    While a process has the scheduler lease, it writes to a journal file that all these processes
    share. All processes are ended after the test.
    """
    with Schedulers.of(tmp_path, nursery) as schedulers:
        yield schedulers


def read_leases(api: str) -> list[Any]:
    """Return the contents of all leases that Muster keeps on the Prefect server."""
    variables: list[Any] = send_request("POST", f"{api}/variables/filter", {})
    return [variable["value"] for variable in variables if variable["name"].startswith("muster")]


def has_ended(pid: int) -> bool:
    """Return True if the process is a zombie: an ended process that its parent has not reaped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_killed_scheduler_is_replaced_at_once_on_its_host(schedulers: Schedulers) -> None:
    for _ in range(3):
        schedulers.start(**NEVER)

    for _ in range(5):
        victim = schedulers.holder()
        os.kill(victim, signal.SIGKILL)
        schedulers.until_decided_without(victim)
        schedulers.start(**NEVER)

    assert overlaps(schedulers.lines()) == []


@pytest.mark.thorough
def test_killed_scheduler_is_replaced_by_a_scheduler_of_another_host(
    schedulers: Schedulers,
) -> None:
    first = schedulers.start("here", **SOON)
    schedulers.until_decided_without()
    second = schedulers.start("there", **SOON)
    schedulers.until_decided_without(first)

    victim = schedulers.holder()
    os.kill(victim, signal.SIGKILL)
    schedulers.until_decided_without(victim)

    assert overlaps(schedulers.lines()) == []
    assert {pid for pid, _taking, _what in schedulers.lines()} == {first, second}


@pytest.mark.thorough
@pytest.mark.parametrize("host", ["there", "here"])
def test_suspended_scheduler_writes_nothing_after_another_scheduler_may_decide(
    schedulers: Schedulers, host: str
) -> None:
    victim = schedulers.start("here", **SOON, writes=1000)
    os.kill(schedulers.holder(), signal.SIGSTOP)
    lines_before = len(schedulers.lines())
    schedulers.start(host, **SOON)

    schedulers.until_decided_without(victim)
    os.kill(victim, signal.SIGCONT)
    wait_for(
        lambda: (victim, "lost") in [(p, w) for p, _t, w in schedulers.lines()[lines_before:]],
        "lost",
    )

    assert overlaps(schedulers.lines()) == []


@pytest.mark.thorough
def test_terminated_scheduler_releases_the_lease(schedulers: Schedulers, api: str) -> None:
    first = schedulers.start("here", **NEVER, writes=1000, pause_s=0.1)
    assert schedulers.holder() == first
    leases_before = read_leases(api)

    os.kill(first, signal.SIGTERM)
    wait_for(lambda: has_ended(first), "the scheduler has ended")

    assert [lease["pid"] for lease in leases_before] == [first]
    assert read_leases(api) == []


@pytest.mark.thorough
def test_all_schedulers_decide_again_after_a_restart_of_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    server.start()
    try:
        with (
            closing(Nursery(server.api, tmp_path / "log")) as nursery,
            Schedulers.of(tmp_path, nursery) as schedulers,
        ):
            pids = [schedulers.start(host, **SOON) for host in ("here", "here", "there")]
            for pid in pids:
                schedulers.until_decided_without(*(other for other in pids if other != pid))

            schedulers.holder()
            server.kill()
            server.start()
            for pid in pids:
                schedulers.until_decided_without(*(other for other in pids if other != pid))

            assert overlaps(schedulers.lines()) == []
    finally:
        server.kill()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_two_schedulers_never_decide_at_once_while_some_are_killed_or_suspended(
    schedulers: Schedulers,
) -> None:
    random_source = random.Random(5)
    hosts = ("a", "a", "b", "b", "c")
    living = [schedulers.start(host, **SOON, pause_s=0.02) for host in hosts]
    suspended: list[int] = []

    for _ in range(30):
        victim = schedulers.holder()
        match random_source.choice(("kill", "kill", "suspend", "end")):
            case "suspend" if victim in living:
                os.kill(victim, signal.SIGSTOP)
                suspended.append(victim)
            case "end":
                os.kill(victim, signal.SIGTERM)
            case _:
                os.kill(victim, signal.SIGKILL)
        living.append(schedulers.start(random_source.choice(hosts), **SOON, pause_s=0.02))
        schedulers.until_decided_without(victim)
        if len(suspended) > 1:
            os.kill(suspended.pop(0), signal.SIGCONT)

    assert overlaps(schedulers.lines()) == []
