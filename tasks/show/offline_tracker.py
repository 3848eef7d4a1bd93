"""Find the folders that Weights & Biases (W&B) wrote for a run in offline mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote

from tasks.spec.run import RunSpec
from tasks.spec.values import select_literals

#: Largest number of W&B folders in which Muster looks for data of a run. Older folders are ignored.
_MAX_FOLDERS = 200
#: Number of bytes at the beginning of a W&B file that contain the group and the name of the run.
_HEAD_BYTES = 65_536
#: Environment variable with the folder in which W&B creates its folder `wandb`.
_DIRECTORY = "WANDB_DIR"


def make_sync_command(run_id: str, spec: RunSpec) -> str:
    """Return the command that uploads the offline W&B data of a run.

    Folders that are already uploaded are omitted. If no folder is left, the result is an empty
    string.

    Args:
        run_id: Id of the run, which is also the W&B group or a part of the W&B name.
        spec: The spec of an attempt, in which placeholders are replaced.
    """
    folders = sorted({folder for parent in _list_parents(spec) for folder in _find(parent, run_id)})
    return " ".join(["wandb sync", *(quote(str(folder)) for folder in folders)]) if folders else ""


def _list_parents(spec: RunSpec) -> Iterator[Path]:
    """Yield the folders in which W&B creates its folder `wandb` for the components of a run."""
    for component in spec.processes.values():
        if component.launcher != "process":
            continue
        variables = {**os.environ, **select_literals(spec.env), **select_literals(component.env)}
        cwd = Path(component.cwd or spec.cwd)
        yield cwd / variables.get(_DIRECTORY, "")


def _find(parent: Path, run_id: str) -> Iterator[Path]:
    """Yield the W&B folders of a run that are not uploaded yet.

    A W&B folder that cannot be read is skipped.

    Args:
        parent: Folder that contains the folder `wandb`.
        run_id: Id of the run.
    """
    # Start with the newest folder. The names contain the time at which W&B created the folders.
    folders = sorted(parent.glob("wandb/offline-run-*"), reverse=True)[:_MAX_FOLDERS]
    for folder in folders:
        for file in folder.glob("run-*.wandb"):
            is_uploaded = file.with_name(f"{file.name}.synced").exists()
            if not is_uploaded and run_id.encode() in _read_head(file):
                yield folder


def _read_head(file: Path) -> bytes:
    with suppress(OSError), file.open("rb") as content:
        return content.read(_HEAD_BYTES)
    return b""
