"""Load run specs, apply `--set a.b=c`, fill in their placeholders, and write them as YAML.

YAML is read more strictly than by plain PyYAML, so that no value is silently misunderstood:

- A key that is written twice is a fault, and so is a date.
- `022`, `0x10`, `1_000` and `12:30` are texts.
- A number keeps its original spelling.
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
from tasks.spec.component import ComponentsByName
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.ownership import folder_fault, is_present, marker_fault, say_ignored
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.run import RunSpec
from tasks.spec.secrets import mask_env, mask_nested, mask_text
from tasks.spec.values import Document, WrittenFloat, describe_value

_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.[0-9]+(?:[eE][-+][0-9]+)?)")
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_INT = re.compile(r"0|-?[1-9][0-9]*")

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """SafeLoader that accepts only plain decimal numbers and refuses duplicate keys.

    Plain PyYAML silently keeps the last value of a duplicate key.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    problem = f"{key.value} is written twice, first in line {lines[key.value]}"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return node


# Replace the table instead of changing it: all programs in the process share SafeLoader's table.
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
    """Return the text of a file. Raises: InvalidSpec, if it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        problem = f"it can't be read: {error.strerror}"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
    raise InvalidSpec((Fault(path="", problem=problem),), str(path))


def parse_yaml(text: str, source: str) -> object:
    """Return the plain data of a YAML text. Raises: InvalidSpec, with the syntax error."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        fault = _syntax_fault(error, text)
    except RecursionError:
        fault = Fault(path="", problem="it is nested too deeply")
    except (ValueError, TypeError, AttributeError) as error:
        # PyYAML's constructors raise these for invalid values: the 31st of February, !!float on a
        # word.
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
    """Return the path and the value of `a.b=VALUE`; VALUE is YAML. Raises: InvalidSpec."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        problem = "has no key before `=`" if equals else "has no `=`"
        raise _bad_override("", path or "=", problem, "write --set success.step=20")
    try:
        return path, parse_yaml(text, path)
    except InvalidSpec as error:
        raise _bad_override(path, path, str(error.faults[0])) from None


def apply_value(data: dict[str, Any], path: str, value: object) -> None:
    """Set a value in a spec. Missing mappings on its path are created.

    Args:
        data: The spec as plain data. It is changed.
        path: Dotted path of the value. In a list, a part of the path is an index, as in
            `components.trainer.command.3`.
        value: The new value.

    Raises:
        InvalidSpec: The path is impossible. The message does not contain the value, which may be a
            secret.
    """
    parts = path.split(".")
    node: Any = data
    for depth, part in enumerate(parts):
        current_path = ".".join(parts[: depth + 1])
        parent_path = ".".join(parts[:depth])
        key: str | int = part
        if isinstance(node, list):
            if not (part.isdecimal() and part.isascii() and int(part) < len(node)):
                problem = f"`{parent_path}` is a list of {len(node)} and has no item {part}"
                raise _bad_override(current_path, path, problem, "count from 0")
            key = int(part)
        elif not isinstance(node, dict):
            problem = f"`{parent_path}` holds {describe_value(node)}, which has no keys"
            raise _bad_override(current_path, path, problem, f"set `{parent_path}` itself")
        if depth == len(parts) - 1:
            node[key] = value
        elif isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[key]


def _bad_override(path: str, written: str, problem: str, remedy: str = "") -> InvalidSpec:
    fault = Fault(path=path, problem=f"--set {written}: {problem}", remedy=remedy)
    return InvalidSpec((fault,))


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Load a run spec from a YAML file.

    Args:
        path: The file.
        overrides: Changes of the form `a.b=c`. They are applied in order.

    Raises:
        InvalidSpec: With all faults of the file and of the overrides.
    """
    return parse_spec(parse_yaml(read_text(path), str(path)), overrides, str(path))


def load_resolved(path: Path) -> RunSpec:
    """Load the spec of an attempt, whose placeholders are already filled in.

    A `${` in it is literal text.

    Raises:
        InvalidSpec: With all faults of the file.
    """
    return RunSpec.model_validate(copy_as_dict(parse_yaml(read_text(path), str(path)), str(path)))


def parse_spec(
    data: object,
    overrides: Sequence[str] = (),
    source: str = "the run spec",
    *,
    from_form: bool = False,
) -> RunSpec:
    """Validate plain data, such as the parameter of a flow, as a run spec.

    Args:
        data: A mapping, which is not changed, or a `RunSpec`.
        overrides: Changes of the form `a.b=c`. They are applied in order.
        source: Name of the input for error messages.
        from_form: True if the data may come from the form in the Prefect UI. The form sends null
            for an omitted component.

    Raises:
        InvalidSpec: With all faults of the data, its placeholders and the overrides.
    """
    written = copy_as_dict(data, source)
    faults: list[Fault] = []
    for override in overrides:
        with collect_faults(faults):
            apply_value(written, *read_override(override))
    spec: RunSpec | None = None
    with collect_faults(faults):
        spec = RunSpec.model_validate(written)
    if not from_form:
        faults += _empty_components(written)
    # If the form omits a component, its `${NAME.port}` is an unknown name.
    faults += placeholders.find_placeholder_faults(
        spec.written() if from_form and spec else written
    )
    if spec is None or faults:
        raise InvalidSpec(tuple(dict.fromkeys(faults)), source)
    return spec


def dump_spec(spec: RunSpec, secrets: Collection[str] = ()) -> str:
    """Return the spec as YAML. It loads to an equal spec, except for masked secrets.

    Omitted keys are not written.

    Args:
        spec: The spec.
        secrets: Values to mask, in addition to the secrets of the spec itself.
    """
    written = _mask_secrets(spec.written(), spec.secrets | frozenset(secrets))
    # The width is unlimited, because a command that is broken into lines is hard to copy.
    return str(yaml.safe_dump(written, sort_keys=False, default_flow_style=None, width=2**31))


def copy_as_dict(data: object, source: str) -> dict[str, Any]:
    """Return the data of a spec as a new dict. Raises: InvalidSpec, if they are no mapping."""
    written = data.written() if isinstance(data, Document) else copy.deepcopy(data)
    if not isinstance(written, dict):
        problem = f"must be a mapping, found {describe_value(written)}"
        fault = Fault(path="", problem=problem, remedy="write `name: ...` and so on")
        raise InvalidSpec((fault,), source)
    return written


def _empty_components(written: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each component without a value.

    The form in the Prefect UI sends null for an omitted component, but in a file, an empty
    component is a mistake.
    """
    for name, component in mapping_or_empty(written.get("components")).items():
        if component is None and name in ComponentsByName.offered:
            remedy = f"write {name}: {{key: value}}, or leave it out"
            problem = f"must be a mapping, found {describe_value(component)}"
            yield Fault(path=f"components.{name}", problem=problem, remedy=remedy)


def _mask_secrets(written: dict[str, Any], secrets: Collection[str]) -> dict[str, Any]:
    """Mask secret variables in each `env`, and the given secrets in all texts."""
    for section in (written, *written["components"].values()):
        if "env" in section:
            section["env"] = mask_env(section["env"])
    texts: dict[str, Any] = mask_nested(written, lambda text: mask_text(text, secrets))
    return texts


#: Files and folders that mark the root of a project.
_ROOT_MARKS = (".git", "pyproject.toml")


def find_project_root(file: Path) -> Path:
    """Return the root of the project that a file lies in, absolute.

    The relative paths of a spec start there. The root is the nearest folder above the file that
    holds `.git` or `pyproject.toml`, else the folder of the file. The search ends at a folder that
    belongs to another user, root excepted, or that every user may write to. A mark that belongs to
    another user does not count.

    The process of a run works in the root. For that process the root is the working directory.
    """
    folders = file.absolute().parents
    for folder in folders:
        try:
            fault = folder_fault(folder)
        except OSError:
            # A spec may be named before its folder is there.
            continue
        if fault:
            if folder is not folders[0]:
                _say_ignored_marks(folder, fault)
            break
        if is_project_root(folder):
            return folder
    return folders[0]


def is_project_root(folder: Path) -> bool:
    """Return True if a folder is the root of a project: it holds a mark that may be trusted."""
    return any(_is_trusted_mark(folder / mark) for mark in _ROOT_MARKS)


def _is_trusted_mark(mark: Path) -> bool:
    try:
        fault = marker_fault(mark)
    except OSError:
        # It is not there, or its link leads nowhere.
        return False
    if fault:
        say_ignored(mark, fault)
    return not fault


def _say_ignored_marks(folder: Path, fault: str) -> None:
    for mark in _ROOT_MARKS:
        if is_present(folder / mark):
            say_ignored(folder / mark, fault)


def list_required_ports(spec: RunSpec) -> tuple[str, ...]:
    """Return the names of the ports to reserve for the run, in the order of the components.

    - `NAME.port`, if a placeholder in the spec uses it
    - `NAME.ports.OTHER` for each extra port, even if no placeholder uses it: the program may find
      it in another way
    - `rollout.port` for the gateway of a fleet
    """
    used_names = {use.name for use in placeholders.find_uses(spec.written())}
    ports: list[str] = []
    for name in spec.components:
        component = spec.processes.get(name)
        is_fleet = component is None
        if f"{name}.port" in used_names or is_fleet:
            ports.append(f"{name}.port")
        if component is not None:
            ports += [f"{name}.ports.{port}" for port in component.ports]
    return tuple(dict.fromkeys(ports))


def resolve(spec: RunSpec, names: Mapping[str, str], root: Path) -> RunSpec:
    """Return the spec with its placeholders filled in, and with each `cwd` as an absolute path.

    Each `$${` becomes `${`. Do not call this twice, because the result may contain `${` as literal
    text.

    Args:
        spec: The spec as loaded, without unknown names.
        names: Value of each name that the spec uses, except `progress.total` and `success.step`,
            whose values are in the spec. In a regular expression, a value is escaped.
        root: Absolute path of the project's root.

    Raises:
        KeyError: A name has no value.
        InvalidSpec: A value does not fit its place, such as a `tcp` address without a port.
    """
    written = spec.written()
    values = {
        f"{part}.{key}": str(number) for part, key, number in placeholders.find_step_counts(written)
    }
    values.update(names)

    filled: Any = placeholders.fill_in_run(written, values.__getitem__)
    filled["cwd"] = str(root / filled.get("cwd", "."))
    for part in filled["components"].values():
        if part.get("cwd") is not None:
            part["cwd"] = str(root / part["cwd"])
    return RunSpec.model_validate(filled)


@contextmanager
def collect_faults(faults: list[Fault], below: str = "") -> Iterator[None]:
    """Catch an `InvalidSpec` that is raised within, and add its faults to the list.

    Args:
        faults: List to which the faults are added.
        below: Path in the spec that is put before the paths of the faults.
    """
    try:
        yield
    except InvalidSpec as error:
        for fault in error.faults:
            path = ".".join(filter(None, [below, fault.path]))
            faults.append(replace(fault, path=path))
