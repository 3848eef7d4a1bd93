"""The spec keys `ready` and `live`: the readiness and liveness probes of a component."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from tasks.spec.formatting import join_words
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

#: Spec keys that choose the kind of check, such as `http` for an HTTP request. A probe has exactly
#: one of these keys. Exceptions: a readiness probe may have the key `exit` instead, and a liveness
#: probe with the key `processes` needs none of these keys.
QUESTIONS = ("http", "tcp", "log", "file", "notify", "alive_s")

#: Marks a value that is missing in JSON data. It differs from every JSON value.
_MISSING = object()


def find_unmet_conditions(conditions: Mapping[str, Any], answer: object) -> Iterator[str]:
    """Yield a text for each condition that a JSON response does not meet.

    An example of such a text is `batch_size is -1`. If a key is missing in the response, no
    condition on this key is met. This also applies to a `not` condition.

    Args:
        conditions: Mapping from a dotted key to the expected value, or to `{not: VALUE}`.
        answer: The decoded JSON response.
    """
    for key, condition in conditions.items():
        is_not = isinstance(condition, Mapping)
        expected = condition["not"] if is_not else condition
        value = get_value(answer, key, _MISSING)
        if value is _MISSING:
            yield f"the answer has no key {key}"
            continue
        # In Python, 1 and True are equal. In JSON, 1 and true are different.
        is_equal = isinstance(value, bool) == isinstance(expected, bool) and value == expected
        if is_equal == is_not:
            shown_value = describe_value(value).removeprefix("the text ")
            shown_expected = describe_value(expected).removeprefix("the text ")
            if is_not:
                yield f"{key} is {shown_value}"
            else:
                yield f"{key} is {shown_value}, not {shown_expected}"


def get_number(content: Any, key: str) -> float | None:
    """Return the finite number at a dotted key of decoded JSON.

    Returns:
        The number, or None if the key is missing or its value is not a finite number.
    """
    # NaN must not be used as a training step. Two NaN values are never equal, so each NaN would
    # look like a new step.
    value = get_value(content, key)
    # `isfinite` raises OverflowError for an integer that is too large for a float.
    with suppress(OverflowError):
        return value if is_number(value) and math.isfinite(value) else None
    return None


def get_step(content: Any, key: str) -> float | None:
    """Return the training step at a dotted key of decoded JSON.

    Returns:
        The step, or None if the key is missing or its value is no whole number. A number
        with a fraction is another metric, for example a loss.
    """
    value = get_number(content, key)
    return value if value is not None and is_whole_number(value) else None


def is_whole_number(value: float) -> bool:
    """Return True if a number is finite and has no fraction, such as 3 and 3.0."""
    return isinstance(value, int) or value.is_integer()


def _check_condition(value: object) -> object:
    """Return a condition unchanged. Raise an error if it is not a plain value or `{not: VALUE}`."""
    expected = value["not"] if isinstance(value, Mapping) and [*value] == ["not"] else value
    is_plain = expected is None or isinstance(expected, str | int | float)
    if not is_plain or (isinstance(expected, float) and not math.isfinite(expected)):
        problem = (
            "must be a simple value (a text, a finite number, true, false, null), or "
            f"`{{not: VALUE}}` with a simple value, found {describe_value(expected)}"
        )
        remedy = "for a value inside a mapping or list, write a dotted key such as train.step"
        raise make_refusal(problem, remedy)
    return value


def _check_url(text: str) -> str:
    try:
        parts = urlsplit(substitute(text, lambda _name: "1"))
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not (is_usable or text.startswith("${")) or any(map(str.isspace, text)):
        raise make_refusal(
            f"must be an http address, found {text!r}", "write http://127.0.0.1:PORT/health"
        )
    return text


_ADDRESS = re.compile(r"(?:(?:[^\s/:]+|\[[^\s/]+\]):)?([0-9]{1,5})")


def _check_address(value: object) -> object:
    """Return a port or HOST:PORT as text. Raise an error for other values."""
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
        problem = f"must be a regular expression: {error.msg}{where} in {shorten(text)!r}"
        raise make_refusal(
            problem, "to match one of . ( ) [ * + ? $ literally, write a backslash before it"
        ) from None
    return text


Pattern = Annotated[Text, AfterValidator(_check_pattern)]
Url = Annotated[Text, AfterValidator(_check_url)]
Address = Annotated[Text, BeforeValidator(_check_address)]


class Probe(Model):
    """Check of a component, which succeeds or fails."""

    #: Spec keys for the kinds of check that this class of probes allows, such as `http`.
    questions: ClassVar[tuple[str, ...]] = QUESTIONS

    http: Url | None = Field(
        None,
        description="URL to which Muster sends a GET request. The probe succeeds if the status "
        "of the answer is 2xx and the conditions of `json` are met.",
        examples=["http://127.0.0.1:${api.port}/info"],
    )
    json_: Mapping[DottedKey, Annotated[Any, BeforeValidator(_check_condition)]] | None = Field(
        None,
        alias="json",
        description="Conditions that the JSON answer of the URL in `http` must meet: a mapping "
        "from names in the answer to expected values. Join nested names by dots. {not: VALUE} "
        "stands for any value except VALUE.",
        examples=[{"batch_size": {"not": -1}}],
    )
    tcp: Address | None = Field(
        None,
        description="HOST:PORT, or only the port for this machine. The probe succeeds if a TCP "
        "connection to this address is accepted.",
        examples=["127.0.0.1:${trainer.port}"],
    )
    log: Pattern | None = Field(
        None,
        description="Regular expression. The probe succeeds if the expression matches a line of "
        "the component's log.",
        examples=["server is ready"],
    )
    file: Text | None = Field(
        None,
        description="Path of a file. The probe succeeds if the component has written the file. A "
        "relative path starts at the component's `cwd`.",
        examples=["${attempt.dir}/registered"],
    )
    notify: Literal[True] | None = Field(
        None,
        description="true: the probe succeeds when the component sends READY=1 to the socket in "
        "its variable NOTIFY_SOCKET, as sd_notify does. Muster also shows the component's last "
        "STATUS= message.",
    )
    alive_s: Seconds | None = Field(
        None,
        description="Number of seconds. The probe succeeds if the component is still alive this "
        "long after its start. Use it only if no other probe is possible.",
        examples=[5],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        questions = [key for key in cls.questions if written.get(key) is not None]
        if len(questions) > 1:
            problem = f"must have exactly 1 check, found {join_words(questions)}"
            yield (), make_refusal(problem, "keep one of them")
        elif not questions and written.get("processes") is None:
            problem = "must have a check"
            yield (), make_refusal(problem, f"write one of {', '.join(cls.questions)}")
        if written.get("json") is not None and written.get("http") is None:
            problem = "this key needs `http`, the URL whose JSON answer must meet the conditions"
            yield ("json",), make_refusal(problem, "write `http: ADDRESS` in the same probe")

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port in the key `tcp`, or None if the probe has no such key.

        Use this property only after placeholders were replaced.
        """
        if self.tcp is None:
            return None
        host, _, port = self.tcp.rpartition(":")
        return host.strip("[]") or "127.0.0.1", int(port)


class ReadyProbe(Probe):
    """Check that decides whether a component is ready.

    After the check succeeds, the next component starts.
    """

    questions: ClassVar[tuple[str, ...]] = (*QUESTIONS, "exit")

    exit: Literal[0] | None = Field(
        None,
        description="0: the probe succeeds when the component has ended with exit code 0. Use "
        "this for a component that prepares the run, such as a download, and must end before the "
        "next component starts. Each attempt runs the component again.",
    )
    every_s: Seconds = Field(
        0.1,
        description="Seconds between the first checks. The pause between later checks grows up "
        "to 1 s.",
    )
    within_s: Seconds = Field(
        120.0,
        description="Longest time in seconds until the component is ready. After this time, the "
        "run fails as NOT_READY. A probe with `exit` has no limit unless this key is set.",
    )

    @property
    def limit_s(self) -> float | None:
        """Longest time in seconds until the component must be ready, or None for no limit."""
        if self.exit is not None and "within_s" not in self.model_fields_set:
            return None
        return self.within_s


#: Keys that a liveness probe must not have, each with the problem and the advice for the message.
_NOT_LIVENESS = {
    "log": (
        "this check cannot show that a component still works, because an old line stays in the log",
        "use http, tcp, file or notify; to stop a run that writes no new output, use stall_after_s",
    ),
    "alive_s": (
        "this check cannot show that a component still works, because alive_s only measures the "
        "time since the component's start",
        "leave it out: Muster always notices the end of a component. To notice a component that "
        "hangs, use http, tcp, file or notify",
    ),
}


class LiveProbe(Probe):
    """A check that shows whether a running component still works.

    The component has stalled if several checks in a row fail. The probe can also watch the
    component's child processes.
    """

    file: Text | None = Field(
        None,
        description="Path of a file that the component writes again and again. The probe succeeds "
        "if the file was changed or replaced since the last check. A relative path starts at the "
        "component's `cwd`.",
        examples=["${attempt.dir}/alive"],
    )
    notify: Literal[True] | None = Field(
        None,
        description="true: the component must send WATCHDOG=1, as sd_notify does, to the socket in "
        "the variable NOTIFY_SOCKET. The probe succeeds if a message has arrived since the last "
        "check. The variable WATCHDOG_USEC contains the time between two checks (`every_s`) in "
        "microseconds.",
    )
    log: Pattern | None = Field(
        None,
        description="This key is only allowed in `ready`, because an old line in the log does not "
        "show that the component still works. To end a run without new output, use "
        "`stall_after_s`.",
    )
    alive_s: Seconds | None = Field(
        None,
        description="This key is only allowed in `ready`. `live` needs no such key, because Muster "
        "always notices the end of a component.",
    )
    every_s: Seconds = Field(10, description="Seconds between two checks.")
    timeout_s: Seconds = Field(
        5,
        description="Longest time in seconds for the answer to a check. A slower answer is a "
        "failed check.",
    )
    misses: Count = Field(
        3, description="Number of failed checks in a row after which the run fails as STALLED."
    )
    processes: Pattern | None = Field(
        None,
        description="Regular expression for the command lines of processes that the component or "
        "its children have started. At least one such process must exist when the component is "
        "ready. If any of them ends, even with exit code 0, the run ends. You can use this key "
        "alone, without another check in `live`.",
        examples=["sglang::scheduler"],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        yield from super().rules(written)
        for key, (problem, remedy) in _NOT_LIVENESS.items():
            if written.get(key) is not None:
                yield (key,), make_refusal(problem, remedy)
