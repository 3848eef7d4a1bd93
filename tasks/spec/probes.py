"""Readiness and liveness probes of a component, as a user writes them in the spec."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from tasks.spec.placeholders import has_placeholders, substitute
from tasks.spec.values import (
    Count,
    DottedKey,
    Model,
    Refusal,
    Seconds,
    Text,
    describe_value,
    get_value,
    is_number,
    make_refusal,
    shorten,
)

#: Keys of the possible questions. A probe has exactly one of them.
QUESTIONS = ("http", "tcp", "log", "file", "notify", "alive_s")

_MISSING = object()


def find_unmet_conditions(conditions: Mapping[str, Any], answer: object) -> Iterator[str]:
    """Yield a text for each condition that a JSON answer does not meet: "batch_size is -1".

    If the answer lacks a key, its condition is never met, not even a `not` condition.

    Args:
        conditions: Expected value for each dotted key, or `{not: VALUE}`.
        answer: The decoded JSON.
    """
    for key, condition in conditions.items():
        is_not = isinstance(condition, Mapping)
        expected = condition["not"] if is_not else condition
        value = get_value(answer, key, _MISSING)
        if value is _MISSING:
            yield f"{key} is not in the answer"
            continue
        # In Python, 1 == True; in JSON, they differ.
        is_equal = isinstance(value, bool) == isinstance(expected, bool) and value == expected
        if is_equal == is_not:
            shown_value = describe_value(value).removeprefix("the text ")
            shown_expected = describe_value(expected).removeprefix("the text ")
            if is_not:
                yield f"{key} is {shown_value}"
            else:
                yield f"{key} is {shown_value}, not {shown_expected}"


def get_number(content: Any, key: str) -> float | None:
    """Return the finite number at a dotted key of decoded JSON, or None if there is none."""
    # NaN must be excluded: it differs from itself, so it would count as progress at each reading.
    # It is also never below the step that `success` requires.
    value = get_value(content, key)
    with suppress(OverflowError):  # an integer too large for a float
        return value if is_number(value) and math.isfinite(value) else None
    return None


def _check_condition(value: object) -> object:
    """Accept a plain value or `{not: VALUE}`."""
    expected = value["not"] if isinstance(value, Mapping) and [*value] == ["not"] else value
    is_plain = expected is None or isinstance(expected, str | int | float)
    if not is_plain or (isinstance(expected, float) and not math.isfinite(expected)):
        problem = "must be a text, a finite number, true, false or null, or {not: VALUE} with one"
        remedy = "name one value within it: train.step"
        raise make_refusal(f"{problem}, found {describe_value(expected)}", remedy)
    return value


def _check_url(text: str) -> str:
    try:
        parts = urlsplit(substitute(text, lambda _name: "1"))
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not (is_usable or text.startswith("${")) or any(map(str.isspace, text)):
        raise make_refusal(f"not an http address: {text!r}", "write http://127.0.0.1:PORT/health")
    return text


_ADDRESS = re.compile(r"(?:(?:[^\s/:]+|\[[^\s/]+\]):)?([0-9]{1,5})")


def _check_address(value: object) -> object:
    """Accept a port or HOST:PORT, and return it as text."""
    text = str(value)
    match = _ADDRESS.fullmatch(text)
    is_address = match is not None and 1 <= int(match[1]) <= 65535
    if isinstance(value, bool) or not (is_address or has_placeholders(text)):
        problem = f"must be a port (1 to 65535) or HOST:PORT, found {describe_value(value)}"
        raise make_refusal(problem, "write 127.0.0.1:8000")
    return text


def _check_pattern(text: str) -> str:
    try:
        re.compile(substitute(text, lambda _name: "0"))
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        problem = f"not a regular expression: {error.msg}{where} in {shorten(text)!r}"
        raise make_refusal(
            problem, "a backslash before . ( ) [ * + ? $ takes it literally"
        ) from None
    return text


Pattern = Annotated[Text, AfterValidator(_check_pattern)]
Url = Annotated[Text, AfterValidator(_check_url)]
Address = Annotated[Text, BeforeValidator(_check_address)]


class Probe(Model):
    """A question to a component with a time limit."""

    http: Url | None = Field(
        None,
        description="Asks this address; any 2xx answer will do.",
        examples=["http://127.0.0.1:${api.port}/info"],
    )
    json_: Mapping[DottedKey, Annotated[Any, BeforeValidator(_check_condition)]] | None = Field(
        None,
        alias="json",
        description="What the answer to `http` must hold: keys joined by dots, each with the value "
        "expected, or {not: value}.",
        examples=[{"batch_size": {"not": -1}}],
    )
    tcp: Address | None = Field(
        None,
        description="Connects to HOST:PORT, or to a port of this machine.",
        examples=["127.0.0.1:${trainer.port}"],
    )
    log: Pattern | None = Field(
        None,
        description="Looks for this regular expression in the component's log.",
        examples=["server is ready"],
    )
    file: Text | None = Field(
        None,
        description="Waits for this file; a relative path starts where the component runs.",
        examples=["${attempt.dir}/registered"],
    )
    notify: Literal[True] | None = Field(
        None,
        description="Waits for the component's own READY=1 (sd_notify); its last STATUS= is shown.",
    )
    alive_s: Seconds | None = Field(
        None,
        description="Only waits: still alive after so many seconds. Any other probe is better.",
        examples=[5],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        questions = [question for question in QUESTIONS if written.get(question) is not None]
        if len(questions) > 1:
            yield (), make_refusal(f"asks {' and '.join(questions)} at once", "keep one of them")
        elif not questions and written.get("processes") is None:
            yield (), make_refusal("asks nothing", f"write one of {', '.join(QUESTIONS)}")
        if written.get("json") is not None and written.get("http") is None:
            yield ("json",), make_refusal("needs `http` beside it", "it is about that answer")

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of `tcp`, or None. Call this only after placeholders are filled in."""
        if self.tcp is None:
            return None
        host, _, port = self.tcp.rpartition(":")
        return host.strip("[]") or "127.0.0.1", int(port)


class ReadyProbe(Probe):
    """Probe that decides when a component may receive work and the next component starts."""

    every_s: Seconds = Field(
        0.1, description="The pause between two tries at first; it backs off to 1 s."
    )
    within_s: Seconds = Field(
        120, description="Not ready after so many seconds: the run has failed as NOT_READY."
    )


class LiveProbe(Probe):
    """Probe that decides whether a running component still works.

    It fails after several misses in a row. It can also watch the component's child processes.
    """

    every_s: Seconds = Field(10, description="The pause between two questions.")
    timeout_s: Seconds = Field(5, description="An answer that takes longer is a miss.")
    misses: Count = Field(3, description="So many in a row: the component has stalled.")
    processes: Pattern | None = Field(
        None,
        description="A regular expression for the command lines of the component's own child "
        "processes that must stay alive: once it is ready there must be one, and the end of any, "
        "exit 0 included, is the end of the run. Alone, or beside another question.",
        examples=["sglang::scheduler"],
    )
