"""Decide whether a completed run has training steps left, and end a retry if no steps are left.

`muster retry` refuses to retry a completed run that has no steps left. *Retry* in the Prefect UI
does not ask Muster: a worker starts a process for the run. This process ends at once, and changes
neither the record nor the files of the run.
"""

from __future__ import annotations

from contextlib import suppress

from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.processes.registry import read_owner
from tasks.record.outcome import join_problems
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server.flow_process import find_worker_flow_run
from tasks.server.server import find_lasting_api_url
from tasks.spec.run import RunSpec
from tasks.upkeep.waiting_runs import read_earlier_record


def has_steps_left(spec: RunSpec, record: RunJson | None) -> bool | None:
    """Return True if the training of a run has not reached its last step.

    Some trainers count their steps from 0. So a run that has reached step 59 of 60 also has no
    steps left.

    Args:
        spec: The run spec.
        record: The record of the run, or None if the run has none.

    Returns:
        None if the last step or the reached step is unknown. If a person has retried the run from
        an earlier checkpoint, the steps of attempts before this retry do not count.
    """
    total = spec.progress.total if spec.progress is not None else None
    success_step = spec.success.step if spec.success is not None else None
    last_step = max((step for step in (total, success_step) if step is not None), default=None)
    if last_step is None or record is None:
        return None
    best_step = record.find_best_step(
        before=len(record.attempts) + 1, since=spec.first_counted_attempt
    )
    return best_step < last_step - 1 if best_step is not None else None


def end_completed_run(spec: RunSpec, run_id: str) -> State[None] | None:
    """Return the final state of a flow run if a worker has started a completed run again.

    Args:
        spec: The run spec.
        run_id: Id of the run.

    Returns:
        The state Completed. None if the run must start: the run is not completed, training steps
        may be left, or another process of the run is alive.
    """
    flow_run = find_worker_flow_run()
    if flow_run is None or flow_run.run_count <= 1:
        return None
    record: RunJson | None = None
    with suppress(OSError, ValueError):
        owner = read_owner(run_id)
        if owner is not None and owner.process.is_alive():
            # Another process of the run has not ended yet. `open_run` handles this case.
            return None
        record = RunJson.read_for_flow_run(RunPlace.of(run_id).record, str(flow_run.id))
    api_url = find_lasting_api_url()
    if record is None and api_url is not None:
        record = read_earlier_record(api_url, flow_run.id)
    is_completed = record is not None and record.state is RunState.COMPLETED
    if record is None or not is_completed or has_steps_left(spec, record) is not False:
        return None
    message = "the run was already complete, so no attempt was started"
    earlier = RunPlace.of(run_id).shorten_paths(join_problems(record.message))
    return Completed(message=f"{message}: {earlier}" if earlier else message)
