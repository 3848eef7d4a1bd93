"""Rules for evaluations: which checkpoints are evaluated, and which checkpoints are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.record.checkpoint_folder import Checkpoint, Completeness
from tasks.record.evaluation_rules import (
    add_checkpoints,
    choose_evaluations,
    find_best_checkpoint,
    list_reasons_to_keep,
)
from tasks.record.evaluations import (
    EvaluationNote,
    EvaluationsJson,
    EvaluationState,
    list_evaluation_rows,
    locate_evaluation_result,
    read_evaluated_checkpoints,
)
from tasks.record.places import RunPlace
from tasks.record.result_file import list_figures
from tasks.spec.evaluations import Evaluation, KeepBest

ACTIVE = (EvaluationState.CHOSEN, EvaluationState.WAITING, EvaluationState.RUNNING)


def checkpoint(step: int, *, path: str = "", signature: str = "s") -> Checkpoint:
    """Return a complete checkpoint of a step.

    Args:
        step: The step.
        path: Path of the checkpoint. If empty, a path that contains the step.
        signature: Text that changes if the files of the checkpoint change.
    """
    place = Path(path or f"/c/step_{step}")
    return Checkpoint(
        path=place,
        parts=(place,),
        step=step,
        changed_at=float(step),
        signature=signature,
        inode_changes_ns=(0, 0),
        completeness=Completeness.COMPLETE,
        reason="",
    )


def record(*steps: int) -> EvaluationsJson:
    """Return a record with a complete checkpoint for each step."""
    return add_checkpoints(EvaluationsJson(), [checkpoint(step) for step in steps], 1)


def evaluations(**keys: Any) -> dict[str, Evaluation]:
    """Return the evaluations of a spec that has only the evaluation `math`, with these keys."""
    return {"math": Evaluation.model_validate({"command": ["true"], **keys})}


def chosen(content: EvaluationsJson, *, is_last: bool = False, **keys: Any) -> dict[int, str]:
    """Return the chosen evaluations: mapping from checkpoint number to evaluation state.

    Args:
        content: Record of the checkpoints and evaluations.
        is_last: True if the training has ended, so that no further checkpoint follows.
        **keys: Keys of the evaluation in the spec.
    """
    notes = choose_evaluations(evaluations(**keys), content, is_last=is_last)
    return {note.checkpoint: note.state.value for note in notes}


def with_state(
    content: EvaluationsJson, number: int, state: EvaluationState, name: str = "math"
) -> EvaluationsJson:
    return content.with_evaluation(EvaluationNote(name=name, checkpoint=number, state=state))


def write_result(place: RunPlace, number: int, result: object, name: str = "math") -> None:
    """Write the result file that the program of an evaluation would write."""
    path = locate_evaluation_result(place, name, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    path.chmod(0o600)


@pytest.fixture
def place(tmp_path: Path) -> RunPlace:
    return RunPlace(directory=tmp_path)


def test_new_checkpoints_are_numbered_in_their_order() -> None:
    content = add_checkpoints(record(10), [checkpoint(10), checkpoint(20)], 1)

    assert [(one.number, one.step) for one in content.checkpoints] == [(1, 10), (2, 20)]


def test_checkpoint_that_changes_during_its_attempt_is_not_new() -> None:
    content = add_checkpoints(record(10), [checkpoint(10, signature="changed")], 1)

    again = add_checkpoints(content, [checkpoint(10, signature="changed")], 2)

    assert [one.number for one in again.checkpoints] == [1]


def test_checkpoint_that_a_later_attempt_saves_again_is_new() -> None:
    content = add_checkpoints(record(10), [checkpoint(10, signature="later")], 2)

    assert [(one.number, one.attempt) for one in content.checkpoints] == [(1, 1), (2, 2)]


def test_other_step_at_the_same_path_is_a_new_checkpoint() -> None:
    content = add_checkpoints(EvaluationsJson(), [checkpoint(10, path="/c/last.pt")], 1)

    content = add_checkpoints(content, [checkpoint(20, path="/c/last.pt")], 1)

    assert [one.step for one in content.checkpoints] == [10, 20]
    assert chosen(content, late="all") == {2: "chosen"}


def test_every_second_checkpoint_is_evaluated() -> None:
    assert chosen(record(10, 20, 30, 40), every=2, late="all") == {2: "chosen", 4: "chosen"}


def test_checkpoint_is_evaluated_once() -> None:
    content = with_state(record(10), 1, EvaluationState.COMPLETED)

    assert chosen(content) == {}


def test_skip_chooses_only_the_newest_checkpoint() -> None:
    assert chosen(record(10, 20, 30)) == {1: "skipped", 2: "skipped", 3: "chosen"}


@pytest.mark.parametrize("state", ACTIVE)
def test_skip_waits_while_an_earlier_checkpoint_is_evaluated(state: EvaluationState) -> None:
    content = with_state(record(10, 20), 1, state)

    assert chosen(content) == {}


def test_skip_chooses_the_last_checkpoint_of_an_ended_training_at_once() -> None:
    content = with_state(record(10, 20, 30), 1, EvaluationState.RUNNING)

    assert chosen(content, is_last=True) == {2: "skipped", 3: "chosen"}


def test_all_chooses_every_checkpoint_at_once() -> None:
    content = with_state(record(10, 20, 30), 1, EvaluationState.RUNNING)

    assert chosen(content, late="all") == {2: "chosen", 3: "chosen"}


def test_evaluations_do_not_wait_for_each_other() -> None:
    content = with_state(record(10, 20), 1, EvaluationState.RUNNING, "code")

    assert chosen(content) == {1: "skipped", 2: "chosen"}


def test_figures_are_the_finite_numbers_of_the_result() -> None:
    result = {"accuracy": 0.5, "by": {"hard": 1}, "name": "x", "ok": True, "rows": [1]}

    assert list_figures(result) == {"accuracy": 0.5, "by.hard": 1}
    assert list_figures(0.7) == {"": 0.7}


@pytest.mark.parametrize(("mode", "best"), [("max", 20), ("min", 30)])
def test_best_checkpoint_has_the_best_figure(place: RunPlace, mode: str, best: int) -> None:
    content = record(10, 20, 30, 40)
    for number, accuracy in enumerate((0.2, 0.9, 0.1, None), start=1):
        content = with_state(content, number, EvaluationState.COMPLETED)
        if accuracy is not None:
            write_result(place, number, {"accuracy": accuracy})
    keep_best = KeepBest.model_validate({"by": "math.accuracy", "mode": mode})

    found = find_best_checkpoint(keep_best, read_evaluated_checkpoints(place, content))

    assert found is not None
    assert found.checkpoint.step == best


def test_overwritten_checkpoint_is_not_the_best_checkpoint(place: RunPlace) -> None:
    content = with_state(record(10, 20), 1, EvaluationState.COMPLETED)
    content = with_state(content, 2, EvaluationState.COMPLETED)
    content = add_checkpoints(content, [checkpoint(20, signature="later")], 2)
    write_result(place, 1, {"accuracy": 0.2})
    write_result(place, 2, {"accuracy": 0.9})

    found = find_best_checkpoint(
        KeepBest(by="math.accuracy"), read_evaluated_checkpoints(place, content)
    )

    assert found is not None
    assert found.checkpoint.step == 10


def test_checkpoints_in_evaluation_and_the_best_one_are_kept(place: RunPlace) -> None:
    content = with_state(record(10, 20, 30, 40), 1, EvaluationState.COMPLETED)
    content = with_state(content, 2, EvaluationState.FAILED)
    content = with_state(content, 3, EvaluationState.RUNNING)
    write_result(place, 1, {"accuracy": 0.2})

    reasons = dict(
        list_reasons_to_keep(
            evaluations(),
            KeepBest(by="math.accuracy"),
            content,
            read_evaluated_checkpoints(place, content),
        )
    )

    assert reasons == {
        "/c/step_10": "this is the best checkpoint by the key `keep_best`: math.accuracy is 0.2",
        "/c/step_30": "the evaluation math of this checkpoint has not ended yet",
        "/c/step_40": "the evaluation math of this checkpoint has not begun yet",
    }


def test_rows_have_the_figures_of_all_evaluations_by_step(place: RunPlace) -> None:
    content = record(10, 20)
    for number, name in ((1, "math"), (1, "code"), (2, "math")):
        content = with_state(content, number, EvaluationState.COMPLETED, name)
        write_result(place, number, {"accuracy": number / 10}, name)
    content.write(place)

    rows = list_evaluation_rows(place)

    assert rows == [
        {"step": 10, "attempt": 1, "math.accuracy": 0.1, "code.accuracy": 0.1},
        {"step": 20, "attempt": 1, "math.accuracy": 0.2},
    ]


def test_invalid_result_has_no_figures(place: RunPlace) -> None:
    content = with_state(record(10), 1, EvaluationState.COMPLETED)
    path = locate_evaluation_result(place, "math", 1)
    path.parent.mkdir()
    path.write_text("{")
    path.chmod(0o600)

    [evaluated] = read_evaluated_checkpoints(place, content)

    assert evaluated.figures == {}


def test_missing_record_has_no_evaluations(place: RunPlace) -> None:
    assert EvaluationsJson.read(place) == EvaluationsJson()


def test_record_that_is_not_valid_raises_an_error(place: RunPlace) -> None:
    place.evaluations.write_text('{"checkpoints": 1}')
    place.evaluations.chmod(0o600)

    with pytest.raises(ValueError):
        EvaluationsJson.read(place)
