"""`muster pipeline`: its messages and exit codes before anything is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cyclopts import App
from prefect.client.schemas.objects import State, StateType
from prefect.states import Cancelled, Completed, Crashed, Failed

from flows.pipeline import command
from tasks.pipeline.decision import StageRun
from tasks.pipeline.session import PipelineSession
from tasks.record.states import RunState
from tasks.server.flow_process import get_exit_code
from tasks.show.arguments import run
from tasks.spec.pipeline import parse_pipeline

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = App(name="pipeline", default_command=command)
QUICKSTART = str(ROOT / "deployments/pipelines/quickstart-sft-then-grpo.yaml")


def test_missing_server_is_reported_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(PIPELINE, [QUICKSTART])

    assert code == 1
    output = capsys.readouterr().err
    assert "muster up" in output and "PREFECT_API_URL" in output and "muster train" in output


def test_an_invalid_pipeline_exits_2_with_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    faults = ["--set", "grpo.workload=dance", "--set", "sfd.tags=[x]"]

    code = run(PIPELINE, [QUICKSTART, *faults])

    assert code == 2
    output = capsys.readouterr().err
    assert (
        "stages.1.spec.workload: must be ppo, grpo, sft, dpo, rm, pretrain, other or step" in output
    )
    assert "no stage 'sfd' (did you mean `sft`?)" in output
    assert output.endswith("Nothing was started.\n")


def test_early_stopping_without_optuna_exits_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = {
        "name": "grid",
        "spec": str(ROOT / "deployments/runs/quickstart-sft.yaml"),
        "matrix": {"progress.total": [30, 40, 50, 60]},
        "stop_early": {"by": "loss", "mode": "min", "after_step": 5},
    }
    path = tmp_path / "pipeline.yaml"
    path.write_text(json.dumps({"name": "sweep", "stages": [stage]}))
    monkeypatch.setitem(sys.modules, "optuna", None)

    code = run(PIPELINE, [str(path)])

    assert code == 2
    output = capsys.readouterr().err
    assert "stages.0.stop_early: this key needs the Python package optuna" in output
    assert 'pip install "muster[sweeps]"' in output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, "--resume"),
        ([], 2, "no pipeline was named. To start a pipeline: muster pipeline PIPELINE.yaml. "),
        (["a", "b"], 2, "b"),
    ],
)
def test_arguments_are_checked(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(PIPELINE, arguments) == code

    out, err = capsys.readouterr()
    assert message in out + err


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (Completed(), 0),
        (Failed(message="stage a: CUDA_OOM: x"), 1),
        (Failed(message="stage a: INFEASIBLE: asks for 3 nodes"), 3),
        (Crashed(), 1),
        (Cancelled(), 130),
    ],
)
def test_exit_codes_equal_the_exit_codes_of_a_run(state: State[Any], code: int) -> None:
    assert get_exit_code(state) == code


def ended(state: str, ending: RunState, message: str) -> StageRun:
    return StageRun(
        stage="b",
        number=1,
        flow_run_id="7",
        name="b-run",
        state=state,
        message=message,
        ending=ending,
        ended_at=None,
    )


@pytest.mark.parametrize(
    ("run", "kind", "message"),
    [
        (None, StateType.COMPLETED, "all stages are complete: a, b"),
        (
            ended("Failed", RunState.FAILED, "NODE_LOST: n1"),
            StateType.FAILED,
            "stage b: NODE_LOST: n1 (flow run 7)",
        ),
        # the flow process of the stage's run was lost, so the pipeline has failed
        (
            ended("Crashed", RunState.FAILED, "its process is gone"),
            StateType.FAILED,
            "stage b: Crashed: its process is gone (flow run 7)",
        ),
        # a user cancelled only the run of the stage, so the pipeline is cancelled, too
        (
            ended("Cancelled", RunState.CANCELLED, "cancelled from Prefect"),
            StateType.CANCELLED,
            "stage b: this run was cancelled: flow run 7",
        ),
    ],
)
def test_final_message_names_stage_cause_and_run(
    run: StageRun | None, kind: StateType, message: str
) -> None:
    spec = {"name": "x", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    stages = [{"name": name, "spec": spec} for name in ("a", "b")]
    loaded = parse_pipeline({"name": "two", "stages": stages})
    session = PipelineSession(loaded, flow_run_id=uuid4(), api_url="http://127.0.0.1:9/api")
    session.final_run = run

    state = session.conclude()

    assert (state.type, state.message) == (kind, message)
