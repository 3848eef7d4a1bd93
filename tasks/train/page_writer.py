"""The page of a run in the Prefect UI: which of its artifacts is to be told anew, and when.

What changes is told soon, what changes often is told together, and all of it ever more seldom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun

from tasks.processes.identity import host_name
from tasks.record.events import Event
from tasks.server.artifacts import Artifacts
from tasks.show import page as pages
from tasks.show.pictures import Figures, show_timeline
from tasks.show.slow import TimeSpent
from tasks.show.view import RunSeen, RunView, Shown
from tasks.train.session import RunSession

#: `(seconds, how it is made)`: not sooner after the last time than so. The curve is made here.
_MADE: Mapping[str, tuple[float, Callable[[RunView], Shown | None] | None]] = {
    pages.SUMMARY: (2.0, pages.show_summary),
    pages.COMPONENTS: (2.0, pages.show_components),
    pages.TIMELINE: (2.0, show_timeline),
    pages.REWARD: (10.0, None),
    pages.TIME: (10.0, pages.show_time),
    pages.PROGRESS: (3.0, pages.show_progress),
    pages.ATTEMPTS: (0.0, pages.show_attempts),
    pages.RECORD: (10.0, pages.show_record),
}
#: The longer a run lasts, the more seldom: by a part of its age, and at most so many seconds.
_EVERY_PART, _EVERY_AT_MOST_S = 0.01, 60.0
#: What grows with the time is told again, without an event, after so long at least, and as many
#: times as seldom as what changes.
_RENEWED = (pages.SUMMARY, pages.TIMELINE, pages.REWARD)
_RENEWED_S, _RENEWED_TIMES = 30.0, 10
#: A server that did not take an artifact is left alone for so long.
_PAUSE_S = 5.0
_LONGEST_S = 3600.0

#: What an event changes, by the beginning of its name: the longest that fits counts.
_CHANGES: Mapping[str, tuple[str, ...]] = {
    "attempt.": (pages.SUMMARY, pages.COMPONENTS, pages.TIMELINE, pages.ATTEMPTS, pages.RECORD),
    "component.": (pages.SUMMARY, pages.COMPONENTS, pages.TIMELINE, pages.RECORD),
    "component.status": (pages.COMPONENTS,),
    "job.": (pages.SUMMARY, pages.COMPONENTS, pages.RECORD),
    "rollout.group.": (pages.COMPONENTS,),
    "rollout.server.": (pages.COMPONENTS,),
    "run.alarm": (pages.SUMMARY, pages.RECORD),
    "rollout.load": (pages.TIME,),
    "run.load": (pages.TIME,),
    "run.progress": (pages.PROGRESS, pages.TIME, pages.REWARD),
    "run.state": (pages.SUMMARY, pages.RECORD),
}
#: The first page waits so long for what comes together with it.
_TOGETHER_S = 1.0


class RunPage:
    """What the artifacts of one run are to show. `observe` returns at once, from any thread;
    `tell` asks the server, from one thread only."""

    def __init__(
        self, run: RunSession, flow_run: FlowRun, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._clock = clock
        # Only an earlier process of the flow run can have made some.
        keys = _MADE if flow_run.run_count > 1 else ()
        self._artifacts = Artifacts(flow_run.id, keys, run.mask)
        self._lock = threading.Lock()
        self._began_s = clock()
        #: When each artifact is to be told anew, and when it was told last.
        self._due_at_s: dict[str, float] = {}
        self._told_at_s: dict[str, float] = {}
        self._not_before_s = self._began_s + _TOGETHER_S
        self._seen = RunSeen(run.resolved_spec)
        self._figures: Figures | None = None
        self._time = TimeSpent()

    def observe(self, event: Event) -> bool:
        """Take in an event of the run; whether something is to be told sooner by it."""
        with self._lock:
            due, doing, rows = {**self._due_at_s}, self._seen.doing, {**self._seen.rows}
            self._seen.observe(event)
            self._time.observe(event)
            if event.name in ("attempt.begun", "attempt.adopted"):
                self._figures = None
            if self._seen.doing != doing:
                self._change(pages.SUMMARY)
            if any(row.unready != rows[name].unready for name, row in self._seen.rows.items()):
                self._change(pages.COMPONENTS)
            fits = max(filter(event.name.startswith, _CHANGES), key=len, default="")
            self._change(*_CHANGES.get(fits, ()))
            return self._due_at_s != due

    @property
    def doing(self) -> str:
        """What the run does just now, in the words of its state."""
        return self._seen.doing

    def _change(self, *keys: str) -> None:
        """Have these told again, not sooner after the last time than they may be."""
        for key in keys:
            last, every_s = self._told_at_s.get(key), max(_MADE[key][0], self._every_s())
            due = self._clock() if last is None else last + every_s
            self._due_at_s[key] = min(due, self._due_at_s.get(key, due))

    def _every_s(self) -> float:
        """How seldom a run of this age is told of."""
        return min((self._clock() - self._began_s) * _EVERY_PART, _EVERY_AT_MOST_S)

    def due_in_s(self) -> float:
        """Seconds until there may be something to tell."""
        with self._lock:
            due = min(self._due_at_s.values(), default=float("inf"))
            return min(_LONGEST_S, max(0.0, max(due, self._not_before_s) - self._clock()))

    def tell(self, *, is_last: bool = False, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Have the server show what is due, and at the end all that has changed.

        Args:
            is_enough: asked before each artifact, whether the rest is left for later.

        Raises: what the client does; what was not told is due again, after a pause.
        """
        now = self._clock()
        with self._lock:
            if is_last:
                # Some of it is older than the last event.
                last = (pages.SUMMARY, pages.REWARD, *self._told_at_s, *self._due_at_s)
                self._due_at_s = dict.fromkeys(last, now)
            left = [key for key in _MADE if self._due_at_s.get(key, float("inf")) <= now]
            for key in left:
                del self._due_at_s[key]
        if not left:
            return
        try:
            view = self._view()
            found = [(key, (_MADE[key][1] or self._curve)(view)) for key in left]
            with ExitStack() as stack:
                client = None
                for key, shown in found:
                    if is_enough():
                        break
                    if shown is not None:
                        client = client or stack.enter_context(get_client(sync_client=True))
                        self._artifacts.show(client, key, shown)
                    left.remove(key)
                    self._told_at_s[key] = told_at = self._clock()
                    if key in _RENEWED:
                        renewed_s = max(_RENEWED_S, _RENEWED_TIMES * self._every_s())
                        with self._lock:
                            self._due_at_s.setdefault(key, told_at + renewed_s)
        except Exception:
            self._not_before_s = self._clock() + _PAUSE_S
            raise
        finally:
            with self._lock:
                self._due_at_s |= dict.fromkeys(left, now)

    def _view(self) -> RunView:
        run, record = self._run, self._run.record.content
        progress = run.resolved_spec.progress
        if self._figures is None and run.attempt is not None:
            written = progress.jsonl if progress else None
            path = Path(run.resolved_spec.cwd) / (
                written or run.attempt.directory / "metrics.jsonl"
            )
            step = progress.step if progress and written else "step"
            self._figures = Figures(path, step, take=self._time.take)
        if self._figures is not None:
            self._figures.look()
        with self._lock:
            return RunView(
                at=time.time(),
                spec=run.resolved_spec,
                record=record,
                place=run.place,
                host=host_name(),
                message=run.verdict.message if record.state.is_final else "",
                seen=self._seen.snapshot(),
                slow=self._time.slow,
            )

    def _curve(self, view: RunView) -> Shown | None:
        figures = self._figures
        return pages.show_curve(view, figures) if figures and figures.points else None
