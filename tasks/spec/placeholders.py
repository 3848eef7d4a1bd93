"""The `${name}` language: where a spec may use it, and what a text becomes.

Works on plain mappings and lists, so that a spec with other faults can be checked too; `template`
offers the same for a `RunSpec`.

The `${stage.NAME.KEY}` language: what a stage of a pipeline knows of the stages before it.

It is filled in before the stage's run is created, so that a run spec never knows of pipelines. All
other placeholders pass through as they are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tasks.spec.errors import Fault


class Kind(Enum):
    """What a text that may hold placeholders is."""

    #: The value replaces the placeholder as it is.
    TEXT = "text"
    #: A regular expression: the value is matched literally.
    PATTERN = "pattern"
    #: Of a fleet, which fills in the `${server.x}` itself, for each server, and then the `$${`.
    FLEET = "fleet"


Change = Callable[[str, str, Kind], str]

# Leftmost first: `$${` is taken before the `${` inside it.
_TOKEN = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")

_TEXTS: dict[str, object] = {"*": Kind.TEXT}
_PROBE: dict[str, object] = {
    "http": Kind.TEXT,
    "json": {"*": {"": Kind.TEXT, "*": Kind.TEXT}},  # a value, or {not: value}
    "tcp": Kind.TEXT,
    "log": Kind.PATTERN,
    "file": Kind.TEXT,
    "processes": Kind.PATTERN,
}
_COMPONENT: dict[str, object] = {
    "command": _TEXTS,
    "env": _TEXTS,
    "cwd": Kind.TEXT,
    "ready": _PROBE,
    "live": _PROBE,
    "checkpoints": Kind.TEXT,
}
_OF_SERVERS: dict[str, object] = {"*": Kind.FLEET}
_FLEET: dict[str, object] = {
    "command": _OF_SERVERS,
    "args": _OF_SERVERS,
    "env": _OF_SERVERS,
    "model": Kind.FLEET,
    "cwd": Kind.TEXT,
}
#: Where placeholders are allowed, "*" for any key or item and "" for the text itself; elsewhere
#: `${` is plain text.
_PLACES: dict[str, object] = {
    "env": _TEXTS,
    "cwd": Kind.TEXT,
    "components": {"*": _COMPONENT, "rollout": _FLEET},
    "progress": {"http": Kind.TEXT, "jsonl": Kind.TEXT},
}

_ALWAYS = ("run.id", "run.dir", "attempt.number", "attempt.dir", "attempt.resume_from")


_SERVER = "server."


def substituted(text: str, value_of: Callable[[str], str], kind: Kind = Kind.TEXT) -> str:
    """The text with each `${name}` replaced and each `$${` made a literal `${`.

    In a text of a fleet, what is for the fleet to fill in stays as it is. So does an unterminated
    `${`: `faults_in` reports it.
    """

    def one(match: re.Match[str]) -> str:
        name = match.group(1)
        if kind is Kind.FLEET and (name is None or name.startswith(_SERVER)):
            return match.group(0)
        return "${" if name is None else value_of(name)

    return _TOKEN.sub(one, text)


def is_templated(text: str) -> bool:
    """Whether something is still to be filled in: false where every `${` is a literal one."""
    return any(match.group(0) != "$${" for match in _TOKEN.finditer(text))


def rewritten(data: object, change: Change) -> object:
    """A written spec in which `change(path, text, kind)` replaced each text.

    What holds no placeholders is not copied, and nothing is looked at deeper than a spec goes:
    YAML can write a mapping that holds itself.
    """
    return _rewritten(data, _PLACES, "", change)


def _rewritten(node: object, pattern: object, path: str, change: Change) -> object:
    if isinstance(pattern, Kind):
        return change(path, node, pattern) if isinstance(node, str) else node
    if not isinstance(pattern, dict):
        return node
    if isinstance(node, str):
        return _rewritten(node, pattern.get(""), path, change)
    if isinstance(node, Mapping):
        return {
            key: _rewritten(value, pattern.get(key, pattern.get("*")), _joined(path, key), change)
            for key, value in node.items()
        }
    if isinstance(node, list | tuple):
        return [
            _rewritten(value, pattern.get("*"), _joined(path, index), change)
            for index, value in enumerate(node)
        ]
    return node


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def names_in(data: object) -> frozenset[str]:
    """Every name that a written spec may use.

    `NAME.port` for each component, `NAME.ports.OTHER` for each port that it lists, and, where they
    are set, `progress.total` and `success.step`, so that a spec can name its step count once.
    """
    names = set(_ALWAYS)
    names.update(f"{section}.{key}" for section, key, _ in numbers_in(data))
    for component, keys in _mapping(_mapping(data).get("components")).items():
        names.add(f"{component}.port")
        if component == "rollout":
            names.add("rollout.url")
        ports = _mapping(keys).get("ports")
        if isinstance(ports, list | tuple):
            names.update(f"{component}.ports.{port}" for port in ports)
    return frozenset(names)


def numbers_in(data: object) -> Iterator[tuple[str, str, int]]:
    """The step counts that the spec itself gives a value: section, key, number."""
    for section, key in (("progress", "total"), ("success", "step")):
        number = _mapping(_mapping(data).get(section)).get(key)
        if isinstance(number, int) and not isinstance(number, bool):
            yield section, key, number


def names_used(data: object) -> tuple[str, ...]:
    """The names that the written spec uses, each once, in file order."""
    used: dict[str, None] = {}

    def note(_path: str, text: str, kind: Kind) -> str:
        return substituted(text, lambda name: used.setdefault(name) or "", kind)

    rewritten(data, note)
    return tuple(used)


def faults_in(data: object) -> tuple[Fault, ...]:
    """One fault for each unknown name and each text with a `${` that is never closed."""
    known = sorted(names_in(data))
    faults: list[Fault] = []

    def check(path: str, text: str, kind: Kind) -> str:
        for match in _TOKEN.finditer(text):
            name = match.group(1)
            if kind is Kind.FLEET and (name or "").startswith(_SERVER):
                continue  # The fleet's own rules say which of them there are.
            if match.group(0) == "${":
                faults.append(_unterminated(path))
            elif name is not None and name not in known:
                faults.append(_unknown(path, name, known))
        return text

    rewritten(data, check)
    return tuple(dict.fromkeys(faults))


def _unterminated(path: str) -> Fault:
    return Fault(
        path=path,
        problem="a `${` without its `}`",
        remedy="close it, or write `$${` for a literal `${`",
    )


def _unknown(path: str, name: str, known: Sequence[str]) -> Fault:
    near = difflib.get_close_matches(name.strip(), known, n=1)
    if near:
        remedy = f"did you mean `${{{near[0]}}}`?"
    else:
        shell = f"for a shell's own write `$${{{name}}}`"
        remedy = f"{shell}; known are {', '.join(known)}"
    return Fault(path=path, problem=f"unknown name `${{{name}}}`", remedy=remedy)


def _mapping(value: object) -> Mapping[object, object]:
    return value if isinstance(value, Mapping) else {}


#: What a path or pattern of a checkpoint may use.
_KNOWN = ("run.id", "run.dir", "attempt.number", "attempt.dir")

_NAMES = re.compile(r"\$\{([^{}]*)\}")


def unknown_names(checkpoint: object, path: str) -> tuple[Fault, ...]:
    """One fault for each placeholder of a path or pattern that has no value.

    Args:
        checkpoint: As written.
        path: Of it, in the pipeline spec.
    """
    if not isinstance(checkpoint, str):
        return ()
    return tuple(
        Fault(path=path, problem=f"unknown name `${{{name}}}`", remedy=f"known are {_known()}")
        for name in dict.fromkeys(_NAMES.findall(checkpoint.replace("$${", "")))
        if name not in _KNOWN
    )


def _known() -> str:
    return ", ".join(f"${{{name}}}" for name in _KNOWN)


#: What is known of an earlier stage: its last complete checkpoint, and its run's folder and id.
CHECKPOINT, RUN_DIR, RUN_ID = "checkpoint", "run_dir", "run_id"
KEYS = (CHECKPOINT, RUN_DIR, RUN_ID)

# Leftmost first: `$${` is taken before the `${` inside it.
_STAGE_TOKEN = re.compile(r"\$\$\{|\$\{stage\.([^{}]*)\}")


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

        return _stages_substituted(text, one)

    rewritten(written, note)
    return tuple(found)


def filled_in(written: object, value_of: Callable[[str, str], str]) -> object:
    """The written run spec with a value for each use; all else is as it was.

    Args:
        value_of: By stage and key. In a regular expression it is matched literally, and a `${` in
            it is no placeholder.
    """

    def change(_path: str, text: str, kind: Kind) -> str:
        quoted = re.escape if kind is Kind.PATTERN else _stage_literal
        return _stages_substituted(text, lambda stage, key: quoted(value_of(stage, key)))

    return rewritten(written, change)


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
            problem, remedy = f"unknown stage in `{use}`", _stage_did_you_mean(use, stages[:index])
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


def _stages_substituted(text: str, value_of: Callable[[str, str], str]) -> str:
    def one(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group(0)
        stage, _, key = name.partition(".")
        return value_of(stage, key)

    return _STAGE_TOKEN.sub(one, text)


def _stage_literal(value: str) -> str:
    return value.replace("${", "$${")


def _stage_did_you_mean(use: StageName, before: Sequence[str]) -> str:
    if not before:
        return "the first stage knows of no other"
    near = difflib.get_close_matches(use.stage, before, n=1)
    if near:
        return f"did you mean `${{stage.{near[0]}.{use.key or CHECKPOINT}}}`?"
    return f"known are {', '.join(before)}"
