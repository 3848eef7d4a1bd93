"""The wait between two attempts at a run.

If a Prefect worker started this process, the process exits during the wait, and a worker starts a
new process for the next attempt. Prefect offers no function for this. The flow gives itself a
Scheduled state through the API, and then raises `Pause`. Prefect's engine then exits with code 0
and does not change the state. Two simpler ways do not work: a Scheduled state that a flow returns
becomes Crashed, and a Scheduled state that is set before the flow returns becomes Completed.
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
from tasks.server.flow_process import find_worker_flow_run, hand_over_flow_run
from tasks.server.flow_runs import (
    TYPE_LABEL,
    ServerAway,
    connect_to_server,
    find_flow_run,
    make_handover_state,
    read_state,
)
from tasks.train.session import CheckpointsUnreadable, RunSession
from tasks.upkeep.waiting_runs import forget_waiting_run, note_waiting_run

_log = logging.getLogger(__name__)

#: For a run that uses Ray, the delay before a requeued run starts again is divided by this number.
#: Ray soon reports which GPUs are free, so a shorter delay is sufficient.
_REPORTED_CLUSTER_DIVISOR = 12
#: Smallest number of seconds between the exit of a run's process and the start of the next process.
#: With a shorter pause, a worker of Prefect 3.8.8 with `--limit` still counts the old process, and
#: ends with a RuntimeError.
_MIN_ABSENCE_S = 2.0
#: Longest time in seconds for sending the last reports before this process exits and another
#: process continues the run.
_FLUSH_TIMEOUT_S = 15.0


def next_attempt(run: RunSession) -> bool:
    """Decide whether an attempt of the run starts, and wait until its start is due.

    If a Prefect worker started this process, the process gives the flow run a waiting state and
    exits. This process itself waits if it was started in another way, for example by a person, or
    if the waiting state cannot be set. An interrupt or a cancellation ends the wait at once.

    Returns:
        True if an attempt must start now, False if the run is over.

    Raises:
        Pause: This process must exit. The next process of the run will continue.
    """
    if run.handover_reason and not (run.attempt and run.verdict.state.is_final):
        _leave_jobs(run)
    if run.attempt is None:
        return not run.interrupt_reason
    decision = _decide_next_step(run)
    if decision.delay_s is None or run.interrupt_reason:
        return False

    starter = find_worker_flow_run()
    delay_s = decision.delay_s
    if starter is not None:
        delay_s = max(delay_s, _min_absence_s())
    due = datetime.now(UTC) + timedelta(seconds=delay_s)
    message = _describe_retry(run, decision, delay_s, due)
    run.record.move(RunState.PENDING_RESOURCES, message)
    labels = _make_labels(run, decision, delay_s)

    if starter is not None:
        # A requeued run returns to its old position in the queue at once, so that no later run
        # overtakes it during the delay. A run that is retried because of its own failure joins the
        # queue after the delay.
        has_queue = run.spec.gang is not None and starter.labels.get(TYPE_LABEL) == "gang"
        place_in_queue = None
        if decision.is_requeue and has_queue:
            place_in_queue = starter.expected_start_time
        state: State[Any] = Scheduled(
            name=PENDING_RESOURCES, scheduled_time=place_in_queue or due, message=message
        )
        try:
            # Write this file before the waiting state is set. If the run is cancelled while it has
            # no process, `muster reconcile` finds the run through this file and ends it.
            note_waiting_run(run.run_id, str(starter.id), PREFECT_API_URL.value() or "")
            if _hand_over_run(run, starter.id, state, labels):
                run.leave()
                raise Pause(state=state)
            forget_waiting_run(run.run_id)
        except OSError as error:
            _log.warning(
                "Muster could not return run %s to the queue. The process of the run keeps running "
                "during the wait for the next attempt: %s",
                run.run_id,
                error,
            )

    if run.spec.gang is not None:
        try:
            with _connect() as client:
                client.update_flow_run_labels(run.flow_run_id, labels)
        except ServerAway as error:
            _log.warning(
                "the next attempt of run %s may begin too early, because the Prefect server did "
                "not store the delay before this attempt: %s",
                run.run_id,
                error,
            )
        if decision.is_requeue:
            # Do not wait for the end of the delay here. The next task, `admit`, waits in the queue,
            # and the scheduler grants no GPUs before the end of the delay.
            return not (run.interrupt_reason or run.handover_reason)
    if run.wait((due - datetime.now(UTC)).total_seconds()):
        return True
    if run.handover_reason:
        _leave_jobs(run)
    return False


def _leave_jobs(run: RunSession) -> NoReturn:
    """Exit this process of a run whose Ray jobs continue. Another process will supervise the jobs.

    The flow run gets a waiting state, so that a worker starts the next process. If the Prefect
    server does not accept this state, `muster reconcile` schedules the next process.

    Raises:
        Pause: Always. This process must exit.
    """
    starter = find_worker_flow_run()
    message = (
        f"{run.handover_reason}; the Ray jobs of the run continue, and the next flow process "
        "of the run attaches to these jobs"
    )
    state = make_handover_state(message, _min_absence_s())
    labels: dict[str, Any] = {}
    if starter is not None:
        with suppress(ServerAway), _connect() as client:
            flow_run = find_flow_run(client, str(starter.id))
            if flow_run is not None:
                labels = handover_labels(flow_run)
        _hand_over_run(run, starter.id, state, labels)
    # This process exits now, even if the server has not accepted the waiting state. The flag
    # prevents the thread that watches the flow run from setting the state back to Running.
    run.is_handing_over = True
    run.leave()
    raise Pause(state=state)


def _decide_next_step(run: RunSession) -> RetryDecision:
    """Decide whether the run is retried after an attempt, and record the decision."""
    verdict = run.verdict
    attempts = run.record.content.attempts
    start = ""
    # The text of the decision contains the checkpoint of the next attempt. If the checkpoints
    # cannot be read now, leave out the checkpoint. The next attempt reads the checkpoints again.
    with suppress(CheckpointsUnreadable):
        start = run.plan_resume().describe()
    decision = decide_retry(
        verdict,
        list_counted_failures(run.spec, attempts),
        run.spec.find_retry_policy(verdict.failure.kind) if verdict.failure else None,
        start=start,
        is_unloadable=has_failed_by_checkpoint(run.spec, attempts),
    )
    run.record_decision(decision.text)
    uses_queue = run.spec.gang is not None and PREFECT_API_URL.value()
    if uses_queue and verdict.failure and find_blamed_nodes(verdict.failure, ("any",)):
        _report_bad_nodes(run, verdict.failure)
    return decision


def _report_bad_nodes(run: RunSession, failure: Failure) -> None:
    """Report the nodes that caused a failure, so that the scheduler avoids these nodes."""
    # Import these modules only in this function. The import takes 0.1 s, and most runs never call
    # this function.
    from tasks.queue.admission import note_failure
    from tasks.queue.settings import MissingFromServer

    try:
        asyncio.run(note_failure(run.flow_run_id, run.run_id, failure))
    except (httpx.HTTPError, PrefectException, MissingFromServer) as error:
        _log.warning(
            "run %s may get the failed nodes again, because Muster could not report the failure "
            "to the scheduler: %r",
            run.run_id,
            error,
        )


def _describe_retry(run: RunSession, decision: RetryDecision, delay_s: float, due: datetime) -> str:
    """Return the message of the waiting state: the failure, and when the next attempt starts."""
    failure = run.verdict.failure
    cause = f"{failure.kind.value}: {failure.line or failure.message}" if failure else ""
    number = run.record.attempts + 1
    start = f", {decision.start}" if decision.start else ""
    message = f"{cause}; attempt {number} in {delay_s:.0f} s, at {due:%H:%M:%S} UTC{start}"
    return run.mask(message)


def _make_labels(run: RunSession, decision: RetryDecision, delay_s: float) -> dict[str, Any]:
    """Return labels for the flow run that tell the scheduler when the next attempt may start.

    Args:
        run: The run.
        decision: The decision to start another attempt.
        delay_s: Seconds until the attempt may start.

    Returns:
        The labels. Empty if the run needs no GPUs.
    """
    if run.spec.gang is None:
        return {}
    if not decision.is_requeue:
        return requeue_labels()
    if run.spec.ray is not None:
        # A run on a Ray cluster needs only a short delay: some seconds after the end of an attempt,
        # Ray reports correctly which GPUs are free. Use a fraction of the normal delay, so that the
        # short delay also grows with each requeue.
        delay_s = min(delay_s, max(_min_absence_s(), delay_s / _REPORTED_CLUSTER_DIVISOR))
    return requeue_labels(not_before=time.time() + delay_s)


def _min_absence_s() -> float:
    """Return the shortest allowed time, in seconds, until the scheduled start of the next process.

    This process must exit at least `_MIN_ABSENCE_S` before the next process starts. A worker starts
    a flow run up to PREFECT_WORKER_PREFETCH_SECONDS before its scheduled time. The result is the
    sum of both times.
    """
    return _MIN_ABSENCE_S + float(PREFECT_WORKER_PREFETCH_SECONDS.value())


def _hand_over_run(
    run: RunSession, flow_run_id: UUID, state: State[Any], labels: Mapping[str, Any]
) -> bool:
    """Give the flow run a waiting state. A worker later starts the next process of the flow run.

    Args:
        run: The run.
        flow_run_id: Id of the flow run.
        state: The waiting state.
        labels: Labels to set on the flow run before the state.

    Returns:
        True if this process may exit: the server accepted the state, and the run was not
        interrupted. False if this process must wait, or end the run.
    """
    # Send the pending reports first. A report after the waiting state would set the flow run back
    # to Running.
    if not run.flush_reports(_FLUSH_TIMEOUT_S):
        return False
    # Set this flag before the flow run gets the waiting state. Otherwise, the thread that watches
    # the flow run would set the state back to Running.
    run.is_handing_over = True
    is_accepted = False
    try:
        is_accepted = _set_waiting_state(run, flow_run_id, state, labels)
    finally:
        run.is_handing_over = is_accepted
    return is_accepted


def _set_waiting_state(
    run: RunSession, flow_run_id: UUID, state: State[Any], labels: Mapping[str, Any]
) -> bool:
    """Give the flow run its labels and a waiting state.

    Returns:
        True if the server accepted the state and the run was not interrupted.
    """
    try:
        with _connect() as client:
            if labels:
                client.update_flow_run_labels(flow_run_id, dict(labels))
            # If the run was cancelled in the meantime, do not set the waiting state. This process
            # then ends the run.
            if run.interrupt_reason:
                return False
            if hand_over_flow_run(client, flow_run_id, state):
                # If a signal has cancelled the run during this request, return False. The flow then
                # ends the run as cancelled.
                return not run.interrupt_reason
    except ServerAway as error:
        _log.warning("%s: %s", run.run_id, error)

    # Either the server refused the waiting state, or it accepted the state and its response was
    # lost. Read the present state of the flow run to distinguish these cases.
    with suppress(ServerAway), _connect() as client:
        present = read_state(client, str(flow_run_id))
        if present is not None and (present.is_cancelling() or present.is_cancelled()):
            run.interrupt("cancelled from Prefect")
        elif present and (present.name, present.message) == (state.name, state.message):
            # The server has accepted the waiting state. Only its response was lost.
            return not run.interrupt_reason
    _log.warning(
        "the Prefect server did not accept a waiting state for run %s. The process of the run "
        "keeps running during the wait for the next attempt",
        run.run_id,
    )
    return False


def _connect() -> AbstractContextManager[SyncPrefectClient]:
    """Return a client of the configured Prefect server, as a context manager."""
    return connect_to_server(PREFECT_API_URL.value() or "")
