"""The quickstart's SFT: it learns, can be resumed, and GRPO goes on from what it leaves."""

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


def learn(out: Path, steps: int, *more: str) -> int:
    return sft.main(["--steps", str(steps), "--out", str(out), *more])


def lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_training_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    learn(whole, 12)

    learn(parts, 7)
    assert learn(parts, 12, "--resume-from", str(parts)) == 0

    ours, theirs = load(parts).state, load(whole).state
    assert ours.step == theirs.step == 12
    for name in WEIGHT_NAMES:
        assert np.array_equal(getattr(ours.policy, name), getattr(theirs.policy, name)), name
    assert len(lines(parts)) == 12


def test_grpo_begins_with_its_weights_and_nothing_else_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(tmp_path / "sft", 5)
    arguments = ["--api", "http://127.0.0.1:9", "--port", "0", "--steps", "3"]
    arguments += ["--out", str(tmp_path / "grpo"), "--resume-from", ""]
    monkeypatch.setenv("INIT_FROM", str(tmp_path / "sft"))

    state = trainer.prepare(arguments).training.state

    given = load(tmp_path / "sft").state
    assert given.step == 5 and state.step == 0
    assert np.array_equal(state.policy.hidden_weight, given.policy.hidden_weight)
    assert not state.first_moment.hidden_weight.any()


def test_a_resumed_attempt_has_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(tmp_path / "sft", 5)
    learn(tmp_path / "own", 6, "--seed", "1")
    arguments = ["--api", "http://127.0.0.1:9", "--port", "0", "--steps", "9"]
    arguments += ["--out", str(tmp_path / "grpo"), "--resume-from", str(tmp_path / "own")]
    monkeypatch.setenv("INIT_FROM", str(tmp_path / "sft"))

    assert trainer.prepare(arguments).training.state.step == 6


def test_terminated_it_leaves_its_last_step(tmp_path: Path) -> None:
    command = [sys.executable, str(QUICKSTART / "sft.py"), "--steps", "1000000"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or not lines(tmp_path)[:1]:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)

    os.kill(process.pid, signal.SIGTERM)

    assert process.wait(60) == 128 + signal.SIGTERM
    assert load(tmp_path).state.step == len(lines(tmp_path))
