"""A trainer that logs each step to W&B or MLflow.

Usage: tracked.py FOLDER RESUME_FROM. The first attempt raises an error after step 13, and the
second attempt is killed after step 17. A second program of the same component logs another value to
W&B.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from trainer import ATTEMPT, START, die, log, save

STEPS = int(os.environ["STEPS"])
SAVE_EVERY = int(os.environ["SAVE_EVERY"])
SECOND_PROGRAM = """
import wandb
run = wandb.init(project="tracked", mode="offline")
run.log({"accuracy": 1.0}, step=0)
run.finish()
"""


def track_with_wandb() -> Callable[[int], None]:
    import wandb

    subprocess.run([sys.executable, "-c", SECOND_PROGRAM], check=True)
    run = wandb.init(project="tracked", mode="offline")
    return lambda step: run.log({"loss": 1 / step}, step=step)


def track_with_mlflow() -> Callable[[int], None]:
    import mlflow

    mlflow.set_experiment("tracked")
    mlflow.start_run()
    return lambda step: mlflow.log_metric("loss", 1 / step, step=step)


def main() -> None:
    track = track_with_mlflow() if os.environ["TRACKER"] == "mlflow" else track_with_wandb()
    for step in range(START + 1, STEPS + 1):
        track(step)
        log(step)
        if step % SAVE_EVERY == 0:
            save(step)
        if (ATTEMPT, step) == (1, 13):
            raise RuntimeError("the first attempt fails")
        if (ATTEMPT, step) == (2, 17):
            die()


main()
