"""Restarts of services: their conditions, their delays, and restarts of dependent services."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.processes.component import AttemptContext, AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.identity import ProcessId
from tasks.processes.ports import PortsReserved
from tasks.processes.probes import LogProbe
from tasks.processes.services import (
    RestartPolicy,
    Restarts,
    ServiceReport,
    Services,
    ServiceState,
)
from tasks.record.log_file import HeldLog
from tasks.record.outcome import ComponentFailed, Exit, GiveUpReason
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind
from tests.support.supervised_components import wait_until

POLICY = RestartPolicy(first_delay_s=1.0, most_delay_s=8.0, steady_s=30.0, give_up_after_s=100.0)


@pytest.mark.parametrize(
    ("deaths", "delays"),
    [
        # each pair in `deaths` describes a death of the service: the time of the death, and for how
        # many seconds the service was ready before this death, or None if it was not ready.
        # `delays` contains the seconds from each death to the restart, or None for no restart
        ([(0, 50)], [1]),
        ([(0, 50), (10, 5), (20, 5), (30, 5), (40, 5)], [1, 2, 4, 8, 8]),
        # the service was ready for 30 s before its last death, so the delays begin again with 1 s
        ([(0, 50), (10, 5), (50, 30)], [1, 2, 1]),
        ([(0, 50), (10, 5), (50, 29)], [1, 2, 4]),
        # the service was not ready within 100 s after its first death, so it is not restarted again
        ([(0, 50), (60, None), (100, None), (101, None)], [1, 2, 4, None]),
        # the service was last ready before its death at 100 s. The last death, at 201 s, is
        # more than 100 s later, so the service is not restarted
        ([(0, 50), (60, None), (100, 1), (160, None), (201, None)], [1, 2, 4, 8, None]),
        # the service was never ready. The second death is more than 100 s after the first death, so
        # there is no second restart
        ([(0, None), (101, None)], [1, None]),
    ],
)
def test_delay_before_a_restart_depends_on_earlier_deaths(
    deaths: list[tuple[float, float | None]], delays: list[float | None]
) -> None:
    restarts = Restarts(POLICY)

    actual = [restarts.delay_after_death(now_s, ready_for_s) for now_s, ready_for_s in deaths]

    assert actual == delays


def test_log_of_an_earlier_process_does_not_prove_readiness(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("Worker here started!\n")
    probe = LogProbe(HeldLog(log), "^Worker .* started!", log.stat().st_size)

    before = asyncio.run(probe.ask(5.0))
    with log.open("a") as written:
        written.write("Worker here started!\n")
    after = asyncio.run(probe.ask(5.0))

    assert before is not None
    assert after is None


class Process:
    """Fake process tree of a service. The future `empty` is done when all processes have ended."""

    def __init__(self) -> None:
        self.guardian = ProcessId(pid=1, start_ticks=0, boot_id="nowhere")
        self.empty: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FakeServiceProcess:
    """Fake process of a service. The test decides whether the process fails at its start."""

    def __init__(self, harness: ServiceHarness, plan: ComponentPlan) -> None:
        self.harness = harness
        self.name = plan.name
        self.pid: int | None = None
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.process = Process()
        self.was_ended = False
        self._script = harness.next_script(plan.name)

    async def launch(self) -> None:
        self.pid = len(self.harness.processes[self.name]) + 1000
        self.harness.processes[self.name].append(self)
        self.harness.order.append(f"start {self.name}")
        if self._script == "port taken":
            raise ComponentFailed(
                GiveUpReason(kind=FailureKind.PORT_CONFLICT, rule="port", message="taken")
            )
        if self._script == "exits":
            self.exit(Exit.from_return_code(3, 0.0))
        if self._script == "is killed":
            self.exit(Exit.from_return_code(-9, 0.0))

    async def until_ready(self) -> None:
        if self._script in ("exits", "is killed"):
            await asyncio.Event().wait()

    async def was_ready_before_end(self) -> bool:
        return False

    def read_log_end(self) -> str:
        return "last words"

    def exit(self, how: Exit) -> None:
        if not self.exited.done():
            self.exited.set_result(how)

    async def end(self) -> tuple[int | str, ...]:
        self.was_ended = True
        self.harness.order.append(f"end {self.name}")
        self.exit(Exit.from_return_code(-15, 0.0))
        if not self.process.empty.done():
            self.process.empty.set_result(None)
        return ()


class ServiceHarness:
    """Environment of a test: services with fake processes, and a clock that only `_sleep` moves."""

    def __init__(self, *plans: ComponentPlan, needs: dict[str, str] | None = None) -> None:
        self.processes: dict[str, list[FakeServiceProcess]] = {plan.name: [] for plan in plans}
        self.scripts: dict[str, list[str]] = {}
        self.order: list[str] = []
        self.reports: dict[str, ServiceReport] = {}
        self.slept: list[float] = []
        self.now_s = 0.0
        self.services = Services(
            AttemptPlan(run_id="stack", number=1, cwd=Path("/"), components=plans),
            PortsReserved([]),
            lambda *event, **fields: None,
            needs=needs,
            policy=POLICY,
            on_change=self._note,
            make_process=self._make,
            clock=lambda: self.now_s,
            sleep=self._sleep,
        )

    def next_script(self, name: str) -> str:
        scripts = self.scripts.get(name, [])
        return scripts.pop(0) if scripts else "runs"

    def state(self, name: str) -> ServiceState:
        return self.reports[name].state

    def die(self, name: str, how: int = -9) -> None:
        """End the current process of a service, and wait until its next process is ready.

        Args:
            name: Name of the service.
            how: Return code of the process. A negative number is a signal, as in `subprocess`.
        """
        before = len(self.processes[name])
        self._in_loop(lambda: self.processes[name][-1].exit(Exit.from_return_code(how, 0.0)))
        wait_until(
            lambda: len(self.processes[name]) > before and self.state(name) is ServiceState.READY,
            f"{name} is ready again",
        )

    def _in_loop(self, do: Callable[[], None]) -> None:
        done = threading.Event()
        self.services._loop.soon(lambda: (do(), done.set()))
        assert done.wait(60)

    def _make(self, plan: ComponentPlan, context: AttemptContext) -> Any:
        return FakeServiceProcess(self, plan)

    def _note(self, report: ServiceReport) -> None:
        self.reports[report.name] = report

    async def _sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.now_s += delay_s
        await asyncio.sleep(0)


def plan(name: str, *, children_grace_s: float | None = None) -> ComponentPlan:
    command = Command(
        argv=(name,),
        env={},
        cwd=Path("/"),
        log=Path("/nowhere"),
        children_grace_s=children_grace_s,
    )
    return ComponentPlan(name=name, command=command, ready=None, live=None, on_exit_zero="fail")


@pytest.fixture
def stages() -> Iterator[list[ServiceHarness]]:
    made: list[ServiceHarness] = []
    yield made
    for harness in made:
        with harness.services:
            pass


def test_dead_service_is_restarted_and_reports_the_reason(stages: list[ServiceHarness]) -> None:
    stages.append(harness := ServiceHarness(plan("server"), plan("worker")))
    for name in ("server", "worker"):
        harness.services.start(name)

    harness.die("server")

    report = harness.reports["server"]
    assert (report.deaths, report.state, report.pid) == (1, ServiceState.READY, 1001)
    assert report.reason.startswith("server (pid 1000) was killed by SIGKILL")
    assert report.died_at is not None
    assert harness.slept == [1.0]
    # The service `worker` was not restarted, because only another service died.
    assert len(harness.processes["worker"]) == 1
    assert harness.reports["worker"].deaths == 0


def test_exit_code_0_is_also_a_death(stages: list[ServiceHarness]) -> None:
    stages.append(harness := ServiceHarness(plan("server")))
    harness.services.start("server")

    harness.die("server", how=0)

    assert "ended with exit code 0" in harness.reports["server"].reason


def test_leftovers_are_ended_before_the_restart(
    stages: list[ServiceHarness],
) -> None:
    stages.append(harness := ServiceHarness(plan("server")))
    harness.services.start("server")

    harness.die("server")

    assert harness.order == ["start server", "end server", "start server"]


def test_outliving_children_are_ended_only_with_the_services(
    stages: list[ServiceHarness],
) -> None:
    stages.append(harness := ServiceHarness(plan("worker", children_grace_s=5.0)))
    harness.services.start("worker")

    harness.die("worker")
    order = [*harness.order]
    harness.services.teardown()

    assert order == ["start worker", "start worker"]
    assert [service_process.was_ended for service_process in harness.processes["worker"]] == [
        True,
        True,
    ]


def test_service_is_restarted_after_the_service_it_needs(stages: list[ServiceHarness]) -> None:
    needs = {"node": "head"}
    stages.append(
        harness := ServiceHarness(plan("head"), plan("node"), plan("worker"), needs=needs)
    )
    for name in ("head", "node", "worker"):
        harness.services.start(name)
    harness.order.clear()

    harness.die("head")
    wait_until(lambda: len(harness.processes["node"]) == 2, "the node is started again")
    wait_until(lambda: harness.state("node") is ServiceState.READY, "the node is ready again")

    assert harness.order.index("start head") < harness.order.index("start node")
    assert "end node" in harness.order
    assert "start worker" not in harness.order
    # The service `node` did not die by itself: it was stopped because the service `head` died.
    assert harness.reports["node"].deaths == 0


def test_service_that_fails_for_minutes_ends_all_services(stages: list[ServiceHarness]) -> None:
    stages.append(harness := ServiceHarness(plan("server"), plan("worker")))
    for name in ("server", "worker"):
        harness.services.start(name)
    harness.scripts["server"] = ["port taken"] * 100

    harness._in_loop(lambda: harness.processes["server"][-1].exit(Exit.from_return_code(-9, 0.0)))
    harness.services.wait_over()

    assert harness.services.failure is not None
    assert "server could not be started again: server" in harness.services.failure.message
    assert "taken" in harness.services.failure.message
    assert sum(harness.slept) > POLICY.give_up_after_s
    assert harness.state("server") is ServiceState.GIVEN_UP
    assert harness.services.teardown() == {}
    assert harness.processes["worker"][0].was_ended


@pytest.mark.parametrize("script", ["exits", "port taken"])
def test_service_that_fails_at_first_is_given_up_at_once(
    stages: list[ServiceHarness], script: str
) -> None:
    stages.append(harness := ServiceHarness(plan("server")))
    harness.scripts["server"] = [script]

    with pytest.raises(RunEnded):
        harness.services.start("server")

    assert harness.slept == []
    assert harness.state("server") is ServiceState.GIVEN_UP
    assert harness.reports["server"].deaths == 1
    assert harness.services.failure is not None
    assert harness.services.failure.component == "server"
    assert harness.services.failure.log_tail == "last words"


def test_service_killed_before_it_was_ready_is_restarted(
    stages: list[ServiceHarness],
) -> None:
    stages.append(harness := ServiceHarness(plan("server")))
    harness.scripts["server"] = ["is killed", "is killed"]

    harness.services.start("server")

    assert harness.slept == [1.0, 2.0]
    assert harness.reports["server"].deaths == 2


def test_services_end_in_the_reverse_order_of_their_start(stages: list[ServiceHarness]) -> None:
    stages.append(harness := ServiceHarness(plan("server"), plan("head"), plan("worker")))
    for name in ("server", "head", "worker"):
        harness.services.start(name)
    harness.order.clear()

    harness.services.stop("asked to")
    harness.services.wait_over()
    harness.services.teardown()

    assert harness.order == ["end worker", "end head", "end server"]
    assert (harness.services.stopped_by, harness.services.failure) == ("asked to", None)


def test_service_whose_end_raises_an_error_keeps_no_other_service_alive(
    stages: list[ServiceHarness],
) -> None:
    stages.append(harness := ServiceHarness(plan("server"), plan("worker")))
    for name in ("server", "worker"):
        harness.services.start(name)

    async def fail() -> tuple[int | str, ...]:
        raise RuntimeError("a bug")

    harness.processes["worker"][-1].end = fail  # type: ignore[method-assign]
    left = harness.services.teardown()

    assert harness.processes["server"][-1].was_ended
    assert left == {"worker": ("worker could not be ended: RuntimeError('a bug')",)}
