"""Describe a failed attempt of a run: the first failed component, the cause, the next step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tasks.record.advice import advise_by_log
from tasks.record.final_record import FLOW_LOST
from tasks.record.outcome import Failure
from tasks.record.places import RunPlace
from tasks.record.ranks import read_first_rank
from tasks.record.run_json import AttemptRecord
from tasks.show.next_start import NextStartFinder, describe_retry, describe_retry_of
from tasks.show.run_view import describe_ending
from tasks.spec.failure_kinds import HANG_REPORT, FailureKind
from tasks.spec.formatting import format_duration, format_time

#: Number of last log lines of the failed component that the user sees.
_TAIL_LINES = 12
#: Advice for the user if there is no hang report to read.
_NO_HANG_REPORT = (
    "Read the end of the component's log. There is no hang report, so the code at which the "
    "component hung is unknown."
)


class Fact(NamedTuple):
    """One labelled line about a failure or a run."""

    #: Label, such as `first failure`.
    label: str
    #: Text that follows the label.
    text: str
    #: True if the text is a path or a log line. Markdown pages then show it as code.
    is_code: bool = False


def list_facts(
    place: RunPlace,
    attempt: AttemptRecord,
    failure: Failure,
    next_start: NextStartFinder | None = None,
) -> Iterator[Fact]:
    """Yield the labelled lines about the failure of an attempt, in the order for display.

    Args:
        place: Paths of the run's files.
        attempt: The failed attempt.
        failure: Cause of the failure.
        next_start: Finder of the checkpoint for the next attempt. None to search for the
            checkpoint in this function.
    """
    if failure.component:
        first_failure = f"{failure.component}: {_describe_first_failure(attempt, failure)}"
        yield Fact("first failure", first_failure)
    yield Fact("why", str(failure))
    if failure.line and failure.line not in failure.message:
        yield Fact("log line", failure.line, is_code=True)

    # Give the general advice, such as "start the run again", only after the last attempt.
    # After every other attempt, Muster itself starts the next attempt.
    general_remedy = advise_by_log(failure) if attempt.is_last else ""
    remedy = failure.hint or general_remedy
    if failure.rule == FLOW_LOST and attempt.is_last:
        subject = "The next attempt"
        if next_start is None:
            retry = describe_retry_of(place, subject)
        else:
            retry = describe_retry(subject, next_start.find())
        remedy = f"{remedy} {retry}."
    if not failure.component:
        if remedy:
            yield Fact("what to do", remedy)
    else:
        log = place.attempt(attempt.number).log(failure.component)
        hang_report = log.with_suffix(".hang.txt")
        if HANG_REPORT in remedy and not hang_report.exists():
            remedy = _NO_HANG_REPORT
        if remedy:
            yield Fact("what to do", remedy.replace(HANG_REPORT, str(hang_report)))
        yield Fact("log", str(log), is_code=True)
        if hang_report.exists():
            yield Fact("hang report", str(hang_report), is_code=True)
    yield Fact("what happens next", describe_next_step(attempt))


def _describe_first_failure(attempt: AttemptRecord, failure: Failure) -> str:
    """Return a text about the end of the component that failed first: how and when it ended.

    If the component is a launcher of ranks, the text begins with the rank that failed first.

    Examples: `exit code 1, pid 812, 7.5 s after its start` and `rank 1 (pid 815) was killed by
    SIGKILL first; the launcher: exit code 1, pid 812`.
    """
    component_end = _describe_component_end(attempt, failure)
    first_rank = read_first_rank(failure.message)
    return f"{first_rank}; the launcher: {component_end}" if first_rank else component_end


def _describe_component_end(attempt: AttemptRecord, failure: Failure) -> str:
    """Return a text that says how and when the component that failed first ended.

    The text does not mention the ranks of the component."""
    component = attempt.components.get(failure.component or "")
    if failure.has_ended:
        ending = describe_ending(failure)
    elif component is not None:
        ending = "still alive"
    else:
        ending = "never started"
    if component is None:
        return ending

    parts = [ending]
    if component.pid is not None:
        parts.append(f"pid {component.pid}")
    if failure.has_ended and component.ended_at:
        parts.append(
            f"{format_duration(component.ended_at - component.started_at)} after its start"
        )
        parts.append(f"at {format_time(component.ended_at)}")
    if not component.ready_at:
        parts.append("was never ready")
    return ", ".join(parts)


def describe_next_step(attempt: AttemptRecord) -> str:
    """Return a text that says whether Muster will start another attempt after this attempt."""
    if not attempt.decision:
        return "Muster decides about a retry when all processes have ended"
    if attempt.is_last:
        return f"not retried: {attempt.decision.removeprefix('final: ')}"
    return attempt.decision


def list_card_lines(attempt: AttemptRecord, failure: Failure) -> Iterator[str]:
    """Yield short lines about a failure for a card on the run's page in the Prefect UI.

    The lines are short because a card cuts each line after about 40 letters.
    """
    name = failure.component
    if name:
        yield f"{name}: {_describe_ending(attempt, failure, name)}"
    yield failure.line or failure.message
    if name:
        yield f"log: attempt-{attempt.number:02d}/{name}.log"
    yield "next: not retried" if attempt.is_last else f"next: {describe_next_step(attempt)}"


def _describe_ending(attempt: AttemptRecord, failure: Failure, name: str) -> str:
    """Return a text about the end of a component, for example `exit code 1 after 7.5 s`.

    Args:
        name: Name of the component that failed first.
    """
    if not failure.has_ended:
        return "still alive"
    component = attempt.components.get(name)
    if component is None or not component.ended_at:
        return describe_ending(failure)
    run_time_s = component.ended_at - component.started_at
    return (
        f"{describe_ending(failure)} after {format_duration(run_time_s)}"
        if run_time_s
        else describe_ending(failure)
    )


def last_log_lines(failure: Failure) -> list[str]:
    """Return the last lines of the failed component's log, at most 12 lines."""
    return failure.log_tail.splitlines()[-_TAIL_LINES:]


def summarize_failure(message: str, place: RunPlace, attempt: AttemptRecord | None) -> str:
    """Return the message of a failed run, extended by two facts.

    The facts are the path of the failed component's log, and whether Muster starts another attempt.

    Args:
        message: Message of the failed run. If no component failed, the message is returned
            unchanged.
        place: Paths of the run's files.
        attempt: The last attempt of the run, or None if the run has no attempt.
    """
    failure = attempt.failure if attempt is not None else None
    if attempt is None or failure is None or not failure.component:
        return message
    log = place.attempt(attempt.number).log(failure.component)
    return f"{message}; log: {log}; {describe_next_step(attempt)}"


def add_unwritten_files(message: str, unwritten_files: str) -> str:
    """Return the message of an ended run, extended by the files that could not be written.

    Args:
        message: Message of the run.
        unwritten_files: Text with the files and the reasons, or an empty string.
    """
    if not unwritten_files:
        return message
    return (
        f"{message}; Muster could not write files of the run ({unwritten_files}); free disk "
        "space, then run `muster reconcile`"
    )


def find_remedy(message: str) -> str:
    """Return the advice to the user for a run that failed before its first attempt.

    Args:
        message: Message of the failed run, which begins with the kind of failure, as in `STORAGE:
            disk full`.

    Returns:
        The advice, or an empty string if the message does not begin with a kind of failure.
    """
    kind = message.partition(":")[0]
    return FailureKind(kind).properties.remedy if kind in FailureKind.__members__ else ""


def format_failure(place: RunPlace, attempt: AttemptRecord, failure: Failure) -> str:
    """Return all facts about a failure and the last log lines of the component, one per line."""
    lines = [f"attempt {attempt.number} failed"]
    lines += [f"{fact.label}: {fact.text}" for fact in list_facts(place, attempt, failure)]
    lines.append(f"record: {place.record}")
    if failure.log_tail:
        lines += ["last log lines:", failure.log_tail]
    return "\n".join(lines)
