"""Trainings that fail without ending: alarms about their metrics, and broken checkpoints.

The trainings are variants of the quickstart.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.host_environment import wait_for
from tests.support.wandb_files import read_offline_runs

ROOT = Path(__file__).parents[2]
#: Training step by which Muster must have raised an alarm about the metrics.
WITHIN_STEPS = 15
#: Number of training steps between two checkpoints.
EVERY = 5
#: Number of newest checkpoints that the trainer keeps.
KEPT = 3
#: A program that runs the trainer, and also logs the trainer's metrics to W&B.
TRACKED = """
import os, runpy, sys, wandb
tracked = wandb.init(project="quickstart", mode="offline", dir=os.environ["TRACKED_IN"])
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
from metrics_file import MetricsFile

append = MetricsFile.append

def append_and_track(self, step, stats, took=None):
    append(self, step, stats, took)
    tracked.log({"reward": stats.reward}, step=step)

MetricsFile.append = append_and_track
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def load_quickstart(programs: Path = ROOT / "deployments" / "quickstart") -> dict[str, Any]:
    """Return the spec of the quickstart, changed to run the programs in the given folder."""
    text = (ROOT / "deployments" / "runs" / "quickstart.yaml").read_text()
    spec: dict[str, Any] = yaml.safe_load(text.replace("deployments/quickstart/", f"{programs}/"))
    return spec


def read_alarms(run: Any) -> list[Mapping[str, Any]]:
    """Return the alarms about the metrics of the run's only attempt."""
    [attempt] = run.record()["attempts"]
    return attempt.get("alarms", [])


def build_spec_with_constant_reward(folder: Path) -> dict[str, Any]:
    """Return the spec of the quickstart, changed so that each answer gets the reward 0.4."""
    programs = folder / "programs"
    shutil.copytree(ROOT / "deployments" / "quickstart", programs)
    task = programs / "copy_task.py"
    task.write_text(task.read_text().replace("return correct / len(expected)", "return 0.4"))
    return load_quickstart(programs)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["a diverging learning rate", "a constant reward"])
def test_training_that_does_not_learn_raises_an_alarm(
    start_run: Callable, tmp_path: Path, fault: str
) -> None:
    spec = (
        load_quickstart()
        if fault == "a diverging learning rate"
        else build_spec_with_constant_reward(tmp_path)
    )
    if fault == "a diverging learning rate":
        spec["components"]["trainer"]["command"] += ["--learning-rate", "5"]
    run = start_run(spec, "--set", "progress.total=20", "--set", "success.step=20")

    assert run.wait(240) == 0, run.text()
    assert read_alarms(run), run.text()
    assert all(alarm["step"] <= WITHIN_STEPS for alarm in read_alarms(run)), read_alarms(run)
    assert f"alarm: {read_alarms(run)[0]['message']}" in run.text()


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_successful_trainings_raise_no_alarm(start_run: Callable) -> None:
    for seed in range(10):
        spec = load_quickstart()
        spec["components"]["trainer"]["command"] += ["--seed", str(seed)]
        spec["components"]["environment"]["command"] += ["--env.seed", str(seed)]
        run = start_run(spec)

        assert run.wait(240) == 0, run.text()
        assert read_alarms(run) == [], f"seed {seed}"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_attempt_after_a_stopping_alarm_resumes_before_the_alarm(start_run: Callable) -> None:
    spec = load_quickstart()
    # The metric "step" increases with each step, so this metric will exceed the limit of the rule.
    rule = {"metric": "step", "above": 12, "for_steps": 1, "then": "stop"}
    spec |= {"watch": {"rules": {"late": rule}}}
    spec["retry"] = {"ALARM": {"attempts": 2, "delay_s": 0.1}}
    spec["components"]["trainer"]["command"] += ["--checkpoint-every", str(EVERY)]
    run = start_run(spec)

    assert run.wait(240) == 1, run.text()
    first, second = run.record()["attempts"]
    assert {attempt["failure"]["kind"] for attempt in (first, second)} == {"ALARM"}
    assert Path(second["resume_from"]).stem == "step-000010"


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_run_completes_despite_random_kills_and_broken_checkpoints(
    start_run: Callable, tmp_path: Path
) -> None:
    rng = random.Random(20261123)
    spec = load_quickstart()
    spec["retry"] = {
        "UNKNOWN": {"attempts": 2, "delay_s": 0.1},
        "USER_ERROR": {"attempts": 2, "delay_s": 0.1},
    }
    trainer = spec["components"]["trainer"]
    tracked_program = tmp_path / "tracked.py"
    tracked_program.write_text(TRACKED)
    trainer["command"] = ["python", str(tracked_program), *trainer["command"][1:]]
    trainer["command"] += ["--checkpoint-every", str(EVERY)]
    trainer["env"] = {"TRACKED_IN": str(tmp_path)}
    trainer["keep"] = KEPT
    total = 100
    run = start_run(spec, "--set", f"progress.total={total}", "--set", f"success.step={total}")

    kills = sorted(rng.sample(range(3, total - 2), 20))
    for number, step in enumerate(kills):
        # Kill an attempt only after its step is higher than all steps of earlier attempts, because
        # Muster allows only a few attempts without progress.
        step = max(step, 1 + _read_best_step(run))
        wait_for(
            lambda step=step: _read_last_step(run) >= step or run.process.poll() is not None,
            str(step),
        )
        if run.process.poll() is not None:
            break
        attempt = run.record()["attempts"][-1]
        os.kill(attempt["components"]["trainer"]["pid"], signal.SIGKILL)
        if number % 4 == 1:
            _break_newest_checkpoint(run.directory, rng)
        count = len(run.record()["attempts"])
        wait_for(lambda count=count: len(run.record()["attempts"]) > count, "the next attempt")

    assert run.wait(400) == 0, run.text()
    steps_by_attempt = [_read_steps(folder) for folder in _list_attempts(run)]
    assert max(map(max, filter(None, steps_by_attempt))) == total
    reached = 0
    for steps in filter(None, steps_by_attempt):
        # If the newest checkpoint is broken, the run resumes from the checkpoint before the newest
        # checkpoint, and repeats the steps after this older checkpoint.
        assert steps[0] > reached - 2 * EVERY, steps_by_attempt
        reached = max(steps)
    checkpoint_validity = [
        *map(zipfile.is_zipfile, run.directory.glob("attempt-*/checkpoints/step-*.npz"))
    ]
    assert sum(checkpoint_validity) <= KEPT, checkpoint_validity
    tracked = read_offline_runs(tmp_path)
    run_id = run.record()["run_id"]
    assert len({each.id for each in tracked}) == len(tracked)
    assert {each.group for each in tracked} == {run_id}
    for each in tracked:
        number = int(each.name.removeprefix(f"{run_id}--a").removesuffix("-trainer"))
        shown = [row["_step"] for row in each.history]
        # W&B loses the last values of a killed process, so only the first steps are compared.
        assert shown == steps_by_attempt[number - 1][: len(shown)]
    assert tracked[-1].history[-1]["_step"] == total


def _read_steps(attempt: Path) -> list[int]:
    """Return the steps in the metrics file of an attempt, or an empty list if there is no file."""
    try:
        lines = (attempt / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line)["step"] for line in lines]


def _list_attempts(run: Any) -> list[Path]:
    """Return the directories of the run's attempts, in order."""
    return sorted(run.directory.glob("attempt-*"))


def _read_last_step(run: Any) -> int:
    """Return the highest step of the newest attempt, or 0 if the attempt has made no step."""
    return max(
        (step for folder in _list_attempts(run)[-1:] for step in _read_steps(folder)), default=0
    )


def _read_best_step(run: Any) -> int:
    """Return the highest step of all attempts, or 0 if no attempt has made a step."""
    return max((step for folder in _list_attempts(run) for step in _read_steps(folder)), default=0)


def _break_newest_checkpoint(directory: Path, rng: random.Random) -> None:
    """Damage the newest checkpoint in one of three ways, chosen at random.

    The file is truncated, replaced by an unfinished copy, or gets other content.
    """
    checkpoints = sorted(directory.glob("attempt-*/checkpoints/step-*.npz"))
    if not checkpoints:
        return
    newest = max(checkpoints, key=lambda path: path.stem)
    content = newest.read_bytes()
    match rng.randrange(3):
        case 0:
            newest.write_bytes(content[: len(content) // 2])
        case 1:
            newest.unlink()
            newest.with_name(f".{newest.name}.tmp").write_bytes(content[:100])
        case 2:
            newest.write_bytes(b"{}" * 100)
