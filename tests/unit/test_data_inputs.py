"""Tests of the spec key `inputs`, and of the data that pipeline stages take from earlier stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.spec.data_inputs import list_paths
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec, resolve
from tasks.spec.pipeline import parse_pipeline
from tasks.spec.start_from import find_run_id

TRAINED = "grpo-grpo-20260102-000000-00000002"
SCORED = "score-step-20260102-000000-00000003"


def make_spec(inputs: object) -> dict[str, Any]:
    """Return a run spec with a value for the key `inputs`."""
    trainer = {"command": ["python", "train.py"]}
    return {"name": "x", "workload": "sft", "inputs": inputs, "components": {"trainer": trainer}}


@pytest.mark.parametrize(
    "uri",
    [
        "data/train.jsonl",
        "/data/train set.parquet",
        "hf://datasets/openai/gsm8k@main",
        "s3://bucket/folder",
        "https://example.org/a.jsonl?version=2",
        "git+ssh://git@example.org/data.git",
        "${run.dir}/data.jsonl",
    ],
)
def test_paths_and_uris_are_accepted_as_inputs(uri: str) -> None:
    spec = parse_spec(make_spec([uri]))

    assert spec.inputs == (uri,)


@pytest.mark.parametrize(
    ("inputs", "path", "problem"),
    [
        ("/data/a", "inputs", "list"),
        ([""], "inputs.0", ""),
        (["/data/a", 3], "inputs.1", ""),
        (["/a\n/b"], "inputs.0", "line break"),
        (["s3:/bucket/folder"], "inputs.0", "looks like a URL"),
        (["s3://key:word@bucket/folder"], "inputs.0", "credentials"),
        (["https://user:word@example.org/a"], "inputs.0", "credentials"),
        (["s3://key:word@[bucket/folder"], "inputs.0", "credentials"),
        (["https://example.org/a?X-Amz-Signature=0011"], "inputs.0", "credentials"),
        (["https://example.org/a?api_token=0011"], "inputs.0", "credentials"),
        (["/data/" + 1000 * "a"], "inputs.0", "1000 characters"),
        (["${run.folder}/a"], "inputs.0", "run.folder"),
    ],
)
def test_invalid_inputs_are_rejected_with_their_path(
    inputs: object, path: str, problem: str
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(make_spec(inputs))

    faults = {fault.path: fault.problem for fault in caught.value.faults}
    assert path in faults
    assert problem in faults[path]
    assert "word@" not in str(caught.value)


def test_placeholders_in_inputs_are_filled_in_and_empty_values_are_dropped(
    tmp_path: Path,
) -> None:
    spec = parse_spec(make_spec(["${run.dir}/data.jsonl", "${attempt.resume_from}"]))
    values = {"run.dir": "/runs/a", "attempt.resume_from": ""}

    resolved = resolve(spec, values, tmp_path)

    assert resolved.inputs == ("/runs/a/data.jsonl",)


def test_only_absolute_paths_and_uris_of_a_result_are_data() -> None:
    result = {
        "path": "/data/train.jsonl",
        "parts": ["s3://bucket/a", "relative/b", "/data/train.jsonl", {"deep": "file:///c"}],
        "score": 0.5,
        "note": "a/b",
        "root": "/",
        "signed": "https://example.org/a?X-Amz-Signature=0011",
    }

    assert list_paths(result) == ["/data/train.jsonl", "s3://bucket/a", "file:///c"]


@pytest.mark.parametrize(
    ("path", "run_id"),
    [
        (f"/home/u/.muster/runs/{TRAINED}/checkpoints/step_2", TRAINED),
        (f"s3://bucket/{TRAINED}", TRAINED),
        (f"muster://runs/{SCORED}/result", SCORED),
        (f"/data/copy-of-{TRAINED}.bak/x", None),
        ("/data/train.jsonl", None),
    ],
)
def test_run_id_is_found_in_the_path_of_a_runs_file(path: str, run_id: str | None) -> None:
    assert find_run_id(path) == run_id


def test_run_of_a_stage_lists_the_data_of_earlier_stages() -> None:
    trainer = {
        "command": ["python", "train.py", "--data=${stage.prepare.result.path}"],
        "checkpoints": "${run.dir}/checkpoints",
    }
    step = {"command": ["sh", "-c", "true"], "on": "host"}
    training = {"name": "t", "workload": "grpo", "inputs": ["/data/base"]}
    stages = [
        {"name": "prepare", **step},
        {"name": "grpo", "spec": {**training, "components": {"trainer": trainer}}},
        {
            "name": "export",
            "call": "tasks.spec.data_inputs:list_paths",
            "on": "host",
            "args": {
                "value": {
                    "model": "${stage.grpo.checkpoint}",
                    "rows": "${stage.prepare.result.rows}",
                    "is_ok": "${stage.grpo.state}",
                }
            },
        },
    ]
    pipeline = parse_pipeline({"name": "p", "stages": stages})
    values: dict[tuple[str, str], object] = {
        ("prepare", "result.path"): "/data/train${x}.jsonl",
        ("prepare", "result.rows"): 7,
        ("prepare", "run_id"): SCORED,
        ("grpo", "checkpoint"): f"/runs/{TRAINED}/checkpoints/step_2",
        ("grpo", "state"): "completed",
    }

    training_spec = pipeline.fill_run_spec("grpo", lambda name, key: values[name, key])
    export_spec = pipeline.fill_run_spec("export", lambda name, key: values[name, key])

    assert training_spec["inputs"] == ["/data/base", "/data/train$${x}.jsonl"]
    assert export_spec["inputs"] == [
        f"/runs/{TRAINED}/checkpoints/step_2",
        f"muster://runs/{SCORED}/result",
    ]
