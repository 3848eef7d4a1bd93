"""The `${name}` language: where a spec may use it, and what a text becomes.

A name belongs to whoever fills it in: `stage.NAME.KEY` to the pipeline, before the stage's run is
created; `server.NAME` to the fleet, for each of its servers; any other to the run. Whoever comes
before the last one leaves the names of the others as they are, and so `$${`, a literal `${`.

Works on plain mappings and lists, so that a spec with other faults can be checked too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.words import did_you_mean


class Kind(Enum):
    """What a text that may hold placeholders is."""

    #: The value replaces the placeholder as it is.
    TEXT = "text"
    #: A regular expression: the value is matched literally.
    PATTERN = "pattern"
    #: One word of a command: a list that stands in it alone becomes a word for each item.
    WORD = "word"
    #: Of a fleet, which fills in the `${server.x}` itself, for each server, and then the `$${`.
    FLEET = "fleet"


Change = Callable[[str, str, Kind], str | list[str]]

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
    "command": {"*": Kind.WORD},
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

#: What the path or pattern of a stage's checkpoint may use.
_OF_CHECKPOINTS = ("run.id", "run.dir", "attempt.number", "attempt.dir")
_ALWAYS = (*_OF_CHECKPOINTS, "attempt.resume_from")
#: Where a fleet is reached, and where each of its engines is: items with a comma between them.
ROLLOUT_URL, ROLLOUT_ENGINES = "rollout.url", "rollout.engines"

SERVER, STAGE = "server.", "stage."
#: Of the server that a text of the fleet is about.
_SERVER_NAMES = tuple(f"{SERVER}{name}" for name in ("port", "host", "rank", "node", "group"))
#: What is known of an earlier stage: its last complete checkpoint, and its run's folder and id.
CHECKPOINT, RUN_DIR, RUN_ID = "checkpoint", "run_dir", "run_id"
STAGE_KEYS = (CHECKPOINT, RUN_DIR, RUN_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One placeholder in a written spec."""

    #: Where in the spec.
    path: str
    #: None where the placeholder is never closed.
    name: str | None
    kind: Kind

    def __str__(self) -> str:
        return f"${{{self.name}}}"


def names_of(text: str) -> Iterator[str | None]:
    """The name of each placeholder in a text; None for one that is never closed."""
    return (match.group(1) for match in _TOKEN.finditer(text) if match.group(0) != "$${")


def is_templated(text: str) -> bool:
    """Whether something is still to be filled in: false where every `${` is a literal one."""
    return any(True for _ in names_of(text))


def substituted(
    text: str, value_of: Callable[[str], str], *, is_left: Callable[[str], bool] | None = None
) -> str:
    """The text with each `${name}` replaced and each `$${` made a literal `${`.

    An unterminated `${` stays: `faults_in` reports it.

    Args:
        is_left: Whether somebody else fills a name in later: it stays then, and so does each `$${`.
    """

    def one(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group(0) if is_left else "${"
        return match.group(0) if is_left and is_left(name) else value_of(name)

    return _TOKEN.sub(one, text)


def rewritten(data: object, change: Change) -> object:
    """A written spec in which `change(path, text, kind)` replaced each text, one in a list by
    several where it gives a list.

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
            key: _rewritten(value, pattern.get(key, pattern.get("*")), joined(path, key), change)
            for key, value in node.items()
        }
    if isinstance(node, list | tuple):
        items: list[object] = []
        for index, value in enumerate(node):
            item = _rewritten(value, pattern.get("*"), joined(path, index), change)
            items += item if isinstance(value, str) and isinstance(item, list) else [item]
        return items
    return node


def uses_in(data: object) -> list[Use]:
    """Every placeholder of a written spec, in file order."""
    uses: list[Use] = []

    def note(path: str, text: str, kind: Kind) -> str:
        uses.extend(Use(path=path, name=name, kind=kind) for name in names_of(text))
        return text

    rewritten(data, note)
    return uses


def names_in(data: object) -> frozenset[str]:
    """Every name that a written spec may use.

    `NAME.port` for each component, `NAME.ports.OTHER` for each port that it lists, and, where they
    are set, `progress.total` and `success.step`, so that a spec can name its step count once.
    """
    names = set(_ALWAYS)
    names.update(f"{section}.{key}" for section, key, _ in numbers_in(data))
    for component, keys in mapping(mapping(data).get("components")).items():
        names.add(f"{component}.port")
        if component == "rollout":
            names.update((ROLLOUT_URL, ROLLOUT_ENGINES))
        ports = mapping(keys).get("ports")
        if isinstance(ports, list | tuple):
            names.update(f"{component}.ports.{port}" for port in ports)
    return frozenset(names)


def numbers_in(data: object) -> Iterator[tuple[str, str, int]]:
    """The step counts that the spec itself gives a value: section, key, number."""
    for section, key in (("progress", "total"), ("success", "step")):
        number = mapping(mapping(data).get(section)).get(key)
        if isinstance(number, int) and not isinstance(number, bool):
            yield section, key, number


def run_filled_in(data: object, value_of: Callable[[str], str]) -> object:
    """The written spec with a value for each of the run's names, which a regular expression
    matches literally. The list of engines is several words of a command where it is one of them,
    as an option with `nargs="+"` takes them."""

    def change(_path: str, text: str, kind: Kind) -> str | list[str]:
        if kind is Kind.WORD and text == f"${{{ROLLOUT_ENGINES}}}":
            return value_of(ROLLOUT_ENGINES).split(",")
        quoted = re.escape if kind is Kind.PATTERN else str
        is_left = (lambda name: name.startswith(SERVER)) if kind is Kind.FLEET else None
        return substituted(text, lambda name: quoted(value_of(name)), is_left=is_left)

    return rewritten(data, change)


def filled_in(written: object, value_of: Callable[[str, str], str]) -> object:
    """The written run spec with a value for each name of a stage, by stage and key; in a regular
    expression it is matched literally, and a `${` in it is no placeholder. All else is as it was.
    """

    def change(_path: str, text: str, kind: Kind) -> str:
        def value(name: str) -> str:
            stage, _, key = name.removeprefix(STAGE).partition(".")
            found = value_of(stage, key)
            return re.escape(found) if kind is Kind.PATTERN else found.replace("${", "$${")

        return substituted(text, value, is_left=lambda name: not name.startswith(STAGE))

    return rewritten(written, change)


def faults_in(data: object) -> tuple[Fault, ...]:
    """One fault for each unknown name and each text with a `${` that is never closed."""
    names = sorted(names_in(data))
    known = {kind: [*names, *_SERVER_NAMES] if kind is Kind.FLEET else names for kind in Kind}
    return _unknown((use, known[use.kind]) for use in uses_in(data))


def unknown_names(checkpoint: object, path: str) -> tuple[Fault, ...]:
    """One fault, at the path, for each placeholder of a stage's checkpoint that has no value."""
    names = names_of(checkpoint) if isinstance(checkpoint, str) else ()
    uses = (Use(path=path, name=name, kind=Kind.TEXT) for name in names if name is not None)
    return _unknown((use, _OF_CHECKPOINTS) for use in uses)


def check_names(written: object, known: Mapping[str, bool]) -> None:
    """Raises: InvalidSpec, with each use of a stage's name that will have no value.

    Args:
        written: The run spec of a stage.
        known: The names of the stages before it, each with whether it will have a value.
    """
    uses = [use for use in uses_in(written) if (use.name or "").startswith(STAGE)]
    problem = "`{}` will be nothing: no component of that stage names `checkpoints`"
    remedy = "name them there, or write checkpoint: PATTERN in that stage"
    nothing = [
        Fault(path=use.path, problem=problem.format(use), remedy=remedy)
        for use in uses
        if not known.get(use.name or "", True)
    ]
    if faults := (*_unknown((use, [*known]) for use in uses), *dict.fromkeys(nothing)):
        raise InvalidSpec(faults)


def _unknown(uses: Iterable[tuple[Use, Sequence[str]]]) -> tuple[Fault, ...]:
    """One fault for each use whose name is not among those that are known there."""
    faults = (_unknown_fault(use, known) for use, known in uses if use.name not in known)
    return tuple(dict.fromkeys(faults))


def _unknown_fault(use: Use, known: Sequence[str]) -> Fault:
    if use.name is None:
        remedy = "close it, or write `$${` for a literal `${`"
        return Fault(path=use.path, problem="a `${` without its `}`", remedy=remedy)
    shell = f"for a shell's own write `$${{{use.name}}}`"
    near = did_you_mean(use, [f"${{{name}}}" for name in known])
    remedy = near or f"{shell}; known are {', '.join(known) or 'none'}"
    return Fault(path=use.path, problem=f"unknown name `{use}`", remedy=remedy)


def mapping(value: object) -> Mapping[Any, Any]:
    """The value, or an empty mapping where it is none: its own fault, told elsewhere."""
    return value if isinstance(value, Mapping) else {}


def joined(path: str, key: object) -> str:
    """The path of what stands under a key or an index."""
    return f"{path}.{key}" if path else str(key)
