"""Tests of `muster retry` and `muster checkpoints` for runs with a record on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclopts import App

from flows.train import retry
from tasks.processes.identity import host_name
from tasks.record.places import RunPlace
from tasks.show.arguments import run as run_verb
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import dump_spec, load_spec, parse_spec
from tasks.spec.run import RunSpec
from tasks.train import retrying, run_records
from tasks.train.run_checkpoints import with_start
from tasks.train.run_verbs import checkpoints
from tests.support import checkpoint_files as files

RUN = "trial-sft-20260101-000000-0123abcd"
RETRY = App(name="retry", default_command=retry)
CHECKPOINTS = App(name="checkpoints", default_command=checkpoints)


class Recorded:
    """The files of an ended run of `muster train`, and the specs with which the run is retried."""

    def __init__(self, folder: Path) -> None:
        self.place = RunPlace.of(RUN)
        self.file = folder / "muster.yaml"
        #: Specs with which the run was started again.
        self.retried: list[RunSpec] = []

    def write(
        self,
        *,
        state: str = "failed",
        best_step: int = 35,
        env: dict[str, str] | None = None,
        passes_checkpoint: bool = True,
    ) -> None:
        trainer = {
            "command": ["python", *(["${attempt.resume_from}"] if passes_checkpoint else [])],
            "checkpoints": "${run.dir}/checkpoints",
        }
        data: dict[str, Any] = {
            "name": "trial",
            "workload": "sft",
            "env": env or {},
            "components": {"trainer": trainer},
            "progress": {"jsonl": "metrics.jsonl", "step": "step", "total": 60},
        }
        self.file.write_text(json.dumps(data))
        attempt = self.place.attempt(1)
        attempt.directory.mkdir(parents=True)
        directory = str(self.place.directory)
        attempt.spec.write_text(json.dumps(data).replace("${run.dir}", directory))
        self.place.spec.write_text(dump_spec(parse_spec(data)))
        for step in (10, 20, 30):
            files.plain_torch(self.place.directory / "checkpoints", step)
        record = {
            "run_id": RUN,
            "flow_run_id": "11111111-0000-4000-8000-000000000000",
            "state": state,
            "started_at": 1000.0,
            "ended_at": 2000.0,
            "provenance": {"spec_file": str(self.file)},
            "attempts": [{"number": 1, "state": state, "best_step": best_step, "started_at": 1.0}],
        }
        self.place.record.write_text(json.dumps(record))


@pytest.fixture
def recorded(tmp_path: Path, muster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded(tmp_path)

    def start(spec: RunSpec, run_flow: object) -> int:
        recorded.retried.append(spec)
        return 0

    monkeypatch.setattr(retrying, "run_in_terminal", start)
    monkeypatch.chdir(tmp_path)
    (RunPlace.of(RUN).directory / "checkpoints").mkdir(parents=True)
    return recorded


def test_retry_uses_the_same_spec_with_its_secrets(recorded: Recorded) -> None:
    recorded.write(env={"API_TOKEN": "not-for-the-record"})

    assert run_verb(RETRY, [RUN]) == 0

    assert "not-for-the-record" not in recorded.place.spec.read_text()
    assert recorded.retried == [load_spec(recorded.file)]


def test_retry_without_a_secret_names_its_key(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.write(env={"API_TOKEN": "not-for-the-record"})
    data = json.loads(recorded.file.read_text())
    del data["env"]
    recorded.file.write_text(json.dumps(data))

    assert run_verb(RETRY, [RUN]) == 2

    assert "the secret value of env.API_TOKEN" in capsys.readouterr().err
    assert not recorded.retried


def test_step_back_passes_the_chosen_checkpoint_to_the_next_attempt(recorded: Recorded) -> None:
    recorded.write(state="completed", best_step=60)

    assert run_verb(RETRY, [RUN, "--from-step", "20"]) == 0

    [spec] = recorded.retried
    assert spec.written()["start_from"] == {
        "run": RUN,
        "checkpoint": str(recorded.place.directory / "checkpoints" / "step_20.pt"),
        "step": 20,
        "attempt": 2,
    }


@pytest.mark.parametrize(
    ("facts", "words", "message"),
    [
        ({"state": "completed", "best_step": 60}, [], "is completed, so a retry would train"),
        ({"state": "running"}, [], "is running: only a run that has ended can be retried"),
        ({}, ["--from-step", "11"], "Steps with a complete checkpoint: 10, 20, 30."),
        (
            {"passes_checkpoint": False},
            ["--from-step", "20"],
            "does not use ${attempt.resume_from}",
        ),
    ],
)
def test_impossible_retry_is_refused(
    recorded: Recorded,
    capsys: pytest.CaptureFixture[str],
    facts: dict[str, Any],
    words: list[str],
    message: str,
) -> None:
    recorded.write(**facts)

    assert run_verb(RETRY, [RUN, *words]) == 2

    assert message in capsys.readouterr().err
    assert not recorded.retried


def test_refusal_names_reconcile_if_the_process_of_the_run_was_killed(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.write(state="running")
    process = SimpleNamespace(pid=812, is_alive=lambda: False)
    killed = SimpleNamespace(host=host_name(), process=process, adopts=False)
    monkeypatch.setattr(run_records, "read_owner", lambda run_id: killed)

    assert run_verb(RETRY, [RUN]) == 2

    error = capsys.readouterr().err
    assert "is still recorded as running" in error
    assert "run `muster reconcile`" in error
    assert not recorded.retried


def test_completed_run_that_has_missed_its_last_step_is_retried(recorded: Recorded) -> None:
    recorded.write(state="completed", best_step=12)

    assert run_verb(RETRY, [RUN]) == 0

    assert len(recorded.retried) == 1


def test_checkpoints_are_listed_with_their_attempt_and_reasons(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.write()
    (recorded.place.directory / "checkpoints" / "step_40.pt").write_bytes(b"")

    assert run_verb(CHECKPOINTS, [RUN, "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["completeness"], row["attempt"]) for row in rows] == [
        (40, "incomplete", 1),
        (30, "complete", 1),
        (20, "complete", 1),
        (10, "complete", 1),
    ]
    assert "empty" in rows[0]["reason"]
    assert rows[1]["size_bytes"] > 0
    assert rows[1]["kept"] == ["the spec has no `keep`", "the newest complete checkpoint"]


@pytest.mark.parametrize(
    ("name", "step"),
    [(RUN, 30), (f"{RUN}@20", 20), ("latest@10", 10)],
)
def test_fork_starts_from_the_named_or_the_newest_complete_checkpoint(
    recorded: Recorded, name: str, step: int
) -> None:
    recorded.write()
    (recorded.place.directory / "checkpoints" / "step_40.pt").write_bytes(b"")

    spec = with_start(load_spec(recorded.file), name)

    assert spec.start_from is not None and (spec.start_from.run, spec.start_from.step) == (
        RUN,
        step,
    )
    assert parse_spec(spec.to_server_data()).start_from == spec.start_from


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{RUN}@40", r"step_40.pt: .*empty.*Steps with a complete checkpoint: 10, 20, 30\."),
        (f"{RUN}@x", "the step after @ must be a whole number, found 'x'"),
        ("no-such-run", "there is no run no-such-run"),
    ],
)
def test_fork_from_a_checkpoint_that_does_not_exist_is_refused(
    recorded: Recorded, name: str, message: str
) -> None:
    recorded.write()
    (recorded.place.directory / "checkpoints" / "step_40.pt").write_bytes(b"")

    with pytest.raises(retrying.BadArgument, match=message):
        with_start(load_spec(recorded.file), name)


def test_fork_whose_program_would_not_get_the_checkpoint_is_refused(recorded: Recorded) -> None:
    recorded.write(passes_checkpoint=False)

    with pytest.raises(InvalidSpec, match="does not use"):
        with_start(load_spec(recorded.file), RUN)


@pytest.mark.parametrize(
    ("app", "words", "status", "message"),
    [
        (CHECKPOINTS, [], 0, f"The run {RUN} has no checkpoint yet. "),
        (RETRY, ["--from-step", "10"], 2, f"{RUN} has no complete checkpoint of step 10. "),
    ],
)
def test_unrecognised_checkpoints_are_named_if_there_are_no_others(
    recorded: Recorded,
    capsys: pytest.CaptureFixture[str],
    app: App,
    words: list[str],
    status: int,
    message: str,
) -> None:
    recorded.write()
    folder = recorded.place.directory / "checkpoints"
    for path in [*folder.iterdir()]:
        path.unlink()
    files.write_text(folder / "it10" / "weights.bin", "w")

    assert run_verb(app, [RUN, *words]) == status

    assert (
        f"{message}Muster does not recognise it10 in {folder} as a checkpoint. If it is a "
        'checkpoint, write a pattern into the spec: `checkpoints: "${run.dir}/checkpoints/it*"`.'
    ) in capsys.readouterr().err.replace("\n", " ")
