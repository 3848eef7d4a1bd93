"""Train a tiny Llama on the CPU with TRL, by SFT or GRPO, and resume from a checkpoint.

Usage: tiny_trl.py METHOD FOLDER RESUME_FROM STEPS. The program needs `torch`, `transformers`,
`datasets`, `trl`, and the module that `muster init` writes. The program downloads nothing.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import muster_metrics
from datasets import Dataset
from tiny_llama import make_model, make_tokenizer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SAVE_EVERY = 5


class Pause(TrainerCallback):
    """Makes each step last long enough that a test can kill the program between two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        time.sleep(0.2)


def count_twos(completions: list[str], **columns: Any) -> list[float]:
    """Return the reward of each answer: the share of its words that are `two`, from 0 to 1."""
    return [text.split().count("two") / max(1, len(text.split())) for text in completions]


def make_trainer(method: str, folder: str, steps: int) -> Any:
    shared = {
        "output_dir": folder,
        "max_steps": steps,
        "save_steps": SAVE_EVERY,
        "report_to": [],
        "use_cpu": True,
        "logging_steps": 1,
    }
    if method == "sft":
        return SFTTrainer(
            model=make_model(),
            args=SFTConfig(**shared, per_device_train_batch_size=2, max_length=16),
            train_dataset=Dataset.from_dict({"text": ["one two three four"] * 64}),
            processing_class=make_tokenizer(),
        )
    return GRPOTrainer(
        model=make_model(),
        reward_funcs=count_twos,
        args=GRPOConfig(
            **shared, per_device_train_batch_size=4, num_generations=4, max_completion_length=8
        ),
        train_dataset=Dataset.from_dict({"prompt": ["one two"] * 64}),
        processing_class=make_tokenizer(),
    )


def main() -> None:
    method, folder, resume_from, steps = sys.argv[1:5]
    trainer = make_trainer(method, folder, int(steps))
    trainer.add_callback(muster_metrics.transformers_callback())
    trainer.add_callback(Pause())
    trainer.train(resume_from_checkpoint=resume_from or None)


if __name__ == "__main__":
    main()
