"""Report a run to its Prefect server: log messages, artifacts, activities and recoveries.

A separate thread sends the reports, so the run never waits for the server. If the server is slow
or does not answer, reports are late or lost. The last reports are the final artifacts. The process
waits for these reports only when it exits. If the process is killed before, `muster reconcile`
updates the artifacts.

A recovery of inference servers is reported as a task run, so that the server keeps a history.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

import httpx
from prefect import Task, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled, Completed, Failed, Running

from tasks.queue.grants import expected_end_labels
from tasks.record.events import Event, event_listeners
from tasks.server.events import is_retryable, override_client_settings
from tasks.server.flow_runs import make_context_thread, set_running_message
from tasks.server.server import find_lasting_api_url
from tasks.show.failure import format_failure
from tasks.show.lines import lines_of
from tasks.spec.formatting import join_commas
from tasks.train.expected_end import ExpectedEnd
from tasks.train.page_writer import RunPage
from tasks.train.session import RunSession

_log = logging.getLogger(__name__)

#: Longest time in seconds for sending the last reports when the run ends. The same limit applies to
#: the last artifacts when the process exits. Reports that take longer are dropped.
_CLOSE_TIMEOUT_S = 10.0
#: Longest time in seconds for sending the last reports to a temporary Prefect server that does not
#: answer. The limit is short, because a temporary server ends with the run.
_CLOSE_TIMEOUT_OF_LOST_S = 2.0
#: Seconds between two attempts to send a report.
_RETRY_EVERY_S = 0.5
#: Largest number of attempts to send a report if the server answers with an error.
_MAX_TRIES = 5
#: Seconds before a new activity of the run, such as `starting trainer`, is sent to the server. If
#: the activity changes within this time, only the last activity is sent.
_ACTIVITY_DELAY_S = 0.5
#: Name of Prefect's logger for task runs.
_TASK_RUN_LOGGER = "prefect.task_runs"


def _do_nothing() -> None:
    """Do nothing.

    This function is used in two places:

    - As an item in the queue of reports: each new item wakes the thread of the reporter. The thread
      then checks which artifacts must be sent.
    - As the body of a task run that shows a recovery of inference servers. Another process carries
      out the recovery.
    """


def _drop_empty_traceback(record: logging.LogRecord) -> bool:
    """Remove an empty traceback from a log record. Used as a logging filter.

    Prefect logs an empty traceback for a task that returns a failed state.
    """
    if record.exc_info and record.exc_info[1] is None:
        record.exc_info = None
    return True


#: The reporters that have not sent their last artifacts yet.
_closing_reporters: set[Reporter] = set()


def await_last_artifacts() -> None:
    """Wait until the last artifacts of all runs of this process are sent, or a time limit ends."""
    for reporter in [*_closing_reporters]:
        reporter.await_last_artifacts()


class Reporter:
    """Reports the events of one run to the Prefect server while the context is open.

    Close the context before the flow run gets its final state. Afterwards, the reporter sends only
    the last artifacts.
    """

    def __init__(self, run: RunSession, flow_run: FlowRun) -> None:
        self._run = run
        self._flow_run = flow_run
        #: Activity of the run that must still be sent, such as `starting trainer`. Empty if there
        #: is no activity to send.
        self._pending_activity = ""
        #: Time at which the pending activity will be sent, in CLOCK_MONOTONIC seconds.
        self._activity_due_s = 0.0
        #: Queue of functions that each send one report. The item None ends the thread of this
        #: reporter.
        self._reports: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: True if the server did not answer when the last report was sent.
        self._is_server_away = False
        #: Set when the thread must stop sending.
        self._is_closed = threading.Event()
        #: Set to make the thread of this reporter send the last artifacts without a delay.
        self._is_awaited = threading.Event()
        self._page = RunPage(run, flow_run)
        self._expected_end = ExpectedEnd()
        #: Recoveries of inference servers that are in progress, as a mapping from the id of the
        #: recovery to a pair: the id of the task run that shows the recovery, and a description.
        self._recoveries: dict[str, tuple[UUID, str]] = {}
        self._thread = make_context_thread("reporter", self._work)

    def __enter__(self) -> Reporter:
        self._token = event_listeners.set((*event_listeners.get(), self.observe))
        self._run.flush_reports = self._flush
        self._reports.put(self._send_tags)
        logging.getLogger(_TASK_RUN_LOGGER).addFilter(_drop_empty_traceback)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(_TASK_RUN_LOGGER).removeFilter(_drop_empty_traceback)
        event_listeners.reset(self._token)
        self._reports.put(self._abandon_recoveries)
        if not self._flush(_CLOSE_TIMEOUT_S):
            self._is_closed.set()
        # At exit, Python calls `await_last_artifacts` before the function that removes the run from
        # the registry of active runs. So the run stays registered until the last artifacts are
        # sent. If this process is killed before that, `muster reconcile` finds the run in the
        # registry.
        atexit.register(self.await_last_artifacts)
        _closing_reporters.add(self)
        self._reports.put(self._send_last_page)
        self._reports.put(None)
        if self._flow_run.run_count > 1:
            # Send the last artifacts before the flow run gets its final state. If an earlier
            # process of this run ran on another host, that host waits for the final state, and then
            # reads the record from an artifact.
            self.await_last_artifacts()

    def await_last_artifacts(self) -> None:
        """Wait until the last artifacts are sent, but only for a limited time.

        Artifacts that were not sent in this time are dropped. Call this method after the context
        is closed.
        """
        self._is_awaited.set()
        self._thread.join(_CLOSE_TIMEOUT_OF_LOST_S)
        if not self._is_server_lost:
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._is_closed.set()

    def _flush(self, timeout_s: float) -> bool:
        """Send all queued reports, and drop the pending activity of the run.

        An activity, such as `starting trainer`, is pending until it is sent.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            True if all reports were sent, False after a timeout.
        """
        is_sent = threading.Event()
        self._reports.put(self._drop_activity)
        self._reports.put(is_sent.set)
        if is_sent.wait(_CLOSE_TIMEOUT_OF_LOST_S):
            return True
        return not self._is_server_lost and is_sent.wait(timeout_s)

    @property
    def _is_server_lost(self) -> bool:
        """True if the server is temporary and does not answer.

        Callers then do not wait until the last reports are sent. The server ends with the run, so
        nobody could read the reports.
        """
        return self._is_server_away and find_lasting_api_url() is None

    def observe(self, event: Event) -> None:
        """Queue the reports about an event of the run, and return at once."""
        previous_activity = self._page.activity
        if self._page.observe(event):
            self._reports.put(_do_nothing)
        match event.name:
            case "containment" | "job.submitted" | "job.attached" | "run.waiting":
                for line in lines_of(event):
                    self._reports.put(partial(self._log, line.plain))
            case "rollout.recovery.begun":
                self._reports.put(partial(self._begin_recovery, event))
            case "rollout.recovery.ended":
                self._reports.put(partial(self._end_recovery, event))
            case "attempt.decided":
                self._reports.put(self._log_end_of_attempt)
            case "attempt.begun":
                self._expected_end.restart()
            case "run.progress" if self._run.spec.gang is not None:
                expected_end = self._expected_end.take_step(
                    event.at, self._page.remaining_s(event.at)
                )
                if expected_end is not None:
                    self._reports.put(partial(self._send_expected_end, expected_end))
        # Do not report the activity of a waiting run, because the flow run has a Prefect state for
        # the wait.
        if self._page.activity != previous_activity and event.name != "run.waiting":
            self._reports.put(partial(self._note_activity, self._page.activity, event.name))

    def _work(self) -> None:
        """Send reports until the context is closed and the last artifacts are sent."""
        # Use a separate client, because the flow closes its own client before the last artifacts
        # are sent. Disable the retries of Prefect's client, because the client waits too long
        # between two tries. `_send` retries instead.
        with override_client_settings(retries=0), get_client(sync_client=True):
            self._send_all()
        _closing_reporters.discard(self)

    def _send_all(self) -> None:
        """Send the reports in order. When the queue is empty, send the due artifacts."""
        report: Callable[[], None] | None = _do_nothing
        while report is not None and not self._is_closed.is_set():
            self._send(report)
            page_in_s = self._page.due_in_s()
            activity_in_s = page_in_s
            if self._pending_activity:
                activity_in_s = self._activity_due_s - time.monotonic()
            try:
                report = self._reports.get(timeout=max(0.0, min(page_in_s, activity_in_s)))
            except queue.Empty:
                is_activity_first = self._pending_activity and activity_in_s <= page_in_s
                report = self._send_activity if is_activity_first else self._send_page

    def _send(self, report: Callable[[], None]) -> None:
        """Send one report. Retry while there is no answer, and a few times after an error."""
        tries = 0
        while not self._is_closed.is_set():
            try:
                report()
                self._is_server_away = False
                return
            except Exception as error:
                tries += 1
                self._is_server_away = isinstance(error, httpx.TransportError)
                is_retried = self._is_server_away or (is_retryable(error) and tries < _MAX_TRIES)
                # Do not repeat a report of artifacts here. The artifacts are sent again later
                # anyway.
                if not is_retried or report == self._send_page:
                    _log.warning(
                        "the Prefect server did not accept a report about the run: %r", error
                    )
                    return
            self._is_closed.wait(_RETRY_EVERY_S)

    def _send_page(self) -> None:
        """Send the artifacts that must be updated now.

        As soon as another report is queued, the remaining artifacts are postponed.
        """
        self._page.send(is_enough=lambda: not self._reports.empty())

    def _send_last_page(self) -> None:
        """Send the last version of all artifacts that have changed."""
        # Wait a moment before the last artifacts are sent, so that Prefect can first set the final
        # state of the flow run.
        self._is_awaited.wait(_ACTIVITY_DELAY_S)
        self._page.send(is_last=True, is_enough=self._is_closed.is_set)

    def _send_tags(self) -> None:
        """Add the tags of the run spec to the flow run. The tags of its deployment are kept."""
        present_tags = self._flow_run.tags
        spec_tags = self._run.spec.tags
        if not set(spec_tags) <= set(present_tags):
            with get_client(sync_client=True) as client:
                tags = sorted({*present_tags, *spec_tags})
                client.update_flow_run(self._flow_run.id, tags=tags)

    def _send_expected_end(self, expected_end: float) -> None:
        """Store the expected end of the run in labels of the flow run, for the scheduler.

        Args:
            expected_end: Expected end in UTC epoch seconds.
        """
        labels = expected_end_labels(expected_end, at=time.time())
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(self._flow_run.id, labels)

    def _log(self, message: str) -> None:
        """Write a message to the log of the flow run on the server."""
        get_run_logger().info(message)

    def _note_activity(self, activity: str, event_name: str) -> None:
        """Log the activity of the run, and queue it as a message for the flow run's state."""
        # Many inference servers change their states at nearly the same time, and each change is a
        # new activity of the run. Report only the current activity.
        if event_name == "rollout.group.state" and activity != self._page.activity:
            return
        self._log(self._run.mask(activity))
        if not self._pending_activity:
            self._activity_due_s = time.monotonic() + _ACTIVITY_DELAY_S
        self._pending_activity = activity

    def _send_activity(self) -> None:
        """Send the pending activity of the run to the server.

        The activity becomes the message of the flow run's state, if the state is Running.
        """
        message = self._run.mask(self._pending_activity)
        self._pending_activity = ""
        set_running_message(self._flow_run.id, message, self._is_closed)

    def _drop_activity(self) -> None:
        """Drop the activity of the run if it was not sent yet."""
        self._pending_activity = ""

    def _begin_recovery(self, event: Event) -> None:
        """Create the task run `recover-rollout-<group>`, which shows a recovery of servers."""
        name = f"recover-rollout-{event.group}"
        description = f"ranks {join_commas(event.ranks)}: {event.cause}"
        with get_client(sync_client=True) as client:
            task_run = client.create_task_run(
                Task(_do_nothing, name=name),
                self._flow_run.id,
                dynamic_key=f"{name}-{event.id}",
                name=name,
            )
            self._recoveries[event.id] = task_run.id, description
            try_number = f" (try {event.tried})" if event.tried > 1 else ""
            state: State[Any] = Running(message=f"{description}{try_number}")
            client.set_task_run_state(task_run.id, state, force=True)

    def _end_recovery(self, event: Event) -> None:
        """Set the final state of the task run that shows a recovery of inference servers."""
        make_state = {"recovered": Completed, "abandoned": Cancelled}.get(event.outcome, Failed)
        outcome = f"{event.outcome} after {event.took_s:.1f} s"
        details = f"; {event.message}" if event.message else ""
        self._close_recovery(event.id, make_state, outcome, details)

    def _abandon_recoveries(self) -> None:
        """Set the task run of each unfinished recovery to Cancelled, because the run ends."""
        for recovery_id in [*self._recoveries]:
            self._close_recovery(
                recovery_id, Cancelled, "the recovery was abandoned, because the run ended"
            )

    def _close_recovery(
        self,
        recovery_id: str,
        make_state: Callable[..., State[Any]],
        outcome: str,
        details: str = "",
    ) -> None:
        """Set the final state of the task run that shows a recovery of inference servers.

        Do nothing if the recovery is unknown.

        Args:
            recovery_id: Id of the recovery.
            make_state: Function that makes the final state from its parameter `message`. An example
                is Prefect's `Completed`.
            outcome: First words of the state's message, such as `recovered`.
            details: Last words of the state's message.
        """
        if recovery_id not in self._recoveries:
            return
        task_run_id, description = self._recoveries.pop(recovery_id)
        state = make_state(message=f"{outcome}: {description}{details}")
        with get_client(sync_client=True) as client:
            client.set_task_run_state(task_run_id, state, force=True)

    def _log_end_of_attempt(self) -> None:
        """Log the result of the last attempt. This is the last message of the attempt."""
        attempt = self._run.record.content.attempts[-1]
        logger = get_run_logger()
        if attempt.failure is None:
            message = self._run.verdict.message
            logger.info("attempt %d %s: %s", attempt.number, attempt.state.value, message)
        else:
            logger.error("%s", format_failure(self._run.place, attempt, attempt.failure))
