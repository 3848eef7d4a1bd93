"""Supervised fine-tuning (SFT) of the quickstart's policy on right answers, by cross-entropy.

    python sft.py --steps 30 --out DIR

The checkpoints have the format of `trainer.py`, whose option `--init-from` reads them.

Exit status: 0 after the last step, with its checkpoint and metrics; 1 if the training failed, with
the reason on stderr; 2 if the arguments are wrong and nothing was started; 130 after SIGINT and 143
after SIGTERM, with a checkpoint of the last finished step.
"""

from __future__ import annotations

import os

# Use one thread, because the matrices are too small to profit from several threads.
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
from copy_task import ANSWER_TOKENS, EOS, build_prompt, draw_digits
from grpo import Batch, StepStats, TrainState, initial_state, train_step
from metrics_file import MetricsFile
from policy import Policy, forward, take_context

DEFAULT_LEARNING_RATE = 0.005
#: Number of steps between two lines of output about the progress.
SAY_EVERY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a training."""

    #: Number of the last step. Steps are counted over all attempts, beginning with 1.
    steps: int
    #: Number of examples in a batch.
    batch_size: int
    learning_rate: float
    #: Number of steps between two checkpoints. The last step is always saved.
    checkpoint_every: int
    #: Folder of the checkpoints.
    folder: Path
    #: Seed of the initial weights and of the examples.
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training, and return the exit status.

    Raises:
        SystemExit: The arguments are wrong. The exit status is 2, and stderr gives the reason.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        state = _starting_point(options.seed, options.resume_from)
    except BadCheckpoint as error:
        parser.error(f"--resume-from: {error}")
    if state.step >= options.steps:
        parser.error(
            f"--steps must be more than {state.step}, the step of the checkpoint, but is "
            f"{options.steps}"
        )
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

    received_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: received_signals.append(number))
    try:
        state = train(plan, state, metrics, received_signals)
    except (OSError, FloatingPointError) as error:
        print(f"sft: {error}", file=sys.stderr, flush=True)
        return 1
    if received_signals and state.step < plan.steps:
        name = signal.Signals(received_signals[0]).name
        print(f"{name}: stopped at step {state.step}", flush=True)
        return 128 + received_signals[0]
    print(f"complete: {state.step} steps trained", flush=True)
    return 0


def train(
    plan: Plan, state: TrainState, metrics: MetricsFile, received_signals: list[int]
) -> TrainState:
    """Train until the last step is finished or a signal arrives, and return the last state.

    The metrics and the checkpoint of the last finished step are written.

    Args:
        plan: Settings of the training.
        state: State before the first step.
        metrics: File for the metrics of each step.
        received_signals: List to which the signal handler adds each signal that this process
            receives.

    Raises:
        FloatingPointError: The weights are not finite.
        OSError: The metrics or a checkpoint could not be written.
    """
    print(f"training steps {state.step + 1} to {plan.steps}", flush=True)
    while state.step < plan.steps and not received_signals:
        state, stats = tune_step(state, plan)
        metrics.append(state.step, stats)
        is_last = state.step == plan.steps
        if state.step % SAY_EVERY == 0 or state.step == 1 or is_last:
            line = f"loss {stats.loss:.3f} nats per token, reward {stats.reward:.3f}"
            print(f"step {state.step}/{plan.steps}: {line}", flush=True)
        if state.step % plan.checkpoint_every == 0 or is_last or received_signals:
            save(Checkpoint(state=state, rng_state=_initial_rng_state(plan.seed)), plan.folder)
    return state


def tune_step(state: TrainState, plan: Plan) -> tuple[TrainState, StepStats]:
    """Train one step on new examples, and return the new state and the metrics of the step.

    In the metrics, `loss` is the mean cross-entropy of a token in nats, and `reward` is the mean
    probability of the right token.

    Raises:
        FloatingPointError: A weight is not finite.
    """
    # Each step has its own seed, so that a resumed training sees the same examples.
    rng = random.Random(f"{plan.seed}/{state.step}")
    batch = build_examples(state.policy, plan.batch_size, rng)
    next_state, stats = train_step(state, batch, learning_rate=plan.learning_rate)
    return next_state, replace(stats, loss=float(-batch.old_log_probs.mean()))


def build_examples(policy: Policy, count: int, rng: random.Random) -> Batch:
    """Return a batch of right answers to new prompts, as if the policy had sampled the answers.

    Each answer has an advantage of 1, so that the gradient of GRPO's loss equals the gradient of
    the cross-entropy.

    Args:
        policy: The policy, for the log-probabilities of the answers.
        count: Number of prompts.
        rng: Random generator for the prompts.
    """
    contexts: list[list[int]] = []
    actions: list[int] = []
    for _ in range(count):
        digits = draw_digits(rng)
        answer = [*digits, EOS]
        contexts += [
            take_context([*build_prompt(digits), *answer[:at]]) for at in range(ANSWER_TOKENS)
        ]
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
    """Return the state of a checkpoint, or the initial state of a new training.

    Raises:
        BadCheckpoint: The checkpoint cannot be read.
    """
    if resume_from is not None:
        return load(resume_from).state
    # Derive the seed as `trainer.py` does, so that both programs begin with the same weights.
    weights_seed, _ = np.random.SeedSequence(seed).spawn(2)
    return initial_state(np.random.default_rng(weights_seed))


def _initial_rng_state(seed: int) -> dict[str, object]:
    """Return the initial state of the random generator with which `trainer.py` samples answers.

    This program samples no answers, but the format of its checkpoints, which `trainer.py` can read,
    includes this state.
    """
    _, sampling_seed = np.random.SeedSequence(seed).spawn(2)
    return dict(np.random.default_rng(sampling_seed).bit_generator.state)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="The quickstart's supervised fine-tuning (SFT), on a CPU."
    )
    add = parser.add_argument
    add("--steps", type=_positive, required=True, help="Number of the last step")
    add("--out", type=Path, required=True, help="folder for metrics.jsonl and checkpoints/")
    seed = os.environ.get("SEED", "0")
    help_text = "Seed of the initial weights and of the examples. Default: $SEED, or 0"
    add("--seed", type=int, default=seed, help=help_text)
    add("--batch-size", type=_positive, default=32, help="Number of examples per batch")
    rate = os.environ.get("LR", str(DEFAULT_LEARNING_RATE))
    help_text = f"Learning rate. Default: $LR, or {DEFAULT_LEARNING_RATE}"
    add("--learning-rate", type=_rate, default=rate, help=help_text)
    add(
        "--checkpoint-every", type=_positive, default=10, help="Number of steps between checkpoints"
    )
    help_text = "Checkpoint, or folder of an earlier training. Empty: start a new training"
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
