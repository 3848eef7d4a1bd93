"""Runs of several attempts, in the stores of the real packages `wandb` and `mlflow`.

The test of W&B uses the package of this environment. Set `MUSTER_TEST_MLFLOW_PYTHON` to a Python
that has `mlflow`; otherwise it is installed from the package registry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.spec.loading import parse_spec
from tasks.train.session import RunSession
from tasks.train.waiting import next_attempt
from tests.support.wandb_files import merge_history, read_offline_runs

CASES = Path(__file__).parents[1] / "data" / "resume"
RUN_ID = "tracked-sft-20260101-000000-abcd91c2"
STEPS = 20
#: Program that prints the runs in a store of MLflow as JSON.
LIST_MLFLOW_RUNS = """
import json, mlflow
client = mlflow.MlflowClient()
experiments = [each.experiment_id for each in client.search_experiments()]
print(json.dumps([
    {
        "id": run.info.run_id,
        "status": run.info.status,
        "tags": run.data.tags,
        "steps": [point.step for point in client.get_metric_history(run.info.run_id, "loss")],
    }
    for run in client.search_runs(experiments)
]))
"""

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.fixture
def mlflow_python(tmp_path: Path) -> str:
    """Return the path of a Python interpreter that can import MLflow."""
    python = os.environ.get("MUSTER_TEST_MLFLOW_PYTHON", "")
    if python:
        return python
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    program = str(environment / "bin" / "python")
    if subprocess.run([program, "-m", "pip", "install", "-q", "mlflow"]).returncode:
        pytest.skip("MLflow cannot be installed here")
    return program


def run_to_the_end(python: str, env: dict[str, str]) -> RunJson:
    """Run `tracked.py` as the trainer, and return the record of the completed run.

    Args:
        python: Path of the Python interpreter that runs the trainer.
        env: Further environment variables of the trainer.
    """
    retry = {"attempts": 3, "delay_s": 0.1}
    spec = parse_spec(
        {
            "name": "tracked",
            "workload": "sft",
            "cwd": str(CASES),
            "env": {
                "METRICS": "${attempt.dir}/m.jsonl",
                "STEPS": str(STEPS),
                "SAVE_EVERY": "5",
                **env,
            },
            "components": {
                "trainer": {
                    "command": [python, "tracked.py", "${run.dir}/c", "${attempt.resume_from}"],
                    "checkpoints": "${run.dir}/c",
                }
            },
            "progress": {"jsonl": "${attempt.dir}/m.jsonl", "step": "step", "total": STEPS},
            "success": {"step": STEPS},
            "retry": {"UNKNOWN": retry, "RUNTIME_ERROR": retry},
        }
    )
    session = RunSession(spec, run_id=RUN_ID, flow_run_id=uuid4())
    session.open()
    try:
        while next_attempt(session):
            session.begin_attempt()
            try:
                session.supervisor.start("trainer")
                session.supervisor.wait_decided()
            finally:
                session.end_attempt()
    finally:
        session.close()

    record = RunJson.read(session.place.record)
    assert record.state is RunState.COMPLETED, record.message
    assert len(record.attempts) == 3
    return record


def test_offline_files_of_wandb_show_each_step_once(muster_home: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")

    run_to_the_end(sys.executable, {"TRACKER": "wandb", "WANDB_DIR": str(tmp_path)})

    runs = read_offline_runs(tmp_path)
    trainings = [run for run in runs if "loss" in run.metrics]
    assert len({run.id for run in runs}) == len(runs)
    assert {run.group for run in runs} == {RUN_ID}
    # In each of the three attempts, the trainer also starts a second program. The second program
    # logs only `accuracy`, to its own W&B run.
    assert len([run for run in runs if run.metrics == {"accuracy"}]) == 3
    # Attempt 2 was killed. W&B itself loses the last history rows of a killed process.
    steps = {run.name: [row["_step"] for row in run.history] for run in trainings}
    assert steps.pop(f"{RUN_ID}--a01-trainer") == [*range(1, 14)]
    assert steps.pop(f"{RUN_ID}--a03-trainer") == [*range(16, STEPS + 1)]
    for rows in steps.values():
        assert rows == [*range(11, 11 + len(rows))]
    curve = {row["_step"]: row["loss"] for row in merge_history(trainings)}
    assert curve == {step: 1 / step for step in curve}
    assert {*range(1, 14), *range(16, STEPS + 1)} <= curve.keys()


def test_attempts_in_mlflow_are_children_of_one_run(
    muster_home: Path, tmp_path: Path, mlflow_python: str
) -> None:
    env = {"TRACKER": "mlflow", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}

    record = run_to_the_end(mlflow_python, env)

    assert [attempt.warnings for attempt in record.attempts] == [(), (), ()]
    listed = subprocess.run(
        [mlflow_python, "-c", LIST_MLFLOW_RUNS],
        env={**os.environ, **env},
        check=True,
        capture_output=True,
    )
    runs: list[dict[str, Any]] = json.loads(listed.stdout)
    [parent] = [run for run in runs if "muster.attempt" not in run["tags"]]
    children = {run["tags"]["muster.attempt"]: run for run in runs if run is not parent}
    assert len(runs) == 4
    assert {run["tags"]["mlflow.parentRunId"] for run in children.values()} == {parent["id"]}
    assert parent["tags"]["mlflow.runName"] == RUN_ID
    assert {number: run["steps"] for number, run in children.items()} == {
        "1": [*range(1, 14)],
        "2": [*range(11, 18)],
        "3": [*range(16, STEPS + 1)],
    }
    statuses = {number: run["status"] for number, run in children.items()}
    # Attempt 1 ended with an error. MLflow still gives the status FINISHED to a run that ends with
    # an error. Attempt 2 was killed.
    assert statuses == {"1": "FINISHED", "2": "KILLED", "3": "FINISHED"}
