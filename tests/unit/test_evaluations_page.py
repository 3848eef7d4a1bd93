"""The artifact with the evaluations of a run on the run's page in the Prefect UI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.record.evaluations import (
    CheckpointNote,
    EvaluationNote,
    EvaluationsJson,
    EvaluationState,
    locate_evaluation_result,
)
from tasks.record.places import RunPlace
from tasks.show.evaluations import show_evaluations
from tasks.spec.evaluations import KeepBest


@pytest.fixture
def place(tmp_path: Path) -> RunPlace:
    """Return the directory of a run with two completed evaluations and a failed evaluation."""
    place = RunPlace(directory=tmp_path)
    completed = EvaluationState.COMPLETED
    notes = [
        EvaluationNote(name="math", checkpoint=1, state=completed, run_id="math-step-1"),
        EvaluationNote(name="math", checkpoint=2, state=completed),
        EvaluationNote(
            name="code", checkpoint=2, state=EvaluationState.FAILED, message="exit code 3 | <b>"
        ),
    ]
    checkpoints = tuple(
        CheckpointNote(number=number, path=f"/c/{number}", step=10 * number) for number in (1, 2)
    )
    EvaluationsJson(checkpoints=checkpoints, evaluations=tuple(notes)).write(place)
    for number, accuracy in ((1, 0.7), (2, 0.4)):
        path = locate_evaluation_result(place, "math", number)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"accuracy": accuracy, "count": 8}))
        path.chmod(0o600)
    return place


def test_table_has_the_figures_and_failures_of_evaluations(place: RunPlace) -> None:
    shown = show_evaluations(place, None, 0.0)

    assert shown is not None
    failed, second, first = str(shown.data).splitlines()[2:5]
    assert "failed: exit code 3 \\|" in failed and "<b>" not in failed
    assert "step 20" in second and "accuracy 0.4, count 8" in second
    assert "step 10" in first and "`math-step-1`" in first


def test_curve_shows_the_figure_of_keep_best(place: RunPlace) -> None:
    shown = show_evaluations(place, KeepBest(by="math.accuracy"), 0.0)

    assert shown is not None
    assert shown.picture.startswith("<svg")
    assert (
        shown.headline.splitlines()[0] == "math.accuracy by step: the last value is 0.4 at step 20"
    )
    assert "best math.accuracy: 0.7 at step 10" in shown.headline
    assert "**step 10, the best**" in str(shown.data)


def test_run_without_evaluations_has_no_artifact(tmp_path: Path) -> None:
    assert show_evaluations(RunPlace(directory=tmp_path), None, 0.0) is None


def test_damaged_record_is_named(place: RunPlace) -> None:
    place.evaluations.write_text("{")

    shown = show_evaluations(place, None, 0.0)

    assert shown is not None
    assert "cannot be read" in shown.headline
