"""Cancel the active runs of a cancelled pipeline, and wait until they have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient

from tasks.pipeline.decision import StageRun
from tasks.pipeline.server_requests import POLL_INTERVAL_S, ServerRequests
from tasks.pipeline.stage_runs import cancel_stage_run, describe_stage_run
from tasks.server.flow_runs import ServerAway

#: Seconds to wait for the end of a cancelled stage run, in addition to its grace periods.
_CANCEL_TIMEOUT_S = 180.0
#: Seconds to wait for the end of a stage run that is cancelled without grace periods.
_HURRIED_TIMEOUT_S = 30.0


def cancel_and_wait(
    runs: Sequence[StageRun], requests: ServerRequests, longest_teardown_s: Callable[[], float]
) -> str:
    """Cancel runs and wait until they have ended.

    The wait takes at most the result of `longest_teardown_s` plus three minutes. After a call of
    `requests.hurry`, the runs get no grace periods, and the wait takes at most 30 s.

    Args:
        runs: The active runs.
        requests: Connection to the Prefect server.
        longest_teardown_s: Function that returns the longest time in seconds that the grace periods
            of a run take.

    Returns:
        A text with a phrase about the end of each run. Each phrase begins with a semicolon, so that
        the text can be appended to a sentence.
    """
    current = {run.flow_run_id: run for run in runs}
    away: ServerAway | None = None
    try:
        for run in runs:
            requests.ask(partial(cancel_stage_run, run=run))
        deadline = time.monotonic() + longest_teardown_s() + _CANCEL_TIMEOUT_S
        was_hurried = False
        while time.monotonic() < deadline:
            for run in runs:
                if current[run.flow_run_id].ending is None:
                    current[run.flow_run_id] = requests.ask(partial(_refresh, run=run))
            open_runs = [run for run in current.values() if run.ending is None]
            if not open_runs:
                break
            if requests.is_hurried and not was_hurried:
                was_hurried = True
                for run in open_runs:
                    requests.ask(partial(cancel_stage_run, run=run, is_now=True))
                deadline = min(deadline, time.monotonic() + _HURRIED_TIMEOUT_S)
            time.sleep(POLL_INTERVAL_S / 4)
    except ServerAway as error:
        away = error
    return "".join(f"; stage {run.stage}: {_describe_end(run, away)}" for run in current.values())


def _refresh(client: SyncPrefectClient, run: StageRun) -> StageRun:
    """Return a run with its current state on the Prefect server."""
    return describe_stage_run(run.stage, run.number, client.read_flow_run(UUID(run.flow_run_id)))


def _describe_end(run: StageRun, away: ServerAway | None) -> str:
    """Return a phrase about the state of a cancelled run.

    Args:
        run: The run with its last known state.
        away: Error of a Prefect server that does not answer, or None.
    """
    if run.ending is not None:
        return run.state
    if away is None:
        return f"still {run.state}"
    return (
        f"the Prefect server does not answer ({away}), so the state of the run is unknown. The run "
        "may still be running"
    )
