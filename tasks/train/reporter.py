"""What the Prefect server is told of a run beside its states: messages, logs, artifacts, and the
recoveries of its fleet as task runs, so that the server keeps their history.

Told from a thread of its own, from the run's events: a server that is slow or away makes it late
or lost, and never keeps the run waiting. The page comes last: nothing waits for it but the end of
this process. Where that is killed before, `reconcile` finds the run, and has its page mended.
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

from tasks.record.events import Event, event_listeners
from tasks.server.events import client_settings, may_pass
from tasks.server.flow_runs import say_running, thread_here
from tasks.server.server import lasting_api_url
from tasks.show.failure import format_failure
from tasks.show.lines import lines_of
from tasks.spec.formatting import join_commas
from tasks.train.page_writer import RunPage
from tasks.train.session import RunSession


def _nothing() -> None:
    """Stands for what the fleet's process does; as a job, it has looked again what is due."""


_log = logging.getLogger(__name__)

#: What is not told by then is dropped, so that a final state is not held up by a server away, nor
#: is the end of the process by the last page.
_CLOSE_WITHIN_S = 10.0
#: The same of a temporary server that is away at the end.
_LOST_WITHIN_S = 2.0
#: Seconds until something is told again that the server did not take, and how often it is told to a
#: server that answers with an error.
_AGAIN_S = 0.5
_TRIES = 5
#: What a run does changes faster than it can be read: of all within so long the last is its state.
_TOGETHER_S = 0.5
#: Prefect's logger of what task runs say.
_TASK_RUNS = "prefect.task_runs"


def _without_empty_traceback(record: logging.LogRecord) -> bool:
    """Of a task that returns a failed state Prefect logs a traceback, which is none."""
    if record.exc_info and record.exc_info[1] is None:
        record.exc_info = None
    return True


#: Those that still tell their last page.
_at_last_page: set[Reporter] = set()


def await_last_pages() -> None:
    """Wait until the last page of each run of this process is told, where the server takes it."""
    for reporter in [*_at_last_page]:
        reporter.await_last_page()


class Reporter:
    """Tells the Prefect server what happens to a run, while the context is open.

    It must be closed before the flow run gets its final state, and nothing is told after that but
    the last page.
    """

    def __init__(self, run: RunSession, flow_run: FlowRun) -> None:
        self._run = run
        self._flow_run = flow_run
        #: What the run does, not told yet as its state, and when that is due.
        self._doing, self._doing_due_s = "", 0.0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: The server did not answer when it was last told something.
        self._is_away = False
        self._closed, self._is_awaited = threading.Event(), threading.Event()
        self._page = RunPage(run, flow_run)
        #: `recoveries[id] -> (task run, what it recovers)`, of those under way.
        self._recoveries: dict[str, tuple[UUID, str]] = {}
        self._thread = thread_here("reporter", self._work)

    def __enter__(self) -> Reporter:
        self._token = event_listeners.set((*event_listeners.get(), self.observe))
        self._run.flush_reports = self._flush
        self._jobs.put(self._tell_tags)
        logging.getLogger(_TASK_RUNS).addFilter(_without_empty_traceback)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(_TASK_RUNS).removeFilter(_without_empty_traceback)
        event_listeners.reset(self._token)
        self._jobs.put(self._abandon_recoveries)
        if not self._flush(_CLOSE_WITHIN_S):
            self._closed.set()
        # Before the registry forgets the run, which a killed process leaves to be found.
        atexit.register(self.await_last_page)
        _at_last_page.add(self)
        self._jobs.put(self._tell_last_page)
        self._jobs.put(None)
        if self._flow_run.run_count > 1:
            # Another host that it has waited on reads the page's record once the state is final.
            self.await_last_page()

    def await_last_page(self) -> None:
        """Once the context is closed. Nothing is told after that."""
        self._is_awaited.set()
        self._thread.join(_LOST_WITHIN_S)
        if not self._is_lost:
            self._thread.join(_CLOSE_WITHIN_S)
        self._closed.set()

    def _flush(self, within_s: float) -> bool:
        told = threading.Event()
        self._jobs.put(self._forget_doing)
        self._jobs.put(told.set)
        return told.wait(_LOST_WITHIN_S) or (not self._is_lost and told.wait(within_s))

    @property
    def _is_lost(self) -> bool:
        """Whether a server that is away is one that ends with the run: nobody would read there
        what is told once it is back."""
        return self._is_away and lasting_api_url() is None

    def observe(self, event: Event) -> None:
        """Take in an event of the run. Returns at once."""
        doing = self._page.doing
        if self._page.observe(event):
            self._jobs.put(_nothing)
        match event.name:
            case "containment" | "job.submitted" | "job.attached":
                for line in lines_of(event):
                    self._jobs.put(partial(self._log, line.plain))
            case "rollout.recovery.begun":
                self._jobs.put(partial(self._recovery_begun, event))
            case "rollout.recovery.ended":
                self._jobs.put(partial(self._recovery_ended, event))
            case "attempt.decided":
                self._jobs.put(self._tell_end)
        # That it waits is a state of its own, which whoever has it wait gives it.
        if self._page.doing != doing and event.name != "run.waiting":
            self._jobs.put(partial(self._note_doing, self._page.doing, event.name))

    def _work(self) -> None:
        # The flow closes its client, which the last page still needs. A client that tried again by
        # itself would sleep on when the server is back.
        with client_settings(retries=0), get_client(sync_client=True):
            self._tell_all()
        _at_last_page.discard(self)

    def _tell_all(self) -> None:
        # What is said in words comes first; the page is told in the pauses.
        job: Callable[[], None] | None = _nothing
        while job is not None and not self._closed.is_set():
            self._tell(job)
            page_in_s = self._page.due_in_s()
            state_in_s = self._doing_due_s - time.monotonic() if self._doing else page_in_s
            try:
                job = self._jobs.get(timeout=max(0.0, min(page_in_s, state_in_s)))
            except queue.Empty:
                job = self._tell_page
                if self._doing and state_in_s <= page_in_s:
                    job = self._tell_doing

    def _tell(self, job: Callable[[], None]) -> None:
        """Do a job, again and again while the server is away, and a few times if it refuses."""
        tries = 0
        while not self._closed.is_set():
            try:
                job()
                self._is_away = False
                return
            except Exception as error:
                tries += 1
                self._is_away = isinstance(error, httpx.TransportError)
                is_tried_again = self._is_away or (may_pass(error) and tries < _TRIES)
                # The page is due again by itself.
                if not is_tried_again or job == self._tell_page:
                    _log.warning("not told to the Prefect server: %r", error)
                    return
            self._closed.wait(_AGAIN_S)

    def _tell_page(self) -> None:
        self._page.tell(is_enough=lambda: not self._jobs.empty())

    def _tell_last_page(self) -> None:
        # The server has the final state to take in first.
        self._is_awaited.wait(_TOGETHER_S)
        self._page.tell(is_last=True, is_enough=self._closed.is_set)

    def _tell_tags(self) -> None:
        """A run's own tags, beside those of its deployment."""
        have = self._flow_run.tags
        if not set(self._run.spec.tags) <= set(have):
            with get_client(sync_client=True) as client:
                wanted = sorted({*have, *self._run.spec.tags})
                client.update_flow_run(self._flow_run.id, tags=wanted)

    def _log(self, message: str) -> None:
        get_run_logger().info(message)

    def _note_doing(self, message: str, name: str) -> None:
        # A fleet changes faster than a server is told.
        if name == "rollout.group.state" and message != self._page.doing:
            return
        self._log(self._run.mask(message))
        if not self._doing:
            self._doing_due_s = time.monotonic() + _TOGETHER_S
        self._doing = message

    def _tell_doing(self) -> None:
        message, self._doing = self._run.mask(self._doing), ""
        say_running(self._flow_run.id, message, self._closed)

    def _forget_doing(self) -> None:
        self._doing = ""

    def _recovery_begun(self, event: Event) -> None:
        """Make a task run of it, `recover-rollout-<group>`, which runs as long as that does."""
        name = f"recover-rollout-{event.group}"
        what = f"ranks {join_commas(event.ranks)}: {event.cause}"
        with get_client(sync_client=True) as client:
            made = client.create_task_run(
                Task(_nothing, name=name),
                self._flow_run.id,
                dynamic_key=f"{name}-{event.id}",
                name=name,
            )
            self._recoveries[event.id] = made.id, what
            tried = f" (try {event.tried})" if event.tried > 1 else ""
            client.set_task_run_state(made.id, Running(message=f"{what}{tried}"), force=True)

    def _recovery_ended(self, event: Event) -> None:
        make = {"recovered": Completed, "abandoned": Cancelled}.get(event.outcome, Failed)
        more = f"; {event.message}" if event.message else ""
        self._end_recovery(event.id, make, f"{event.outcome} after {event.took_s:.1f} s", more)

    def _abandon_recoveries(self) -> None:
        """Close what the end of the run has cut short."""
        for id in [*self._recoveries]:
            self._end_recovery(id, Cancelled, "abandoned with the end of the run")

    def _end_recovery(
        self, id: str, make: Callable[..., State[Any]], how: str, more: str = ""
    ) -> None:
        if id in self._recoveries:
            task_run_id, what = self._recoveries.pop(id)
            state = make(message=f"{how}: {what}{more}")
            with get_client(sync_client=True) as client:
                client.set_task_run_state(task_run_id, state, force=True)

    def _tell_end(self) -> None:
        """How the attempt ended and what follows, as the last that its log shows of it."""
        attempt, logger = self._run.record.content.attempts[-1], get_run_logger()
        if attempt.failure is None:
            said = self._run.verdict.message
            logger.info("attempt %d %s: %s", attempt.number, attempt.state.value, said)
        else:
            logger.error("%s", format_failure(self._run.place, attempt, attempt.failure))
