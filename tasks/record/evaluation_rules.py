"""Decide which checkpoints of a run are evaluated, and which of them must not be removed.

All functions are pure: they depend only on their arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tasks.record.checkpoint_folder import Checkpoint
from tasks.record.evaluations import (
    CheckpointNote,
    EvaluatedCheckpoint,
    EvaluationNote,
    EvaluationsJson,
    EvaluationState,
)
from tasks.spec.evaluations import Evaluation, KeepBest
from tasks.spec.matrix import Best


def add_checkpoints(
    content: EvaluationsJson, checkpoints: Sequence[Checkpoint], attempt: int
) -> EvaluationsJson:
    """Return the record of a run's evaluations with the new complete checkpoints added.

    A checkpoint at a known path counts as new in two cases: its step differs from the recorded
    step, or a later attempt has saved the checkpoint again. Changed files alone do not make a
    checkpoint new, because an evaluation may write files into the folder of a checkpoint.

    Args:
        content: The record before the call.
        checkpoints: The complete checkpoints of the run, oldest first.
        attempt: Number of the current attempt.
    """
    notes = [*content.checkpoints]
    newest_by_path = {note.path: note for note in notes}
    for checkpoint in checkpoints:
        path = str(checkpoint.path)
        known = newest_by_path.get(path)
        note = CheckpointNote(
            number=len(notes) + 1,
            path=path,
            step=checkpoint.step,
            signature=checkpoint.signature,
            attempt=attempt,
        )
        if known is None or known.step != note.step:
            notes.append(note)
        elif known.signature == note.signature:
            continue
        elif known.attempt == attempt:
            changed = known.with_changes(signature=note.signature)
            notes[notes.index(known)] = changed
        else:
            notes.append(note)
    return content.with_changes(checkpoints=tuple(notes))


def choose_evaluations(
    evaluations: Mapping[str, Evaluation], content: EvaluationsJson, *, is_last: bool = False
) -> list[EvaluationNote]:
    """Return new entries for the record that say which checkpoints are evaluated next.

    - An entry with the state CHOSEN means that the evaluation of the checkpoint must start now.
    - An entry with the state SKIPPED means that the checkpoint is never evaluated.

    Args:
        evaluations: Mapping from the name of each evaluation to its part of the run spec.
        content: The record of the run's evaluations.
        is_last: True if the training has ended, so that no newer checkpoint will be saved.
    """
    notes: list[EvaluationNote] = []
    for name, evaluation in evaluations.items():
        due = _list_due(name, evaluation, content)
        begins: Sequence[CheckpointNote] = due
        if evaluation.late == "skip":
            if _is_active(name, content) and not is_last:
                continue
            begins = due[-1:]
        for checkpoint in due:
            note = EvaluationNote(name=name, checkpoint=checkpoint.number)
            if checkpoint not in begins:
                message = "a newer checkpoint is evaluated instead"
                note = note.with_changes(state=EvaluationState.SKIPPED, message=message)
            notes.append(note)
    return notes


def _list_due(name: str, evaluation: Evaluation, content: EvaluationsJson) -> list[CheckpointNote]:
    """Return the checkpoints that an evaluation has neither evaluated nor skipped, oldest first.

    If a newer checkpoint was saved at the same path, the older checkpoint is left out.
    """
    done = {one.checkpoint for one in content.evaluations if one.name == name}
    current = content.current_numbers
    return [
        checkpoint
        for checkpoint in content.checkpoints
        if checkpoint.number % evaluation.every == 0
        if checkpoint.number not in done
        if checkpoint.number in current
    ]


def _is_active(name: str, content: EvaluationsJson) -> bool:
    """Return True if an evaluation has started for at least one checkpoint and has not ended.

    Args:
        name: Name of the evaluation in the run spec.
        content: The record of the run's evaluations.
    """
    return any(one.name == name and one.state.is_active for one in content.evaluations)


def find_best_checkpoint(
    rule: Best, evaluated: Sequence[EvaluatedCheckpoint]
) -> EvaluatedCheckpoint | None:
    """Return the evaluation of the best checkpoint of a run.

    If several checkpoints have the best value, the oldest of them is the best.

    Args:
        rule: Rule that names the number to compare, such as `math.accuracy`. The rule is the key
            `keep_best` of a run spec, or the key `best` of a stage of a pipeline.
        evaluated: The evaluations of the run with the numbers in their results, oldest first.

    Returns:
        The evaluation, or None if no result contains the named number.
    """
    figures = [
        (figure, one)
        for one in evaluated
        if one.is_current and (figure := one.figure(rule.by)) is not None
    ]
    choose = max if rule.mode == "max" else min
    return choose(figures, key=lambda pair: pair[0], default=(0.0, None))[1]


def list_reasons_to_keep(
    evaluations: Mapping[str, Evaluation],
    keep_best: KeepBest | None,
    content: EvaluationsJson,
    evaluated: Sequence[EvaluatedCheckpoint],
) -> Iterator[tuple[str, str]]:
    """Yield the path of each checkpoint that must be kept for evaluations, with the reason.

    Args:
        evaluations: Mapping from the name of each evaluation to its part of the run spec.
        keep_best: The key `keep_best` of the run spec, or None.
        content: Record of the run's evaluations, from the run's file `evaluations.json`.
        evaluated: The evaluations in this record, each with the numbers in the evaluation's result.
    """
    for one in evaluated:
        if one.evaluation.state.is_active and one.is_current:
            yield (
                one.checkpoint.path,
                f"the evaluation {one.evaluation.name} of this checkpoint has not ended yet",
            )
    for name, evaluation in evaluations.items():
        for checkpoint in _list_due(name, evaluation, content)[-1:]:
            yield checkpoint.path, f"the evaluation {name} of this checkpoint has not begun yet"
    best = find_best_checkpoint(keep_best, evaluated) if keep_best is not None else None
    if keep_best is not None and best is not None:
        figure = best.figure(keep_best.by)
        reason = (
            f"this is the best checkpoint by the key `keep_best`: {keep_best.by} is {figure:.6g}"
        )
        yield best.checkpoint.path, reason
