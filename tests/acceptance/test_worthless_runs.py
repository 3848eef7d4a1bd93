"""Trainings that go wrong without ending: alarms on the figures of the quickstart, and resumes from
checkpoints of which some are broken."""

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

from tests.support.ground import until

ROOT = Path(__file__).parents[2]
WITHIN_STEPS = 15
EVERY = 5
KEPT = 3
#: A trainer that is a run of Weights & Biases, too.
TRACKED = """
import os, runpy, sys, wandb
wandb.init(project="quickstart", mode="offline", dir=os.environ["TRACKED_IN"])
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def quickstart(programs: Path = ROOT / "deployments" / "quickstart") -> dict[str, Any]:
    text = (ROOT / "deployments" / "runs" / "quickstart.yaml").read_text()
    spec: dict[str, Any] = yaml.safe_load(text.replace("deployments/quickstart/", f"{programs}/"))
    return spec


def alarms(run: Any) -> list[Mapping[str, Any]]:
    [attempt] = run.record()["attempts"]
    return attempt.get("alarms", [])


def with_constant_reward(folder: Path) -> dict[str, Any]:
    programs = folder / "programs"
    shutil.copytree(ROOT / "deployments" / "quickstart", programs)
    task = programs / "copy_task.py"
    task.write_text(task.read_text().replace("return right / len(wanted)", "return 0.4"))
    return quickstart(programs)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["a rate that diverges", "a constant reward"])
def test_a_worthless_training_raises_an_alarm(
    start_run: Callable, tmp_path: Path, fault: str
) -> None:
    spec = quickstart() if fault == "a rate that diverges" else with_constant_reward(tmp_path)
    if fault == "a rate that diverges":
        spec["components"]["trainer"]["command"] += ["--learning-rate", "5"]
    run = start_run(spec, "--set", "progress.total=20", "--set", "success.step=20")

    assert run.wait(240) == 0, run.text()
    assert alarms(run), run.text()
    assert all(alarm["step"] <= WITHIN_STEPS for alarm in alarms(run)), alarms(run)
    assert f"alarm: {alarms(run)[0]['message']}" in run.text()


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_good_seeds_raise_none(start_run: Callable) -> None:
    for seed in range(10):
        spec = quickstart()
        spec["components"]["trainer"]["command"] += ["--seed", str(seed)]
        spec["components"]["environment"]["command"] += ["--env.seed", str(seed)]
        run = start_run(spec)

        assert run.wait(240) == 0, run.text()
        assert alarms(run) == [], f"seed {seed}"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_rule_that_says_stop_goes_back_to_before_it(start_run: Callable) -> None:
    spec = quickstart()
    # Of its figures this one is sure to come.
    rule = {"metric": "step", "above": 12, "for_steps": 1, "then": "stop"}
    spec |= {"watch": {"rules": {"late": rule}}}
    spec["retry"] = {"ALARM": {"attempts": 2, "delay_s": 0.1}}
    spec["components"]["trainer"]["command"] += ["--checkpoint-every", str(EVERY)]
    run = start_run(spec)

    assert run.wait(240) == 1, run.text()
    first, second = run.record()["attempts"]
    assert {one["failure"]["kind"] for one in (first, second)} == {"ALARM"}
    assert Path(second["resume_from"]).stem == "step-000010"


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_killed_at_random_steps_among_broken_checkpoints(
    start_run: Callable, tmp_path: Path
) -> None:
    rng = random.Random(20261123)
    spec = quickstart()
    spec["retry"] = {
        "UNKNOWN": {"attempts": 2, "delay_s": 0.1},
        "USER_ERROR": {"attempts": 2, "delay_s": 0.1},
    }
    trainer = spec["components"]["trainer"]
    tracked = tmp_path / "tracked.py"
    tracked.write_text(TRACKED)
    trainer["command"] = ["python", str(tracked), *trainer["command"][1:]]
    trainer["command"] += ["--checkpoint-every", str(EVERY)]
    trainer["env"] = {"TRACKED_IN": str(tmp_path)}
    trainer["keep"] = KEPT
    total = 100
    run = start_run(spec, "--set", f"progress.total={total}", "--set", f"success.step={total}")

    kills = sorted(rng.sample(range(3, total - 2), 20))
    for number, step in enumerate(kills):
        # Two kills at one step would be two tries without a new one.
        step = max(step, 1 + _best(run))
        until(lambda step=step: _reached(run) >= step or run.process.poll() is not None, str(step))
        if run.process.poll() is not None:
            break
        attempt = run.record()["attempts"][-1]
        os.kill(attempt["components"]["trainer"]["pid"], signal.SIGKILL)
        if number % 4 == 1:
            _break_last(run.directory, rng)
        count = len(run.record()["attempts"])
        until(lambda count=count: len(run.record()["attempts"]) > count, "the next attempt")

    assert run.wait(400) == 0, run.text()
    starts = [_steps(folder) for folder in _folders(run)]
    assert max(map(max, filter(None, starts))) == total
    reached = 0
    for steps in filter(None, starts):
        # The one that was broken costs its interval, too.
        assert steps[0] > reached - 2 * EVERY, starts
        reached = max(steps)
    left = [*map(zipfile.is_zipfile, run.directory.glob("attempt-*/checkpoints/step-*.npz"))]
    assert sum(left) <= KEPT, left
    ids = {folder.name.split("-", 3)[-1] for folder in tmp_path.glob("wandb/offline-run-*")}
    assert ids == {run.record()["run_id"]}, ids


def _steps(attempt: Path) -> list[int]:
    try:
        lines = (attempt / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line)["step"] for line in lines]


def _folders(run: Any) -> list[Path]:
    return sorted(run.directory.glob("attempt-*"))


def _reached(run: Any) -> int:
    return max((step for folder in _folders(run)[-1:] for step in _steps(folder)), default=0)


def _best(run: Any) -> int:
    return max((step for folder in _folders(run) for step in _steps(folder)), default=0)


def _break_last(directory: Path, rng: random.Random) -> None:
    """Truncated, half written, or another thing altogether."""
    found = sorted(directory.glob("attempt-*/checkpoints/step-*.npz"))
    if not found:
        return
    last = max(found, key=lambda path: path.stem)
    content = last.read_bytes()
    match rng.randrange(3):
        case 0:
            last.write_bytes(content[: len(content) // 2])
        case 1:
            last.unlink()
            last.with_name(f".{last.name}.tmp").write_bytes(content[:100])
        case 2:
            last.write_bytes(b"{}" * 100)
