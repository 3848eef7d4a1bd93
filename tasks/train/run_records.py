"""Read the record, the attempts and the Prefect artifacts of a run that was found by name."""

from __future__ import annotations

import sys
import time

from tasks.processes.identity import host_name
from tasks.processes.registry import read_owner
from tasks.record.final_record import describe_cleanup_after_loss
from tasks.record.run_json import RunJson
from tasks.show.next_start import describe_retry, find_next_start
from tasks.show.page import RECORD, parse_record
from tasks.spec.errors import BadArgument
from tasks.train.finding_runs import find_run
from tasks.train.local_runs import list_attempts, read_local_record
from tasks.train.runs import ENDED_STATES, WAITING_STATES, Run
from tasks.train.server_imports import import_server_runs
from tasks.train.server_url import may_have_prefect_server

#: Seconds between two requests to the server for the state of a run that has not started.
_ASK_EVERY_S = 5.0


def require_record(run: Run) -> RunJson:
    """Return the content of a run's `run.json`, from this machine or from the Prefect server.

    Raises:
        BadArgument: The run has no record, because it has not started.
    """
    record = find_record(run)
    if record is None:
        raise BadArgument(f"{run.run_id} has no record yet, because it has not started")
    return record


def find_record(run: Run) -> RunJson | None:
    """Return the content of a run's `run.json`, or None if the run has no record yet.

    If the run is on another host, the server may have a copy of that host's `run.json`. If this
    machine has a `run.json` of the run, too, the file with more attempts is returned.
    """
    local_record = read_local_record(run.run_id)
    if local_record is not None and not run.is_on_another_host:
        return local_record
    copies = [parse_record(content) for content in read_artifacts(run, RECORD)]
    records = [record for record in (local_record, *copies[:1]) if record is not None]
    return max(records, key=lambda record: len(record.attempts), default=None)


def describe_lost_process(run: Run) -> str:
    """Return a text for the user if the flow process of a run died before the run ended.

    The text says from which checkpoint the next attempt would start. This sentence is left out if
    Muster cannot read the spec of the run, or if the Ray jobs of the run continue. Only the files
    of this machine are read. The Prefect server and the record of the run show the death of the
    process later, after a worker or `muster reconcile` has reported the death.

    Returns:
        The text. If the message of the run's state already contains the other sentences, only the
        sentence about the next attempt. Empty in these cases:
        - The process is alive, or ran on another host.
        - The run has ended.
        - The message already contains the other sentences, and the sentence about the next attempt
          is left out.
    """
    owner = read_owner(run.run_id)
    record = read_local_record(run.run_id)
    if owner is None or record is None or record.state.is_final or run.state in WAITING_STATES:
        return ""
    if owner.host != host_name() or owner.process.is_alive():
        return ""
    next_attempt = ""
    if not owner.adopts:
        next_start = find_next_start(record, run.place)
        if next_start.has_run_spec:
            next_attempt = describe_retry("The next attempt", next_start)

    if describe_cleanup_after_loss(run.run_id, is_adopted=owner.adopts) in run.message:
        return f"{next_attempt}." if next_attempt else ""
    next_steps = describe_cleanup_after_loss(
        run.run_id, is_adopted=owner.adopts, next_attempt=next_attempt
    )
    return f"The flow process of this run (pid {owner.process.pid}) was killed. {next_steps}"


def read_artifacts(run: Run, *keys: str) -> list[str]:
    """Return the content of a run's artifacts on the Prefect server, in the order of the keys.

    Missing artifacts are left out. The list is empty if no server is configured, or if the server
    does not answer.
    """
    if not run.flow_run_id or not may_have_prefect_server():
        return []
    contents: list[str] = import_server_runs().read_artifacts_of_run(run, *keys)
    return contents


def find_last_attempt(run: Run, *, wait: bool = False) -> int:
    """Return the number of the last attempt that has a directory on this machine.

    Args:
        run: The run.
        wait: True to wait for the first attempt if the run has no attempt yet.

    Raises:
        BadArgument: This machine has no attempt of the run. With `wait`, the error means that the
            run has ended or is on another host.
    """
    last_shown_state = ""
    while True:
        numbers = list_attempts(run.place)
        if numbers:
            return numbers[-1]
        if run.is_on_another_host or not wait or run.state in ENDED_STATES:
            raise BadArgument(explain_missing_files(run))
        if run.state != last_shown_state:
            print(f"{run.run_id} has not started: {run.state} {run.message}", file=sys.stderr)
            last_shown_state = run.state
        time.sleep(_ASK_EVERY_S)
        run = find_run(run.run_id)


def explain_missing_files(run: Run) -> str:
    """Return a message that explains why this machine has no attempt directory of a run."""
    if not run.is_on_another_host:
        return f"{run.run_id} has no logs: it is {run.state}, {run.message or 'without a message'}"
    directory = run.place.directory
    return (
        f"the logs of {run.run_id} are on the host {run.host}. If MUSTER_HOME is the "
        f"same on both hosts, look on that host for {directory}/attempt-*/*.log"
    )
