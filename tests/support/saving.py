"""A component that saves for a while once it is told to end, and what it wrote of that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support.ground import until

#: Writes a line to the file for each thing that happens.
_PROGRAM = """
import signal, sys, time

file, parts = open(sys.argv[1], "a", buffering=1), int(sys.argv[2])

def save(*_):
    for part in range(parts):
        time.sleep(1)
        print("part", part + 1, file=file)
    print("saved", file=file)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("training", file=file)
print("training", flush=True)
while True:
    time.sleep(0.5)
"""


def saving_spec(
    file: Path, *, save_s: int = 5, grace_s: float = 10.0, **more: Any
) -> dict[str, Any]:
    """The spec of a run whose one component saves when it is told to end.

    Args:
        file: written by the component; see `has_saved`.
        save_s: how long the save takes, in whole seconds.
        more: further keys of the spec.
    """
    trainer = {
        "command": [sys.executable, "-I", "-S", "-c", _PROGRAM, str(file), str(save_s)],
        "ready": {"log": "training"},
        "stop": {"grace_s": grace_s},
    }
    return {"name": "saver", "workload": "sft", "components": {"trainer": trainer}, **more}


def is_training(file: Path) -> bool:
    """Return True if the component that writes the file runs and can be told to end."""
    return file.exists() and "training" in file.read_text()


def until_training(*files: Path, within_s: float = 300.0) -> None:
    """Wait until the component of each file trains."""
    until(lambda: all(map(is_training, files)), f"{len(files)} components train", within_s)


def has_saved(file: Path) -> bool:
    """Return True if the component's save came to its end, by what the component wrote."""
    return file.read_text().splitlines()[-1:] == ["saved"]
