"""The labelled facts about a run that its page, `muster show` and the end of `muster train` show.

`facts_of_run` has the facts about the run as a whole. `tasks.show.failure.list_facts` has the facts
about a failed attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.record.states import RunState
from tasks.show.failure import Fact
from tasks.show.next_start import NextStartFinder, describe_retry
from tasks.show.offline_tracker import make_sync_command
from tasks.show.resume import describe_parent, describe_resume_of
from tasks.spec.formatting import format_count, format_datetime, format_duration, join_words
from tasks.spec.run import RunSpec
from tasks.spec.watch import advise_about_values

#: Largest number of attempts whose results are named in the text about the duration of a run.
_MAX_NAMED_ATTEMPTS = 6


def facts_of_run(
    record: RunJson,
    place: RunPlace,
    spec: RunSpec | None,
    *,
    now: float,
    step: float | None = None,
    time_use: Iterable[str] = (),
    next_start: NextStartFinder | None = None,
) -> Iterator[Fact]:
    """Yield the labelled facts about a run, in the order for display.

    Args:
        record: Content of the run's `run.json`.
        place: Paths of the run's files.
        spec: The run spec, or None if no attempt has begun.
        now: Current time in UTC epoch seconds.
        step: Last training step that the current attempt reported. None to use the step in the
            record. After the end of the attempt, a later step in the record is used.
        time_use: Sentences about the time of the training steps.
        next_start: Finder of the checkpoint for the next attempt. None to create a finder.
    """
    attempt = record.attempt
    yield Fact("run", record.run_id)
    if record.started_at:
        yield Fact("started", format_datetime(record.started_at))
    yield Fact("took", describe_duration(record, now))
    if parent := describe_parent(record):
        yield Fact("started from", parent)
    if attempt is not None:
        if earlier_attempts := record.attempts[:-1]:
            counts = count_attempts_by_state(earlier_attempts)
            yield Fact("attempt", f"{attempt.number}, after {counts}")
        for sentence in describe_resume_of(attempt, spec):
            yield Fact("resume", sentence)
        for alarm in attempt.alarms:
            yield Fact("alarm", alarm.message)
        for warning in attempt.warnings:
            # Leave out a warning whose explanation is already in the final message of the run.
            explanation = warning.partition(": ")[2] or warning
            if not (record.state.is_final and explanation in record.message):
                yield Fact("warning", warning)
        advice = advise_about_values(attempt.not_finite)
        if advice and record.state is RunState.COMPLETED:
            yield Fact("what to do", advice)
        for sentence in describe_unanswered(attempt, now):
            yield Fact("no answer", sentence)
        if step is None or (attempt.state.is_final and step < (attempt.step or 0)):
            step = attempt.step
    total = spec.progress.total if spec is not None and spec.progress is not None else None
    if step is not None:
        yield Fact("progress", format_step(step, total))
    if record.state.is_final and spec is not None:
        start = (next_start or NextStartFinder(record, place, spec)).find()
        plan = start.plan
        if plan is not None and plan.path is not None:
            yield Fact("last checkpoint", str(plan.path), is_code=True)
        elif plan is not None and plan.has_folder and record.state is not RunState.COMPLETED:
            # The message of a completed run already says that the run saved no checkpoint.
            yield Fact("last checkpoint", f"none: {plan.rule}")
        if record.state is RunState.CANCELLED:
            retry = f"`muster retry {record.run_id}`"
            yield Fact("to continue", describe_retry(retry, start))
    if spec is not None and (command := make_sync_command(record.run_id, spec)):
        yield Fact("upload to W&B", command, is_code=True)
    if text := " ".join(time_use):
        yield Fact("time", text)
    yield Fact("record", str(place.record), is_code=True)


def count_attempts_by_state(attempts: Iterable[AttemptRecord]) -> str:
    """Return how many attempts ended in each state: `2 failed attempts and 1 cancelled attempt`.

    An attempt without a final state counts as unfinished.
    """
    counts = Counter(
        attempt.state.value if attempt.state.is_final else "unfinished" for attempt in attempts
    )
    return join_words(format_count(count, f"{state} attempt") for state, count in counts.items())


def describe_unanswered(attempt: AttemptRecord, now: float) -> Iterator[str]:
    """Yield a sentence about each file or folder whose file system does not respond.

    Example: `/data/metrics.jsonl has not answered for 40 s`.

    Args:
        attempt: The last attempt of the run.
        now: Current time in UTC epoch seconds.
    """
    end = "" if attempt.ended_at is None else ", until the end of the attempt"
    for place, since in attempt.unanswered.items():
        duration = format_duration(max(0.0, (attempt.ended_at or now) - since))
        yield f"{place} has not answered for {duration}{end}"


def describe_duration(record: RunJson, now: float | None = None) -> str:
    """Return a text with the duration of a run and the results of its attempts.

    Example: `21 s, 2 attempts (NODE_LOST and completed)`.

    Args:
        record: Content of the run's `run.json`.
        now: Current time in UTC epoch seconds. If None, the text contains no duration for a run
            that has not ended.
    """
    if record.ended_at is not None:
        duration = format_duration(record.ended_at - record.started_at)
    elif now is not None and record.started_at:
        duration = f"{format_duration(now - record.started_at)} until now"
    else:
        duration = "not ended"
    endings = [attempt.ending for attempt in record.attempts]
    names = ""
    if len(endings) > 1 and len(set(endings)) == 1:
        names = f" (all {endings[0]})" if len(endings) > 2 else f" (both {endings[0]})"
    elif len(endings) > 1:
        names = f" ({join_words(endings, at_most=_MAX_NAMED_ATTEMPTS)})"
    return f"{duration}, {format_count(len(endings), 'attempt')}{names}"


def format_step(step: float, total: float | None) -> str:
    """Return the step of a training for the user, such as `step 12 of 60`."""
    return f"step {step:g} of {total:g}" if total else f"step {step:g}"
