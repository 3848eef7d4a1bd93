"""What is to be said of an attempt that failed: what failed first, why, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tasks.record.outcome import Failure
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord
from tasks.show.view import ending_of
from tasks.spec.failure_kinds import REMEDIES, FailureKind
from tasks.spec.formatting import format_duration, format_time

_TAIL_LINES = 12


class Fact(NamedTuple):
    """One answer: to `what failed first`, in one line."""

    asked: str
    said: str
    #: It is a line of a program, or a path.
    is_code: bool = False


def facts_of(place: RunPlace, attempt: AttemptRecord, failure: Failure) -> Iterator[Fact]:
    """The answers, in the order in which they are asked."""
    if failure.component:
        yield Fact("what failed first", f"{failure.component}: {_death(attempt, failure)}")
    yield Fact("why", str(failure))
    if failure.line and failure.line not in failure.message:
        yield Fact("the line that tells", failure.line, is_code=True)
    # Where it comes back by itself, nobody has to start it again.
    if remedy := failure.hint or (REMEDIES[failure.kind] if attempt.is_last else ""):
        yield Fact("what to do", remedy)
    if failure.component:
        log = place.attempt(attempt.number).log(failure.component)
        yield Fact("its log", str(log), is_code=True)
        if (hang := log.with_suffix(".hang.txt")).exists():
            yield Fact("what it hung in", str(hang), is_code=True)
    yield Fact("what happens next", _sequel(attempt))


def _death(attempt: AttemptRecord, failure: Failure) -> str:
    """How and when the first to fail ended: `exit code 1, pid 812, 7.5 s after its start`."""
    seen = attempt.components.get(failure.component or "")
    alive = "still alive" if seen else "never started"
    said = [ending_of(failure) if failure.has_ended else alive]
    if seen is None:
        return said[0]
    if seen.pid is not None:
        said.append(f"pid {seen.pid}")
    if failure.has_ended and seen.ended_at:
        said.append(f"{format_duration(seen.ended_at - seen.started_at)} after its start")
        said.append(f"at {format_time(seen.ended_at)}")
    if not seen.ready_at:
        said.append("not ready by then")
    return ", ".join(said)


def _sequel(attempt: AttemptRecord) -> str:
    """What follows the attempt."""
    if not attempt.decision:
        return "to be decided, once nothing of the attempt is left"
    return f"not tried again ({attempt.decision})" if attempt.is_last else attempt.decision


def card_of(attempt: AttemptRecord, failure: Failure) -> Iterator[str]:
    """The answers in a few words each, for where a line ends after some 40 letters."""
    name = failure.component
    if name:
        seen = attempt.components.get(name)
        lasted_s = seen.ended_at - seen.started_at if seen and seen.ended_at else 0.0
        after = f" after {format_duration(lasted_s)}" if lasted_s else ""
        yield f"{name}: {f'{ending_of(failure)}{after}' if failure.has_ended else 'still alive'}"
    yield failure.line or failure.message
    if name:
        yield f"log: attempt-{attempt.number:02d}/{name}.log"
    yield "next: not tried again" if attempt.is_last else f"next: {_sequel(attempt)}"


def tail_of(failure: Failure) -> list[str]:
    """The last lines of the log, as many as are shown."""
    return failure.log_tail.splitlines()[-_TAIL_LINES:]


def in_a_line(message: str, place: RunPlace, attempt: AttemptRecord | None) -> str:
    """The message of a failed run, with where to look, and what follows its last attempt."""
    failure = attempt.failure if attempt is not None else None
    if attempt is None or failure is None or not failure.component:
        return message
    log = place.attempt(attempt.number).log(failure.component)
    return f"{message}; log: {log}; {_sequel(attempt)}"


def remedy_of(message: str) -> str:
    """What to do about a failure before any attempt, by the kind that its message begins with;
    empty where it names none."""
    kind = message.partition(":")[0]
    return REMEDIES[FailureKind(kind)] if kind in FailureKind.__members__ else ""


def as_text(place: RunPlace, attempt: AttemptRecord, failure: Failure) -> str:
    """All of it for a log, with the last lines of the component's own."""
    facts = [f"{fact.asked}: {fact.said}" for fact in facts_of(place, attempt, failure)]
    lines = [f"attempt {attempt.number} failed", *facts, f"record: {place.record}"]
    return "\n".join([*lines, *(["its last lines:", failure.log_tail] if failure.log_tail else [])])
