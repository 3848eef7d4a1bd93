"""Compare the first step of an attempt with the checkpoint that Muster passed to it."""

from __future__ import annotations

from pathlib import Path

from tasks.record.checkpoint_names import read_step
from tasks.record.run_json import ResumeRecord


def compare_first_step(resume: ResumeRecord, first_step: float, next_step: float) -> str:
    """Return a warning if the trainer has probably not loaded the checkpoint that Muster chose.

    Some trainers ignore the path that Muster passes. Such a trainer loads the checkpoint that a
    file such as `latest_checkpointed_iteration.txt` names.

    Args:
        resume: Record of the checkpoint that Muster chose for the attempt.
        first_step: First training step that the trainer reports in the attempt.
        next_step: Training step in the newest line of the metrics. Equal to `first_step` if only
            one line was read so far. The steps can differ, because some trainers first write the
            metrics of earlier attempts again.

    Returns:
        The warning, or an empty string if the first step fits the step of the checkpoint.
    """
    chosen = resume.passed or resume.expected
    refused = {read_step(Path(one.path).name): one.path for one in resume.refused}
    # A trainer first reports the step of the loaded checkpoint, or the next step. So the trainer
    # may have loaded a refused checkpoint whose step is `first_step` or `first_step - 1`.
    other = refused.get(int(first_step) - 1) or refused.get(int(first_step))
    if chosen is None:
        if other is None or first_step <= 1:
            return ""
        return (
            "Muster passed no checkpoint to the trainer, but the trainer's first step is "
            f"{first_step:g}. The trainer probably loaded {other}, which Muster had refused"
        )
    if resume.step is None or next_step == resume.step:
        return ""
    if first_step >= resume.step:
        if other is None or first_step <= resume.step + 1:
            return ""
        return (
            f"the trainer's first step is {first_step:g}, not {resume.step + 1:g}. The trainer "
            f"probably loaded {other}, which Muster had refused"
        )
    verb = "passed" if resume.passed else "expected"
    return (
        f"Muster {verb} the checkpoint {chosen}, but the trainer's first step is {first_step:g}. "
        "Possible causes: the trainer started from another checkpoint, the trainer started from "
        "the beginning, or the trainer counts its steps from zero after each start"
    )
