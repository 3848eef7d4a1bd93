"""Steps of pipelines: their faults, their run specs, their matrix and their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate

from flows.pipeline import pipeline as pipeline_flow
from tasks.pipeline.results import (
    choose_best,
    keep_large_value,
    read_result,
    select_value,
)
from tasks.pipeline.stage_runs import make_cache_tag
from tasks.record.places import RunPlace
from tasks.record.result_file import MAX_RESULT_BYTES, InvalidResult
from tasks.spec.errors import InvalidSpec
from tasks.spec.pipeline import PipelineSpec, load_pipeline, parse_pipeline
from tasks.spec.run import RunSpec

ROOT = Path(__file__).parents[2]
MODULE = """
from functools import partial
def score(model, limit=3): return {"score": limit}
async def later(x): return x
def anything(**options): return options
def strict(a, *, b): return [a, b]
def not_json(): return {1, 2}
"""


#: A matrix with four values, which start four runs. The key `stop_early` needs at least four runs.
FOUR_POINTS = {"env.A": ["1", "2", "3", "4"]}


def pipeline(*stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "steps", "stages": list(stages), **more}


def call(function: str = "steps:score", **more: Any) -> dict[str, Any]:
    return {"name": "a", "call": function, "args": {"model": "m"}, "on": "host", **more}


def command(*words: str, **more: Any) -> dict[str, Any]:
    return {"name": "b", "command": ["true", *words], "on": "host", **more}


def run_stage(**more: Any) -> dict[str, Any]:
    trainer = {"command": ["true"], "checkpoints": "${run.dir}/c"}
    spec = {"name": "r", "workload": "sft", "components": {"trainer": trainer}}
    return {"name": "r", "spec": spec, **more}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return the root of a project with the module `steps`."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "steps.py").write_text(MODULE)
    return tmp_path


def faults_of(data: object, root: Path | None = None) -> list[str]:
    with pytest.raises(InvalidSpec) as caught:
        parse_pipeline(data, root=root)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (call("steps"), "stages.0.call: must be text that matches the pattern"),
        (call("nowhere:score"), "stages.0.call: the project has no module 'nowhere'"),
        (call("steps:scor"), "has no function 'scor' (did you mean `score`?)"),
        (call(args={}), "stages.0.args.model: missing: score requires this argument"),
        (call(args={"model": 1, "x": 2}), "stages.0.args.x: score has no argument 'x'"),
        (call("steps:strict", args={"a": 1}), "stages.0.args.b: missing"),
        (call(command=["true"]), "stages.0.command: a stage may have only one of these keys"),
        (call(set={"a": 1}), "stages.0.set: only a stage with a run may have this key"),
        (run_stage(retries=2), "stages.0.retries: only a stage with a step may have this key"),
        (command(args={"a": 1}), "stages.0.args: this key needs `call`"),
        (call(resources={"cpus": 4}), "stages.0.resources.cpus: this resource needs Ray"),
        (
            call(on="ray", resources={"gpus": 1, "labels": {"a": "b"}}),
            "stages.0.resources.labels: the queue chooses the node of a step with GPUs",
        ),
        (
            call(on="ray", env={"HF_TOKEN": "x1234"}),
            "stages.0.env.HF_TOKEN: Ray shows the environment variables",
        ),
        (
            call(on="ray", env={"A": {"secret": "b"}}),
            "stages.0.env.A: Ray shows the environment variables",
        ),
        (call(timeout_s=-1), "stages.0.timeout_s: must be more than 0"),
        (call(cache="always"), "stages.0.cache: must be inputs or inputs_and_code"),
        (call(when="score > 1"), "stages.0.when: the name 'score' is not allowed"),
        (call(when="${run.id} == 1"), "stages.0.when: unknown name `${run.id}`"),
        (call(when="${stage.z.result} == 1"), "stages.0.when: unknown name `${stage.z.result}`"),
        (call(args={"model": "${stage.z.result}"}), "stages.0.args.model: unknown name"),
        (command("${stage.z.run_id}"), "stages.0.command.1: unknown name"),
        (command("${step.portt}"), "stages.0.command.1: unknown name `${step.portt}`"),
        (command(env={"A": "${run.idd}"}), "stages.0.env.A: unknown name `${run.idd}`"),
        (call(sample=3), "stages.0.sample: this key needs `matrix`"),
        (call(matrix={}), "stages.0.matrix: must not be empty"),
        (call(matrix={"limit": 3}), "stages.0.matrix.limit: must be a list of values"),
        (call(matrix={"limit": [3, 3]}), "stages.0.matrix.limit: contains 3 twice"),
        (call(matrix={"limt": [3]}), "stages.0.args.limt: score has no argument 'limt'"),
        (
            call(matrix={"limit": {"min": 3, "max": 1}}, sample=2),
            "stages.0.matrix.limit.max: must be more than `min`",
        ),
        (call(matrix={"limit": {"min": 1, "max": 3}}), "stages.0.sample: missing"),
        (call(matrix={"limit": [1, 2]}, sample=3), "stages.0.sample: must be at most 2"),
        (call(matrix={"limit": [*range(1001)]}), "stages.0.matrix: the matrix has 1001 points"),
        (command(matrix={"A": [1]}), "stages.0.matrix.A: in a stage with a command"),
        (
            call(matrix={"limit": [1, 2, 3, 4]}, stop_early={"by": "score", "after_step": 1}),
            "stages.0.stop_early: only a stage with a run may have this key",
        ),
        (
            run_stage(stop_early={"by": "loss", "after_step": 1}),
            "stages.0.stop_early: this key needs `matrix`",
        ),
        (
            run_stage(matrix={"env.A": ["1", "2", "3"]}, stop_early={"by": "x", "after_step": 1}),
            "stages.0.stop_early: early stopping compares each point with at least 3 other points, "
            "but the matrix has only 3 points",
        ),
        (
            run_stage(matrix=FOUR_POINTS, stop_early={"by": "loss", "after_step": 1}),
            "stages.0.stop_early: the run spec names no metrics file",
        ),
        (
            run_stage(matrix=FOUR_POINTS, stop_early={"by": "loss"}),
            "stages.0.stop_early.after_step: missing",
        ),
        (
            run_stage(
                matrix=FOUR_POINTS,
                stop_early={"by": "loss", "after_step": 2.5, "rule": "best", "mode": "up"},
            ),
            "stages.0.stop_early.rule: must be median or halving, found the text 'best'",
        ),
        (run_stage(matrix={"workload": ["sft", "x"]}), "stages.0.matrix.workload.1: workload:"),
    ],
)
def test_fault_of_a_step_is_reported_by_its_path(
    stage: dict[str, Any], fault: str, project: Path
) -> None:
    faults = faults_of(pipeline(stage), project)

    assert any(fault in found for found in faults), faults


def test_all_faults_are_reported_together(project: Path) -> None:
    stages = [
        call(needs=["b"], when="x"),
        command(needs=["a"]),
        {**call("steps:gone"), "name": "c", "needs": ["zz"]},
    ]

    faults = faults_of(pipeline(*stages), project)

    text = "\n".join(faults)
    assert "stages.0.when: the name 'x' is not allowed" in text
    assert "stages.0.needs: stages need each other in a cycle: a needs b needs a" in text
    assert "stages.2.needs.0: there is no stage 'zz' (known stages: a, b, c)" in text
    assert "stages.2.call:" in text
    assert len(faults) == 4


def test_used_stage_must_be_among_the_needs() -> None:
    stages = [
        call(),
        command("${stage.a.result}", needs=[]),
        {**command("${stage.b.run_id}"), "name": "c"},
    ]

    faults = faults_of(pipeline(*stages))

    assert faults == [
        "stages.1.command.1: unknown name `${stage.a.result}` (add a to the key `needs` of this "
        "stage)"
    ]


def test_stage_without_needs_waits_for_all_stages_before_it() -> None:
    loaded = parse_pipeline(pipeline(call(), command(needs=[]), {**command(), "name": "c"}))

    assert loaded.needs == {"a": (), "b": (), "c": ("a", "b")}


def test_pipeline_with_steps_survives_a_round_trip(project: Path) -> None:
    stages = [
        call(matrix={"limit": {"min": 1, "max": 9, "scale": "integer"}}, sample=2, at_most=1),
        command("${stage.a.results}", resources={"gpus": 2}, retries=1, on="ray"),
    ]
    (project / "pipeline.yaml").write_text(yaml.safe_dump(pipeline(*stages)))

    loaded = load_pipeline(project / "pipeline.yaml")

    assert parse_pipeline(json.loads(json.dumps(loaded.written()))) == loaded
    # Simulate the Prefect server, which stores the spec with the default values of all keys.
    stored = PipelineSpec.model_validate(loaded.model_dump(mode="json"))
    assert parse_pipeline(stored).stage_names == ("a", "b")


def test_step_on_ray_takes_its_resources_through_the_queue() -> None:
    resources = {"gpus": 2, "cpus": 3, "memory_gib": 0.5}
    stage = command(on="ray", resources=resources, retries=2, timeout_s=60)
    address = {"address": "http://127.0.0.1:8265"}

    spec = RunSpec.model_validate(parse_pipeline(pipeline(stage, ray=address)).run_spec("b"))

    assert spec.gang is not None and spec.ray is not None
    assert (spec.gang.gpus_per_node, spec.gang.cpus_per_gpu) == (2, 2)
    assert spec.ray.address == address["address"]
    taken = (spec.ray.entrypoint_gpus, spec.ray.entrypoint_cpus, spec.ray.entrypoint_memory_gib)
    assert taken == (2, 3, 0.5)
    assert spec.processes["step"].launcher == "ray_job"
    assert spec.timeout_s == 60
    assert {policy.attempts for policy in spec.retry.values()} == {3}


def test_step_on_a_host_needs_no_ray() -> None:
    loaded = parse_pipeline(pipeline(command(resources={"gpus": 1})))

    spec = RunSpec.model_validate(loaded.run_spec("b"))

    assert spec.ray is None
    assert spec.gang is not None and spec.gang.gpus_per_node == 1
    assert spec.processes["step"].launcher == "process"


def test_values_of_earlier_stages_keep_their_type_in_arguments() -> None:
    args = {"model": "${stage.b.result.list}", "limit": "at ${stage.b.result.list} ${run.dir}"}
    loaded = parse_pipeline(pipeline(command(), call(args=args)))

    spec = loaded.fill_run_spec("a", lambda _stage, _key: [1, "${x}"])

    env = spec["components"]["step"]["env"]
    assert json.loads(env["MUSTER_STEP_ARGS"]) == {
        "model": [1, "$${x}"],
        "limit": 'at [1, "$${x}"] ${run.dir}',
    }


def test_points_of_a_matrix_change_the_run_spec() -> None:
    run = run_stage(matrix={"env.LR": ["1e-5", "3e-5"], "env.SEED": [1, 2]})
    step = call("steps:score", matrix={"limit": [7]})
    loaded = parse_pipeline(pipeline(run, step))

    envs = [loaded.run_spec(unit)["env"] for unit in loaded.stage("r").units]
    [unit] = loaded.stage("a").units

    assert loaded.stage("r").units == ("r.1", "r.2", "r.3", "r.4")
    assert envs[0] == {"LR": "1e-5", "SEED": 1}
    assert envs[3] == {"LR": "3e-5", "SEED": 2}
    args = loaded.run_spec(unit)["components"]["step"]["env"]["MUSTER_STEP_ARGS"]
    assert json.loads(args) == {"model": "m", "limit": 7}


def test_sample_is_the_same_in_every_process() -> None:
    matrix = {"limit": {"min": 1e-6, "max": 1e-4, "scale": "log"}, "model": ["x", "y"]}
    data = pipeline(call(matrix=matrix, sample=16, args={}))

    points = parse_pipeline(data).stage("a").points

    assert points == parse_pipeline(data).stage("a").points
    assert len(points) == 16 and all(1e-6 <= point["limit"] <= 1e-4 for point in points)


def test_prefect_server_accepts_every_kind_of_stage() -> None:
    schema = parameter_schema(pipeline_flow).model_dump_for_openapi()
    resources = {"gpus": 1, "cpus": 2}
    ranges = {"env.LR": ["1", 2], "env.S": {"min": 1.0, "max": 2.0}}
    stages = [
        call(resources={"gpus": 1}, env={"T": {"secret": "s"}}, cache="inputs", needs=[]),
        command(on="ray", resources=resources, retries=1, timeout_s=3, when="true"),
        run_stage(matrix=ranges, sample=3, at_most=1, best={"by": "x"}, on_failure="continue"),
    ]

    written = parse_pipeline(pipeline(*stages)).written()

    validate({"spec": written}, schema, raise_on_error=True)


def test_example_with_steps_is_valid() -> None:
    loaded = load_pipeline(ROOT / "deployments/pipelines/quickstart-evaluate.yaml")

    assert loaded.needs["grpo"] == ("greedy", "sampled")


def test_quickstart_evaluation_writes_its_result(tmp_path: Path) -> None:
    quickstart = ROOT / "deployments/quickstart"
    trained = subprocess.run(
        [sys.executable, quickstart / "sft.py", "--steps", "1", "--out", tmp_path],
        env={**os.environ, "LR": "0.01", "SEED": "3"},
        timeout=60,
    )
    result = tmp_path / "result.json"

    evaluated = subprocess.run(
        [sys.executable, quickstart / "evaluate.py", "--checkpoint", tmp_path],
        env={**os.environ, "MUSTER_RESULT": str(result)},
        timeout=60,
    )

    assert (trained.returncode, evaluated.returncode) == (0, 0)
    content = json.loads(result.read_text())
    assert content["step"] == 1 and 0 <= content["reward"] <= 1


def run_program(project: Path, function: str, args: dict[str, Any]) -> tuple[int, str, Any]:
    """Run a pipeline step that calls a function; return the exit code, stderr and the result."""
    loaded = parse_pipeline(pipeline(call(function, args=args)))
    component = loaded.run_spec("a")["components"]["step"]
    result = project / "result.json"
    env = {**os.environ, **component["env"], "MUSTER_RESULT": str(result)}
    program = [sys.executable, *component["command"][1:]]
    done = subprocess.run(program, env=env, cwd=project, capture_output=True, text=True, timeout=60)
    value = json.loads(result.read_text()) if result.exists() else None
    return done.returncode, done.stderr, value


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        ("steps:score", {"model": "m"}, {"score": 3}),
        ("steps:later", {"x": [1, None]}, [1, None]),
        ("steps:anything", {"a b": "c"}, {"a b": "c"}),
    ],
)
def test_program_of_a_step_writes_the_result_of_its_function(
    project: Path, function: str, args: dict[str, Any], result: object
) -> None:
    assert run_program(project, function, args) == (0, "", result)


def test_result_that_is_no_json_fails_the_step(project: Path) -> None:
    code, output, result = run_program(project, "steps:not_json", {})

    assert (code, result) == (1, None)
    assert "steps:not_json must return JSON data, but returned <class 'set'>" in output


def write_result(tmp_path: Path, text: str | None, attempt: int = 2) -> RunPlace:
    """Create the directory of a run whose last attempt has written the file `result.json`.

    Args:
        tmp_path: Folder of the test.
        text: Content of the file. None if the last attempt wrote no file.
        attempt: Number of attempts.
    """
    place = RunPlace(directory=tmp_path / "run")
    for number in range(1, attempt + 1):
        folder = place.attempt(number).directory
        folder.mkdir(parents=True)
        (folder / "result.json").write_text('"of an earlier attempt"')
    path = place.attempt(attempt).directory / "result.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
        path.chmod(0o600)
    return place


def read(place: RunPlace, *, is_required: bool = True) -> Any:
    def mask(text: str) -> str:
        return text.replace("s3cret", "***")

    return read_result(place, is_required=is_required, mask=mask)


def test_result_of_the_last_attempt_is_read_with_masked_secrets(tmp_path: Path) -> None:
    place = write_result(tmp_path, '{"a": ["key s3cret", 1]}')

    result = read(place)

    assert result == {"a": ["key ***", 1]}
    assert "s3cret" not in (place.attempt(2).directory / "result.json").read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "of the step does not exist"),
        ("{", "is not JSON"),
        ("NaN", "is not JSON: NaN is no number in JSON"),
        ("[" * 100_000, "is not JSON"),
        ('"' + "x" * MAX_RESULT_BYTES + '"', "bytes, but at most"),
    ],
)
def test_result_that_cannot_be_used_is_reported(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    place = write_result(tmp_path, text)

    with pytest.raises(InvalidResult, match=problem):
        read(place)


def test_command_may_write_no_result(tmp_path: Path) -> None:
    assert read(write_result(tmp_path, None), is_required=False) is None


def test_missing_key_of_a_result_is_reported_with_the_known_keys() -> None:
    assert select_value({"a": {"b": [5]}}, "a.b.0") == 5
    with pytest.raises(InvalidResult, match="has no key 'x'; its keys are: a, b"):
        select_value({"a": 1, "b": 2}, "x")


def test_large_value_is_kept_in_a_file_of_the_pipeline(muster_home: Path) -> None:
    flow_run_id = uuid4()
    value = list(range(20_000))

    path = keep_large_value(flow_run_id, "a.result", value)

    assert keep_large_value(flow_run_id, "a.result", [1]) == [1]
    assert Path(path).is_relative_to(muster_home / "pipelines" / str(flow_run_id))
    assert json.loads(Path(path).read_text()) == value


def test_best_point_is_the_first_with_the_best_figure() -> None:
    figures = {"g.1": None, "g.2": 0.5, "g.3": 0.9, "g.4": 0.9}

    assert choose_best(figures, "max") == "g.3"
    assert choose_best(figures, "min") == "g.2"
    assert choose_best({"g.1": None}, "max") is None


def test_cache_tag_depends_on_inputs_but_not_on_the_place_of_a_step() -> None:
    def tag(args: dict[str, Any], code: str, *, with_code: bool = False, on: str = "host") -> str:
        loaded = parse_pipeline(pipeline(call(args=args, on=on)))
        return make_cache_tag({**loaded.run_spec("a"), "code": code}, with_code=with_code)

    first = tag({"model": 1}, "x")

    assert first == tag({"model": 1}, "y", on="ray")
    assert first != tag({"model": 2}, "x")
    assert tag({"model": 1}, "x", with_code=True) != tag({"model": 1}, "y", with_code=True)
