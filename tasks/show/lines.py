"""A run as lines for people: its events as they happen, and at the end the block that says how it
ended, why, and where to go on reading."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.text import Text

from tasks.record.events import Event
from tasks.record.outcome import Failure
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.record.states import RunState
from tasks.show.failure import facts_of, remedy_of, tail_of
from tasks.show.output import line_of
from tasks.show.view import RunSeen, ending_text, job_text, state_of
from tasks.spec.formatting import (
    format_count,
    format_datetime,
    format_duration,
    join_commas,
    join_words,
)
from tasks.spec.values import is_number

#: What is said of an event by its fields, and rich's style for it.
_SAID: Mapping[str, tuple[str, str]] = {
    "containment": ("containment {0.text}", "dim"),
    "job.submitted": ("{0.component}: job {0.submission_id} submitted", ""),
    "job.attached": ("{0.component}: job {0.submission_id} attached", ""),
    "contact.lost": ("{0.component}: no answer: {0.message}", "yellow"),
    "contact.back": ("{0.component}: {0.address} answers again", "green"),
    "component.ready": ("{0.component}: ready after {0.after_s:.2f} s", "green"),
    "component.drained": ("{0.component}: its part is done, the run goes on", ""),
    "component.diagnosed": ("{0.component}: what it was doing is in {0.path}", ""),
    "rollout.server.died": ("{0.component}: server {0.rank} died: {0.why}", "yellow"),
    "rollout.warning": ("{0.component}: {0.message}", "yellow"),
    "rollout.failed": ("{0.component}: {0.reason}", "bold red"),
    "run.slow": ("{0.message}", "yellow"),
    "run.alarm": ("alarm: {0.message}", "bold yellow"),
    "run.waiting": ("waiting: {0.message}", "yellow"),
    "teardown.begun": ("stopping: {0.reason}", ""),
}


def lines_of(event: Event) -> Iterator[Text]:
    """What is said of an event; of most nothing. The run's end is told by `end_block`."""
    name = event.component or ""
    if (said := _SAID.get(event.name)) is not None:
        yield line_of(said[0].format(event), said[1])
        return
    match event.name:
        case "attempt.begun" | "attempt.adopted":
            goes_on = " goes on" if event.name == "attempt.adopted" else ""
            yield line_of(f"run {event.run_id}, attempt {event.attempt}{goes_on}", "bold")
            yield line_of(f"files in {event.directory}")
        case "component.spawned" if event.pid is not None:
            yield line_of(f"{name}: started, pid {event.pid}")
        case "job.state":
            yield line_of(f"{name}: {job_text(event)}")
        case "job.swept" if event.killed or event.left:
            yield line_of(
                f"{name}: ended what its job had left: {'; '.join(event.killed)}", "yellow"
            )
        case "job.ended" if event.unseen:
            yield line_of(f"{name}: {'; '.join(event.unseen)}", "yellow")
        case "component.exited":
            yield line_of(f"{name}: ended, {ending_text(event.exit_code, event.signal)}")
        case "component.stuck":
            yield line_of(f"{name}: can't be ended: {join_commas(event.pids)}", "bold red")
        case "rollout.recovery.ended" if event.outcome != "abandoned":
            server = f"{name}: server {join_commas(event.ranks)}"
            if event.outcome == "recovered":
                yield line_of(f"{server} is back after {event.took_s:.1f} s", "green")
            else:
                yield line_of(f"{server} is not back: {event.message}", "yellow")
        case "probe.failed" if event.probe == "live":
            yield line_of(f"{name}: {event.reason} (miss {event.misses})", "yellow")
        case "run.state" if event.state == "pending_resources" and event.message:
            yield line_of(f"waiting: {event.message}", "yellow")


def failed_attempt(seen: RunSeen, decision: str) -> Iterator[Text]:
    """Of an attempt that failed, and that another one follows; nothing of one that did not."""
    failure = seen.failure
    if failure is None or seen.directory is None:
        return
    yield line_of(f"attempt {seen.attempt} failed: {failure}", "red")
    failed = AttemptRecord(
        number=seen.attempt, state=RunState.FAILED, failure=failure, decision=decision
    )
    place = RunPlace(directory=seen.directory.parent)
    yield from _failure(place, failed, failure, told=("why", "what failed first"))


def _failure(
    place: RunPlace, attempt: AttemptRecord, failure: Failure, told: Collection[str]
) -> Iterator[Text]:
    """The answers that were not told, and the last lines of the log."""
    for fact in facts_of(place, attempt, failure):
        if fact.asked not in told:
            yield _field(fact.asked, fact.said)
    for number, line in enumerate(tail_of(failure)):
        yield _field("" if number else "its last lines", f"| {line}")


_STYLES = {"completed": "bold green", "failed": "bold red", "crashed": "bold red"}
_LABEL = 19


def end_block(
    state: str, message: str, record_path: Path | None = None, page: str = ""
) -> Iterator[Text]:
    """The block, after an empty line: how a run ended, as far as this process knows.

    Args:
        state: the run's or its flow run's: `completed`, `failed`, `cancelled`, `crashed`.
        record_path: None where it has none: it never began.
        page: of the flow run in the UI; empty where its server ends with this process.
    """
    record = None
    with suppress(OSError, ValueError):  # What is known otherwise is shown even so.
        record = RunJson.read(record_path) if record_path is not None else None
    attempt = record.attempt if record is not None else None
    failure = attempt.failure if attempt is not None and state == "failed" else None
    is_seen = attempt is None or not any(job.unseen for job in attempt.jobs.values())
    left = "; nothing is left running" if state == "cancelled" and is_seen else ""
    yield line_of("")
    # The message of the flow run says where to look, too, which stands below here.
    said = str(failure) if failure else message
    yield line_of(f"{state}: {said}{left}", _STYLES.get(state, "bold yellow"))
    if record is not None:
        yield _field("run", record.run_id)
        yield _field("took", _took(record))
        yield from (_field("alarm", one.message) for one in (attempt.alarms if attempt else ()))
    if failure and attempt and record_path is not None:
        place = RunPlace(directory=record_path.parent)
        yield from _failure(place, attempt, failure, told=("why",))
    elif state == "failed" and (remedy := remedy_of(message)):
        yield _field("what to do", remedy)
    if record_path is not None:
        yield _field("record", str(record_path))
    if page:
        yield _field("page", page)


def _took(record: RunJson) -> str:
    """`21 s, 2 attempts (NODE_LOST and completed)`."""
    ended = record.ended_at
    took = format_duration(ended - record.started_at) if ended is not None else "not ended"
    ends = [attempt.ending for attempt in record.attempts]
    names = f" ({join_words(ends, at_most=6)})" if len(ends) > 1 else ""
    return f"{took}, {format_count(len(ends), 'attempt')}{names}"


def _field(name: str, text: str) -> Text:
    return line_of(f"  {name:<{_LABEL}}{text}")


#: A story tells of so many attempts, the last ones; of so many figures; and of so many lines of a
#: log, each so far.
_ATTEMPTS_TOLD, _FIGURES_TOLD, _TAIL_TOLD, _LINE_TOLD = 8, 8, 10, 160


def story(
    record: RunJson,
    place: RunPlace,
    rows: Sequence[Mapping[str, Any]] = (),
    slow: Iterable[str] = (),
) -> Iterator[str]:
    """The whole of a run, in lines that fit a screen or a prompt.

    Args:
        rows: of its figures, a mapping each step, in order.
        slow: where its time goes.
    """
    ending = f": {record.message.partition(chr(10))[0]}" if record.message else ""
    yield f"{record.run_id} is {record.state.value}{ending}"
    begun = f"begun {format_datetime(record.started_at)}, {_took(record)}"
    yield f"{record.workload} training {record.name}, {begun}"
    yield from filter(None, [f"tags {', '.join(record.tags)}" if record.tags else ""])
    told = record.attempts[-_ATTEMPTS_TOLD:]
    if len(told) < len(record.attempts):
        yield f"{len(record.attempts) - len(told)} attempts before these"
    for attempt in told:
        yield from _told(attempt)
    last = record.attempt
    if last is not None and last.failure is not None:
        for fact in facts_of(place, last, last.failure):
            yield f"{fact.asked}: {fact.said}"
        tail = last.failure.log_tail.splitlines()[-_TAIL_TOLD:]
        yield from (f"  | {line[:_LINE_TOLD]}" for line in tail)
    yield from _figures_told(rows)
    yield from slow
    yield f"files: {place.directory}"


def _told(attempt: AttemptRecord) -> Iterator[str]:
    ended = attempt.ended_at
    lasted = format_duration(ended - attempt.started_at) if ended is not None else "not ended"
    said = [f"attempt {attempt.number}: {attempt.ending}", lasted]
    said += [f"step {attempt.step:g}"] if attempt.step is not None else []
    said += [f"on {attempt.host}"] if attempt.host else []
    said += [f"from {attempt.resume_from}"] if attempt.resume_from else []
    said += [attempt.decision] if attempt.decision else []
    yield ", ".join(said)
    for told, more in (
        ([f"  {name}: {state_of(attempt, name)}" for name in attempt.components], "components"),
        ([f"  alarm: {alarm.message}" for alarm in attempt.alarms], "alarms"),
    ):
        yield from (line[:_LINE_TOLD] for line in told[:_FIGURES_TOLD])
        if len(told) > _FIGURES_TOLD:
            yield f"  and {len(told) - _FIGURES_TOLD} {more} more"


def _figures_told(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = [name for name in (rows[-1] if rows else {}) if name not in ("step", "attempt", "at")]
    for name in names[:_FIGURES_TOLD]:
        values = [value for row in rows if is_number(value := row.get(name))]
        if values:
            finite = [*filter(math.isfinite, values)] or values
            within = f"{min(finite):.4g} to {max(finite):.4g}"
            yield f"{name}: {values[0]:.4g} at first, {values[-1]:.4g} last, {within}"
