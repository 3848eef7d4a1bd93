"""Reading run specs, and writing them down again."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tasks.spec import placeholders
from tasks.spec.component import ByName
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.overrides import apply_override
from tasks.spec.run import RunSpec
from tasks.spec.secrets import mask_text, masked, secret_values
from tasks.spec.values import shown
from tasks.spec.written_yaml import parse, read_text

_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run spec of a YAML file.

    Args:
        path: The file.
        overrides: `a.b=c` each, applied in order; see `overrides`.

    Raises:
        InvalidSpec: With every fault of the file and of the overrides, in file order.
    """
    data, faults = parse(read_text(path))
    if data is None and faults:
        raise InvalidSpec(faults, str(path))
    return _checked(data, overrides, str(path), faults)


def parse_spec(
    data: object,
    overrides: Sequence[str] = (),
    source: str = "the run spec",
    *,
    from_form: bool = False,
) -> RunSpec:
    """The run spec that plain data hold, such as a flow's parameter.

    Args:
        data: A mapping, which is left as it is, or a `RunSpec`, whose placeholders and features
            are then checked too.
        overrides: `a.b=c` each, applied in order.
        source: What a person calls the data.
        from_form: They may come from the form in the UI, which leaves a component out by null.

    Raises:
        InvalidSpec: With every fault of the data and of the overrides, in the data's order.
    """
    return _checked(data, overrides, source, (), from_form=from_form)


def spec_as_yaml(spec: RunSpec, *, mask_secrets: bool = False) -> str:
    """The spec as a YAML file that loads to an equal spec; keys left out stay out.

    Args:
        spec: The spec.
        mask_secrets: Mask environment variables that look secret, and their values wherever else
            they stand.
    """
    written = spec.written()
    if mask_secrets:
        written = _masked(written)
    text = _dumped(written, readable=True)
    # PyYAML writes these as they are, but reads them as ends of lines.
    return _dumped(written, readable=False) if _LINE_ENDS.search(text) else text


def _dumped(written: dict[str, Any], *, readable: bool) -> str:
    text: str = yaml.safe_dump(
        written,
        sort_keys=False,
        allow_unicode=readable,
        default_flow_style=None,
        width=2**31,  # a folded command is hard to copy
    )
    return text


def _checked(
    data: object,
    overrides: Sequence[str],
    source: str,
    found: Sequence[Fault],
    *,
    from_form: bool = False,
) -> RunSpec:
    written = data.written() if isinstance(data, RunSpec) else copy.deepcopy(data)
    if not isinstance(written, dict):
        problem = f"must be a mapping, found {shown(written)}"
        fault = Fault(path="", problem=problem, remedy="write `name: ...` and so on")
        raise InvalidSpec((*found, fault), source)

    faults = list(found)
    for override in overrides:
        faults += apply_override(written, override)
    spec: RunSpec | None = None
    try:
        spec = RunSpec.model_validate(written)
    except InvalidSpec as error:
        faults += error.faults
    if not from_form:
        faults += _empty_components(written)
    # What a form has left out has no port either.
    faults += placeholders.faults_in(spec.written() if from_form and spec else written)

    if spec is None or faults:
        raise InvalidSpec(_in_file_order(faults, written), source)
    return spec


def _empty_components(written: Mapping[str, Any]) -> Iterator[Fault]:
    """In a form null leaves a component out; in a file somebody has forgotten what it is."""
    for name, component in _mapping(written.get("components")).items():
        if component is None and name in ByName.offered:
            remedy = f"write {name}: {{key: value}}, or leave it out"
            problem = f"must be a mapping, found {shown(component)}"
            yield Fault(path=f"components.{name}", problem=problem, remedy=remedy)


def _in_file_order(faults: Sequence[Fault], written: Mapping[str, Any]) -> tuple[Fault, ...]:
    """The faults by where their path begins in the data; what is not there comes last of its
    mapping, and what no path leads to, last of all."""
    places = {path: index for index, path in enumerate(_paths(written))}

    def rank(fault: Fault) -> tuple[int, int]:
        path = fault.path
        while path and path not in places:
            path = path.rpartition(".")[0]
        if path == fault.path:
            return places.get(path, -1), 0
        if not path:
            return len(places), 1
        return max(at for place, at in places.items() if f"{place}.".startswith(f"{path}.")), 1

    return tuple(sorted(dict.fromkeys(faults), key=rank))


def _paths(node: object, path: str = "", above: tuple[int, ...] = ()) -> Iterator[str]:
    if id(node) in above:  # YAML can write a list that holds itself
        return
    items: Iterator[tuple[object, object]] = iter(())
    if isinstance(node, Mapping):
        items = iter(node.items())
    elif isinstance(node, list | tuple):
        items = iter(enumerate(node))
    for key, value in items:
        below = f"{path}.{key}" if path else str(key)
        yield below
        yield from _paths(value, below, (*above, id(node)))


def _masked(written: dict[str, Any]) -> dict[str, Any]:
    parts = [written, *written["components"].values()]
    secrets = {value for part in parts for value in secret_values(part.get("env", {}))}
    for part in parts:
        if "env" in part:
            part["env"] = masked(part["env"])
    return {key: _without(value, secrets) for key, value in written.items()}


def _without(node: object, secrets: Iterable[str]) -> object:
    if isinstance(node, str):
        return mask_text(node, secrets)
    if isinstance(node, dict):
        return {key: _without(value, secrets) for key, value in node.items()}
    if isinstance(node, list):
        return [_without(item, secrets) for item in node]
    return node


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def project_root() -> Path:
    """The directory that relative paths of a spec start from; absolute.

    The checkout that Muster runs from; where it runs installed, the current directory.
    """
    checkout = Path(__file__).parents[2]
    return checkout if (checkout / "prefect.yaml").exists() else Path.cwd()
