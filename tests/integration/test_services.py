"""Child processes of a service whose process, guardian or supervisor is killed.

Each child writes files, which the tests read. The kernel says which processes live.
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
from tests.support.supervised_components import is_alive, python, wait_until

#: Program of a service. Muster restarts a service that dies. At its first start, this service also
#: starts a child process.
#:
#: The service ignores SIGTERM, as a worker of Prefect does. After SIGTERM, the child process needs
#: one second to save its state. The grace period of the service is shorter.
SERVICE = """
import os, signal, sys, time
directory = sys.argv[1]
def child():
    def save(*_):
        time.sleep(1)
        open(directory + "/saved", "w").close()
        os._exit(0)
    signal.signal(signal.SIGTERM, save)
    with open(directory + "/child.tmp", "w") as f:
        f.write(str(os.getpid()))
    os.rename(directory + "/child.tmp", directory + "/child")
    while True:
        time.sleep(60)
if not os.path.exists(directory + "/child") and os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        child()
    os.wait()
    os._exit(0)
while not os.path.exists(directory + "/child"):
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""
#: A program that supervises the service until the test kills the program.
SUPERVISOR = """
import sys
from pathlib import Path
from tests.integration.test_services import build_services
services, _ = build_services(Path(sys.argv[1]))
services.start("worker")
services.wait_over()
"""


def build_services(directory: Path) -> tuple[Services, list[ServiceReport]]:
    """Return an object that keeps one service alive, and a list that gets the service's reports.

    The newest report is last.
    """
    command = Command(
        argv=(*python(SERVICE), str(directory)),
        env={"PATH": os.environ["PATH"]},
        cwd=directory,
        log=directory / "service.log",
        grace_s=0.2,
        children_grace_s=30.0,
    )
    ready = ReadyProbe(log="^ready", within_s=60.0)
    plan = ComponentPlan(
        name="worker", command=command, ready=ready, live=None, on_exit_zero="fail"
    )
    reports: list[ServiceReport] = []
    services = Services(
        AttemptPlan(run_id="stack", number=1, cwd=directory, components=(plan,)),
        PortsReserved([]),
        lambda *event, **fields: None,
        policy=RestartPolicy(first_delay_s=0.01),
        on_change=reports.append,
    )
    return services, reports


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Services, list[ServiceReport]]]:
    """Yield a running service and its reports."""
    services, reports = build_services(tmp_path)
    with services:
        services.start("worker")
        yield services, reports


def wait_until_restarted(reports: list[ServiceReport]) -> None:
    """Wait until the service has died once and is ready again."""
    wait_until(
        lambda: reports[-1].deaths == 1 and reports[-1].state is ServiceState.READY,
        "the service is ready again",
    )


@pytest.mark.parametrize("killed", ["service", "guardian"])
def test_child_survives_its_service_and_gets_its_grace_period_at_the_end(
    killed: str, service: tuple[Services, list[ServiceReport]], tmp_path: Path
) -> None:
    services, reports = service
    child = int((tmp_path / "child").read_text())
    pid = reports[-1].pid if killed == "service" else reports[-1].guardians[0].pid
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    wait_until_restarted(reports)
    child_survived = is_alive(child)
    leftovers = services.teardown()

    assert child_survived
    assert leftovers == {}
    assert (tmp_path / "saved").exists()
    assert not is_alive(child)


def test_child_that_ends_after_its_service_is_reaped(
    service: tuple[Services, list[ServiceReport]], tmp_path: Path
) -> None:
    _, reports = service
    child = int((tmp_path / "child").read_text())
    pid = reports[-1].pid
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    wait_until_restarted(reports)
    os.kill(child, signal.SIGKILL)

    wait_until(lambda: not Path(f"/proc/{child}").exists(), "the child was reaped")


def test_child_gets_its_grace_period_if_the_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)])
    try:
        wait_until((tmp_path / "child").exists, "the child runs")
        child = ProcessId.of(int((tmp_path / "child").read_text()))
        wait_until(
            lambda: "ready" in (tmp_path / "service.log").read_text(), "the service is ready"
        )
    finally:
        supervisor.kill()
        supervisor.wait()

    assert child.is_gone_within(60.0)
    assert (tmp_path / "saved").exists()
