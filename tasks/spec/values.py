"""Base classes of the spec models, and the value types of their fields.

Validation errors are written for the user. Muster's own validators raise the error that
`make_refusal` returns. `Document` translates all errors of pydantic into faults.

The JSON schema is adapted to the form in the Prefect UI:

- Without adaptation, the form would show a field of type `X | None` as a choice between two types.
  In the adapted schema, such a field is an empty box. The form sends nothing if it stays empty.
- The form orders fields by `position`, because a Prefect server on PostgreSQL does not keep the
  order of keys.
- The form shows the keys in `properties`. Rarely used keys are in `patternProperties`. The form
  does not show these keys, but keeps their values, and the Prefect server checks the values.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, ClassVar, Self, TypeGuard, TypeVar

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

#: Titles of two choices in the web form of the Prefect UI. The user fills in an optional mapping of
#: the spec, such as `gang`, or leaves it out.
GIVEN = "Given"
LEFT_OUT = "Left out"
#: Value of `position` in the JSON schema for large fields, which the form shows last.
LAST = 1000
#: Name of an additional entry in the JSON schema of a mapping. The entry lists all keys in the
#: order of the pydantic model, including the keys that the web form of the Prefect UI hides.
_ALL_KEYS = "x-keys"


def list_key_schemas(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of each key that a mapping in a spec may have.

    Keys that the form in the Prefect UI does not show are included. All schemas are adapted to that
    form.

    Args:
        schema: JSON schema of the mapping.
    """
    outside_form = {
        pattern.removeprefix("^").removesuffix("$"): _adapt_field(key_schema)
        for pattern, key_schema in schema.get("patternProperties", {}).items()
    }
    key_schemas = {**schema["properties"], **outside_form}
    return {key: key_schemas[key] for key in schema.get(_ALL_KEYS, key_schemas)}


def adapt_form_properties(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the `properties` of a JSON schema, adapted to the form in the Prefect UI.

    The adapted schema accepts the same values, except that null is not allowed for an optional
    value.
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
        # Keep null as a choice for an optional mapping. Otherwise, the form in the Prefect UI
        # would always send the mapping with its default values.
        choices = [{**only_type, "title": GIVEN}, {"type": "null", "title": LEFT_OUT}]
        return {**schema, "anyOf": choices}
    merged = {**only_type, **schema}
    return {key: value for key, value in merged.items() if key not in ("anyOf", "default")}


#: The place of a wrong value, and the validation error. The place consists of the keys and the list
#: indexes that lead from the validated value to the wrong value.
Refusal = tuple[tuple[str | int, ...], PydanticCustomError]
Valid = TypeVar("Valid")


def make_refusal(problem: str, remedy: str = "") -> PydanticCustomError:
    """Return an error about a value that the user must correct.

    The validator that calls this function raises the error.

    Args:
        problem: Description of the mistake, with the value that was found.
        remedy: Correct form that the user should write instead, or an empty string.
    """
    return PydanticCustomError("refused", "{problem}", {"problem": problem, "remedy": remedy})


class Model(BaseModel):
    """Base class of the mappings in a spec. Its objects are frozen.

    Validation reports all faults of a mapping at once. An optional key with no value after the
    colon, such as `env:`, counts as omitted.
    """

    #: Rarely used keys that are hidden in the web form of the Prefect UI.
    keys_outside_form: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        serialize_by_alias=True,
        # Use the keys of the spec file as labels in the web form of the Prefect UI.
        field_title_generator=lambda name, field: field.alias or name,
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        """Yield the faults that result from combinations of keys in `written`.

        Args:
            written: The mapping as the user wrote it. Its values are not validated yet.
        """
        yield from ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        json_schema = handler(schema)
        model = handler.resolve_ref_schema(json_schema)
        key_schemas = model["properties"]
        model["properties"] = adapt_form_properties(
            {key: key_schemas[key] for key in key_schemas if key not in cls.keys_outside_form}
        )
        if cls.keys_outside_form:
            model["patternProperties"] = {
                f"^{key}$": key_schemas[key] for key in cls.keys_outside_form
            }
            model[_ALL_KEYS] = list(key_schemas)
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
        """Return Muster's error for a missing or unknown key, with advice.

        Args:
            kind: Type of pydantic's error, such as `missing`.
            key: The missing or unknown key.

        Returns:
            The error. None for other types of errors, which `Document` translates later.
        """
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if kind == "missing":
            [example, *_] = fields[key].examples or ["VALUE"]
            as_yaml = yaml.safe_dump({key: example}, default_flow_style=True, width=1000)
            return make_refusal("missing", f"write for example {as_yaml.strip()[1:-1]}")
        if kind == "extra_forbidden":
            known = f"known keys: {', '.join(fields)}"
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
        title: Name of the validated class, for the error.
        refusals: Faults that are already known. They are raised even if `validate` succeeds.
        validate: Function that validates the value with pydantic and returns the result.
        explain_key_error: Function that returns Muster's own error for a faulty key. The arguments
            are pydantic's type of error and the key. If the result is None, pydantic's error is
            used.

    Raises:
        ValidationError: The error lists `refusals` first, and then the errors of `validate`.
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
            if kind == "refused":
                # `refused` is an error type of Muster. Pydantic cannot create such an error from
                # the name of the type, so create the error here.
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
    """Number with its original spelling in the YAML file: 12.10 does not become "12.1"."""

    #: The number with its spelling in the YAML file.
    text: str

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, text: str, value: float) -> WrittenFloat:
        """Return a number with the value `value` and the spelling `text`."""
        number = cls(value)
        number.text = text
        return number


def describe_value(value: object) -> str:
    """Return a short description of a wrong value, such as `the text 'ready'`.

    The contents of lists and mappings are not shown.
    """
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
    """Return True if a value is a number that fits into a float. Booleans are no numbers."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 1023
    return isinstance(value, float)


def get_value(content: Any, key: str, default: object = None) -> Any:
    """Return the value at a dotted key of decoded JSON, such as `train.step`.

    A mapping may have a key that itself contains dots, as in `{"train.step": 7}`. The value of this
    key is preferred to a value in nested mappings. In a list, a part of the dotted key is an index.

    Returns:
        The value, or `default` if there is no value at the key.
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


def list_numbers(content: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the dotted key and the value of each number in decoded JSON, in the order of the JSON.

    Numbers in lists are left out.

    Args:
        content: The decoded JSON.
        prefix: Text before each key.
    """
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        if is_number(value):
            yield f"{prefix}{key}", value
        else:
            yield from list_numbers(value, f"{prefix}{key}.")


def shorten(text: str, length: int = 60) -> str:
    """Return the text. If it is longer than `length` characters, cut it and end it with `...`."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _check_storable(text: str) -> str:
    """Return the text, or raise an error if a Prefect server cannot store the text.

    A server cannot store text that contains a NUL character or cannot be encoded as UTF-8.
    """
    try:
        is_storable = b"\0" not in text.encode()
    except UnicodeEncodeError:
        is_storable = False
    if not is_storable:
        raise make_refusal(
            "must be valid UTF-8 text without NUL characters", "remove the invalid characters"
        )
    return text


def _number_to_text(value: object) -> object:
    match value:
        case bool():
            raise make_refusal(
                f"must be text, found {describe_value(value)}", explain_boolean(value)
            )
        case None | date():
            raise make_refusal(
                f"must be text, found {describe_value(value)}", "write a text in quotes"
            )
        case int() | float():
            return repr(value)
        case _:
            return value


def _check_list_of_words(value: object) -> object:
    if isinstance(value, str):
        remedy = f"write [sh, -c, {json.dumps(shorten(value), ensure_ascii=False)}]"
        problem = f"must be a list of arguments, found {describe_value(value)}"
        raise make_refusal(problem, remedy)
    if isinstance(value, list | tuple):
        if not value:
            raise make_refusal("must not be empty", "write for example [python, train.py]")
        if value[0] == "":
            raise make_refusal(
                "the first item must be the name of a program, found an empty text",
                "write for example python",
            )
    return value


def _check_variable_name(text: str) -> str:
    if "=" in text:
        raise make_refusal(
            f"must be the name of a variable, without `=`, found {shorten(text)!r}",
            "write NAME: VALUE",
        )
    return text


Text = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_check_storable)]
#: Type of a text that may be written as a number in YAML: 60 means "60".
Word = Annotated[
    str, BeforeValidator(_number_to_text), Field(strict=True), AfterValidator(_check_storable)
]
Words = Annotated[tuple[Word, ...], BeforeValidator(_check_list_of_words)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Seconds = Positive
SecondsOrZero = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
#: Type of a size limit for logs, in bytes. Values below 64 KiB are rejected, because such a short
#: log could lack the cause of a failure.
LogBytes = Annotated[Count, Field(ge=65_536)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
#: Type of a key, or of several keys with dots between them, such as `train.step`.
DottedKey = Annotated[str, Field(strict=True, pattern=r"^[^.\s]+(\.[^.\s]+)*$")]
#: Type of the name of a run or pipeline. The id of a run begins with this name.
SpecName = Annotated[str, Field(strict=True, pattern=r"^[a-z][a-z0-9-]{0,31}$")]
#: Pattern for the name of a component, port or stage.
PART_NAME = r"^[a-z][a-z0-9_-]{0,31}$"
PartName = Annotated[str, Field(strict=True, pattern=PART_NAME)]
EnvName = Annotated[Text, AfterValidator(_check_variable_name)]


class SecretBlock(Model):
    """Reference to a Prefect Secret block. The value of the block is used in place of a text."""

    secret: Text = Field(
        description="Name of a Secret block on the Prefect server. Muster reads the value of the "
        "block at the start of each attempt, and does not store the value.",
        examples=["hf-token"],
    )


def _text_or_block(value: object, _handler: ValidatorFunctionWrapHandler) -> str | SecretBlock:
    # Decide here whether the value is a Secret block or a text. If pydantic tried both types, it
    # would report the faults of both.
    if isinstance(value, SecretBlock) or (isinstance(value, Mapping) and "secret" in value):
        return SecretBlock.model_validate(value)
    return _WORD.validate_python(value)


_WORD: TypeAdapter[str] = TypeAdapter(Word)
Env = Mapping[EnvName, Annotated[str | SecretBlock, WrapValidator(_text_or_block)]]


def select_literals(env: Env) -> dict[str, str]:
    """Return the environment variables whose values are texts. Secret blocks are left out."""
    return {name: value for name, value in env.items() if isinstance(value, str)}


def _convert_signal_number(value: object) -> object:
    """Return the name of a signal for its number, such as SIGUSR1 for 10.

    Other values are returned unchanged.

    Raises:
        PydanticCustomError: No signal has this number.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, str):
        is_number = value.isascii() and value.isdecimal()
    if not is_number:
        return value
    try:
        return signal.Signals(int(str(value))).name
    except ValueError:
        problem = f"must be the name or number of a signal, found {describe_value(value)}"
        raise make_refusal(problem, "write for example SIGINT") from None


def _check_signal(name: str) -> str:
    names = signal.Signals.__members__
    if name not in names:
        near = suggest_name(f"SIG{name.upper().removeprefix('SIG')}", names)
        raise make_refusal(
            f"must be the name of a signal, found {name!r}", near or "write for example SIGINT"
        )
    return name


#: Name of a signal, such as `SIGTERM`. The number of a signal is converted to its name.
SignalName = Annotated[Text, BeforeValidator(_convert_signal_number), AfterValidator(_check_signal)]


class Stop(Model):
    """Signal and grace period with which Muster stops a component."""

    signal: SignalName = Field(
        "SIGTERM",
        description="Name of the signal that asks the component to stop.",
        examples=["SIGTERM", "SIGINT"],
    )
    grace_s: SecondsOrZero = Field(
        10,
        description="Grace period in seconds after the stop signal. After this time, Muster "
        "kills all processes of the component that are still running.",
    )


class Document(Model):
    """Base class of complete specs. A complete spec is the content of one file.

    Raises:
        InvalidSpec: The spec has faults. The error lists all faults.
    """

    @classmethod
    def prepare(cls, data: object) -> object:
        """Return the data to validate. Subclasses may override this method to change the data."""
        return data

    @model_validator(mode="wrap")
    @classmethod
    def _translate_errors(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(cls.prepare(data))
        except ValidationError as error:
            faults = tuple(map(_to_fault, error.errors(include_url=False)))
        raise InvalidSpec(faults)

    def written(self) -> dict[str, Any]:
        """Return the spec as plain data for YAML or JSON.

        The keys have the order of the file. Keys that the user omitted are left out.
        """
        return self.model_dump(mode="json", exclude_unset=True)


def _to_fault(error: ErrorDetails) -> Fault:
    """Translate an error of pydantic into a fault with its place, problem and remedy."""
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    place = error["loc"]

    # If a key is faulty, `value` is this key. Use `value`, because `place` can contain another text
    # for the key: for the key `true`, it contains 1.
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
        if kind in _NUMBER_TYPES:
            remedy = suggest_number(value, is_whole=kind == "int_type")
        elif kind == "string_type" and isinstance(value, bool):
            remedy = explain_boolean(value)
        elif kind == "string_pattern_mismatch":
            remedy = _suggest_matching_name(str(value), context["pattern"])
        problem = f"must be {expectation.format(**context)}, found {describe_value(value)}"

    if is_key:
        problem = f"the key {problem}"
    return Fault(path=".".join(map(str, place)), problem=problem, remedy=remedy)


def suggest_number(value: object, *, is_whole: bool, has_quotes: bool = True) -> str:
    """Return advice on how to correct a number in the spec, such as `write 1000 without quotes`.

    Args:
        value: The wrong value. It may be a text, such as `1.0e3`, `1_000` or `0x10`, or a number
            with a fraction where a whole number is required.
        is_whole: True if the number must be a whole number.
        has_quotes: False if the value is known to be a text without quotes.
    """
    example = "10" if is_whole else "1.5"
    if isinstance(value, float) and value.is_integer() and abs(value) < 10**_MAX_DECIMAL_DIGITS:
        return f"write {value:.0f}"
    if not isinstance(value, str):
        return f"write a {'whole ' if is_whole else ''}number, for example {example}"
    text = value
    without_quotes = " without quotes" if has_quotes else ""
    try:
        number = Decimal(int(text, 0) if text[:2].lower() in ("0x", "0o", "0b") else text)
    except (ValueError, InvalidOperation):
        return f"write a number{without_quotes}, for example {example}"
    is_representable = number.is_finite() and abs(number.adjusted()) <= _MAX_DECIMAL_DIGITS
    if not is_representable or (is_whole and number != number.to_integral_value()):
        return f"write a number{without_quotes}, for example {example}"
    digits = f"{number:f}"
    if "." in digits:
        digits = digits.rstrip("0").removesuffix(".")
    advice = f"write {digits}{without_quotes}"
    exponent = EXPONENT.fullmatch(text)
    if exponent is None:
        return advice
    if has_quotes:
        return f"{advice}, because YAML 1.1 reads {text} as text"
    mantissa = exponent["mantissa"] if "." in exponent["mantissa"] else f"{exponent['mantissa']}.0"
    sign = exponent["sign"] or "+"
    return advice if is_whole else f"{advice} or {mantissa}e{sign}{exponent['digits']}"


def _suggest_matching_name(name: str, pattern: str) -> str:
    """Return advice that suggests a name like a wrong name, for example `g-hang` for `G_hang`.

    Args:
        name: The wrong name.
        pattern: Regular expression that the name must match.

    Returns:
        The advice. An empty string if no such name matches the pattern.
    """
    suggestion = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"write `{suggestion}`, for example" if re.search(pattern, suggestion) else ""


def explain_boolean(value: bool) -> str:
    """Return advice for a Boolean that stands in place of a text."""
    words = "on and yes as true" if value else "off and no as false"
    return f"write a text in quotes, because YAML 1.1 reads {words}"


#: Matches numbers with an exponent. YAML 1.1 reads such a number as text if the number has no
#: decimal point, or if the exponent has no sign.
EXPONENT = re.compile(
    r"(?P<mantissa>[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))[eE](?P<sign>[-+]?)(?P<digits>[0-9]+)"
)
#: Largest exponent of a number that a message shows with all digits. For example, `1e3` has the
#: exponent 3, and the message shows 1000. For a number with a larger exponent, the message shows an
#: example number instead.
_MAX_DECIMAL_DIGITS = 15
_NUMBER_TYPES = ("int_type", "float_type")
_MAPPING = ("a mapping", "write KEY: VALUE below it")
#: Mapping from each error type of pydantic to a description of the expected value, and to advice
#: for the user.
_EXPECTED: dict[str, tuple[str, str]] = {
    "string_type": ("text", ""),
    "invalid_key": ("text", "write it in quotes"),
    "string_pattern_mismatch": ("text that matches the pattern {pattern}", ""),
    "int_type": ("a whole number", ""),
    "float_type": ("a number", ""),
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
