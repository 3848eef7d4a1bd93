"""Work that threads do during an attempt, while its components run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from tasks.processes.host_limits import describe_shortage
from tasks.processes.identity import host_name
from tasks.record import code_store
from tasks.record.checkpoints import (
    find_superfluous_checkpoints,
    list_output_folders,
    remove_checkpoint,
)
from tasks.record.places import RunPlace, muster_home
from tasks.record.run_json import RunRecord
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import is_project_root
from tasks.spec.run import RunSpec
from tasks.spec.secrets import find_code_secrets, mask_text
from tasks.train.interpreters import find_training_python
from tasks.train.run_secrets import RunSecrets

_log = logging.getLogger(__name__)

#: Longest wait in seconds for the threads at the end of an attempt. A slower thread is abandoned,
#: so the work of the thread may stay unfinished. For example, the code of the attempt may not be
#: recorded, or old checkpoints may not be deleted until the next attempt.
_END_TIMEOUT_S = 2.0
#: Seconds between two searches for checkpoints that are no longer needed.
_CHECKPOINTS_EVERY_S = 30.0


class BackgroundWork:
    """The threads that work in the background of one attempt or run."""

    def __init__(self) -> None:
        #: Set when the attempt or run has ended.
        self.is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function with these arguments in a new thread.

        If no thread can be started, the function is not called, and the run continues.
        """
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            name = getattr(function, "__name__", "work")
            _log.warning("%s is omitted: %s (%s)", name, error, describe_shortage(error))
            return
        self._threads.append(thread)

    def end(self, timeout_s: float = _END_TIMEOUT_S) -> None:
        """Ask the threads to end, and wait for them.

        Args:
            timeout_s: Longest wait in seconds. A thread that is still running after this time is
                abandoned.
        """
        self.is_over.set()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def record_provenance(
    record: RunRecord,
    code: code_store.Code | None,
    spec: RunSpec,
    root: Path,
    secrets: RunSecrets,
) -> None:
    """Write the code, the software versions and the host of an attempt into the run's record.

    If the run has no submitted code, a copy of the folder `root` is stored, and the record names
    the copy. But a folder that contains the user's home folder or MUSTER_HOME is copied only
    if the folder is the root of a project.

    Args:
        record: The record of the run.
        code: The submitted code of the run, or None if the run uses the files in `root` directly.
        spec: The resolved spec of the attempt.
        root: Root folder of the run's files.
        secrets: The secrets that are masked in the record.
    """
    python = find_training_python(spec)
    try:
        homes = (Path.home(), muster_home())
        has_home = any(home.is_relative_to(root.absolute()) for home in homes)
        if code is None and (is_project_root(root) or not has_home):
            code = _store_used_files(root, list_output_folders(spec, root))
        provenance = code_store.describe_versions(code, root, python)
        diff = secrets.mask(str(provenance.get("diff") or ""))
        provenance["diff"] = mask_text(diff, find_code_secrets(diff))
        record.describe({**provenance, "host": host_name()})
    except (OSError, ValueError) as error:
        _log.warning("could not record the code of run %s: %r", record.content.run_id, error)


def _store_used_files(root: Path, outputs: Collection[str]) -> code_store.Code | None:
    """Store a copy of the project's present files, so that two runs can be compared later.

    Args:
        root: Root folder of the project.
        outputs: See `code_store.store_project`.

    Returns:
        The stored code. None if the files cannot be stored, for example because they are too large.
    """
    try:
        return code_store.read_code(code_store.store_project(root, outputs))
    except (InvalidSpec, code_store.NoCode) as error:
        _log.info(
            "the files of the project %s were not copied, so `muster show --diff` cannot "
            "compare them: %s",
            root,
            error,
        )
        return None


def remove_superfluous_checkpoints(
    spec: RunSpec, place: RunPlace, record: RunRecord, is_over: threading.Event
) -> None:
    """Delete old checkpoints again and again until an attempt has ended.

    The run spec says how many checkpoints are kept.

    Args:
        spec: The spec of the run.
        place: Paths of the run's files.
        record: The record of the run, which contains the start of each attempt.
        is_over: Event that is set when the attempt has ended. Old checkpoints are then deleted one
            last time.
    """
    is_last_check = False
    while not is_last_check:
        is_last_check = is_over.wait(_CHECKPOINTS_EVERY_S)
        try:
            content = record.content
            checkpoints = find_superfluous_checkpoints(
                spec, place, content.attempts, content.foreign_checkpoints
            )
            for checkpoint in checkpoints:
                remove_checkpoint(checkpoint)
        except (OSError, ValueError) as error:
            _log.warning("could not delete old checkpoints of run %s: %s", place.run_id, error)
