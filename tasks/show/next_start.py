"""Find and describe the checkpoint from which the next attempt of a run would start.

The next attempt itself will choose its checkpoint with the function `plan_resume`. This module
calls the same function earlier, so that messages can name the checkpoint.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from tasks.record.checkpoints import ResumePlan, plan_resume
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import load_resolved
from tasks.spec.run import RunSpec

_log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStart:
    """The start of a run's next attempt, as far as Muster knows it."""

    #: The checkpoint that the next attempt would choose. `plan.path` is None if the run has no
    #: checkpoint. `plan` is None if Muster cannot read the spec or the checkpoints.
    plan: ResumePlan | None = None
    #: True if `plan` was made from the spec of the run. False if the spec of the run cannot be
    #: read. In that case, `plan` was made from the spec of an attempt, or is None. The spec of an
    #: attempt does not show whether Muster will pass the checkpoint to the trainer, because its
    #: placeholders are replaced.
    has_run_spec: bool = False
    #: Reason why the checkpoints cannot be read, or an empty string.
    problem: str = ""


def find_next_start(
    record: RunJson, place: RunPlace, attempt_spec: RunSpec | None = None
) -> NextStart:
    """Choose the checkpoint from which a run's next attempt would start now.

    The search takes at most five seconds, because the checkpoints may be on a network file system
    that does not answer.

    Args:
        record: Content of the run's `run.json`.
        place: Paths of the run's files.
        attempt_spec: The spec of an attempt, in which placeholders are replaced. Used if the spec
            of the run cannot be read: earlier versions of Muster stored only the specs of the
            attempts. None if unknown.
    """
    run_spec = read_unresolved_spec(place)
    has_run_spec = run_spec is not None
    spec = run_spec or attempt_spec
    if spec is None:
        return NextStart()
    plans: list[ResumePlan] = []
    problems: list[str] = []

    def search() -> None:
        try:
            plans.append(plan_resume(spec, place, record.attempts, record.foreign_checkpoints))
        except OSError as error:
            problems.append(str(error))
        except Exception as error:
            # An error that ends this thread would look like a file system that does not answer.
            problems.append(f"{type(error).__name__}: {error}")
            _log.debug("Muster could not choose the checkpoint of the next attempt", exc_info=True)

    thread = threading.Thread(target=search, name="next-start", daemon=True)
    thread.start()
    thread.join(_SEARCH_WITHIN_S)
    if plans:
        return NextStart(plan=plans[0], has_run_spec=has_run_spec)
    slow = f"their file system has not answered for {_SEARCH_WITHIN_S:g} s"
    return NextStart(has_run_spec=has_run_spec, problem=problems[0] if problems else slow)


class NextStartFinder:
    """Finds the start of a run's next attempt, and reads the checkpoints at most once.

    Several texts about a run name the same checkpoint, and share a finder. If the file system of
    the checkpoints does not answer, only the first call of `find` waits.
    """

    def __init__(
        self, record: RunJson, place: RunPlace, attempt_spec: RunSpec | None = None
    ) -> None:
        """
        Args:
            record: Content of the run's `run.json`.
            place: Paths of the run's files.
            attempt_spec: See `find_next_start`.
        """
        self._record = record
        self._place = place
        self._attempt_spec = attempt_spec
        self._next_start: NextStart | None = None

    def find(self) -> NextStart:
        """Return the start of the next attempt. Only the first call reads the checkpoints."""
        if self._next_start is None:
            self._next_start = find_next_start(self._record, self._place, self._attempt_spec)
        return self._next_start


def describe_retry(subject: str, next_start: NextStart) -> str:
    """Return a phrase about the start of the next attempt, without a full stop.

    Example: `muster retry RUN continues from step 130 (step_000130)`.

    Args:
        subject: Subject of the phrase, such as `The next attempt`.
        next_start: The start of the next attempt.
    """
    plan = next_start.plan
    inner_subject = f"{subject[:1].lower()}{subject[1:]}"
    if not next_start.has_run_spec:
        return (
            f"If the spec has the key `checkpoints`, {inner_subject} resumes from the last "
            "complete checkpoint"
        )
    if plan is None:
        return (
            f"Muster could not read the checkpoints ({next_start.problem}), so the checkpoint for "
            f"{inner_subject} is unknown"
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
    next_start = NextStart()
    with suppress(OSError, ValueError):
        next_start = find_next_start(RunJson.read(place.record), place)
    return describe_retry(subject, next_start)
