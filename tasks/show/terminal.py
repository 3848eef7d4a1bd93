"""Show a run on the terminal: its events, components, progress and result.

Showing never delays the run. Callers put lines into a buffer, and a separate thread writes them. If
this thread blocks, for example because the terminal is stopped, the buffer drops its oldest lines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import plotext  # type: ignore[import-untyped]
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.record.events import Event, event_listeners
from tasks.show.lines import end_block, format_failed_attempt, lines_of
from tasks.show.output import line_of, one_line
from tasks.show.pictures import NAMES, Figures, Point
from tasks.show.screen import ForeignLines, Screen
from tasks.show.view import Pace, Row, RunSeen, Standing
from tasks.spec.formatting import format_duration
from tasks.spec.run import RunSpec

_log = logging.getLogger(__name__)

#: The region is redrawn at least this often, because it shows ages that grow.
_REDRAW_AFTER_S = 1.0
#: Shortest time between two frames.
_FRAME_S = 0.05
#: Largest number of lines in the buffer.
_MAX_BUFFERED_LINES = 10_000
#: At the end, the thread gets this long to write the last lines. After that it is abandoned.
_CLOSE_WITHIN_S = 30.0
#: Largest and smallest width of a curve, in columns. A narrower terminal shows no curve.
_CURVE_COLUMNS = 72
_MIN_CURVE_COLUMNS = 30
#: Height of a curve, in lines.
_CURVE_LINES = 14
#: A plain output shows the step this many times per training.
_PROGRESS_LINES = 20


class Terminal:
    """Shows the events of a run while the `with` block is open.

    Events become plain lines. On a terminal, a live region below the lines shows the components and
    the progress.
    """

    def __init__(self, spec: RunSpec, screen: Screen | None = None) -> None:
        """
        Args:
            screen: Where to show the run. Default: standard output.
        """
        self._screen = screen or Screen.of_stdout()
        self._began = time.monotonic()
        self._seen = RunSeen(spec)
        #: Step of the last progress line.
        self._shown_step = 0.0
        #: Protects the three fields `_seen`, `_lines` and `_dropped_count`.
        self._lock = threading.Lock()
        #: Lines that are not yet written.
        self._lines: deque[Text] = deque()
        #: Number of lines that were dropped since the last write.
        self._dropped_count = 0
        #: Set if there is something to draw.
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
        """Show a line, after the seconds since the beginning. Returns at once."""
        self._add_stamped(line_of(text, style))

    def show(self, event: Event) -> None:
        """Show an event of the run. Returns at once."""
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
        """The run.json of the run that is shown; None before the run has begun."""
        return self._seen.record

    def end(self, state: str, message: str, page: str = "") -> None:
        """Show how the run ended, see `end_block`. This must be the last call."""
        if state == "completed":
            self._show_curve()
        for line in end_block(state, message, self._seen.record, page):
            self._add(line)

    def _show_curve(self) -> None:
        if self._seen.directory is None:
            return
        path = self._seen.directory / "metrics.jsonl"
        figures = _read_figures(path, "reward") or _read_figures(path, *NAMES)
        if figures is None or len(figures.points) < 2:
            return

        points = figures.points
        name = figures.name
        columns = min(_CURVE_COLUMNS, self._screen.size().columns - 1)
        if columns >= _MIN_CURVE_COLUMNS:
            for line in _plot_curve(points, f"{name} by step", columns).splitlines():
                self._add(line_of(line.rstrip()))
        first = points[0][1]
        last = points[-1][1]
        self.say(f"{name}: first {first:.3f}, last {last:.3f}")
        self.say(f"metrics in {figures.path}")

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
            # Read before drawing: lines that were added before the end must be in the last frame.
            is_last = self._is_closing
            try:
                self._draw_frame(is_last)
            except Exception:
                self._screen.is_live = False
                _log.exception(
                    "Drawing the live display failed. The run is shown as plain lines from now on."
                )
            if self._screen.is_live and not is_last:
                time.sleep(_FRAME_S)

    def _draw_frame(self, is_last: bool) -> None:
        """Write the buffered lines and redraw the region. The last frame has no region."""
        with self._lock:
            lines = list(self._lines)
            self._lines.clear()
            dropped_count = self._dropped_count
            self._dropped_count = 0
            is_live = self._screen.is_live and not is_last
            seen = self._seen.snapshot() if is_live else None
        if dropped_count:
            note = f"({dropped_count} lines were dropped, because the terminal was too slow)"
            lines.insert(0, line_of(note, "dim"))
        self._screen.show(lines, build_region(seen, time.time()) if seen is not None else None)


def _read_figures(path: Path, *names: str) -> Figures | None:
    """Return all values of the first of these metrics that the file contains, or None."""
    figures = Figures(path, "step", names)
    while figures.look():
        pass
    return figures if figures.points else None


def _plot_curve(points: Sequence[Point], title: str, columns: int) -> str:
    """Return the curve as lines of Unicode characters without colours.

    Args:
        points: At least two points.
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
#: Largest number of components in the region, so that drawing a frame takes little time.
_MAX_ROWS = 50


def build_region(seen: RunSeen, now: float) -> Group:
    """Return the live region, or an empty group if the run has not begun.

    Args:
        now: UTC epoch seconds.
    """
    if not seen.has_begun:
        return Group()
    parts: list[RenderableType] = [_build_component_table(seen, now)]
    if seen.why:
        activity = "waiting" if seen.is_waiting else "stopping"
        parts.append(Text(f"{activity}: {one_line(seen.why)}", style="yellow"))
    if seen.pace.step is not None and not seen.is_waiting:
        parts.append(_build_progress_line(seen.pace, seen.total, now))
    return Group(*parts)


def _build_component_table(seen: RunSeen, now: float) -> Table:
    """Return the table of components in start order.

    While the run waits for its next attempt, the table shows no state of the previous attempt.
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
    """Return text for a cell that takes one line and is cut if the table is too wide."""
    return Text(one_line(content), style, no_wrap=True, overflow="ellipsis")


def _build_progress_line(pace: Pace, total: float | None, now: float) -> Table:
    """Return the line with the step, a progress bar, the speed and the remaining time."""
    step = pace.step or 0.0
    rate = pace.per_second(now)
    remaining_s = pace.left_s(now)

    estimates = []
    if rate:
        estimates.append(f"{format_duration(1 / rate)}/step")
    if remaining_s:
        estimates.append(f"{format_duration(remaining_s)} left")

    line = Table.grid(padding=(0, 2, 0, 0))
    if total:
        bar = ProgressBar(total=total, completed=step, width=_BAR_COLUMNS)
        line.add_row(f"step {step:g} of {total:g}", bar, f"{step / total:.0%}", *estimates)
    else:
        line.add_row(f"step {step:g}", *estimates)
    return line


def outlive_readers() -> None:
    """Keep this process alive if the reader of its standard output goes away.

    By default, Rich reacts to a broken pipe by raising SystemExit. The standard output of a flow
    process is read by its worker. If the worker were killed, the next log line of Prefect would end
    the run as Crashed.
    """

    def on_broken_pipe(console: Console) -> None:
        console.quiet = True

    setattr(Console, "on_broken_pipe", on_broken_pipe)  # noqa: B010
