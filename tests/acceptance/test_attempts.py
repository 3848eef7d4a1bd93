"""Runs with several attempts as a user sees them: reasons to wait, and steps to resume from."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.host_environment import wait_for

ROOT = Path(__file__).parents[2]
TOO_FEW_GPUS = "raise ValueError('Total available GPUs 0 is less than total desired GPUs 16')"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_quickstart_resumes_from_its_checkpoint(start_run: Callable) -> None:
    quickstart = yaml.safe_load((ROOT / "deployments" / "runs" / "quickstart.yaml").read_text())
    quickstart["retry"] = {"UNKNOWN": {"attempts": 2, "delay_s": 0.1}}
    run = start_run(quickstart, "--set", "progress.total=15", "--set", "success.step=15")
    checkpoints = run.directory / "attempt-01" / "checkpoints"
    wait_for((checkpoints / "latest").exists, "a checkpoint exists")

    os.kill(run.record()["attempts"][0]["components"]["trainer"]["pid"], signal.SIGKILL)

    assert run.wait(240) == 0, run.text()
    first, second = run.record()["attempts"]
    latest = checkpoints / (checkpoints / "latest").read_text().strip()
    step = int(latest.stem.removeprefix("step-"))
    assert (first["failure"]["kind"], first["failure"]["signal"]) == ("UNKNOWN", "SIGKILL")
    assert first["resume_from"] is None
    assert first["decision"] == f"retried: UNKNOWN, next try (2 of 2) in 0 s, from {latest}"
    assert second["resume_from"] == str(latest)
    assert (second["state"], second["decision"]) == ("completed", "final: completed")
    # The second attempt must run from the step after the checkpoint to the last step.
    metrics = (run.directory / "attempt-02" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in metrics]
    assert steps == list(range(step + 1, 16))
    log = (run.directory / "attempt-02" / "trainer.log").read_text()
    assert f"registered for steps {step + 1} to 15" in log


#: A trainer that keeps writing to an incomplete checkpoint, and completes the checkpoint when the
#: file `enough` exists.
SAVING_TRAINER = """
import os, pathlib, time
part = pathlib.Path("global_step_10", "part")
part.parent.mkdir()
while not os.path.exists("enough"):
    part.open("a").write("weights")
    time.sleep(0.05)
open("latest_checkpointed_iteration.txt", "w").write("10")
time.sleep(3600)
"""


@pytest.mark.thorough
def test_trainer_completes_its_checkpoint_before_it_gets_the_stop_signal(
    start_run: Callable, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    trainer = {
        "command": [sys.executable, "-c", SAVING_TRAINER],
        "cwd": str(folder),
        "checkpoints": ".",
    }
    trainer["stop"] = {"grace_s": 60}
    run = start_run({"name": "x", "workload": "sft", "components": {"trainer": trainer}})
    wait_for((folder / "global_step_10" / "part").exists, "the trainer writes its checkpoint")

    run.process.send_signal(signal.SIGINT)
    run.until_event("teardown.begun")
    (folder / "enough").touch()

    assert run.wait() == 130, run.text()
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert run.pids() == []


@pytest.mark.thorough
def test_ctrl_c_ends_the_wait_for_the_next_attempt(
    start_run: Callable, build_gang_spec: Callable
) -> None:
    retry = {"INSUFFICIENT_RESOURCES": {"delay_s": 3600, "max_delay_s": 3600}}
    run = start_run(build_gang_spec(TOO_FEW_GPUS, retry=retry))
    wait_for(
        lambda: run.record()["state"] == "pending_resources", "the run waits for its next attempt"
    )

    run.process.send_signal(signal.SIGINT)

    assert run.wait() == 130, run.text()
    assert run.record()["state"] == "cancelled"
    [attempt] = run.record()["attempts"]
    assert attempt["failure"]["kind"] == "INSUFFICIENT_RESOURCES"
    assert "waiting: INSUFFICIENT_RESOURCES: " in run.text()
    assert "Total available GPUs 0 is less than total desired GPUs 16" in run.text()
    assert run.flow_run()["state"]["type"] == "CANCELLED"
    assert run.pids() == []


@pytest.mark.parametrize(
    ("kinds", "attempts"),
    [
        (["STORAGE"] * 3, ["STORAGE", "STORAGE"]),
        # Attempts that fail for lack of GPUs (FULL) do not count against the limit for STORAGE,
        # which is 2 attempts.
        (["STORAGE", "FULL", "FULL", "STORAGE"], ["STORAGE", "FULL", "FULL", "STORAGE"]),
    ],
)
@pytest.mark.thorough
def test_failure_kind_has_the_number_of_attempts_in_the_spec(
    start_run: Callable, build_gang_spec: Callable, kinds: list[str], attempts: list[str]
) -> None:
    trainer = (
        "import os, sys\n"
        "full = 'Total available GPUs 0 is less than total desired GPUs 16'\n"
        "texts = {'STORAGE': 'OSError: [Errno 28] No space left on device', 'FULL': full}\n"
        f"sys.exit(texts[{kinds}[int(os.environ['MUSTER_ATTEMPT']) - 1]])"
    )
    delays = {"delay_s": 0.1, "max_delay_s": 0.1}
    retry = {"STORAGE": {"attempts": 2, **delays}, "INSUFFICIENT_RESOURCES": delays}

    run = start_run(build_gang_spec(trainer, retry=retry))

    assert run.wait() == 1, run.text()
    record = run.record()
    actual_kinds = [attempt["failure"]["kind"] for attempt in record["attempts"]]
    assert actual_kinds == [kind.replace("FULL", "INSUFFICIENT_RESOURCES") for kind in attempts]
    assert record["attempts"][-1]["decision"] == "final: STORAGE, 2 of 2 attempts used"
    assert record["state"] == "failed"
