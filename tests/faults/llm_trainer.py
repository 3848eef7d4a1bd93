"""Trainer of the vLLM quickstart that can send truncated weights to one engine.

In each step, the trainer adds noise to the weights. So two weight versions differ even after the
model has learned its task. If the folder `--out` has a file `break-weights`, the file names an
engine. In the next weight update, that engine receives a checkpoint that is cut in half.

`tests.faults.llm` runs this program with the arguments of `train.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deployments" / "quickstart-llm"))

import torch
import train
from rollout_client import RolloutClient, Synced
from torch_grpo import Batch, StepStats, train_step
from transformers import LlamaForCausalLM

#: Name of a file that contains an engine's number. This engine receives a truncated checkpoint.
ORDER = "break-weights"
#: Standard deviation of the noise that is added to each weight in a step. The noise is too small to
#: undo the training, but changes the log-probabilities by more than the test's tolerance.
NOISE_STD = 3e-4


def train_step_with_noise(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch
) -> StepStats:
    """Train the model with one batch, and then add noise to its weights."""
    stats = train_step(model, optimizer, batch)
    with torch.no_grad():
        for weights in model.parameters():
            weights += NOISE_STD * torch.randn_like(weights)
    return stats


class BreakingClient(RolloutClient):
    """Client of the rollout fleet that can truncate the checkpoint of one engine."""

    def sync(self, folder: str, **options: Any) -> Synced:
        """Send the weights of a folder to all engines.

        If the file `break-weights` exists, each engine receives its own copy of the folder. The
        file contains the number of an engine, and the checkpoint in that engine's copy is
        truncated.
        """
        order = Path(folder).parent.parent / ORDER
        if order.exists():
            broken_engine = order.read_text().strip()
            for engine in self.engines():
                copy = Path(f"{folder}-{engine['engine']}")
                shutil.copytree(folder, copy, dirs_exist_ok=True)
                if str(engine["engine"]) == broken_engine:
                    weights = copy / "model.safetensors"
                    os.truncate(weights, weights.stat().st_size // 2)
            order.unlink()
            folder += "-${engine.index}"
        return super().sync(folder, **options)


if __name__ == "__main__":
    train.RolloutClient = BreakingClient
    train.train_step = train_step_with_noise
    train.leave_with(train.main)
