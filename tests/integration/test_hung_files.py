"""Tests of attempts whose files and folders do not answer, as on a hung network file system.

The supervisor must decide about a death, and end an attempt, without these files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tasks.processes.supervisor import Supervisor
from tasks.record.checkpoints import CheckpointGrowth, find_newest_step, is_writing_checkpoint
from tasks.record.outcome import Verdict
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import ReadyProbe
from tasks.spec.run import Progress
from tests.support.hung_files import HangingFolder, hanging_folder, has_fuse
from tests.support.supervised_components import (
    DEADLINE_S,
    FOREVER,
    ComponentHarness,
    sh,
    wait_until,
)

needs_fuse = pytest.mark.skipif(not has_fuse(), reason="needs root and /dev/fuse")


@pytest.fixture
def data(tmp_path: Path, harness: ComponentHarness) -> Iterator[HangingFolder]:
    """Yield a mounted file system. The test can block all calls to this file system."""
    with hanging_folder(tmp_path / "data") as folder:
        harness.others.add(folder.server_pid)
        yield folder


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """Yield a named pipe. A program that opens the pipe for reading hangs until the test ends."""
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    yield path
    # Some threads may still wait to open the pipe for reading. Opening the pipe for writing ends
    # this wait.
    os.close(os.open(path, os.O_RDWR))


def end(harness: ComponentHarness, supervisor: Supervisor) -> Verdict:
    """End an attempt, and return its result. Fail if the end takes longer than `DEADLINE_S`."""
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(harness.end(supervisor)), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert verdicts, "the attempt has not ended"
    return verdicts[0]


def crash(harness: ComponentHarness, supervisor: Supervisor) -> None:
    os.kill(harness.wait_for_pid("trainer"), signal.SIGKILL)


def interrupt(harness: ComponentHarness, supervisor: Supervisor) -> None:
    supervisor.interrupt("cancelled")


def interrupt_twice(harness: ComponentHarness, supervisor: Supervisor) -> None:
    supervisor.interrupt("Ctrl-C")
    supervisor.hurry()


def wait_for_time_limit(harness: ComponentHarness, supervisor: Supervisor) -> None:
    harness.wait_for_event("teardown.begun")


ENDS = [crash, interrupt, interrupt_twice, wait_for_time_limit]
EXPECTED_STATES = {interrupt: RunState.CANCELLED, interrupt_twice: RunState.CANCELLED}
PLACES = ["metrics", "log", "checkpoints"]


def end_while_hanging(
    harness: ComponentHarness,
    data: HangingFolder,
    how: Callable[[ComponentHarness, Supervisor], None],
    places: list[str],
) -> Verdict:
    """Run an attempt with some files in a folder, block calls to the folder, and end the attempt.

    Args:
        harness: Creates the components and the supervisor.
        data: The folder, which is on a file system that can block all calls.
        how: Function that ends the attempt, one of ENDS.
        places: Files in the folder: "metrics", "log" or "checkpoints".

    Returns:
        The verdict: the final state of the attempt, with the failure if there is one. The
        supervisor must reach the verdict while calls to the folder still block.
    """
    checkpoints = data.path / "checkpoints"
    (checkpoints / "global_step_1.tmp").mkdir(parents=True)
    trainer = harness.component(
        "trainer",
        sh("echo begun; exec sleep 600"),
        on_exit_zero="complete",
        log=data.path / "trainer.log" if "log" in places else None,
    )
    if "checkpoints" in places:
        trainer = replace(
            trainer,
            checkpoints=str(checkpoints),
            is_saving=partial(is_writing_checkpoint, str(checkpoints), data.path),
            seconds_since_growth=CheckpointGrowth(str(checkpoints), data.path).seconds_since_growth,
            find_checkpoint=partial(find_newest_step, str(checkpoints), data.path, {}),
        )
    progress = None
    if "metrics" in places:
        progress = Progress(jsonl=str(data.path / "metrics.jsonl"), step="step", total=60)
    try:
        supervisor = harness.start_all(
            harness.component("api", FOREVER),
            trainer,
            progress=progress,
            time_limit_s=1.5 if how is wait_for_time_limit else None,
        )
        log = data.path / "trainer.log" if "log" in places else harness.log_path("trainer")
        wait_until(lambda: "begun" in log.read_text(), "the trainer has begun")
        data.hang()
        how(harness, supervisor)
        harness.wait_for_event("teardown.begun")
        return end(harness, supervisor)
    finally:
        data.answer()


@needs_fuse
@pytest.mark.parametrize("how", ENDS)
def test_attempt_ends_while_its_files_hang(
    harness: ComponentHarness,
    data: HangingFolder,
    how: Callable[[ComponentHarness, Supervisor], None],
) -> None:
    verdict = end_while_hanging(harness, data, how, PLACES)

    assert verdict.state is EXPECTED_STATES.get(how, RunState.FAILED)


@needs_fuse
@pytest.mark.thorough
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("place", PLACES)
def test_attempt_ends_while_one_of_its_files_hangs(
    harness: ComponentHarness,
    data: HangingFolder,
    how: Callable[[ComponentHarness, Supervisor], None],
    place: str,
) -> None:
    verdict = end_while_hanging(harness, data, how, [place])

    assert verdict.state is EXPECTED_STATES.get(how, RunState.FAILED)


def test_death_is_decided_while_the_metrics_file_is_a_pipe(
    harness: ComponentHarness, pipe: Path
) -> None:
    supervisor = harness.supervise(
        harness.component("trainer", sh("exit 3"), on_exit_zero="complete"),
        progress=Progress(jsonl=str(pipe), step="step"),
    )
    with contextlib.suppress(RunEnded):
        supervisor.start("trainer")

    harness.wait_for_event("teardown.begun")
    verdict = end(harness, supervisor)

    assert verdict.failure is not None
    assert verdict.failure.exit_code == 3


@needs_fuse
@pytest.mark.thorough
def test_failure_names_the_log_that_does_not_answer(
    harness: ComponentHarness, data: HangingFolder
) -> None:
    verdict = end_while_hanging(harness, data, crash, ["log"])

    assert verdict.failure is not None
    assert f"{data.path}/trainer.log has not answered for" in verdict.failure.message


@pytest.mark.thorough
def test_success_without_an_answer_of_the_metrics_file_is_a_storage_failure(
    harness: ComponentHarness, pipe: Path
) -> None:
    supervisor = harness.start_all(
        harness.component("trainer", sh("exit 0"), on_exit_zero="complete"),
        progress=Progress(jsonl=str(pipe), step="step"),
        success_step=60,
    )
    harness.wait_for_event("teardown.begun")
    verdict = end(harness, supervisor)

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.STORAGE
    assert f"{pipe} has not answered for" in verdict.failure.message


@needs_fuse
@pytest.mark.thorough
def test_component_is_not_ready_if_its_file_does_not_answer(
    harness: ComponentHarness, data: HangingFolder
) -> None:
    trainer = harness.component(
        "trainer", FOREVER, ready=ReadyProbe(file=str(data.path / "ready"), within_s=2)
    )
    supervisor = harness.supervise(trainer)
    starting = threading.Thread(target=partial(_start, supervisor), daemon=True)
    try:
        starting.start()
        harness.wait_for_event("probe.failed")
        data.hang()

        harness.wait_for_event("teardown.begun")
        verdict = end(harness, supervisor)
    finally:
        data.answer()

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.NOT_READY
    assert f"{data.path}/ready has not answered for" in verdict.failure.message


def _start(supervisor: Supervisor) -> None:
    with contextlib.suppress(RunEnded):
        supervisor.start("trainer")


@needs_fuse
def test_file_that_does_not_answer_is_reported_until_it_answers(
    harness: ComponentHarness, data: HangingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.attempt._REPORT_PLACE_AFTER_S", 0.5)
    monkeypatch.setattr("tasks.processes.attempt._PLACES_EVERY_S", 0.1)
    metrics = data.path / "metrics.jsonl"
    supervisor = harness.start_all(
        harness.component("trainer", FOREVER), progress=Progress(jsonl=str(metrics), step="step")
    )

    data.hang()
    unanswered = harness.wait_for_event("place.unanswered")
    data.answer()
    answered = harness.wait_for_event("place.answered")
    metrics.write_text('{"step": 7}\n')
    wait_until(lambda: harness.list_events("run.progress"), "the step is read again")
    end(harness, supervisor)

    assert unanswered.fields["place"] == answered.fields["place"] == str(metrics)
    assert "has not answered for" in unanswered.message
