"""Supervised fine-tuning for the quickstart: the policy reads right answers, and learns to give
them, by cross-entropy.

    python sft.py --steps 30 --out DIR

Its checkpoints are those of `trainer.py`, which goes on from one by GRPO: `--init-from`.

Exit status: 0 the last step is trained, checkpointed and in metrics.jsonl · 1 it failed, stderr
says why · 2 the arguments are wrong, nothing was started · 130, 143 interrupted, terminated; the
last finished step is checkpointed.
"""

from __future__ import annotations

import os

# The matrices are too small for several threads, which would only occupy cores.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from checkpoints import BadCheckpoint, Checkpoint, load, save
from copy_task import ANSWER_TOKENS, EOS, draw_digits, prompt_of
from grpo import Batch, StepStats, TrainState, initial_state, train_step
from metrics_file import MetricsFile
from policy import Policy, context_of, forward

DEFAULT_LEARNING_RATE = 0.005
#: Steps between two lines of progress.
SAY_EVERY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train."""

    #: The step to stop after, counted from the first one ever trained
    steps: int
    #: Examples in a batch
    batch_size: int
    learning_rate: float
    #: Steps between two checkpoints; the last step always has one
    checkpoint_every: int
    #: Where checkpoints go
    folder: Path
    #: Seed of the initial weights and of the examples
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status, after training.

    Raises:
        SystemExit: with 2; the arguments are wrong, and stderr says how.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        state = _starting_point(options.seed, options.resume_from)
    except BadCheckpoint as error:
        parser.error(f"--resume-from: {error}")
    if state.step >= options.steps:
        parser.error(f"--steps {options.steps}: the checkpoint is at step {state.step} already")
    plan = Plan(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        checkpoint_every=options.checkpoint_every,
        folder=options.out / "checkpoints",
        seed=options.seed,
    )
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        metrics = MetricsFile(options.out / "metrics.jsonl", resumed_step=state.step)
    except OSError as error:
        parser.error(f"--out: {error}")

    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    try:
        state = train(plan, state, metrics, asked)
    except (OSError, FloatingPointError) as error:
        print(f"sft: {error}", file=sys.stderr, flush=True)
        return 1
    if asked and state.step < plan.steps:
        print(f"{signal.Signals(asked[0]).name}: stopped at step {state.step}", flush=True)
        return 128 + asked[0]
    print(f"complete: {state.step} steps trained", flush=True)
    return 0


def train(plan: Plan, state: TrainState, metrics: MetricsFile, asked: list[int]) -> TrainState:
    """The state after the last step, or after the one at which something was `asked`; it is in the
    metrics and checkpointed.

    Raises:
        FloatingPointError: training diverged.
        OSError: metrics or a checkpoint could not be written.
    """
    print(f"training steps {state.step + 1} to {plan.steps}", flush=True)
    while state.step < plan.steps and not asked:
        state, stats = tuned(state, plan)
        metrics.append(state.step, stats)
        if state.step % SAY_EVERY == 0 or state.step in (1, plan.steps):
            line = f"loss {stats.loss:.3f} nats a token, reward {stats.reward:.3f}"
            print(f"step {state.step}/{plan.steps}: {line}", flush=True)
        if state.step % plan.checkpoint_every == 0 or state.step == plan.steps or asked:
            save(Checkpoint(state=state, rng_state=_rng_state(plan.seed)), plan.folder)
    return state


def tuned(state: TrainState, plan: Plan) -> tuple[TrainState, StepStats]:
    """The state after one step on fresh examples, and the step's figures: `loss` is the mean
    cross-entropy of a token, `reward` the mean probability of the right one.

    Raises:
        FloatingPointError: the loss or a weight is no longer finite.
    """
    # Each step has its own seed, so that a resumed training sees the same examples.
    batch = examples(state.policy, plan.batch_size, random.Random(f"{plan.seed}/{state.step}"))
    moved, stats = train_step(state, batch, learning_rate=plan.learning_rate)
    return moved, replace(stats, loss=float(-batch.old_log_probs.mean()))


def examples(policy: Policy, count: int, rng: random.Random) -> Batch:
    """Right answers to `count` prompts, as if the policy had given them, each with an advantage
    of 1: the gradient of GRPO's loss is then that of the cross-entropy."""
    contexts: list[list[int]] = []
    actions: list[int] = []
    for _ in range(count):
        digits = draw_digits(rng)
        answer = [*digits, EOS]
        contexts += [context_of([*prompt_of(digits), *answer[:at]]) for at in range(ANSWER_TOKENS)]
        actions += answer
    rows = np.arange(len(actions))
    log_probs = forward(policy, np.array(contexts)).log_probs[rows, actions]
    return Batch(
        contexts=np.array(contexts),
        actions=np.array(actions),
        old_log_probs=log_probs,
        advantages=np.ones(len(actions)),
        mean_reward=float(np.exp(log_probs).mean()),
    )


def _starting_point(seed: int, resume_from: Path | None) -> TrainState:
    if resume_from is not None:
        return load(resume_from).state
    # Derive the seed as `trainer.py` does, so that both begin with the same weights.
    for_weights, _ = np.random.SeedSequence(seed).spawn(2)
    return initial_state(np.random.default_rng(for_weights))


def _rng_state(seed: int) -> dict[str, object]:
    """Return the initial state of the sampling generator, since this program samples nothing."""
    _, for_sampling = np.random.SeedSequence(seed).spawn(2)
    return dict(np.random.default_rng(for_sampling).bit_generator.state)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The quickstart's SFT, on a CPU.")
    add = parser.add_argument
    add("--steps", type=_positive, required=True, help="the step to stop after")
    add("--out", type=Path, required=True, help="folder for metrics.jsonl and checkpoints/")
    add("--seed", type=int, default=0, help="of the initial weights and of the examples")
    add("--batch-size", type=_positive, default=32, help="examples in a batch")
    add("--learning-rate", type=_rate, default=DEFAULT_LEARNING_RATE)
    add("--checkpoint-every", type=_positive, default=10, help="steps between checkpoints")
    help_text = "a checkpoint, or the folder of an earlier training; empty for a new one"
    add("--resume-from", type=lambda text: Path(text) if text else None, help=help_text)
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _rate(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
