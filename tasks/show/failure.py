"""What is to be said of an attempt that failed: what failed first, why, and what follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.record.places import RunPlace
from tasks.show.view import ending_of, has_ended
from tasks.spec.failure_kinds import REMEDIES, FailureKind
from tasks.spec.words import clock, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One answer."""

    #: `what failed first`.
    asked: str
    #: In one line.
    said: str
    #: It is a line of a program, or a path.
    is_code: bool = False


def facts_of(place: RunPlace, attempt: Mapping[str, Any]) -> Iterator[Fact]:
    """The answers, in the order in which they are asked.

    Args:
        attempt: of the record; it failed.
    """
    failure = attempt["failure"]
    kind, name = failure["kind"], failure["component"]
    if name:
        yield Fact(asked="what failed first", said=f"{name}: {death_of(attempt)}")
    yield Fact(asked="why", said=f"{kind}: {failure['message']}")
    line = failure.get("line")
    if line and line not in failure["message"]:
        yield Fact(asked="the line that tells", said=line, is_code=True)
    # Where it comes back by itself, nobody has to start it again.
    if remedy := failure.get("hint") or (_is_final(attempt) and REMEDIES[FailureKind(kind)]):
        yield Fact(asked="what to do", said=remedy)
    if name:
        log = place.attempt(attempt["number"]).log(name)
        yield Fact(asked="its log", said=str(log), is_code=True)
    yield Fact(asked="what happens next", said=sequel_of(attempt))


def death_of(attempt: Mapping[str, Any]) -> str:
    """How and when the component to blame ended: `exit code 1, pid 812, 7.5 s after its start`."""
    failure = attempt["failure"]
    seen = attempt["components"].get(failure["component"])
    said = (
        [ending_of(failure)] if has_ended(failure) else ["still alive" if seen else "never started"]
    )
    if seen is not None and seen["pid"] is not None:
        said.append(f"pid {seen['pid']}")
    if seen is not None and has_ended(failure) and seen["ended_at"]:
        said.append(f"{seconds(seen['ended_at'] - seen['started_at'])} after its start")
        said.append(f"at {clock(seen['ended_at'])}")
    if seen is not None and not seen["ready_at"]:
        said.append("not ready by then")
    return ", ".join(said)


def sequel_of(attempt: Mapping[str, Any]) -> str:
    """What follows the attempt."""
    decision = attempt.get("decision")
    if not decision:
        return "to be decided, once nothing of the attempt is left"
    return f"not tried again ({decision})" if _is_final(attempt) else str(decision)


def card_of(attempt: Mapping[str, Any]) -> Iterator[str]:
    """The answers in a few words each, for where a line ends after some 40 letters."""
    failure = attempt["failure"]
    name = failure["component"]
    seen = attempt["components"].get(name)
    if name:
        lasted_s = seen["ended_at"] - seen["started_at"] if seen and seen["ended_at"] else 0.0
        after = f" after {seconds(lasted_s)}" if lasted_s else ""
        yield f"{name}: {f'{ending_of(failure)}{after}' if has_ended(failure) else 'still alive'}"
    yield failure.get("line") or failure["message"]
    if name:
        yield f"log: attempt-{attempt['number']:02d}/{name}.log"
    yield "next: not tried again" if _is_final(attempt) else f"next: {sequel_of(attempt)}"


def in_a_line(message: str, place: RunPlace, attempt: Mapping[str, Any] | None) -> str:
    """The message of a failed run, with where to look and what follows.

    Args:
        attempt: the last one; None where there was none.
    """
    failure = attempt["failure"] if attempt is not None else None
    if attempt is None or failure is None or not failure["component"]:
        return message
    log = place.attempt(attempt["number"]).log(failure["component"])
    return f"{message}; log: {log}; {sequel_of(attempt)}"


def remedy_of(message: str) -> str:
    """What to do about a failure before any attempt, by the kind that its message begins with;
    empty where it names none."""
    kind = message.partition(":")[0]
    return REMEDIES[FailureKind(kind)] if kind in FailureKind.__members__ else ""


def never_begun(place: RunPlace, message: str) -> str:
    """The same of a run that failed before its first attempt."""
    remedy = remedy_of(message)
    lines = ["failed before its first attempt; nothing was started", message]
    return "\n".join(
        [*lines, *([f"what to do: {remedy}"] if remedy else []), f"record: {place.record}"]
    )


def as_text(place: RunPlace, attempt: Mapping[str, Any]) -> str:
    """All of it for a log, with the last lines of the component's own."""
    failure = attempt["failure"]
    facts = [f"{fact.asked}: {fact.said}" for fact in facts_of(place, attempt)]
    tail = failure.get("log_tail")
    lines = [f"attempt {attempt['number']} failed", *facts, f"record: {place.record}"]
    return "\n".join([*lines, *(["its last lines:", tail] if tail else [])])


def _is_final(attempt: Mapping[str, Any]) -> bool:
    return str(attempt.get("decision") or "").startswith("final")
