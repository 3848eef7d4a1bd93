"""What becomes of the children of a service when it, its guardian or its supervisor is killed.

Each child writes down what it sees; the tests read that, and ask the kernel who is alive.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.identity import ProcessId
from tasks.processes.ports import PortsReserved
from tasks.processes.services import RestartPolicy, ServiceReport, Services, ServiceState
from tasks.spec.probes import ReadyProbe
from tests.support.stage import is_alive, python, wait_until

#: Starts one child, the first time only, and stays. The child takes a second to save when it is
#: told to end, longer than the service itself is given. As with Prefect, there is a process before
#: it in its group that ignores SIGTERM.
SERVICE = """
import os, signal, sys, time
place = sys.argv[1]
def child():
    def save(*_):
        time.sleep(1)
        open(place + "/saved", "w").close()
        os._exit(0)
    signal.signal(signal.SIGTERM, save)
    with open(place + "/child.tmp", "w") as f:
        f.write(str(os.getpid()))
    os.rename(place + "/child.tmp", place + "/child")
    while True:
        time.sleep(60)
if not os.path.exists(place + "/child") and os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        child()
    os.wait()
    os._exit(0)
while not os.path.exists(place + "/child"):
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""
#: A process that keeps the service, to be killed.
SUPERVISOR = """
import sys
from pathlib import Path
from tests.integration.test_services import kept
services, _ = kept(Path(sys.argv[1]))
services.start("worker")
services.wait_over()
"""


def kept(place: Path) -> tuple[Services, list[ServiceReport]]:
    """One service and all of its reports, the last one at the end."""
    command = Command(
        argv=(*python(SERVICE), str(place)),
        env={"PATH": os.environ["PATH"]},
        cwd=place,
        log=place / "service.log",
        grace_s=0.2,
        children_grace_s=30.0,
    )
    ready = ReadyProbe(log="^ready", within_s=60.0)
    plan = ComponentPlan(
        name="worker", command=command, ready=ready, live=None, on_exit_zero="fail"
    )
    reports: list[ServiceReport] = []
    services = Services(
        AttemptPlan(run_id="stack", number=1, cwd=place, components=(plan,)),
        PortsReserved([]),
        lambda *event, **fields: None,
        policy=RestartPolicy(first_delay_s=0.01),
        on_change=reports.append,
    )
    return services, reports


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Services, list[ServiceReport]]]:
    services, reports = kept(tmp_path)
    with services:
        services.start("worker")
        yield services, reports


def until_dead_and_back(reports: list[ServiceReport]) -> None:
    wait_until(
        lambda: reports[-1].deaths == 1 and reports[-1].state is ServiceState.READY,
        "the service is back",
    )


@pytest.mark.parametrize("killed", ["service", "guardian"])
def test_a_child_outlives_its_service_and_has_its_time_at_the_end(
    killed: str, service: tuple[Services, list[ServiceReport]], tmp_path: Path
) -> None:
    services, reports = service
    child = int((tmp_path / "child").read_text())
    pid = reports[-1].pid if killed == "service" else reports[-1].guardians[0].pid
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    until_dead_and_back(reports)
    lived_on = is_alive(child)
    left = services.teardown()

    assert lived_on
    assert left == {}
    assert (tmp_path / "saved").exists()
    assert not is_alive(child)


def test_a_child_that_ends_after_its_service_has_died_is_reaped(
    service: tuple[Services, list[ServiceReport]], tmp_path: Path
) -> None:
    _, reports = service
    child = int((tmp_path / "child").read_text())
    pid = reports[-1].pid
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    until_dead_and_back(reports)
    os.kill(child, signal.SIGKILL)

    wait_until(lambda: not Path(f"/proc/{child}").exists(), "nothing of the child is left")


def test_a_child_has_its_time_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)])
    try:
        wait_until((tmp_path / "child").exists, "the child runs")
        child = ProcessId.of(int((tmp_path / "child").read_text()))
        wait_until(lambda: "ready" in (tmp_path / "service.log").read_text(), "it is ready")
    finally:
        supervisor.kill()
        supervisor.wait()

    assert child.is_gone_within(60.0)
    assert (tmp_path / "saved").exists()
