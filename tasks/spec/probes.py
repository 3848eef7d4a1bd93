"""How a component is asked whether it is ready, and whether it still lives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from tasks.spec.placeholders import is_templated, substituted
from tasks.spec.values import (
    Count,
    DottedKey,
    Model,
    Refusal,
    Seconds,
    Text,
    is_number,
    refused,
    shortened,
    shown,
    value_at,
)

#: The questions a probe can be; each probe asks exactly one.
QUESTIONS = ("http", "tcp", "log", "file", "notify", "alive_s")

_NOTHING = object()


def unmet(conditions: Mapping[str, Any], answer: object) -> Iterator[str]:
    """What an answer has in place of what is asked, a text for each condition that does not hold:
    "batch_size is -1". A key that is not there never holds, not even for `not`.

    Args:
        conditions: By their keys, a value or {not: value} each.
    """
    for key, written in conditions.items():
        is_not = isinstance(written, Mapping)
        asked = written["not"] if is_not else written
        if (value := value_at(answer, key, _NOTHING)) is _NOTHING:
            yield f"{key} is not in the answer"
            continue
        # In Python 1 == True, in JSON it is not.
        is_same = isinstance(value, bool) == isinstance(asked, bool) and value == asked
        if is_same == is_not:
            found, wanted = (shown(one).removeprefix("the text ") for one in (value, asked))
            yield f"{key} is {found}" if is_not else f"{key} is {found}, not {wanted}"


def number_at(content: Any, key: str) -> float | None:
    """The finite number at a dotted key of decoded JSON, as it is; None where there is none."""
    # NaN would count as progress each time it is read, and is never less than what success asks.
    found = value_at(content, key)
    with suppress(OverflowError):  # Of a number of 400 digits.
        return found if is_number(found) and math.isfinite(found) else None
    return None


def _condition(value: object) -> object:
    """A value as it is, or `{not: VALUE}`."""
    asked = value["not"] if isinstance(value, Mapping) and [*value] == ["not"] else value
    is_plain = asked is None or isinstance(asked, str | int | float)
    if not is_plain or (isinstance(asked, float) and not math.isfinite(asked)):
        problem = "must be a text, a finite number, true, false or null, or {not: VALUE} with one"
        remedy = "name one value within it: train.step"
        raise refused(f"{problem}, found {shown(asked)}", remedy)
    return value


def _is_url(text: str) -> str:
    try:
        parts = urlsplit(substituted(text, lambda _name: "1"))
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not (usable or text.startswith("${")) or any(map(str.isspace, text)):
        raise refused(f"not an http address: {text!r}", "write http://127.0.0.1:PORT/health")
    return text


_ADDRESS = re.compile(r"(?:(?:[^\s/:]+|\[[^\s/]+\]):)?([0-9]{1,5})")


def _as_address(value: object) -> object:
    text = str(value)
    found = _ADDRESS.fullmatch(text)
    is_address = found is not None and 1 <= int(found[1]) <= 65535
    if isinstance(value, bool) or not (is_address or is_templated(text)):
        problem = f"must be a port (1 to 65535) or HOST:PORT, found {shown(value)}"
        raise refused(problem, "write 127.0.0.1:8000")
    return text


def _is_pattern(text: str) -> str:
    try:
        re.compile(substituted(text, lambda _name: "0"))
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        problem = f"not a regular expression: {error.msg}{where} in {shortened(text)!r}"
        raise refused(problem, "a backslash before . ( ) [ * + ? $ takes it literally") from None
    return text


Pattern = Annotated[Text, AfterValidator(_is_pattern)]
Url = Annotated[Text, AfterValidator(_is_url)]
Address = Annotated[Text, BeforeValidator(_as_address)]


class Probe(Model):
    """One bounded question to a component."""

    http: Url | None = Field(
        None,
        description="Asks this address; any 2xx answer will do.",
        examples=["http://127.0.0.1:${api.port}/info"],
    )
    json_: Mapping[DottedKey, Annotated[Any, BeforeValidator(_condition)]] | None = Field(
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
        asked = [question for question in QUESTIONS if written.get(question) is not None]
        if len(asked) > 1:
            yield (), refused(f"asks {' and '.join(asked)} at once", "keep one of them")
        elif not asked and written.get("processes") is None:
            yield (), refused("asks nothing", f"write one of {', '.join(QUESTIONS)}")
        if written.get("json") is not None and written.get("http") is None:
            yield ("json",), refused("needs `http` beside it", "it is about that answer")

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port that `tcp` connects to, once its placeholders are filled in."""
        if self.tcp is None:
            return None
        host, _, port = self.tcp.rpartition(":")
        return host.strip("[]") or "127.0.0.1", int(port)


class ReadyProbe(Probe):
    """When a component may receive work: the next one starts only then. It asks one question."""

    every_s: Seconds = Field(
        0.1, description="The pause between two tries at first; it backs off to 1 s."
    )
    within_s: Seconds = Field(
        120, description="Not ready after so many seconds: the run has failed as NOT_READY."
    )


class LiveProbe(Probe):
    """Whether a component that runs still works: after some misses in a row it does not. It asks
    one question, and may watch processes beside it."""

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
