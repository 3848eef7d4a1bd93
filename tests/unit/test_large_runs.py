"""Tests of runs with many components, many attempts and long durations."""

from __future__ import annotations

import os
import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.processes import tree
from tasks.processes.component import AttemptPlan
from tasks.processes.identity import ProcessId
from tasks.processes.probes import HttpProbe, TcpProbe, make_client
from tasks.processes.progress import ProgressWatch, Silence
from tasks.record.disk import DiskThread
from tasks.record.events import Event
from tasks.record.outcome import Failure, Verdict
from tasks.record.run_json import RunJson, RunRecord
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import Progress
from tests.support.step_function import StepFunction
from tests.support.supervised_components import DEADLINE_S


@pytest.fixture
def many_files() -> Iterator[None]:
    """Keep many files open during the test, so that each new file descriptor is above 1,023.

    The system call select(2) does not support such descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("so many files may not be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = []
    try:
        while not opened or opened[-1] <= 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ports_are_probed_with_high_descriptor_numbers(many_files: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        assert TcpProbe("127.0.0.1", port).glance()
        assert HttpProbe(f"http://127.0.0.1:{port}/", make_client()).glance()


def test_process_is_watched_with_a_high_descriptor_number(many_files: None) -> None:
    is_gone = ProcessId.of(os.getpid()).is_gone_within(0.0)

    assert not is_gone


def test_pipe_is_ready_after_a_write() -> None:
    read, write = os.pipe()

    is_ready_before = tree.is_ready(read, select.POLLIN)
    os.write(write, b"x")
    is_ready_after = tree.is_ready(read, select.POLLIN, 60.0)

    assert (is_ready_before, is_ready_after) == (False, True)
    os.close(read)
    os.close(write)


@pytest.mark.asyncio
@pytest.mark.parametrize("every_s", [0.01, 600.0])
async def test_progress_is_read_at_the_interval_of_the_spec(
    every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Over(Exception):
        pass

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        if len(pauses) == 3:
            raise Over

    monkeypatch.setattr("tasks.processes.progress.asyncio.sleep", sleep)

    async def no_step() -> None:
        return None

    progress = Progress(jsonl="metrics.jsonl", step="step", every_s=every_s)
    plan = AttemptPlan(run_id="r", number=1, cwd=Path("/no"), components=(), progress=progress)
    watch = ProgressWatch(
        plan,
        StepFunction(no_step),
        Silence(()),
        lambda *_, **__: None,
        is_quiet=lambda: False,
    )

    with pytest.raises(Over):
        await watch.until_over()

    assert pauses == [every_s] * 3


def test_record_of_many_requeues_stays_small(tmp_path: Path) -> None:
    """A run that is requeued every ten minutes has 4,320 attempts in a month.

    Each attempt ends with a long log text. The record must keep only the text of the last attempt.
    """
    path = tmp_path / "run.json"
    disk = DiskThread("disk")
    record = RunRecord(path, run_id="a-run", flow_run_id="f", disk=disk)
    failure = Failure(
        kind=FailureKind.INSUFFICIENT_RESOURCES,
        component="trainer",
        message="m",
        log_tail="x" * 4000,
    )

    sizes = []
    for number in range(1, 301):
        record.begin_attempt(number, ports={"api.port": 1}, host="h")
        for component in ("api", "trainer"):
            event = Event(at=1.0, name="component.spawned", component=component, fields={"pid": 7})
            record.observe(event)
        record.end_attempt(Verdict.failed(failure, 0.0))
        record.decide("requeued: its gang was not there")
        if number in (200, 300):
            assert disk.flush(DEADLINE_S)
            sizes.append(path.stat().st_size)

    assert (sizes[1] - sizes[0]) / 100 < 600
    stored = RunJson.read(path)
    assert stored == record.content
    assert [attempt.number for attempt in stored.attempts] == list(range(1, 301))
    assert {attempt.ending for attempt in stored.attempts} == {"INSUFFICIENT_RESOURCES"}
    last = stored.attempts[-1]
    old = stored.attempts[0]
    assert last.failure == failure and list(last.components) == ["api", "trainer"]
    assert old.failure == failure.with_changes(log_tail="")
    assert old.decision == last.decision and old.components == {}
