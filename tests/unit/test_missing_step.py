"""Tests of the explanation why no step of a run is known."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.processes.progress import HttpProgress, JsonlProgress, MissingStep, name_rank
from tasks.spec.draft import read_hook


def explain(path: Path, *, is_over: bool = True, key: str = "global_step") -> str:
    """Return Muster's message that says why a metrics file contains no training step."""
    missing = find_missing_step(path, is_over=is_over, key=key)
    return missing.problem if missing is not None else ""


def find_missing_step(
    path: Path, *, is_over: bool = True, key: str = "global_step"
) -> MissingStep | None:
    """Return the reason why a metrics file contains no training step, and the remedy.

    The file is first deleted and written again, so that Muster reads all its lines.

    Args:
        path: Path of the metrics file.
        is_over: True if the training has ended.
        key: Name of the training step in the lines of the file.
    """
    lines = path.read_text() if path.exists() else None
    path.unlink(missing_ok=True)
    source = JsonlProgress(path, key)
    if lines is not None:
        path.write_text(lines)
    asyncio.run(source.step())
    return asyncio.run(source.explain_missing_step(is_over=is_over))


def write_lines(path: Path, *lines: Any) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("line", "explanation"),
    [
        (
            {"step": 3, "loss": 0.5, "name": "a"},
            "FILE has no number `global_step`, but has step and loss",
        ),
        (
            {"train": {"global_step": 3}, "loss": 0.5},
            "FILE has no number `global_step`, but has train.global_step and loss; "
            "did you mean `train.global_step`?",
        ),
        (
            {f"value{number}": number for number in range(11)},
            "FILE has no number `global_step`, but has value0, value1, value2, value3, value4, "
            "value5, value6, value7 and 3 more",
        ),
        ({"name": "a"}, "FILE has no `global_step`, and no other number"),
        (
            {"iter": 3, "global_step": 4.185, "perf": {"tokens": 20, "time": 0.3}},
            "the value of `global_step` in FILE is 4.185, but a training step must be a whole "
            "number; FILE has whole numbers in iter and perf.tokens",
        ),
        (
            {"global_step": 4.185},
            "the value of `global_step` in FILE is 4.185, but a training step must be a whole "
            "number; FILE has no whole number",
        ),
        (
            {"global_step": "3"},
            "the value of `global_step` in FILE is the text '3', but must be a finite number",
        ),
        (
            {"global_step": None},
            "the value of `global_step` in FILE is nothing, but must be a finite number",
        ),
    ],
)
def test_explanation_lists_the_keys_of_the_metrics_file(
    tmp_path: Path, line: dict[str, Any], explanation: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, line)

    assert explain(path) == explanation.replace("FILE", str(path))


def test_explanation_of_a_missing_file_lists_similar_files(tmp_path: Path) -> None:
    for name in ("train.jsonl", "eval.jsonl", "notes.txt"):
        (tmp_path / name).touch()

    explanation = explain(tmp_path / "metrics.jsonl")

    assert explanation == (
        f"{tmp_path}/metrics.jsonl does not exist, but its folder has eval.jsonl and train.jsonl"
    )
    assert explain(tmp_path / "no" / "metrics.jsonl") == (
        f"{tmp_path}/no/metrics.jsonl and its folder do not exist"
    )


@pytest.mark.parametrize(
    "name", ["events.jsonl", "run.json", "submission-trainer.json", "trainer.error.json", "a.log"]
)
def test_file_of_muster_is_not_named_as_a_metrics_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    path = tmp_path / "metrics.jsonl"

    missing = find_missing_step(path, key="iter")

    assert missing is not None
    assert missing.problem == f"{path} does not exist"
    assert missing.remedy == (
        f'Change the training so that it appends a line such as {{"iter": 1}} to {path} after each '
        "step. The module muster_metrics does this: see `muster docs your-training`. Or set "
        "`progress.jsonl` in the spec to the path of another file."
    )


def test_explanation_says_that_a_file_has_no_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("step 1, loss 0.5\n")

    assert explain(path) == f"{path} has no new line with a JSON object"


def test_step_that_is_written_as_a_float_is_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, {"global_step": 3.0})

    assert explain(path) == ""


def test_known_step_needs_no_explanation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, {"loss": 0.5}, {"global_step": 3})

    assert explain(path) == ""


@pytest.mark.parametrize(("count", "is_sure"), [(19, False), (20, True)])
def test_missing_step_of_a_running_training_is_explained_only_after_several_lines(
    tmp_path: Path, count: int, is_sure: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, *[{"step": number} for number in range(count)])

    assert bool(explain(path, is_over=False)) is is_sure


@pytest.mark.parametrize(
    ("answer", "explanation"),
    [
        (
            httpx.Response(200, json={"step": 3}),
            "http://api/status has no number `current_step`, but has step",
        ),
        (httpx.Response(404, text="no"), "http://api/status did not answer with JSON"),
    ],
)
def test_explanation_names_the_answer_of_a_server(answer: httpx.Response, explanation: str) -> None:
    async def read() -> tuple[float | None, MissingStep | None, MissingStep | None]:
        transport = httpx.MockTransport(lambda request: answer)
        async with httpx.AsyncClient(transport=transport) as client:
            source = HttpProgress("http://api/status", "current_step", client)
            step = await source.step()
            return (
                step,
                await source.explain_missing_step(is_over=False),
                await source.explain_missing_step(is_over=True),
            )

    step, during_the_run, at_the_end = asyncio.run(read())

    assert (step, during_the_run) == (None, None)
    assert at_the_end is not None and at_the_end.problem.startswith(explanation)
    assert "http://api/status" in at_the_end.remedy


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (
            {"step": 3, "loss": 0.5},
            "Set `progress.step` in the spec to the name that FILE uses for the training step. The "
            "file has numbers with these names: step and loss.",
        ),
        (
            {"iter": 3, "global_step": 4.185},
            "Set `progress.step` in the spec to the name that FILE uses for the training step. "
            "FILE has whole numbers in iter.",
        ),
        (
            {"name": "a"},
            "Change the training so that it writes its step as the number `global_step` into FILE.",
        ),
        (
            {"global_step": "3"},
            "Change the training so that `global_step` in FILE is a number, or write another key "
            "into `progress.step` of the spec.",
        ),
    ],
)
def test_remedy_for_a_wrong_key_names_the_key_and_the_keys_that_exist(
    tmp_path: Path, line: dict[str, Any], remedy: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, line)

    missing = find_missing_step(path)

    assert missing is not None
    assert missing.remedy == remedy.replace("FILE", str(path))


def test_remedy_for_a_wrong_file_names_the_files_that_exist(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()

    missing = find_missing_step(tmp_path / "metrics.jsonl")

    assert missing is not None
    assert missing.remedy == (
        "In `progress.jsonl` of the spec, write the path of the file to which the training writes "
        f"its metrics. {tmp_path} has train.jsonl."
    )


def test_rank_that_keeps_muster_metrics_from_writing_is_named(tmp_path: Path) -> None:
    missing = find_missing_step(tmp_path / "metrics.jsonl")
    assert missing is not None

    # The log contains the line that the module really writes.
    hook = tmp_path / "muster_metrics.py"
    hook.write_text(read_hook())
    code = "import muster_metrics; muster_metrics.log(1, loss=2)"
    environment = {**os.environ, "RANK": "1", "METRICS": str(tmp_path / "metrics.jsonl")}
    log = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    ).stderr

    named = name_rank(missing, f"step 1\n{log}step 2\n")

    assert named.problem == (
        f"{tmp_path}/metrics.jsonl does not exist. One process wrote no metrics, because its "
        "variable RANK is 1. If the training has only one process, remove the variable: unset RANK"
    )
    # In a training with several processes, the metrics of rank 0 may be missing for another reason.
    assert named.remedy.startswith("If the training has only one process, remove the variable RANK")
    assert named.remedy.endswith(f". Otherwise: {missing.remedy}")
    assert name_rank(missing, "RANK is 1\n") == missing
