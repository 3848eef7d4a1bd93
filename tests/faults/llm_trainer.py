"""The trainer of the quickstart with vLLM, which can be told to give one engine broken weights.

Its weights never rest, so that those of two versions can be told apart once it has learned, too. A
file `break-weights` in its `--out` says which engine's weights are cut in half at the next sync.
Run by `tests.faults.llm`, with the arguments of `train.py`.
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

ORDER = "break-weights"
#: By how much each weight is moved at random in a step, the standard deviation: too little to
#: unlearn, and enough to move log-probabilities by more than the judgement tolerates.
SHAKEN_BY = 3e-4


def shaken_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch
) -> StepStats:
    """A step of training, and one at random."""
    stats = train_step(model, optimizer, batch)
    with torch.no_grad():
        for weights in model.parameters():
            weights += SHAKEN_BY * torch.randn_like(weights)
    return stats


class BreakingClient(RolloutClient):
    """Gives each engine a copy of its own where one of them is to be broken."""

    def sync(self, folder: str, **options: Any) -> Synced:
        order = Path(folder).parent.parent / ORDER
        if order.exists():
            broken = order.read_text().strip()
            for engine in self.engines():
                copy = Path(f"{folder}-{engine['engine']}")
                shutil.copytree(folder, copy, dirs_exist_ok=True)
                if str(engine["engine"]) == broken:
                    weights = copy / "model.safetensors"
                    os.truncate(weights, weights.stat().st_size // 2)
            order.unlink()
            folder += "-${engine.index}"
        return super().sync(folder, **options)


if __name__ == "__main__":
    train.RolloutClient, train.train_step = BreakingClient, shaken_step
    train.leave_with(train.main)
