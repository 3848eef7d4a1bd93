"""Pruning deletes old files of ended runs, and keeps records, specs and files in use."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
from cyclopts import App

from flows.prune import prune
from tasks.processes.registry import RunRegistration
from tasks.record.code_store import check_out, read_code, store_project
from tasks.server.flow_runs import ServerAway
from tasks.show.arguments import run as run_verb
from tasks.spec.workloads import WORKLOADS
from tasks.upkeep import prune as pruning
from tasks.upkeep.prune import Retention, prune_host
from tasks.upkeep.waiting_runs import note_waiting_run
from tests.support.host_environment import ROOT

DAY_S = 24 * 3600.0
OLD, NEW, OTHER = (f"{name}-grpo-20260101-000000-abcd91c2" for name in ("old", "new", "other"))
ALL = Retention(days=0, outputs=True)


def make(
    home: Path,
    run_id: str,
    *,
    days_ago: float = 100.0,
    state: str = "completed",
    resume_from: str = "",
) -> Path:
    """Create the directory of a run, and return its path.

    Args:
        home: MUSTER_HOME.
        run_id: Id of the run.
        days_ago: Days since the end of the run, if `state` is "completed".
        state: State of the run.
        resume_from: Path that the run uses, for example the path of another run's checkpoint.
    """
    directory = home / "runs" / run_id
    attempt = directory / "attempt-01"
    (directory / "checkpoints" / "step-10").mkdir(parents=True)
    (directory / "checkpoints" / "step-10" / "weights.bin").write_bytes(b"w" * 100)
    attempt.mkdir()
    for name in ("trainer.log", "events.jsonl", "rollout.jsonl", "submission.json"):
        (attempt / name).write_text(f"{name} of {run_id}\n" * 20)
    (attempt / "metrics.jsonl").write_text("{}")
    (attempt / "spec.yaml").write_text(f"name: x\nenv: {{FROM: '{resume_from}'}}\n")
    record: dict[str, Any] = {
        "run_id": run_id,
        "state": state,
        "ended_at": time.time() - days_ago * DAY_S if state == "completed" else None,
        "attempts": [{"number": 1, "state": state, "resume_from": resume_from or None}],
    }
    (directory / "run.json").write_text(json.dumps(record))
    return directory


def files(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def test_pruned_run_keeps_record_specs_and_outputs(muster_home: Path) -> None:
    run = make(muster_home, OLD)

    pruned = prune_host(Retention())

    assert files(run) == {
        "run.json",
        "attempt-01/spec.yaml",
        "attempt-01/metrics.jsonl",
        "checkpoints/step-10/weights.bin",
    }
    assert [(done.directory, done.size_bytes > 0) for done in pruned.runs] == [(run, True)]
    assert prune_host(Retention()).runs == ()


def test_outputs_are_deleted_if_requested(muster_home: Path) -> None:
    run = make(muster_home, OLD)

    prune_host(Retention(outputs=True))

    assert files(run) == {"run.json", "attempt-01/spec.yaml"}
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_checkpoint_from_which_an_open_run_started_is_kept(
    muster_home: Path, workload: str
) -> None:
    source = make(muster_home, f"old-{workload}-20260101-000000-abcd91c2")
    make(muster_home, NEW, state="running", resume_from=f"{source}/checkpoints/step-10")

    prune_host(ALL)

    assert (source / "checkpoints" / "step-10" / "weights.bin").exists()


def test_link_is_deleted_but_not_its_target(muster_home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "model.bin").write_text("mine")
    run = make(muster_home, OLD)
    (run / "model").symlink_to(shared)

    prune_host(ALL)

    assert not (run / "model").is_symlink()
    assert (shared / "model.bin").read_text() == "mine"


@pytest.mark.parametrize(
    ("variable", "days_ago", "is_removed"),
    [
        # by default, files are deleted 60 days after the end of the run
        ("", 59.9, False),
        ("", 60.1, True),
        # an operator has set 7 days, or `inf` to keep the files forever
        ("7", 7.1, True),
        ("inf", 1000.0, False),
    ],
)
def test_files_are_deleted_some_days_after_the_end(
    muster_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    days_ago: float,
    is_removed: bool,
) -> None:
    run = make(muster_home, OLD, days_ago=days_ago)
    monkeypatch.setenv("MUSTER_PRUNE_DAYS", variable)

    prune_host()

    assert (run / "attempt-01" / "trainer.log").exists() is not is_removed
    assert (run / "checkpoints" / "step-10" / "weights.bin").exists()


def test_dry_run_reports_the_same_and_deletes_nothing(muster_home: Path) -> None:
    run = make(muster_home, OLD)
    before = files(run)

    pruned = prune_host(ALL, dry_run=True)

    assert files(run) == before
    assert next(iter(pruned.lines())).split()[-1] == OLD
    assert pruned.summary.startswith("would remove the files of 1 run (")


@pytest.mark.parametrize("state", ["running", "pending_resources", "stopping", "queued"])
def test_unfinished_run_is_never_touched(muster_home: Path, state: str) -> None:
    run = make(muster_home, OLD, state=state)
    before = files(run)

    prune_host(ALL)

    assert files(run) == before


@pytest.mark.parametrize("record", ["", "{", '{"state": "hm", "ended_at": 1}', "[]"])
def test_run_without_a_readable_record_is_never_touched(muster_home: Path, record: str) -> None:
    run = make(muster_home, OLD)
    (run / "run.json").write_text(record)
    before = files(run)

    prune_host(ALL)

    assert files(run) == before


def test_a_registered_run_is_never_touched(muster_home: Path) -> None:
    run = make(muster_home, OLD)
    before = files(run)
    register = RunRegistration.opened(OLD)

    prune_host(ALL)

    register.close()
    assert files(run) == before


def test_waiting_run_is_never_touched(muster_home: Path) -> None:
    run = make(muster_home, OLD)
    before = files(run)
    note_waiting_run(OLD, "1b4e28ba-2fa1-4d3b-a3f5-ef19b5a7633b", "http://127.0.0.1:9/api")

    prune_host(ALL)

    assert files(run) == before


def test_run_is_kept_while_another_run_uses_it(muster_home: Path) -> None:
    source = make(muster_home, OLD)
    before = files(source)
    make(muster_home, NEW, days_ago=1, resume_from=str(source / "checkpoints" / "step-10"))

    prune_host(Retention(days=30, outputs=True))

    assert files(source) == before


def test_run_named_by_a_waiting_flow_run_is_never_touched(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(muster_home, OLD)
    before = files(run)

    def asked(ask: object) -> str | None:
        return OLD if ask is pruning._describe_open_work else None

    monkeypatch.setattr(pruning, "_on_server", asked)

    prune_host(ALL)

    assert files(run) == before


PIPELINE = "6b1f4a1e-2f0e-4c55-9d1c-0d6f1c6d3a10"


def make_pipeline(home: Path, *, days_ago: float = 100.0, name: str = PIPELINE) -> Path:
    """Create the folder of a pipeline, which contains the result of a step."""
    folder = home / "pipelines" / name
    folder.mkdir(parents=True)
    changed_at = time.time() - days_ago * DAY_S
    for path in (folder / "prepare.result.json", folder):
        if path != folder:
            path.write_text("[]")
        os.utime(path, (changed_at, changed_at))
    return folder


def answer_with(monkeypatch: pytest.MonkeyPatch, server_text: str) -> None:
    """Use `server_text` as the description of the server's deployments and unfinished runs."""

    def ask_server(ask: object) -> str | None:
        return server_text if ask is pruning._describe_open_work else None

    monkeypatch.setattr(pruning, "_on_server", ask_server)


def test_folder_of_an_old_pipeline_is_deleted(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "")
    old = make_pipeline(muster_home)
    new = make_pipeline(muster_home, days_ago=59, name=PIPELINE.replace("6b", "7c"))
    other = make_pipeline(muster_home, name="notes")
    link = muster_home / "pipelines" / PIPELINE.replace("6b", "8d")
    link.symlink_to(other)

    listed = prune_host(Retention(), dry_run=True)
    existed = old.exists()
    pruned = prune_host(Retention())

    assert existed and not old.exists()
    assert new.exists() and other.exists() and link.is_symlink()
    assert listed.pipelines == pruned.pipelines == (old,)
    assert listed.summary == "would remove the files of 1 pipeline"
    assert f"pipelines/{PIPELINE}" in "\n".join(pruned.lines())


def test_folder_of_an_open_pipeline_is_kept(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, f"{PIPELINE} sweep-pipeline-1 {{}}")
    folder = make_pipeline(muster_home)

    assert prune_host(ALL).pipelines == ()
    assert folder.exists()


def test_folder_of_a_pipeline_is_kept_while_a_run_uses_it(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "")
    folder = make_pipeline(muster_home)
    make(muster_home, NEW, days_ago=1, resume_from=f"{folder}/prepare.result.json")

    assert prune_host(Retention(days=30)).pipelines == ()
    assert prune_host(Retention(days=0)).pipelines == (folder,)


def test_folder_of_a_pipeline_is_kept_without_a_server(muster_home: Path) -> None:
    folder = make_pipeline(muster_home)

    assert prune_host(ALL).pipelines == ()
    assert folder.exists()


def test_undeletable_pipeline_is_reported(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "")
    make_pipeline(muster_home)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)

    assert "of a pipeline could not be deleted" in prune_host(Retention()).open


def test_code_copy_is_deleted_but_not_files_written_into_it(
    muster_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("code")
    run = make(muster_home, OLD)
    check_out(read_code(store_project(tmp_path / "project")), run / "code")
    (run / "code" / "weights.bin").write_bytes(b"w")

    prune_host()

    assert [path.name for path in (run / "code").iterdir()] == ["weights.bin"]


def test_nothing_is_deleted_while_the_server_does_not_answer(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(muster_home, OLD)
    before = files(run)

    def away(_: object) -> str:
        raise ServerAway("http://127.0.0.1:9/api: refused")

    monkeypatch.setattr(pruning, "_on_server", away)

    code = pruning.prune(yes=True)

    assert code == 1
    assert files(run) == before
    assert "the Prefect server does not answer" in capsys.readouterr().out


def test_undeletable_files_are_reported(muster_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = make(muster_home, OLD), make(muster_home, OTHER)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == run / "attempt-01" / "trainer.log":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)

    pruned = prune_host(ALL)

    assert files(run) == {"run.json", "attempt-01/spec.yaml", "attempt-01/trainer.log"}
    assert files(other) == {"run.json", "attempt-01/spec.yaml"}
    assert "Permission denied" in pruned.open and pruned.open in pruned.summary


def test_large_stack_log_is_archived_and_emptied(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_STACK_LOG_BYTES", 1000)
    log = muster_home / "stack" / "logs" / "worker.log"
    log.parent.mkdir(parents=True)
    writer = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in range(3):
        os.write(writer, b"%d" % number * 1001)
        prune_host()
    os.write(writer, b"after")
    os.close(writer)

    assert {path.name for path in log.parent.iterdir()} == {"worker.log", "worker.log.1.gz"}
    assert gzip.decompress(log.with_name("worker.log.1.gz").read_bytes()) == b"2" * 1001
    assert log.read_text() == "after"


def test_command_deletes_only_with_yes(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(muster_home, OLD)
    (run / "lineage.json").write_text("{}")
    before = files(run)

    assert pruning.prune() == 0
    shown = capsys.readouterr().out
    assert files(run) == before
    assert OLD in shown and "--yes" in shown

    assert pruning.prune(yes=True, outputs=True) == 0
    assert "removed the files of 1 run" in capsys.readouterr().out
    assert files(run) == {"run.json", "lineage.json", "attempt-01/spec.yaml"}


@pytest.mark.parametrize("option", [["--days", "soon"], ["--days", "-1"], ["--outputs=x"]])
def test_invalid_rule_deletes_nothing(
    muster_home: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    run = make(muster_home, OLD)
    before = files(run)

    assert run_verb(App(default_command=pruning.prune), ["--yes", *option]) == 2

    assert files(run) == before
    assert option[0].partition("=")[0] in capsys.readouterr().err


def test_served_flow_keeps_its_parameters() -> None:
    code = (
        "import sys, cloudpickle; flow = cloudpickle.load(sys.stdin.buffer); "
        "print(flow.validate_parameters({'keep': {'days': 3}})['keep'].days)"
    )

    # For each flow run of `flow.serve`, Prefect starts a process and sends the flow to this process
    # with cloudpickle. This test does the same with the flow `prune`.
    done = subprocess.run(
        (sys.executable, "-c", code), input=cloudpickle.dumps(prune), capture_output=True, cwd=ROOT
    )

    assert done.stdout.strip() == b"3.0", done.stderr.decode()
