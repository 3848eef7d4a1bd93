"""Base classes of the spec models, and the value types of their fields.

Validation errors are written for the user. Our own validators raise `refused`, and `Document`
translates pydantic's errors into the same form.

The JSON schema is adapted to the form in the Prefect UI:

- The form shows a field of type `X | None` as a choice between two types and preselects None.
  Without that choice, the form shows an empty box and sends nothing if the box stays empty.
- The form orders fields by `position`, because a Prefect server on PostgreSQL does not keep the
  order of keys.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from typing import Annotated, Any, Self, TypeGuard, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.formatting import join_words, suggest_name

#: Titles of the two choices of an optional section in the form: the section, or no section.
GIVEN = "Given"
LEFT_OUT = "Left out"
#: Position of a field that takes much space in the form, so that it is shown last.
LAST = 1000


def adapt_form_properties(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of an object schema, adapted to the form in the Prefect UI.

    The adapted schema accepts the same values, except null.
    """
    return {
        key: {"position": position, **_adapt_field(schema)}
        for position, (key, schema) in enumerate(properties.items())
    }


def _adapt_field(schema: dict[str, Any]) -> dict[str, Any]:
    types = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if len(types) != 1:
        return schema
    [only_type] = types
    if "$ref" in only_type:
        # Without the choice, the form would send the defaults of a section that the user omitted.
        choices = [{**only_type, "title": GIVEN}, {"type": "null", "title": LEFT_OUT}]
        return {**schema, "anyOf": choices}
    merged = {**only_type, **schema}
    return {key: value for key, value in merged.items() if key not in ("anyOf", "default")}


#: An error with its place: the keys and indexes that lead from the checked value to the faulty one.
Refusal = tuple[tuple[str | int, ...], PydanticCustomError]
Valid = TypeVar("Valid")


def make_refusal(problem: str, remedy: str = "") -> PydanticCustomError:
    """Return the error for a value that the user must correct. A validator raises it."""
    return PydanticCustomError("refused", "{problem}", {"problem": problem, "remedy": remedy})


class Model(BaseModel):
    """Frozen section of a spec; its validation reports all faults at once.

    An optional key without a value (`env:` and nothing after it) counts as omitted.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        serialize_by_alias=True,
        # The labels in the form are the keys of the file.
        field_title_generator=lambda name, field: field.alias or name,
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        """Yield the faults that concern several keys together.

        Args:
            written: The section as the user wrote it. Its values are not validated yet.
        """
        yield from ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        json_schema = handler(schema)
        model = handler.resolve_ref_schema(json_schema)
        model["properties"] = adapt_form_properties(model["properties"])
        return json_schema

    @model_validator(mode="wrap")
    @classmethod
    def _validate_completely(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return handler(data)
        written = cls._drop_blank_keys(data)
        refusals = [*cls.rules(written)]
        return validate_collecting_faults(
            cls.__name__, refusals, lambda: handler(written), cls._explain_key_error
        )

    @classmethod
    def _explain_key_error(cls, kind: str, key: str) -> PydanticCustomError | None:
        """Return the error for a missing or unknown key, or None for another kind of error.

        `Document` translates the other kinds.
        """
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if kind == "missing":
            [example, *_] = fields[key].examples or ["VALUE"]
            as_yaml = yaml.safe_dump({key: example}, default_flow_style=True, width=1000)
            return make_refusal("missing", f"write for example {as_yaml.strip()[1:-1]}")
        if kind == "extra_forbidden":
            known = f"known are {', '.join(fields)}"
            return make_refusal("unknown key", f"{suggest_name(key, fields)} {known}".strip())
        return None

    @classmethod
    def _drop_blank_keys(cls, data: Mapping[str, object]) -> dict[str, object]:
        fields = cls.model_fields.items()
        optional = {field.alias or name for name, field in fields if not field.is_required()}
        return {
            key: value for key, value in data.items() if value is not None or key not in optional
        }


def validate_collecting_faults(
    title: str,
    refusals: list[Refusal],
    validate: Callable[[], Valid],
    explain_key_error: Callable[[str, str], PydanticCustomError | None] = lambda _kind, _key: None,
) -> Valid:
    """Return the result of `validate`, or raise one error with all faults.

    Args:
        title: Name of the validated model, for the error.
        refusals: Faults that are already known. They are raised even if `validate` succeeds.
        validate: Validates the value with pydantic.
        explain_key_error: Returns our own error for a key of the validated value. It receives
            pydantic's type of error and the key. If it returns None, pydantic's error stays.

    Raises:
        ValidationError: With the refusals first, and then the errors that `validate` raised.
    """
    errors = [InitErrorDetails(type=error, loc=place, input=None) for place, error in refusals]
    try:
        result = validate()
    except ValidationError as error:
        for details in error.errors(include_url=False):
            kind = details["type"]
            place = details["loc"]
            context = details.get("ctx", {})
            own_error = explain_key_error(kind, str(place[0])) if len(place) == 1 else None
            if kind == "refused":  # pydantic cannot rebuild a custom error from its type name
                own_error = make_refusal(context["problem"], context["remedy"])
            errors.append(
                InitErrorDetails(
                    type=own_error or kind, loc=place, input=details["input"], ctx=context
                )
            )
    if errors:
        raise ValidationError.from_exception_data(title, errors)
    return result


class WrittenFloat(float):
    """Number of a YAML file that keeps its original spelling: 12.10 does not become "12.1"."""

    text: str

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, text: str, value: float) -> WrittenFloat:
        number = cls(value)
        number.text = text
        return number


def describe_value(value: object) -> str:
    """Return a description of a faulty value. The contents of lists and mappings are not shown."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {shorten(value)!r}" if value else "an empty text"
        case int() | float():
            return repr(value)
        case date():
            return f"the date {value}"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"


def is_number(value: object) -> TypeGuard[float]:
    """Return True if a value is a number, not a bool, and fits into a float."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 1023
    return isinstance(value, float)


def get_value(content: Any, key: str, default: object = None) -> Any:
    """Return the value at a dotted key of decoded JSON, or the default if there is no value.

    A mapping that has the whole key, dots included, wins over nested keys. In a list, a part of the
    key is an index.
    """
    if isinstance(content, Mapping) and key in content:
        return content[key]
    first, dot, rest = key.partition(".")
    inner = default
    if isinstance(content, Mapping):
        inner = content.get(first, default)
    elif isinstance(content, list) and first.isdecimal() and int(first) < len(content):
        inner = content[int(first)]
    return get_value(inner, rest, default) if dot else inner


def shorten(text: str, length: int = 60) -> str:
    """Return the text, cut to a number of characters with `...` at its end."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _check_storable(text: str) -> str:
    """Refuse text that a Prefect server cannot store."""
    try:
        is_storable = b"\0" not in text.encode()
    except UnicodeEncodeError:
        is_storable = False
    if not is_storable:
        raise make_refusal("must be text that UTF-8 can hold, and without a NUL character")
    return text


def _number_to_text(value: object) -> object:
    match value:
        case bool() | None | date():
            raise make_refusal(
                f"must be text, found {describe_value(value)}", "quote what is meant as text"
            )
        case int() | float():
            return repr(value)
        case _:
            return value


def _check_list_of_words(value: object) -> object:
    if isinstance(value, str):
        remedy = f"write [sh, -c, {json.dumps(shorten(value), ensure_ascii=False)}]"
        raise make_refusal("must be a list, found a text: no shell splits it", remedy)
    if isinstance(value, list | tuple):
        if not value:
            raise make_refusal("must not be empty", "write for example [python, train.py]")
        if value[0] == "":
            raise make_refusal("its first item, the program, is empty", "write for example python")
    return value


def _check_variable_name(text: str) -> str:
    if "=" in text:
        raise make_refusal(f"a variable's name has no `=`, found {shorten(text)!r}")
    return text


Text = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_check_storable)]
#: Text that may also be written as a number in YAML: 60 means "60".
Word = Annotated[
    str, BeforeValidator(_number_to_text), Field(strict=True), AfterValidator(_check_storable)
]
Words = Annotated[tuple[Word, ...], BeforeValidator(_check_list_of_words)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Seconds = Positive
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
#: A key, or several keys joined by dots: `train.step`.
DottedKey = Annotated[str, Field(strict=True, pattern=r"^[^.\s]+(\.[^.\s]+)*$")]
#: Name of a run or pipeline. The run id begins with it.
SpecName = Annotated[str, Field(strict=True, pattern=r"^[a-z][a-z0-9-]{0,31}$")]
#: Pattern for the name of a component, port or stage.
PART_NAME = r"^[a-z][a-z0-9_-]{0,31}$"
PartName = Annotated[str, Field(strict=True, pattern=PART_NAME)]
EnvName = Annotated[Text, AfterValidator(_check_variable_name)]


class SecretBlock(Model):
    """Reference to a Prefect Secret block whose value replaces the text."""

    secret: Text = Field(
        description="The name of a Secret block on the Prefect server. Its value is read at the "
        "start of each attempt, and written nowhere.",
        examples=["hf-token"],
    )


def _text_or_block(value: object, _handler: ValidatorFunctionWrapHandler) -> str | SecretBlock:
    # Not a union type: pydantic would report the faults of both alternatives.
    if isinstance(value, SecretBlock) or (isinstance(value, Mapping) and "secret" in value):
        return SecretBlock.model_validate(value)
    return _WORD.validate_python(value)


_WORD: TypeAdapter[str] = TypeAdapter(Word)
Env = Mapping[EnvName, Annotated[str | SecretBlock, WrapValidator(_text_or_block)]]


def select_literals(env: Env) -> dict[str, str]:
    """Return the variables with a literal value, without references to Secret blocks."""
    return {name: value for name, value in env.items() if isinstance(value, str)}


def _check_signal(name: str) -> str:
    names = signal.Signals.__members__
    if name not in names:
        near = suggest_name(f"SIG{name.upper().removeprefix('SIG')}", names)
        raise make_refusal(
            f"no signal of this system: {name!r}", near or "write for example SIGINT"
        )
    return name


class Stop(Model):
    """Signal and grace period with which a component is stopped."""

    signal: Annotated[Text, AfterValidator(_check_signal)] = Field(
        "SIGTERM", description="Sent first, by its name.", examples=["SIGTERM", "SIGINT"]
    )
    grace_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = Field(
        10, description="What is left of the component after so long is killed."
    )


class Document(Model):
    """A complete spec, the content of a file.

    Raises:
        InvalidSpec: The spec has faults. The error lists all faults.
    """

    @classmethod
    def prepared(cls, data: object) -> object:
        """Return the data in the form in which they are validated. A subclass may change them."""
        return data

    @model_validator(mode="wrap")
    @classmethod
    def _translate_errors(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(cls.prepared(data))
        except ValidationError as error:
            faults = tuple(map(_to_fault, error.errors(include_url=False)))
        raise InvalidSpec(faults)

    def written(self) -> dict[str, Any]:
        """Return plain data for YAML or JSON, in the order of the file and without omitted keys."""
        return self.model_dump(mode="json", exclude_unset=True)


def _to_fault(error: ErrorDetails) -> Fault:
    """Translate an error of pydantic into a fault with its place, problem and remedy."""
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    place = error["loc"]

    # For a faulty key, the input is the key itself. The last part of the place cannot be used:
    # pydantic writes 1 there for the key `true`.
    is_key = kind == "invalid_key" or place[-1:] == ("[key]",)
    if is_key:
        parent = place[:-1] if kind == "invalid_key" else place[:-2]
        place = (*parent, str(value))

    problem = f"{error['msg']}, found {describe_value(value)}"
    remedy = ""
    if kind == "refused":
        problem = context["problem"]
        remedy = context["remedy"]
    elif kind in ("enum", "literal_error"):
        expected = str(context.get("expected"))
        allowed = re.findall(r"'([^']*)'", expected) or [expected.lower()]
        problem = f"must be {join_words(allowed, 'or')}, found {describe_value(value)}"
        remedy = suggest_name(value, allowed)
    elif kind in ("string_too_short", "too_short"):
        problem = "must not be empty"
    elif kind in _EXPECTED:
        expectation, remedy = _EXPECTED[kind]
        problem = f"must be {expectation.format(**context)}, found {describe_value(value)}"

    if is_key:
        problem = f"a key {problem}"
    return Fault(path=".".join(map(str, place)), problem=problem, remedy=remedy)


_MAPPING = ("a mapping", "write KEY: VALUE below it")
#: Expected value and remedy for each of pydantic's error types.
_EXPECTED: dict[str, tuple[str, str]] = {
    "string_type": ("text", ""),
    "invalid_key": ("text", "quote it"),
    "string_pattern_mismatch": ("like {pattern}", ""),
    "int_type": ("a whole number", "write it without quotes"),
    "float_type": ("a number", "write it without quotes, and 1.0e-3 for 1e-3"),
    "finite_number": ("a finite number", ""),
    "bool_type": ("true or false", ""),
    "tuple_type": ("a list", "write [ITEM, ...]"),
    "dict_type": _MAPPING,
    "mapping_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "greater_than": ("more than {gt:g}", ""),
    "greater_than_equal": ("at least {ge:g}", ""),
}
