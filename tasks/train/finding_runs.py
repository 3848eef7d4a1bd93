"""List the runs of a Prefect server and of this machine, and find one run by its name or id."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Literal, get_args

from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_URL

from tasks.processes.identity import host_name
from tasks.queue.ledger import parse_request
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server.flow_runs import (
    TYPED_NAME_LABEL,
    ServerAway,
    connect_to_server,
    find_host,
    read_flow_runs,
)
from tasks.server.server import hide_prefect_logs
from tasks.spec.errors import BadArgument
from tasks.spec.placeholders import mapping_or_empty
from tasks.train.local_runs import list_local_run_ids, read_local_record

#: Largest number of runs, newest first, among which `find_run` searches.
_SEARCHED_RUNS = 1000
#: Largest number of runs that the message about an ambiguous name lists.
_LISTED_MATCHES = 10
#: Matches the end of a run id. The group of the pattern is the time at which the run id was made.
_RUN_ID_END = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]+$")
#: Matches a run id. The group of the pattern is the name in the spec of the run.
_RUN_ID = re.compile(r"(.+)-[a-z]+-\d{8}-\d{6}-[0-9a-f]{8}")
#: Matches an age such as `12h`. The groups of the pattern are the number and the unit.
_AGE = re.compile(r"(\d+(?:\.\d+)?)([mhdw])")
#: Seconds in each unit of an age.
_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
#: Run state by the name of a Prefect state, or by the type of a Prefect state in capitals.
_RUN_STATES = {
    "PendingResources": "pending_resources",
    "AwaitingRetry": "pending_resources",
    "SCHEDULED": "queued",
    "PENDING": "admitted",
    "CANCELLING": "stopping",
}
#: State of a run that has not ended.
OpenState = Literal["queued", "pending_resources", "admitted", "starting", "running", "stopping"]
#: State of a run that has ended.
EndedState = Literal["completed", "failed", "crashed", "cancelled"]
#: All states of runs that have ended.
ENDED_STATES: tuple[str, ...] = get_args(EndedState)
#: States of runs that wait in the queue.
WAITING_STATES = ("queued", "pending_resources")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as `muster ls --json` shows it. Times are UTC epoch seconds."""

    #: Id of the run. It is also the name of the flow run.
    run_id: str
    #: Id of the flow run. Empty if `run.json` does not contain it.
    flow_run_id: str
    #: As in `run.json`: queued, pending_resources, admitted, starting, running, stopping,
    #: completed, failed, cancelled; or crashed, if the process of the run was lost.
    state: str
    #: Message of the state: the reason for waiting, or the way in which the run ended.
    message: str
    #: Tags of the run spec and of the flow run.
    tags: tuple[str, ...]
    #: Time at which the flow run was created, in UTC epoch seconds. Without a server, the same as
    #: `started_at`.
    created_at: float | None
    #: Time at which the run began, in UTC epoch seconds. None if the run has not begun.
    started_at: float | None
    #: Time at which the run ended, in UTC epoch seconds. None if the run has not ended.
    ended_at: float | None
    #: Number of attempts. None if this machine has no record of the run.
    attempts: int | None
    #: Host on which the flow process runs or last ran. Empty if the run had no process yet.
    host: str

    @property
    def name(self) -> str:
        """Name in the spec of the run, or the run id if the run id does not contain the name."""
        match = _RUN_ID.fullmatch(self.run_id)
        return match[1] if match else self.run_id

    @property
    def brief(self) -> str:
        """First line of the message."""
        return self.message.partition("\n")[0]

    @property
    def place(self) -> RunPlace:
        """Paths of the run's files. The files exist only on the run's own host."""
        return RunPlace.of(self.run_id)

    @property
    def is_on_another_host(self) -> bool:
        """True if the run has begun on another host than this machine."""
        return self.host not in ("", host_name()) and self.started_at is not None

    def __str__(self) -> str:
        return f"{self.run_id} is {self.state}\n{self.message}".rstrip()

    @staticmethod
    def of_flow_run(flow_run: FlowRun, record: RunJson | None) -> Run:
        """Convert a flow run of the Prefect server into a `Run`.

        Args:
            flow_run: The flow run.
            record: Content of the `run.json` on this machine, or None if there is no such file.
        """
        if record is not None and _is_outdated(record, flow_run):
            record = None
        state = flow_run.state
        ended = flow_run.end_time if state is not None and state.is_final() else None
        message = (state.message if state else None) or ""
        if record is not None and record.state is RunState.CANCELLED and record.message:
            # Use the message of the record, because Prefect's worker replaces the state's message
            # by `Flow run was cancelled successfully.`
            message = record.message
        return Run(
            run_id=parse_request(flow_run).name,
            flow_run_id=str(flow_run.id),
            state=_name_state(state, record),
            message=message,
            tags=tuple(sorted(tag for tag in flow_run.tags if not tag.startswith("process:"))),
            created_at=flow_run.created.timestamp() if flow_run.created else None,
            started_at=flow_run.start_time.timestamp() if flow_run.start_time else None,
            ended_at=ended.timestamp() if ended else None,
            attempts=len(record.attempts) if record else None,
            host=find_host(flow_run) or "",
        )

    @staticmethod
    def of_record(record: RunJson) -> Run:
        """Convert the content of a `run.json` on this machine into a `Run`."""
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


def _is_outdated(record: RunJson, flow_run: FlowRun) -> bool:
    """Return True if another host resumed the run after this machine wrote `run.json`."""
    hosts = {attempt.host for attempt in record.attempts[-1:]}
    hosts.add(find_host(flow_run))
    return len(hosts - {None}) > 1


def _name_state(state: State[Any] | None, record: RunJson | None) -> str:
    """Return the run state, such as `starting`, for the Prefect state of a flow run.

    Args:
        state: The Prefect state. None counts as queued.
        record: Content of the run's `run.json`, or None if unknown.
    """
    if state is None:
        return "queued"
    if state.is_running() and record is not None:
        # Return the state in the record, which is more exact: Prefect's state Running stands for
        # the three run states starting, running and stopping.
        return record.state.value
    type_name = state.type.value
    return _RUN_STATES.get(state.name or "") or _RUN_STATES.get(type_name, type_name.lower())


def list_runs(at_most: int = _SEARCHED_RUNS) -> list[Run]:
    """Return the runs of the Prefect server and of the records on this machine, newest first.

    If the server does not answer, a warning is printed on stderr, and only the records count.

    Args:
        at_most: Largest number of runs to return.

    Raises:
        PermissionError: The records belong to another user.
    """
    return [run for run, _spec in list_runs_with_specs(at_most)]


def list_runs_with_specs(
    at_most: int = _SEARCHED_RUNS,
) -> list[tuple[Run, Mapping[str, Any]]]:
    """Return the runs of `list_runs` as pairs: the run, and its run spec on the Prefect server.

    The spec is empty if the server does not know the run, or if the flow run has no spec.

    Args:
        at_most: Largest number of runs to return.

    Raises:
        PermissionError: The records belong to another user.
    """
    records = _read_local_records(at_most)
    runs: dict[str, tuple[Run, Mapping[str, Any]]] = {}
    try:
        for flow_run in _read_flow_runs(at_most):
            run = Run.of_flow_run(flow_run, records.get(parse_request(flow_run).name))
            runs[run.run_id] = (run, mapping_or_empty(flow_run.parameters.get("spec")))
    except ServerAway as error:
        print(
            f"{error} Therefore only runs with a record on this machine are shown.", file=sys.stderr
        )

    for run_id, record in records.items():
        runs.setdefault(run_id, (Run.of_record(record), {}))
    newest_first = sorted(runs.values(), key=lambda pair: pair[0].created_at or 0.0, reverse=True)
    return newest_first[:at_most]


def _read_local_records(at_most: int) -> dict[str, RunJson]:
    """Return the content of the newest `run.json` files on this machine, by run id."""
    # A run id ends with the time at which it was made, so the ids can be sorted by this time.
    newest = sorted(list_local_run_ids(), key=_RUN_ID_END.findall, reverse=True)[:at_most]
    records = [read_local_record(name) for name in newest]
    return {record.run_id: record for record in records if record is not None}


def _read_flow_runs(at_most: int) -> Iterator[FlowRun]:
    """Yield the newest flow runs of the flow `train`. Yield nothing if no server is configured.

    Raises:
        ServerAway: The server does not answer.
    """
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return
    hide_prefect_logs()
    with connect_to_server(api_url) as client:
        flow_runs = read_flow_runs(
            client, flows=["train"], sort=FlowRunSort.EXPECTED_START_TIME_DESC
        )
        # Omit flow runs that a schedule will start in the future.
        begun = (run for run in flow_runs if run.start_time or not run.auto_scheduled)
        yield from islice(begun, at_most)


def parse_since(text: str, now: float) -> float:
    """Return the time that an age or a date stands for, in UTC epoch seconds.

    Args:
        text: An age such as `30m`, `12h`, `7d` or `2w`, or a date such as `2026-01-31`. A date may
            have a time and a time zone, as in `2026-01-31T12:00+01:00`. Without a time zone, the
            date is in UTC.
        now: Current time in UTC epoch seconds.

    Raises:
        BadArgument: The text is neither an age nor a date.
    """
    if match := _AGE.fullmatch(text):
        return now - float(match[1]) * _UNIT_S[match[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadArgument(
            f"--since {text}: write an age such as 30m, 12h or 7d, or a date such as 2026-01-31"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _read_typed_names() -> dict[str, str]:
    """Return the names that people gave to flow runs, for example in *Custom run*, by flow run id.

    Muster's scheduler renames a flow run to its run id, and keeps the earlier name in a label.
    """
    with suppress(ServerAway):
        return {
            str(flow_run.id): str(flow_run.labels.get(TYPED_NAME_LABEL) or flow_run.name)
            for flow_run in _read_flow_runs(_SEARCHED_RUNS)
        }
    return {}


def _match_runs(runs: Sequence[Run], text: str) -> list[Run]:
    """Return the runs that a text stands for, according to the first rule that matches a run.

    The rules are, in this order:

    1. The text is the run id or the id of the flow run.
    2. The text is the name in the spec.
    3. The text is the beginning of the run id or of the id of the flow run.
    4. The text is the end of one of these ids.
    5. The text is any part of the run id, which contains the name in the spec.
    """
    rules: tuple[Callable[[Run], bool], ...] = (
        lambda run: text in (run.run_id, run.flow_run_id),
        lambda run: text == run.name,
        lambda run: run.run_id.startswith(text) or run.flow_run_id.startswith(text),
        lambda run: run.run_id.endswith(text) or run.flow_run_id.endswith(text),
        lambda run: text in run.run_id,
    )
    for matches_rule in rules:
        matching_runs = [run for run in runs if matches_rule(run)]
        if matching_runs:
            return matching_runs
    return []


def _match_typed_names(runs: Sequence[Run], text: str) -> list[Run]:
    """Return the runs whose name in the Prefect UI was typed by a user and contains a text.

    If a name is equal to the text, only the runs with this name are returned.
    """
    typed_names = _read_typed_names()
    exact = [run for run in runs if typed_names.get(run.flow_run_id) == text]
    return exact or [run for run in runs if text in typed_names.get(run.flow_run_id, "")]


def find_run(name: str) -> Run:
    """Find a run by its name or id, or by a part of them, and return the run.

    Args:
        name: `latest`, the id of the run or of its flow run, or the first or last characters of
            such an id. It can also be the name in the spec, or the name that a user gave to the
            flow run in the Prefect UI. Any part of a run id or name is accepted, too, if only one
            run has it.

    Raises:
        BadArgument: No run matches the name, or several runs match.
    """
    runs = list_runs()
    if not runs:
        raise BadArgument("there is no run yet: muster train SPEC starts a run")
    if name == "latest":
        return runs[0]
    if not name:
        raise BadArgument("the name of the run is empty: list the runs with `muster ls`")
    matching_runs = _match_runs(runs, name) or _match_typed_names(runs, name)
    if not matching_runs:
        raise BadArgument(f"there is no run {name}: list the runs with `muster ls`")
    if len(matching_runs) == 1:
        return matching_runs[0]
    raise BadArgument(_describe_ambiguity(name, matching_runs))


def _describe_ambiguity(name: str, matching_runs: Sequence[Run]) -> str:
    """Return the message for a name that matches several runs, with one line per run."""
    listed_runs = matching_runs[:_LISTED_MATCHES]
    width = max(len(run.run_id) for run in listed_runs)
    lines = [
        f"{name} matches {len(matching_runs)} runs. Write more letters of one of these run ids:"
    ]
    lines += [f"  {run.run_id:<{width}}  {run.state}" for run in listed_runs]
    if len(matching_runs) > len(listed_runs):
        lines.append(f"  and {len(matching_runs) - len(listed_runs)} more, which `muster ls` lists")
    return "\n".join(lines)
