"""Checkpoints in a folder: a file per step, and a pointer to the last that is complete."""

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

#: Names, in the folder, the file to resume from.
LATEST = "latest"
_PARTS = ("policy", "first_moment", "second_moment")


class BadCheckpoint(Exception):
    """There is nothing at that path to resume from; the message says what was found instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What it takes to go on as if nothing had happened."""

    state: TrainState
    #: The sampling generator's `bit_generator.state`
    rng_state: Mapping[str, Any]


def save(checkpoint: Checkpoint, folder: Path) -> Path:
    """The file that now holds `checkpoint`, e.g. `step-000010.npz`, with `latest` naming it."""
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
    """The checkpoint at `path`: a file, a folder of them, or the folder around that.

    Raises:
        BadCheckpoint: no such file, or not a checkpoint.
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
        raise BadCheckpoint(f"{file}: not a checkpoint: {error}") from error


def _resolve(path: Path) -> Path:
    if not path.is_dir():
        if not path.is_file():
            raise BadCheckpoint(f"{path}: no such file")
        return path
    for folder in (path, path / "checkpoints"):
        try:
            return folder / (folder / LATEST).read_text().strip()
        except OSError:
            continue
    raise BadCheckpoint(f"{path}: neither {LATEST} nor checkpoints/{LATEST} in this folder")
