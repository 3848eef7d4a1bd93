"""What pydantic found wrong with a spec, in the words of the spec."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.values import Model, Place, did_you_mean, not_text_key, shown
from tasks.spec.words import listed


class Document(Model):
    """A whole spec, as a file holds it.

    Raises:
        InvalidSpec: With every fault at once, from the constructor as from `model_validate`.
    """

    @classmethod
    def prepared(cls, data: object) -> object:
        """The data as they are to be validated."""
        return data

    @model_validator(mode="wrap")
    @classmethod
    def _in_plain_words(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(cls.prepared(data))
        except ValidationError as error:
            faults = tuple(map(_fault, error.errors(include_url=False)))
        raise InvalidSpec(faults)

    def written(self) -> dict[str, Any]:
        """Plain data for YAML or JSON, in order and without what was left out."""
        return self.model_dump(mode="json", exclude_unset=True)


def _fault(found: ErrorDetails) -> Fault:
    kind, value, context, place = found["type"], found["input"], found.get("ctx", {}), found["loc"]
    problem, remedy = f"{found['msg']}, found {shown(value)}", ""
    if place and place[-1] == "[key]":  # how pydantic marks the key itself, not its value
        place = place[:-1]
        if kind == "string_type":
            place = (*place[:-1], str(value))  # pydantic counts a key that is true as 1
            kind, context = "refused", not_text_key(value).context or {}
    if kind == "refused":
        problem, remedy = context["problem"], context["remedy"]
    elif kind in ("enum", "literal_error"):
        allowed = re.findall(r"'([^']*)'", str(context.get("expected")))
        problem = f"must be {listed(allowed, 'or')}, found {shown(value)}"
        remedy = did_you_mean(value, allowed)
    elif kind in ("string_too_short", "too_short"):
        problem = "must not be empty"
    elif kind in _ASKED:
        asked, remedy_for = _ASKED[kind]
        problem = f"must be {asked.format(**context)}, found {shown(value)}"
        remedy = remedy_for(value, place)
    return Fault(path=".".join(map(str, place)), problem=problem, remedy=remedy)


def _none(_value: object, _place: Place) -> str:
    return ""


def _as_number(value: object, _place: Place) -> str:
    """YAML takes 1e-3, unlike 1.0e-3, for a text."""
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return f"write {int(number) if number.is_integer() else number!r}"


def _as_text(value: object, _place: Place) -> str:
    simple = isinstance(value, bool | int | float)
    return f'quote it: "{shown(value)}"' if simple else ""


def _as_list(value: object, _place: Place) -> str:
    return f"write [{value}]" if isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) else ""


def _as_mapping(_value: object, place: Place) -> str:
    return f"write {place[-1]}: {{key: value}}" if place else "write `name: ...` and so on"


#: By pydantic's type of error: what is asked for, and a remedy for the value that was found.
_ASKED: dict[str, tuple[str, Callable[[object, Place], str]]] = {
    "string_type": ("text", _as_text),
    "int_type": ("a whole number", _as_number),
    "float_type": ("a number", _as_number),
    "finite_number": ("a finite number", _none),
    "bool_type": ("true or false", _none),
    "tuple_type": ("a list", _as_list),
    "dict_type": ("a mapping", _as_mapping),
    "mapping_type": ("a mapping", _as_mapping),
    "model_type": ("a mapping", _as_mapping),
    "model_attributes_type": ("a mapping", _as_mapping),
    "greater_than": ("more than {gt:g}", _none),
    "greater_than_equal": ("at least {ge:g}", _none),
}
