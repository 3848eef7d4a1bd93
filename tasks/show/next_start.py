"""Describe the checkpoint from which a retry of an ended run would start.

The checkpoint is chosen by `plan_resume`, the function that an attempt itself uses at its start.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import PurePosixPath

from tasks.record.checkpoints import ResumePlan, plan_resume
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import load_resolved
from tasks.spec.run import RunSpec

#: Longest time in seconds to search for the checkpoint. The checkpoints may be on a network file
#: system that does not answer.
_SEARCH_WITHIN_S = 5.0


def read_spec_of_run(record: RunJson, place: RunPlace) -> RunSpec | None:
    """Return the spec of a run's last attempt, or None if it cannot be read."""
    if record.attempt is None:
        return None
    with suppress(OSError, ValueError, InvalidSpec):
        return load_resolved(place.attempt(record.attempt.number).spec)
    return None


def read_unresolved_spec(place: RunPlace) -> RunSpec | None:
    """Return the spec of a run, in which placeholders are not replaced, or None if unreadable.

    `muster retry` uses the same file.
    """
    with suppress(OSError, ValueError, InvalidSpec):
        return load_resolved(place.spec)
    return None


def plan_next_start(record: RunJson, place: RunPlace, spec: RunSpec | None) -> ResumePlan | None:
    """Choose the checkpoint from which a run's next attempt would start now.

    Args:
        record: Content of the run's `run.json`.
        place: Paths of the run's files.
        spec: The run spec, in which placeholders are not replaced. None if it is unknown.

    Returns:
        The plan, which may contain no checkpoint. None if the spec is unknown, if the checkpoints
        cannot be read, or if their file system does not answer within five seconds.
    """
    if spec is None:
        return None
    plans: list[ResumePlan] = []

    def search() -> None:
        with suppress(OSError):
            plans.append(plan_resume(spec, place, record.attempts, record.foreign_checkpoints))

    thread = threading.Thread(target=search, name="next-start", daemon=True)
    thread.start()
    thread.join(_SEARCH_WITHIN_S)
    return plans[0] if plans else None


def describe_retry(subject: str, plan: ResumePlan | None) -> str:
    """Return a phrase about the start of the next attempt, without a full stop.

    Example: `muster retry RUN continues from step 130 (step_000130)`.

    Args:
        subject: Subject of the phrase, such as `The next attempt`.
        plan: Result of `plan_next_start`.
    """
    if plan is None:
        return (
            f"If the spec has the key `checkpoints`, {subject[:1].lower()}{subject[1:]} resumes "
            "from the last complete checkpoint"
        )
    if plan.path is None and not plan.has_folder:
        return (
            f"{subject} starts without a checkpoint, because no component of the spec has the key "
            "`checkpoints`"
        )
    if plan.path is None:
        phrase = f"{subject} starts from the beginning, because the run has no complete checkpoint"
        return f"{phrase}. {plan.unrecognised}" if plan.unrecognised else phrase

    name = PurePosixPath(str(plan.path)).name
    start = f"the checkpoint {name}" if plan.step is None else f"step {plan.step} ({name})"
    if plan.is_passed:
        return f"{subject} continues from {start}"
    return (
        f"{subject} passes no checkpoint to the trainer, because the spec does not use "
        f"${{attempt.resume_from}}. The trainer itself probably loads {start}"
    )


def describe_retry_of(place: RunPlace, subject: str) -> str:
    """Return the phrase of `describe_retry` for a run whose record is on this machine.

    If this machine has no record of the run, the phrase says how a checkpoint would be chosen.
    """
    plan = None
    with suppress(OSError, ValueError):
        record = RunJson.read(place.record)
        plan = plan_next_start(record, place, read_unresolved_spec(place))
    return describe_retry(subject, plan)
