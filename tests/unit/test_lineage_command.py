"""Tests of `muster lineage` with the records of this machine, and without a Prefect server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.record.lineage import DataKind, Lineage, LineageInput, LineageOutput, write_lineage
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.record.states import RunState
from tasks.spec.errors import BadArgument
from tasks.train import lineage_command
from tests.support import checkpoint_files as files

PREPARE = "prepare-step-20260101-000000-00000001"
TRAINING = "tune-sft-20260101-000001-00000002"
EVALUATION = "score-step-20260101-000002-00000003"
NEXT = "next-grpo-20260101-000003-00000004"


@pytest.fixture(autouse=True)
def no_server(muster_home: Path) -> Any:
    with temporary_settings(set_defaults={PREFECT_API_URL: None}):
        yield


def write_record(run_id: str, *attempts: AttemptRecord) -> RunPlace:
    place = RunPlace.of(run_id)
    place.directory.mkdir(parents=True)
    record = RunJson(
        run_id=run_id,
        flow_run_id=f"flow-run-of-{run_id}",
        state=RunState.COMPLETED,
        started_at=1.0,
        ended_at=2.0,
        workload=run_id.split("-")[1],
        attempts=attempts,
    )
    place.record.write_text(json.dumps(record.as_json()))
    return place


def write_run(run_id: str, *inputs: LineageInput, outputs: tuple[LineageOutput, ...] = ()) -> None:
    """Write the files of a run: its record, and its lineage (the inputs and outputs)."""
    place = write_record(run_id)
    write_lineage(place, Lineage(run_id=run_id, inputs=inputs, outputs=outputs).as_json())


def write_training(**keys: Any) -> Path:
    """Write the files of a training with two checkpoints. The file `lineage.json` is missing.

    Return the folder of the checkpoints.
    """
    attempt = AttemptRecord(
        number=1, state=RunState.COMPLETED, started_at=time.time() - 60, ended_at=time.time()
    )
    place = write_record(TRAINING, attempt)
    folder = place.directory / "checkpoints"
    folder.mkdir()
    files.plain_torch(folder, 2)
    files.plain_torch(folder, 4)
    trainer = {"command": ["python", "train.py"], "checkpoints": str(folder)}
    spec = {"name": "tune", "workload": "sft", "components": {"trainer": trainer}, **keys}
    place.attempt(1).directory.mkdir()
    for path in (place.spec, place.attempt(1).spec):
        path.write_text(json.dumps(spec))
    return folder


def print_lineage(capsys: pytest.CaptureFixture[str], run: str, **options: bool) -> str:
    lineage_command.lineage(run, **options)
    return capsys.readouterr().out


def test_tree_shows_origin_run_checkpoints_evaluations_and_further_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_training(inputs=["/data/train.jsonl"])
    made = LineageOutput(uri="/data/train.jsonl", kind=DataKind.DATA)
    write_run(PREPARE, LineageInput(uri="/data/raw"), outputs=(made,))
    checkpoint = LineageInput(uri=f"{folder}/step_4.pt", kind=DataKind.CHECKPOINT)
    result = LineageOutput(
        uri=f"muster://runs/{EVALUATION}/result", kind=DataKind.EVALUATION, figures={"score": 0.5}
    )
    write_run(EVALUATION, checkpoint, outputs=(result,))
    write_run(NEXT, checkpoint)

    tree = print_lineage(capsys, TRAINING)

    assert tree.splitlines() == [
        f"{TRAINING} completed",
        "├── made from",
        "│   └── data /data/train.jsonl",
        f"│       └── made by {PREPARE} completed",
        "│           └── data /data/raw",
        "└── made",
        f"    ├── checkpoint step 2 {folder}/step_2.pt",
        f"    └── checkpoint step 4 {folder}/step_4.pt",
        f"        ├── used by {EVALUATION} completed",
        f"        │   └── evaluation score=0.5 muster://runs/{EVALUATION}/result",
        f"        └── used by {NEXT} completed",
    ]


def test_json_has_the_inputs_of_each_maker_and_the_users(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_training(inputs=["/data/train.jsonl"])
    made = LineageOutput(uri="/data/train.jsonl", kind=DataKind.DATA)
    write_run(PREPARE, LineageInput(uri="/data/raw"), outputs=(made,))
    write_run(NEXT, LineageInput(uri=f"{folder}/step_2.pt"))

    content = json.loads(print_lineage(capsys, TRAINING, json=True))

    [data] = content["inputs"]
    assert (data["uri"], data["run"]) == ("/data/train.jsonl", PREPARE)
    assert [deeper["uri"] for deeper in data["inputs"]] == ["/data/raw"]
    assert [output["step"] for output in content["outputs"]] == [2, 4]
    [user] = content["used_by"]
    assert (user["run_id"], user["inputs"][0]["kind"]) == (NEXT, "checkpoint")


def test_removed_checkpoint_that_another_run_used_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_training()
    start = LineageInput(uri=f"{folder}/step_1.pt", kind=DataKind.CHECKPOINT, run=TRAINING, step=1)
    write_run(NEXT, start)

    tree = print_lineage(capsys, TRAINING)

    assert f"checkpoint {folder}/step_1.pt (step 1)\n" in tree
    assert f"used by {NEXT}" in tree


def test_files_that_were_overwritten_in_a_circle_end_the_tree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = LineageOutput(uri="/data/a")
    second = LineageOutput(uri="/data/b")
    write_run(PREPARE, LineageInput(uri="/data/b"), outputs=(first,))
    write_run(EVALUATION, LineageInput(uri="/data/a"), outputs=(second,))

    tree = print_lineage(capsys, PREPARE)

    assert tree.count(f"made by {EVALUATION}") == 1


def test_lineage_of_a_run_without_data_names_no_input_and_no_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_record(NEXT)

    tree = print_lineage(capsys, NEXT)

    assert "made from: no input is known" in tree
    assert "made: no output is known" in tree


def test_unknown_run_is_rejected() -> None:
    write_record(NEXT)

    with pytest.raises(BadArgument, match="there is no run other"):
        lineage_command.lineage("other")
