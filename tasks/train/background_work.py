"""Work that threads do during an attempt, while its components run."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tasks.processes.host_limits import describe_shortage
from tasks.processes.identity import host_name
from tasks.record import code_store
from tasks.record.checkpoints import find_superfluous_checkpoints, remove_checkpoint
from tasks.record.places import RunPlace, muster_home
from tasks.record.run_json import RunRecord
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import is_project_root
from tasks.spec.run import RunSpec
from tasks.spec.secrets import find_code_secrets, mask_text
from tasks.spec.values import select_literals
from tasks.train.interpreters import component_search_path
from tasks.train.run_secrets import RunSecrets

_log = logging.getLogger(__name__)

#: Longest wait in seconds for the end of all threads when the attempt has ended. A slower thread is
#: abandoned. The record then lacks the attempt's code and software versions, or superfluous
#: checkpoints remain until the next attempt.
_END_TIMEOUT_S = 2.0
#: Seconds between two searches for superfluous checkpoints.
_CHECKPOINTS_EVERY_S = 30.0


class BackgroundWork:
    """The threads that work in the background of one attempt or run."""

    def __init__(self) -> None:
        #: Set when the attempt or run has ended.
        self.is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function with these arguments in a new thread.

        If no thread can be started, the function is not called. The run continues without it.
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
        """Request that the threads end, and wait until they have ended.

        Args:
            timeout_s: Longest wait in seconds. A thread that has not ended by then is abandoned.
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

    Args:
        record: The record of the run.
        code: The submitted code of the run. None if the run uses the files of the folder `root`
            directly. This function then stores a copy of the folder, and writes the name of the
            copy into the record. If that folder is no project, and contains the home folder of the
            user or MUSTER_HOME, this function stores no copy.
        spec: The resolved spec of the attempt.
        root: Root folder of the run's files.
        secrets: The secrets that are masked in the record.
    """
    path = select_literals(spec.env).get("PATH") or component_search_path(spec.env)
    python = Path(shutil.which("python", path=path) or sys.executable)
    try:
        homes = (Path.home(), muster_home())
        has_home = any(home.is_relative_to(root.absolute()) for home in homes)
        if code is None and (is_project_root(root) or not has_home):
            code = _store_used_files(root)
        provenance = code_store.describe_versions(code, root, python)
        diff = secrets.mask(str(provenance.get("diff") or ""))
        provenance["diff"] = mask_text(diff, find_code_secrets(diff))
        record.describe({**provenance, "host": host_name()})
    except (OSError, ValueError) as error:
        _log.warning("could not record the code of run %s: %r", record.content.run_id, error)


def _store_used_files(root: Path) -> code_store.Code | None:
    """Store the project's files as they are now, so that two runs can be compared later.

    Args:
        root: Root folder of the project.

    Returns:
        The stored code. None if the files cannot be stored, for example because they are too large.
    """
    try:
        return code_store.read_code(code_store.store_project(root))
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
    """Delete superfluous checkpoints periodically until an attempt has ended.

    Checkpoints are superfluous if there are more than the spec keeps.

    Args:
        spec: The spec of the run.
        place: Paths of the run's files.
        record: The record of the run, which contains the start of each attempt.
        is_over: Event that is set when the attempt has ended. Superfluous checkpoints are then
            deleted a last time.
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
