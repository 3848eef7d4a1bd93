"""Show a submitted run on the terminal until it has ended, as `muster train` shows a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State

from tasks.record.events import Event
from tasks.record.log_file import LogFile
from tasks.record.places import RunPlace
from tasks.server.artifacts import find_artifacts
from tasks.show.facts_of_run import format_step
from tasks.show.page import SUMMARY, find_step
from tasks.show.terminal import Terminal
from tasks.train.local_runs import list_attempts, read_local_record

#: Seconds between two requests for the step of a run on another host.
_ASK_STEP_EVERY_S = 5.0
#: Longest wait in seconds until the record of a run on this machine is final. The wait starts when
#: the flow run has ended on the server.
_RECORD_WITHIN_S = 10.0
#: Seconds between two reads of the record of a run.
_READ_EVERY_S = 0.2
#: The training step of a run on another host is printed about this number of times per run.
_STEP_LINES = 20


class RunEvents:
    """Reads the events of a run from the event logs of its attempts on this machine.

    Only attempts with a number above `after_attempt` are read.
    """

    def __init__(self, place: RunPlace, after_attempt: int) -> None:
        self._place = place
        #: Number of the attempt whose event log is read now. Until the first event log is opened,
        #: the value is `after_attempt`.
        self._number = after_attempt
        self._log: LogFile | None = None

    @property
    def has_begun(self) -> bool:
        """True if this machine has files of an attempt."""
        return self._log is not None

    def read_new(self) -> Iterator[Event]:
        """Yield the events that were written since the last call, in order."""
        numbers = [number for number in list_attempts(self._place) if number > self._number]
        yield from self._read_log()
        for number in numbers:
            # First read the rest of the old event log. An attempt starts only after the last event
            # of the previous attempt.
            yield from self._read_log()
            self._number = number
            self._log = LogFile(self._place.attempt(number).events)
            yield from self._read_log()

    def _read_log(self) -> Iterator[Event]:
        for line in self._log.read_new() if self._log is not None else ():
            try:
                yield Event.from_line(line)
            except ValueError:
                continue


class RunWatch:
    """Shows the states of a run on the server. For a run on this machine, also shows the events."""

    def __init__(
        self,
        client: SyncPrefectClient,
        flow_run_id: UUID,
        run_id: str,
        terminal: Terminal,
        after_attempt: int = 0,
    ) -> None:
        """
        Args:
            client: Client of the Prefect server.
            flow_run_id: Id of the flow run.
            run_id: Id of the run.
            terminal: Terminal on which the run is shown.
            after_attempt: Attempts up to this number are not shown. 0 to show all attempts.
        """
        self._client = client
        self._flow_run_id = flow_run_id
        self._run_id = run_id
        self._place = RunPlace.of(run_id)
        self._events = RunEvents(self._place, after_attempt)
        self._terminal = terminal
        self._shown_step = float("-inf")
        self._ask_step_at = 0.0

    def show_state(self, state: State[object]) -> None:
        """Print a new state of the flow run, unless the state is final.

        The state Running is not printed if this machine has events of the run, because `show_news`
        prints these events.
        """
        if not state.is_final() and not (state.is_running() and self._events.has_begun):
            message = f": {state.message}" if state.message else ""
            self._terminal.say(f"{state.name}{message}")

    def show_news(self, state: State[object]) -> None:
        """Show the new events of the run, or the training step of a run on another host.

        Args:
            state: Present state of the flow run.
        """
        for event in self._events.read_new():
            self._terminal.show(event)
        now = time.monotonic()
        if state.is_running() and not self._events.has_begun and now >= self._ask_step_at:
            self._ask_step_at = now + _ASK_STEP_EVERY_S
            self._show_remote_step()

    def end(self, state: State[object], page: str) -> None:
        """Show the last events of the run, and how the run ended.

        Args:
            state: Final state of the flow run.
            page: Address of the flow run's page in the Prefect UI.
        """
        deadline = time.monotonic() + _RECORD_WITHIN_S
        while self._events.has_begun and time.monotonic() < deadline:
            record = read_local_record(self._run_id)
            if record is None or record.ended_at is not None:
                break
            time.sleep(_READ_EVERY_S)
        self.show_news(state)
        message = state.message or ""
        if self._place.record.exists():
            opened = {"run_id": self._run_id, "record": self._place.record}
            self._terminal.show(Event(at=time.time(), name="run.opened", fields=opened))
            record = read_local_record(self._run_id)
            if state.is_completed() and record is not None and record.message:
                # In the message of the flow run, paths are relative to the folder of the run.
                message = record.message
        self._terminal.end(state.type.value.lower(), message, page)

    def _show_remote_step(self) -> None:
        """Print the training step of a run on another host, about `_STEP_LINES` times per run.

        The step is read from the artifact `summary`.
        """
        for artifact in find_artifacts(self._client, self._flow_run_id, [SUMMARY])[:1]:
            progress = find_step(artifact.description or "")
            if progress is None:
                return
            step, total = progress
            is_due = step - self._shown_step >= (total or 100) / _STEP_LINES
            if is_due or (step == total and step != self._shown_step):
                self._shown_step = step
                self._terminal.say(format_step(step, total))
