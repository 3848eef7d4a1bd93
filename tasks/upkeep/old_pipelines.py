"""Find and delete old folders of pipelines.

A pipeline stores values in its folder `$MUSTER_HOME/pipelines/<flow run id>` if they are too large
for a run spec. A stage that begins later writes its values again. So after the end of a pipeline,
only runs that read the values need its folder.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from uuid import UUID

from tasks.record.places import muster_home


def list_old_pipelines(
    older_than_s: float, server_text: str, kept_runs: Iterable[Path]
) -> list[Path]:
    """Return the folders of pipelines that may be deleted.

    A folder is kept if the id of the pipeline's flow run appears in `server_text`, or in the spec
    of a run whose files are kept.

    Args:
        older_than_s: Age in seconds. A folder with a younger file is kept.
        server_text: Ids, names and parameters of the open flow runs and deployments on the server.
        kept_runs: Directories of the runs on this host whose files are kept.
    """
    now = time.time()
    folders = [
        path
        for path in (muster_home() / "pipelines").glob("*")
        if _is_pipeline(path) and now - _changed_at(path) > older_than_s
    ]
    if not folders:
        return []
    texts = [server_text]
    for run in kept_runs:
        for spec in run.glob("attempt-*/spec.yaml"):
            with suppress(OSError):
                texts.append(spec.read_text(encoding="utf-8", errors="replace"))
    return sorted(path for path in folders if not any(path.name in text for text in texts))


def delete_pipeline(folder: Path) -> str:
    """Delete the folder of a pipeline.

    Returns:
        An empty string if the folder was deleted. Otherwise, a sentence with the error.
    """
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        # Another process has deleted the folder at the same time.
        return ""
    except OSError as error:
        return f"the folder {folder} of a pipeline could not be deleted: {error}"
    return ""


def _is_pipeline(path: Path) -> bool:
    """Return True if a path is a folder, not a link, and its name is the id of a flow run."""
    try:
        is_id = str(UUID(path.name)) == path.name
    except ValueError:
        return False
    return is_id and path.is_dir() and not path.is_symlink()


def _changed_at(folder: Path) -> float:
    """Return the last change of a folder or of a file in the folder, in UTC epoch seconds.

    If another process has deleted the folder, the result is `math.inf`.
    """
    times: list[float] = []
    for parent, _, names in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            with suppress(OSError):
                times.append(os.lstat(path).st_mtime)
    return max(times, default=math.inf)
