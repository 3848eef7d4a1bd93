"""What the models of a spec are made of: their base, and the kinds of value they hold.

A value that is refused says so in plain words, through `refused`; `Document`, a whole spec, puts
what pydantic itself refuses into the same words. The JSON schema is drawn up for the form in the
Prefect UI, which draws `X | None` as a choice of two and preselects None, also for a plain text; a
field without that choice as an empty box, and what is left empty there is not sent. It follows
`position`, since a Prefect server on PostgreSQL keeps no order of keys.
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
from tasks.spec.words import did_you_mean, listed

#: How the choice is called between a part of the spec and none.
GIVEN, LEFT_OUT = "Given", "Left out"
#: The position of what takes pages.
LAST = 1000


def drawn(properties: dict[str, Any]) -> dict[str, Any]:
    """The properties of an object, ready to be drawn; what they allow stays, null excepted."""
    return {
        key: {"position": position, **_field(schema)}
        for position, (key, schema) in enumerate(properties.items())
    }


def _field(schema: dict[str, Any]) -> dict[str, Any]:
    ways = [way for way in schema.get("anyOf", ()) if way.get("type") != "null"]
    if len(ways) != 1:
        return schema
    [way] = ways
    if "$ref" in way:
        # Without the choice the form would send the defaults of a part that nobody asked for.
        named = [{**way, "title": GIVEN}, {"type": "null", "title": LEFT_OUT}]
        return {**schema, "anyOf": named}
    return {key: one for key, one in {**way, **schema}.items() if key not in ("anyOf", "default")}


#: Keys and indexes from where a value is checked down to the faulty one, and what is wrong there.
Refusal = tuple[tuple[str | int, ...], PydanticCustomError]
Valid = TypeVar("Valid")


def refused(problem: str, remedy: str = "") -> PydanticCustomError:
    """The error of a value that a person must mend; raise it in a validator."""
    return PydanticCustomError("refused", "{problem}", {"problem": problem, "remedy": remedy})


class Model(BaseModel):
    """A frozen part of the spec which reports all that is wrong with it at once.

    A key without a value (`env:` and nothing more) counts as left out where it may be left out.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        serialize_by_alias=True,
        # A form's labels are the keys of a file.
        field_title_generator=lambda name, field: field.alias or name,
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        """What keys demand of each other, judged before they are known to be valid themselves."""
        yield from ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        found = handler(schema)
        model = handler.resolve_ref_schema(found)
        model["properties"] = drawn(model["properties"])
        return found

    @model_validator(mode="wrap")
    @classmethod
    def _with_every_fault(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return handler(data)
        written = cls._without_blanks(data)
        refusals = [*cls.rules(written)]
        return collected(cls.__name__, refusals, lambda: handler(written), cls._in_own_words)

    @classmethod
    def _in_own_words(cls, kind: str, key: str) -> PydanticCustomError | None:
        """What is to be said of a key that is missing or unknown; None: pydantic's kind of error
        is another, which `Document` puts into words."""
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if kind == "missing":
            [example, *_] = fields[key].examples or ["VALUE"]
            as_yaml = yaml.safe_dump({key: example}, default_flow_style=True, width=1000)
            return refused("missing", f"write for example {as_yaml.strip()[1:-1]}")
        if kind == "extra_forbidden":
            known = f"known are {', '.join(fields)}"
            return refused("unknown key", f"{did_you_mean(key, fields)} {known}".strip())
        return None

    @classmethod
    def _without_blanks(cls, data: Mapping[str, object]) -> dict[str, object]:
        fields = cls.model_fields.items()
        optional = {field.alias or name for name, field in fields if not field.is_required()}
        return {
            key: value for key, value in data.items() if value is not None or key not in optional
        }


def collected(
    title: str,
    refusals: list[Refusal],
    validate: Callable[[], Valid],
    in_own_words: Callable[[str, str], PydanticCustomError | None] = lambda _kind, _key: None,
) -> Valid:
    """What `validate` gives, or one ValidationError with the refusals *and* all that it found.

    Args:
        in_own_words: By pydantic's kind of error and the key right here that it is about.
    """
    errors = [InitErrorDetails(type=error, loc=place, input=None) for place, error in refusals]
    try:
        result = validate()
    except ValidationError as error:
        for found in error.errors(include_url=False):
            kind, place, context = found["type"], found["loc"], found.get("ctx", {})
            own = in_own_words(kind, str(place[0])) if len(place) == 1 else None
            if kind == "refused":  # pydantic knows its own types by name, but not ours
                own = refused(context["problem"], context["remedy"])
            again = InitErrorDetails(type=own or kind, loc=place, input=found["input"], ctx=context)
            errors.append(again)
    if errors:
        raise ValidationError.from_exception_data(title, errors)
    return result


class WrittenFloat(float):
    """A number from a file that remembers how it was written: as text, 12.10 is not 12.1."""

    text: str

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, text: str, value: float) -> WrittenFloat:
        number = cls(value)
        number.text = text
        return number


def shown(value: object) -> str:
    """How a fault names the value it found; what a list or a mapping holds is never shown."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {shortened(value)!r}" if value else "an empty text"
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
    """It is one that a float can hold."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 1023
    return isinstance(value, float)


def value_at(content: Any, key: str, default: object = None) -> Any:
    """What stands at a key of decoded JSON, the default where nothing does: at the whole of it, or
    at its parts, which are joined by dots, and are indexes in a list."""
    if isinstance(content, Mapping) and key in content:
        return content[key]
    first, dot, rest = key.partition(".")
    inner = default
    if isinstance(content, Mapping):
        inner = content.get(first, default)
    elif isinstance(content, list) and first.isdecimal() and int(first) < len(content):
        inner = content[int(first)]
    return value_at(inner, rest, default) if dot else inner


def shortened(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _storable(text: str) -> str:
    try:
        is_whole = b"\0" not in text.encode()
    except UnicodeEncodeError:
        is_whole = False
    if not is_whole:
        raise refused("must be text that UTF-8 can hold, and without a NUL character")
    return text


def _as_text(value: object) -> object:
    match value:
        case bool() | None | date():
            raise refused(f"must be text, found {shown(value)}", "quote what is meant as text")
        case int() | float():
            return repr(value)
        case _:
            return value


def _is_list_of_words(value: object) -> object:
    if isinstance(value, str):
        remedy = f"write [sh, -c, {json.dumps(shortened(value), ensure_ascii=False)}]"
        raise refused("must be a list, found a text: no shell splits it", remedy)
    if isinstance(value, list | tuple):
        if not value:
            raise refused("must not be empty", "write for example [python, train.py]")
        if value[0] == "":
            raise refused("its first item, the program, is empty", "write for example python")
    return value


def _is_variable_name(text: str) -> str:
    if "=" in text:
        raise refused(f"a variable's name has no `=`, found {shortened(text)!r}")
    return text


Text = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_storable)]
#: A text for which a number will do, as a YAML author expects: 60 is "60".
Word = Annotated[str, BeforeValidator(_as_text), Field(strict=True), AfterValidator(_storable)]
Words = Annotated[tuple[Word, ...], BeforeValidator(_is_list_of_words)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Seconds = Positive
Count = Annotated[int, Field(strict=True, ge=1)]
NoneOrMore = Annotated[int, Field(strict=True, ge=0)]
#: A key, or keys joined by dots: `train.step`.
DottedKey = Annotated[str, Field(strict=True, pattern=r"^[^.\s]+(\.[^.\s]+)*$")]
#: The name of a run or of a pipeline, and so the beginning of their ids.
SpecName = Annotated[str, Field(strict=True, pattern=r"^[a-z][a-z0-9-]{0,31}$")]
#: The name of a component, of a port, or of a stage.
PART_NAME = r"^[a-z][a-z0-9_-]{0,31}$"
PartName = Annotated[str, Field(strict=True, pattern=PART_NAME)]
EnvName = Annotated[Text, AfterValidator(_is_variable_name)]


class SecretBlock(Model):
    """The value of a Prefect Secret block, in place of a text."""

    secret: Text = Field(
        description="The name of a Secret block on the Prefect server. Its value is read at the "
        "start of each attempt, and written nowhere.",
        examples=["hf-token"],
    )


def _text_or_block(value: object, _handler: ValidatorFunctionWrapHandler) -> str | SecretBlock:
    # One after the other: a union would tell the faults of both.
    if isinstance(value, SecretBlock) or (isinstance(value, Mapping) and "secret" in value):
        return SecretBlock.model_validate(value)
    return _WORD.validate_python(value)


_WORD: TypeAdapter[str] = TypeAdapter(Word)
Env = Mapping[EnvName, Annotated[str | SecretBlock, WrapValidator(_text_or_block)]]


def texts(env: Env) -> dict[str, str]:
    """The variables whose text is known: not those that a Secret block has."""
    return {name: value for name, value in env.items() if isinstance(value, str)}


def _is_signal(name: str) -> str:
    names = signal.Signals.__members__
    if name not in names:
        near = did_you_mean(f"SIG{name.upper().removeprefix('SIG')}", names)
        raise refused(f"no signal of this system: {name!r}", near or "write for example SIGINT")
    return name


class Stop(Model):
    """How a component is asked to end."""

    signal: Annotated[Text, AfterValidator(_is_signal)] = Field(
        "SIGTERM", description="Sent first, by its name.", examples=["SIGTERM", "SIGINT"]
    )
    grace_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = Field(
        10, description="What is left of the component after so long is killed."
    )


class Document(Model):
    """A whole spec, as a file holds it.

    Raises: InvalidSpec, with every fault at once, from the constructor as from `model_validate`.
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
    # The input is the key itself. As its place pydantic counts one that is true as 1.
    if is_key := kind == "invalid_key" or place[-1:] == ("[key]",):
        place = (*place[: -1 if kind == "invalid_key" else -2], str(value))
    if kind == "refused":
        problem, remedy = context["problem"], context["remedy"]
    elif kind in ("enum", "literal_error"):
        expected = str(context.get("expected"))
        allowed = re.findall(r"'([^']*)'", expected) or [expected.lower()]
        problem = f"must be {listed(allowed, 'or')}, found {shown(value)}"
        remedy = did_you_mean(value, allowed)
    elif kind in ("string_too_short", "too_short"):
        problem = "must not be empty"
    elif kind in _ASKED:
        asked, remedy = _ASKED[kind]
        problem = f"must be {asked.format(**context)}, found {shown(value)}"
    problem = f"a key {problem}" if is_key else problem
    return Fault(path=".".join(map(str, place)), problem=problem, remedy=remedy)


_MAPPING = ("a mapping", "write KEY: VALUE below it")
#: By pydantic's type of error: what is asked for, and how that is written.
_ASKED: dict[str, tuple[str, str]] = {
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
