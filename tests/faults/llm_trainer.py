"""The trainer of the quickstart with vLLM, which can be told to give one engine broken weights.

A file `break-weights` in its `--out` says which engine's weights are cut in half at the next sync.
Run by `tests.faults.llm`, with the arguments of `train.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deployments" / "quickstart-llm"))

import train
from rollout_client import RolloutClient, Synced

ORDER = "break-weights"


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
    train.RolloutClient = BreakingClient
    train.leave_with(train.main)
