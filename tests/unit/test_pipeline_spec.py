"""Tests of pipeline specs: faults, overrides, and placeholders of earlier stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.record.code_store import read_code
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.pipeline import add_deployment_specs, load_pipeline, parse_pipeline
from tasks.spec.placeholders import fill_in_stages, find_uses
from tasks.train.deploying import load_pipeline_spec

QUICKSTART = "deployments/pipelines/quickstart-sft-then-grpo.yaml"


def spec(*command: str, **more: Any) -> dict[str, Any]:
    trainer = {"command": ["true", *command], "checkpoints": "${run.dir}/checkpoints"}
    return {"name": "one", "workload": "sft", "components": {"trainer": trainer}, **more}


def spec_without_checkpoints(*command: str) -> dict[str, Any]:
    """Return a run spec without checkpoints."""
    written = spec(*command)
    del written["components"]["trainer"]["checkpoints"]
    return written


def pipeline(*stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "two", "stages": list(stages), **more}


def faults_of(data: object, *overrides: str) -> list[str]:
    with pytest.raises(InvalidSpec) as caught:
        parse_pipeline(data, overrides)
    return [str(fault) for fault in caught.value.faults]


A = {"name": "a", "spec": spec()}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([], ["must be a mapping, found a list (write keys and values, as in name: demo)"]),
        ({"name": "two", "stages": []}, ["stages: must not be empty (write at least one stage)"]),
        (
            {"stages": [A], "colour": "red"},
            [
                "name: missing (write for example name: sft-then-grpo)",
                "colour: unknown key (known keys: name, tags, ray, stages)",
            ],
        ),
        (
            pipeline(A, name="Two"),
            [
                "name: must be text that matches the pattern ^[a-z][a-z0-9-]{0,31}$, found the "
                "text 'Two' (write `two`, for example)"
            ],
        ),
        (
            pipeline({"name": "a"}),
            [
                "stages.0.spec: missing: a stage needs a run spec, a deployment, a function or a "
                "command (write `spec: FILE.yaml`, `deployment: train/NAME`, "
                "`call: MODULE:FUNCTION`, or `command: [PROGRAM, ARGUMENT]`)"
            ],
        ),
        (
            pipeline({**A, "checkpiont": "x"}),
            [
                "stages.0.checkpiont: unknown key (did you mean `checkpoint`? known keys: name, "
                "needs, when, on_failure, deployment, spec, set, checkpoint, call, args, command, "
                "env, on, resources, retries, timeout_s, cache, code, matrix, sample, at_most, "
                "best, stop_early)"
            ],
        ),
        (
            pipeline(A, A),
            ["stages.1.name: an earlier stage has the same name 'a' (write another name)"],
        ),
        (
            pipeline({"name": "a", "deployment": "preflight/cluster"}),
            [
                "stages.0.deployment: must be text that matches the pattern ^train/[^/\\s]+$, "
                "found the text 'preflight/cluster'"
            ],
        ),
        # faults in the run spec of a stage are reported
        (
            pipeline(A, {"name": "b", "spec": spec(workload="dance")}),
            [
                "stages.1.spec.workload: must be ppo, grpo, sft, dpo, rm, pretrain, other or step, "
                "found the text 'dance'"
            ],
        ),
        (
            pipeline(A, {"name": "b", "spec": spec("${trainr.port}")}),
            [
                "stages.1.spec.components.trainer.command.1: unknown name `${trainr.port}` "
                "(did you mean `${trainer.port}`?)"
            ],
        ),
        # a placeholder names an unknown stage
        (
            pipeline(A, {"name": "b", "spec": spec("${stage.aa.checkpoint}")}),
            [
                "stages.1.spec.components.trainer.command.1: unknown name "
                "`${stage.aa.checkpoint}` (did you mean `${stage.a.checkpoint}`?)"
            ],
        ),
        # a placeholder names the stage itself or a later stage, which is not allowed
        *(
            (
                pipeline(
                    {"name": "a", "spec": spec(f"${{stage.{other}.run_id}}")}, {**A, "name": "b"}
                ),
                [
                    "stages.0.spec.components.trainer.command.1: unknown name "
                    f"`${{stage.{other}.run_id}}` (for a variable of the shell, write "
                    f"`$${{stage.{other}.run_id}}`; known names: none)"
                ],
            )
            for other in ("a", "b", "zz")
        ),
        *(
            (
                pipeline(A, {"name": "b", "spec": spec(f"${{stage.a{key}}}")}),
                [
                    "stages.1.spec.components.trainer.command.1: unknown name "
                    f"`${{stage.a{key}}}` (did you mean `${{stage.a.{meant}}}`?)"
                ],
            )
            for key, meant in ((".run", "run_id"), (".check", "checkpoint"))
        ),
        (
            pipeline(
                {"name": "a", "spec": spec_without_checkpoints()},
                {"name": "b", "spec": spec("${stage.a.checkpoint}")},
            ),
            [
                "stages.1.spec.components.trainer.command.1: the placeholder "
                "`${stage.a.checkpoint}` will have no value, because no component of the stage a "
                "has the key `checkpoints` (write `checkpoints: FOLDER` in the component, or "
                "`checkpoint: PATTERN` in the stage)"
            ],
        ),
        # an unknown name in the key `checkpoint` of a stage is reported
        (
            pipeline({**A, "checkpoint": "${run.dir}/hf/${trainer.port}"}),
            [
                "stages.0.checkpoint: unknown name `${trainer.port}` (for a variable of the "
                "shell, write `$${trainer.port}`; known names: run.id, run.dir, "
                "attempt.number, attempt.dir)"
            ],
        ),
        # the key `set` of a stage, which changes values of the run spec, names a missing list item
        (
            pipeline({**A, "set": {"components.trainer.command.7": "x"}}),
            [
                "stages.0.set.components.trainer.command.7: --set components.trainer.command.7: "
                "`components.trainer.command` is a list of 1 item and has no item 7 (the first "
                "item has the index 0)"
            ],
        ),
        # a stage names a spec file, which is allowed only if the pipeline spec itself is read from
        # a file
        (
            pipeline({"name": "a", "spec": "mine.yaml"}),
            [
                "stages.0.spec: must be a mapping, found the text 'mine.yaml' (write KEY: VALUE "
                "below it)"
            ],
        ),
    ],
)
def test_fault_has_its_path_and_remedy(data: object, expected: list[str]) -> None:
    assert faults_of(data) == expected


def test_faults_of_all_stages_are_reported_together() -> None:
    first = {"name": "a", "spec": spec(workload="dance")}
    second = {"name": "b", "spec": spec("${stage.c.run_id}", colour="red"), "extra": 1}

    found = faults_of(pipeline(first, second, tags="demo"))

    paths = [fault.partition(":")[0] for fault in found]
    assert sorted(paths) == [
        "stages.0.spec.workload",
        "stages.1.extra",
        "stages.1.spec.colour",
        "stages.1.spec.components.trainer.command.1",
        "tags",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("a.success", "has no `=`"),
        ("success=1", "must begin with the name of a stage"),
        (
            "c.success.step=1",
            "there is no stage 'c' (write STAGE.KEY=VALUE; known stages: a, aabb)",
        ),
        ("aab.success.step=1", "there is no stage 'aab' (did you mean `aabb`?)"),
        ("a.tags=[", "--set a.tags: line 1"),
    ],
)
def test_invalid_override_is_reported(override: str, problem: str) -> None:
    [fault, *_] = faults_of(pipeline(A, {**A, "name": "aabb"}), override)

    assert problem in fault


def test_fault_quotes_the_value_as_the_files_and_overrides_spell_it(tmp_path: Path) -> None:
    run_spec = yaml.safe_dump(spec())
    (tmp_path / "one.yaml").write_text(f"{run_spec}env: {{A: on}}\n")
    (tmp_path / "two.yaml").write_text(run_spec)
    (tmp_path / "pipeline.yaml").write_text(
        "name: p\n"
        "stages:\n"
        "- {name: a, spec: one.yaml, set: {env.B: no}}\n"
        "- {name: b, command: [echo], timeout_s: 2e2}\n"
        "- {name: c, spec: two.yaml, matrix: {stall_after_s: [5, 1e3]}}\n"
    )

    with pytest.raises(InvalidSpec) as caught:
        load_pipeline(tmp_path / "pipeline.yaml", ["a.env.C=Off", "b.env.D=yes"], root=tmp_path)

    faults = {str(fault) for fault in caught.value.faults}
    assert faults == {
        'stages.0.spec.env.A: must be text, found on, which YAML 1.1 reads as true (write "on")',
        'stages.0.spec.env.B: must be text, found no, which YAML 1.1 reads as false (write "no")',
        'stages.0.spec.env.C: must be text, found Off, which YAML 1.1 reads as false (write "Off")',
        "stages.1.timeout_s: must be a number, found 2e2, which YAML 1.1 reads as text "
        "(write 200 or 2.0e+2)",
        'stages.1.env.D: must be text, found yes, which YAML 1.1 reads as true (write "yes")',
        "stages.2.matrix.stall_after_s.1: stall_after_s: must be a number, found 1e3, which YAML "
        "1.1 reads as text (write 1000 or 1.0e+3)",
    }


def test_override_applies_to_one_stage_after_its_set() -> None:
    stages = ({**A, "set": {"tags": ["x"]}}, {**A, "name": "b"})

    loaded = parse_pipeline(pipeline(*stages), ["a.tags=[y]", "a.env.RATE=12.10"])

    assert loaded.stage("a").spec is not None and loaded.stage("b").spec is not None
    assert loaded.stage("a").spec["tags"] == ["y"]
    assert loaded.stage("a").spec["env"] == {"RATE": "12.10"}
    assert "tags" not in loaded.stage("b").spec


@pytest.mark.usefixtures("muster_home")
def test_pipeline_survives_a_round_trip() -> None:
    loaded = load_pipeline(Path(QUICKSTART))

    again = parse_pipeline(yaml.safe_load(yaml.safe_dump(loaded.written())))

    assert again == loaded == parse_pipeline(loaded)
    deployed = load_pipeline_spec(QUICKSTART)
    # The specs of all stages name the same stored copy of the project's code.
    [code] = {stage["spec"].pop("code") for stage in deployed["spec"]["stages"]}
    assert read_code(code).project == str(Path.cwd())
    assert deployed == {"spec": loaded.written()}


def test_quickstart_grpo_gets_the_sft_checkpoint() -> None:
    loaded = load_pipeline(Path(QUICKSTART))

    uses = find_uses(loaded.stage("grpo").spec)

    [use] = [use for use in uses if str(use).startswith("${stage.")]
    assert (use.path, use.name) == ("env.INIT_FROM", "stage.sft.checkpoint")


def test_stage_file_may_be_relative_to_the_pipeline_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(spec()))
    (tmp_path / "two.yaml").write_text(
        yaml.safe_dump(pipeline({"name": "a", "spec": "mine.yaml", "set": {"tags": ["x"]}}))
    )

    loaded = load_pipeline(tmp_path / "two.yaml")

    assert loaded.stage("a").spec is not None
    assert loaded.stage("a").spec["tags"] == ["x"]


def test_each_unreadable_stage_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: a\nname: b\n")
    stages = {"name": "a", "spec": "mine.yaml"}, {"name": "b", "spec": "nowhere.yaml"}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(pipeline(*stages)))

    with pytest.raises(InvalidSpec) as caught:
        load_pipeline(tmp_path / "two.yaml")

    faulty, missing = map(str, caught.value.faults)
    assert faulty.startswith("stages.0.spec: mine.yaml: line 2, ")
    assert (
        missing == "stages.1.spec: nowhere.yaml: the file cannot be read: No such file or directory"
    )


def test_spec_of_a_deployment_is_checked_if_the_deployment_is_known() -> None:
    named = {"name": "b", "deployment": "train/b", "set": {"tags": ["x"]}}
    loaded = parse_pipeline(pipeline(A, named))

    whole = add_deployment_specs(loaded, {"b": spec("${stage.a.checkpoint}")})
    with pytest.raises(InvalidSpec, match=r"unknown name `\$\{stage.z"):
        add_deployment_specs(loaded, {"b": spec("${stage.z.checkpoint}")})

    assert loaded.stage("b").spec is None
    assert whole.stage("b").spec is not None
    assert whole.stage("b").spec["tags"] == ["x"]
    assert whole.stage("b").deployment == "train/b"


def test_other_placeholders_stay_unchanged() -> None:
    text = "${stage.a.run_id} ${run.dir} $${stage.a.run_id} ${attempt.resume_from} $${HOME}"

    filled = fill_in_stages(spec(text), lambda stage, key: f"<{stage} {key}>")

    expected = "<a run_id> ${run.dir} $${stage.a.run_id} ${attempt.resume_from} $${HOME}"
    assert filled == spec(expected)


def test_inserted_value_is_literal() -> None:
    written = spec("${stage.a.checkpoint}")
    written["components"]["trainer"]["ready"] = {"log": "from ${stage.a.checkpoint}$"}

    loaded = parse_spec(fill_in_stages(written, lambda _stage, _key: "/data/${x}/a+b"))

    trainer = loaded.processes["trainer"]
    assert trainer.command[1] == "/data/$${x}/a+b"
    assert trainer.ready is not None
    assert trainer.ready.log == "from /data/\\$\\{x\\}/a\\+b$"


@pytest.mark.parametrize(
    ("stage_keys", "trainer_keys", "path"),
    [
        # Without the key `keep_best`, the key `keep` could remove the best checkpoint.
        ({}, {"keep": 2}, "stages.0.best"),
        # `stop_early` can compare only training metrics, not the results of an evaluation.
        ({"stop_early": {"by": "math.accuracy", "after_step": 5}}, {}, "stages.0.stop_early.by"),
    ],
)
def test_unusable_evaluation_of_a_matrix_is_rejected(
    stage_keys: dict[str, Any], trainer_keys: dict[str, Any], path: str
) -> None:
    stage = make_evaluated_stage(trainer_keys) | stage_keys

    with pytest.raises(InvalidSpec) as error:
        parse_pipeline({"name": "p", "stages": [stage]})

    assert path in [fault.path for fault in error.value.faults]


@pytest.mark.parametrize(
    ("matrix", "paths"),
    [
        # The first key of the matrix has only valid values. The second key has a wrong value.
        ({"env.LR": [1, 3], "stall_after_s": ["1.0e3"]}, ["stall_after_s.0"]),
        ({"env.LR": [1, 3], "stall_after_s": [5, "1.0e3", 7]}, ["stall_after_s.1"]),
        # Both values of a key are wrong.
        ({"stall_after_s": ["1.0e3", "2.0e3"]}, ["stall_after_s.0", "stall_after_s.1"]),
        # Two keys have wrong first values.
        (
            {"stall_after_s": ["1.0e3", 2], "workload": ["dance", "sft", "jump"]},
            ["stall_after_s.0", "workload.0", "workload.2"],
        ),
        # The value is too small for another key of the spec: the fault is at `success.step`.
        (
            {"env.LR": [1, 3], "progress.total": [10, 20, 5]},
            ["progress.total.0", "progress.total.2"],
        ),
    ],
)
def test_each_wrong_value_of_a_matrix_is_reported_once_at_its_place(
    matrix: dict[str, Any], paths: list[str]
) -> None:
    progress = {"jsonl": "metrics.jsonl", "step": "step", "total": 20}
    run_spec = spec("true", progress=progress, success={"step": 20})
    stage = {"name": "grid", "spec": run_spec, "matrix": matrix}

    with pytest.raises(InvalidSpec) as error:
        parse_pipeline({"name": "p", "stages": [stage]})

    assert [fault.path for fault in error.value.faults] == [
        f"stages.0.matrix.{path}" for path in paths
    ]


def test_matrix_may_compare_an_evaluation_whose_best_checkpoint_is_kept() -> None:
    stage = make_evaluated_stage({"keep": 2})
    stage["spec"]["keep_best"] = {"by": "math.accuracy"}

    pipeline = parse_pipeline({"name": "p", "stages": [stage]})

    assert pipeline.stages[0].best_evaluation == "math"


def make_evaluated_stage(trainer_keys: dict[str, Any]) -> dict[str, Any]:
    """Return a stage that trains with four learning rates. An evaluation chooses the best run."""
    trainer = {"command": ["true"], "checkpoints": "saved", **trainer_keys}
    spec = {
        "name": "a",
        "workload": "sft",
        "env": {"LR": "1"},
        "components": {"trainer": trainer},
        "progress": {"jsonl": "metrics.jsonl", "step": "step"},
        "evals": {"math": {"command": ["true"]}},
    }
    matrix = {"env.LR": ["1", "2", "3", "4"]}
    return {"name": "grid", "spec": spec, "matrix": matrix, "best": {"by": "math.accuracy"}}
