"""The flow `train`: one RL training, from the start of its components to their end."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.server.flow_process import NO_RESULTS
from tasks.show.arguments import AsJson, FromRun, Overrides, RunName, SpecFile, run_alone
from tasks.spec.run import RunSpec
from tasks.train.command import run_here
from tasks.train.completed_run import end_completed_run
from tasks.train.finding_runs import find_run
from tasks.train.retrying import retry_run
from tasks.train.session import RunSession
from tasks.train.tasks import (
    DiskFull,
    admit,
    conclude,
    make_run_id_of_flow_run,
    monitor,
    open_run,
    start,
    teardown,
)
from tasks.train.waiting import next_attempt


@flow(
    name="train",
    flow_run_name=make_run_id_of_flow_run,
    persist_result=False,
    result_storage=NO_RESULTS,
)
def train(spec: RunSpec) -> State[None]:
    """Run one training: start its components in order, watch them, and stop them at the end.

    Args:
        spec: The components of the run, and the condition for its success. The form in the Prefect
            UI shows only the keys that people change most. All other keys keep their values. To see
            or change all keys, choose `Use JSON input` in the menu of the field `spec`.
    """
    completed = end_completed_run(spec, make_run_id_of_flow_run())
    if completed is not None:
        return completed
    try:
        with open_run(spec) as run:
            while next_attempt(run) and admit(run):
                attempt(run)
            return conclude(run)
    except DiskFull as error:
        return error.state


def attempt(run: RunSession) -> None:
    """Run one attempt. At the end or after an error, stop the components in reverse order."""
    run.begin_attempt()
    try:
        if all(start(run, component) for component in run.spec.components):
            monitor(run)
    finally:
        teardown(run)


def command(spec: SpecFile, /, *, set: Overrides = (), start: FromRun = None) -> int:
    """Run one training to its end in this process.

    The run uses the Prefect server of PREFECT_API_URL, or a temporary Prefect server.

    Exit: 0 completed, 1 failed, 2 the spec is invalid (nothing was started), 3 the run can never
    fit the cluster, 130 interrupted (after teardown).
    """
    return run_here(train, spec, set, start)


def retry(
    run: RunName,
    /,
    *,
    from_step: int | None = None,
    watch: bool = False,
    json: AsJson = False,
) -> int:
    """Start another attempt of a run that has ended, with the same spec and code.

    The attempt starts from the newest complete checkpoint of the run. A run that was started by
    `muster train` continues in this terminal, with the present files of its project. Every other
    run is queued again.

    Exit: 0 queued, or completed; 1 failed; 2 the run cannot be retried, and nothing was changed; 3
    the run can never fit the cluster; 130 interrupted.

    Args:
        from_step: Start from the checkpoint of this step. Later checkpoints of the run are kept,
            but not used any more.
        watch: Show the states of a queued run until it has ended. Ctrl-C ends only the display.
        json: Print run_id, flow_run_id and page of a queued run as JSON.
    """
    return retry_run(train, find_run(run), from_step, watch=watch, json=json)


if __name__ == "__main__":
    raise SystemExit(run_alone(command, "python -m flows.train"))
