"""Describe the checkpoint from which an attempt starts, and why it was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tasks.record.run_json import AttemptRecord, ResumeRecord, RunJson

#: Largest number of refused checkpoints that are named in the text for the user.
_REFUSED_SHOWN = 5


def describe_resume(resume: ResumeRecord | None, attempt: int) -> Iterator[str]:
    """Yield sentences about the checkpoint from which an attempt starts.

    The sentences name the chosen checkpoint and the refused checkpoints, and add remarks. A first
    attempt without chosen or refused checkpoints has no sentences.

    Args:
        resume: Record of the chosen checkpoint, or None if the attempt has no such record.
        attempt: Number of the attempt, from 1.
    """
    if resume is None or (attempt == 1 and not resume.refused and resume.passed is None):
        return
    if resume.passed is not None:
        yield f"starts from {resume.passed}: {resume.rule}"
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


def describe_attempt(attempt: AttemptRecord) -> Iterator[str]:
    """Yield the sentences about the checkpoint of an attempt, and the warnings of the attempt."""
    yield from describe_resume(attempt.resume, attempt.number)
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
