"""The quickstart's SFT: its training can be resumed, and GRPO can begin with its weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

QUICKSTART = Path(__file__).parents[2] / "deployments" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import sft
import trainer
from checkpoints import load
from policy import WEIGHT_NAMES


def train(out: Path, steps: int, *options: str) -> int:
    """Run the supervised fine-tuning (SFT) up to a step, and return its exit code."""
    return sft.main(["--steps", str(steps), "--out", str(out), *options])


def read_metrics(out: Path) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_resumed_training_gives_identical_weights(tmp_path: Path) -> None:
    uninterrupted = tmp_path / "uninterrupted"
    resumed = tmp_path / "resumed"
    train(uninterrupted, 12)

    train(resumed, 7)
    status = train(resumed, 12, "--resume-from", str(resumed))

    assert status == 0
    resumed_state = load(resumed).state
    expected_state = load(uninterrupted).state
    assert resumed_state.step == expected_state.step == 12
    for name in WEIGHT_NAMES:
        weight = getattr(resumed_state.policy, name)
        assert np.array_equal(weight, getattr(expected_state.policy, name)), name
    assert len(read_metrics(resumed)) == 12


def test_grpo_takes_only_the_weights_of_an_sft_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "sft", 5)
    arguments = ["--api", "http://127.0.0.1:9", "--port", "0", "--steps", "3"]
    arguments += ["--out", str(tmp_path / "grpo"), "--resume-from", ""]
    monkeypatch.setenv("INIT_FROM", str(tmp_path / "sft"))

    state = trainer.prepare(arguments).training.state

    sft_state = load(tmp_path / "sft").state
    assert sft_state.step == 5 and state.step == 0
    assert np.array_equal(state.policy.hidden_weight, sft_state.policy.hidden_weight)
    assert not state.first_moment.hidden_weight.any()


def test_resumed_grpo_ignores_the_sft_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "sft", 5)
    train(tmp_path / "own", 6, "--seed", "1")
    arguments = ["--api", "http://127.0.0.1:9", "--port", "0", "--steps", "9"]
    arguments += ["--out", str(tmp_path / "grpo"), "--resume-from", str(tmp_path / "own")]
    monkeypatch.setenv("INIT_FROM", str(tmp_path / "sft"))

    assert trainer.prepare(arguments).training.state.step == 6


def test_sigterm_saves_the_last_step(tmp_path: Path) -> None:
    command = [sys.executable, str(QUICKSTART / "sft.py"), "--steps", "1000000"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or not read_metrics(tmp_path)[:1]:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)

    os.kill(process.pid, signal.SIGTERM)

    assert process.wait(60) == 128 + signal.SIGTERM
    assert load(tmp_path).state.step == len(read_metrics(tmp_path))
