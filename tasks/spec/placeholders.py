"""Placeholders of the form `${name}`: the spec keys that may contain them, and their replacement.

Different programs replace different placeholders:

- A pipeline replaces `${stage.NAME.KEY}`, before it creates the run of a stage.
- A run replaces all other placeholders except `${server.NAME}`, at the start of each attempt.
- The fleet of inference servers replaces `${server.NAME}`, for each of its servers.
- A training replaces `${checkpoint}` and `${checkpoint.NAME}`, for each evaluation of a checkpoint.
  The run of the evaluation replaces the other placeholders of the evaluation.

Each program leaves the placeholders of the other programs unchanged. `$${` stands for a literal
`${`, and the last program that handles a text replaces `$${`.

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
    """Kind of a text in a spec. The kind decides how placeholders in the text are replaced."""

    #: Plain text. The value of a placeholder is inserted unchanged.
    TEXT = "text"
    #: Regular expression. Special characters in the value of a placeholder are escaped.
    PATTERN = "pattern"
    #: Argument of a command. An argument that is only `${rollout.engines}` becomes several
    #: arguments: one for each inference engine.
    WORD = "word"
    #: Text below the key `components.rollout` of a spec. `${server.x}` and `$${` stay in the text:
    #: the process of the inference servers replaces them later.
    FLEET = "fleet"
    #: Text of an evaluation. The placeholders in the text are replaced when the evaluation runs,
    #: not when an attempt of the training starts.
    EVALUATION = "evaluation"


#: Function that returns a new text for a text in a spec. The arguments are the dotted path of the
#: text, the text and its kind. For a list item, the function may return several new items.
Change = Callable[[str, str, Kind], str | list[str]]

# The escaped form `$${` must be the first alternative, because it also contains `${`.
_TOKEN = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")

#: Mapping in which each value may contain placeholders. `_PLACES` explains the format.
_TEXTS: dict[str, object] = {"*": Kind.TEXT}
#: Keys of a readiness or liveness probe whose values may contain placeholders. `_PLACES` explains
#: the format.
_PROBE: dict[str, object] = {
    "http": Kind.TEXT,
    # In a spec, each condition is either a plain value or {not: value}.
    "json": {"*": {"": Kind.TEXT, "*": Kind.TEXT}},
    "tcp": Kind.TEXT,
    "log": Kind.PATTERN,
    "file": Kind.TEXT,
    "processes": Kind.PATTERN,
}
#: Keys of a component whose values may contain placeholders. `_PLACES` explains the format.
_COMPONENT: dict[str, object] = {
    "command": {"*": Kind.WORD},
    "env": _TEXTS,
    "cwd": Kind.TEXT,
    "ready": _PROBE,
    "live": _PROBE,
    "checkpoints": Kind.TEXT,
}
_FLEET_TEXTS: dict[str, object] = {"*": Kind.FLEET}
#: Keys of the component `rollout` whose values may contain placeholders. `_PLACES` explains the
#: format.
_FLEET: dict[str, object] = {
    "command": _FLEET_TEXTS,
    "args": _FLEET_TEXTS,
    "env": _FLEET_TEXTS,
    "model": Kind.FLEET,
    "cwd": Kind.TEXT,
}
_EVALUATION_TEXTS: dict[str, object] = {"*": Kind.EVALUATION}
#: Keys of an evaluation whose values may contain placeholders. `_PLACES` explains the format.
_EVALUATION: dict[str, object] = {"command": _EVALUATION_TEXTS, "env": _EVALUATION_TEXTS}
#: Places in a run spec that may contain placeholders, as a tree of the spec's keys. Each leaf is
#: the kind of the text at this place. The key "*" stands for any key or list item. If a place may
#: have either a text or a mapping, the key "" contains the kind of the text. At all other places of
#: the spec, `${` is plain text.
_PLACES: dict[str, object] = {
    "env": _TEXTS,
    "cwd": Kind.TEXT,
    "inputs": _TEXTS,
    "components": {"*": _COMPONENT, "rollout": _FLEET},
    "progress": {"http": Kind.TEXT, "jsonl": Kind.TEXT},
    "evals": {"*": _EVALUATION},
}

#: Placeholder names that are allowed in the key `checkpoint` of a pipeline stage.
_CHECKPOINT_NAMES = ("run.id", "run.dir", "attempt.number", "attempt.dir")
#: Placeholder names that are allowed in every run spec.
_RUN_NAMES = (*_CHECKPOINT_NAMES, "attempt.resume_from")
#: Placeholder names for the evaluated checkpoint. They are allowed only in evaluations.
CHECKPOINT_NAMES = ("checkpoint", "checkpoint.step", "checkpoint.run_id", "checkpoint.run_dir")
_GANG_NODES = "gang.nodes"
#: Names of the placeholders that stand for a number in the run spec. The name of the placeholder is
#: the dotted path of the number in the run spec.
_NUMBER_NAMES = ("progress.total", "success.step", _GANG_NODES, "gang.gpus_per_node")
#: Default number of nodes of a gang, as in `tasks.spec.run.Gang`.
_DEFAULT_NODES = 1
#: Placeholder name for the address of the gateway to the inference servers.
ROLLOUT_URL = "rollout.url"
#: Placeholder name for the addresses of the inference engines, separated by commas.
ROLLOUT_ENGINES = "rollout.engines"

#: Prefix of the placeholder names whose values differ for each inference server.
SERVER = "server."
#: Prefix of the placeholder names whose values come from an earlier stage of a pipeline.
STAGE = "stage."
#: Placeholder names for the properties of one inference server. They are allowed only in the
#: component `rollout`.
_SERVER_NAMES = tuple(f"{SERVER}{name}" for name in ("port", "host", "rank", "node", "group"))
#: Last part of `${stage.NAME.checkpoint}`: the last complete checkpoint of an earlier stage.
CHECKPOINT = "checkpoint"
#: Last part of `${stage.NAME.run_dir}`: the directory of an earlier stage's run.
RUN_DIR = "run_dir"
#: Last part of `${stage.NAME.run_id}`: the id of an earlier stage's run.
RUN_ID = "run_id"
#: Last part of `${stage.NAME.result}`: the JSON result of an earlier stage. The stage must be
#: a step: a Python function or a command.
RESULT = "result"
#: Last part of `${stage.NAME.state}`: the state of an earlier stage, such as `completed`.
STATE = "state"
#: Last part of `${stage.NAME.results}`: the JSON results of all steps of an earlier matrix.
RESULTS = "results"
#: The word `best` in `${stage.NAME.best.KEY}`. The placeholder stands for the value KEY of the best
#: run or step of an earlier matrix.
BEST = "best"
#: The word `point` in `${stage.NAME.best.point.KEY}`. The placeholder stands for the value of the
#: matrix key KEY in the best run or step.
POINT = "point"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A placeholder in a spec, and the text of the spec that contains the placeholder."""

    #: Dotted path of the text in the spec, such as `components.trainer.command`.
    path: str
    #: Name in the placeholder, or None if the closing `}` is missing.
    name: str | None
    #: Kind of the text that contains the placeholder.
    kind: Kind

    def __str__(self) -> str:
        return f"${{{self.name}}}"


def find_names(text: str) -> Iterator[str | None]:
    """Yield the name of each placeholder in a text, or None if its closing `}` is missing."""
    return (match.group(1) for match in _TOKEN.finditer(text) if match.group(0) != "$${")


def has_placeholders(text: str) -> bool:
    """Return True if a text contains a placeholder. The escaped form `$${` does not count."""
    return any(True for _ in find_names(text))


def substitute(
    text: str,
    value_of: Callable[[str], str],
    *,
    is_deferred: Callable[[str], bool] | None = None,
) -> str:
    """Return the text with each `${name}` replaced by its value, and each `$${` by a plain `${`.

    A `${` without a closing `}` stays unchanged; `find_placeholder_faults` reports it.

    Args:
        text: Text that may contain placeholders.
        value_of: Function that returns the value of a placeholder name.
        is_deferred: Function that returns True for names that another program replaces later.
            Placeholders with these names stay unchanged. With this argument, each `$${`
            stays unchanged, too.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group(0) if is_deferred else "${"
        return match.group(0) if is_deferred and is_deferred(name) else value_of(name)

    return _TOKEN.sub(replace, text)


def rewrite_texts(data: object, change: Change) -> object:
    """Apply a function to each text that may contain placeholders, and return the new run spec.

    All other values of the result are the same objects as in `data`. Only the keys in `_PLACES` are
    searched. Otherwise, the search would never end for a YAML mapping that contains itself.
    """
    return _rewrite_node(data, _PLACES, "", change)


def _rewrite_node(node: object, places: object, path: str, change: Change) -> object:
    """Apply a function to the texts in a part of a run spec, and return the changed part.

    Args:
        node: The part of the spec.
        places: The part of `_PLACES` that describes `node`.
        path: Dotted path of `node` in the spec.
        change: Function that returns the new text.
    """
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
    """Return all placeholders in a run spec, in the order of the file."""
    uses: list[Use] = []

    def collect(path: str, text: str, kind: Kind) -> str:
        uses.extend(Use(path=path, name=name, kind=kind) for name in find_names(text))
        return text

    rewrite_texts(data, collect)
    return uses


def list_known_names(data: object) -> frozenset[str]:
    """Return all placeholder names that are allowed in a run spec.

    These are:

    - fixed names such as `run.id`
    - `NAME.port` for each component NAME, and `NAME.ports.OTHER` for each further port
    - names of numbers such as `progress.total`, see `find_numbers`
    """
    names = {*_RUN_NAMES, *find_numbers(data)}
    for component, keys in mapping_or_empty(mapping_or_empty(data).get("components")).items():
        names.add(f"{component}.port")
        if component == "rollout":
            names.update((ROLLOUT_URL, ROLLOUT_ENGINES))
        ports = mapping_or_empty(keys).get("ports")
        if isinstance(ports, list | tuple):
            names.update(f"{component}.ports.{port}" for port in ports)
    return frozenset(names)


def find_numbers(data: object) -> dict[str, int]:
    """Return the values of the placeholders that stand for numbers, such as `${gang.nodes}`.

    The values are taken from the run spec. The keys of the result are `progress.total`,
    `success.step`, `gang.nodes` and `gang.gpus_per_node`. Numbers that are not in the spec are left
    out. But if the spec has a `gang` without `nodes`, the value of `gang.nodes` is 1.
    """
    numbers = {}
    for name in _NUMBER_NAMES:
        section, _, key = name.partition(".")
        keys = mapping_or_empty(mapping_or_empty(data).get(section))
        default = _DEFAULT_NODES if name == _GANG_NODES and keys else None
        number = keys.get(key, default)
        if isinstance(number, int) and not isinstance(number, bool):
            numbers[name] = number
    return numbers


def fill_in_run(data: object, value_of: Callable[[str], str]) -> object:
    """Return a run spec in which placeholders are replaced by values.

    - Placeholders of evaluations and `${server.NAME}` stay unchanged, because their values are not
      known yet.
    - In a regular expression of a probe, values are escaped.
    - A command argument that is only `${rollout.engines}` becomes one argument for each engine.
      This fits an option with `nargs="+"`.

    Args:
        data: The run spec as plain data.
        value_of: Function that returns the value of a placeholder name.
    """

    def change(_path: str, text: str, kind: Kind) -> str | list[str]:
        if kind is Kind.EVALUATION:
            return text
        if kind is Kind.WORD and text == f"${{{ROLLOUT_ENGINES}}}":
            return value_of(ROLLOUT_ENGINES).split(",")
        escape = re.escape if kind is Kind.PATTERN else str
        is_deferred = (lambda name: name.startswith(SERVER)) if kind is Kind.FLEET else None
        return substitute(text, lambda name: escape(value_of(name)), is_deferred=is_deferred)

    return rewrite_texts(data, change)


def fill_in_stages(written: object, value_of: Callable[[str, str], str]) -> object:
    """Replace the placeholders `${stage.NAME.KEY}` in a stage's run spec. Return the new run spec.

    In a regular expression, values are escaped. A `${` in a value is plain text, and not a
    placeholder.

    Args:
        written: The run spec as plain data.
        value_of: Function that receives the name of a stage and a key, and returns the value.
    """

    def change(_path: str, text: str, kind: Kind) -> str:
        def escaped_value(name: str) -> str:
            stage, _, key = name.removeprefix(STAGE).partition(".")
            value = value_of(stage, key)
            return re.escape(value) if kind is Kind.PATTERN else value.replace("${", "$${")

        return substitute(text, escaped_value, is_deferred=lambda name: not name.startswith(STAGE))

    return rewrite_texts(written, change)


def fill_in_checkpoint(data: object, values: Mapping[str, str]) -> Any:
    """Replace the checkpoint's placeholders in an evaluation's run spec. Return the new run spec.

    A `${` in a value is plain text, and not a placeholder. All other placeholders stay unchanged.

    Args:
        data: The run spec as plain data.
        values: Mapping from each name in `CHECKPOINT_NAMES` to its value.
    """

    def change(_path: str, text: str, _kind: Kind) -> str:
        return substitute(
            text,
            lambda name: values[name].replace("${", "$${"),
            is_deferred=lambda name: name not in values,
        )

    return rewrite_texts(data, change)


def find_placeholder_faults(data: object) -> tuple[Fault, ...]:
    """Check the placeholders in a run spec. Return a fault for each unknown name or missing `}`."""
    # A wrong value of `progress.total` has a fault at this key. A second fault at
    # `${progress.total}` would be misleading, so treat the placeholder as known.
    run_names = sorted({*list_known_names(data), *_find_written_numbers(data)})
    names_by_kind = {
        Kind.FLEET: [*run_names, *_SERVER_NAMES],
        Kind.EVALUATION: [*CHECKPOINT_NAMES, *_CHECKPOINT_NAMES],
    }
    return _find_unknown_name_faults(
        (use, names_by_kind.get(use.kind, run_names)) for use in find_uses(data)
    )


def _find_written_numbers(data: object) -> Iterator[str]:
    """Yield the names in `_NUMBER_NAMES` whose key is in a run spec, even with a wrong value."""
    for name in _NUMBER_NAMES:
        section, _, key = name.partition(".")
        keys = mapping_or_empty(data).get(section)
        has_wrong_section = keys is not None and not isinstance(keys, Mapping)
        if has_wrong_section or mapping_or_empty(keys).get(key) is not None:
            yield name


def find_unknown_names(checkpoint: object, path: str) -> tuple[Fault, ...]:
    """Return a fault for each unknown placeholder in the `checkpoint` of a stage.

    Args:
        checkpoint: Path or pattern of the checkpoint. A value that is not text is not checked.
        path: Dotted path of `checkpoint` in the pipeline spec, for the faults.
    """
    names = find_names(checkpoint) if isinstance(checkpoint, str) else ()
    uses = (Use(path=path, name=name, kind=Kind.TEXT) for name in names if name is not None)
    return _find_unknown_name_faults((use, _CHECKPOINT_NAMES) for use in uses)


def check_stage_names(written: object, known_names: Mapping[str, bool]) -> None:
    """Check that each placeholder `${stage.NAME.KEY}` in a run spec will have a value.

    Args:
        written: The run spec of a stage.
        known_names: Mapping from the placeholder names of earlier stages, such as
            `stage.sft.run_id`, to True if the placeholder can get a value, and to False if not. A
            name with a dot at the end stands for all names that begin with this name.

    Raises:
        InvalidSpec: A name is unknown or will have no value.
    """
    check_stage_uses(find_uses(written), known_names)


def check_stage_uses(uses: Iterable[Use], known_names: Mapping[str, bool]) -> None:
    """Check that each placeholder `${stage.NAME.KEY}` in `uses` will have a value.

    Args:
        uses: The placeholders. Placeholders with other names are not checked.
        known_names: Placeholder names of earlier stages. See `check_stage_names`.

    Raises:
        InvalidSpec: A name is unknown or will have no value.
    """
    prefixes = tuple(name for name in known_names if name.endswith("."))
    uses = [
        use
        for use in uses
        if (use.name or "").startswith(STAGE) and not (use.name or "").startswith(prefixes)
    ]
    problem = (
        "the placeholder `{}` will have no value, because no component of the stage {} has the key "
        "`checkpoints`"
    )
    remedy = "write `checkpoints: FOLDER` in the component, or `checkpoint: PATTERN` in the stage"
    without_value = [
        Fault(
            path=use.path,
            problem=problem.format(use, (use.name or "").split(".")[1]),
            remedy=remedy,
        )
        for use in uses
        if not known_names.get(use.name or "", True)
    ]
    names = [name for name in known_names if not name.endswith(".")]
    unknown = _find_unknown_name_faults((use, names) for use in uses)
    if faults := (*unknown, *dict.fromkeys(without_value)):
        raise InvalidSpec(faults)


def _find_unknown_name_faults(uses: Iterable[tuple[Use, Sequence[str]]]) -> tuple[Fault, ...]:
    """Return a fault for each placeholder whose name is not in a list of allowed names.

    Args:
        uses: Pairs of a placeholder and the list of names that are allowed for this placeholder.
    """
    faults = (
        _make_unknown_name_fault(use, known_names)
        for use, known_names in uses
        if use.name not in known_names
    )
    return tuple(dict.fromkeys(faults))


def _make_unknown_name_fault(use: Use, known_names: Sequence[str]) -> Fault:
    """Return the fault for a placeholder with an unknown name or without a closing `}`.

    Args:
        use: The placeholder.
        known_names: Names that are allowed in the text with the placeholder.
    """
    if use.name is None:
        remedy = "add the `}`, or write `$${` if the text should contain `${`"
        problem = "a placeholder begins with `${`, but has no closing `}`"
        return Fault(path=use.path, problem=problem, remedy=remedy)
    if use.name in _NUMBER_NAMES:
        section, _, key = use.name.partition(".")
        problem = f"the placeholder `{use}` has no value, because the spec has no key `{use.name}`"
        remedy = f"write `{section}: {{{key}: NUMBER}}`, or leave out the placeholder"
        return Fault(path=use.path, problem=problem, remedy=remedy)
    shell = f"for a variable of the shell, write `$${{{use.name}}}`"
    near = suggest_name(use, [f"${{{name}}}" for name in known_names])
    remedy = near or f"{shell}; known names: {', '.join(known_names) or 'none'}"
    return Fault(path=use.path, problem=f"unknown name `{use}`", remedy=remedy)


def mapping_or_empty(value: object) -> Mapping[Any, Any]:
    """Return the value if it is a mapping, otherwise an empty mapping.

    Use this function for data that is not validated yet. Values of the wrong type are reported
    later, when the data is validated.
    """
    return value if isinstance(value, Mapping) else {}


def join_path(path: str, key: object) -> str:
    """Return a dotted path with a key or a list index appended. The path may be empty."""
    return f"{path}.{key}" if path else str(key)
