"""Reading run specs, changing them by `--set a.b=c`, filling them in, and writing them down again.

YAML is read without its traps: what was written is what is meant, or a fault. Unlike plain PyYAML a
key that is written twice and a date are faults, `022`, `0x10`, `1_000` and `12:30` are texts, and a
number remembers how it was written.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tasks.spec import placeholders
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.placeholders import mapping
from tasks.spec.run import ByName, RunSpec
from tasks.spec.secrets import mask_text, masked, masked_in
from tasks.spec.values import Document, WrittenFloat, shown

_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.[0-9]+(?:[eE][-+][0-9]+)?)")
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_INT = re.compile(r"0|-?[1-9][0-9]*")

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """SafeLoader with plain decimal numbers only, that refuses a key which is written twice: PyYAML
    keeps the last and says nothing."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    said = f"{key.value} is written twice, first in line {lines[key.value]}"
                    raise yaml.composer.ComposerError(None, None, said, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return node


# A table of its own: SafeLoader's is shared by every program in the process.
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, rule) for tag, rule in rules if tag not in (f"{_TAG}int", f"{_TAG}float")]
    for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"(?:{_INT.pattern})$"), list("-0123456789"))
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(f"(?:{_FLOAT.pattern}|{_NO_NUMBER.pattern})$"), list("-+.0123456789")
)


def _written_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return WrittenFloat.of(node.value, loader.construct_yaml_float(node))


_Loader.add_constructor(f"{_TAG}float", _written_float)


def read_text(path: Path) -> str:
    """The text of a file. Raises: InvalidSpec, where it can't be read, or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        problem = f"it can't be read: {error.strerror}"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
    raise InvalidSpec((Fault(path="", problem=problem),), str(path))


def parse(text: str, source: str) -> object:
    """The plain data of a YAML text. Raises: InvalidSpec, with what makes it none."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        fault = _syntax_fault(error, text)
    except RecursionError:
        fault = Fault(path="", problem="it is nested too deeply")
    except (ValueError, TypeError, AttributeError) as error:
        # PyYAML's constructors let these through: the 31st of February, !!float on a word.
        fault = Fault(path="", problem=f"a value cannot be read: {error}")
    raise InvalidSpec((fault,), source)


def _syntax_fault(error: yaml.YAMLError, text: str) -> Fault:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return Fault(path="", problem=f"not YAML: {' '.join(str(error).split())}")
    line = "".join(text.splitlines()[mark.line : mark.line + 1])
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    problem = f"line {mark.line + 1}, column {mark.column + 1}: {', '.join(filter(None, parts))}"
    is_bare = re.search(r"(?<![\"'\w])\$\{", line) is not None
    remedy = 'quote what has a placeholder: "${api.port}"' if is_bare else ""
    return Fault(path="", problem=problem, remedy=remedy)


def read_override(override: str) -> tuple[str, object]:
    """The path and the value of `a.b=VALUE`, where VALUE is YAML. Raises: InvalidSpec."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        problem = "has no key before `=`" if equals else "has no `=`"
        raise _bad_override("", path or "=", problem, "write --set success.step=20")
    try:
        return path, parse(text, path)
    except InvalidSpec as error:
        raise _bad_override(path, path, str(error.faults[0])) from None


def apply_value(data: dict[str, Any], path: str, value: object) -> None:
    """Sets one value in a written spec. Mappings on the way are made where they are missing; an
    item of a list goes by its index (`components.trainer.command.3`).

    Raises: InvalidSpec, which does not tell the value, that may be a secret.
    """
    steps = path.split(".")
    node: Any = data
    for depth, step in enumerate(steps):
        at, above = ".".join(steps[: depth + 1]), ".".join(steps[:depth])
        key: str | int = step
        if isinstance(node, list):
            if not (step.isdecimal() and step.isascii() and int(step) < len(node)):
                problem = f"`{above}` is a list of {len(node)} and has no item {step}"
                raise _bad_override(at, path, problem, "count from 0")
            key = int(step)
        elif not isinstance(node, dict):
            problem = f"`{above}` holds {shown(node)}, which has no keys"
            raise _bad_override(at, path, problem, f"set `{above}` itself")
        if depth == len(steps) - 1:
            node[key] = value
        elif isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[key]


def _bad_override(path: str, written: str, problem: str, remedy: str = "") -> InvalidSpec:
    fault = Fault(path=path, problem=f"--set {written}: {problem}", remedy=remedy)
    return InvalidSpec((fault,))


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run spec of a YAML file, with the overrides, `a.b=c` each, applied in order.

    Raises: InvalidSpec, with every fault of the file and of the overrides.
    """
    return parse_spec(parse(read_text(path), str(path)), overrides, str(path))


def load_resolved(path: Path) -> RunSpec:
    """The spec of an attempt, as `resolve` left it: a `${` in it is a literal one.

    Raises: InvalidSpec.
    """
    return RunSpec.model_validate(as_mapping(parse(read_text(path), str(path)), str(path)))


def parse_spec(
    data: object,
    overrides: Sequence[str] = (),
    source: str = "the run spec",
    *,
    from_form: bool = False,
) -> RunSpec:
    """The run spec that plain data hold, such as a flow's parameter; see `load_spec`.

    Args:
        data: A mapping, which is left as it is, or a `RunSpec`, whose placeholders are checked.
        from_form: They may come from the form in the UI, which leaves a component out by null.

    Raises: InvalidSpec, with every fault of the data and of the overrides.
    """
    written = as_mapping(data, source)
    faults: list[Fault] = []
    for override in overrides:
        with collecting(faults):
            apply_value(written, *read_override(override))
    spec: RunSpec | None = None
    with collecting(faults):
        spec = RunSpec.model_validate(written)
    if not from_form:
        faults += _empty_components(written)
    # What a form has left out has no port either.
    faults += placeholders.faults_in(spec.written() if from_form and spec else written)
    if spec is None or faults:
        raise InvalidSpec(tuple(dict.fromkeys(faults)), source)
    return spec


def spec_as_yaml(spec: RunSpec, secrets: Collection[str] = ()) -> str:
    """The spec as a YAML file that loads to an equal spec but for what is masked; keys left out
    stay out.

    Args:
        secrets: To be masked wherever they stand, as are the spec's own.
    """
    written = _masked(spec.written(), spec.secrets | frozenset(secrets))
    # A folded command is hard to copy.
    return str(yaml.safe_dump(written, sort_keys=False, default_flow_style=None, width=2**31))


def as_mapping(data: object, source: str) -> dict[str, Any]:
    """The data of a whole spec, as a copy. Raises: InvalidSpec."""
    written = data.written() if isinstance(data, Document) else copy.deepcopy(data)
    if not isinstance(written, dict):
        problem = f"must be a mapping, found {shown(written)}"
        fault = Fault(path="", problem=problem, remedy="write `name: ...` and so on")
        raise InvalidSpec((fault,), source)
    return written


def _empty_components(written: Mapping[str, Any]) -> Iterator[Fault]:
    """In a form null leaves a component out; in a file somebody has forgotten what it is."""
    for name, component in mapping(written.get("components")).items():
        if component is None and name in ByName.offered:
            remedy = f"write {name}: {{key: value}}, or leave it out"
            problem = f"must be a mapping, found {shown(component)}"
            yield Fault(path=f"components.{name}", problem=problem, remedy=remedy)


def _masked(written: dict[str, Any], secrets: Collection[str]) -> dict[str, Any]:
    for part in (written, *written["components"].values()):
        if "env" in part:
            part["env"] = masked(part["env"])
    texts: dict[str, Any] = masked_in(written, lambda text: mask_text(text, secrets))
    return texts


#: What lies in the root of a project.
_ROOT_MARKS = (".git", "pyproject.toml")


def project_of(file: Path) -> Path:
    """The root of the project that a file lies in, from which the relative paths of a spec start:
    the nearest folder above with `.git` or `pyproject.toml`, else the file's own; absolute.

    The process of a run works there, so within it the root is the working directory.
    """
    folders = file.absolute().parents
    return next(filter(is_project, folders), folders[0])


def is_project(folder: Path) -> bool:
    """Whether it is the root of a project, and not only a folder."""
    return any((folder / mark).exists() for mark in _ROOT_MARKS)


def ports_needed(spec: RunSpec) -> tuple[str, ...]:
    """The names of the ports to hold for the run, in the order of the components.

    `NAME.port` where some text of the spec uses it, and `NAME.ports.OTHER` for each port listed,
    used or not: the program may find it elsewhere. `rollout.port` is that of a fleet's gateway,
    which listens whether somebody asks it or not.
    """
    used = {use.name for use in placeholders.uses_in(spec.written())}
    needed: list[str] = []
    for name in spec.components:
        component = spec.processes.get(name)
        if f"{name}.port" in used or component is None:
            needed.append(f"{name}.port")
        needed += [f"{name}.ports.{port}" for port in (component.ports if component else ())]
    return tuple(dict.fromkeys(needed))


def resolve(spec: RunSpec, names: Mapping[str, str], root: Path) -> RunSpec:
    """The spec with every placeholder filled in, each `$${` made `${`, and each `cwd` absolute.

    What is filled in is not looked at again, so do not resolve the result a second time.

    Args:
        spec: As loaded, without unknown names.
        names: A value for each name that the spec uses; `progress.total` and `success.step` it
            has itself. In a regular expression a value is matched literally.
        root: Of the project; absolute.

    Raises:
        KeyError: A name has no value.
        InvalidSpec: A value does not fit its place, such as a `tcp` address without a port.
    """
    written = spec.written()
    values = {
        f"{part}.{key}": str(number) for part, key, number in placeholders.numbers_in(written)
    }
    values.update(names)

    filled: Any = placeholders.run_filled_in(written, values.__getitem__)
    filled["cwd"] = str(root / filled.get("cwd", "."))
    for part in filled["components"].values():
        if part.get("cwd") is not None:
            part["cwd"] = str(root / part["cwd"])
    return RunSpec.model_validate(filled)


@contextmanager
def collecting(faults: list[Fault], below: str = "") -> Iterator[None]:
    """Notes the faults of an `InvalidSpec` that is raised within, and goes on behind it.

    Args:
        below: The place in the spec that their paths start from.
    """
    try:
        yield
    except InvalidSpec as error:
        for fault in error.faults:
            path = ".".join(filter(None, [below, fault.path]))
            faults.append(replace(fault, path=path))
