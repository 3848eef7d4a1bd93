"""Count the attempts that ended without a newer checkpoint or without net progress.

An attempt makes net progress if it reaches a higher training step than all earlier attempts. The
next attempt must train the steps of an attempt without net progress again. If several attempts end
like this, the run may never finish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median

from tasks.record.checkpoints import plan_resume
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord
from tasks.spec.failure_kinds import REQUEUED, FailureKind
from tasks.spec.formatting import format_duration
from tasks.spec.run import RunSpec

#: Kinds of failure that end an attempt before its components are started.
_NEVER_RAN = REQUEUED - {FailureKind.FLEET_LOST}
#: A single attempt without a saved checkpoint is reported only if it took at least this number of
#: seconds. A shorter attempt loses little work.
_REPORTED_ALONE_S = 600.0
#: Attempts count as equally long if the longest took at most this multiple of the shortest.
_EQUAL_DURATIONS = 1.5


def has_saved_checkpoint(
    spec: RunSpec,
    place: RunPlace,
    attempts: Sequence[AttemptRecord],
    foreign: Mapping[str, str] | None = None,
) -> bool | None:
    """Return True if the last attempt saved a checkpoint from which the next attempt can start.

    The checkpoint must be newer than the checkpoint from which the last attempt started.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        place: Directory of the run.
        attempts: All attempts of the run. The last attempt has ended.
        foreign: Checkpoints of other runs, as returned by `find_foreign_checkpoints`: a mapping
            from the path of a checkpoint to the signature of the checkpoint.

    Returns:
        None if the run spec has no key `checkpoints`, or if the folder cannot be read.
    """
    if not _has_checkpoints(spec):
        return None
    try:
        plan = plan_resume(spec, place, attempts, foreign)
    except OSError:
        return None
    start = attempts[-1].resume
    if plan.path is None or (start is not None and plan.signature == start.signature):
        return False
    if plan.step is None or start is None or start.step is None:
        return True
    return plan.step > start.step


def _has_checkpoints(spec: RunSpec) -> bool:
    return any(component.checkpoints for component in spec.processes.values())


def list_fruitless_attempts(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """Return the last consecutive attempts that failed without a lasting result, oldest first.

    A lasting result is a checkpoint that is newer than the checkpoint from which the attempt
    started. For some attempts, it is unknown whether they saved a checkpoint. Such an attempt had a
    lasting result if it reached a higher training step than all earlier attempts. Attempts that
    failed before their components were started are ignored.
    """
    fruitless: list[AttemptRecord] = []
    for index in reversed(range(len(attempts))):
        attempt = attempts[index]
        if attempt.failure is not None and attempt.failure.kind in _NEVER_RAN:
            continue
        if attempt.failure is None or not _is_fruitless(attempt, attempts[:index]):
            break
        fruitless.append(attempt)
    return fruitless[::-1]


def _is_fruitless(attempt: AttemptRecord, before: Sequence[AttemptRecord]) -> bool:
    if attempt.saved_checkpoint is not None:
        return not attempt.saved_checkpoint
    steps = [one.highest_step for one in before if one.highest_step is not None]
    if not steps:
        return False
    return attempt.highest_step is None or attempt.highest_step <= max(steps)


def describe_fruitless_attempts(
    spec: RunSpec, attempts: Sequence[AttemptRecord], unrecognised: str = ""
) -> str:
    """Return a sentence about the last attempts if they failed without a lasting result.

    A lasting result is a new checkpoint; see `list_fruitless_attempts`.

    Example: `3 attempts of 10 h ended before their first checkpoint; save a checkpoint more often
    than every 100 steps`.

    Args:
        spec: The spec of the run.
        attempts: All attempts of the run. All of them have ended.
        unrecognised: Text about files in the checkpoint folder that may be checkpoints, as returned
            by `describe_unrecognised`. The text replaces the advice to save more often.

    Returns:
        The sentence. An empty string in two cases: the last attempt had a lasting result, or only
        the last attempt had no lasting result and this attempt took less than 10 minutes.
    """
    fruitless = list_fruitless_attempts(attempts)
    durations = [
        attempt.ended_at - attempt.started_at
        for attempt in fruitless
        if attempt.ended_at is not None
    ]
    if not durations or (len(fruitless) == 1 and durations[0] < _REPORTED_ALONE_S):
        return ""
    is_one = len(fruitless) == 1
    noun = "attempt" if is_one else "attempts"
    subject = f"{len(fruitless)} {noun} of {_describe_durations(durations)} ended"
    if any(attempt.saved_checkpoint is None for attempt in fruitless):
        best = max(attempt.highest_step or 0 for attempt in attempts)
        text = f"{subject} without progress: the highest step of the run is still {best:g}"
        if not _has_checkpoints(spec):
            text += ". To resume from a checkpoint, write `checkpoints` into the spec"
        return text
    starts = [_start_step(attempt) for attempt in fruitless]
    made_steps = [
        attempt.highest_step - start
        for attempt, start in zip(fruitless, starts, strict=True)
        if attempt.highest_step is not None and attempt.highest_step > start
    ]
    interval = f"{max(made_steps):g} steps" if made_steps else _format(max(durations))
    advice = f"; save a checkpoint more often than every {interval}"
    if unrecognised:
        advice = f". {unrecognised}"
    if max(starts) > 0:
        return f"{subject} without a checkpoint after step {max(starts):g}{advice}"
    return f"{subject} before {'its' if is_one else 'their'} first checkpoint{advice}"


def _start_step(attempt: AttemptRecord) -> float:
    """Return the training step of the checkpoint from which an attempt started, or 0 if unknown."""
    step = attempt.resume.step if attempt.resume is not None else None
    return step or 0.0


def _describe_durations(durations: Sequence[float]) -> str:
    """Return a text with the duration of several attempts.

    The text contains one duration if all durations are similar, otherwise a range.
    """
    shortest = min(durations)
    longest = max(durations)
    if longest <= shortest * _EQUAL_DURATIONS:
        return _format(median(durations))
    return f"{_format(shortest)} to {_format(longest)}"


def _format(duration: float) -> str:
    """Return a duration as text, such as `3 min 20 s` or `10 h`."""
    return re.sub(r" 0+ (s|min|h)$", "", format_duration(duration))
