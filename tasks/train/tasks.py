"""The tasks that carry a run's components from start to teardown."""

from __future__ import annotations

import time
from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.states import Cancelled, Completed, Failed

from tasks.record.states import RunState
from tasks.spec.errors import InvalidSpec, RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.train.session import RunSession, check_spec


def admit(run: RunSession) -> bool:
    """Make sure that the run can start: what its spec names is there, and it has its gang, for
    which it may have to wait.

    Returns: whether the run may start.
    """
    return _as_task("admit", _admit, run)


def start(run: RunSession, component: str) -> bool:
    """Start one component and wait until it is ready.

    Returns: whether it is; if not, the run's fate is decided.
    """
    return _as_task(f"start-{component}", _start, run, component)


def monitor(run: RunSession) -> bool:
    """Watch a run whose components are all ready until its fate is decided.

    Returns: whether it did its work.
    """
    return _as_task("monitor", _monitor, run)


def teardown(run: RunSession) -> bool:
    """Stop what runs in reverse order, until nothing is left. Safe in any phase, any number of
    times.

    Returns: whether nothing is left.
    """
    return _as_task("teardown", _teardown, run)


def _as_task(name: str, body: Callable[..., State[None]], run: RunSession, *more: str) -> bool:
    """Run the body as a Prefect task run of a name; whether it completed.

    A state is returned, no error raised: what failed is told once, by the verdict, and not again by
    a traceback for each task on the way.
    """

    def never_raising() -> State[None]:
        try:
            return body(run, *more)
        except Exception as error:
            run.crash(error)
            return Failed(message=f"{name}: {error!r}")

    run_task = task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)(
        never_raising
    )
    # Without the flow run's tags: Prefect would ask the server for a slot of each before a task,
    # just when the reporter writes. SQLite lets one of the two in, and the other is told to come
    # again, which its client does after some 2 s.
    with TagsContext(current_tags=set()):
        return bool(run_task(return_state=True).is_completed())


def _admit(run: RunSession) -> State[None]:
    try:
        check_spec(run.spec)
    except InvalidSpec as error:
        return Failed(message=run.fail(FailureKind.USER_ERROR, str(error)).message)
    if run.spec.gang is None:
        return Completed(message="admitted: no GPUs are asked for")
    if run.adopts and run.record.adoptable() is not None:
        return Completed(message="admitted: its jobs go on, on the GPUs that they have")
    # Here, since it takes a tenth of a second, which a run without a gang need not wait.
    from tasks.queue.admission import Admitted, Refused, admitted

    outcome = admitted(
        run.flow_run_id,
        is_first=run.record.attempts == 0,
        is_anew=run.attempt is not None,
        say=run.wait_in_line,
        wait=run.wait,
    )
    match outcome:
        case Admitted():
            return Completed(message=f"admitted on {', '.join(outcome.nodes)}")
        case Refused():
            return Failed(message=run.fail(outcome.kind, outcome.message).message)
        case None:
            return Cancelled(message=run.interrupted_by or run.left_by)


def _start(run: RunSession, component: str) -> State[None]:
    began = time.monotonic()
    try:
        run.supervisor.start(component)
    except RunEnded:
        decision = run.supervisor.decision
        if decision is not None and decision.component not in (None, component):
            # It is not to blame, and its state is read as if it were.
            return Cancelled(message=f"{component} is not waited for any more: {decision.reason}")
        return _ended(run)
    took_s = time.monotonic() - began
    return Completed(message=f"{run.supervisor.describe(component)} ready after {took_s:.2f} s")


def _monitor(run: RunSession) -> State[None]:
    run.supervisor.wait_decided()
    return _ended(run)


def _teardown(run: RunSession) -> State[None]:
    verdict = run.end_attempt()
    if verdict.left:
        return Failed(message=verdict.message)
    if not verdict.state.is_final:
        return Completed(message="its jobs go on, for its next process")
    return Completed(message="nothing is left of the run's processes")


def _ended(run: RunSession) -> State[None]:
    decision = run.supervisor.decision
    match decision.state if decision else None:
        case RunState.COMPLETED:
            make = Completed
        case RunState.CANCELLED | RunState.RUNNING:
            # Of a run that goes on without this process, this process's part is over.
            make = Cancelled
        case _:
            make = Failed
    return make(message=decision.reason if decision else "")
