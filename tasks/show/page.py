"""Build the artifacts on a flow run's page in the Prefect UI. Each function builds one artifact.

The summary comes first: the current activity, or the cause of the failure and the next step. The
other artifacts show the components, the progress, a curve, the attempts and the use of time.

The artifact `record` contains the whole `run.json`. People without access to the run's host can
read it there, and another host can resume the run with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from tasks.record.outcome import Failure, list_problems
from tasks.record.retries import build_attempt_table
from tasks.record.run_json import AttemptRecord, ComponentRecord, JobRecord, RunJson
from tasks.record.states import RunState
from tasks.show.facts_of_run import facts_of_run, format_step
from tasks.show.failure import (
    Fact,
    find_remedy,
    last_log_lines,
    list_card_lines,
    list_facts,
)
from tasks.show.markdown import (
    code_block,
    escape_cell,
    escape_markdown,
    inline_code,
    markdown_link,
    markdown_table,
)
from tasks.show.next_start import NextStartFinder
from tasks.show.pictures import Figures, draw_curve, number_text
from tasks.show.run_view import RunView, ServerSeen, Shown, describe_component_state
from tasks.show.slow import Measured, Slow
from tasks.spec.component import FLEET
from tasks.spec.formatting import format_count, format_datetime, format_duration

#: Names of the artifacts of a run.
SUMMARY = "summary"
COMPONENTS = "components"
TIMELINE = "timeline"
REWARD = "reward"
LOSS = "loss"
PROGRESS = "progress"
ATTEMPTS = "attempts"
RECORD = "record"
TIME = "time"
EVALUATIONS = "evaluations"

_COMPONENT_HEADINGS = ("component", "state", "runs as", "ready after", "ports", "log")
_SERVER_HEADINGS = ("server", "state", "address", "restarts", "log")
#: Largest number of inference servers in the table of servers.
_MAX_SERVERS = 200


def show_components(view: RunView) -> Shown:
    """Return the artifact with the last attempt's components and the inference fleet's servers."""
    attempt = view.record.attempt
    if attempt is None:
        names = ", ".join(view.spec.components)
        return Shown(
            headline="no component was started yet",
            data="Muster has not started these components of the run yet: "
            f"{escape_markdown(names)}.",
        )
    rows = [[*_component_cells(view, attempt, name)] for name in view.spec.components]
    host = f" on {escape_markdown(view.host)}" if view.host else ""
    directory = inline_code(view.place.attempt(attempt.number).directory)
    as_of = format_datetime(view.at)
    parts = [
        f"Attempt {attempt.number}{host}, as of {as_of}. The logs are in {directory}.",
        markdown_table(_COMPONENT_HEADINGS, rows),
    ]

    servers = view.seen.servers
    if servers:
        parts += ["Servers of the fleet:", markdown_table(_SERVER_HEADINGS, _server_rows(servers))]
    if len(servers) > _MAX_SERVERS:
        parts.append(
            f"The table shows the first {_MAX_SERVERS} of {len(servers)} inference servers."
        )

    failed_first = attempt.failure.component if attempt.failure else None
    states = [
        f"{name} {'failed' if name == failed_first else describe_component_state(attempt, name)}"
        for name in view.spec.components
    ]
    return Shown(headline="\n\n".join(map(escape_markdown, states)), data="\n\n".join(parts))


def _component_cells(view: RunView, attempt: AttemptRecord, name: str) -> Iterator[str]:
    """Yield the cells of a component in the table of components, in column order."""
    component = attempt.components.get(name)
    row = view.seen.rows[name]

    yield escape_markdown(name)

    state = escape_markdown(describe_component_state(attempt, name))
    if attempt.failure and attempt.failure.component == name:
        state = f"**failed first**: {state}"
    elif state == "starting" and row.unready:
        state += f", not ready: {escape_markdown(row.unready)}"
    if row.status and row.status not in state:
        state += f"; last status: {escape_markdown(row.status)}"
    yield state

    yield _process_cell(attempt, name, component)

    if component is None or not component.started_at:
        yield ""
    elif component.ready_at is not None:
        after_s = component.ready_after_s
        yield format_duration(
            component.ready_at - component.started_at if after_s is None else after_s
        )
    elif component.ended_at or attempt.ended_at:
        yield "never"
    else:
        yield "not yet"

    yield ", ".join(_port_texts(attempt.ports, name))
    yield inline_code(f"{name}.log") if component is not None else ""


def _process_cell(attempt: AttemptRecord, name: str, component: ComponentRecord | None) -> str:
    """Return the process id of a component, or its Ray job and the nodes of the job."""
    if component is None:
        return ""
    if component.pid is not None:
        return f"pid {component.pid}"
    job = attempt.jobs.get(name, JobRecord())
    nodes = f" on {escape_markdown(', '.join(job.nodes))}" if job.nodes else ""
    return f"Ray job {inline_code(job.submission_id)}{nodes}"


def _port_texts(ports: Mapping[str, int], name: str) -> Iterator[str]:
    """Yield the ports of a component as texts, for example `4101` and `metrics 4102`.

    For the inference fleet, only the port of its gateway is returned, because the table of servers
    shows the other ports.

    Args:
        ports: All ports of the attempt, such as `{"trainer.port": 4101}`.
        name: Name of the component.
    """
    main_port = f"{name}.port"
    named_port_prefix = f"{name}.ports."
    for port, number in ports.items():
        if port == main_port:
            yield str(number)
        elif port.startswith(named_port_prefix) and name != FLEET:
            yield f"{escape_markdown(port.removeprefix(named_port_prefix))} {number}"


def _server_rows(servers: Sequence[ServerSeen]) -> Iterator[list[str]]:
    for server in servers[:_MAX_SERVERS]:
        cause = f": {escape_markdown(server.cause)}" if server.cause else ""
        yield [
            str(server.rank),
            escape_markdown(server.state) + cause,
            inline_code(server.url),
            str(server.starts - 1) if server.starts > 1 else "",
            inline_code(f"{FLEET}-r{server.rank}.log"),
        ]


#: Largest number of attempts that are listed on the card of the artifact `attempts` in the Prefect
#: UI.
_MAX_ATTEMPTS_IN_HEADLINE = 5


def show_progress(view: RunView) -> Shown | None:
    """Return the artifact with the progress in percent, or None if the percentage is unknown."""
    progress = view.spec.progress
    if progress is None or progress.total is None or view.seen.pace.step is None:
        return None
    percent = max(0.0, min(100.0, 100.0 * view.seen.pace.step / progress.total))
    return Shown(headline=escape_markdown(_format_step(view)), data=percent, type="progress")


def show_attempts(view: RunView) -> Shown:
    """Return the artifact with the table of attempts, one row per attempt."""
    rows = build_attempt_table(view.record.attempts)
    last_rows = rows[-_MAX_ATTEMPTS_IN_HEADLINE:]
    lines = [f"{row['attempt']}: {row['kind'] or row['state']}" for row in last_rows]
    if len(rows) > len(last_rows):
        lines.insert(0, f"{len(rows)} attempts, the last {len(last_rows)}:")
    headline = "\n\n".join(map(escape_markdown, lines))
    cells = [{name: escape_cell(content) for name, content in row.items()} for row in rows]
    return Shown(headline=headline, data=json.dumps(cells), type="table")


def show_time(view: RunView) -> Shown | None:
    """Return the artifact about the time of the training steps, or None if nothing was measured."""
    slow = view.slow
    if slow is None:
        return None
    sentences = [*slow.sentences()]
    rows = []
    for label, measured, format_value in _measured_rows(slow):
        before = "" if measured.before is None else format_value(measured.before)
        rows.append([escape_markdown(label), format_value(measured.now), before])
    headings = ("", "recent", "earlier")
    text = escape_markdown(" ".join(sentences))
    table = markdown_table(headings, rows)
    return Shown(
        headline="\n\n".join(map(escape_markdown, sentences)),
        data=f"{text}\n\n{table}\n\nAs of {format_datetime(view.at)}.",
    )


def _measured_rows(slow: Slow) -> Iterator[tuple[str, Measured, Callable[[float], str]]]:
    """Yield the rows of the table about the time of the training steps.

    Each row has a label, the recent and the earlier value, and a function that formats these
    values.
    """
    if slow.step is not None:
        yield "one step", slow.step, format_duration
    for part in slow.shares:
        yield part, slow.parts[part], format_duration
    for node, utilisation in slow.gpus.items():
        yield f"GPU utilisation of {node}", utilisation, "{:.0%}".format
    for statistic, duration in slow.requests.items():
        yield f"response time, {statistic}", duration, format_duration


def show_curve(view: RunView, figures: Figures) -> Shown | None:
    """Return the artifact with the curve of a metric, or None if the metric has no values yet.

    Args:
        view: The run.
        figures: The values of the metric at each step.
    """
    points = figures.points
    name = figures.name
    if not points:
        return None
    step = view.spec.progress.step if view.spec.progress else "step"
    title = f"{name} by {step}"
    values = [value for _, value in points]
    caption = (
        f"{title}: first {number_text(values[0])}, "
        f"last {number_text(values[-1])} at {step} {number_text(points[-1][0])}"
    )
    if not_finite := figures.describe_not_finite():
        caption += f", {not_finite}"
    source = inline_code(figures.path)
    data = f"{escape_markdown(caption)}. Source: {source}, as of {format_datetime(view.at)}."
    picture = draw_curve(points, x=step, y=name, title=title)
    return Shown(headline=escape_markdown(caption), picture=picture, data=data)


#: Number of bytes at the beginning of a log that are searched for the web address of an experiment
#: tracker.
_LOG_HEAD_BYTES = 262_144
#: Matches `wandb: 🚀 View run at https://wandb.ai/team/project/runs/abc` and MLflow's
#: `View run x at: URL`.
_TRACKER_ADDRESS = re.compile(r"View run\b[^\n]{0,200}?(https?://[^\s\x1b]+/runs/[^\s\x1b]+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def list_other_pages(view: RunView) -> tuple[tuple[str, str], ...]:
    """Return links to other web pages about the run: experiment trackers and the Ray dashboard.

    The addresses of the experiment trackers are read from the logs of the components.

    Returns:
        Pairs of a name for the link and the web address.
    """
    attempt = view.record.attempt
    pages: list[tuple[str, str]] = []
    if attempt is not None:
        for name in view.spec.components:
            address = _find_tracker_address(view.place.attempt(attempt.number).log(name))
            if address:
                pages.append(("Tracker", address))
    pages += _ray_pages(view)
    return tuple(dict.fromkeys(pages))


def _ray_pages(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield a link to each Ray job in the Ray dashboard, or to the dashboard if there is no job."""
    if view.spec.ray is None or view.spec.ray.address is None:
        return
    parts = urlsplit(view.spec.ray.address.rstrip("/"))
    host_and_port = parts.netloc.rpartition("@")[2]
    address = parts._replace(netloc=host_and_port).geturl()
    jobs = view.record.attempt.jobs.values() if view.record.attempt else ()
    job_ids = [job.submission_id for job in jobs if job.submission_id]
    for job_id in job_ids:
        yield "Ray dashboard", f"{address}/#/jobs/{quote(job_id)}"
    if not job_ids:
        yield "Ray dashboard", address


def _find_tracker_address(log: Path) -> str:
    """Return the web address of an experiment tracker in a log, or an empty string."""
    try:
        with log.open("rb") as file:
            head = file.read(_LOG_HEAD_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    match = _TRACKER_ADDRESS.search(_COLOURS.sub("", head))
    return match[1].rstrip(".,)") if match else ""


#: Largest number of lines of a message on an artifact's card in the Prefect UI.
_CARD_LINES = 5


def show_summary(view: RunView) -> Shown:
    """Return the artifact that summarises a run: state, failure, main facts and links."""
    state, message = _describe_state(view)
    failed = view.failed
    next_start = NextStartFinder(view.record, view.place, view.spec)

    parts = [f"### {state.capitalize()}"]
    if message and view.seen.doing == f"{state}: {message}" == view.seen.running:
        # Put a label before the message, which consists only of the names of the running
        # components.
        message = f"Components: {message}"
    # Show the message only if no attempt has failed. After a failure, the section about the failure
    # contains the message.
    if message and failed is None:
        parts.append(_format_message(message))
    if state == "failed" and failed is None and (remedy := find_remedy(message)):
        parts.append(f"**What to do**: {escape_markdown(remedy)}")
    parts.append("\n".join(_list_facts(view, next_start)))
    if failed is not None:
        attempt, failure = failed
        parts += _failure_section(view, attempt, failure, next_start)
    if pages := list_other_pages(view):
        links = [f"- {markdown_link(name, address)}" for name, address in pages]
        parts += ["**Links**", "\n".join(links)]
    parts.append(f"As of {format_datetime(view.at)}.")

    headline = _build_headline(view, *_describe_state(view))
    return Shown(headline=headline, data="\n\n".join(filter(None, parts)))


def _format_message(message: str) -> str:
    """Return the message of a run as Markdown. If it has several warnings, each is a list item."""
    problems = list_problems(message)
    if len(problems) > 1:
        return "\n".join(f"- {escape_markdown(problem)}" for problem in problems)
    return code_block(message) if "\n" in message else escape_markdown(message)


def _describe_state(view: RunView) -> tuple[str, str]:
    """Return the state of the run in one to three words, and a message that may be empty."""
    state = view.record.state.value
    match view.record.state:
        case RunState.FAILED:
            return state, str(view.failed[1]) if view.failed else view.message
        case RunState.COMPLETED | RunState.CANCELLED:
            return state, view.message
        case RunState.PENDING_RESOURCES:
            return "waiting", view.seen.doing.removeprefix(
                "waiting: "
            ) or "for all GPUs of the run (`gang`)"
        case RunState.QUEUED | RunState.ADMITTED:
            return "about to start", view.seen.doing
        case _:
            return state, view.seen.doing.removeprefix(f"{state}: ")


def _build_headline(view: RunView, state: str, message: str) -> str:
    """Return the text for the artifact's card in the Prefect UI: state, message and progress."""
    if view.failed is not None:
        attempt, failure = view.failed
        lines = [failure.kind.value, *list_card_lines(attempt, failure)]
    else:
        lines = message.splitlines()[:_CARD_LINES]

    first, *others = map(escape_markdown, lines or [""])
    paragraphs = [f"**{state}**: {first}" if first else f"**{state}**", *others]
    step = _format_step(view)
    if step != message:
        paragraphs.append(escape_markdown(step))
    return "\n\n".join(filter(None, paragraphs))


def _format_step(view: RunView) -> str:
    """Return the current step, such as `step 12 of 60`, or an empty string if it is unknown."""
    progress = view.spec.progress
    if view.seen.pace.step is None or progress is None:
        return ""
    return format_step(view.seen.pace.step, progress.total)


#: Matches `step 12 of 60` or `step 12` as a line of the headline of the artifact `summary`.
_STEP_PARAGRAPH = re.compile(r"^step ([0-9.e+-]+)(?: of ([0-9.e+-]+))?$", re.MULTILINE)


def find_step(headline: str) -> tuple[float, float | None] | None:
    """Return the current step and the number of steps of a run, or None if no step is shown.

    If the number of steps is unknown, the second value is None.

    Args:
        headline: Description of the run's artifact `summary`, as `show_summary` builds it.
    """
    match = _STEP_PARAGRAPH.search(headline)
    if match is None:
        return None
    return float(match[1]), float(match[2]) if match[2] else None


def _list_facts(view: RunView, next_start: NextStartFinder) -> Iterator[str]:
    """Yield the facts about the run as items of a Markdown list."""
    facts = facts_of_run(
        view.record,
        view.place,
        view.spec,
        now=view.at,
        step=view.seen.pace.step,
        time_use=view.slow.sentences() if view.slow is not None else (),
        next_start=next_start,
    )
    for fact in facts:
        yield _format_item(fact)


def _format_item(fact: Fact) -> str:
    """Return a labelled fact as an item of a Markdown list."""
    content = inline_code(fact.text) if fact.is_code else escape_markdown(fact.text)
    # Do not use `str.capitalize`, which would change W&B to W&b.
    label = fact.label[:1].upper() + fact.label[1:]
    return f"- **{label}**: {content}"


def _failure_section(
    view: RunView, attempt: AttemptRecord, failure: Failure, next_start: NextStartFinder
) -> Iterator[str]:
    """Yield Markdown paragraphs about a failure: its facts and the last log lines."""
    has_earlier_attempts = len(view.record.attempts) > 1
    suffix = f" in attempt {attempt.number}" if has_earlier_attempts else ""
    yield f"**What went wrong{suffix}**"

    yield "\n".join(map(_format_item, list_facts(view.place, attempt, failure, next_start)))

    if failure.log_tail:
        yield f"Last log lines of {escape_markdown(failure.component or 'the run')}:"
        yield code_block("\n".join(last_log_lines(failure)))


#: Number of last attempts whose log lines the artifact `record` contains. Without this limit, the
#: artifact would be too large for the Prefect server after hundreds of attempts.
_ATTEMPTS_WITH_LOG_LINES = 10


def show_record(view: RunView) -> Shown:
    """Return the artifact with the content of `run.json`."""
    content = view.record.as_json()
    for attempt in content["attempts"][:-_ATTEMPTS_WITH_LOG_LINES]:
        if attempt["failure"]:
            attempt["failure"]["log_tail"] = ""
    count = format_count(len(view.record.attempts), "attempt")
    headline = escape_markdown(f"run.json: {view.record.state.value}, {count}")
    return Shown(headline=headline, data=code_block(json.dumps(content, indent=2)))


def parse_record(data: str) -> RunJson | None:
    """Return the run record in an artifact from `show_record`, or None if the record is invalid.

    The record can be invalid for two reasons. A user of the Prefect server may have changed the
    artifact. Or a secret equals an ordinary word of the record, such as a state, and Muster has
    masked this word.

    Args:
        data: Markdown of the artifact: a code block with the JSON of the record.
    """
    _, _, json_and_fence = data.partition("\n")
    try:
        record = RunJson.model_validate_json(json_and_fence.rpartition("\n")[0])
    except ValueError:
        return None
    numbers = [attempt.number for attempt in record.attempts]
    is_whole = numbers == [*range(1, len(record.attempts) + 1)]
    return record if is_whole and "attempts" in record.model_fields_set else None
