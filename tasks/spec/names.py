"""The `${stage.NAME.KEY}` language: what a stage of a pipeline knows of the stages before it.

It is filled in before the stage's run is created, so that a run spec never knows of pipelines. All
other placeholders pass through as they are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tasks.spec import placeholders
from tasks.spec.errors import Fault
from tasks.spec.placeholders import Kind

#: What is known of an earlier stage: its last complete checkpoint, and its run's folder and id.
CHECKPOINT, RUN_DIR, RUN_ID = "checkpoint", "run_dir", "run_id"
KEYS = (CHECKPOINT, RUN_DIR, RUN_ID)

# Leftmost first: `$${` is taken before the `${` inside it.
_TOKEN = re.compile(r"\$\$\{|\$\{stage\.([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageName:
    """One use of a placeholder."""

    #: Where in the run spec.
    path: str
    stage: str
    key: str

    def __str__(self) -> str:
        dot = "." if self.key else ""
        return f"${{stage.{self.stage}{dot}{self.key}}}"


def stage_names_in(written: object) -> tuple[StageName, ...]:
    """Every use in a written run spec, in file order."""
    found: list[StageName] = []

    def note(path: str, text: str, _kind: Kind) -> str:
        def one(stage: str, key: str) -> str:
            found.append(StageName(path=path, stage=stage, key=key))
            return ""

        return _substituted(text, one)

    placeholders.rewritten(written, note)
    return tuple(found)


def filled_in(written: object, value_of: Callable[[str, str], str]) -> object:
    """The written run spec with a value for each use; all else is as it was.

    Args:
        value_of: By stage and key. In a regular expression it is matched literally, and a `${` in
            it is no placeholder.
    """

    def change(_path: str, text: str, kind: Kind) -> str:
        quoted = re.escape if kind is Kind.PATTERN else _literal
        return _substituted(text, lambda stage, key: quoted(value_of(stage, key)))

    return placeholders.rewritten(written, change)


def faults_of_names(
    written: object, *, stages: Sequence[str], index: int, hands_on: Mapping[str, bool]
) -> tuple[Fault, ...]:
    """One fault for each use that will have no value.

    Args:
        written: The run spec of a stage.
        stages: The names of all, in order.
        index: Which of them the stage is.
        hands_on: By stage, whether it names checkpoints; one that is not in it may.
    """
    faults = []
    for use in stage_names_in(written):
        problem, remedy = "", ""
        if use.stage not in stages:
            problem, remedy = f"unknown stage in `{use}`", _did_you_mean(use, stages[:index])
        elif (place := stages.index(use.stage)) >= index:
            which = "the stage itself" if place == index else "a stage that comes later"
            problem, remedy = f"`{use}` is of {which}", "name one that comes before"
        elif use.key not in KEYS:
            known = ", ".join(f"${{stage.{use.stage}.{key}}}" for key in KEYS)
            problem, remedy = f"unknown name `{use}`", f"known are {known}"
        elif use.key == CHECKPOINT and not hands_on.get(use.stage, True):
            problem = f"`{use}` will be nothing: no component of that stage names `checkpoints`"
            remedy = f"name them there, or write checkpoint: PATTERN in the stage {use.stage}"
        if problem:
            faults.append(Fault(path=use.path, problem=problem, remedy=remedy))
    return tuple(dict.fromkeys(faults))


def _substituted(text: str, value_of: Callable[[str, str], str]) -> str:
    def one(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group(0)
        stage, _, key = name.partition(".")
        return value_of(stage, key)

    return _TOKEN.sub(one, text)


def _literal(value: str) -> str:
    return value.replace("${", "$${")


def _did_you_mean(use: StageName, before: Sequence[str]) -> str:
    if not before:
        return "the first stage knows of no other"
    near = difflib.get_close_matches(use.stage, before, n=1)
    if near:
        return f"did you mean `${{stage.{near[0]}.{use.key or CHECKPOINT}}}`?"
    return f"known are {', '.join(before)}"
