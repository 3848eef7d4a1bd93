"""Evaluations of checkpoints: the keys `evals` and `keep_best` of a run spec.

An evaluation is a step: a separate run with a single component. This module builds the run spec
of an evaluation. The training creates the run when a checkpoint is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from tasks.spec.formatting import join_commas, suggest_name
from tasks.spec.matrix import Best
from tasks.spec.placeholders import fill_in_checkpoint, mapping_or_empty
from tasks.spec.step import RESULT_VARIABLE, STEP, build_run_spec
from tasks.spec.step_resources import Resources, check_ray_secrets, check_resources
from tasks.spec.values import (
    PART_NAME,
    Count,
    CountOrZero,
    DottedKey,
    Env,
    Model,
    Refusal,
    Seconds,
    Words,
    make_refusal,
)


class Evaluation(Model):
    """Program that evaluates checkpoints. The keys `every` and `late` choose the checkpoints."""

    command: Words = Field(
        description="Program of the evaluation and its arguments, with one list item for each "
        "argument. ${checkpoint} is the path of the checkpoint, and ${checkpoint.step} is its "
        "training step. The environment variable MUSTER_RESULT names a file into which the "
        "program may write numbers as JSON.",
        examples=[["python", "evaluate.py", "${checkpoint}"]],
    )
    env: Env = Field(
        default_factory=dict,
        description="Environment variables of the evaluation, in addition to those in `env` of "
        "the run.",
        examples=[{"LIMIT": "200"}],
    )
    every: Count = Field(
        1,
        description="Evaluate every Nth complete checkpoint, for this number N. 1: every "
        "checkpoint.",
        examples=[2],
    )
    late: Literal["skip", "all"] = Field(
        "skip",
        description="Choice of the checkpoints to evaluate if new checkpoints appear during an "
        "evaluation. skip: Muster waits for the end of the evaluation, and then evaluates only "
        "the newest checkpoint. all: Muster evaluates every checkpoint, if necessary several at "
        "the same time.",
    )
    on: Literal["ray", "host"] | None = Field(
        None,
        description="Place where the evaluation runs. ray: a node of the Ray cluster. host: the "
        "host of the worker that starts the evaluation, without Ray. If omitted, it is ray for a "
        "run with the key `ray`, and host for every other run.",
        examples=["host"],
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources that the evaluation takes while it runs. With `on: host`, only "
        "`gpus` is allowed.",
        examples=[{"gpus": 1}],
    )
    retries: CountOrZero = Field(
        0, description="Number of times that Muster runs a failed evaluation again.", examples=[2]
    )
    timeout_s: Seconds | None = Field(
        None,
        description="Time limit of each try of the evaluation in seconds. Muster stops a longer "
        "try, which then counts as failed. If omitted, there is no limit.",
        examples=[3600],
    )


class KeepBest(Best):
    """Rule that chooses the best checkpoint of a run.

    Muster never removes the best checkpoint, even if the key `keep` limits the number of
    checkpoints.
    """

    by: DottedKey = Field(
        description="Number that decides which checkpoint is best, as EVALUATION.KEY. EVALUATION "
        "is the name of an evaluation in `evals`, and KEY is a key in the JSON result of the "
        "evaluation.",
        examples=["math.accuracy"],
    )


def check_evaluations(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield the faults that result from a combination of keys in `evals` and `keep_best`.

    Args:
        written: The run spec as the user wrote it. Its values are not validated yet.
    """
    evaluations = mapping_or_empty(written.get("evals"))
    components = mapping_or_empty(written.get("components")).values()
    if evaluations and not any(mapping_or_empty(one).get("checkpoints") for one in components):
        problem = (
            "evaluations need the key `checkpoints`, the folder with the checkpoints to evaluate"
        )
        yield ("evals",), make_refusal(problem, "write `checkpoints: FOLDER` in the trainer")
    for name, evaluation in evaluations.items():
        if isinstance(name, str) and re.fullmatch(PART_NAME, name) is None:
            problem = f"an evaluation's name must match the pattern {PART_NAME}, found {name!r}"
            yield ("evals", name), make_refusal(problem)
        if isinstance(evaluation, Mapping):
            for place, refusal in _check_place(written, evaluation):
                yield ("evals", str(name), *place), refusal
    yield from _check_keep_best(written, evaluations)


def _check_place(written: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Iterator[Refusal]:
    """Check that an evaluation can run at its place, and yield the faults.

    The place is a Ray node or the worker's host. The key `on` of the evaluation sets the place.

    Args:
        written: The run spec as the user wrote it.
        evaluation: The evaluation as the user wrote it.
    """
    on = find_place(written, evaluation)
    if on == "ray" and written.get("ray") is None:
        problem = "the evaluation would run on Ray, but the run has no Ray cluster"
        yield ("on",), make_refusal(problem, "write `on: host`, or `ray: {address: ADDRESS}`")
    yield from check_resources(evaluation, on=on)
    if on != "ray":
        return
    yield from check_ray_secrets(mapping_or_empty(evaluation.get("env")))
    for (_, name), _refusal in check_ray_secrets(mapping_or_empty(written.get("env"))):
        problem = f"Ray would show the variable {name} of the run to every user of its dashboard"
        remedy = "write `on: host`, or store the secret in a file on the nodes"
        yield ("on",), make_refusal(problem, remedy)


def _check_keep_best(
    written: Mapping[str, Any], evaluations: Mapping[Any, Any]
) -> Iterator[Refusal]:
    """Yield a fault if `keep_best` names an evaluation that the run does not have."""
    by = mapping_or_empty(written.get("keep_best")).get("by")
    name = by.partition(".")[0] if isinstance(by, str) else None
    if not name or name in evaluations:
        return
    names = [str(evaluation) for evaluation in evaluations]
    remedy = suggest_name(name, names)
    remedy = remedy or f"write EVALUATION.KEY; the evaluations are: {join_commas(names)}"
    if not names:
        remedy = f"write `evals: {{{name}: {{command: [PROGRAM, ARGUMENT]}}}}`"
    problem = f"the run has no evaluation {name!r}"
    yield ("keep_best", "by"), make_refusal(problem, remedy)


def find_place(written: Mapping[str, Any], evaluation: Mapping[str, Any]) -> object:
    """Return the place of an evaluation: `ray` for a Ray node, or `host` for the worker's host.

    An invalid value of the key `on` is returned unchanged. The validation of the evaluation reports
    such a value.

    Args:
        written: The run spec as plain data.
        evaluation: The evaluation as plain data.
    """
    return evaluation.get("on") or ("ray" if written.get("ray") is not None else "host")


def build_evaluation_spec(
    written: Mapping[str, Any],
    name: str,
    values: Mapping[str, str],
    *,
    result: str = "",
    ray_address: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    """Return the run spec that evaluates one checkpoint, as plain data.

    Args:
        written: The run spec of the training as plain data, in which placeholders are not replaced.
            Faults of the evaluation are found later, when the returned spec is validated.
        name: Name of the evaluation.
        values: Mapping from each name in `placeholders.CHECKPOINT_NAMES` to its value.
        result: Path of the file into which the evaluation writes its results. If empty, the file is
            in the directory of the evaluation's own attempt.
        ray_address: Address of the Ray dashboard. None to use the only cluster of the work pool.
        code: Version of the project's files that the training uses, or None if unknown.
    """
    evaluation = mapping_or_empty(written["evals"][name])
    env = {**mapping_or_empty(written.get("env")), **mapping_or_empty(evaluation.get("env"))}
    step = {
        **evaluation,
        "name": name,
        "on": find_place(written, evaluation),
        "env": env,
        "code": code,
    }
    spec = build_run_spec(step, ray_address=ray_address)
    spec["tags"] = [*(written.get("tags") or ())]
    spec["cwd"] = written.get("cwd", ".")
    if result:
        # A `${` in the path is not a placeholder, so escape it.
        spec["components"][STEP]["env"][RESULT_VARIABLE] = result.replace("${", "$${")
    filled: dict[str, Any] = fill_in_checkpoint(spec, values)
    return filled
