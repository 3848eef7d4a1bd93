"""What pydantic found wrong with a spec, in the words of the spec."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tasks.spec.errors import Fault
from tasks.spec.values import did_you_mean, shown
from tasks.spec.words import listed

#: What is asked for, by pydantic's type of error; the value that was found follows.
_ASKED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
}


def faults_of(error: ValidationError, schema: Mapping[str, Any]) -> tuple[Fault, ...]:
    """One fault for each thing that pydantic refused.

    Args:
        error: From validating against the model.
        schema: The model's JSON schema: it knows which keys and values are allowed where.
    """
    return tuple(_fault(found, _Schema(schema)) for found in error.errors(include_url=False))


def _fault(found: ErrorDetails, schema: _Schema) -> Fault:
    kind, value, context = found["type"], found["input"], found.get("ctx", {})
    place = found["loc"]
    if place and place[-1] == "[key]":  # how pydantic marks the key itself, not its value
        place = place[:-1]
        if kind == "string_type":
            place = (*place[:-1], str(value))  # pydantic counts a key that is true as 1
            problem = f"a key must be text, found {shown(value)}"
            return Fault(path=_dotted(place), problem=problem, remedy="quote it")
    path = _dotted(place)

    if kind == "refused":
        return Fault(path=path, problem=context["problem"], remedy=context["remedy"])
    if kind == "missing":
        return Fault(path=path, problem="missing", remedy=schema.example(place))
    if kind == "extra_forbidden":
        return _unknown_key(path, place, schema)
    if kind in ("enum", "literal_error"):
        allowed = re.findall(r"'([^']*)'", str(context.get("expected")))
        problem = f"must be {listed(allowed, 'or')}, found {shown(value)}"
        return Fault(path=path, problem=problem, remedy=did_you_mean(value, allowed))
    if kind in ("string_too_short", "too_short"):
        return Fault(path=path, problem="must not be empty")
    if kind in _ASKED:
        problem = f"must be {_ASKED[kind].format(**context)}, found {shown(value)}"
        return Fault(path=path, problem=problem, remedy=_REMEDIES.get(kind, _none)(value, place))
    return Fault(path=path, problem=f"{found['msg']}, found {shown(value)}")


def _unknown_key(path: str, place: tuple[str | int, ...], schema: _Schema) -> Fault:
    allowed = schema.keys(place[:-1])
    known = f"known are {', '.join(allowed)}"
    near = did_you_mean(place[-1], allowed)
    return Fault(path=path, problem="unknown key", remedy=f"{near} {known}".strip())


def _dotted(place: tuple[str | int, ...]) -> str:
    return ".".join(map(str, place))


def _none(_value: object, _place: tuple[str | int, ...]) -> str:
    return ""


def _as_number(value: object, _place: tuple[str | int, ...]) -> str:
    """YAML takes 1e-3, unlike 1.0e-3, for a text."""
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return f"write {int(number) if number.is_integer() else number!r}"


def _as_text(value: object, _place: tuple[str | int, ...]) -> str:
    simple = isinstance(value, bool | int | float)
    return f'quote it: "{shown(value)}"' if simple else ""


def _as_list(value: object, _place: tuple[str | int, ...]) -> str:
    return f"write [{value}]" if isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) else ""


def _as_mapping(value: object, place: tuple[str | int, ...]) -> str:
    return f"write {place[-1]}: {{key: value}}" if place else "write `name: ...` and so on"


_REMEDIES: dict[str, Callable[[object, tuple[str | int, ...]], str]] = {
    "int_type": _as_number,
    "float_type": _as_number,
    "string_type": _as_text,
    "tuple_type": _as_list,
    "dict_type": _as_mapping,
    "mapping_type": _as_mapping,
    "model_type": _as_mapping,
    "model_attributes_type": _as_mapping,
}


class _Schema:
    """A JSON schema, asked by place."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema

    def keys(self, place: tuple[str | int, ...]) -> list[str]:
        """The keys that the mapping at this place may have."""
        return list(self._at(place).get("properties", {}))

    def example(self, place: tuple[str | int, ...]) -> str:
        """How the value at this place is written, where the schema has an example of it."""
        examples = self._at(place[:-1]).get("properties", {}).get(place[-1], {}).get("examples")
        return f"write for example {place[-1]}: {_flow(examples[0])}" if examples else ""

    def _at(self, place: tuple[str | int, ...]) -> Mapping[str, Any]:
        node = self._resolved(self._root)
        for step in place:
            rest = node.get("additionalProperties")
            below = node.get("properties", {}).get(step, rest)
            node = self._resolved(below) if isinstance(below, Mapping) else {}
        return node

    def _resolved(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        if "anyOf" in node:
            node = next((way for way in node["anyOf"] if way.get("type") != "null"), node)
        if "$ref" in node:
            return self._resolved(self._root["$defs"][node["$ref"].rpartition("/")[2]])
        return node


def _flow(value: object) -> str:
    """A value as YAML writes it on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items())}}}"
    text = str(value)
    return f'"{text}"' if "${" in text else text
