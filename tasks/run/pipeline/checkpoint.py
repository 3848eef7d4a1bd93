"""What a completed stage of a pipeline hands on to the next one."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tasks.run.checkpoints import latest_checkpoint, resume_point
from tasks.run.errors import Fault
from tasks.run.layout import RunPlace, project_root
from tasks.run.spec.placeholders import substituted
from tasks.run.spec.run import RunSpec

#: What a path or pattern of a checkpoint may use.
_KNOWN = ("run.id", "run.dir", "attempt.number", "attempt.dir")
_NAMES = re.compile(r"\$\{([^{}]*)\}")


def handed_on(checkpoint: str | None, spec: RunSpec, place: RunPlace) -> Path | None:
    """The last complete checkpoint of a run, absolute; None where there is none.

    Args:
        checkpoint: The path or pattern that the stage has; None: what the run would be resumed
            from.
        spec: With which the run was started.
        place: Of the run.
    """
    attempts = _attempts(place)
    if checkpoint is None:
        return resume_point(spec, place, attempts)
    names = {
        "run.id": place.run_id,
        "run.dir": str(place.directory),
        "attempt.number": str(attempts),
        "attempt.dir": str(place.attempt(attempts).directory),
    }
    return latest_checkpoint(substituted(checkpoint, names.__getitem__), project_root() / spec.cwd)


def unknown_names(checkpoint: object, path: str) -> tuple[Fault, ...]:
    """One fault for each placeholder of a path or pattern that has no value.

    Args:
        checkpoint: As written.
        path: Of it, in the pipeline spec.
    """
    if not isinstance(checkpoint, str):
        return ()
    return tuple(
        Fault(path=path, problem=f"unknown name `${{{name}}}`", remedy=f"known are {_known()}")
        for name in dict.fromkeys(_NAMES.findall(checkpoint.replace("$${", "")))
        if name not in _KNOWN
    )


def _known() -> str:
    return ", ".join(f"${{{name}}}" for name in _KNOWN)


def _attempts(place: RunPlace) -> int:
    """How many the run has had; 0 where its record can't be read here."""
    try:
        return len(json.loads(place.record.read_text(encoding="utf-8"))["attempts"])
    except (OSError, ValueError, KeyError):
        return 0
