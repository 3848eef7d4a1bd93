"""A run of TRL that is killed at random moments trains no more than one save interval again.

The offline files of W&B show each step of an attempt once. The test needs `wandb` in this
environment to read the files.

Set `MUSTER_TEST_TORCH_PYTHON` to a Python that has `torch`, `trl` and `wandb`; otherwise they are
installed from the package registry. `TRL_KILLS` is the number of kills, 20 by default.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.spec.loading import parse_spec
from tasks.train.session import RunSession
from tasks.train.waiting import next_attempt
from tests.support.trl_python import find_trl_python
from tests.support.wandb_files import WandbRun, read_offline_runs

PROGRAMS = Path(__file__).parents[1] / "data" / "trl"
RUN_ID = "trl-sft-20260101-000000-abcd91c2"
KILLS = int(os.environ.get("TRL_KILLS", "20"))
SAVE_EVERY = 5
STEPS = 12 * KILLS

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a Python interpreter that can import TRL."""
    return find_trl_python(tmp_path_factory.mktemp("trl") / "environment", "wandb")


def steps_of(attempt: Path) -> list[int]:
    file = attempt / "m.jsonl"
    if not file.exists():
        return []
    return [
        json.loads(line)["step"] for line in file.read_text().splitlines() if line.endswith("}")
    ]


def kill_after(session: RunSession, steps: int, signum: signal.Signals) -> None:
    """Send a signal to the trainer of the current attempt, after a number of training steps."""
    while True:
        attempt = session.record.content.attempts[-1]
        trainer = attempt.components.get("trainer")
        folder = session.place.attempt(attempt.number).directory
        if attempt.ended_at is not None:
            return
        if trainer is not None and trainer.pid and len(steps_of(folder)) >= steps:
            os.kill(trainer.pid, signum)
            return
        time.sleep(0.01)


def test_no_more_than_one_save_interval_is_trained_again(
    muster_home: Path, tmp_path: Path, python: str
) -> None:
    pytest.importorskip("wandb")
    moments = random.Random(20261126)
    trainer = {
        "command": [python, "trl_trainer.py", "${run.dir}/c", "${attempt.resume_from}"],
        "checkpoints": "${run.dir}/c",
    }
    retry = {"attempts": 3, "delay_s": 0.1}
    spec = parse_spec(
        {
            "name": "trl",
            "workload": "sft",
            "cwd": str(PROGRAMS),
            "env": {
                "METRICS": "${attempt.dir}/m.jsonl",
                "STEPS": str(STEPS),
                "SAVE_EVERY": str(SAVE_EVERY),
                "HF_HUB_OFFLINE": "1",
                "WANDB_MODE": "offline",
                "WANDB_DIR": str(tmp_path),
            },
            "components": {"trainer": trainer},
            "progress": {"jsonl": "${attempt.dir}/m.jsonl", "step": "step", "total": STEPS},
            "success": {"step": STEPS},
            "retry": {"UNKNOWN": retry, "RUNTIME_ERROR": retry},
        }
    )
    session = RunSession(spec, run_id=RUN_ID, flow_run_id=uuid4())
    session.open()
    kills = 0
    try:
        while next_attempt(session):
            session.begin_attempt()
            killer = None
            if kills < KILLS:
                kills += 1
                # Saving a checkpoint takes longer than a step, so some of the kills happen during a
                # save.
                #
                # After SIGKILL, W&B loses the values of the last 15 s. After SIGINT, the trainer
                # ends with an error, and W&B writes all values.
                signum = moments.choice([signal.SIGKILL, signal.SIGINT])
                killer = threading.Thread(
                    target=kill_after, args=(session, moments.randint(6, 11), signum), daemon=True
                )
                killer.start()
            try:
                session.supervisor.start("trainer")
                session.supervisor.wait_decided()
            finally:
                session.end_attempt()
            if killer is not None:
                killer.join(30)
    finally:
        session.close()

    record = RunJson.read(session.place.record)
    assert record.state is RunState.COMPLETED, record.message
    reached = 0
    for attempt in record.attempts:
        steps = steps_of(session.place.attempt(attempt.number).directory)
        if steps:
            assert steps[0] > reached - SAVE_EVERY - 1, (attempt.number, steps[0], reached)
            reached = max(reached, *steps)
    assert reached == STEPS
    assert len(record.attempts) > KILLS / 2
    check_tracked_steps(read_offline_runs(tmp_path), session)


def check_tracked_steps(tracked: list[WandbRun], session: RunSession) -> None:
    """Check that each W&B run belongs to one attempt, and has each step of this attempt once.

    All W&B runs must be in the same group. The last steps of a killed attempt may be missing.
    """
    assert len({run.id for run in tracked}) == len(tracked)
    assert {run.group for run in tracked} == {RUN_ID}
    complete = 0
    for run in tracked:
        number = int(run.name.removeprefix(f"{RUN_ID}--a").removesuffix("-trainer"))
        trained = steps_of(session.place.attempt(number).directory)
        shown = [row["train/global_step"] for row in run.history if "train/loss" in row]
        assert shown == trained[: len(shown)]
        # An attempt counts as complete even if W&B lacks its last step. The trainer may have been
        # interrupted after this step, before it reported the step to W&B.
        complete += len(shown) >= len(trained) - 1
    # If SIGKILL ends an attempt, W&B may lose the last steps of the attempt. At least two attempts
    # ended without SIGKILL, so at least two attempts must be complete.
    assert complete >= 2
