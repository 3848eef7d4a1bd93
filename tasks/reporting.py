"""What the Prefect server is told of a run beside its states: messages, logs, artifacts.

Told from a thread of its own, from the run's events: a server that is slow or away makes it late
or lost, and never keeps the run waiting.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    TableArtifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.states import Running

from tasks.fleet_events import FleetWords
from tasks.fleet_recoveries import RecoveryRuns
from tasks.run.attempts import table_of
from tasks.run.events import Event
from tasks.session import RunSession, event_listeners

_log = logging.getLogger(__name__)

#: Of the table of attempts of a flow run.
ATTEMPTS_KEY = "attempts"
#: What is not told by then is dropped, so that a final state is not held up by a server away.
_CLOSE_WITHIN_S = 10.0
_PROGRESS_EVERY_S = 1.0


#: Of this context.
_reporter: ContextVar[Reporter | None] = ContextVar("reporter", default=None)


def flushed(within_s: float) -> bool:
    """Whether the server was told, in so many seconds, all that has happened so far."""
    reporter = _reporter.get()
    return reporter is None or reporter.flush(within_s)


def say_state(message: str) -> None:
    """Have the flow run say what it is doing, while it runs."""
    if (reporter := _reporter.get()) is not None:
        reporter.say_state(message)


class Reporter:
    """Tells the Prefect server what happens to a run, while the context is open.

    It must be closed before the flow run gets its final state, and nothing is told after that.
    """

    def __init__(self, run: RunSession, flow_run_id: UUID) -> None:
        self._run = run
        self._flow_run_id = flow_run_id
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._step: float | None = None
        self._told_step: float | None = None
        self._told_step_at = 0.0
        self._progress_id: UUID | None = None
        self._attempts_id: UUID | None = None
        fleet = run.spec.fleet
        self._fleet = FleetWords(fleet.engines) if fleet is not None else None
        self._recoveries = RecoveryRuns(flow_run_id)
        self._is_running = False
        self._told_running = ""
        # Prefect's logger and artifacts find their flow run by the context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work,), name="reporter", daemon=True
        )

    def __enter__(self) -> Reporter:
        self._token = event_listeners.set((*event_listeners.get(), self.observe))
        self._own_token = _reporter.set(self)
        self._jobs.put(self._tell_tags)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        event_listeners.reset(self._token)
        _reporter.reset(self._own_token)
        self._jobs.put(self._recoveries.abandon)
        self._jobs.put(None)
        self._thread.join(_CLOSE_WITHIN_S)
        self._closed.set()

    def flush(self, within_s: float) -> bool:
        """See `flushed`."""
        told = threading.Event()
        self._jobs.put(told.set)
        return told.wait(within_s)

    def observe(self, event: Event) -> None:
        """Take in an event of the run. Returns at once."""
        if self._fleet is not None and self._fleet.observe(event):
            self._jobs.put(self._tell_running)
        match event.name:
            case "attempt.begun" | "attempt.decided":
                self._jobs.put(self._tell_attempts)
            case "containment":
                self._jobs.put(lambda: self._tell(f"containment {event.fields['text']}"))
            case "job.submitted" | "job.attached":
                done = event.name.removeprefix("job.")
                said = f"{event.component}: job {event.fields['submission_id']} {done}"
                self._jobs.put(lambda: self._tell(said))
            case "contact.lost":
                # A run whose cluster is away says Running: why it may not be so is to be seen.
                self.say_state(f"no answer: {event.fields['message']}")
            case "contact.back":
                self.say_state(f"{event.fields['address']} answers again")
            case "component.starting":
                self.say_state(f"starting {event.component}")
            case "attempt.ready":
                self._is_running, self._told_running = True, ""
                self._jobs.put(self._tell_running)
            case "rollout.recovery.begun":
                self._jobs.put(lambda: self._recoveries.begun(event.fields))
            case "rollout.recovery.ended":
                self._jobs.put(lambda: self._recoveries.ended(event.fields))
            case "teardown.begun":
                self._is_running = False
                self.say_state(f"stopping: {event.fields['reason']}")
            case "run.progress":
                self._step = event.fields["step"]
                self._jobs.put(self._tell_progress)
            case "attempt.ended":
                self._jobs.put(lambda: self._tell_end(event))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed.is_set():
            try:
                job()
            except Exception as error:
                _log.warning("not told to the Prefect server: %r", error)

    def _tell_tags(self) -> None:
        """A run's own tags, beside those of its deployment."""
        with get_client(sync_client=True) as client:
            have = client.read_flow_run(self._flow_run_id).tags
            if not set(self._run.spec.tags) <= set(have):
                wanted = sorted({*have, *self._run.spec.tags})
                client.update_flow_run(self._flow_run_id, tags=wanted)

    def _tell(self, message: str) -> None:
        get_run_logger().info(message)

    def say_state(self, message: str) -> None:
        """See `say_state`. Returns at once."""
        self._jobs.put(lambda: self._tell_state(message))

    def _tell_state(self, message: str) -> None:
        get_run_logger().info(message)
        with get_client(sync_client=True) as client:
            # Not forced: a run that is being cancelled keeps that state.
            client.set_flow_run_state(self._flow_run_id, Running(message=message))

    def _tell_running(self) -> None:
        """What runs, as it is by now; a fleet changes faster than a server is told."""
        message = f"running: {', '.join(self._run.components)}"
        if degraded := str(self._fleet or ""):
            message += f"; {degraded}"
        if self._is_running and message != self._told_running:
            self._told_running = message
            self._tell_state(message)

    def _tell_progress(self) -> None:
        progress, step = self._run.spec.progress, self._step
        if progress is None or progress.total is None or step is None or step == self._told_step:
            return
        is_last = step >= progress.total
        if not is_last and time.monotonic() - self._told_step_at < _PROGRESS_EVERY_S:
            return
        percent = min(100.0, 100.0 * step / progress.total)
        description = f"{self._run.run_id}: step {step:g} of {progress.total}"
        if self._progress_id is None:
            self._progress_id = create_progress_artifact(  # type: ignore[assignment]
                percent, key="progress", description=description
            )
        else:
            update_progress_artifact(self._progress_id, percent, description=description)
        self._told_step, self._told_step_at = step, time.monotonic()

    def _tell_attempts(self) -> None:
        """Keep the table of attempts current.

        One artifact for the flow run, found again by each of its processes: Prefect would show a
        new one for each change beside all earlier ones.
        """
        table = TableArtifact(table=table_of(self._run.record.ledger()))
        with get_client(sync_client=True) as client:
            self._attempts_id = self._attempts_id or self._find_attempts(client)
            if self._attempts_id is None:
                created = client.create_artifact(
                    ArtifactCreate(
                        key=ATTEMPTS_KEY,
                        type="table",
                        description=self._run.run_id,
                        data=table.format(_sync=True),  # type: ignore[call-arg]
                        flow_run_id=self._flow_run_id,
                    )
                )
                self._attempts_id = created.id
            else:
                data = ArtifactUpdate(data=table.format(_sync=True))  # type: ignore[call-arg]
                client.update_artifact(self._attempts_id, data)

    def _find_attempts(self, client: SyncPrefectClient) -> UUID | None:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                key=ArtifactFilterKey(any_=[ATTEMPTS_KEY]),
                flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]),
            ),
            limit=1,
        )
        return found[0].id if found else None

    def _tell_end(self, event: Event) -> None:
        logger = get_run_logger()
        failure = event.fields["failure"] or {}
        number, message = event.fields["attempt"], event.fields["message"]
        logger.log(logging.ERROR if failure else logging.INFO, "attempt %d: %s", number, message)
        if failure.get("hint"):
            logger.error("hint: %s", failure["hint"])
        if failure.get("log_tail") and self._run.attempt is not None:
            log = self._run.attempt.log(failure["component"])
            logger.error("last lines of %s:\n%s", log, failure["log_tail"])
        create_markdown_artifact(
            key="components", markdown=_summary(self._run, event), description=self._run.run_id
        )


def _summary(run: RunSession, end: Event) -> str:
    lines = [
        f"**{run.run_id}**, attempt {end.fields['attempt']}: {end.fields['message']}",
        "",
        "| component | pid | ready after | ended | log |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, seen in run.record.components().items():
        ready = f"{seen['ready_at'] - seen['started_at']:.2f} s" if seen["ready_at"] else "never"
        ended = seen["signal"] or f"exit code {seen['exit_code']}"
        log = run.attempt.log(name) if run.attempt else ""
        lines.append(f"| {name} | {seen['pid']} | {ready} | {ended} | `{log}` |")
    failure = end.fields["failure"]
    if failure and failure["log_tail"]:
        lines += ["", f"Last lines of {failure['component']}:", "", "```"]
        lines += [failure["log_tail"], "```"]
    return "\n".join([*lines, "", f"Record: `{run.place.record}`"])
