"""Pins: records of the checkpoints from which another run was started.

The key `keep` of a run spec never removes a pinned checkpoint. A pin is a small file in
`$MUSTER_HOME/claims/pinned`, in the home of the run that wrote the checkpoint. Pins are permanent:
the run that was started from the checkpoint may need it again for a retry.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tasks.record.checkpoint_paths import CheckpointPath, identify_path, path_exists
from tasks.record.disk import json_text, replace_file
from tasks.record.places import muster_home, read_own_file

#: Number of seconds to wait until a hidden checkpoint is visible again. A run with the spec key
#: `keep` hides an old checkpoint for a moment, and then either deletes the checkpoint or shows it
#: again.
_RESTORED_WITHIN_S = 2.0
_CHECK_EVERY_S = 0.05


def pin_checkpoint(path: CheckpointPath, parts: Sequence[CheckpointPath], home: Path) -> None:
    """Record that a run is started from a checkpoint, to protect the checkpoint from deletion.

    The spec key `keep` limits the number of checkpoints, but never deletes a pinned checkpoint.

    Args:
        path: Absolute path or URL of the checkpoint.
        parts: Files and folders of the checkpoint. There are several if each rank writes its own
            file.
        home: Muster's home directory of the run that wrote the checkpoint.

    Raises:
        FileNotFoundError: The checkpoint was deleted in the meantime.
        OSError: The file of the pin cannot be written.
    """
    pin = _pin_folder(home) / f"{hashlib.sha256(os.fsencode(str(path))).hexdigest()[:32]}.json"
    for parent in (pin.parent.parent, pin.parent):
        parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    paths = sorted({identify_path(part) for part in (path, *parts)})
    replace_file(pin, json_text({"paths": paths, "since": time.time()}), durable=True)

    # Another run may be deleting the checkpoint at this moment. That run first renames the
    # checkpoint, and then looks for the file `pin`. If the file exists, that run restores the old
    # name of the checkpoint. So wait until the checkpoint has its old name.
    deadline = time.monotonic() + _RESTORED_WITHIN_S
    while not all(path_exists(part) for part in (path, *parts)):
        if time.monotonic() > deadline:
            pin.unlink(missing_ok=True)
            raise FileNotFoundError(errno.ENOENT, "the checkpoint was removed just now", str(path))
        time.sleep(_CHECK_EVERY_S)


def read_pinned_paths() -> frozenset[str]:
    """Return the paths of all files and folders of pinned checkpoints.

    A checkpoint is pinned if another run was started from it. The paths have the form that
    `identify_path` returns.

    Raises:
        OSError: The file of a pin cannot be read, so it is unknown which checkpoints are pinned.
        ValueError: The file of a pin is not valid.
    """
    paths: set[str] = set()
    with suppress(FileNotFoundError):
        for pin in sorted(_pin_folder(muster_home()).iterdir()):
            if pin.suffix == ".json":
                paths.update(json.loads(read_own_file(pin))["paths"])
    return frozenset(paths)


def _pin_folder(home: Path) -> Path:
    return home / "claims" / "pinned"
