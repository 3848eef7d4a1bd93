"""The registry on disk: the claim of lost runs, their entries, leftovers and final state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.processes import registry
from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.processes.registry import (
    LostRun,
    Owner,
    ProcessEntry,
    RunRegistration,
    claim_lost_run,
    enter,
    leave,
    registered_runs,
    teardown_s,
)
from tasks.processes.shared_memory_scan import SharedMemoryScan
from tasks.record.outcome import Failure, Verdict
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tests.support.supervised_components import wait_until

#: Program that opens a registry, prints "open", and runs until its stdin ends.
OWNER = """
import sys
from tasks.processes.registry import RunRegistration
RunRegistration.opened("a-run")
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(muster_home: Path) -> Path:
    return muster_home


@pytest.fixture
def owner(home: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that registers the run `a-run`, and so becomes the owner of the run."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MUSTER_HOME": str(home)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def entry(**changes: object) -> ProcessEntry:
    me = ProcessId.of(os.getpid())
    fields = {
        "run_id": "a-run",
        "attempt": 1,
        "component": "trainer",
        "mark": 0,
        "guardian": me,
        "process": me,
        "grace_s": 1.0,
    }
    return ProcessEntry.model_validate({**fields, **changes})


def lost_owner(home: Path, **changes: object) -> None:
    """Write the registry entries of the run `a-run`, whose flow process was killed."""
    gone = ProcessId.of(os.getpid()).model_copy(update={"start_ticks": 1})
    fields = {"run_id": "a-run", "host": host_name(), "process": gone}
    owner = Owner.model_validate({**fields, **changes})
    directory = home / "live" / "a-run"
    directory.mkdir(parents=True)
    (directory / "owner.json").write_text(owner.model_dump_json())


def test_run_with_a_living_owner_cannot_be_claimed(
    owner: subprocess.Popen[str], home: Path
) -> None:
    with claim_lost_run("a-run") as lost:
        assert lost is None
    assert registered_runs() == ["a-run"]


def test_run_whose_owner_died_can_be_claimed(owner: subprocess.Popen[str], home: Path) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()

    with claim_lost_run("a-run") as lost:
        assert lost is not None
        assert lost.owner.process.pid == owner.pid
        lost.forget()
    assert registered_runs() == []


def test_second_process_cannot_own_the_same_run(owner: subprocess.Popen[str], home: Path) -> None:
    with pytest.raises(OSError, match="another process of this machine already runs a-run"):
        RunRegistration.opened("a-run")


def test_locked_run_cannot_be_claimed_even_if_its_owner_seems_dead(
    owner: subprocess.Popen[str], home: Path
) -> None:
    """The owner of a run is its flow process, which locks the run's registry entry.

    The lock shows that the owner is alive. The recorded process id is not enough: in another PID
    namespace, this process id may belong to another process, or to no process.
    """
    path = home / "live" / "a-run" / "owner.json"
    content = Owner.model_validate_json(path.read_text())
    gone = content.process.model_copy(update={"start_ticks": 1})
    path.write_text(content.model_copy(update={"process": gone}).model_dump_json())

    with claim_lost_run("a-run") as lost:
        assert lost is None


def test_run_of_another_host_cannot_be_claimed(home: Path) -> None:
    lost_owner(home, host="elsewhere")

    with claim_lost_run("a-run") as lost:
        assert lost is None


def test_run_from_before_a_reboot_has_no_processes(home: Path) -> None:
    before = ProcessId(pid=os.getpid(), start_ticks=1, boot_id="another boot")
    lost_owner(home, process=before)

    with claim_lost_run("a-run") as lost:
        assert lost is not None
        assert not lost.is_of_this_boot


def test_close_removes_a_run_without_entries(home: Path) -> None:
    register = RunRegistration.opened("a-run")
    enter(register.directory, entry())
    leave(register.directory, "trainer")

    register.close()
    register.close()

    assert registered_runs() == []


def test_close_keeps_a_run_with_an_entry(home: Path) -> None:
    register = RunRegistration.opened("a-run")
    enter(register.directory, entry(mark=7))

    register.close()

    assert registered_runs() == ["a-run"]
    directory = home / "live" / "a-run"
    assert [e.mark for e in registry._read_entries(directory, ProcessEntry)[0]] == [7]


def test_claimed_run_has_its_entries_and_leftovers(home: Path, tmp_path: Path) -> None:
    lost_owner(home, leftovers=(tmp_path / "muster-x",))
    (home / "live" / "a-run" / "component-trainer.json").write_text(entry().model_dump_json())

    with claim_lost_run("a-run") as lost:
        assert lost is not None
        assert [e.component for e in lost.entries] == ["trainer"]
        assert lost.owner.leftovers == (tmp_path / "muster-x",)
        assert lost.is_of_this_boot
        assert lost.owner.process.boot_id == boot_id()


def test_time_of_the_first_claim_is_kept(home: Path) -> None:
    lost_owner(home)
    with claim_lost_run("a-run") as lost:
        assert lost is not None
        first = lost.seconds_lost()

    with claim_lost_run("a-run") as lost:
        assert lost is not None
        again = lost.seconds_lost()

    assert first == 0
    assert again > 0


def test_claimed_run_has_the_remaining_parts_of_its_components(
    owner: subprocess.Popen[str], home: Path
) -> None:
    directory = home / "live" / "a-run"
    enter(directory, entry(component="rollout.r0", mark=7))
    enter(directory, entry(component="rollout.r1", mark=8))
    leave(directory, "rollout.r0")
    leave(directory, "rollout.r0")

    owner.send_signal(signal.SIGKILL)
    owner.wait()

    with claim_lost_run("a-run") as lost:
        assert lost is not None
        assert [(found.component, found.mark) for found in lost.entries] == [("rollout.r1", 8)]


def test_entries_of_parts_are_removed_only_with_their_component(home: Path) -> None:
    register = RunRegistration.opened("a-run")
    enter(register.directory, entry(component="rollout"))
    enter(register.directory, entry(component="rollout2"))
    enter(register.directory, entry(component="rollout.r0"))

    leave(register.directory, "rollout")
    left = sorted(path.name for path in register.directory.glob("component-*"))
    leave(register.directory, "rollout2")
    register.close()

    assert left == ["component-rollout2.json"]
    assert registered_runs() == []


def test_component_of_a_removed_run_cannot_be_registered(home: Path) -> None:
    register = RunRegistration.opened("a-run")
    register.close()

    with pytest.raises(OSError):
        enter(register.directory, entry(component="rollout.r0"))


def test_segment_is_registered_until_it_is_removed(home: Path, tmp_path: Path) -> None:
    register = RunRegistration.opened("a-run", leftovers=(home / "muster-x",))
    scan = SharedMemoryScan(lambda: {os.getpid()}, register.note_leftovers, directory=tmp_path)
    mine, removed, others = (tmp_path / name for name in ("mine", "removed", "others"))

    def registered() -> list[Path]:
        owner = registry.read_owner("a-run")
        assert owner is not None
        return list(owner.leftovers)

    # The process `touch` is not a process of the run, so the file `others` must not be registered.
    subprocess.run(["touch", others], check=True)
    with mine.open("w"), removed.open("w"):
        wait_until(lambda: {mine, removed} <= set(registered()), "both are noted")
        removed.unlink()
        wait_until(lambda: removed not in registered(), "it is forgotten")
    scan.close()

    assert registered() == [home / "muster-x", mine]
    register.close()


def test_segment_made_just_before_close_is_registered(home: Path, tmp_path: Path) -> None:
    register = RunRegistration.opened("a-run")
    scan = SharedMemoryScan(lambda: {os.getpid()}, register.note_leftovers, directory=tmp_path)
    segment = tmp_path / "segment"

    with segment.open("w"):
        scan.close()

    assert register.owner.leftovers == (segment,)
    register.close()


def test_run_with_an_unwritten_record_stays_with_its_final_state(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.registry._WRITTEN_WITHIN_S", 0.1)
    register = RunRegistration.opened("a-run", directory=home / "gone")
    record = RunRecord(
        home / "gone" / "run.json", run_id="a-run", flow_run_id="f", disk=register.disk
    )
    record.begin_attempt(1)
    failure = Failure(kind=FailureKind.CUDA_OOM, component="trainer", message="m", log_tail="x")
    record.end_attempt(Verdict.failed(failure, 0.0))
    record.move(RunState.FAILED, str(failure))

    unwritten_files = register.settle(record.content)
    register.close()

    assert unwritten_files == f"{home}/gone/run.json: No such file or directory"
    lost = LostRun(register.directory, register.owner)
    assert lost.end is not None and lost.end.attempt is not None
    assert (lost.end.state, lost.end.message) == (RunState.FAILED, "CUDA_OOM: m")
    assert lost.end.attempt.failure == failure.with_changes(log_tail="")


def test_run_with_a_written_record_is_removed(home: Path) -> None:
    register = RunRegistration.opened("a-run", directory=home)
    record = RunRecord(home / "run.json", run_id="a-run", flow_run_id="f", disk=register.disk)
    record.move(RunState.CANCELLED)

    unwritten_files = register.settle(record.content)
    register.close()

    assert unwritten_files == ""
    assert RunJson.read(home / "run.json").state is RunState.CANCELLED
    assert not register.directory.exists()


def test_teardown_time_is_the_sum_of_the_grace_periods(home: Path) -> None:
    lost_owner(home)
    directory = home / "live" / "a-run"
    before = teardown_s()
    for component, grace_s in (("trainer", 60.0), ("api", 5.0), ("rollout.0", 30.0)):
        enter(directory, entry(component=component, grace_s=grace_s))

    # The grace periods of the trainer (60 s) and of the API (5 s) count twice: once for a
    # checkpoint, and once for the stop.
    # The inference server `rollout.0` ends together with the component `rollout`, so the server's
    # grace period is not added.
    assert before == 0.0
    assert teardown_s() == 130.0
    assert teardown_s(os.getpid()) == 130.0
    assert teardown_s(os.getppid()) == 0.0
