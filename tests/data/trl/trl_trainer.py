"""Fine-tune a tiny model with TRL, and resume from the checkpoint in the arguments.

Usage: trl_trainer.py FOLDER RESUME_FROM. The program needs `torch`, `transformers`, `datasets`,
`trl` and `wandb`. The program downloads nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from datasets import Dataset
from tiny_llama import make_model, make_tokenizer
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

FOLDER, RESUME_FROM = sys.argv[1:3]
STEPS = int(os.environ["STEPS"])
SAVE_EVERY = int(os.environ["SAVE_EVERY"])


class LogSteps(TrainerCallback):
    """Writes each step, and sleeps so that a test can kill the program at a random step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with open(os.environ["METRICS"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step}) + "\n")
        time.sleep(0.05)


def main() -> None:
    rows = Dataset.from_dict({"text": ["one two three four"] * 64})
    arguments = SFTConfig(
        output_dir=FOLDER,
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        per_device_train_batch_size=2,
        report_to=["wandb"],
        use_cpu=True,
        max_length=16,
        logging_steps=1,
    )
    trainer = SFTTrainer(
        model=make_model(),
        args=arguments,
        train_dataset=rows,
        processing_class=make_tokenizer(),
        callbacks=[LogSteps()],
    )
    trainer.train(resume_from_checkpoint=RESUME_FROM or None)


if __name__ == "__main__":
    main()
