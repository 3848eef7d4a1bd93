"""Opening a run within its flow run, and closing it with the Prefect state it deserves."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.states import Cancelled, Completed, Failed

from tasks.processes.registry import RunHeld
from tasks.record.places import make_run_id
from tasks.record.states import RunState
from tasks.server.flow_process import cancel_watched, interrupting, started_by_others, why_cancelled
from tasks.server.flow_runs import worker_of
from tasks.server.server import lasting_api_url
from tasks.show.failure import in_a_line
from tasks.show.terminal import outlive_readers
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import RunSpec
from tasks.train.announcing import announced
from tasks.train.reporter import Reporter
from tasks.train.session import RunSession
from tasks.upkeep.parked import earlier_record, forget_parked

# Now, not in a function: Prefect logs its first lines of a flow run before that begins.
outlive_readers()


def run_id_of_flow_run() -> str:
    """The run id of the flow run of this context, which becomes its name.

    The same for every process that works on the flow run, so for all its attempts.
    """
    flow_run = _flow_run()
    spec = (_context().parameters or {})["spec"]
    if not isinstance(spec, RunSpec):
        spec = RunSpec.model_validate(spec)
    return make_run_id(spec.name, spec.workload, flow_run.id, flow_run.created or _now())


@contextmanager
def open_run(spec: RunSpec) -> Iterator[RunSession]:
    """The run of this flow run, with its directory; signals end it cleanly while it is open.

    It has its final state after that, unless it was left to wait for its next process.

    Raises: Abort, when another process of this machine has the run.
    """
    flow_run_id: UUID = _flow_run().id
    api_url = lasting_api_url()
    # Only where others start it can it have been on another host.
    others = started_by_others()
    try:
        run = RunSession(
            spec,
            run_id=run_id_of_flow_run(),
            flow_run_id=flow_run_id,
            api_url=api_url,
            worker=worker_of(others) if others else None,
            earlier=earlier_record(api_url, flow_run_id) if api_url and others else None,
        )
    except RunHeld as error:
        # A flow run may be started twice, by two workers for example. Its state is then that of
        # the process that came first, and this one must not touch it.
        raise Abort(f"{error.strerror}: this one leaves") from error
    forget_parked(run.run_id)
    run.tell("run.opened", run_id=run.run_id, record=run.place.record)
    with (
        interrupting(run, _on_term(run, flow_run_id)),
        cancel_watched(flow_run_id, run.interrupt),
        announced(run, _flow_run()),
        Reporter(run, flow_run_id),
    ):
        try:
            yield run
        except Exception as error:
            # A bug, or a machine out of ports, disk or processes: the record must not say Running.
            run.fail(FailureKind.UNKNOWN, f"could not go on: {error!r}")
            raise
        finally:
            run.close()


def _on_term(run: RunSession, flow_run_id: UUID) -> Callable[[], None] | None:
    """What SIGTERM means where it is not simply the end of the run.

    A worker ends its flow runs' processes in the same way when one is cancelled and when it is
    itself stopped, to be upgraded for example; only the server knows. Jobs that outlive their flow
    process go on, unless the run was cancelled.
    """
    if not run.adopts or started_by_others() is None:
        return None
    # The server's address may be a setting of this context only, which a new thread lacks.
    context = contextvars.copy_context()

    def ask() -> None:
        if why := context.run(why_cancelled, flow_run_id):
            run.interrupt(why)
        else:
            run.let_go("its flow process was ended by SIGTERM")

    return lambda: threading.Thread(target=ask, name="on-term", daemon=True).start()


def conclude(run: RunSession) -> State[Any]:
    """The Prefect state that fits how the run ended."""
    verdict = run.close()
    match verdict.state:
        case RunState.COMPLETED:
            return Completed(message=verdict.message)
        case RunState.CANCELLED:
            return Cancelled(message=verdict.message)
        case _:
            last = [None, *run.record.ledger()][-1]
            return Failed(message=run.mask(in_a_line(verdict.message, run.place, last)))


def _context() -> FlowRunContext:
    context = FlowRunContext.get()
    if context is None:
        raise RuntimeError("a run is opened within the flow `train` only")
    return context


def _flow_run() -> Any:
    flow_run = _context().flow_run
    if flow_run is None:
        raise RuntimeError("the flow `train` has no flow run")
    return flow_run


def _now() -> datetime:
    return datetime.now(UTC)
