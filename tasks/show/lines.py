"""A run as lines for people: its events as they happen, and at the end the block that says how it
ended, why, and where to go on reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.record.events import Event
from tasks.record.places import AttemptPlace, RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.show.failure import block_of, facts_of, remedy_of
from tasks.show.screen import Line
from tasks.show.view import RunSeen, end_of, ending_text, job_text
from tasks.spec.values import is_number
from tasks.spec.words import moment, stopwatch


def lines_of(event: Event) -> Iterator[Line]:
    """What is said of an event; of most nothing. The run's end is told by `end_block`."""
    name = event.component or ""
    match event.name:
        case "attempt.begun" | "attempt.adopted":
            goes_on = " goes on" if event.name == "attempt.adopted" else ""
            yield Line(text=f"run {event.run_id}, attempt {event.attempt}{goes_on}", style="bold")
            yield Line(text=f"files in {event.directory}")
        case "containment":
            yield Line(text=f"containment {event.text}", style="dim")
        case "component.spawned" if event.pid is not None:
            yield Line(text=f"{name}: started, pid {event.pid}")
        case "job.submitted" | "job.attached":
            done = event.name.removeprefix("job.")
            yield Line(text=f"{name}: job {event.submission_id} {done}")
        case "job.state":
            yield Line(text=f"{name}: {job_text(event)}")
        case "job.swept" if event.killed or event.left:
            ended = "; ".join(event.killed)
            yield Line(text=f"{name}: ended what its job had left: {ended}", style="yellow")
        case "job.ended" if event.unseen:
            yield Line(text=f"{name}: {'; '.join(event.unseen)}", style="yellow")
        case "contact.lost":
            yield Line(text=f"{name}: no answer: {event.message}", style="yellow")
        case "contact.back":
            yield Line(text=f"{name}: {event.address} answers again", style="green")
        case "component.ready":
            yield Line(text=f"{name}: ready after {event.after_s:.2f} s", style="green")
        case "component.drained":
            yield Line(text=f"{name}: its part is done, the run goes on")
        case "component.exited":
            yield Line(text=f"{name}: ended, {ending_text(event.exit_code, event.signal)}")
        case "component.stuck":
            left = ", ".join(map(str, event.pids))
            yield Line(text=f"{name}: can't be ended: {left}", style="bold red")
        case "component.diagnosed":
            yield Line(text=f"{name}: what it was doing is in {event.path}")
        case "rollout.server.died":
            yield Line(text=f"{name}: server {event.rank} died: {event.why}", style="yellow")
        case "rollout.recovery.ended" if event.outcome != "abandoned":
            server = f"{name}: server {', '.join(map(str, event.ranks))}"
            if event.outcome == "recovered":
                yield Line(text=f"{server} is back after {event.took_s:.1f} s", style="green")
            else:
                yield Line(text=f"{server} is not back: {event.message}", style="yellow")
        case "rollout.warning":
            yield Line(text=f"{name}: {event.message}", style="yellow")
        case "rollout.failed":
            yield Line(text=f"{name}: {event.reason}", style="bold red")
        case "probe.failed" if event.probe == "live":
            yield Line(text=f"{name}: {event.reason} (miss {event.misses})", style="yellow")
        case "run.slow":
            yield Line(text=event.message, style="yellow")
        case "run.alarm":
            yield Line(text=f"alarm: {event.message}", style="bold yellow")
        case "teardown.begun":
            yield Line(text=f"stopping: {event.reason}")
        case "run.waiting":
            yield Line(text=f"waiting: {event.message}", style="yellow")
        case "run.state" if event.state == "pending_resources" and event.message:
            yield Line(text=f"waiting: {event.message}", style="yellow")


def failed_attempt(seen: RunSeen) -> Iterator[Line]:
    """Of an attempt that failed, and that another one follows; nothing of one that did not."""
    failure = seen.failure
    if not failure or seen.directory is None:
        return
    yield Line(text=f"attempt {seen.attempt} failed: {failure}", style="red")
    place = AttemptPlace(directory=seen.directory, number=seen.attempt)
    for name, text in block_of(failure, place, is_last=False):
        yield _field(name, text)


_STYLES = {"completed": "bold green", "failed": "bold red", "crashed": "bold red"}
_LABEL = 9


def end_block(
    state: str, message: str, record_path: Path | None = None, page: str = ""
) -> Iterator[Line]:
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
    yield Line(text="")
    # The message of the flow run says where to look, too, which stands below here.
    said = str(failure) if failure else message
    yield Line(text=f"{state}: {said}{left}", style=_STYLES.get(state, "bold yellow"))
    if record is not None:
        yield _field("run", record.run_id)
        yield _field("took", _took(record))
        yield from (_field("alarm", one.message) for one in (attempt.alarms if attempt else ()))
    if failure and attempt and record_path is not None:
        place = RunPlace(directory=record_path.parent).attempt(attempt.number)
        for name, text in block_of(failure, place):
            yield _field(name, text)
    elif state == "failed" and (remedy := remedy_of(message)):
        yield _field("to do", remedy)
    if record_path is not None:
        yield _field("record", str(record_path))
    if page:
        yield _field("page", page)


def _took(record: RunJson) -> str:
    """`0:21, 2 attempts (NODE_LOST, completed)`."""
    ended = record.ended_at
    took = stopwatch(ended - record.started_at) if ended is not None else "not ended"
    ends = [attempt.ending for attempt in record.attempts]
    if len(ends) < 2:
        return f"{took}, {'1 attempt' if ends else 'no attempt'}"
    shown = ends if len(ends) <= 6 else [*ends[:3], f"{len(ends) - 5} more", *ends[-2:]]
    return f"{took}, {len(ends)} attempts ({', '.join(shown)})"


def _field(name: str, text: str) -> Line:
    return Line(text=f"  {name:<{_LABEL}}{text}")


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
    begun = f"begun {moment(record.started_at)}, {_took(record)}"
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
    lasted = stopwatch(ended - attempt.started_at) if ended is not None else "not ended"
    said = [f"attempt {attempt.number}: {attempt.ending}", lasted]
    said += [f"step {attempt.step:g}"] if attempt.step is not None else []
    said += [f"on {attempt.host}"] if attempt.host else []
    said += [f"from {attempt.resume_from}"] if attempt.resume_from else []
    said += [attempt.decision] if attempt.decision else []
    yield ", ".join(said)
    for name in attempt.components:
        state = end_of(attempt, name) if attempt.components[name].ended_at else "runs"
        yield f"  {name}: {state}"
    yield from (f"  alarm: {alarm.message}" for alarm in attempt.alarms)


def _figures_told(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = [name for name in (rows[-1] if rows else {}) if name not in ("step", "attempt", "at")]
    for name in names[:_FIGURES_TOLD]:
        values = [value for row in rows if is_number(value := row.get(name))]
        if values:
            within = f"{min(values):.4g} to {max(values):.4g}"
            yield f"{name}: {values[0]:.4g} at first, {values[-1]:.4g} last, {within}"
