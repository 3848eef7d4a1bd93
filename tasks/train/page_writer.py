"""Keep the artifacts of a run in the Prefect UI up to date.

Most events of a run change some of its artifacts. An artifact is not updated before a minimum
interval has passed since its last update. These intervals grow with the age of the run, so that a
long run does not burden the server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun

from tasks.processes.identity import host_name
from tasks.processes.place_reader import PlaceReader, PlaceTimeout
from tasks.record.events import Event
from tasks.record.metrics_of_run import find_metrics_file
from tasks.record.places import AttemptPlace
from tasks.server.artifacts import Artifacts
from tasks.show import page as pages
from tasks.show.evaluations import show_evaluations
from tasks.show.pictures import Figures, collect_points, list_curve_metrics, show_timeline
from tasks.show.run_view import ObservedRun, RunView, Shown
from tasks.show.slow import TimeSpent
from tasks.train.session import RunSession

#: Mapping from the key of each artifact to two values: the minimum interval in seconds between two
#: updates, and the function that returns the content. The function is None for the artifact
#: `reward`, whose curve is drawn by `RunPage`. If the training has no reward, this artifact shows
#: the loss, and its key is `loss`.
_ARTIFACTS: Mapping[str, tuple[float, Callable[[RunView], Shown | None] | None]] = {
    pages.SUMMARY: (2.0, pages.show_summary),
    pages.COMPONENTS: (5.0, pages.show_components),
    pages.TIMELINE: (10.0, show_timeline),
    pages.REWARD: (10.0, None),
    pages.TIME: (10.0, pages.show_time),
    pages.EVALUATIONS: (
        5.0,
        lambda view: show_evaluations(view.place, view.spec.keep_best, view.at),
    ),
    pages.PROGRESS: (3.0, pages.show_progress),
    pages.ATTEMPTS: (0.0, pages.show_attempts),
    pages.RECORD: (10.0, pages.show_record),
}
#: Minimum interval between two updates of an artifact, as a fraction of the age of the run. So
#: artifacts of a long run are updated less often.
_INTERVAL_PER_AGE = 0.01
#: Upper limit, in seconds, for the minimum interval that is calculated with `_INTERVAL_PER_AGE`.
_MAX_INTERVAL_S = 60.0
#: Artifacts that contain durations. These artifacts are updated even if no event occurs.
_TIMED_ARTIFACTS = (pages.SUMMARY, pages.TIMELINE, pages.REWARD)
#: Minimum number of seconds between two updates of an artifact while no event occurs.
_TIMED_INTERVAL_S = 30.0
#: Factor for the interval between two updates of an artifact while no event occurs. The interval is
#: this factor times the result of `RunPage._interval_s`, but at least `_TIMED_INTERVAL_S`.
_TIMED_INTERVAL_FACTOR = 10
#: Longest wait in seconds for reading the metrics file, because the file system may not respond.
_READ_METRICS_WITHIN_S = 5.0
#: Seconds to wait before the next update after the server has rejected an artifact.
_PAUSE_S = 5.0
#: Largest number of seconds that `due_in_s` returns.
_MAX_WAIT_S = 3600.0
#: Seconds before the first update. The delay lets one update show all events at the start of a run.
_FIRST_UPDATE_AFTER_S = 1.0

#: Mapping from the prefix of an event name to the keys of the artifacts that the event changes. If
#: several prefixes match, the longest is used.
_CHANGED_BY_EVENT: Mapping[str, tuple[str, ...]] = {
    "attempt.": (pages.SUMMARY, pages.COMPONENTS, pages.TIMELINE, pages.ATTEMPTS, pages.RECORD),
    "evaluation.": (pages.EVALUATIONS,),
    "component.": (pages.SUMMARY, pages.COMPONENTS, pages.TIMELINE, pages.RECORD),
    "component.status": (pages.COMPONENTS,),
    "job.": (pages.SUMMARY, pages.COMPONENTS, pages.RECORD),
    "rollout.group.": (pages.COMPONENTS,),
    "rollout.server.": (pages.COMPONENTS,),
    "place.": (pages.SUMMARY, pages.RECORD),
    "run.alarm": (pages.SUMMARY, pages.RECORD),
    "run.warning": (pages.SUMMARY, pages.RECORD),
    "rollout.load": (pages.TIME,),
    "run.load": (pages.TIME,),
    "run.progress": (pages.PROGRESS, pages.TIME, pages.REWARD),
    "run.state": (pages.SUMMARY, pages.RECORD),
}


class RunPage:
    """The artifacts of one run, with the time at which each artifact must be updated.

    `observe` may be called from any thread and returns at once. `send` sends requests to the
    Prefect server, and must be called from one thread only.
    """

    def __init__(
        self, run: RunSession, flow_run: FlowRun, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            run: The run.
            flow_run: The flow run that owns the artifacts.
            clock: Function that returns the current time in seconds.
        """
        self._run = run
        self._clock = clock
        # Artifacts may exist already if the flow run had an earlier process. Search for them only
        # in this case, to save requests to the server.
        existing_keys = (*_ARTIFACTS, pages.LOSS) if flow_run.run_count > 1 else ()
        self._artifacts = Artifacts(flow_run.id, existing_keys, run.mask)
        #: Lock for the attributes that events change.
        self._lock = threading.Lock()
        self._began_s = clock()
        #: Mapping from the key of each artifact to the time of its next update, in seconds of
        #: `clock`.
        self._due_at_s: dict[str, float] = {}
        #: Mapping from the key of each artifact to the time of its last update, in seconds of
        #: `clock`.
        self._sent_at_s: dict[str, float] = {}
        #: Earliest time at which artifacts may be sent, in seconds of `clock`.
        self._not_before_s = self._began_s + _FIRST_UPDATE_AFTER_S
        self._seen = ObservedRun(run.resolved_spec)
        #: Metrics of the current attempt. None before the first attempt.
        self._figures: Figures | None = None
        self._metrics_reader = PlaceReader("the metrics")
        progress = run.resolved_spec.progress
        self._time_spent = TimeSpent(*([progress.every_s] if progress is not None else []))

    def observe(self, event: Event) -> bool:
        """Process an event of the run.

        Return True if the event has changed the time of the next update of an artifact.
        """
        with self._lock:
            previous_due = {**self._due_at_s}
            previous_activity = self._seen.doing
            previous_rows = {**self._seen.rows}

            self._seen.observe(event)
            self._time_spent.observe(event)
            if event.name in ("attempt.begun", "attempt.adopted"):
                self._figures = None

            if self._seen.doing != previous_activity:
                self._schedule(pages.SUMMARY)
            rows = self._seen.rows
            if any(row.unready != previous_rows[name].unready for name, row in rows.items()):
                self._schedule(pages.COMPONENTS)
            beginnings = filter(event.name.startswith, _CHANGED_BY_EVENT)
            longest_beginning = max(beginnings, key=len, default="")
            self._schedule(*_CHANGED_BY_EVENT.get(longest_beginning, ()))
            return self._due_at_s != previous_due

    @property
    def activity(self) -> str:
        """Current activity of the run, such as `starting trainer`."""
        return self._seen.doing

    def remaining_s(self, now: float) -> float | None:
        """Return the estimated seconds until the last step, or None if unknown.

        Args:
            now: Present time in UTC epoch seconds.
        """
        with self._lock:
            return self._seen.pace.remaining_s(now)

    def _schedule(self, *keys: str) -> None:
        """Schedule an update of each artifact at the earliest time that its interval allows."""
        for key in keys:
            interval_s = max(_ARTIFACTS[key][0], self._interval_s())
            sent_at_s = self._sent_at_s.get(key)
            due_s = self._clock() if sent_at_s is None else sent_at_s + interval_s
            self._due_at_s[key] = min(due_s, self._due_at_s.get(key, due_s))

    def _interval_s(self) -> float:
        """Return the minimum interval between two updates at the current age of the run."""
        age_s = self._clock() - self._began_s
        return min(age_s * _INTERVAL_PER_AGE, _MAX_INTERVAL_S)

    def due_in_s(self) -> float:
        """Return the number of seconds after which an artifact may have to be updated."""
        with self._lock:
            due_s = min(self._due_at_s.values(), default=float("inf"))
            wait_s = max(due_s, self._not_before_s) - self._clock()
            return min(_MAX_WAIT_S, max(0.0, wait_s))

    def send(self, *, is_last: bool = False, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Send to the server all artifacts that must be updated now.

        Args:
            is_last: True at the end of the run. All artifacts that may have changed are sent.
            is_enough: Function that is called before each artifact. If the function returns True,
                the remaining artifacts are sent by the next call of `send`.

        Raises:
            Exception: The error of Prefect's client. To send the remaining artifacts, call `send`
                again after the number of seconds that `due_in_s` returns.
        """
        now_s = self._clock()
        with self._lock:
            if is_last:
                # Send every artifact that may have changed since the last update. The content of an
                # artifact can change even without an event.
                always = (pages.SUMMARY, pages.REWARD, pages.EVALUATIONS)
                keys = (*always, *self._sent_at_s, *self._due_at_s)
                self._due_at_s = dict.fromkeys(keys, now_s)
            due = [key for key in _ARTIFACTS if self._due_at_s.get(key, float("inf")) <= now_s]
            for key in due:
                del self._due_at_s[key]
        if not due:
            return

        remaining = list(due)
        try:
            view = self._make_view()
            contents = [(key, self._make_content(key, view)) for key in due]
            with ExitStack() as stack:
                client = None
                for key, content in contents:
                    if is_enough():
                        break
                    if content is not None:
                        client = client or stack.enter_context(get_client(sync_client=True))
                        self._artifacts.show(client, self._find_artifact_key(key), content)
                    remaining.remove(key)
                    self._note_sent(key)
        except Exception:
            self._not_before_s = self._clock() + _PAUSE_S
            raise
        finally:
            with self._lock:
                self._due_at_s |= dict.fromkeys(remaining, now_s)

    def _note_sent(self, key: str) -> None:
        """Store the time at which an artifact was sent, and schedule its next regular update."""
        sent_at_s = self._clock()
        self._sent_at_s[key] = sent_at_s
        if key in _TIMED_ARTIFACTS:
            interval_s = max(_TIMED_INTERVAL_S, _TIMED_INTERVAL_FACTOR * self._interval_s())
            with self._lock:
                self._due_at_s.setdefault(key, sent_at_s + interval_s)

    def _find_artifact_key(self, key: str) -> str:
        """Return the key that an artifact has on the server.

        If the training has no reward, the artifact `reward` shows the loss and has the key `loss`.
        """
        is_loss = self._figures is not None and self._figures.is_loss
        return pages.LOSS if key == pages.REWARD and is_loss else key

    def _make_content(self, key: str, view: RunView) -> Shown | None:
        """Return the content of an artifact, or None if there is nothing to show yet."""
        make = _ARTIFACTS[key][1]
        return make(view) if make is not None else self._make_reward_curve(view)

    def _make_reward_curve(self, view: RunView) -> Shown | None:
        """Return the curve of the reward, or None if the metrics contain no reward yet."""
        figures = self._figures
        return pages.show_curve(view, figures) if figures and figures.points else None

    def _make_view(self) -> RunView:
        """Return a snapshot of the run, from which the content of all artifacts is created."""
        run = self._run
        record = run.record.content
        if run.attempt is not None:
            # If reading the metrics file takes too long, the page in the Prefect UI shows the last
            # known metrics.
            with suppress(PlaceTimeout):
                self._metrics_reader.ask_blocking(
                    partial(self._read_metrics, run.attempt), _READ_METRICS_WITHIN_S
                )
        with self._lock:
            return RunView(
                at=time.time(),
                spec=run.resolved_spec,
                record=record,
                place=run.place,
                host=host_name(),
                message=run.verdict.message if record.state.is_final else "",
                seen=self._seen.snapshot(),
                slow=self._time_spent.slow,
            )

    def _read_metrics(self, attempt: AttemptPlace) -> None:
        """Read the new metrics of an attempt.

        This method runs in a separate thread, because the file system may not respond.
        """
        figures = self._figures or self._open_metrics(attempt)
        figures.read_new()
        if attempt is self._run.attempt:
            self._figures = figures

    def _open_metrics(self, attempt: AttemptPlace) -> Figures:
        """Return a reader of the attempt's metrics file.

        The values of earlier attempts are already in the returned object.
        """
        path, step_key = find_metrics_file(self._run.resolved_spec.written(), attempt)
        attempts = self._run.record.content.attempts
        earlier_attempts = [record for record in attempts if record.number < attempt.number]
        names = list_curve_metrics(self._run.resolved_spec.workload)
        earlier = collect_points(self._run.place, earlier_attempts, names)
        return Figures(path, step_key, names, take=self._time_spent.take, earlier=earlier)
