"""What a completed stage of a pipeline hands on to the next one."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.record.checkpoints import latest_checkpoint, resume_point
from tasks.record.places import RunPlace
from tasks.spec.loading import project_root
from tasks.spec.placeholders import substituted
from tasks.spec.run import RunSpec


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


def _attempts(place: RunPlace) -> int:
    """How many the run has had; 0 where its record can't be read here."""
    try:
        return len(json.loads(place.record.read_text(encoding="utf-8"))["attempts"])
    except (OSError, ValueError, KeyError):
        return 0
