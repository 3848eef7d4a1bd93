"""The quickstart's training loop and task, against an API made of a list."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

QUICKSTART = Path(__file__).parents[2] / "deployments" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import trainer
from atropos_api import NOT_GENERATED, ApiError, AtroposApi, Registration, batch_of
from checkpoints import load
from copy_task import (
    ANSWER_TOKENS,
    EOS,
    draw_digits,
    prompt_of,
    reward_of,
)
from grpo import initial_state
from metrics_file import MetricsFile
from policy import context_of
from sampler import Sampler
from training import Plan, Training

GROUP_SIZE = 8
GROUPS = 16


def a_group(sampler: Sampler, digits: Sequence[int]) -> dict[str, Any]:
    """A group of scored answers, in the form an environment sends it."""
    prompt = prompt_of(digits)
    answers = sampler.sample(prompt, count=GROUP_SIZE, max_tokens=ANSWER_TOKENS)
    return {
        "tokens": [[*prompt, *one.tokens] for one in answers],
        "masks": [[NOT_GENERATED] * len(prompt) + list(one.tokens) for one in answers],
        "scores": [reward_of(digits, one.tokens) for one in answers],
        "inference_logprobs": [[1.0] * len(prompt) + list(one.log_probs) for one in answers],
    }


class FakeApi:
    """An API whose environment answers at once, after `empty_polls` empty answers a batch."""

    def __init__(self, sampler: Sampler, *, seed: int = 0, empty_polls: int = 0) -> None:
        self.registrations: list[Registration] = []
        self._sampler = sampler
        self._rng = random.Random(seed)
        self._empty_polls = empty_polls
        self._polls = 0

    def register(self, registration: Registration) -> None:
        self.registrations.append(registration)

    def next_groups(self) -> list[Mapping[str, Any]] | None:
        self._polls += 1
        if self._polls <= self._empty_polls:
            return None
        self._polls = 0
        return [a_group(self._sampler, draw_digits(self._rng)) for _ in range(GROUPS)]


class TrainingSetup:
    """A training in `out`, its fake API and the pauses it took."""

    def __init__(
        self, out: Path, *, steps: int, seed: int = 0, checkpoint_every: int = 10, polls: int = 0
    ) -> None:
        resumed = load(out).state if (out / "checkpoints" / "latest").exists() else None
        state = resumed or initial_state(np.random.default_rng(seed))
        sampler = Sampler(state.policy, step=state.step, rng=np.random.default_rng(seed))
        self.out = out
        self.api = FakeApi(sampler, seed=seed, empty_polls=polls)
        self.pauses_s: list[float] = []
        plan = Plan(
            steps=steps,
            batch_size=GROUPS * GROUP_SIZE,
            group_size=GROUP_SIZE,
            learning_rate=0.02,
            checkpoint_every=checkpoint_every,
            folder=out / "checkpoints",
        )
        self.training = Training(
            plan,
            api=self.api,
            sampler=sampler,
            state=state,
            metrics=MetricsFile(out / "metrics.jsonl", resumed_step=state.step),
            sleep=self.pauses_s.append,
        )

    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def test_policy_learns_the_task_from_chance_in_sixty_steps(tmp_path: Path) -> None:
    setup = TrainingSetup(tmp_path, steps=60)

    setup.training.run()

    metrics = setup.metrics()
    assert metrics[0]["reward"] < 0.15
    assert min(line["reward"] for line in metrics[-5:]) > 0.95
    assert metrics[-1]["entropy"] < 0.2 < 2 < metrics[0]["entropy"]


def test_resumed_training_registers_and_counts_from_its_checkpoint(tmp_path: Path) -> None:
    TrainingSetup(tmp_path, steps=3).training.run()
    resumed = TrainingSetup(tmp_path, steps=5)

    resumed.training.run()

    (registration,) = resumed.api.registrations
    assert (registration.starting_step, registration.num_steps) == (3, 5)
    assert [line["step"] for line in resumed.metrics()] == [1, 2, 3, 4, 5]


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


@contextmanager
def an_api(answers: Mapping[str, Any]) -> Iterator[str]:
    """The URL of a server with one JSON answer a path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            payload = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


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
    with an_api({"/batch": answer}) as url, pytest.raises(ApiError):
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


def test_checkpoint_with_no_steps_left_is_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TrainingSetup(tmp_path, steps=3).training.run()
    arguments = ["--api", "http://127.0.0.1:9", "--port", "0", "--out", str(tmp_path)]

    with pytest.raises(SystemExit) as refusal:
        trainer.main([*arguments, "--steps", "3", "--resume-from", str(tmp_path)])

    assert refusal.value.code == 2
    assert "at step 3 already" in capsys.readouterr().err
