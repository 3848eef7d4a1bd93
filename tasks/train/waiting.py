"""The wait for a run's next attempt: without a process where somebody starts one for it, else here.

Prefect has no word for a flow that leaves and is to be started again later. What works is a
Scheduled state that the flow gives itself through the API, followed by `Pause`, which makes the
engine exit 0 and leave the state alone. A Scheduled state that is returned ends as Crashed, and one
that is set before a return is overwritten by Completed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, PrefectException
from prefect.settings import PREFECT_API_URL, PREFECT_WORKER_PREFETCH_SECONDS
from prefect.states import Scheduled

from tasks.queue.grants import PENDING_RESOURCES, handover_labels, requeue_labels
from tasks.record.outcome import Failure
from tasks.record.retries import (
    RetryDecision,
    decide_retry,
    find_blamed_nodes,
    has_failed_by_checkpoint,
    list_counted_failures,
)
from tasks.record.states import RunState
from tasks.server.flow_process import hand_over, started_by_others
from tasks.server.flow_runs import (
    TYPE_LABEL,
    ServerAway,
    find_flow_run,
    goes_on,
    state_of,
    talking_to,
)
from tasks.train.session import RunSession
from tasks.upkeep.waiting_runs import forget_waiting_run, note_waiting_run

_log = logging.getLogger(__name__)

#: The delay of a run that was sent back is this much shorter where its cluster tells of room.
_SETTLED_PART = 12
#: A run is not due before its old process has surely left. The worker of Prefect 3.8.8, started
#: with `--limit`, ends with a RuntimeError of its capacity limiter otherwise.
_AWAY_AT_LEAST_S = 2.0
#: What is to be told before the run may be left.
_TOLD_WITHIN_S = 15.0


def next_attempt(run: RunSession) -> bool:
    """Whether there is to be a first attempt, or another one, of the run; waits for its time.

    Under a worker the wait holds no process. Where the server does not take that, because it is
    away for example, and where the run was started directly, it is waited here; an interrupt or a
    cancel ends that at once.

    Raises: Pause, when the run is left to its next process.
    """
    if run.handover_reason and not (run.attempt and run.verdict.state.is_final):
        _leave_jobs(run)
    if run.attempt is None:
        return not run.interrupt_reason
    sequel = _decided(run)
    if (delay_s := sequel.delay_s) is None or run.interrupt_reason:
        return False
    flow_run = started_by_others()
    delay_s = delay_s if flow_run is None else max(delay_s, _away_at_least_s())
    due = datetime.now(UTC) + timedelta(seconds=delay_s)
    message = _message(run, sequel, delay_s, due)
    run.record.move(RunState.PENDING_RESOURCES, message)
    labels = _labels(run, sequel, delay_s)
    if flow_run is not None:
        # Sent back, it has its place in the line at once, which the gate lets nobody pass before
        # the delay is over; a retry of another kind comes back only then.
        has_gate = run.spec.gang is not None and flow_run.labels.get(TYPE_LABEL) == "gang"
        is_in_line = sequel.is_requeue and has_gate
        in_line = flow_run.expected_start_time if is_in_line else None
        state: State[Any] = Scheduled(
            name=PENDING_RESOURCES, scheduled_time=in_line or due, message=message
        )
        try:
            # Before the state: nobody could look after a run that is cancelled in between.
            note_waiting_run(run.run_id, str(flow_run.id), PREFECT_API_URL.value() or "")
            if _handed_over(run, flow_run.id, state, labels):
                run.leave()
                raise Pause(state=state)
            forget_waiting_run(run.run_id)
        except OSError as error:
            _log.warning("%s waits with its process: %s", run.run_id, error)
    if run.spec.gang is not None:
        try:
            with _server() as client:
                client.update_flow_run_labels(run.flow_run_id, labels)
        except ServerAway as error:
            _log.warning("%s is tried again without a delay: %s", run.run_id, error)
        if sequel.is_requeue:
            # It waits in the line, where the delay is kept too.
            return not (run.interrupt_reason or run.handover_reason)
    if run.wait((due - datetime.now(UTC)).total_seconds()):
        return True
    if run.handover_reason:
        _leave_jobs(run)
    return False


def _leave_jobs(run: RunSession) -> NoReturn:
    """Leave a run whose jobs go on to its next process.

    Where the server does not take that, `reconcile` finds it, and answers for its jobs.
    """
    flow_run, labels = started_by_others(), dict[str, Any]()
    message = f"{run.handover_reason}; its jobs go on, and its next process attaches to them"
    state = goes_on(message, _away_at_least_s())
    if flow_run is not None:
        with suppress(ServerAway), _server() as client:
            found = find_flow_run(client, str(flow_run.id))
            labels = handover_labels(found) if found is not None else {}
        _handed_over(run, flow_run.id, state, labels)
    run.leave()
    raise Pause(state=state)


def _decided(run: RunSession) -> RetryDecision:
    """What follows the attempt that has just ended, noted in the ledger."""
    verdict = run.verdict
    attempts = run.record.content.attempts
    sequel = decide_retry(
        verdict,
        list_counted_failures(run.spec, attempts),
        run.spec.find_retry_policy(verdict.failure.kind) if verdict.failure else None,
        resume_from=str(run.find_checkpoint() or ""),
        is_unloadable=has_failed_by_checkpoint(run.spec, attempts),
    )
    run.record_decision(sequel.text)
    is_of_gang = run.spec.gang is not None and PREFECT_API_URL.value()
    if is_of_gang and verdict.failure and find_blamed_nodes(verdict.failure, ("any",)):
        _blame(run, verdict.failure)
    return sequel


def _blame(run: RunSession, failure: Failure) -> None:
    # Here, since it takes a tenth of a second, which a run that completes need not wait.
    from tasks.queue.admission import note_failure
    from tasks.queue.settings import NotThere

    try:
        asyncio.run(note_failure(run.flow_run_id, run.run_id, failure))
    except (httpx.HTTPError, PrefectException, NotThere) as error:
        _log.warning("%s may get the same nodes again: %r", run.run_id, error)


def _message(run: RunSession, sequel: RetryDecision, delay_s: float, due: datetime) -> str:
    failure = run.verdict.failure
    cause = f"{failure.kind.value}: {failure.line or failure.message}" if failure else ""
    number = run.record.attempts + 1
    start = f", from {sequel.resume_from}" if sequel.resume_from else ""
    said = f"{cause}; attempt {number} in {delay_s:.0f} s, at {due:%H:%M:%S} UTC{start}"
    return run.mask(said)


def _labels(run: RunSession, sequel: RetryDecision, delay_s: float) -> dict[str, Any]:
    """What is noted of a run that is to wait for its gang again."""
    if run.spec.gang is None:
        return {}
    if not sequel.is_requeue:
        return requeue_labels()
    if run.spec.ray is not None:
        # A cluster that tells what is free ends the delay, but for the seconds in which its own
        # figures settle; more of them where the run has come back again and again.
        delay_s = min(delay_s, max(_away_at_least_s(), delay_s / _SETTLED_PART))
    return requeue_labels(not_before=time.time() + delay_s)


def _away_at_least_s() -> float:
    """A worker, which hands its settings on, takes what is due within its prefetch seconds."""
    return _AWAY_AT_LEAST_S + float(PREFECT_WORKER_PREFETCH_SECONDS.value())


def _handed_over(
    run: RunSession, flow_run_id: UUID, state: State[Any], labels: Mapping[str, Any]
) -> bool:
    """Whether the server took the state, and nothing has come that ends the run."""
    # What is told later would bring the flow run back to Running.
    if not run.flush_reports(_TOLD_WITHIN_S):
        return False
    try:
        with _server() as client:
            if labels:
                client.update_flow_run_labels(flow_run_id, dict(labels))
            # Until the state is there, this run sees cancels itself.
            if run.interrupt_reason:
                return False
            if hand_over(client, flow_run_id, state):
                # A signal that came meanwhile wins: the flow then ends as cancelled.
                return not run.interrupt_reason
    except ServerAway as error:
        _log.warning("%s: %s", run.run_id, error)
    with suppress(ServerAway), _server() as client:
        found = state_of(client, str(flow_run_id))
        if found is not None and (found.is_cancelling() or found.is_cancelled()):
            run.interrupt("cancelled from Prefect")
        elif found and (found.name, found.message) == (state.name, state.message):
            # It was taken, and the answer lost: the run is no longer ours.
            return not run.interrupt_reason
    _log.warning("%s waits with its process: its state was not accepted", run.run_id)
    return False


def _server() -> AbstractContextManager[SyncPrefectClient]:
    return talking_to(PREFECT_API_URL.value() or "")
