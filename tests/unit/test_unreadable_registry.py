"""A registry file that cannot be read counts as unknown, never as missing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.stack.command import status
from tasks.processes import registry
from tasks.processes.identity import ProcessId, host_name
from tasks.processes.registry import (
    JobEntry,
    Owner,
    ProcessEntry,
    RunRegistration,
    claim_lost_run,
    enter,
    find_living_owner,
    finish,
    list_unreadable_files,
    read_owner,
    registered_runs,
    teardown_s,
)
from tasks.record.places import RunPlace, read_own_file
from tasks.record.run_json import RunJson, SubmissionJson
from tasks.record.states import RunState
from tasks.upkeep.lost_run import complete_owner, finish_predecessor
from tasks.upkeep.reconcile import reconcile_host
from tests.support.supervised_components import wait_until

#: Mapping from a description to the content of a file after a crash, a power failure or a change by
#: another version of Muster.
TORN = {
    "empty": b"",
    "zero bytes": b"\0" * 4096,
    "cut": b'{"run_id": "a-ru',
    "not JSON": b"trainer",
    "not UTF-8": b"\xff\xfe",
    "another type": b"[]",
    "newer schema": b'{"schema": 2, "run": {"id": "a-run"}}',
}
#: Errors of the kernel when a file is opened or read.
ERRORS = {"EIO": errno.EIO, "EMFILE": errno.EMFILE, "ESTALE": errno.ESTALE}

#: Function that makes a file unreadable, for example by wrong content or by a folder in its place.
Damage = Callable[[Path], None]


def damage_by_content(content: bytes) -> Damage:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def damage_by_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/null")


def damage_by_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


DAMAGES: Mapping[str, Damage] = {
    **{name: damage_by_content(content) for name, content in TORN.items()},
    "a link": damage_by_link,
    "a folder": damage_by_folder,
}


#: Three kinds of damage for the slow tests, which start processes. These three are enough, because
#: the code handles each further kind in `DAMAGES` like one of these three.
QUICK_DAMAGES = {name: DAMAGES[name] for name in ("empty", "newer schema", "a link")}


@pytest.fixture
def run_id() -> str:
    """Run id that no other test on this machine uses. The test searches processes by this id."""
    return f"torn-grpo-20260101-000000-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Yield a function that starts a process with additional environment variables."""
    with ExitStack() as stack:

        def start_process(**variables: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(["sleep", "600"], env={**os.environ, **variables})
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start_process


def make_entry(run_id: str, component: str = "trainer", **changes: object) -> ProcessEntry:
    gone = ProcessId.of(os.getpid()).model_copy(update={"start_ticks": 1})
    fields = {
        "run_id": run_id,
        "attempt": 1,
        "component": component,
        "mark": 0,
        "guardian": gone,
        "process": gone,
        "grace_s": 1.0,
    }
    return ProcessEntry.model_validate({**fields, **changes})


def register_lost_run(home: Path, run_id: str, **changes: object) -> Path:
    """Write the registry entry of a run whose flow process was killed.

    Returns:
        The directory that contains the registry entry.
    """
    gone = ProcessId.of(os.getpid()).model_copy(update={"start_ticks": 1})
    fields = {"run_id": run_id, "host": host_name(), "process": gone}
    owner = Owner.model_validate({**fields, **changes})
    directory = home / "live" / run_id
    directory.mkdir(parents=True)
    (directory / "owner.json").write_text(owner.model_dump_json())
    return directory


def is_alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


@pytest.mark.parametrize("damage", QUICK_DAMAGES.values(), ids=QUICK_DAMAGES)
def test_processes_of_a_component_with_an_unreadable_entry_are_ended(
    muster_home: Path, run_id: str, start: Callable[..., Any], damage: Damage
) -> None:
    directory = register_lost_run(muster_home, run_id)
    damage(directory / "component-trainer.json")
    trainer = start(MUSTER_RUN_ID=run_id, MUSTER_COMPONENT="trainer")
    other_run = start(MUSTER_RUN_ID=f"{run_id}-other", MUSTER_COMPONENT="trainer")
    job = start(MUSTER_RUN_ID=run_id, MUSTER_COMPONENT="environment")

    with claim_lost_run(run_id) as lost:
        assert lost is not None
        cleanup = finish(lost)
        lost.forget()

    wait_until(lambda: not is_alive(trainer), "the trainer has ended")
    assert is_alive(other_run) and is_alive(job)
    assert cleanup.killed == (trainer.pid,)
    assert [file.path for file in cleanup.unreadable] == [directory / "component-trainer.json"]
    assert str(directory / "component-trainer.json") in str(cleanup.unreadable[0])
    assert registered_runs() == []


@pytest.mark.parametrize("damage", QUICK_DAMAGES.values(), ids=QUICK_DAMAGES)
def test_run_with_an_unreadable_entry_and_a_living_process_is_not_forgotten(
    muster_home: Path, run_id: str, start: Callable[..., Any], damage: Damage
) -> None:
    directory = register_lost_run(muster_home, run_id)
    damage(directory / "component-trainer.json")
    start(MUSTER_RUN_ID=run_id, MUSTER_COMPONENT="trainer")

    with claim_lost_run(run_id) as lost:
        assert lost is not None
        lost.forget()

    assert registered_runs() == [run_id]


def test_living_guardian_without_a_readable_entry_has_time_to_end_its_component(
    muster_home: Path, run_id: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = register_lost_run(muster_home, run_id)
    (directory / "component-trainer.json").touch()
    variables = {"MUSTER_RUN_ID": run_id, "MUSTER_COMPONENT": "trainer"}
    guardian = start(**variables, MUSTER_ROLE="guardian")
    trainer = start(**variables)

    with claim_lost_run(run_id) as lost:
        assert lost is not None
        first = finish(lost)
        was_alive = is_alive(trainer)
        monkeypatch.setattr(registry, "_UNKNOWN_GRACE_S", -1.0)
        second = finish(lost)

    assert first.waiting == {"trainer": guardian.pid}
    assert was_alive and not first.is_clean
    assert second.is_clean
    assert set(second.killed) == {guardian.pid, trainer.pid}


def test_process_without_variables_is_ended_by_the_mark_of_its_component(
    muster_home: Path, run_id: str, tmp_path: Path
) -> None:
    directory = register_lost_run(muster_home, run_id)
    (directory / "component-trainer.json").touch()
    program = (
        "import os, subprocess, time\n"
        "from tasks.processes import tree\n"
        "tree.mark_own(tree.new_mark())\n"
        "child = subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    variables = {"MUSTER_RUN_ID": run_id, "MUSTER_COMPONENT": "trainer"}
    command = [sys.executable, "-c", program]
    env = {**os.environ, **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as trainer:
        assert trainer.stdout is not None
        child = ProcessId.of(int(trainer.stdout.readline()))

        with claim_lost_run(run_id) as lost:
            assert lost is not None
            finish(lost)

        wait_until(lambda: not child.is_alive(), "the child has ended")


def test_entry_of_an_earlier_boot_needs_no_search(
    muster_home: Path, run_id: str, start: Callable[..., Any]
) -> None:
    before = ProcessId(pid=os.getpid(), start_ticks=1, boot_id="another boot")
    directory = register_lost_run(muster_home, run_id, process=before)
    (directory / "component-trainer.json").touch()
    bystander = start(MUSTER_RUN_ID=run_id, MUSTER_COMPONENT="trainer")

    with claim_lost_run(run_id) as lost:
        assert lost is not None
        cleanup = finish(lost)
        lost.forget()

    assert cleanup.is_clean and is_alive(bystander)
    assert registered_runs() == []


@pytest.mark.parametrize("name", ["component-trainer.json", "job-trainer.json"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_close_keeps_a_run_with_an_unreadable_entry(
    muster_home: Path, run_id: str, damage: Damage, name: str
) -> None:
    register = RunRegistration.opened(run_id)
    damage(register.directory / name)

    register.close()

    assert registered_runs() == [run_id]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_lost_run_with_an_unreadable_owner_is_claimed(
    muster_home: Path, run_id: str, damage: Damage
) -> None:
    directory = register_lost_run(muster_home, run_id)
    place = RunPlace.of(run_id)
    place.directory.mkdir(parents=True)
    record = RunJson(state=RunState.RUNNING, run_id=run_id, flow_run_id="a-flow-run")
    place.record.write_text(record.model_dump_json())
    damage(directory / "owner.json")
    enter(directory, make_entry(run_id))

    with claim_lost_run(run_id) as lost:
        assert lost is not None
        owner = lost.owner
        entries = lost.entries
        lost.seconds_lost()
        again = lost.seconds_lost()
    with claim_lost_run(run_id) as lost:
        assert lost is not None
        later = lost.seconds_lost()
        lost.forget()

    assert str(directory / "owner.json") in owner.fault
    assert (owner.run_id, owner.flow_run_id) == (run_id, "a-flow-run")
    assert owner.directory == place.directory
    assert [entry.component for entry in entries] == ["trainer"]
    assert 0 < again <= later
    assert registered_runs() == []


@pytest.mark.parametrize("damage", QUICK_DAMAGES.values(), ids=QUICK_DAMAGES)
def test_living_owner_with_an_unreadable_file_is_known_by_its_lock(
    muster_home: Path, run_id: str, damage: Damage
) -> None:
    program = (
        "import sys\n"
        "from tasks.processes.registry import RunRegistration\n"
        f"RunRegistration.opened({run_id!r})\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "open\n"
        damage(muster_home / "live" / run_id / "owner.json")

        living = find_living_owner(run_id)
        with claim_lost_run(run_id) as lost:
            is_claimed = lost is not None
        owner.kill()

    assert living is not None and living.process.pid == owner.pid
    assert not is_claimed


def test_process_does_not_lose_the_lock_of_its_own_run(muster_home: Path, run_id: str) -> None:
    register = RunRegistration.opened(run_id, flow_run_id="a-flow-run")
    (register.directory / "owner.json").write_text("")

    owner = read_owner(run_id)
    with claim_lost_run(run_id) as lost:
        assert lost is None
    program = (
        "import sys\nfrom tasks.processes.registry import claim_lost_run\n"
        f"with claim_lost_run({run_id!r}) as lost:\n    sys.exit(lost is not None)\n"
    )
    other_process = subprocess.run([sys.executable, "-c", program])
    register.close()

    assert owner is not None and owner.flow_run_id == "a-flow-run"
    assert owner.process.pid == os.getpid()
    assert other_process.returncode == 0


def test_run_of_an_unknown_machine_is_kept(muster_home: Path, run_id: str) -> None:
    """The machine of the run is unknown, so the run may be active on another machine."""
    directory = register_lost_run(muster_home, run_id)
    elsewhere = ProcessId(pid=os.getpid(), start_ticks=1, boot_id="another machine")
    enter(directory, make_entry(run_id, guardian=elsewhere, process=elsewhere))
    (directory / "owner.json").write_text("")

    with claim_lost_run(run_id) as lost:
        assert lost is None

    assert registered_runs() == [run_id]
    owner = read_owner(run_id)
    assert owner is not None and owner.host == ""


def test_machine_of_a_run_is_known_without_its_owner_file(muster_home: Path, run_id: str) -> None:
    register = RunRegistration.opened(run_id)
    directory = register.directory
    enter(directory, make_entry(run_id))
    register.close()
    (directory / "owner.json").unlink()
    (directory / "host").write_text("elsewhere\n")

    owner = read_owner(run_id)

    assert owner is not None
    assert (owner.host, owner.fault) == ("elsewhere", f"{directory / 'owner.json'} is missing")


@pytest.mark.parametrize("number", ERRORS.values(), ids=ERRORS)
def test_entries_count_as_unknown_if_the_kernel_cannot_read_them(
    muster_home: Path, run_id: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = register_lost_run(muster_home, run_id)
    enter(directory, make_entry(run_id))
    read_file = read_own_file

    def refuse(path: Path) -> bytes:
        if path.name.startswith(("owner", "component")):
            raise OSError(number, os.strerror(number), str(path))
        return read_file(path)

    monkeypatch.setattr(registry, "read_own_file", refuse)

    with claim_lost_run(run_id) as lost:
        assert lost is not None
        faults = lost.faults

    assert len(faults) == 2
    assert all(os.strerror(number) in fault for fault in faults)
    assert {file.path.name for file in list_unreadable_files()} == {
        "owner.json",
        "component-trainer.json",
    }


def test_registry_that_cannot_be_listed_is_not_empty(
    muster_home: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_lost_run(muster_home, run_id)

    def refuse(path: Path) -> Iterator[Path]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)

    with pytest.raises(OSError, match="Too many open files"):
        registered_runs()
    assert teardown_s() >= 600


def write_submission(directory: Path, run_id: str, **changes: object) -> None:
    attempt = directory / "attempt-02"
    attempt.mkdir(parents=True)
    fields = {
        "submission_id": f"{run_id}--a02",
        "run_id": run_id,
        "attempt": 2,
        "component": "trainer",
        "submit_began_at": 1.0,
    }
    content = SubmissionJson.model_validate({**fields, **changes})
    (attempt / "submission.json").write_text(content.model_dump_json())


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_job_with_an_unreadable_entry_is_known_by_its_submission(
    muster_home: Path, run_id: str, tmp_path: Path, damage: Damage
) -> None:
    directory = register_lost_run(muster_home, run_id, directory=tmp_path)
    damage(directory / "job-trainer.json")
    write_submission(tmp_path, run_id)

    with claim_lost_run(run_id) as lost:
        assert lost is not None
        jobs, unknown = lost.jobs, lost.unknown_jobs

    assert [job.submission_id for job in jobs] == [f"{run_id}--a02"]
    assert jobs[0].log.parent == tmp_path / "attempt-02"
    assert unknown == ()


def test_job_is_unknown_if_its_submission_is_unreadable_as_well(
    muster_home: Path, run_id: str, tmp_path: Path
) -> None:
    directory = register_lost_run(muster_home, run_id, directory=tmp_path)
    (directory / "job-trainer.json").touch()
    write_submission(tmp_path, run_id)
    (tmp_path / "attempt-02" / "submission.json").write_text("")

    with claim_lost_run(run_id) as lost:
        assert lost is not None
        assert [file.component for file in lost.unknown_jobs] == ["trainer"]


def test_entries_are_written_while_the_disk_forces_a_record(
    muster_home: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of a component must not wait for fsync of another record in the registry."""
    register = RunRegistration.opened(run_id)
    is_released = threading.Event()
    is_forcing = threading.Event()

    def force(fd: int) -> None:
        is_forcing.set()
        is_released.wait(60)

    monkeypatch.setattr("tasks.record.disk.os.fsync", force)
    register.disk.replace(register.directory / "record", lambda: "a record")
    assert is_forcing.wait(60)

    entry = make_entry(run_id)
    register.entry_disk.do(lambda: enter(register.directory, entry)).result(60)
    was_forcing = not is_released.is_set()
    is_released.set()

    assert was_forcing
    assert (register.directory / entry.file_of("trainer")).exists()
    registry.leave(register.directory, "trainer")
    register.close()


def test_owner_and_jobs_are_forced_to_the_disk(
    muster_home: Path, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry files of a Ray job and of a run's flow process must survive a power failure.

    The files of other components need not survive, because a power failure also ends the
    components.
    """
    forced: set[str] = set()
    force = os.fsync

    def note(fd: int) -> None:
        forced.add(os.readlink(f"/proc/self/fd/{fd}"))
        force(fd)

    monkeypatch.setattr("tasks.record.disk.os.fsync", note)

    register = RunRegistration.opened(run_id)
    directory = register.directory
    job = {"submission_id": "job", "log": tmp_path / "trainer.log", "grace_s": 1.0}
    about = {"run_id": run_id, "attempt": 1, "component": "rollout"}
    enter(directory, JobEntry.model_validate({**job, **about}))
    after_job = set(forced)
    enter(directory, make_entry(run_id))

    assert any(path.startswith(f"{directory}/.owner.json") for path in forced)
    assert any(path.startswith(f"{directory}/.job-rollout.json") for path in forced)
    assert {str(directory), str(directory.parent)} <= forced
    assert forced == after_job
    register.close()


@pytest.mark.parametrize("name", ["owner.json", "component-trainer.json", "job-trainer.json"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_unreadable_files_are_listed_with_path_and_reason(
    muster_home: Path, run_id: str, damage: Damage, name: str
) -> None:
    directory = register_lost_run(muster_home, run_id)
    damage(directory / name)

    [file] = list_unreadable_files()

    assert file.path == directory / name
    assert file.reason


def test_status_names_an_unreadable_file(
    muster_home: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = register_lost_run(muster_home, run_id)
    (directory / "component-trainer.json").touch()

    status()

    output = capsys.readouterr()
    assert f"{directory}/component-trainer.json cannot be read: the file is empty" in (
        output.out + output.err
    )


def test_reconcile_ends_the_run_of_an_unreadable_owner_and_entry(
    muster_home: Path, run_id: str, start: Callable[..., Any]
) -> None:
    directory = register_lost_run(muster_home, run_id)
    (directory / "owner.json").write_text("")
    (directory / "component-trainer.json").write_text("")
    trainer = start(MUSTER_RUN_ID=run_id, MUSTER_COMPONENT="trainer")

    report = reconcile_host()

    [run] = report.runs
    wait_until(lambda: not is_alive(trainer), "the trainer has ended")
    assert run.killed == (trainer.pid,)
    assert f"{directory}/owner.json cannot be read: the file is empty" in str(run)
    assert f"{directory}/component-trainer.json cannot be read: the file is empty" in str(run)
    assert registered_runs() == []


def test_reconcile_reports_the_unreadable_entry_of_a_living_run(
    muster_home: Path, run_id: str, start: Callable[..., Any]
) -> None:
    register = RunRegistration.opened(run_id)
    (register.directory / "component-trainer.json").touch()
    trainer = start(MUSTER_RUN_ID=run_id, MUSTER_COMPONENT="trainer")

    [run] = reconcile_host().runs
    was_alive = is_alive(trainer)
    register.close()

    assert was_alive
    assert "component-trainer.json cannot be read: the file is empty" in run.found
    assert not run.has_changes and not run.open
    assert registered_runs() == [run_id]


def test_new_attempt_does_not_start_beside_a_run_of_an_unknown_machine(
    muster_home: Path, run_id: str
) -> None:
    directory = register_lost_run(muster_home, run_id)
    elsewhere = ProcessId(pid=os.getpid(), start_ticks=1, boot_id="another machine")
    enter(directory, make_entry(run_id, guardian=elsewhere, process=elsewhere))
    (directory / "owner.json").write_text("")

    with pytest.raises(OSError, match="unknown machine"):
        finish_predecessor(run_id)

    [run] = reconcile_host().runs
    assert "Muster does not know on which host the run was started" in run.open


def test_server_and_adoption_are_known_without_a_readable_owner_file(
    muster_home: Path, run_id: str
) -> None:
    directory = register_lost_run(muster_home, run_id)
    place = RunPlace.of(run_id)
    place.directory.mkdir(parents=True)
    record = RunJson(state=RunState.RUNNING, run_id=run_id, flow_run_id="a-flow-run")
    place.record.write_text(record.model_dump_json())
    place.spec.write_text("name: a\non_lost_flow: adopt\n")
    (directory / "owner.json").write_text("")

    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        claim_lost_run(run_id) as lost,
    ):
        assert lost is not None
        complete_owner(lost)

    assert lost.owner.adopts
    assert lost.owner.api_url == "http://127.0.0.1:9/api"
