"""Tests of the comparison of a checkpoint with the first step that a trainer reports."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.record.resume_check import compare_first_step, explain_unchecked, list_receivers
from tasks.record.run_json import ResumeRecord
from tasks.spec.run import RunSpec


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
        # The trainer logs every 500 steps, so the first step says nothing about the checkpoint.
        (resume("/c/step_20"), 500, 500, ""),
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


RESUME_FROM = "${attempt.resume_from}"
JSONL = {"jsonl": "m.jsonl", "step": "step"}


def spec_of(*command: str, env: dict[str, str] | None = None, **fields: Any) -> RunSpec:
    trainer = {"command": ["python", "train.py", *command], "env": env or {}}
    return RunSpec(name="r", workload="sft", components={"trainer": trainer}, **fields)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (spec_of("--resume", RESUME_FROM), ["--resume"]),
        (spec_of(f"--resume={RESUME_FROM}", env={"CKPT": RESUME_FROM}), ["CKPT", "--resume"]),
        (spec_of(f"model.resume={RESUME_FROM}"), ["model.resume"]),
        # An argument without an option has no name.
        (spec_of(RESUME_FROM), []),
        (spec_of("--out", "/c"), []),
    ],
)
def test_variables_and_options_with_the_checkpoint_are_found(
    spec: RunSpec, names: list[str]
) -> None:
    assert list_receivers(spec, RESUME_FROM) == names


@pytest.mark.parametrize(
    ("progress", "step", "reason"),
    [
        (None, 20, "the spec has no key `progress`, so the run reports no step"),
        ({"http": "http://h", "step": "step"}, 20, "an HTTP server reports the steps"),
        (JSONL, None, "the step of the checkpoint is unknown"),
        (JSONL, 20, ""),
    ],
)
def test_checkpoint_that_cannot_be_compared_with_the_first_step_is_explained(
    progress: dict[str, str] | None, step: int | None, reason: str
) -> None:
    spec = spec_of("--resume", RESUME_FROM, progress=progress)

    text = explain_unchecked(spec, ResumeRecord(**{"from": "/c/x"}, step=step))

    sentence = "Muster cannot check whether the trainer loads the checkpoint that --resume names"
    assert text.startswith(f"{sentence}, because {reason}" if reason else "")
    assert bool(text) == bool(reason)


def test_start_without_a_checkpoint_needs_no_check() -> None:
    assert explain_unchecked(spec_of(), ResumeRecord()) == ""
