"""Placeholders of the form `${name}`: their allowed places in a spec, and their replacement.

Placeholders are filled in at up to three times:

- `${stage.NAME.KEY}` by the pipeline, before it creates the run of a stage
- `${server.NAME}` by the fleet, for each of its servers
- all other names by the run

Each of these steps leaves the names of the other steps unchanged. `$${` stands for a literal `${`.
It is replaced in the last step that a text goes through.

The functions work on plain mappings and lists, so that they can also check a spec with faults.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.formatting import suggest_name


class Kind(Enum):
    """Kind of a text that may contain placeholders."""

    #: Plain text. The value replaces the placeholder unchanged.
    TEXT = "text"
    #: Regular expression. The value is escaped, so that it matches literally.
    PATTERN = "pattern"
    #: Word of a command. If the word is only a placeholder for a list, it becomes several words.
    WORD = "word"
    #: Text of a fleet. The fleet fills in `${server.x}` and `$${` later, for each server.
    FLEET = "fleet"


#: Receives the path, the text and its kind, and returns the new text. It returns a list to replace
#: one item of a list by several.
Change = Callable[[str, str, Kind], str | list[str]]

# The order matters: `$${` must match before the `${` inside it.
_TOKEN = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")

_TEXTS: dict[str, object] = {"*": Kind.TEXT}
_PROBE: dict[str, object] = {
    "http": Kind.TEXT,
    "json": {"*": {"": Kind.TEXT, "*": Kind.TEXT}},  # either a value or {not: value}
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
_FLEET_TEXTS: dict[str, object] = {"*": Kind.FLEET}
_FLEET: dict[str, object] = {
    "command": _FLEET_TEXTS,
    "args": _FLEET_TEXTS,
    "env": _FLEET_TEXTS,
    "model": Kind.FLEET,
    "cwd": Kind.TEXT,
}
#: Places of a spec in which placeholders are allowed. "*" stands for any key or list item, and ""
#: for the text itself. In all other places, `${` is plain text.
_PLACES: dict[str, object] = {
    "env": _TEXTS,
    "cwd": Kind.TEXT,
    "components": {"*": _COMPONENT, "rollout": _FLEET},
    "progress": {"http": Kind.TEXT, "jsonl": Kind.TEXT},
}

#: Names that may be used in the `checkpoint` of a stage.
_CHECKPOINT_NAMES = ("run.id", "run.dir", "attempt.number", "attempt.dir")
#: Names that may be used in every run spec.
_RUN_NAMES = (*_CHECKPOINT_NAMES, "attempt.resume_from")
#: Address of the fleet's gateway.
ROLLOUT_URL = "rollout.url"
#: Addresses of the fleet's engines, separated by commas.
ROLLOUT_ENGINES = "rollout.engines"

SERVER = "server."
STAGE = "stage."
#: Names that may be used in the texts of a fleet. They describe one server.
_SERVER_NAMES = tuple(f"{SERVER}{name}" for name in ("port", "host", "rank", "node", "group"))
#: Last complete checkpoint of an earlier stage.
CHECKPOINT = "checkpoint"
#: Directory of an earlier stage's run.
RUN_DIR = "run_dir"
#: Id of an earlier stage's run.
RUN_ID = "run_id"
STAGE_KEYS = (CHECKPOINT, RUN_DIR, RUN_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A placeholder in a spec, with its place."""

    #: Dotted path of the text in the spec.
    path: str
    #: Name in the placeholder, or None if its `}` is missing.
    name: str | None
    #: Kind of the text that contains the placeholder.
    kind: Kind

    def __str__(self) -> str:
        return f"${{{self.name}}}"


def find_names(text: str) -> Iterator[str | None]:
    """Yield the name of each placeholder in a text, or None for a placeholder without its `}`."""
    return (match.group(1) for match in _TOKEN.finditer(text) if match.group(0) != "$${")


def has_placeholders(text: str) -> bool:
    """Return True if a text contains a placeholder. `$${`, a literal `${`, does not count."""
    return any(True for _ in find_names(text))


def substitute(
    text: str, value_of: Callable[[str], str], *, is_left: Callable[[str], bool] | None = None
) -> str:
    """Return the text with each `${name}` replaced, and each `$${` turned into a literal `${`.

    A `${` without its `}` stays unchanged; `find_placeholder_faults` reports it.

    Args:
        text: Text that may contain placeholders.
        value_of: Returns the value of a name.
        is_left: Returns True for a name that will be filled in later. The placeholder then stays
            unchanged. If this argument is given, each `$${` stays unchanged, too.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group(0) if is_left else "${"
        return match.group(0) if is_left and is_left(name) else value_of(name)

    return _TOKEN.sub(replace, text)


def rewrite_texts(data: object, change: Change) -> object:
    """Return a spec in which `change` was applied to each text that may contain placeholders.

    Other values are not copied. The search goes no deeper than a valid spec, because a mapping in
    YAML can contain itself.
    """
    return _rewrite_node(data, _PLACES, "", change)


def _rewrite_node(node: object, places: object, path: str, change: Change) -> object:
    """Apply `change` to a part of a spec; `places` is the matching part of `_PLACES`."""
    if isinstance(places, Kind):
        return change(path, node, places) if isinstance(node, str) else node
    if not isinstance(places, dict):
        return node
    if isinstance(node, str):
        return _rewrite_node(node, places.get(""), path, change)
    if isinstance(node, Mapping):
        return {
            key: _rewrite_node(
                value, places.get(key, places.get("*")), join_path(path, key), change
            )
            for key, value in node.items()
        }
    if isinstance(node, list | tuple):
        items: list[object] = []
        for index, value in enumerate(node):
            item = _rewrite_node(value, places.get("*"), join_path(path, index), change)
            items += item if isinstance(value, str) and isinstance(item, list) else [item]
        return items
    return node


def find_uses(data: object) -> list[Use]:
    """Return all placeholders of a spec, in the order of the file."""
    uses: list[Use] = []

    def collect(path: str, text: str, kind: Kind) -> str:
        uses.extend(Use(path=path, name=name, kind=kind) for name in find_names(text))
        return text

    rewrite_texts(data, collect)
    return uses


def list_known_names(data: object) -> frozenset[str]:
    """Return all names that a spec may use in its placeholders.

    These are fixed names such as `run.id`, `NAME.port` for each component, and `NAME.ports.OTHER`
    for each of its extra ports. If the spec sets them, `progress.total` and `success.step` are
    names, too, so that a spec need not repeat its step count.
    """
    names = set(_RUN_NAMES)
    names.update(f"{section}.{key}" for section, key, _ in find_step_counts(data))
    for component, keys in mapping_or_empty(mapping_or_empty(data).get("components")).items():
        names.add(f"{component}.port")
        if component == "rollout":
            names.update((ROLLOUT_URL, ROLLOUT_ENGINES))
        ports = mapping_or_empty(keys).get("ports")
        if isinstance(ports, list | tuple):
            names.update(f"{component}.ports.{port}" for port in ports)
    return frozenset(names)


def find_step_counts(data: object) -> Iterator[tuple[str, str, int]]:
    """Yield the section, key and value of each step count that a spec sets."""
    for section, key in (("progress", "total"), ("success", "step")):
        number = mapping_or_empty(mapping_or_empty(data).get(section)).get(key)
        if isinstance(number, int) and not isinstance(number, bool):
            yield section, key, number


def fill_in_run(data: object, value_of: Callable[[str], str]) -> object:
    """Return a spec with the placeholders of the run filled in.

    In a regular expression, a value is escaped. If a word of a command is `${rollout.engines}` and
    nothing else, it becomes one word for each engine, for options with `nargs="+"`.

    Args:
        data: The run spec as plain data.
        value_of: Returns the value of a name.
    """

    def change(_path: str, text: str, kind: Kind) -> str | list[str]:
        if kind is Kind.WORD and text == f"${{{ROLLOUT_ENGINES}}}":
            return value_of(ROLLOUT_ENGINES).split(",")
        escape = re.escape if kind is Kind.PATTERN else str
        is_left = (lambda name: name.startswith(SERVER)) if kind is Kind.FLEET else None
        return substitute(text, lambda name: escape(value_of(name)), is_left=is_left)

    return rewrite_texts(data, change)


def fill_in_stages(written: object, value_of: Callable[[str, str], str]) -> object:
    """Return the run spec of a stage with the placeholders `${stage.NAME.KEY}` filled in.

    In a regular expression, a value is escaped. A `${` in a value does not become a placeholder.

    Args:
        written: The run spec as plain data.
        value_of: Returns the value for the name of a stage and a key.
    """

    def change(_path: str, text: str, kind: Kind) -> str:
        def escaped_value(name: str) -> str:
            stage, _, key = name.removeprefix(STAGE).partition(".")
            value = value_of(stage, key)
            return re.escape(value) if kind is Kind.PATTERN else value.replace("${", "$${")

        return substitute(text, escaped_value, is_left=lambda name: not name.startswith(STAGE))

    return rewrite_texts(written, change)


def find_placeholder_faults(data: object) -> tuple[Fault, ...]:
    """Return a fault for each placeholder with an unknown name or without its `}`."""
    run_names = sorted(list_known_names(data))
    fleet_names = [*run_names, *_SERVER_NAMES]
    return _unknown_name_faults(
        (use, fleet_names if use.kind is Kind.FLEET else run_names) for use in find_uses(data)
    )


def find_unknown_names(checkpoint: object, path: str) -> tuple[Fault, ...]:
    """Return a fault for each unknown placeholder in the `checkpoint` of a stage.

    Args:
        checkpoint: Path or pattern of the checkpoint. If it is not text, nothing is checked.
        path: Place of `checkpoint` in the pipeline spec.
    """
    names = find_names(checkpoint) if isinstance(checkpoint, str) else ()
    uses = (Use(path=path, name=name, kind=Kind.TEXT) for name in names if name is not None)
    return _unknown_name_faults((use, _CHECKPOINT_NAMES) for use in uses)


def check_stage_names(written: object, known: Mapping[str, bool]) -> None:
    """Check that all placeholders of earlier stages in a run spec will have a value.

    Args:
        written: The run spec of a stage.
        known: Names of the earlier stages. False if the name will have no value.

    Raises:
        InvalidSpec: A name is unknown or will have no value.
    """
    uses = [use for use in find_uses(written) if (use.name or "").startswith(STAGE)]
    problem = "`{}` will be nothing: no component of that stage names `checkpoints`"
    remedy = "name them there, or write checkpoint: PATTERN in that stage"
    without_value = [
        Fault(path=use.path, problem=problem.format(use), remedy=remedy)
        for use in uses
        if not known.get(use.name or "", True)
    ]
    unknown = _unknown_name_faults((use, [*known]) for use in uses)
    if faults := (*unknown, *dict.fromkeys(without_value)):
        raise InvalidSpec(faults)


def _unknown_name_faults(uses: Iterable[tuple[Use, Sequence[str]]]) -> tuple[Fault, ...]:
    """Return a fault for each placeholder whose name is not in its list of known names."""
    faults = (_unknown_name_fault(use, known) for use, known in uses if use.name not in known)
    return tuple(dict.fromkeys(faults))


def _unknown_name_fault(use: Use, known: Sequence[str]) -> Fault:
    if use.name is None:
        remedy = "close it, or write `$${` for a literal `${`"
        return Fault(path=use.path, problem="a `${` without its `}`", remedy=remedy)
    shell = f"for a shell's own write `$${{{use.name}}}`"
    near = suggest_name(use, [f"${{{name}}}" for name in known])
    remedy = near or f"{shell}; known are {', '.join(known) or 'none'}"
    return Fault(path=use.path, problem=f"unknown name `{use}`", remedy=remedy)


def mapping_or_empty(value: object) -> Mapping[Any, Any]:
    """Return the value if it is a mapping, else an empty mapping.

    Checks of unvalidated data use this: validation reports a value of the wrong type separately.
    """
    return value if isinstance(value, Mapping) else {}


def join_path(path: str, key: object) -> str:
    """Return the dotted path of a key or index below a path."""
    return f"{path}.{key}" if path else str(key)
