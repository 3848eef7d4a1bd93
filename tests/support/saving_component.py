"""A component that saves a checkpoint for some seconds after SIGTERM, and checks of its file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support.host_environment import wait_for

#: Code of a component that saves a checkpoint after SIGTERM. The program writes a line to a file
#: when it starts, after each second of the save, and at the end of the save. Its arguments are the
#: path of the file and the duration of the save in seconds.
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
    file: Path, *, save_s: int = 5, grace_s: float = 10.0, **keys: Any
) -> dict[str, Any]:
    """Return the spec of a run with one component, which saves a checkpoint after SIGTERM.

    Args:
        file: File that the component writes; see `has_saved`.
        save_s: Duration of the save in whole seconds.
        grace_s: Grace period of the component, in seconds.
        **keys: Further keys of the spec.
    """
    trainer = {
        "command": [sys.executable, "-I", "-S", "-c", _PROGRAM, str(file), str(save_s)],
        "ready": {"log": "training"},
        "stop": {"grace_s": grace_s},
    }
    return {"name": "saver", "workload": "sft", "components": {"trainer": trainer}, **keys}


def is_training(file: Path) -> bool:
    """Return True if the component that writes the file has installed its SIGTERM handler."""
    return file.exists() and "training" in file.read_text()


def until_training(*files: Path, within_s: float = 300.0) -> None:
    """Wait until all components have begun to train.

    Args:
        files: The file that each component writes.
        within_s: Time limit in seconds.
    """
    wait_for(lambda: all(map(is_training, files)), f"{len(files)} components train", within_s)


def has_saved(file: Path) -> bool:
    """Return True if the last line of the file says that the component completed its save."""
    return file.read_text().splitlines()[-1:] == ["saved"]
