"""Tests of the code that the stages of a pipeline get."""

from __future__ import annotations

from pathlib import Path

from tasks.pipeline.stage_specs import add_code
from tasks.record.code_store import read_code, read_files
from tasks.spec.pipeline import PipelineSpec


def test_code_of_a_training_stage_leaves_out_checkpoints_of_earlier_runs(
    tmp_path: Path, muster_home: Path
) -> None:
    root = tmp_path / "project"
    (root / "out").mkdir(parents=True)
    (root / "out" / "step_1.pt").touch()
    (root / "train.py").touch()
    trainer = {"command": ["true", "${stage.first.step}"], "checkpoints": "out"}
    run = {"name": "x", "workload": "sft", "components": {"trainer": trainer}}
    stages = [
        {"name": "first", "command": ["true"]},
        {"name": "second", "spec": run, "needs": ["first"]},
    ]

    pipeline = add_code(None, PipelineSpec.model_validate({"name": "p", "stages": stages}), root)

    files = {
        stage["name"]: set(read_files(read_code((stage.get("spec") or stage)["code"]).tree))
        for stage in pipeline.written()["stages"]
    }
    # A step is no training, so it may read the checkpoints.
    assert files == {"first": {"train.py", "out/step_1.pt"}, "second": {"train.py"}}
