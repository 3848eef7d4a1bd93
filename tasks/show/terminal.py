"""Show a run on the terminal: its events, components, progress and result.

The output never delays the run. Callers put lines into a buffer, and a separate thread writes them.
If this thread blocks, for example because the user pressed Ctrl-S, the oldest lines in the buffer
are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import plotext  # type: ignore[import-untyped]
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.record.checkpoints import read_attempt_spec
from tasks.record.events import Event, event_listeners
from tasks.record.metrics_of_run import find_metrics_file
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.record.states import RunState
from tasks.show.lines import end_block, format_failed_attempt, lines_of
from tasks.show.output import line_of, one_line
from tasks.show.pictures import (
    Figures,
    Point,
    collect_points,
    list_curve_metrics,
    number_text,
)
from tasks.show.run_view import ObservedRun, Row, Standing
from tasks.show.screen import ForeignLines, Screen
from tasks.spec.formatting import format_duration
from tasks.spec.run import RunSpec

_log = logging.getLogger(__name__)

#: Longest time in seconds between two updates of the status area at the bottom of the terminal. The
#: ages of components in the status area change even without an event.
_REDRAW_AFTER_S = 1.0
#: Shortest time in seconds between two updates of the status area at the bottom of the terminal.
_FRAME_S = 0.05
#: Largest number of lines that wait to be written to the terminal. If more lines wait, the oldest
#: lines are dropped.
_MAX_BUFFERED_LINES = 10_000
#: Longest time, in seconds, that is spent on writing the last lines at the end of the run.
_CLOSE_WITHIN_S = 30.0
#: Largest and smallest width of the metric curve, in columns. A narrower terminal shows no curve.
_CURVE_COLUMNS = 72
_MIN_CURVE_COLUMNS = 30
#: Height of the metric curve, in lines.
_CURVE_LINES = 14
#: Approximate number of lines such as `step 12 of 60` that a run prints if the output is not a
#: terminal.
_PROGRESS_LINES = 20


class Terminal:
    """Shows the events of a run while the `with` block is open.

    Events become plain lines. On a terminal, a status area below the lines shows the components and
    the progress, and is redrawn at each change.
    """

    def __init__(self, spec: RunSpec, screen: Screen | None = None) -> None:
        """
        Args:
            spec: Spec of the run that is shown.
            screen: Screen to which the run is written. None means standard output.
        """
        self._screen = screen or Screen.of_stdout()
        self._began = time.monotonic()
        self._seen = ObservedRun(spec)
        #: Last training step that was printed as a line.
        self._shown_step = 0.0
        #: Protects the attributes `_seen`, `_lines` and `_dropped_count`.
        self._lock = threading.Lock()
        #: Lines that wait to be written to the terminal.
        self._lines: deque[Text] = deque()
        #: Number of lines that were dropped since the last write to the terminal.
        self._dropped_count = 0
        #: Set if there are new lines, or if the status area must be redrawn.
        self._has_changes = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._draw_until_closed, name="terminal", daemon=True
        )
        self._foreign = ForeignLines(lambda text: self._add(line_of(text)))

    def __enter__(self) -> Terminal:
        self._token = event_listeners.set((*event_listeners.get(), self.show))
        self._thread.start()
        if self._screen.is_live:
            self._foreign.take_over()
        return self

    def __exit__(self, *_: object) -> None:
        self._foreign.give_back()
        event_listeners.reset(self._token)
        self._is_closing = True
        self._has_changes.set()
        self._thread.join(_CLOSE_WITHIN_S)

    def say(self, text: str, style: str = "") -> None:
        """Show a line. The line begins with the number of seconds since the creation of this
        object.

        The method does not wait until the line is written.
        """
        self._add_stamped(line_of(text, style))

    def show(self, event: Event) -> None:
        """Show an event of the run. The method does not wait until the text is written."""
        with self._lock:
            self._seen.observe(event)
        for line in lines_of(event):
            self._add_stamped(line)
        match event.name:
            case "attempt.begun" | "attempt.adopted":
                self._shown_step = 0.0
            case "run.progress" if not self._screen.is_live:
                step = event.step
                total = self._seen.total
                min_distance = (total or 100) / _PROGRESS_LINES
                if step - self._shown_step >= min_distance or step == total:
                    self._shown_step = step
                    self.say(f"step {step:g} of {total}" if total else f"step {step:g}")
            case "attempt.decided" if not event.text.startswith("final"):
                for line in format_failed_attempt(self._seen, event.text):
                    self._add_stamped(line)
        self._has_changes.set()

    @property
    def record(self) -> Path | None:
        """Path of the run's `run.json`, or None before the run has begun."""
        return self._seen.record

    def end(self, state: str, message: str, page: str = "") -> None:
        """Show how the run ended. No other method may be called after this one.

        Args:
            state: Final state of the run: `completed`, `failed`, `cancelled` or `crashed`.
            message: Message of the flow run's state.
            page: Address of the flow run's page in the Prefect UI, or an empty string.
        """
        if state == "completed":
            self._show_curve()
        for line in end_block(state, message, self._seen.record, page):
            self._add(line)

    def _show_curve(self) -> None:
        """Show the curve of the reward or of the loss, over all attempts of the run."""
        if self._seen.directory is None:
            return
        place = RunPlace(directory=self._seen.directory.parent)
        attempts = _read_attempts(place, self._seen.attempt)
        spec = read_attempt_spec(place, self._seen.attempt)
        names = list_curve_metrics(spec.get("workload"))
        points_by_name = collect_points(place, attempts, names)
        name = next((name for name in names if len(points_by_name.get(name, {})) > 1), None)
        if name is None:
            return

        points = sorted(points_by_name[name].items())
        columns = min(_CURVE_COLUMNS, self._screen.size().columns - 1)
        if columns >= _MIN_CURVE_COLUMNS:
            for line in _plot_curve(points, f"{name} by step", columns).splitlines():
                self._add(line_of(line.rstrip()))
        first = points[0][1]
        last = points[-1][1]
        path, step_key = find_metrics_file(spec, place.attempt(self._seen.attempt))
        figures = Figures(path, step_key, [name])
        while figures.read_new():
            pass
        values = f"{name}: first {first:.3f}, last {last:.3f}"
        if not_finite := figures.describe_not_finite():
            values += f" at step {number_text(points[-1][0])}, {not_finite}"
        self.say(values)
        self.say(f"metrics in {path}")

    def _add_stamped(self, line: Text) -> None:
        stamp = f"{time.monotonic() - self._began:7.1f}s "
        self._add(Text.assemble((stamp, "dim"), line))

    def _add(self, line: Text) -> None:
        with self._lock:
            if len(self._lines) == _MAX_BUFFERED_LINES:
                self._lines.popleft()
                self._dropped_count += 1
            self._lines.append(line)
        self._has_changes.set()

    def _draw_until_closed(self) -> None:
        is_last = False
        while not is_last:
            self._has_changes.wait(_REDRAW_AFTER_S if self._screen.is_live else None)
            self._has_changes.clear()
            # Read `_is_closing` before drawing. If another thread adds a last line and then sets
            # `_is_closing` during the drawing, the loop runs again and draws this line.
            is_last = self._is_closing
            try:
                self._draw_frame(is_last)
            except Exception:
                self._screen.is_live = False
                _log.exception(
                    "Muster could not draw the live display. From now on, it shows the run as "
                    "plain lines."
                )
            if self._screen.is_live and not is_last:
                time.sleep(_FRAME_S)

    def _draw_frame(self, is_last: bool) -> None:
        """Write the buffered lines, and redraw the status area at the bottom of the terminal.

        Args:
            is_last: If True, the status area is removed, because the run has ended.
        """
        with self._lock:
            lines = list(self._lines)
            self._lines.clear()
            dropped_count = self._dropped_count
            self._dropped_count = 0
            is_live = self._screen.is_live and not is_last
            seen = self._seen.snapshot() if is_live else None
        if dropped_count:
            note = f"({dropped_count} lines are missing here, because the terminal was too slow)"
            lines.insert(0, line_of(note, "dim"))
        self._screen.show(lines, build_region(seen, time.time()) if seen is not None else None)


def _read_attempts(place: RunPlace, count: int) -> Sequence[AttemptRecord]:
    """Return the records of a run's attempts, or empty records if `run.json` cannot be read.

    Args:
        place: Directory of the run.
        count: Number of attempts.
    """
    with suppress(OSError, ValueError):
        return RunJson.read(place.record).attempts
    return [AttemptRecord(number=n, state=RunState.COMPLETED) for n in range(1, count + 1)]


def _plot_curve(points: Sequence[Point], title: str, columns: int) -> str:
    """Return a curve as a text of Unicode characters, without colours.

    Args:
        points: At least two points.
        title: Text above the curve.
        columns: Width of the text in columns.
    """
    plotext.clear_figure()
    plotext.plotsize(columns, _CURVE_LINES)
    plotext.title(title)
    plotext.plot([x for x, _ in points], [y for _, y in points], marker="braille")
    return str(plotext.uncolorize(plotext.build()))


_STYLES = {
    Standing.WAITING: "dim",
    Standing.STARTING: "yellow",
    Standing.READY: "green",
    Standing.STOPPING: "yellow",
    Standing.ENDED: "dim",
}
_BAR_COLUMNS = 40
#: Largest number of components that the status area shows. More components would make drawing slow.
_MAX_ROWS = 50


def build_region(seen: ObservedRun, now: float) -> Group:
    """Return the content of the status area at the bottom of the terminal.

    The content is the table of components, the progress, and the reason why the run waits. Before
    the begin of the run, the content is empty.

    Args:
        seen: State of the run.
        now: Current time in UTC epoch seconds.
    """
    if not seen.has_begun:
        return Group()
    parts: list[RenderableType] = [_build_component_table(seen, now)]
    if seen.why:
        activity = "waiting" if seen.is_waiting else "stopping"
        parts.append(Text(f"{activity}: {one_line(seen.why)}", style="yellow"))
    if seen.pace.step is not None and not seen.is_waiting:
        parts.append(_build_progress_line(seen, now))
    return Group(*parts)


def _build_component_table(seen: ObservedRun, now: float) -> Table:
    """Return the table of the components, in the order in which they are started.

    While the run waits for its next attempt, all components are shown as waiting.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("component")
    table.add_column("state", min_width=8, no_wrap=True)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("")
    rows = [*seen.rows.values()]
    for row in rows[:_MAX_ROWS]:
        shown_row = Row(name=row.name) if seen.is_waiting else row
        if shown_row.began_at is None:
            age = ""
        else:
            age = format_duration((shown_row.ended_at or now) - shown_row.began_at)
        table.add_row(
            _cut_text(shown_row.name),
            Text(shown_row.stage.value, _STYLES[shown_row.stage]),
            str(shown_row.pid or ""),
            age,
            _cut_text(shown_row.note, "dim"),
        )
    omitted_count = len(rows) - _MAX_ROWS
    if omitted_count > 0:
        table.add_row(f"and {omitted_count} more")
    return table


def _cut_text(content: str, style: str = "") -> Text:
    """Return a text for a table cell. If the table is too wide, the text is cut and not wrapped."""
    return Text(one_line(content), style, no_wrap=True, overflow="ellipsis")


def _build_progress_line(seen: ObservedRun, now: float) -> Table:
    """Return the line with the step, a progress bar, the speed and the remaining time.

    After the last step of the training, the line says that the training is finishing.
    """
    total = seen.total
    step = seen.pace.step or 0.0
    rate = seen.pace.per_second(now)
    remaining_s = seen.pace.remaining_s(now)

    estimates = []
    if rate:
        estimates.append(f"{format_duration(1 / rate)}/step")
    if remaining_s:
        estimates.append(f"{format_duration(remaining_s)} left")
    if seen.is_at_last_step and not seen.is_stopping:
        estimates.append("last step, finishing")

    line = Table.grid(padding=(0, 2, 0, 0))
    if total:
        bar = ProgressBar(total=total, completed=step, width=_BAR_COLUMNS)
        line.add_row(f"step {step:g} of {total:g}", bar, f"{step / total:.0%}", *estimates)
    else:
        line.add_row(f"step {step:g}", *estimates)
    return line


def outlive_readers() -> None:
    """Let this process continue after the reader of the process's standard output has ended.

    The standard output of a flow process is a pipe to its worker. If the worker is killed, the next
    log line would make Rich raise SystemExit, and the run would end as Crashed.
    """

    def on_broken_pipe(console: Console) -> None:
        console.quiet = True

    setattr(Console, "on_broken_pipe", on_broken_pipe)  # noqa: B010
