"""Describe the checkpoint from which an attempt starts, and why it was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tasks.record.resume_check import explain_unreported, is_consistent
from tasks.record.run_json import AttemptRecord, ResumeRecord, RunJson
from tasks.spec.run import RunSpec

#: Largest number of refused checkpoints that are named in the text for the user.
_REFUSED_SHOWN = 5


def describe_resume(
    resume: ResumeRecord | None, attempt: int, *, is_consistent: bool = False
) -> Iterator[str]:
    """Yield sentences about the checkpoint from which an attempt starts.

    The sentences name the chosen checkpoint and the refused checkpoints, and add remarks. A first
    attempt without chosen or refused checkpoints has no sentences.

    Args:
        resume: Record of the chosen checkpoint, or None if the attempt has no such record.
        attempt: Number of the attempt, from 1.
        is_consistent: True if the first step that the trainer reported does not contradict the
            checkpoint. False if this step contradicts the checkpoint, or if the steps cannot be
            compared.
    """
    if resume is None or (attempt == 1 and not resume.refused and resume.passed is None):
        return
    if resume.passed is not None:
        if is_consistent:
            yield (
                f"Muster passed {resume.passed} to the trainer: {resume.rule}. The first step that "
                "the trainer reported does not contradict a start from this checkpoint"
            )
        else:
            yield f"Muster passes {resume.passed} to the trainer: {resume.rule}"
    elif resume.expected is not None:
        yield (
            "Muster passes no checkpoint to the trainer. The trainer itself probably loads "
            f"{resume.expected} ({resume.rule})"
        )
    elif resume.refused:
        yield f"starts from the beginning, although checkpoints exist: {resume.rule}"
    else:
        yield f"starts from the beginning: {resume.rule}"
    for refused in resume.refused[:_REFUSED_SHOWN]:
        yield f"refused checkpoint {refused.path}: {refused.why}"
    omitted_count = len(resume.refused) - _REFUSED_SHOWN
    if omitted_count > 0:
        yield f"run.json lists {omitted_count} more refused checkpoints"
    yield from resume.notes


def describe_resume_of(attempt: AttemptRecord, spec: RunSpec | None = None) -> Iterator[str]:
    """Yield the sentences about the checkpoint from which a running or ended attempt started.

    Args:
        attempt: The attempt.
        spec: The spec of the attempt, in which placeholders are replaced. None if unknown.
    """
    if attempt.resume is None and attempt.resume_from:
        # An earlier version of Muster recorded only the path of the checkpoint.
        yield f"Muster passed {attempt.resume_from} to the trainer"
    yield from describe_resume(attempt.resume, attempt.number, is_consistent=is_consistent(attempt))
    if unreported := explain_unreported(attempt, spec):
        yield unreported


def describe_attempt(attempt: AttemptRecord) -> Iterator[str]:
    """Yield the sentences about the checkpoint of an attempt, and the warnings of the attempt."""
    yield from describe_resume_of(attempt)
    yield from attempt.warnings


def describe_parent(record: RunJson) -> str:
    """Return a text about the checkpoint of another run from which a run started.

    Returns:
        A text such as `step 20 of RUN, PATH`. RUN is the id of the other run, and PATH is the path
        of the checkpoint. Empty if the run did not start from a checkpoint of another run.
    """
    parent = (record.provenance or {}).get("parent")
    if not isinstance(parent, Mapping):
        return ""
    step = parent.get("step")
    step_text = f"step {step} of " if step is not None else ""
    return f"{step_text}{parent.get('run')}, {parent.get('checkpoint')}"
