"""The page of a run: an artifact a function.

First what it does, or what it died of and what follows; then what runs where, its step, its curve
and its attempts, where else it is shown, and its record, so that whoever can't see its host can
read it, and another host can go on with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from tasks.record.outcome import Failure
from tasks.record.retries import build_attempt_table
from tasks.record.run_json import AttemptRecord, ComponentRecord, JobRecord, RunJson
from tasks.record.states import RunState
from tasks.show.failure import card_of, facts_of, remedy_of, tail_of
from tasks.show.pictures import Figures, curve_of, number_text
from tasks.show.slow import Measured, Slow
from tasks.show.view import RunView, ServerSeen, Shown, state_of
from tasks.spec.component import FLEET
from tasks.spec.formatting import (
    code_block,
    escape_cell,
    escape_markdown,
    format_count,
    format_datetime,
    format_duration,
    inline_code,
    markdown_link,
    markdown_table,
)

#: The keys of the artifacts of a run.
SUMMARY, COMPONENTS, TIMELINE = "summary", "components", "timeline"
REWARD, PROGRESS, ATTEMPTS = "reward", "progress", "attempts"
RECORD, TIME = "record", "time"

_HEAD = ("component", "state", "runs as", "ready after", "ports", "log")
_SERVERS_HEAD = ("server", "state", "address", "restarts", "log")
#: A table shows no more of them.
_SERVERS_AT_MOST = 200


def components_of(view: RunView) -> Shown:
    """The components of the attempt under way, or of the last one, and the servers of a fleet."""
    attempt = view.record.attempt
    if attempt is None:
        names = ", ".join(view.spec.components)
        return Shown(
            headline="nothing was started yet", data=f"To be started: {escape_markdown(names)}."
        )
    rows = [[*_row(view, attempt, name)] for name in view.spec.components]
    on = f" on {escape_markdown(view.host)}" if view.host else ""
    files = inline_code(view.place.attempt(attempt.number).directory)
    parts = [
        f"Attempt {attempt.number}{on}, as of {format_datetime(view.at)}. Logs are in {files}.",
        markdown_table(_HEAD, rows),
    ]
    if servers := view.seen.servers:
        parts += ["Servers of the fleet:", markdown_table(_SERVERS_HEAD, _servers(servers))]
    if len(servers) > _SERVERS_AT_MOST:
        parts.append(f"The first {_SERVERS_AT_MOST} of {len(servers)} servers.")
    first = attempt.failure.component if attempt.failure else None
    states = [
        f"{name} {'failed' if name == first else state_of(attempt, name)}"
        for name in view.spec.components
    ]
    return Shown(headline="\n\n".join(map(escape_markdown, states)), data="\n\n".join(parts))


def _row(view: RunView, attempt: AttemptRecord, name: str) -> Iterator[str]:
    seen = attempt.components.get(name)
    yield escape_markdown(name)
    state, row = escape_markdown(state_of(attempt, name)), view.seen.rows[name]
    if attempt.failure and attempt.failure.component == name:
        state = f"**failed first**: {state}"
    elif state == "starting" and row.unready:
        state += f", not ready: {escape_markdown(row.unready)}"
    if row.status and row.status not in state:
        state += f"; its last status: {escape_markdown(row.status)}"
    yield state
    yield _runs_as(attempt, name, seen)
    if seen is None or not seen.started_at:
        yield ""
    elif (after_s := seen.ready_after_s) is not None:
        yield format_duration(after_s)
    else:
        yield "never" if seen.ended_at or attempt.ended_at else "not yet"
    yield ", ".join(_ports(attempt.ports, name))
    yield inline_code(f"{name}.log") if seen is not None else ""


def _runs_as(attempt: AttemptRecord, name: str, seen: ComponentRecord | None) -> str:
    if seen is None:
        return ""
    if seen.pid is not None:
        return f"pid {seen.pid}"
    job = attempt.jobs.get(name, JobRecord())
    where = f" on {escape_markdown(', '.join(job.nodes))}" if job.nodes else ""
    return f"Ray job {inline_code(job.submission_id)}{where}"


def _ports(ports: Mapping[str, int], name: str) -> Iterator[str]:
    """Of a fleet, its gateway's: those of its servers stand with them."""
    own, others = f"{name}.port", f"{name}.ports."
    for port, number in ports.items():
        if port == own:
            yield str(number)
        elif port.startswith(others) and name != FLEET:
            yield f"{escape_markdown(port.removeprefix(others))} {number}"


def _servers(servers: Sequence[ServerSeen]) -> Iterator[list[str]]:
    for server in servers[:_SERVERS_AT_MOST]:
        cause = f": {escape_markdown(server.cause)}" if server.cause else ""
        yield [
            str(server.rank),
            escape_markdown(server.state) + cause,
            inline_code(server.url),
            str(server.starts - 1) if server.starts > 1 else "",
            inline_code(f"{FLEET}-r{server.rank}.log"),
        ]


_SAID_AT_MOST = 5


def progress_of(view: RunView) -> Shown | None:
    """How far it has come; None where that is not known as a part of a whole."""
    progress = view.spec.progress
    if progress is None or progress.total is None or view.seen.pace.step is None:
        return None
    percent = max(0.0, min(100.0, 100.0 * view.seen.pace.step / progress.total))
    return Shown(headline=escape_markdown(_step(view)), data=percent, type="progress")


def attempts_of(view: RunView) -> Shown:
    """Return the table of the attempts, a row each."""
    rows = build_attempt_table(view.record.attempts)
    told = [f"{row['attempt']}: {row['kind'] or row['state']}" for row in rows[-_SAID_AT_MOST:]]
    if len(rows) > len(told):
        told.insert(0, f"{len(rows)} attempts, the last {len(told)}:")
    headline = "\n\n".join(map(escape_markdown, told))
    cells = [{name: escape_cell(said) for name, said in row.items()} for row in rows]
    return Shown(headline=headline, data=json.dumps(cells), type="table")


def time_of(view: RunView) -> Shown | None:
    """Where its time goes; None while nobody knows."""
    slow = view.slow
    if slow is None:
        return None
    said = [*slow.sentences()]
    rows = [
        [
            escape_markdown(what),
            *("" if value is None else told(value) for value in (one.now, one.before)),
        ]
        for what, one, told in _measured(slow)
    ]
    head = ("", "of late", "before")
    return Shown(
        headline="\n\n".join(map(escape_markdown, said)),
        data=f"{escape_markdown(' '.join(said))}\n\n{markdown_table(head, rows)}\n\n"
        f"As of {format_datetime(view.at)}.",
    )


def _measured(slow: Slow) -> Iterator[tuple[str, Measured, Callable[[float], str]]]:
    if slow.step is not None:
        yield "a step", slow.step, format_duration
    yield from ((name, slow.parts[name], format_duration) for name in slow.shares)
    yield from (
        (f"GPUs of {node} at work", one, "{:.0%}".format) for node, one in slow.gpus.items()
    )
    yield from ((f"answers, {name}", one, format_duration) for name, one in slow.requests.items())


def curve_shown(view: RunView, figures: Figures) -> Shown | None:
    """The curve of what the training writes; None while it has written nothing of it."""
    points, name = figures.points, figures.name
    if not points:
        return None
    step = view.spec.progress.step if view.spec.progress else "step"
    title = f"{name} by {step}"
    values = [value for _, value in points]
    said = (
        f"{title}: {number_text(values[0])} at first, "
        f"{number_text(values[-1])} at {step} {number_text(points[-1][0])}"
    )
    source = f"From {inline_code(figures.path)}, as of {format_datetime(view.at)}."
    data = f"{escape_markdown(said)}. {source}"
    picture = curve_of(points, x=step, y=name, title=title)
    return Shown(headline=escape_markdown(said), picture=picture, data=data)


#: How much of the beginning of a log is looked at for an address that a tracker prints there.
_LOOKED_AT_BYTES = 262_144
#: `wandb: 🚀 View run at https://wandb.ai/team/project/runs/abc`; MLflow's `View run x at: URL`.
_PRINTED = re.compile(r"View run\b[^\n]{0,200}?(https?://[^\s\x1b]+/runs/[^\s\x1b]+)")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def places_of(view: RunView) -> tuple[tuple[str, str], ...]:
    """Where else it is shown, `(name, address)`: as its trackers print it, and on its cluster."""
    attempt, logs = view.record.attempt, list[Path]()
    if attempt is not None:
        logs = [view.place.attempt(attempt.number).log(name) for name in view.spec.components]
    trackers = [("Tracker", url) for url in filter(None, map(_printed_in, logs))]
    return tuple(dict.fromkeys([*trackers, *_ray(view)]))


def _ray(view: RunView) -> Iterator[tuple[str, str]]:
    if view.spec.ray is None or view.spec.ray.address is None:
        return
    parts = urlsplit(view.spec.ray.address.rstrip("/"))
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without a user
    jobs = view.record.attempt.jobs.values() if view.record.attempt else ()
    ids = [job.submission_id for job in jobs if job.submission_id]
    yield from (("Ray dashboard", f"{address}/#/jobs/{quote(id)}") for id in ids)
    if not ids:
        yield "Ray dashboard", address


def _printed_in(log: Path) -> str:
    try:
        with log.open("rb") as f:
            said = f.read(_LOOKED_AT_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    found = _PRINTED.search(_COLORS.sub("", said))
    return found[1].rstrip(".,)") if found else ""


#: Of a message, on a card.
_CARD_LINES = 5


def summary_of(view: RunView) -> Shown:
    """The story so far."""
    said, why = _state(view)
    # Why it failed stands below, among the other answers.
    failed = view.failed
    parts = [f"### {said.capitalize()}"]
    if why and failed is None:
        parts.append(code_block(why) if "\n" in why else escape_markdown(why))
    if said == "failed" and failed is None and (remedy := remedy_of(why)):
        parts.append(f"**What to do**: {escape_markdown(remedy)}")
    parts.append("\n".join(_facts(view)))
    if failed is not None:
        parts += _failure(view, *failed)
    if places := places_of(view):
        parts += ["**Elsewhere**", "\n".join(f"- {markdown_link(*one)}" for one in places)]
    parts.append(f"As of {format_datetime(view.at)}.")
    return Shown(headline=_headline(view, said, why), data="\n\n".join(filter(None, parts)))


def _state(view: RunView) -> tuple[str, str]:
    """The state in a word, and what is to be said of it in a line."""
    state = view.record.state.value
    match view.record.state:
        case RunState.FAILED:
            return state, str(view.failed[1]) if view.failed else view.message
        case RunState.COMPLETED | RunState.CANCELLED:
            return state, view.message
        case RunState.PENDING_RESOURCES:
            return "waiting", view.seen.doing.removeprefix("waiting: ") or "for its gang of GPUs"
        case RunState.QUEUED | RunState.ADMITTED:
            return "about to start", view.seen.doing
        case _:
            return state, view.seen.doing.removeprefix(f"{state}: ")


def _headline(view: RunView, said: str, why: str) -> str:
    told, step = why.splitlines()[:_CARD_LINES], _step(view)
    if view.failed is not None:
        attempt, failure = view.failed
        told = [failure.kind.value, *card_of(attempt, failure)]
    first, *more = map(escape_markdown, told or [""])
    lines = [f"**{said}**: {first}" if first else f"**{said}**", *more]
    return "\n\n".join(filter(None, [*lines, "" if step == why else escape_markdown(step)]))


def _step(view: RunView) -> str:
    progress = view.spec.progress
    if view.seen.pace.step is None or progress is None:
        return ""
    return f"step {view.seen.pace.step:g}{f' of {progress.total}' if progress.total else ''}"


def _facts(view: RunView) -> Iterator[str]:
    record, attempt = view.record, view.record.attempt
    if began := record.started_at:
        lasts = format_duration((record.ended_at or view.at) - began)
        by_now = "" if record.ended_at else " by now"
        yield f"- **Since**: {format_datetime(began)}, {lasts}{by_now}"
    if attempt is not None:
        count = len(view.record.attempts)
        earlier = f", after {count - 1} that failed" if count > 1 else ""
        resumed = f", from {inline_code(attempt.resume_from)}" if attempt.resume_from else ""
        yield f"- **Attempt**: {attempt.number}{earlier}{resumed}"
        yield from (f"- **Alarm**: {escape_markdown(alarm.message)}" for alarm in attempt.alarms)
    if step := _step(view):
        yield f"- **Progress**: {escape_markdown(step)}"
    if view.slow is not None:
        yield f"- **Time**: {escape_markdown(' '.join(view.slow.sentences()))}"
    yield f"- **Record**: {inline_code(view.place.record)}"


def _failure(view: RunView, attempt: AttemptRecord, failure: Failure) -> Iterator[str]:
    many = len(view.record.attempts) > 1
    yield f"**What went wrong in attempt {attempt.number}**" if many else "**What went wrong**"
    yield "\n".join(
        f"- **{fact.asked.capitalize()}**: "
        f"{inline_code(fact.said) if fact.is_code else escape_markdown(fact.said)}"
        for fact in facts_of(view.place, attempt, failure)
    )
    if failure.log_tail:
        yield f"The last lines of {escape_markdown(failure.component or 'the log')}:"
        yield code_block("\n".join(tail_of(failure)))


#: Of earlier attempts the record keeps no lines of logs: hundreds of requeues shall fit.
_WITH_TAILS = 10


def record_of(view: RunView) -> Shown:
    """What `run.json` says."""
    content = view.record.as_json()
    for attempt in content["attempts"][:-_WITH_TAILS]:
        if attempt["failure"]:
            attempt["failure"]["log_tail"] = ""
    said = (
        f"run.json: {view.record.state.value}, {format_count(len(view.record.attempts), 'attempt')}"
    )
    return Shown(headline=escape_markdown(said), data=code_block(json.dumps(content, indent=2)))


def record_read(data: str) -> RunJson | None:
    """The record that such an artifact holds; None where it holds none that can be gone on with.

    Anybody can write an artifact, and a secret that is masked in it may be a word of the record's.
    """
    _, _, rest = data.partition("\n")
    try:
        record = RunJson.model_validate_json(rest.rpartition("\n")[0])
    except ValueError:
        return None
    numbers = [attempt.number for attempt in record.attempts]
    is_whole = numbers == [*range(1, len(record.attempts) + 1)]
    return record if is_whole and "attempts" in record.model_fields_set else None
