"""Check whether the first step of an attempt contradicts the checkpoint that Muster chose.

Muster compares the first step of the attempt with the step of the checkpoint. If one of the two
steps is unknown, Muster says that the check is impossible. A first step that does not contradict
the checkpoint does not prove that the trainer has loaded the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tasks.record.checkpoint_names import read_step
from tasks.record.run_json import AttemptRecord, ResumeCheck, ResumeRecord
from tasks.spec.formatting import join_words
from tasks.spec.run import RunSpec


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
        The warning, or an empty string in these cases:

        - The first step is not smaller than the step of the checkpoint, and no refused checkpoint
          explains the first step better.
        - `next_step` is the step of the checkpoint.
        - The step of the checkpoint is unknown.
        - Muster chose no checkpoint, and no refused checkpoint explains the first step.
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


def is_consistent(attempt: AttemptRecord) -> bool:
    """Return True if the first step of an attempt does not contradict its checkpoint.

    The checkpoint is the one that Muster chose for the attempt. The result True does not prove that
    the trainer has loaded the checkpoint. Example: a trainer ignores the checkpoint of step 10,
    starts from the beginning, and reports only every tenth step. The first reported step is then
    10, which does not contradict the checkpoint.

    Returns:
        False if `compare_first_step` returned a warning, or if the steps cannot be compared. Also
        False for a record of an earlier version, which does not say whether there was a warning.
    """
    resume = attempt.resume
    return (
        resume is not None
        and resume.step is not None
        and attempt.step is not None
        and resume.check is ResumeCheck.POSSIBLE
    )


def explain_unchecked(spec: RunSpec, resume: ResumeRecord) -> str:
    """Return why Muster will not be able to check whether a trainer loads its checkpoint.

    Call this function before the attempt starts.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        resume: Record of the checkpoint that Muster chose for the attempt.

    Returns:
        A sentence without a full stop. An empty string if Muster passes no checkpoint, or if
        Muster can compare the first step of the attempt with the step of the checkpoint.
    """
    if resume.passed is None:
        return ""
    if spec.progress is None:
        reason = "the spec has no key `progress`, so the run reports no step"
    elif spec.progress.http is not None:
        reason = "an HTTP server reports the steps, and may report them late"
    elif resume.step is None:
        reason = "the step of the checkpoint is unknown"
    else:
        return ""
    return _describe_unchecked(list_receivers(spec, "${attempt.resume_from}"), reason)


def explain_unreported(attempt: AttemptRecord, spec: RunSpec | None = None) -> str:
    """Return why Muster cannot check yet whether a trainer has loaded its checkpoint.

    Args:
        attempt: The attempt. It is running or has ended.
        spec: The spec of the attempt, in which placeholders are replaced. None if unknown.

    Returns:
        A sentence without a full stop. An empty string if the attempt has reported a step, if
        Muster passed no checkpoint, or if the notes of the attempt already contain a reason.
    """
    resume = attempt.resume
    if resume is None or resume.passed is None or attempt.step is not None:
        return ""
    if resume.check is ResumeCheck.IMPOSSIBLE:
        return ""
    has_ended = attempt.ended_at is not None
    reason = "the attempt reported no step" if has_ended else "the attempt has reported no step yet"
    receivers = list_receivers(spec, resume.passed) if spec is not None else []
    return _describe_unchecked(receivers, reason)


def _describe_unchecked(receivers: Sequence[str], reason: str) -> str:
    """Return a sentence which says that Muster cannot check the loaded checkpoint.

    Args:
        receivers: Names of the variables and options with the path of the checkpoint.
        reason: A clause with the reason.
    """
    verb = "names" if len(receivers) == 1 else "name"
    source = f" that {join_words(receivers)} {verb}" if receivers else ""
    return f"Muster cannot check whether the trainer loads the checkpoint{source}, because {reason}"


def list_receivers(spec: RunSpec, path: str) -> list[str]:
    """Return the names of the variables and options with which a spec passes a path to a program.

    Args:
        spec: The run spec.
        path: The path, or the placeholder of the path.

    Returns:
        Names such as `RESUME_FROM` and `--resume`, in the order of the spec. An argument of a
        command without an option has no name, and is left out.
    """
    names = list(_list_variables(spec.env, path))
    for component in spec.processes.values():
        names += _list_variables(component.env, path)
        words = component.command
        for before, word in zip(("", *words), words, strict=False):
            option, equals, value = word.partition("=")
            if word == path and before.startswith("-"):
                names.append(before)
            elif equals and value == path:
                names.append(option)
    return [*dict.fromkeys(names)]


def _list_variables(env: Mapping[str, object], path: str) -> Iterator[str]:
    return (name for name, value in env.items() if value == path)
