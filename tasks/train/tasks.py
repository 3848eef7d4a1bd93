"""The tasks that carry a run's components from start to teardown.

Opening a run within its flow run, and closing it with the Prefect state it deserves.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.exceptions import Abort
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Failed

from tasks.processes.registry import RunHeld
from tasks.ray.dashboard import add_listed_clusters
from tasks.record.code_store import NoCode
from tasks.record.states import RunState
from tasks.server.artifacts import code_label, shared_code
from tasks.server.events import insist_on_the_end
from tasks.server.flow_process import (
    flow_run_here,
    id_here,
    spec_here,
    started_by_others,
)
from tasks.server.flow_runs import STATE_OF, ServerAway, listed_clusters, talking_to, worker_of
from tasks.server.interruption import ended_from_outside
from tasks.server.server import lasting_api_url, secrets_here
from tasks.show.failure import summarize_failure
from tasks.show.terminal import outlive_readers
from tasks.spec.errors import InvalidSpec, MusterError, RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import RunSpec
from tasks.spec.secrets import mask_logs
from tasks.train.reporter import Reporter
from tasks.train.run_events import announced
from tasks.train.session import RunSession
from tasks.train.spec_check import check_spec
from tasks.upkeep.waiting_runs import forget_waiting_run, read_earlier_record

T = TypeVar("T")
_ANSWERED_WITHIN_S, _ASKED_AGAIN_S = 120.0, 2.0


def _as_task(body: Callable[..., State[None]]) -> Callable[..., bool]:
    """Runs the body as a Prefect task run of its name, `start-trainer`; whether it completed. No
    error is raised: what failed is told once, by the verdict, and not by a traceback for each task
    on the way."""

    @wraps(body)
    def as_task(run: RunSession, *component: str) -> bool:
        name = "-".join([body.__name__, *component])

        def never_raising() -> State[None]:
            try:
                return body(run, *component)
            except Exception as error:
                run.crash(error)
                return Failed(message=run.mask(f"{name}: {error!r}"))

        run_task = task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)(
            never_raising
        )
        # Without the flow run's tags: Prefect would ask the server for a slot of each before a
        # task, just when the reporter writes. SQLite lets one of the two in, and the other is told
        # to come again, which its client does after some 2 s.
        with TagsContext(current_tags=set()):
            return bool(run_task(return_state=True).is_completed())

    return as_task


@_as_task
def admit(run: RunSession) -> State[None]:
    """Whether the run may start: what its spec names is there, and it has its gang, for which it
    may have to wait."""
    try:
        _asked(run, partial(run.enter_code, _code_on_server))
        _label(run)
        check_spec(run.spec)
        run.set_secret_blocks(_asked(run, partial(secrets_here, run.spec)))
    except (InvalidSpec, NoCode) as error:
        return Failed(message=run.fail(FailureKind.USER_ERROR, str(error)).message)
    except ServerAway as error:
        message = f"its code or its Prefect Secret blocks can't be read: {error}"
        return Failed(message=run.fail(FailureKind.NETWORK, message).message)
    why = "no GPUs are asked for" if run.spec.gang is None else ""
    if run.adopts_jobs and run.record.content.adoptable(run.place) is not None:
        why = "its jobs go on, on the GPUs that they have"
    at_once: State[None] | None = Completed(message=f"admitted: {why}") if why else None
    if at_once is not None and (run.spec.ray is None or run.spec.ray.address is not None):
        return at_once
    # Here, since it takes a tenth of a second, which a run without either need not wait.
    from tasks.queue.admission import Admitted, find_cluster, wait_for_gang
    from tasks.queue.decision import Refused
    from tasks.queue.settings import NotThere

    if at_once is not None:
        try:
            run.ray_address = find_cluster(run.flow_run_id)
        except NotThere as error:
            return Failed(message=run.fail(FailureKind.USER_ERROR, str(error)).message)
        return at_once

    outcome = wait_for_gang(
        run.flow_run_id,
        is_first=run.record.attempts == 0,
        is_anew=run.attempt is not None,
        say=run.record_waiting,
        wait=run.wait,
    )
    match outcome:
        case Admitted():
            run.accept_grant(outcome.nodes, outcome.devices)
            run.ray_address = outcome.cluster
            return Completed(message=f"admitted on {outcome}")
        case Refused():
            return Failed(message=run.fail(outcome.kind, outcome.message).message)
        case None:
            return Cancelled(message=run.interrupt_reason or run.handover_reason)


def _label(run: RunSession) -> None:
    """Have the flow run say which tree it runs, also one of a schedule or of the UI."""
    label = code_label(run.spec.code) or {}
    if label.keys() - flow_run_here().labels.keys():
        with suppress(ServerAway), talking_to(PREFECT_API_URL.value() or "") as client:
            client.update_flow_run_labels(run.flow_run_id, label)


def _code_on_server(name: str) -> bytes | None:
    with talking_to(PREFECT_API_URL.value() or "") as client:
        return shared_code(client, name)


def _asked(run: RunSession, question: Callable[[], T]) -> T:
    """Raises: what it raises; ServerAway, for as long as a server needs that is started again."""
    deadline = time.monotonic() + _ANSWERED_WITHIN_S
    while True:
        try:
            return question()
        except ServerAway:
            if time.monotonic() > deadline or not run.wait(_ASKED_AGAIN_S):
                raise


@_as_task
def start(run: RunSession, component: str) -> State[None]:
    """Start one component; whether it is ready. If not, how the run ends is decided."""
    began = time.monotonic()
    if component == next(iter(run.spec.components)):
        run.check_devices()
    try:
        run.supervisor.start(component)
    except RunEnded:
        decision = run.supervisor.decision
        if decision is not None and decision.component not in (None, component):
            # It has not failed, and its state is read as if it were.
            why = f"{component} is not waited for any more: {decision.reason}"
            return Cancelled(message=run.mask(why))
        return _ended(run)
    took_s = time.monotonic() - began
    return Completed(message=f"{run.supervisor.describe(component)} ready after {took_s:.2f} s")


@_as_task
def monitor(run: RunSession) -> State[None]:
    """Watch a run whose components are all ready until its end; whether it did its work."""
    run.supervisor.wait_decided()
    return _ended(run)


@_as_task
def teardown(run: RunSession) -> State[None]:
    """Stop what runs in reverse order; whether nothing is left. Safe in any phase, any number of
    times."""
    verdict = run.end_attempt()
    if verdict.left:
        return Failed(message=verdict.message)
    if not verdict.state.is_final:
        return Completed(message="its jobs go on, for its next process")
    if verdict.unseen:
        return Completed(message=f"nothing is left where it was seen: {verdict.message}")
    return Completed(message="nothing is left of the run's processes")


def _ended(run: RunSession) -> State[None]:
    decision = run.supervisor.decision
    state = decision.state if decision else RunState.FAILED
    # Of a run that goes on without this process, this process's part is over.
    make = Cancelled if state is RunState.RUNNING else STATE_OF.get(state, Failed)
    return make(message=run.mask(decision.reason) if decision else "")


# Now, not in a function: Prefect logs its first lines of a flow run before that begins.
outlive_readers()


def run_id_of_flow_run() -> str:
    """The id of the run of this context, which becomes its flow run's name; see `id_here`."""
    spec = spec_here(RunSpec)
    return id_here(spec.name, spec.workload)


@contextmanager
def open_run(spec: RunSpec) -> Iterator[RunSession]:
    """The run of this flow run, with its directory; signals end it cleanly while it is open.

    It has its final state after that, unless it was left to wait for its next process.

    Raises: Abort, when another process of this machine has the run.
    """
    flow_run, api_url = flow_run_here(), lasting_api_url()
    flow_run_id = flow_run.id
    if spec.ray is not None:
        add_listed_clusters(listed_clusters(api_url))
    # Only where others start it can it have been on another host.
    others, earlier = started_by_others(), None
    if api_url and others and others.run_count > 1:
        earlier = read_earlier_record(api_url, flow_run_id)
    try:
        run = RunSession(
            spec,
            run_id=run_id_of_flow_run(),
            flow_run_id=flow_run_id,
            api_url=api_url,
            worker=worker_of(others) if others else None,
            earlier=earlier,
        )
    except RunHeld as error:
        # A flow run may be started twice, by two workers for example. Its state is then that of
        # the process that came first, and this one must not touch it.
        raise Abort(f"{error.strerror}: this one leaves") from error
    forget_waiting_run(run.run_id)
    with (
        # Jobs that outlive their flow process go on, unless the run was cancelled.
        ended_from_outside(run, flow_run_id, may_be_left=run.adopts_jobs),
        mask_logs(run.mask),
        announced(run, flow_run),
        Reporter(run, flow_run),
    ):
        run.open()
        try:
            yield run
        except Exception as error:
            # A bug, or a machine out of ports, disk or processes: the record must not say Running.
            run.fail(FailureKind.UNKNOWN, f"could not go on: {error!r}")
            told = "".join(traceback.format_exception(error))
            if run.mask(told) == told:
                raise
            # What is raised stands in the flow run's state, and all that led to it in its logs.
            raise MusterError(run.mask(repr(error))) from None
        finally:
            run.close()
            insist_on_the_end(_end_retries(run, others is not None))


def _end_retries(run: RunSession, by_worker: bool) -> int:
    """How often the final state of a run is told again to a server that is away.

    The pauses double from 2 s on: 8 of them last for eight minutes, for as long as a stack takes to
    start its server again.
    """
    if lasting_api_url() is None:
        # A temporary server ends with the run: nobody would read there how it ended.
        return 1
    if run.interrupt_reason:
        # Mostly the whole host or stack is about to end. `reconcile` tells it later.
        return 2
    # A person at a terminal does not wait that long.
    return 8 if by_worker else 6


def conclude(run: RunSession) -> State[Any]:
    """The Prefect state that fits how the run ended."""
    verdict = run.close()
    if make := STATE_OF.get(verdict.state):
        return make(message=verdict.message)
    last = run.record.content.attempt
    return Failed(message=run.mask(summarize_failure(verdict.message, run.place, last)))
