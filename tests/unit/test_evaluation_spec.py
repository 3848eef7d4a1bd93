"""Evaluations of checkpoints in a run spec: validation, placeholders and the built run specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.spec.errors import InvalidSpec
from tasks.spec.evaluations import build_evaluation_spec
from tasks.spec.loading import dump_spec, parse_spec, resolve
from tasks.spec.programs import find_missing_programs

#: Values of the placeholders that name the evaluated checkpoint.
CHECKPOINT = {
    "checkpoint": "/c/step_10",
    "checkpoint.step": "10",
    "checkpoint.run_id": "demo-sft-20260101-120000-0123abcd",
    "checkpoint.run_dir": "/home/runs/demo",
}


def run_spec(evaluation: Any = None, **more: Any) -> dict[str, Any]:
    """Return a run spec with checkpoints and the evaluation `math`."""
    trainer = {"command": ["true"], "checkpoints": "${run.dir}/checkpoints", "keep": 2}
    evaluation = evaluation or {"command": ["true", "${checkpoint}"]}
    spec = {"name": "demo", "workload": "sft", "components": {"trainer": trainer}}
    return {**spec, "evals": {"math": evaluation}, **more}


def faults_of(spec: dict[str, Any]) -> dict[str, str]:
    """Return the faults of an invalid run spec: mapping from the path of a key to its fault."""
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(spec)
    return {fault.path: str(fault) for fault in caught.value.faults}


def evaluation_with(**keys: Any) -> dict[str, Any]:
    return {"command": ["true"], **keys}


def test_every_and_late_have_defaults() -> None:
    spec = parse_spec(run_spec())

    evaluation = spec.evals["math"]

    assert (evaluation.every, evaluation.late) == (1, "skip")


@pytest.mark.parametrize(
    ("evaluation", "path", "words"),
    [
        (evaluation_with(evry=2), "evals.math.evry", "every"),
        (evaluation_with(every=0), "evals.math.every", "at least 1"),
        (evaluation_with(late="never"), "evals.math.late", "skip or all"),
        ({"command": "python evaluate.py"}, "evals.math.command", "list of arguments"),
        ({"every": 1}, "evals.math.command", "missing"),
        ({"command": ["true", "${checkpont}"]}, "evals.math.command.1", "${checkpoint}"),
        ({"command": ["true", "${trainer.port}"]}, "evals.math.command.1", "unknown name"),
        (evaluation_with(env={"A": "${checkpoint.stp}"}), "evals.math.env.A", "checkpoint.step"),
        (evaluation_with(on="ray"), "evals.math.on", "no Ray cluster"),
        (evaluation_with(resources={"gpus": -1}), "evals.math.resources.gpus", "at least 0"),
        (
            evaluation_with(resources={"cpus": 2}),
            "evals.math.resources.cpus",
            "this resource needs Ray",
        ),
        (evaluation_with(resources={"gpu": 1}), "evals.math.resources.gpu", "gpus"),
        (
            evaluation_with(env={"CUDA_VISIBLE_DEVICES": "0"}, resources={"gpus": 1}),
            "evals.math.env.CUDA_VISIBLE_DEVICES",
            "queue has granted",
        ),
    ],
)
def test_fault_of_an_evaluation_has_its_path(
    evaluation: dict[str, Any], path: str, words: str
) -> None:
    faults = faults_of(run_spec(evaluation))

    assert [*faults] == [path]
    assert words in faults[path]


def test_name_of_an_evaluation_is_checked() -> None:
    faults = faults_of(run_spec(evals={"Math 1": evaluation_with()}))

    assert [*faults] == ["evals.Math 1"]
    assert "must match the pattern" in faults["evals.Math 1"]


def test_evaluations_need_checkpoints() -> None:
    spec = run_spec(components={"trainer": {"command": ["true"]}})

    faults = faults_of(spec)

    assert [*faults] == ["evals"]
    assert "need the key `checkpoints`" in faults["evals"]


@pytest.mark.parametrize(
    ("by", "words"),
    [("maths.accuracy", "did you mean `math`?"), ("code.passed", "the evaluations are: math")],
)
def test_keep_best_names_an_evaluation_of_the_run(by: str, words: str) -> None:
    faults = faults_of(run_spec(keep_best={"by": by}))

    assert [*faults] == ["keep_best.by"]
    assert words in faults["keep_best.by"]


def test_keep_best_needs_evaluations() -> None:
    faults = faults_of(run_spec(evals={}, keep_best={"by": "math.accuracy"}))

    assert "write `evals: {math:" in faults["keep_best.by"]


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"evals": {"math": evaluation_with(env={"API_TOKEN": "x"})}}, "evals.math.env.API_TOKEN"),
        ({"env": {"API_TOKEN": "x"}}, "evals.math.on"),
        ({"env": {"OTHER": {"secret": "block"}}}, "evals.math.on"),
    ],
)
def test_secret_is_refused_for_an_evaluation_on_ray(more: dict[str, Any], path: str) -> None:
    faults = faults_of(run_spec(ray={"address": "http://127.0.0.1:8265"}, **more))

    assert [*faults] == [path]


def test_attempt_leaves_the_placeholders_of_evaluations_unchanged() -> None:
    spec = parse_spec(run_spec({"command": ["true", "${checkpoint}", "${run.dir}"]}))

    resolved = resolve(spec, {"run.dir": "/run"}, Path("/"))

    assert resolved.evals["math"].command == ("true", "${checkpoint}", "${run.dir}")
    assert resolved.processes["trainer"].checkpoints == "/run/checkpoints"


def test_run_spec_of_an_evaluation_has_the_values_of_the_checkpoint() -> None:
    command = ["true", "${checkpoint}", "${checkpoint.step}", "${run.dir}", "$${literal}"]
    evaluation = {"command": command, "env": {"STEP": "${checkpoint.step}"}, "retries": 1}
    spec = parse_spec(run_spec(evaluation, env={"ALL": "1"}, tags=["mine"]))

    built = parse_spec(
        build_evaluation_spec(spec.written(), "math", CHECKPOINT, result="/r/a${b}.json")
    )

    step = built.processes["step"]
    assert step.command == ("true", "/c/step_10", "10", "${run.dir}", "$${literal}")
    assert step.launcher == "process"
    assert step.env["MUSTER_RESULT"] == "/r/a$${b}.json"
    assert built.env == {"ALL": "1", "STEP": "10"}
    assert built.tags == ("mine",)
    assert built.gang is None


def test_evaluation_with_gpus_waits_in_the_queue() -> None:
    spec = parse_spec(run_spec(evaluation_with(resources={"gpus": 2})))

    built = parse_spec(build_evaluation_spec(spec.written(), "math", CHECKPOINT))

    assert built.gang is not None
    assert built.gang.gpus_per_node == 2


def test_evaluation_of_a_run_with_ray_is_a_ray_job() -> None:
    ray = {"address": "http://127.0.0.1:8265"}
    spec = parse_spec(run_spec(ray=ray))

    built = parse_spec(
        build_evaluation_spec(spec.written(), "math", CHECKPOINT, ray_address=ray["address"])
    )

    assert built.processes["step"].launcher == "ray_job"
    assert built.ray is not None
    assert built.ray.address == ray["address"]


def test_missing_program_of_an_evaluation_is_a_fault(tmp_path: Path) -> None:
    spec = parse_spec(run_spec({"command": ["python", "missing.py", "${checkpoint}"]}))

    faults = find_missing_programs(spec, root=tmp_path, path="/usr/bin:/bin")

    missing = {fault.path: str(fault) for fault in faults}
    assert "missing.py" in missing["evals.math.command.1"]


def test_secrets_of_evaluations_are_masked_in_the_dumped_spec() -> None:
    spec = parse_spec(run_spec(evaluation_with(env={"API_TOKEN": "topsecret1"})))

    text = dump_spec(spec)

    assert "topsecret1" in spec.secrets
    assert "topsecret1" not in text
