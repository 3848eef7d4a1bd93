"""Checkpoints in a folder: one file per step, and the file `latest` with the newest file's name."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from atomic_file import replace_file
from grpo import TrainState
from policy import WEIGHT_NAMES, Policy

#: Name of the file that contains the name of the newest complete checkpoint.
LATEST = "latest"
#: Fields of `TrainState` whose weights are in a checkpoint.
_PARTS = ("policy", "first_moment", "second_moment")


class BadCheckpoint(Exception):
    """No checkpoint can be read from the path. The message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The complete state from which training resumes with identical results."""

    state: TrainState
    #: State of the random generator that samples answers, in the form of `bit_generator.state`.
    rng_state: Mapping[str, Any]


def save(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint to a file like `step-000010.npz`, and the name of this file to `latest`.

    Args:
        checkpoint: The checkpoint.
        folder: Folder of the checkpoints. A missing folder is created.

    Returns:
        The path of the checkpoint file.

    Raises:
        OSError: A file cannot be written.
    """
    arrays = {
        f"{part}.{name}": getattr(getattr(checkpoint.state, part), name)
        for part in _PARTS
        for name in WEIGHT_NAMES
    }
    content = io.BytesIO()
    np.savez(
        content,
        step=np.array(checkpoint.state.step),
        rng=np.array(json.dumps(checkpoint.rng_state)),
        **arrays,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{checkpoint.state.step:06d}.npz"
    replace_file(path, content.getvalue())
    replace_file(folder / LATEST, f"{path.name}\n".encode())
    return path


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: A checkpoint file, a folder of checkpoints, or a folder that contains `checkpoints/`.

    Raises:
        BadCheckpoint: The file does not exist, or it is not a checkpoint.
    """
    file = _resolve(path)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            parts = {
                part: Policy(**{name: arrays[f"{part}.{name}"] for name in WEIGHT_NAMES})
                for part in _PARTS
            }
            state = TrainState(step=int(arrays["step"]), **parts)
            return Checkpoint(state=state, rng_state=json.loads(str(arrays["rng"])))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise BadCheckpoint(f"{file} is not a checkpoint of the quickstart: {error}") from error


def _resolve(path: Path) -> Path:
    """Return the checkpoint file for a path, which may be a folder; see `load`.

    Raises:
        BadCheckpoint: There is no such file.
    """
    if not path.is_dir():
        if not path.is_file():
            raise BadCheckpoint(f"{path}: no such file")
        return path
    for folder in (path, path / "checkpoints"):
        try:
            return folder / (folder / LATEST).read_text().strip()
        except OSError:
            continue
    raise BadCheckpoint(f"{path}: the folder has no file {LATEST} or checkpoints/{LATEST}")
