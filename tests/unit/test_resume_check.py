"""Tests of the comparison of a checkpoint with the first step that a trainer reports."""

from __future__ import annotations

import pytest

from tasks.record.resume_check import compare_first_step
from tasks.record.run_json import ResumeRecord


def resume(passed: str | None, *refused: str, expected: str | None = None) -> ResumeRecord:
    chosen = passed or expected
    return ResumeRecord(
        **{"from": passed},
        expected=expected,
        step=float(chosen.rpartition("_")[2]) if chosen else None,
        refused=[{"path": path, "why": "it is cut short"} for path in refused],
    )


@pytest.mark.parametrize(
    ("record", "first", "last", "warning"),
    [
        # the trainer has loaded the checkpoint of step 20 that Muster chose, so there is no warning
        (resume("/c/step_20"), 21, 21, ""),
        (resume("/c/step_20"), 20, 20, ""),  # the trainer first evaluates the checkpoint
        (resume("/c/step_20"), 30, 30, ""),  # the trainer logs every tenth step
        (resume("/c/step_20"), 1, 20, ""),  # the trainer repeats the metrics of steps 1 to 20
        # the trainer begins with step 1, so it has not loaded the checkpoint of step 20
        (resume("/c/step_20"), 1, 3, "from the beginning"),
        # the trainer begins with step 31, so it has loaded a checkpoint that Muster refused
        (resume("/c/step_20", "/c/step_30"), 31, 33, "/c/step_30"),
        (resume("/c/step_20", "/c/step_30"), 21, 23, ""),
        (resume(None), 1, 1, ""),
        (resume(None, "/c/step_30"), 31, 31, "/c/step_30"),
        (resume(None, "/c/step_30"), 1, 5, ""),
        (resume(None, expected="/c/step_20"), 1, 2, "Muster expected the checkpoint /c/step_20"),
    ],
)
def test_first_step_that_does_not_fit_the_checkpoint_is_reported(
    record: ResumeRecord, first: float, last: float, warning: str
) -> None:
    found = compare_first_step(record, first, last)

    assert bool(found) == bool(warning)
    assert warning in found
