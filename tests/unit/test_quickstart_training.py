"""The reward of the quickstart's task, and its trainer's use of the Atropos API."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.web import serving

QUICKSTART = Path(__file__).parents[2] / "deployments" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import trainer
from atropos_api import ApiError, AtroposApi, build_batch
from checkpoints import Checkpoint, save
from copy_task import EOS, compute_reward
from grpo import initial_state
from policy import take_context


def test_batch_holds_a_row_for_each_generated_token() -> None:
    group = {
        "tokens": [[1, 2, 3, 4, 10, 1, EOS], [1, 2, 3, 4, 10, 9]],
        "masks": [[-100] * 5 + [1, EOS], [-100] * 5 + [9]],
        "scores": [0.2, 0.0],
        "inference_logprobs": [[1.0] * 5 + [-0.5, -0.25], [1.0] * 5 + [-2.0]],
    }

    batch = build_batch([group], group_size=2)

    assert list(batch.actions) == [1, EOS, 9]
    assert list(batch.old_log_probs) == [-0.5, -0.25, -2.0]
    assert list(batch.advantages) == pytest.approx([1, 1, -1])
    assert batch.contexts.tolist() == [
        take_context([1, 2, 3, 4, 10]),
        take_context([1, 2, 3, 4, 10, 1]),
        take_context([1, 2, 3, 4, 10]),
    ]
    assert batch.mean_reward == pytest.approx(0.1)


@pytest.mark.parametrize(
    "answer",
    [
        # The API was restarted and knows no trainer.
        {"status": "error", "message": "Trainer not registered.", "batch": []},
        # The batch is empty. The trainer must wait instead of using an empty batch for a training
        # step.
        {"batch": []},
        # The response does not have the form of the Atropos API's responses.
        {},
        [],
    ],
)
def test_response_without_a_batch_raises_an_error(answer: object) -> None:
    with serving(lambda *_: (200, answer)) as url, pytest.raises(ApiError):
        AtroposApi(url).next_groups()


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        # The answer is correct. Tokens after the end token EOS do not matter.
        ([7, 0, 4, 2, EOS], 1.0),
        ([7, 0, 4, 2, EOS, 7], 1.0),
        # The answer ends too early, so missing tokens lower the reward.
        ([7, 0, EOS], 0.4),
        # The last of five tokens is wrong: the end token EOS is missing.
        ([7, 0, 4, 2, 2], 0.8),
        # No token is at its right position, so the reward is 0.
        ([0, 4, 2, EOS], 0.0),
        ([], 0.0),
    ],
)
def test_reward_is_the_share_of_right_tokens(answer: list[int], reward: float) -> None:
    assert compute_reward([7, 0, 4, 2], answer) == pytest.approx(reward)


def test_resume_after_the_last_step_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = replace(initial_state(np.random.default_rng(0)), step=3)
    rng_state = np.random.default_rng(0).bit_generator.state
    save(Checkpoint(state=state, rng_state=rng_state), tmp_path)
    arguments = ["--api", "http://127.0.0.1:9", "--port", "0", "--out", str(tmp_path)]

    with pytest.raises(SystemExit) as refusal:
        trainer.main([*arguments, "--steps", "3", "--resume-from", str(tmp_path)])

    assert refusal.value.code == 2
    assert "must be more than 3, the step of the checkpoint" in capsys.readouterr().err
