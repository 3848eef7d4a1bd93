"""The quickstart's task, and what its trainer takes from the API."""

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
from atropos_api import ApiError, AtroposApi, batch_of
from checkpoints import Checkpoint, save
from copy_task import EOS, reward_of
from grpo import initial_state
from policy import context_of


def test_batch_holds_a_row_for_each_generated_token() -> None:
    group = {
        "tokens": [[1, 2, 3, 4, 10, 1, EOS], [1, 2, 3, 4, 10, 9]],
        "masks": [[-100] * 5 + [1, EOS], [-100] * 5 + [9]],
        "scores": [0.2, 0.0],
        "inference_logprobs": [[1.0] * 5 + [-0.5, -0.25], [1.0] * 5 + [-2.0]],
    }

    batch = batch_of([group], group_size=2)

    assert list(batch.actions) == [1, EOS, 9]
    assert list(batch.old_log_probs) == [-0.5, -0.25, -2.0]
    assert list(batch.advantages) == pytest.approx([1, 1, -1])
    assert batch.contexts.tolist() == [
        context_of([1, 2, 3, 4, 10]),
        context_of([1, 2, 3, 4, 10, 1]),
        context_of([1, 2, 3, 4, 10]),
    ]
    assert batch.mean_reward == pytest.approx(0.1)


@pytest.mark.parametrize(
    "answer",
    [
        # The API was restarted and knows no trainer.
        {"status": "error", "message": "Trainer not registered.", "batch": []},
        # A batch of nothing: training on it would look like progress.
        {"batch": []},
        # Not an answer of this API.
        {},
        [],
    ],
)
def test_api_that_forgot_the_trainer_is_an_error(answer: object) -> None:
    with serving(lambda *_: (200, answer)) as url, pytest.raises(ApiError):
        AtroposApi(url).next_groups()


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        # All right, and with something after the end.
        ([7, 0, 4, 2, EOS], 1.0),
        ([7, 0, 4, 2, EOS, 7], 1.0),
        # Stopped early, never stopped, shifted by one.
        ([7, 0, EOS], 0.4),
        ([7, 0, 4, 2, 2], 0.8),
        ([0, 4, 2, EOS], 0.0),
        ([], 0.0),
    ],
)
def test_reward_is_the_share_of_right_positions(answer: list[int], reward: float) -> None:
    assert reward_of([7, 0, 4, 2], answer) == pytest.approx(reward)


def test_checkpoint_at_its_end_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = replace(initial_state(np.random.default_rng(0)), step=3)
    rng_state = np.random.default_rng(0).bit_generator.state
    save(Checkpoint(state=state, rng_state=rng_state), tmp_path)
    arguments = ["--api", "http://127.0.0.1:9", "--port", "0", "--out", str(tmp_path)]

    with pytest.raises(SystemExit) as refusal:
        trainer.main([*arguments, "--steps", "3", "--resume-from", str(tmp_path)])

    assert refusal.value.code == 2
    assert "at step 3 already" in capsys.readouterr().err
