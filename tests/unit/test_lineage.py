"""Tests of the lineage of a run: the data that the run reads, and the data that it makes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.record.lineage import (
    DataKind,
    Lineage,
    LineageIndex,
    LineageInput,
    LineageOutput,
    classify_uri,
    describe_lineage,
    list_inputs,
    read_lineage,
    write_lineage,
)
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, ResumeRecord, RunJson
from tasks.record.states import RunState
from tasks.spec.loading import parse_spec
from tests.support import checkpoint_files as files

OWN = "own-sft-20260102-000000-00000001"
PARENT = "parent-sft-20260101-000000-00000000"
PREPARE = "prepare-step-20260101-000000-00000009"


def make_training(*words: str, **keys: Any) -> dict[str, Any]:
    """Return the spec of a training. The command of its trainer ends with `words`."""
    trainer = {"command": ["python", "train.py", *words], "checkpoints": "${run.dir}/checkpoints"}
    return {"name": "own", "workload": "sft", "components": {"trainer": trainer}, **keys}


def list_uris(*words: str, **keys: Any) -> list[str]:
    """Return the URIs of a training's inputs. The command of its trainer ends with `words`."""
    spec = make_training(*words, cwd="/project", **keys)
    return [data.uri for data in list_inputs(spec, OWN)]


@pytest.mark.parametrize(
    ("words", "uris"),
    [
        (["--data", "/data/a.jsonl"], ["/data/a.jsonl"]),
        (["--train-file=a.jsonl"], ["/project/a.jsonl"]),
        (["--dataset_name", "openai/gsm8k"], ["openai/gsm8k"]),
        (["data.train_files=/a.parquet", "+data.val_files=/b.parquet"], None),
        (["data.train_files=['/a.parquet','/b.parquet']"], None),
        (["--train-files", "/a.parquet", "/b.parquet", "--lr", "0.1"], None),
        (["--prompt-data", "s3://bucket/a"], ["s3://bucket/a"]),
        (["--database", "/x", "--data-parallel", "4", "--lr=/y", "--metadata=/z"], []),
        (["--data"], []),
        (["--data", "/data/a", "/output"], ["/data/a"]),
    ],
)
def test_options_for_data_are_inputs(words: list[str], uris: list[str] | None) -> None:
    expected = ["/a.parquet", "/b.parquet"] if uris is None else uris

    assert list_uris(*words) == expected


def test_relative_paths_of_declared_inputs_start_at_the_working_directory() -> None:
    declared = ["train.jsonl", "../shared/b", "/c", "hf://datasets/d"]

    assert list_uris(inputs=declared) == [
        "/project/train.jsonl",
        "/shared/b",
        "/c",
        "hf://datasets/d",
    ]


def test_start_checkpoint_is_an_input_with_its_run_and_step() -> None:
    start = {"run": PARENT, "checkpoint": "/data/step_20", "step": 20}

    [data] = list_inputs(make_training(start_from=start), OWN)

    assert (data.uri, data.run, data.step) == ("/data/step_20", PARENT, 20)
    assert data.kind is DataKind.CHECKPOINT


def test_checkpoint_to_which_a_run_goes_back_is_no_input() -> None:
    own = {"run": OWN, "checkpoint": f"/runs/{OWN}/checkpoints/step_2", "attempt": 3}

    assert list_inputs(make_training(start_from=own), OWN) == ()


def test_files_of_other_runs_in_commands_and_step_arguments_are_inputs() -> None:
    checkpoint = f"/home/.muster/runs/{PARENT}/checkpoints/step_4"
    own = f"/home/.muster/runs/{OWN}/attempt-01/result.json"
    args = json.dumps({"parts": [{"data": f"/home/.muster/runs/{PREPARE}/a.jsonl"}]})
    env = {"MUSTER_STEP_ARGS": args, "MUSTER_RESULT": own}
    step = {"command": ["score", f"--model={checkpoint}", own], "env": env}

    inputs = list_inputs({"name": "own", "components": {"step": step}}, OWN)

    assert {data.run: data.kind for data in inputs} == {
        PREPARE: DataKind.DATA,
        PARENT: DataKind.CHECKPOINT,
    }


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("/a/global_step_20", DataKind.CHECKPOINT),
        ("s3://bucket/checkpoint-500/", DataKind.CHECKPOINT),
        (f"muster://runs/{PREPARE}/result", DataKind.RESULT),
        ("/data/train", DataKind.DATA),
        ("/data/train.parquet", DataKind.DATA),
        ("hf://datasets/openai/gsm8k", DataKind.DATA),
    ],
)
def test_kind_of_data_follows_from_its_name(uri: str, kind: DataKind) -> None:
    assert classify_uri(uri) is kind


def make_record(*attempts: AttemptRecord, workload: str = "sft") -> RunJson:
    return RunJson(
        run_id=OWN, flow_run_id="f", state=RunState.RUNNING, workload=workload, attempts=attempts
    )


def describe(spec: dict[str, Any], record: RunJson) -> Lineage:
    """Write the spec file of the last attempt, and return the inputs and outputs of the run."""
    place = RunPlace.of(OWN)
    resolved = json.loads(json.dumps(spec).replace("${run.dir}", str(place.directory)))
    attempt = place.attempt(len(record.attempts))
    attempt.directory.mkdir(parents=True, exist_ok=True)
    attempt.spec.write_text(json.dumps(resolved))
    return describe_lineage(parse_spec(spec), resolved, place, record, is_running=False)


def test_complete_checkpoints_are_outputs_with_step_and_attempt(muster_home: Path) -> None:
    folder = RunPlace.of(OWN).directory / "checkpoints"
    folder.mkdir(parents=True)
    files.plain_torch(folder, 2)
    files.plain_torch(folder, 4)
    (folder / "step_6.pt.tmp").write_bytes(b"half")
    began = time.time() - 60
    attempts = (
        AttemptRecord(number=1, state=RunState.FAILED, started_at=began),
        AttemptRecord(
            number=2,
            state=RunState.RUNNING,
            started_at=time.time() + 60,
            resume_from=str(folder / "step_2.pt"),
            resume=ResumeRecord(step=2),
        ),
    )

    lineage = describe(make_training("${attempt.resume_from}"), make_record(*attempts))

    assert [(out.step, out.attempt, out.kind) for out in lineage.outputs] == [
        (2, 1, DataKind.CHECKPOINT),
        (4, 1, DataKind.CHECKPOINT),
    ]
    assert [out.uri for out in lineage.outputs] == [
        str(folder / "step_2.pt"),
        str(folder / "step_4.pt"),
    ]
    [resume] = lineage.resumes
    assert (resume.attempt, resume.uri, resume.step) == (2, str(folder / "step_2.pt"), 2)


def make_step(*inputs: str) -> dict[str, Any]:
    step = {"command": ["sh", "-c", "true"], "on_exit_zero": "complete"}
    return {"name": "own", "workload": "step", "inputs": [*inputs], "components": {"step": step}}


def describe_step(result: object, *inputs: str, state: RunState = RunState.COMPLETED) -> Lineage:
    """Return the inputs and outputs of a pipeline step that has written a result."""
    directory = RunPlace.of(OWN).attempt(1).directory
    directory.mkdir(parents=True)
    (directory / "result.json").write_text(json.dumps(result))
    attempt = AttemptRecord(number=1, state=state, started_at=1.0, ended_at=2.0)
    return describe(make_step(*inputs), make_record(attempt, workload="step"))


def test_numbers_from_a_checkpoint_are_an_evaluation(muster_home: Path) -> None:
    result = {"score": 0.5, "math": {"accuracy": 1}, "is_ok": True, "model": "/a/step_2"}

    lineage = describe_step(result, "/a/step_2")

    [out] = lineage.outputs
    assert out.uri == f"muster://runs/{OWN}/result"
    assert out.kind is DataKind.EVALUATION
    assert out.figures == {"score": 0.5, "math.accuracy": 1.0}


def test_paths_from_a_checkpoint_are_exports(muster_home: Path) -> None:
    lineage = describe_step({"path": "/exports/model"}, "/a/step_2")

    assert [(out.uri, out.kind) for out in lineage.outputs] == [
        (f"muster://runs/{OWN}/result", DataKind.RESULT),
        ("/exports/model", DataKind.EXPORT),
    ]


def test_paths_without_a_checkpoint_are_data(muster_home: Path) -> None:
    lineage = describe_step({"path": "/data/train.jsonl", "rows": 7}, "/data/raw")

    assert [(out.uri, out.kind) for out in lineage.outputs] == [
        (f"muster://runs/{OWN}/result", DataKind.RESULT),
        ("/data/train.jsonl", DataKind.DATA),
    ]


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.RUNNING])
def test_step_that_has_not_completed_has_no_outputs(muster_home: Path, state: RunState) -> None:
    assert describe_step({"path": "/data/a"}, state=state).outputs == ()


def test_path_with_other_bytes_than_utf_8_is_recorded() -> None:
    [data] = list_inputs(make_training(inputs=["/data/\udcff.jsonl"]), OWN)

    assert data.uri == "/data/\\udcff.jsonl"


def test_removed_checkpoints_stay_in_the_lineage(muster_home: Path) -> None:
    removed = LineageOutput(uri="/a/step_2", kind=DataKind.CHECKPOINT, at=1.0, signature="x")
    present = LineageOutput(uri="/a/step_4", kind=DataKind.CHECKPOINT, at=2.0, signature="y")
    place = RunPlace.of(OWN)
    place.directory.mkdir(parents=True)
    write_lineage(place, Lineage(run_id=OWN, outputs=(removed,)).as_json())
    earlier = read_lineage(place)
    assert earlier is not None

    lineage = Lineage(run_id=OWN, outputs=(present,)).including(earlier)

    assert lineage.outputs == (removed, present)


def test_unreadable_lineage_counts_as_missing(muster_home: Path) -> None:
    place = RunPlace.of(OWN)
    place.directory.mkdir(parents=True)
    place.lineage.write_text('{"outputs": 3}')

    assert read_lineage(place) is None


def make_lineage(run_id: str, *outputs: str, inputs: Any = (), paths: Any = ()) -> Lineage:
    made = tuple(LineageOutput(uri=uri, kind=DataKind.CHECKPOINT, step=2) for uri in outputs)
    read = tuple(LineageInput(uri=uri, kind=classify_uri(uri)) for uri in inputs)
    return Lineage(run_id=run_id, outputs=made, inputs=read, paths=tuple(paths))


def test_index_finds_the_run_that_made_an_input() -> None:
    index = LineageIndex(
        {
            "a": make_lineage("a", "/ckpt/step_2", "/ckpt/step_20", inputs=["/data/raw"]),
            "b": make_lineage("b", inputs=["/ckpt/step_20/model"], paths=["/ckpt/step_200"]),
            "c": make_lineage("c", paths=["/usr/bin/python", "/ckpt/step_2"]),
        }
    )

    assert [(data.uri, data.run) for data in index.list_inputs("a")] == [("/data/raw", None)]
    [data] = index.list_inputs("b")
    assert (data.uri, data.run, data.kind) == ("/ckpt/step_20/model", "a", DataKind.CHECKPOINT)
    output = index.find_output(data)
    assert output is not None and output.uri == "/ckpt/step_20"
    users = index.list_users("a")
    assert {name: [data.uri for data in used] for name, used in users.items()} == {
        "b": ["/ckpt/step_20/model"],
        "c": ["/ckpt/step_2"],
    }


def test_own_outputs_in_the_command_are_no_inputs() -> None:
    lineage = make_lineage("a", "/ckpt/step_2", paths=["/ckpt/step_2"])

    assert LineageIndex({"a": lineage}).list_inputs("a") == []
