"""Build the present view of a run from its files on this machine.

The artifacts on the Prefect server are up to a minute older than the files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from tasks.processes.identity import host_name
from tasks.record.events import read_events
from tasks.record.places import AttemptPlace
from tasks.show.next_start import read_spec_of_run
from tasks.show.page import show_components, show_summary
from tasks.show.run_view import ObservedRun, RunView
from tasks.spec.run import RunSpec
from tasks.train.local_runs import read_local_record
from tasks.train.run_story import measure_time_use
from tasks.train.runs import ENDED_STATES, WAITING_STATES, Run


def read_local_view(run: Run) -> RunView | None:
    """Return the present state of a run, or None if this machine has no files of the run."""
    record = read_local_record(run.run_id)
    if record is None or record.attempt is None or run.is_on_another_host:
        return None
    # If the flow process was killed, the run may have ended on the server, while the record on this
    # machine does not contain the end yet. `muster reconcile` writes the end into the record.
    is_outdated = run.state in ENDED_STATES and not record.state.is_final
    spec = read_spec_of_run(record, run.place)
    if spec is None or is_outdated:
        return None
    seen = _observe_attempt(spec, run.place.attempt(record.attempt.number))
    if run.state in WAITING_STATES:
        # A waiting run has no process that writes events. So use the reason that the scheduler has
        # written into the state of the flow run on the server.
        seen.doing = f"waiting: {run.message}"
    return RunView(
        at=time.time(),
        spec=spec,
        record=record,
        place=run.place,
        host=record.attempt.host or host_name(),
        message=record.message if record.state.is_final else "",
        seen=seen,
        slow=measure_time_use(run),
    )


def describe_locally(run: Run) -> Iterator[str]:
    """Yield the summary and the components of a run as Markdown, from the run's files.

    Yield nothing if this machine has no files of an attempt.
    """
    view = read_local_view(run)
    if view is not None:
        yield str(show_summary(view).data)
        yield str(show_components(view).data)


def _observe_attempt(spec: RunSpec, attempt: AttemptPlace) -> ObservedRun:
    """Return the state of a run according to the event log of one of its attempts."""
    seen = ObservedRun(spec)
    for event in read_events(attempt.events):
        seen.observe(event)
    return seen
