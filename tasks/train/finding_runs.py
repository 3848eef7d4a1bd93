"""List the runs of a Prefect server and of this machine, and find one run by its name or id.

The import of Prefect takes seconds. So this module imports Prefect only if the user may have
configured a server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tasks.processes.registry import find_living_owner
from tasks.record.run_json import RunJson
from tasks.spec.errors import BadArgument
from tasks.train.local_runs import find_local_run, list_local_run_ids, read_local_record
from tasks.train.runs import ENDED_STATES, Run
from tasks.train.server_imports import import_server_runs
from tasks.train.server_url import may_have_prefect_server

#: Largest number of runs that `find_run` searches, newest first.
_SEARCHED_RUNS = 1000
#: Largest number of runs in the message about an ambiguous name.
_LISTED_MATCHES = 10
#: Matches the end of a run id. The group contains the time at which the run id was created.
_RUN_ID_END = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]+$")
#: Matches an age such as `12h`. The groups contain the number and the unit.
_AGE = re.compile(r"(\d+(?:\.\d+)?)([mhdw])")
#: Mapping from the unit of an age to its length in seconds.
_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


def list_runs(at_most: int = _SEARCHED_RUNS) -> list[Run]:
    """Return the runs of the Prefect server and of the records on this machine, newest first.

    If the server does not answer, a warning is printed on stderr, and only runs with a record on
    this machine are returned.

    Args:
        at_most: Largest number of runs to return.

    Raises:
        PermissionError: The records belong to another user.
    """
    return [run for run, _spec in list_runs_with_specs(at_most)]


def list_runs_with_specs(
    at_most: int = _SEARCHED_RUNS,
) -> list[tuple[Run, Mapping[str, Any]]]:
    """Return the runs of `list_runs`, each with its run spec from the Prefect server.

    The spec is empty if the server does not have the run, or if the flow run has no spec.

    Args:
        at_most: Largest number of runs to return.

    Raises:
        PermissionError: The records belong to another user.
    """
    records = _read_local_records(at_most)
    runs: dict[str, tuple[Run, Mapping[str, Any]]] = {}
    if may_have_prefect_server():
        server_runs = import_server_runs().read_server_runs(at_most, records)
        runs = {run.run_id: (run, spec) for run, spec in server_runs}
    for run_id, record in records.items():
        runs.setdefault(run_id, (Run.of_record(record), {}))
    newest_first = sorted(runs.values(), key=lambda pair: pair[0].created_at or 0.0, reverse=True)
    return newest_first[:at_most]


def _read_local_records(at_most: int) -> dict[str, RunJson]:
    """Return the records of the newest runs with files on this machine, by run id."""
    # A run id ends with the time at which it was created, so sort the ids by this time.
    newest = sorted(list_local_run_ids(), key=_RUN_ID_END.findall, reverse=True)[:at_most]
    records = [read_local_record(name) for name in newest]
    return {record.run_id: record for record in records if record is not None}


def parse_since(text: str, now: float) -> float:
    """Return the time that an age or a date means, in UTC epoch seconds.

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


def _match_runs(runs: Sequence[Run], text: str) -> list[Run]:
    """Return the runs that a text means. The first rule that matches a run is used.

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


def _match_typed_names(runs: Sequence[Run], text: str, typed_names: Mapping[str, str]) -> list[Run]:
    """Return the runs whose names in `typed_names` contain a text.

    If a name is equal to the text, only the runs with this name are returned.

    Args:
        runs: The runs that are searched.
        text: The text.
        typed_names: Mapping from flow run ids to the names that users gave to the flow runs in the
            Prefect UI.
    """
    exact = [run for run in runs if typed_names.get(run.flow_run_id) == text]
    return exact or [run for run in runs if text in typed_names.get(run.flow_run_id, "")]


def _choose_run(matching_runs: Sequence[Run], text: str) -> Run | None:
    """Return the run that a user means with a text.

    If several runs have the text as their name, the user means the only run that has not ended. If
    all of them have ended, the user means the newest run.

    Args:
        matching_runs: The runs that match the text, newest first.
        text: The text.

    Returns:
        None if the text can mean several runs.
    """
    if len(matching_runs) == 1:
        return matching_runs[0]
    if any(run.name != text for run in matching_runs):
        return None
    active_runs = [run for run in matching_runs if run.state not in ENDED_STATES]
    if not active_runs:
        return matching_runs[0]
    return active_runs[0] if len(active_runs) == 1 else None


def find_run(name: str) -> Run:
    """Find a run by its name or id, or by a part of a name or id, and return the run.

    Args:
        name: One of these texts: `latest`; the id of the run or of its flow run, or the first or
            last characters of such an id; the name in the spec; the name that a user gave to the
            flow run in the Prefect UI; any part of a run id or name that only one run has. The name
            in the spec may belong to several runs. If exactly one of these runs has not ended, the
            name means this run. If all of them have ended, the name means the newest run.

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
    matching_runs = _match_runs(runs, name)
    if not matching_runs and may_have_prefect_server():
        typed_names = import_server_runs().read_typed_names(_SEARCHED_RUNS)
        matching_runs = _match_typed_names(runs, name, typed_names)
    if not matching_runs:
        raise BadArgument(f"there is no run {name}: list the runs with `muster ls`")
    chosen_run = _choose_run(matching_runs, name)
    if chosen_run is None:
        raise BadArgument(_describe_ambiguity(name, matching_runs))
    return chosen_run


def find_run_with_files(name: str) -> Run:
    """Find a run whose files will be read.

    If the run has ended on this machine, or its flow process is alive on this machine, the record
    on this machine is complete. In this case, the Prefect server is not asked.

    Args:
        name: See `find_run`. A run can be found without the server only by its id, or by the
            beginning of its id.

    Raises:
        BadArgument: No run matches the name, or several runs match.
    """
    place = find_local_run(name)
    record = read_local_record(place.run_id) if place is not None else None
    if record is None:
        return find_run(name)
    is_current = record.state.is_final or find_living_owner(record.run_id) is not None
    return Run.of_record(record) if is_current else find_run(record.run_id)


def _describe_ambiguity(name: str, matching_runs: Sequence[Run]) -> str:
    """Return the message for a name that matches several runs. The message lists the runs."""
    listed_runs = matching_runs[:_LISTED_MATCHES]
    width = max(len(run.run_id) for run in listed_runs)
    lines = [
        f"{name} matches {len(matching_runs)} runs. Write more letters of one of these run ids:"
    ]
    lines += [f"  {run.run_id:<{width}}  {run.state}" for run in listed_runs]
    if len(matching_runs) > len(listed_runs):
        lines.append(f"  and {len(matching_runs) - len(listed_runs)} more, which `muster ls` lists")
    return "\n".join(lines)
