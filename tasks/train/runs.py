"""Runs as a person names them, from their Prefect server and from the records of this machine: the
verbs `muster ls`, `show`, `why`, `logs` and `cancel`, and what `muster` alone says."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from uuid import UUID

from cyclopts import Parameter
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from rich.markdown import Markdown

from tasks.processes.identity import host_name
from tasks.queue.command import why as why_waiting
from tasks.queue.ledger import parse_request
from tasks.record.causes import read_events
from tasks.record.checkpoints import read_attempt_spec
from tasks.record.code_store import NoCode, contents_of
from tasks.record.log_file import LogFile
from tasks.record.metrics_file import MetricsFile
from tasks.record.places import AttemptPlace, RunPlace, muster_home
from tasks.record.run_json import RunJson
from tasks.server.artifacts import artifacts_of
from tasks.server.flow_runs import ServerAway, flow_runs_of, host_of, talking_to
from tasks.server.flow_runs import cancel as cancel_flow_run
from tasks.server.server import quieten_prefect
from tasks.show.arguments import EXIT_DONE, AsJson, Pool, RunName
from tasks.show.failure import format_failure
from tasks.show.lines import end_block, summarize_run
from tasks.show.listing import ListedRun, list_runs
from tasks.show.output import coloured_line, console_of, is_on_terminal, line_of, raw_stdout
from tasks.show.page import COMPONENTS, RECORD, SUMMARY, TIME, parse_record
from tasks.show.slow import Slow, TimeSpent
from tasks.spec.errors import BadArgument, MusterError
from tasks.spec.formatting import format_minutes, join_commas
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.probes import get_number

#: A list shows so many of them, newest first, until more are asked for.
_LISTED = 20
#: Among so many the one that is meant is looked for.
_SEARCHED = 1000
_STAMP = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]+$")
#: By the name of a Prefect state, or its type where only that counts.
_STATES = {
    "PendingResources": "pending_resources",
    "AwaitingRetry": "pending_resources",
    "SCHEDULED": "queued",
    "PENDING": "admitted",
    "CANCELLING": "stopping",
}
_Open = Literal["queued", "pending_resources", "admitted", "starting", "running", "stopping"]
_Ended = Literal["completed", "failed", "crashed", "cancelled"]
#: The states of runs that have ended.
ENDED = get_args(_Ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as `muster ls --json` shows it. Times are UTC epoch seconds."""

    #: Its name, and that of its flow run.
    run_id: str
    #: Empty where its record does not say.
    flow_run_id: str
    #: As in `run.json`: queued, pending_resources, admitted, starting, running, stopping,
    #: completed, failed, cancelled; or crashed: its process was lost.
    state: str
    #: Of that state: what it waits for, how it ended.
    message: str
    #: Of its spec, and of its flow run.
    tags: tuple[str, ...]
    #: Where no server knows it, `started_at`.
    created_at: float | None
    #: None where it has not begun.
    started_at: float | None
    #: None where it has not ended.
    ended_at: float | None
    #: None where only its own host knows.
    attempts: int | None
    #: That has or had its process; empty where it has had none.
    host: str

    @property
    def brief(self) -> str:
        """The first line of its message."""
        return self.message.partition("\n")[0]

    @property
    def place(self) -> RunPlace:
        """Where its files are, on its own host."""
        return RunPlace.of(self.run_id)

    def __str__(self) -> str:
        return f"{self.run_id} is {self.state}\n{self.message}".rstrip()

    @staticmethod
    def of_flow_run(run: FlowRun, record: RunJson | None) -> Run:
        state, started, ended = run.state, run.start_time, run.end_time
        hosts = {host_of(run), *(one.host for one in record.attempts[-1:])} if record else set()
        if len(hosts - {None}) > 1:
            record = None  # What this machine knew before another one went on with it.
        return Run(
            run_id=parse_request(run).name,
            flow_run_id=str(run.id),
            state=_state_word(state, record),
            message=(state.message if state else None) or "",
            tags=tuple(sorted(tag for tag in run.tags if not tag.startswith("process:"))),
            created_at=run.created.timestamp() if run.created else None,
            started_at=started.timestamp() if started else None,
            ended_at=ended.timestamp() if ended and state and state.is_final() else None,
            attempts=len(record.attempts) if record else None,
            host=host_of(run) or "",
        )

    @staticmethod
    def of_record(record: RunJson) -> Run:
        return Run(
            run_id=record.run_id,
            flow_run_id=record.flow_run_id,
            state=record.state.value,
            message=record.message,
            tags=record.tags,
            created_at=record.started_at,
            started_at=record.started_at,
            ended_at=record.ended_at,
            attempts=len(record.attempts),
            host=host_name(),
        )


def _state_word(state: State[Any] | None, record: RunJson | None) -> str:
    if state is None:
        return "queued"
    if state.is_running() and record is not None:
        # The record tells starting and stopping from running.
        return record.state.value
    said = state.type.value
    return _STATES.get(state.name or "") or _STATES.get(said, said.lower())


def runs(at_most: int = _SEARCHED) -> list[Run]:
    """Those of the Prefect server, where one is set, and of the records of this machine, newest
    first. A server that does not answer costs a line on stderr.

    Raises: PermissionError, where the records are another user's.
    """
    names: list[str] = []
    with suppress(FileNotFoundError):
        names = os.listdir(muster_home() / "runs")
    # By the time in their names.
    newest = sorted(names, key=_STAMP.findall, reverse=True)[:at_most]
    written = filter(None, map(_record, newest))
    records = {record.run_id: record for record in written}
    found: dict[str, Run] = {}
    if api_url := PREFECT_API_URL.value():
        try:
            quieten_prefect()
            with talking_to(api_url) as client:
                flow_runs = flow_runs_of(
                    client, flows=["train"], sort=FlowRunSort.EXPECTED_START_TIME_DESC
                )
                # What a schedule will start some day is no run yet.
                begun = (run for run in flow_runs if run.start_time or not run.auto_scheduled)
                for run in islice(begun, at_most):
                    one = Run.of_flow_run(run, records.get(parse_request(run).name))
                    found[one.run_id] = one
        except ServerAway as error:
            print(f"{error}\nThese are the records of this machine.", file=sys.stderr)
    for run_id, record in records.items():
        found.setdefault(run_id, Run.of_record(record))
    return sorted(found.values(), key=lambda one: one.created_at or 0.0, reverse=True)[:at_most]


def _record(run_id: str) -> RunJson | None:
    """That of this machine."""
    with suppress(OSError, ValueError):
        return RunJson.read(RunPlace.of(run_id).record)
    return None


def find(name: str) -> Run:
    """The run of that id, of a unique beginning of its or its flow run's, or `latest`. Raises:
    BadArgument."""
    if not (known := runs()):
        raise BadArgument("there is no run yet: muster train SPEC starts one")
    if name == "latest":
        return known[0]
    exact = [run for run in known if name in (run.run_id, run.flow_run_id)]
    meant = exact or [
        run for run in known if run.run_id.startswith(name) or run.flow_run_id.startswith(name)
    ]
    if len(meant) == 1:
        return meant[0]
    if not meant:
        raise BadArgument(f"there is no run {name}: muster ls shows those that are there")
    raise BadArgument(
        f"{name} can be {join_commas(run.run_id for run in meant[:5])}: write more of it"
    )


def ls(
    *,
    limit: int = _LISTED,
    state: Annotated[tuple[Literal[_Open, _Ended], ...], Parameter(show_default=False)] = (),
    json: AsJson = False,
) -> None:
    """List runs, newest first: those of the Prefect server, and those that only this machine has on
    record.

    Exit: 0 listed, also where there is none.

    Args:
        limit: At most so many.
        state: Only those in this state; repeatable.
    """
    found = [run for run in runs() if not state or run.state in state][:limit]
    if json:
        print(dumps([asdict(run) for run in found], indent=2))
        return
    if not found:
        print("There is no run yet: muster train SPEC starts one.", file=sys.stderr)
        return
    console = console_of(sys.stdout)
    now = time.time()
    listed = [
        ListedRun(
            run_id=run.run_id,
            state=run.state,
            age=format_minutes(now - run.created_at) if run.created_at else "",
            host=run.host,
            message=run.brief,
        )
        for run in found
    ]
    if not is_on_terminal():
        # One run a line, with whole cells, for grep and cut.
        for row in listed:
            print("\t".join(row.cells))
        return
    for line in list_runs(listed, console.width):
        console.print(line, soft_wrap=True)


def show(
    run: RunName = "latest", other: str = "", /, *, diff: bool = False, json: AsJson = False
) -> None:
    """Show a run: what it does, or what it died of; its components and attempts.

    Exit: 0 shown; 2 there is no such run.

    Args:
        other: Another run, for --diff.
        diff: What the two were made of that differs: spec, code, packages, host. RUN--a02 is an
            attempt, and RUN alone its last one.
        json: Its run.json; with --diff: by what differs, its two values.
    """
    if diff != bool(other):
        raise BadArgument("to compare two runs write: muster show --diff RUN RUN")
    if diff:
        found = _differences(run, other)
        lines = (f"{name}: {was} -> {now}" for name, (was, now) in found.items())
        print(dumps(found, indent=2) if json else "\n".join(lines) or "Nothing on record differs.")
        return
    meant = find(run)
    if json:
        print(dumps(record_of(meant).as_json(), indent=2))
        return
    console = console_of(sys.stdout)
    if pages := _pages_of(meant, SUMMARY, COMPONENTS):
        for page in pages:
            if is_on_terminal():
                # A link that shows its address can't lie about it, and can be copied.
                console.print(Markdown(page, hyperlinks=False))
            else:
                print(page, end="\n\n")
    elif meant.place.record.exists():
        for line in end_block(meant.state, meant.message, meant.place.record):
            print(line.plain)
    else:
        print(meant)


def record_of(run: Run) -> RunJson:
    """What its run.json says, here or on the server. Raises: BadArgument."""
    if (record := _record_of(run)) is None:
        raise BadArgument(f"{run.run_id} has no record yet: it has not begun")
    return record


_ATTEMPT = re.compile(r"(.+)--a(\d+)")


def _differences(one: str, other: str) -> dict[str, tuple[object, object]]:
    """What two attempts were made of, where it differs: by its dotted key, each one's value."""
    was, now = map(_made_of, (one, other))
    return {
        key: (was.get(key), now.get(key))
        for key in dict.fromkeys((*was, *now))
        if was.get(key) != now.get(key)
    }


def _made_of(name: str) -> dict[str, object]:
    """Of an attempt, all that is on record, by dotted keys; what only says which one it is, by what
    stands for it in a spec."""
    match = _ATTEMPT.fullmatch(name)
    meant, wanted = find(match[1] if match else name), int(match[2]) if match else None
    record, place = record_of(meant), meant.place
    attempts = [one for one in record.attempts if wanted in (None, one.number)]
    if not attempts:
        raise BadArgument(f"{name} has no such attempt on record here")
    attempt = attempts[-1]
    names = {
        str(place.attempt(attempt.number).directory): "${attempt.dir}",
        str(place.directory): "${run.dir}",
        record.run_id: "${run.id}",
        **{str(port): f"${{{port_name}}}" for port_name, port in attempt.ports.items()},
    }
    said = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)")
    spec = {
        key: said.sub(lambda found: names[found[1]], value) if isinstance(value, str) else value
        for key, value in _flat(read_attempt_spec(place, attempt.number), "spec")
        if key != "spec.code"
    }
    made_of = {**(record.provenance or {}), **attempt.provenance}
    files: dict[str, str] = {}
    with suppress(NoCode, OSError):
        files = contents_of(str(made_of.get("tree")))
    if files:
        # They say more.
        made_of.pop("diff", None)
    return {**spec, **dict(_flat({**made_of, "code": files}))}


def _flat(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list) and path.startswith("spec"):
        yield from _flat(dict(enumerate(node)), path)
    else:
        yield path, node


def _record_of(run: Run) -> RunJson | None:
    """That of this machine, or of the server, where that knows of more."""
    record = _record(run.run_id)
    if record is not None and not _is_elsewhere(run):
        return record
    shared = next(map(parse_record, _pages_of(run, RECORD)), None)
    return max(filter(None, (record, shared)), key=lambda one: len(one.attempts), default=None)


def _pages_of(run: Run, *keys: str) -> list[str]:
    """What its artifacts on the server show, in the order of their keys; none where it does not
    answer."""
    api_url = PREFECT_API_URL.value()
    if api_url and run.flow_run_id:
        with suppress(ServerAway), talking_to(api_url) as client:
            found = artifacts_of(client, UUID(run.flow_run_id), keys)
            data = {one.key: str(one.data) for one in reversed(found)}
            return [data[key] for key in keys if key in data]
    return []


def metrics_of(run: Run) -> list[dict[str, Any]]:
    """The figures of a run's training, a row each step, in order: what the last attempt that came
    to it has written of it, as it stands in the file, and `attempt` with the number of that.

    Raises: BadArgument, where its files are another host's, or it writes none.
    """
    if not (numbers := _attempts_in(run.place)):
        raise BadArgument(_where_else(run))
    rows: dict[float, dict[str, Any]] = {}
    record = _record(run.run_id)
    since = {one.number: one.metrics for one in record.attempts} if record else {}
    for number in numbers:
        if not (spec := read_attempt_spec(run.place, number)):
            continue  # It has just begun.
        progress = mapping_or_empty(spec.get("progress"))
        if not (name := progress.get("jsonl")):
            raise BadArgument(f"{run.run_id} writes no file of figures: progress has no jsonl")
        file = MetricsFile(Path(str(spec.get("cwd", "."))) / name, since=since.get(number))
        while (found := file.read_new()) or file.has_more:
            for row in found:
                if (step := get_number(row, str(progress["step"]))) is not None:
                    # Some write several lines of a step.
                    had = rows.get(step, {})
                    had = had if had.get("attempt") == number else {}
                    rows[step] = {**had, **row, "attempt": number}
    return [rows[step] for step in sorted(rows)]


def metrics(run: RunName = "latest", /) -> None:
    """Print the figures of a run's training, a JSON object a line and a line a step; null where one
    is not finite.

    Exit: 0 printed; 2 there is no such run, or it has no figures here.
    """
    for row in metrics_of(find(run)):
        print(dumps(loads(dumps(row), parse_constant=lambda _: None)))


def slow_of(run: Run) -> Slow | None:
    """Where its time goes, by its files; None where they don't tell."""
    spent = TimeSpent()
    for number in _attempts_in(run.place):
        for event in read_events(run.place.attempt(number).events):
            spent.observe(event)
    with suppress(BadArgument, OSError):
        for index, row in enumerate(metrics_of(run)):
            spent.take(index, row)
    return spent.slow


def story_of(run: Run) -> str:
    """The whole story of a run, as text that fits a screen, or a prompt."""
    if (record := _record_of(run)) is None:
        return str(run)
    rows: list[dict[str, Any]] = []
    with suppress(BadArgument, OSError):
        rows = metrics_of(run)
    slow = slow_of(run)
    said = summarize_run(record, run.place, rows, slow.sentences() if slow else ())
    if run.state not in ENDED and run.message:
        said = chain([f"{run.run_id} is {run.state}: {run.brief}"], islice(said, 1, None))
    return "\n".join(said)


def explain(run: RunName = "latest", /, *, json: AsJson = False) -> None:
    """Tell the whole story of a run, on a screen or for a prompt: what it is, its attempts, what
    failed first, its alarms and its figures.

    Exit: 0 told; 2 there is no such run.
    """
    meant = find(run)
    text = story_of(meant)
    print(dumps({**asdict(meant), "story": text}, indent=2) if json else text)


def why(run: RunName = "latest", /, *, pool: Pool = "gang", json: AsJson = False) -> int:
    """Say why a run waits or is slow, or what has become of it.

    Exit: 0 said; 1 the server does not answer; 2 there is no such run.

    Args:
        json: The run as in `ls`, its failure as in run.json, and where its time goes.
    """
    meant, code = find(run), EXIT_DONE
    slow, record = slow_of(meant), _record_of(meant)
    attempt = record.attempt if record is not None else None
    failure = attempt.failure if attempt is not None else None
    if json:
        told = failure.as_json() if failure else None
        spent = slow.as_json() if slow else None
        print(dumps({**asdict(meant), "failure": told, "slow": spent}, indent=2))
        return code
    waits = failure is None or meant.state in ("queued", "pending_resources")
    if waits and PREFECT_API_URL.value() and meant.flow_run_id:
        code = why_waiting(meant.flow_run_id, pool=pool)
    elif waits:
        print(meant)
    if attempt is not None and failure is not None:
        print(format_failure(meant.place, attempt, failure))
    # Its files may be another host's.
    for said in slow.sentences() if slow else _pages_of(meant, TIME):
        print(said)
    return code


def cancel(run: RunName, /, *, now: bool = False, json: AsJson = False) -> None:
    """End a run: its components are stopped in reverse, each with its grace period, and nothing of
    it is left.

    Exit: 0 it is being cancelled; 1 it can't be from here; 2 there is no such run, or it has ended.

    Args:
        now: Skip the grace periods: what has not been saved is lost. Also for a run that is being
            cancelled already.
        json: The run as in `ls`, as it was.
    """
    meant = find(run)
    cancel_run(meant, is_now=now)
    if json:
        print(dumps(asdict(meant), indent=2))
    else:
        how = "cancelled without grace periods" if now else "cancelled"
        print(f"{meant.run_id} is being {how}. To see its end: muster show {meant.run_id}")


def cancel_run(meant: Run, *, is_now: bool = False) -> None:
    """Ask for a run's end.

    Args:
        is_now: without grace periods.

    Raises: BadArgument, if the run has ended; MusterError, if it can't be cancelled from here.
    """
    if meant.state in ENDED:
        raise BadArgument(f"{meant.run_id} has ended: it is {meant.state}")
    api_url = PREFECT_API_URL.value()
    if api_url and meant.flow_run_id:
        with suppress(ObjectNotFound), talking_to(api_url) as client:
            how = "cancelled now" if is_now else "cancelled"
            message = f"{how} by muster on {host_name()}"
            cancel_flow_run(client, UUID(meant.flow_run_id), message, is_now=is_now)
            return
    raise MusterError(
        f"{meant.run_id} has a Prefect server of its own: end it where it was started, by Ctrl-C, "
        "or end its process by SIGTERM"
    )


def overview() -> None:
    """What runs, waits and failed last, and what one needs most."""
    known = runs(200)
    running = [run for run in known if run.state not in (*ENDED, "queued", "pending_resources")]
    waiting = [run for run in known if run.state in ("queued", "pending_resources")]
    failed = [run for run in known if run.state in ("failed", "crashed")][:3]
    for head, found in (("Runs:", running), ("Waits:", waiting), ("Failed last:", failed)):
        print(head if found else f"{head} none")
        for run in found:
            print(f"  {run.run_id}  {run.state}  {run.brief}".rstrip())
    print(
        "\nmuster train SPEC     run a spec here (muster init writes one)\n"
        "muster show RUN       what a run does, or what it died of\n"
        "muster logs RUN -f    what its components write\n"
        "muster --help         everything else"
    )


_LOOK_EVERY_S, _ASK_EVERY_S = 0.2, 5.0
_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def logs_in(place: AttemptPlace) -> list[str]:
    return sorted({path.name.partition(".log")[0] for path in place.directory.glob("*.log*")})


def logs_asked(run: Run, number: int, component: str) -> list[str]:
    """Of which components of an attempt there are logs; or that one. Raises: BadArgument."""
    names = logs_in(run.place.attempt(number))
    if not names or (component and component not in names):
        its = f" of {component}" if component else ""
        there = join_commas(names) or "none"
        raise BadArgument(f"attempt {number} of {run.run_id} has no log{its} here: {there}")
    return [component] if component else names


def _show_new(
    place: AttemptPlace, component: str, logs: dict[str, LogFile], *, is_last: bool = False
) -> None:
    """Print the new lines of the logs of an attempt.

    Args:
        component: Only the log of this one; empty: all of them.
        logs: The open logs by component, with what was shown of each. New ones are added.
        is_last: The attempt has ended, so an unfinished last line is printed, too.
    """
    for name in [component] if component else logs_in(place):
        logs.setdefault(name, LogFile(place.log(name)))
    console = console_of(sys.stdout)
    width = max(map(len, logs), default=0)
    for color, (name, log) in zip(cycle(_COLORS), logs.items()):
        head = "" if component else f"{name:{width}} | "
        for line in log.read_new(is_last=is_last):
            if is_on_terminal():
                console.print(line_of(head, color) + coloured_line(line), soft_wrap=True)
            else:
                # A file or a pipe gets the log as it was written.
                print(head + line, file=raw_stdout())
    sys.stdout.flush()


def logs(
    run: RunName = "latest",
    component: str = "",
    /,
    *,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    attempt: int | None = None,
) -> None:
    """Show what a run's components have written in its last attempt, side by side.

    Exit: 0 shown; 2 there is no such run, or no such log here.

    Args:
        component: Only this one's.
        follow: Go on with what is written, over all further attempts, until the run has ended.
        attempt: Of this one; left out, the last.
    """
    meant = find(run)
    try:
        number = attempt or last_attempt(meant, follow=follow)
        while True:
            its, shown = meant.place.attempt(number), dict[str, LogFile]()
            if not follow:
                logs_asked(meant, number, component)
            while follow and not _has_ended(meant.place, number):
                _show_new(its, component, shown)
                time.sleep(_LOOK_EVERY_S)
            _show_new(its, component, shown, is_last=True)
            number += 1
            if not follow or not meant.place.attempt(number).directory.exists():
                return
            print(f"attempt {number}", file=sys.stderr)
    except KeyboardInterrupt:
        pass  # The way out of --follow.


def last_attempt(run: Run, *, follow: bool = False) -> int:
    """The number of its last attempt, if followed, once it has one. Raises: BadArgument."""
    said = ""
    while True:
        if numbers := _attempts_in(run.place):
            return numbers[-1]
        if _is_elsewhere(run) or not follow or run.state in ENDED:
            raise BadArgument(_where_else(run))
        if run.state != said:
            print(f"{run.run_id} has not begun: {run.state} {run.message}", file=sys.stderr)
            said = run.state
        time.sleep(_ASK_EVERY_S if said else _LOOK_EVERY_S)
        run = find(run.run_id)


def _attempts_in(place: RunPlace) -> list[int]:
    """The numbers of those that have files here."""
    names = (path.name.removeprefix("attempt-") for path in place.directory.glob("attempt-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def _is_elsewhere(run: Run) -> bool:
    return run.host not in ("", host_name()) and run.started_at is not None


def _where_else(run: Run) -> str:
    """Why a run has no files here."""
    if not _is_elsewhere(run):
        return f"{run.run_id} has no logs: it is {run.state}, {run.message or 'no more'}"
    directory = run.place.directory
    return (
        f"the logs of {run.run_id} are on {run.host}: {directory}/attempt-*/*.log there, if its "
        f"MUSTER_HOME is {directory.parents[1]}"
    )


def _has_ended(place: RunPlace, number: int) -> bool:
    """The attempt has, and what follows it is decided; or its run."""
    record = _record(place.run_id)
    has_next = place.attempt(number + 1).directory.exists()
    return has_next or (record is not None and record.ended_at is not None)
