"""Describe a run in lines of text, for the terminal and for logs.

- `lines_of` describes an event while the run is active.
- `end_block` describes how the run ended, why, and in which files the details are.
- `summarize_run` describes a whole run, with all its attempts.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.text import Text

from tasks.record.events import Event
from tasks.record.outcome import Failure, list_problems
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, ResumeRecord, RunJson
from tasks.record.states import RunState
from tasks.show.facts_of_run import describe_duration, facts_of_run
from tasks.show.failure import find_remedy, last_log_lines, list_facts
from tasks.show.metric_order import sort_by_meaning
from tasks.show.next_start import NextStartFinder, describe_retry_of, read_spec_of_run
from tasks.show.output import line_of
from tasks.show.resume import describe_attempt, describe_parent, describe_resume
from tasks.show.run_view import ObservedRun, describe_component_state, describe_job, format_ending
from tasks.spec.formatting import (
    format_count,
    format_datetime,
    format_duration,
    join_commas,
)
from tasks.spec.values import list_numbers, shorten
from tasks.spec.watch import advise_about_values

#: Mapping from the name of an event to its line of text and a Rich style. In the line, `{0}` stands
#: for the event. Other events are not shown.
_TEXTS: Mapping[str, tuple[str, str]] = {
    "containment": ("process containment: {0.text}", "dim"),
    "job.submitted": ("{0.component}: job {0.submission_id} submitted", ""),
    "job.attached": ("{0.component}: job {0.submission_id} attached", ""),
    "contact.lost": ("{0.component}: lost contact: {0.message}", "yellow"),
    "contact.back": ("{0.component}: {0.address} answers again", "green"),
    "component.ready": ("{0.component}: ready after {0.after_s:.2f} s", "green"),
    "component.drained": ("{0.component}: finished its work; the run continues", ""),
    "component.warned": ("{0.component}: was warned with {0.signal}: {0.reason}", "yellow"),
    "component.saving": (
        "{0.component}: seems to be writing a checkpoint; its stop signal waits for at most "
        "{0.within_s:g} s",
        "yellow",
    ),
    "component.diagnosed": ("{0.component}: hang report written to {0.path}", ""),
    "rollout.server.died": ("{0.component}: server {0.rank} died: {0.why}", "yellow"),
    "rollout.warning": ("{0.component}: {0.message}", "yellow"),
    "rollout.failed": ("{0.component}: {0.reason}", "bold red"),
    "place.unanswered": ("{0.message}", "yellow"),
    "place.answered": ("{0.message}", "green"),
    "run.slow": ("{0.message}", "yellow"),
    "run.alarm": ("alarm: {0.message}", "bold yellow"),
    "run.warning": ("warning: {0.message}", "bold yellow"),
    "evaluation.queued": ("{0.message}", ""),
    "evaluation.ended": ("{0.message}", ""),
    "run.waiting": ("waiting: {0.message}", "yellow"),
    "teardown.begun": ("stopping: {0.reason}", ""),
}


def lines_of(event: Event) -> Iterator[Text]:
    """Yield the lines that describe an event of a run. Most events have no lines.

    The event at the end of a run has no lines, because `end_block` describes the end.
    """
    name = event.component or ""
    if event.name in _TEXTS:
        template, style = _TEXTS[event.name]
        yield line_of(template.format(event), style)
        return
    match event.name:
        case "attempt.begun" | "attempt.adopted":
            suffix = " continues" if event.name == "attempt.adopted" else ""
            yield line_of(f"run {event.run_id}, attempt {event.attempt}{suffix}", "bold")
            yield line_of(f"files in {event.directory}")
            if event.resume:
                resume = ResumeRecord.model_validate(event.resume)
                for sentence in describe_resume(resume, event.attempt):
                    yield line_of(sentence, "yellow" if resume.passed is None else "")
        case "component.spawned" if event.pid is not None:
            yield line_of(f"{name}: started, pid {event.pid}")
        case "job.state":
            yield line_of(f"{name}: {describe_job(event)}")
        case "job.swept" if event.killed or event.left:
            yield line_of(
                f"{name}: Muster ended leftover processes of the job: {'; '.join(event.killed)}",
                "yellow",
            )
        case "job.ended" if event.unseen:
            yield line_of(f"{name}: {'; '.join(event.unseen)}", "yellow")
        case "component.exited":
            yield line_of(f"{name}: ended, {format_ending(event.exit_code, event.signal)}")
        case "component.stuck":
            survivors = event.message or join_commas(event.pids)
            yield line_of(f"{name}: could not be killed: {survivors}", "bold red")
        case "rollout.recovery.ended" if event.outcome != "abandoned":
            server = f"{name}: server {join_commas(event.ranks)}"
            if event.outcome == "recovered":
                yield line_of(f"{server} recovered after {event.took_s:.1f} s", "green")
            else:
                yield line_of(f"{server} has not recovered: {event.message}", "yellow")
        case "probe.failed" if event.probe == "live":
            failures = f"failed liveness probes in a row: {event.misses}"
            yield line_of(f"{name}: {event.reason} ({failures})", "yellow")
        case "run.state" if event.state == "pending_resources" and event.message:
            yield line_of(f"waiting: {event.message}", "yellow")


def format_failed_attempt(seen: ObservedRun, decision: str) -> Iterator[Text]:
    """Yield the lines about a failed attempt of a run that Muster retries.

    Yield nothing if the attempt did not fail.

    Args:
        seen: State of the run at the end of the attempt.
        decision: Text for the user about the next attempt, such as `retried: NODE_LOST, ...`.
    """
    failure = seen.failure
    if failure is None or seen.directory is None:
        return
    yield line_of(f"attempt {seen.attempt} failed: {failure}", "red")
    failed = AttemptRecord(
        number=seen.attempt, state=RunState.FAILED, failure=failure, decision=decision
    )
    place = RunPlace(directory=seen.directory.parent)
    yield from _failure_fields(place, failed, failure, omit=("why", "first failure"))


def _failure_fields(
    place: RunPlace,
    attempt: AttemptRecord,
    failure: Failure,
    omit: Collection[str],
    next_start: NextStartFinder | None = None,
) -> Iterator[Text]:
    """Yield the facts about a failure, one per line, and the last log lines of the component.

    Args:
        omit: Labels of the facts to leave out.
        next_start: See `list_facts`.
    """
    for fact in list_facts(place, attempt, failure, next_start):
        if fact.label not in omit:
            yield _format_field(fact.label, fact.text)
    for number, line in enumerate(last_log_lines(failure)):
        yield _format_field("" if number else "last log lines", f"| {line}")


#: Rich style of the line that says how a run ended. The keys are final states of the run.
_STYLES = {"completed": "bold green", "failed": "bold red", "crashed": "bold red"}
#: Width, in characters, of the labels in the lines that are printed at the end of a run.
_LABEL_COLUMNS = 19


#: States of a flow run in which `run.json` should contain the end of the run. `crashed` is not in
#: the set, because the processes of a run may still work after its flow run has crashed.
_FINAL_STATES = ("completed", "failed", "cancelled")


def end_block(
    state: str, message: str, record_path: Path | None = None, page: str = ""
) -> Iterator[Text]:
    """Yield an empty line and the lines that say how a run ended.

    Args:
        state: Final state of the run or of its flow run: `completed`, `failed`, `cancelled` or
            `crashed`.
        message: Message of the flow run's state.
        record_path: Path of `run.json`, or None if the run never began.
        page: Address of the flow run's page in the Prefect UI. Empty if the Prefect server, and so
            the page, disappears at the end of this process.
    """
    record = None
    # If `run.json` cannot be read, the user still gets the state and the message.
    with suppress(OSError, ValueError):
        record = RunJson.read(record_path) if record_path is not None else None
    attempt = record.attempt if record is not None else None
    failure = attempt.failure if attempt is not None and state == "failed" else None

    now = time.time()
    yield line_of("")
    is_checked = attempt is None or not any(job.unseen for job in attempt.jobs.values())
    suffix = "; all its processes have ended" if state == "cancelled" and is_checked else ""
    # Show the text of the failure if possible, instead of the message of the flow run. That message
    # contains the path of the log, which is printed on a separate line below.
    cause = str(failure) if failure else message
    first, *other_problems = list_problems(cause)
    style = _STYLES.get(state, "bold yellow")
    yield line_of(f"{state}: {first}{suffix}", style)
    for problem in other_problems:
        yield line_of(f"{' ' * len(state)}  {problem}", style)

    if record_path is not None:
        place = RunPlace(directory=record_path.parent)
        spec = read_spec_of_run(record, place) if record is not None else None
        next_start = NextStartFinder(record, place, spec) if record is not None else None
        if failure and attempt:
            yield from _failure_fields(place, attempt, failure, ("why",), next_start)
        if record is not None:
            for fact in facts_of_run(record, place, spec, now=now, next_start=next_start):
                yield _format_field(fact.label, fact.text)
            if not record.state.is_final and state in _FINAL_STATES:
                yield _format_field(
                    "incomplete", f"the file {record_path} lacks the final state of the run"
                )
                yield _format_field("what to do", "free disk space, then run `muster reconcile`")
        else:
            yield _format_field("record", str(record_path))
    if failure is None and state == "failed" and (remedy := find_remedy(message)):
        yield _format_field("what to do", remedy)
    if page:
        yield _format_field("page", page)


def _format_field(label: str, text: str) -> Text:
    return line_of(f"  {label:<{_LABEL_COLUMNS}}{text}")


#: Number of last attempts that a summary of a run describes. Earlier attempts are left out.
_STORY_ATTEMPTS = 8
#: Largest number of metrics in a summary of a run. The same limit applies to the components, the
#: alarms and the remarks of each attempt.
_STORY_ITEMS = 8
#: Largest number of log lines in a summary of a run. These are the last lines of the log.
_STORY_LOG_LINES = 10
#: Keys in a line of a metrics file that are no metrics.
_NO_METRICS = frozenset({"step", "attempt", "at", "epoch", "global_step", "data", "metrics"})
#: Matches `data.` or `metrics.` before the name of a metric; see `list_metric_sections`.
_SECTION = re.compile(r"^(data|metrics)\.")
#: Largest length, in characters, of log lines and other text from programs in a summary of a run.
#: Longer text is cut.
_STORY_COLUMNS = 160


def summarize_run(
    record: RunJson,
    place: RunPlace,
    rows: Sequence[Mapping[str, Any]] = (),
    slow: Iterable[str] = (),
) -> Iterator[str]:
    """Yield a summary of a run, short enough for a screen or for the prompt of a language model.

    Args:
        rows: Metrics of the run in order, one mapping per step.
        slow: Sentences about the duration of the training steps; see `Slow.sentences`.
    """
    first, *other_problems = list_problems(record.message)
    ending = f": {first.partition(chr(10))[0]}" if first else ""
    yield f"{record.run_id} is {record.state.value}{ending}"
    yield from other_problems
    start = f"started {format_datetime(record.started_at)}, {describe_duration(record)}"
    yield f"{record.workload} training {record.name}, {start}"
    if record.tags:
        yield f"tags {', '.join(record.tags)}"
    if parent := describe_parent(record):
        yield f"started from {parent}"

    attempts = record.attempts[-_STORY_ATTEMPTS:]
    if len(attempts) < len(record.attempts):
        yield f"{len(record.attempts) - len(attempts)} earlier attempts are not shown"
    for attempt in attempts:
        yield from _summarize_attempt(attempt, record.message)

    last = record.attempt
    if last is not None and last.failure is not None:
        for fact in list_facts(place, last, last.failure):
            yield f"{fact.label}: {fact.text}"
        for line in last.failure.log_tail.splitlines()[-_STORY_LOG_LINES:]:
            yield f"  | {shorten(line, _STORY_COLUMNS)}"

    elif last is not None and record.state is RunState.COMPLETED:
        if advice := advise_about_values(last.not_finite):
            yield f"what to do: {advice}"
    elif last is not None and record.state is RunState.CANCELLED:
        yield describe_retry_of(place, f"`muster retry {record.run_id}`")

    yield from _summarize_metrics(rows)
    yield from slow
    yield f"files: {place.directory}"


def _summarize_attempt(attempt: AttemptRecord, message: str) -> Iterator[str]:
    """Yield a line about an attempt, and lines about its checkpoint, components and alarms.

    Args:
        message: Message of the run. Another part of the summary shows this message, so this
            function leaves out the warnings that the message contains.
    """
    ended = attempt.ended_at
    parts = [f"attempt {attempt.number}: {attempt.ending}"]
    parts.append(format_duration(ended - attempt.started_at) if ended is not None else "not ended")
    if attempt.step is not None:
        parts.append(f"step {attempt.step:g}")
    if attempt.host:
        parts.append(f"on {attempt.host}")
    if attempt.resume_from:
        parts.append(f"with checkpoint {attempt.resume_from}")
    if attempt.decision:
        parts.append(attempt.decision)
    yield ", ".join(parts)

    # Shorten only texts from programs. Muster itself wrote the remarks, so keep them whole.
    remarks = [f"  {text}" for text in describe_attempt(attempt) if text not in message]
    yield from _limit_lines(remarks, "remarks")
    components = [
        f"  {name}: {describe_component_state(attempt, name)}" for name in attempt.components
    ]
    yield from _limit_lines([shorten(line, _STORY_COLUMNS) for line in components], "components")
    alarms = [f"  alarm: {alarm.message}" for alarm in attempt.alarms]
    alarms = [shorten(line, _STORY_COLUMNS) for line in alarms]
    yield from _limit_lines(alarms, "alarms")


def _limit_lines(lines: Sequence[str], noun: str) -> Iterator[str]:
    """Yield the first eight lines, and a line such as `and 3 more alarms` if there are more.

    Args:
        noun: Plural noun for the things that the lines describe, such as `alarms`.
    """
    yield from lines[:_STORY_ITEMS]
    if len(lines) > _STORY_ITEMS:
        yield f"  and {len(lines) - _STORY_ITEMS} more {noun}"


def _summarize_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each of the most useful metrics: first, last, smallest and largest value.

    If the training wrote further metrics, a last line shows the number and the names of these
    metrics.

    Args:
        rows: Metrics of the run in order, one mapping per step.
    """
    values_by_name: dict[str, list[float]] = {}
    for row in rows:
        for key, value in list_numbers(row):
            name = _SECTION.sub("", key)
            if name.rpartition(".")[2] not in _NO_METRICS:
                values_by_name.setdefault(name, []).append(value)

    names = sort_by_meaning(values_by_name)
    for name in names[:_STORY_ITEMS]:
        values = values_by_name[name]
        finite = [*filter(math.isfinite, values)] or values
        limits = f"range {min(finite):.4g} to {max(finite):.4g}"
        yield f"{name}: first {values[0]:.4g}, last {values[-1]:.4g}, {limits}"
    others = names[_STORY_ITEMS:]
    if others:
        count = format_count(len(others), "more metric")
        line = f"and {count} (see `muster metrics`): {join_commas(others)}"
        yield shorten(line, _STORY_COLUMNS)
