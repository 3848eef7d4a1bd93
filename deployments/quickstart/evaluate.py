"""Evaluate a checkpoint of the quickstart: the mean reward over a fixed set of prompts.

    python evaluate.py --checkpoint PATH --temperature 0

The result is JSON with `reward`, `step` and `checkpoint`. It is printed, and written to the file
that the environment variable MUSTER_RESULT names, if it is set.

Exit status: 0 done; 2 if the arguments are wrong.
"""

from __future__ import annotations

import os

# Use one thread, because the matrices are too small to profit from several threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from atomic_file import replace_file
from checkpoints import BadCheckpoint, load
from copy_task import ANSWER_TOKENS, build_prompt, compute_reward, draw_digits
from sampler import Sampler


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint, and return the exit status.

    Raises:
        SystemExit: The arguments are wrong. The exit status is 2, and stderr gives the reason.
    """
    parser = argparse.ArgumentParser(description="Mean reward of a checkpoint, on a CPU.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="Checkpoint, or output folder of a training")
    add("--prompts", type=int, default=64, help="Number of prompts")
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="Temperature of the sampling. 0: always take the most likely token",
    )
    add("--seed", type=int, default=0, help="Seed of the prompts")
    options = parser.parse_args(argv)
    try:
        state = load(options.checkpoint).state
    except BadCheckpoint as error:
        parser.error(f"--checkpoint: {error}")

    digits_rng = random.Random(options.seed)
    rng = np.random.default_rng(options.seed)
    sampler = Sampler(state.policy, step=state.step, rng=rng)
    rewards = []
    for _ in range(options.prompts):
        digits = draw_digits(digits_rng)
        [answer] = sampler.sample(
            build_prompt(digits),
            count=1,
            max_tokens=ANSWER_TOKENS,
            temperature=options.temperature,
        )
        rewards.append(compute_reward(digits, answer.tokens))

    result = {
        "reward": sum(rewards) / len(rewards),
        "step": state.step,
        "checkpoint": str(options.checkpoint),
    }
    text = json.dumps(result)
    print(text, flush=True)
    if path := os.environ.get("MUSTER_RESULT"):
        replace_file(Path(path), text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
