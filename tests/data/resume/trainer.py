"""A trainer that logs its steps and writes checkpoints, for the programs in this folder.

Usage: PROGRAM FOLDER RESUME_FROM. `RESUME_FROM` is empty or the path of a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
RESUME_FROM = sys.argv[2]
ATTEMPT = int(os.environ["MUSTER_ATTEMPT"])
#: Training step of the checkpoint from which the trainer resumes, or 0 without a checkpoint.
START = int(RESUME_FROM.rpartition("_")[2]) if RESUME_FROM else 0
#: Length of each pause of the training programs in this folder, in seconds.
PAUSE_S = float(os.environ.get("PAUSE_S", "0.5"))


def log(step: int) -> None:
    with open(os.environ["METRICS"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step}) + "\n")


def save(step: int, name: str = ".metadata") -> None:
    directory = FOLDER / f"step_{step}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text("w")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(100_000)


def train(first: int, end: int) -> None:
    for step in range(first, end):
        log(step)
        time.sleep(0.02)


print(f"starts at {START} from {RESUME_FROM!r}")
