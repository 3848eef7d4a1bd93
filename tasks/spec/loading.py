"""Load run specs, apply `--set a.b=c`, replace their placeholders, and write them as YAML.

Muster reads YAML more strictly than PyYAML does, so that no value is silently misunderstood:

- A key that is written twice is a fault. A date instead of a text is a fault, too.
- A key is always a text: the key `on` is not read as the value true.
- `022`, `0x10`, `1_000` and `12:30` are texts.
- A number keeps its original spelling.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tasks.spec import placeholders
from tasks.spec.component import ComponentsByName
from tasks.spec.data_inputs import drop_invalid_inputs
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.evaluations import build_evaluation_spec
from tasks.spec.formatting import format_count
from tasks.spec.ownership import find_folder_fault, find_marker_fault, is_present, warn_ignored
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.run import RunSpec
from tasks.spec.secrets import mask_env, mask_nested, mask_text
from tasks.spec.spellings import Spelling, list_spellings, quote_spellings
from tasks.spec.standard_input import STANDARD_INPUT
from tasks.spec.start_from import find_start_faults
from tasks.spec.step import rename_path
from tasks.spec.values import Document, WrittenFloat, describe_value

#: Matches a number with a decimal point in the notation of YAML 1.1.
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.[0-9]+(?:[eE][-+][0-9]+)?)")
#: Matches infinity and NaN in the notation of YAML.
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
#: Matches a decimal integer without leading zeros.
_INT = re.compile(r"0|-?[1-9][0-9]*")

#: Prefix in the names of YAML's own types, such as `tag:yaml.org,2002:int`.
_TAG = "tag:yaml.org,2002:"
#: YAML types that depend on the spelling of a value, such as `on` or `1`. The keys of mappings are
#: always read as text, even if they have such a spelling.
_VALUE_TAGS = frozenset(f"{_TAG}{name}" for name in ("bool", "int", "float", "null", "timestamp"))


class _Loader(yaml.SafeLoader):
    """YAML loader that reads only decimal numbers as numbers, and rejects duplicate keys.

    PyYAML's own SafeLoader silently uses the last value of a duplicate key.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Return the root node of the only document in a file, or None if the file is empty.

        Empty documents are ignored, so a file may end with `---`.

        Raises:
            ComposerError: The file has several documents with content.
        """
        # The parser methods of PyYAML that are called below have no type annotations.
        events: Any = self
        document: yaml.Node | None = None
        while not self.check_event(yaml.StreamEndEvent):
            if self.check_event(yaml.StreamStartEvent):
                events.get_event()
                continue
            begin = events.peek_event().start_mark
            node = self.compose_document()
            if isinstance(node, yaml.ScalarNode) and not node.value and node.style is None:
                continue
            if document is not None:
                problem = (
                    "the file must contain a single YAML document, but another document begins here"
                )
                raise yaml.composer.ComposerError(None, None, problem, begin)
            document = node
        return document

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the YAML node of a mapping. Each key is a text with its original spelling.

        By default, YAML would read a key such as `on` as a Boolean.

        Raises:
            ComposerError: The mapping contains the same key twice.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    problem = f"the key {key.value} is already in line {lines[key.value]}"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
                if key.tag in _VALUE_TAGS:
                    key.tag = f"{_TAG}str"
        return node


# Give `_Loader` its own dict of resolvers. Other libraries in this process use the dict of
# SafeLoader, so it must not be changed.
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, rule) for tag, rule in rules if tag not in (f"{_TAG}int", f"{_TAG}float")]
    for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"(?:{_INT.pattern})$"), list("-0123456789"))
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(f"(?:{_FLOAT.pattern}|{_NO_NUMBER.pattern})$"), list("-+.0123456789")
)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    """Return the number in a YAML node as a float that also stores its original spelling."""
    return WrittenFloat.of(node.value, loader.construct_yaml_float(node))


_Loader.add_constructor(f"{_TAG}float", _construct_float)


def name_source(path: Path) -> str:
    """Return the name of a spec file for messages: its path, or `standard input`."""
    return "standard input" if path == STANDARD_INPUT else str(path)


def locate_spec(path: Path) -> Path:
    """Return the absolute path of a spec file.

    For standard input, the result is the path of an imaginary file in the current directory, so
    that relative paths in the spec start at the current directory.
    """
    return Path.cwd() / "-" if path == STANDARD_INPUT else make_absolute(path)


def make_absolute(path: Path) -> Path:
    """Return the absolute path of a file or folder, without the parts `..`.

    Symbolic links before the last `..` are replaced by their targets. All later symbolic links are
    kept.
    """
    parts = path.absolute().parts
    if ".." not in parts:
        return path.absolute()
    end = len(parts) - parts[::-1].index("..")
    return Path(*parts[:end]).resolve().joinpath(*parts[end:])


def read_text(path: Path) -> str:
    """Return the text of a spec file or of standard input.

    Raises:
        InvalidSpec: The file is unreadable or not UTF-8.
    """
    try:
        content = sys.stdin.buffer.read() if path == STANDARD_INPUT else path.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
        remedy = ""
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        problem = f"the file must be UTF-8, found byte {byte:#04x} at offset {error.start}"
        remedy = "save the file as UTF-8"
    raise InvalidSpec((Fault(path="", problem=problem, remedy=remedy),), name_source(path))


def parse_yaml(text: str, source: str) -> object:
    """Return the plain data of a YAML text.

    Args:
        text: The text of the file.
        source: Name of the file for error messages.

    Raises:
        InvalidSpec: The text is not valid YAML. The error contains the line and the column.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        fault = _make_syntax_fault(error, text)
    except RecursionError:
        fault = Fault(path="", problem="the lists and mappings of the file are nested too deeply")
    except (ValueError, TypeError, AttributeError) as error:
        # PyYAML raises these errors for impossible values. Examples are the date 31st of February,
        # or `!!float` before a word.
        fault = Fault(path="", problem=f"a value cannot be read: {error}")
    raise InvalidSpec((fault,), source)


def read_spellings(text: str, parent_path: str = "") -> dict[str, Spelling]:
    """Return the spelling of each unquoted value in a YAML text.

    The keys of the result are the dotted paths of the values in the spec.

    Args:
        text: Valid YAML.
        parent_path: Dotted path of the YAML text in the spec, or "" for the whole spec.
    """
    spellings = list_spellings(_Loader(text).get_single_node())
    if not parent_path:
        return spellings
    return {f"{parent_path}.{path}".rstrip("."): item for path, item in spellings.items()}


def read_override_spellings(overrides: Iterable[str]) -> dict[str, Spelling]:
    """Return the spelling of each unquoted value in overrides of the form `a.b=VALUE`.

    The keys of the result are the paths, such as `a.b`.

    A faulty override is ignored.
    """
    spellings: dict[str, Spelling] = {}
    for override in overrides:
        path, _, text = override.partition("=")
        with suppress(yaml.YAMLError, RecursionError):
            spellings |= read_spellings(text, path.strip())
    return spellings


def _make_syntax_fault(error: yaml.YAMLError, text: str) -> Fault:
    """Return the fault for a syntax error in a YAML text, with line and column if possible."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return Fault(path="", problem=f"not valid YAML: {' '.join(str(error).split())}")
    line = "".join(text.splitlines()[mark.line : mark.line + 1])
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    problem = f"line {mark.line + 1}, column {mark.column + 1}: {', '.join(filter(None, parts))}"
    is_bare = re.search(r"(?<![\"'\w])\$\{", line) is not None
    remedy = 'write a placeholder in quotes: "${api.port}"' if is_bare else ""
    return Fault(path="", problem=problem, remedy=remedy)


def read_override(override: str) -> tuple[str, object]:
    """Return the dotted path and the value of an override `a.b=VALUE`. VALUE is YAML.

    Raises:
        InvalidSpec: The override has no path, or its value is not valid YAML.
    """
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        problem = "has no key before `=`" if equals else "has no `=`"
        raise _make_override_error(
            "", path or "=", problem, "write for example --set success.step=20"
        )
    try:
        return path, parse_yaml(text, path)
    except InvalidSpec as error:
        raise _make_override_error(path, path, str(error.faults[0])) from None


def apply_value(data: dict[str, Any], path: str, value: object) -> None:
    """Set a value in a spec. Missing mappings on the path of the value are created.

    Args:
        data: The spec as plain data. It is changed.
        path: Dotted path of the value. A part of the path may be the index of a list item, as in
            `components.trainer.command.3`.
        value: The new value.

    Raises:
        InvalidSpec: A part of the path leads to a value that is no mapping or list, or to a missing
            list item. The message does not contain the new value, because it may be a secret.
    """
    parts = path.split(".")
    node: Any = data
    for depth, part in enumerate(parts):
        current_path = ".".join(parts[: depth + 1])
        parent_path = ".".join(parts[:depth])
        key: str | int = part
        if isinstance(node, list):
            if not (part.isdecimal() and part.isascii() and int(part) < len(node)):
                items = format_count(len(node), "item")
                problem = f"`{parent_path}` is a list of {items} and has no item {part}"
                remedy = "the first item has the index 0"
                raise _make_override_error(current_path, path, problem, remedy)
            key = int(part)
        elif not isinstance(node, dict):
            problem = f"`{parent_path}` is {describe_value(node)}, which has no keys"
            raise _make_override_error(current_path, path, problem, f"set `{parent_path}` itself")
        if depth == len(parts) - 1:
            node[key] = value
        elif isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[key]


def _make_override_error(path: str, written: str, problem: str, remedy: str = "") -> InvalidSpec:
    """Return the error for a faulty `--set` option of the command line.

    Args:
        path: Dotted path of the fault in the spec, or an empty string.
        written: Path of the override as the user wrote it, without the value (perhaps a secret).
        problem: Description of the mistake.
        remedy: Correct form, or an empty string.
    """
    fault = Fault(path=path, problem=f"--set {written}: {problem}", remedy=remedy)
    return InvalidSpec((fault,))


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Return the run spec of a YAML file.

    Args:
        path: The file, or STANDARD_INPUT.
        overrides: Changes of the form `a.b=c`. They are applied in order.

    Raises:
        InvalidSpec: The file or an override has faults. The error lists all faults.
    """
    source = name_source(path)
    text = read_text(path)
    data = parse_yaml(text, source)
    with quote_spellings(lambda: read_spellings(text)):
        return parse_spec(data, overrides, source)


def load_resolved(path: Path) -> RunSpec:
    """Return the run spec that an attempt stored in its directory.

    The placeholders in this spec are already replaced, so `${` is plain text.

    Raises:
        InvalidSpec: The file has faults. The error lists all faults.
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
        from_form: True if the data may come from the web form of the Prefect UI. For an omitted
            component, the web form sends null.

    Raises:
        InvalidSpec: The data, a placeholder or an override has faults. The error lists all faults.
    """
    written = copy_as_dict(data, source)
    faults: list[Fault] = []
    for override in overrides:
        with collect_faults(faults):
            apply_value(written, *read_override(override))
    spec: RunSpec | None = None
    with collect_faults(faults), quote_spellings(lambda: read_override_spellings(overrides)):
        spec = RunSpec.model_validate(written)
    if not from_form:
        faults += _find_empty_components(written)
    # A user may omit components in the web form of the Prefect UI. `written` contains null for an
    # omitted component, and `spec` lacks the component. So check the placeholders of `spec`: a
    # placeholder such as `${NAME.port}` of an omitted component is then a fault.
    faults += placeholders.find_placeholder_faults(
        spec.written() if from_form and spec else written
    )
    faults += find_start_faults(written)
    if spec is not None and not faults:
        faults += _find_evaluation_faults(written)
    if spec is None or faults:
        raise InvalidSpec(tuple(dict.fromkeys(faults)), source)
    return spec


def _find_evaluation_faults(written: Mapping[str, Any]) -> list[Fault]:
    """Return the faults in the run specs that are created for the evaluations of a run.

    Args:
        written: The run spec as plain data, after all other checks have found no faults.
    """
    faults: list[Fault] = []
    # The checkpoint is not known yet, so use any text as its value for the validation.
    values = dict.fromkeys(placeholders.CHECKPOINT_NAMES, "checkpoint")
    for name in mapping_or_empty(written.get("evals")):
        try:
            RunSpec.model_validate(build_evaluation_spec(written, name, values))
        except InvalidSpec as error:
            for fault in error.faults:
                faults.append(replace(fault, path=f"evals.{name}.{rename_path(fault.path)}"))
    return faults


def dump_spec(spec: RunSpec, secrets: Collection[str] = ()) -> str:
    """Return a run spec as YAML text, without keys that the user did not write.

    Secrets are masked. Apart from the secrets, loading the text gives the same spec again.

    Args:
        spec: The spec.
        secrets: Values to mask, in addition to the secrets of the spec itself.
    """
    # A value that consists of a placeholder, such as `${run.id}`, is no secret. Masking such a
    # value would also mask the placeholder in all other texts.
    masked_values = {
        secret
        for secret in spec.secrets | frozenset(secrets)
        if placeholders.substitute(secret, lambda name: "")
    }
    written = _mask_secrets(spec.written(), masked_values)
    # Do not wrap long lines, because a command on several lines is hard to copy.
    return str(yaml.safe_dump(written, sort_keys=False, default_flow_style=None, width=2**31))


def copy_as_dict(data: object, source: str) -> dict[str, Any]:
    """Return a copy of a spec's data as a dict.

    Args:
        data: A mapping, or a validated spec.
        source: Name of the input for error messages.

    Raises:
        InvalidSpec: The data is not a mapping.
    """
    written = data.written() if isinstance(data, Document) else copy.deepcopy(data)
    if not isinstance(written, dict):
        problem = f"must be a mapping, found {describe_value(written)}"
        fault = Fault(path="", problem=problem, remedy="write keys and values, as in name: demo")
        raise InvalidSpec((fault,), source)
    return written


def _find_empty_components(written: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each component without a value in a spec file.

    The validation accepts components without a value, because the form in the Prefect UI sends null
    for an omitted component. In a file, a component without a value is a mistake.
    """
    for name, component in mapping_or_empty(written.get("components")).items():
        if component is None and name in ComponentsByName.offered:
            remedy = f"write `{name}: {{KEY: VALUE}}`, or leave out {name}"
            problem = f"must be a mapping, found {describe_value(component)}"
            yield Fault(path=f"components.{name}", problem=problem, remedy=remedy)


def _mask_secrets(written: dict[str, Any], secrets: Collection[str]) -> dict[str, Any]:
    """Return the data of a run spec in which secrets are masked.

    Args:
        written: The run spec as plain data. Each key `env` in it gets a new mapping with masked
            values.
        secrets: Values to mask in every text of the spec.
    """
    evaluations = mapping_or_empty(written.get("evals")).values()
    for section in (written, *written["components"].values(), *evaluations):
        if "env" in section:
            section["env"] = mask_env(section["env"])
    texts: dict[str, Any] = mask_nested(written, lambda text: mask_text(text, secrets))
    return texts


#: Names of files and folders that mark the root of a project.
_ROOT_MARKERS = (".git", "pyproject.toml")


def find_project_root(file: Path) -> Path:
    """Return the root folder of the project that contains a file.

    The root is the nearest folder above the file with a `.git` or `pyproject.toml`. If there is
    none, the root is the folder of the file. For standard input, the search starts in the current
    directory.

    For security, a `.git` or `pyproject.toml` of another user is ignored. The search also ends at a
    folder in which another user could have created these files.

    The root is the working directory of a run's flow process. Relative paths in a spec start there.
    """
    folders = locate_spec(file).parents
    for folder in folders:
        try:
            fault = find_folder_fault(folder)
        except OSError:
            # The folder does not exist: the caller may pass the path of a file that will be created
            # later. No user can have put a file into this folder, so continue with its parent.
            continue
        if fault:
            if folder is not folders[0]:
                _warn_about_markers(folder, fault)
            break
        if is_project_root(folder):
            return folder
    return folders[0]


def is_project_root(folder: Path) -> bool:
    """Return True if a folder is the root of a project.

    The folder must contain a `.git` or `pyproject.toml` that no other user could have created.
    """
    return any(_is_trusted_marker(folder / marker) for marker in _ROOT_MARKERS)


def _is_trusted_marker(marker: Path) -> bool:
    """Return True if a `.git` or `pyproject.toml` exists and another user cannot have created it.

    Args:
        marker: Path of the file or folder. If it exists and is not trusted, a warning is logged.
    """
    try:
        fault = find_marker_fault(marker)
    except OSError:
        # The `.git` or `pyproject.toml` does not exist, or is a symbolic link without a target.
        return False
    if fault:
        warn_ignored(marker, fault)
    return not fault


def _warn_about_markers(folder: Path, fault: str) -> None:
    """Log a warning for each ignored `.git` and `pyproject.toml` in an untrusted folder.

    Args:
        folder: The untrusted folder, in which another user could have created files.
        fault: Reason why the folder is not trusted.
    """
    for marker in _ROOT_MARKERS:
        if is_present(folder / marker):
            warn_ignored(folder / marker, fault)


def list_required_ports(spec: RunSpec) -> tuple[str, ...]:
    """Return the names of the ports to reserve for a run, in the order of the components.

    The ports are:

    - `NAME.port` of a component, if a placeholder in the spec uses this port
    - `NAME.ports.OTHER` for each name in the key `ports` of a component, even if no placeholder
      uses this port
    - `rollout.port`, the port of the gateway, if the run has inference servers
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
    """Return the spec with placeholders replaced by values, and with absolute paths as `cwd`.

    Each `$${` becomes a plain `${`, so do not resolve the result a second time. The placeholders
    `${server.NAME}` of inference servers are not replaced.

    Args:
        spec: The spec as loaded. It has no unknown placeholder names.
        names: Mapping from each placeholder name in the spec to its value. Names of numbers, such
            as `progress.total`, may be missing: these values are read from the spec.
        root: Absolute path of the project's root.

    Raises:
        KeyError: A placeholder name has no value.
        InvalidSpec: A value does not fit its place, such as a `tcp` address without a port.
    """
    written = spec.written()
    values = {name: str(number) for name, number in placeholders.find_numbers(written).items()}
    values.update(names)

    filled: Any = placeholders.fill_in_run(written, values.__getitem__)
    drop_invalid_inputs(filled)
    filled["cwd"] = str(root / filled.get("cwd", "."))
    for part in filled["components"].values():
        if part.get("cwd") is not None:
            part["cwd"] = str(root / part["cwd"])
    return RunSpec.model_validate(filled)


@contextmanager
def collect_faults(faults: list[Fault], parent_path: str = "") -> Iterator[None]:
    """Catch an `InvalidSpec` that is raised inside the context, and add its faults to a list.

    Args:
        faults: List to which the faults are added.
        parent_path: Dotted path in the spec that is put before the path of each fault.
    """
    try:
        yield
    except InvalidSpec as error:
        for fault in error.faults:
            path = ".".join(filter(None, [parent_path, fault.path]))
            faults.append(replace(fault, path=path))
