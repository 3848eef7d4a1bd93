"""TRL's SFT and GRPO trainers complete on a stack, and resume after `kill -9`.

Set `MUSTER_TEST_TORCH_PYTHON` to a Python that has `torch` and `trl`; otherwise they are installed
from the package registry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.spec.draft import read_hook
from tests.support.host_environment import wait_for
from tests.support.own_stack import OwnStack
from tests.support.trl_python import find_trl_python

PROGRAMS = Path(__file__).parents[1] / "data" / "trl"
STEPS = 20
#: Time limit for a training of `STEPS` steps on a slow machine, in seconds.
ENDS_WITHIN_S = 900

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a Python interpreter that can import TRL."""
    return find_trl_python(tmp_path_factory.mktemp("trl") / "environment")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnStack]:
    stack = OwnStack(place=tmp_path_factory.mktemp("stack"))
    try:
        stack.up()
        for name in ("tiny_trl.py", "tiny_llama.py"):
            shutil.copy(PROGRAMS / name, stack.project)
        (stack.project / "muster_metrics.py").write_text(read_hook())
        yield stack
    finally:
        stack.down()


def submit(stack: OwnStack, python: str, method: str) -> str:
    """Queue a training, and return its run id.

    Args:
        stack: Stack in which the training runs.
        python: Path of the Python interpreter that can import TRL.
        method: Training method of TRL, for example "sft".
    """
    metrics = "${attempt.dir}/metrics.jsonl"
    trainer = {
        "command": [
            *(python, "tiny_trl.py", method),
            *("${run.dir}/checkpoints", "${attempt.resume_from}", "${progress.total}"),
        ],
        "checkpoints": "${run.dir}/checkpoints",
    }
    spec = {
        "name": f"tiny-{method}",
        "workload": method,
        "env": {"METRICS": metrics, "HF_HUB_OFFLINE": "1"},
        "components": {"trainer": trainer},
        "progress": {"jsonl": metrics, "step": "step", "total": STEPS},
        "success": {"step": STEPS},
        "retry": {"UNKNOWN": {"attempts": 3, "delay_s": 1}},
    }
    return stack.submit_spec(spec)


def read_record(stack: OwnStack, run_id: str) -> dict[str, Any]:
    """Return the content of `run.json`, or an empty mapping before the run has begun."""
    try:
        return stack.record(run_id)
    except FileNotFoundError:
        return {}


def kill_after_a_checkpoint(stack: OwnStack, run_id: str) -> None:
    """Send SIGKILL to the trainer of the first attempt, after its first complete checkpoint."""
    checkpoints = stack.home / "runs" / run_id / "checkpoints"

    def has_checkpoint() -> bool:
        # The trainer writes this file last, so a checkpoint with this file is complete.
        return any(checkpoints.glob("checkpoint-*/trainer_state.json"))

    wait_for(has_checkpoint, f"{run_id} has a checkpoint", within_s=ENDS_WITHIN_S)
    attempt = stack.record(run_id)["attempts"][0]
    os.kill(attempt["components"]["trainer"]["pid"], signal.SIGKILL)


@pytest.mark.parametrize(("method", "metric"), [("sft", "loss"), ("grpo", "reward")])
def test_killed_trl_training_resumes_and_completes(
    stack: OwnStack, python: str, method: str, metric: str
) -> None:
    run_id = submit(stack, python, method)

    kill_after_a_checkpoint(stack, run_id)
    wait_for(
        lambda: read_record(stack, run_id).get("ended_at") is not None,
        f"{run_id} has ended",
        within_s=ENDS_WITHIN_S,
    )

    record = stack.record(run_id)
    assert record["state"] == "completed", record["message"]
    first, second = record["attempts"]
    assert first["failure"]["signal"] == "SIGKILL"
    assert re.search(r"checkpoint-\d+$", second["resume"]["from"]), second["resume"]

    rows = [json.loads(line) for line in stack.muster("metrics", run_id)[1].splitlines()]
    by_step = {row["step"]: row for row in rows}
    assert [*by_step] == [*range(1, STEPS + 1)]
    assert all(metric in row for row in by_step.values() if "train_runtime" not in row)

    checkpoints = json.loads(stack.muster("checkpoints", run_id, "--json")[1])
    complete = {row["step"] for row in checkpoints if row["completeness"] == "complete"}
    assert STEPS in complete

    explained = stack.muster("explain", run_id)[1]
    shown = stack.muster("show", run_id)[1]
    assert re.search(rf"\b{metric}\b", explained), explained
    assert f"step {STEPS} of {STEPS}" in shown
    assert "completed" in shown
    listed = json.loads(stack.muster("ls", "--json", "--name", f"tiny-{method}")[1])
    assert (listed[0]["step"], listed[0]["metric"]) == (STEPS, metric)
