"""What a person at a terminal sees of a run: what happens, what runs, how far it is, how it ended.

Nothing of it holds up the run. Whoever has something to show leaves it here and goes on; one thread
writes. Where that is stuck, in a terminal that was stopped for example, the oldest lines are lost.
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
from tasks.show.lines import end_block, failed_attempt, lines_of
from tasks.show.output import line_of, one_line
from tasks.show.pictures import NAMES, Figures, Point
from tasks.show.screen import ForeignLines, Screen
from tasks.show.view import Pace, Row, RunSeen, Standing
from tasks.spec.formatting import format_duration
from tasks.spec.run import RunSpec

_log = logging.getLogger(__name__)

#: Ages grow; what happens is drawn at once, and no more often than that.
_AGAIN_AFTER_S = 1.0
_FRAME_S = 0.05
#: Kept for a screen that takes none.
_LINES_AT_MOST = 10_000
#: At the end a screen that takes nothing for so long is left behind.
_CLOSE_WITHIN_S = 30.0
_CURVE_COLUMNS, _CURVE_COLUMNS_AT_LEAST, _CURVE_LINES = 72, 30, 14


class Terminal:
    """Shows the events of the runs of this context, as they happen.

    Plain lines; on a terminal also a live region under them, while the context is open.
    """

    def __init__(self, spec: RunSpec, screen: Screen | None = None) -> None:
        self._screen = screen or Screen.of_stdout()
        self._began = time.monotonic()
        self._seen = RunSeen(spec)
        self._shown_step = 0.0
        self._lock = threading.Lock()
        self._lines: deque[Text] = deque()
        self._lost = 0
        self._news = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="terminal", daemon=True)
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
        self._news.set()
        self._thread.join(_CLOSE_WITHIN_S)

    def say(self, text: str, style: str = "") -> None:
        """One line, with the seconds since the beginning. Returns at once."""
        self._say(line_of(text, style))

    def show(self, event: Event) -> None:
        """One event of the run. Returns at once."""
        with self._lock:
            self._seen.observe(event)
        for line in lines_of(event):
            self._say(line)
        match event.name:
            case "attempt.begun" | "attempt.adopted":
                self._shown_step = 0.0
            case "run.progress" if not self._screen.is_live:
                step, total = event.step, self._seen.total
                # A line for each twentieth is enough.
                if step - self._shown_step >= (total or 100) / 20 or step == total:
                    self._shown_step = step
                    self.say(f"step {step:g} of {total}" if total else f"step {step:g}")
            case "attempt.decided" if not event.text.startswith("final"):
                for line in failed_attempt(self._seen, event.text):
                    self._say(line)
        self._news.set()

    @property
    def record(self) -> Path | None:
        """The run.json of the run that is shown; None before the run has begun."""
        return self._seen.record

    def end(self, state: str, message: str, page: str = "") -> None:
        """How the run ended (see `end_block`): the last thing to be shown."""
        if state == "completed":
            self._show_curve()
        for line in end_block(state, message, self._seen.record, page):
            self._add(line)

    def _show_curve(self) -> None:
        if self._seen.directory is None:
            return
        path = self._seen.directory / "metrics.jsonl"
        figures = _all_of(path, "reward") or _all_of(path, *NAMES)
        if figures is None or len(figures.points) < 2:
            return
        points, name = figures.points, figures.name
        columns = min(_CURVE_COLUMNS, self._screen.size().columns - 1)
        if columns >= _CURVE_COLUMNS_AT_LEAST:
            for line in _curve(points, f"{name} by step", columns).splitlines():
                self._add(line_of(line.rstrip()))
        first, last = points[0][1], points[-1][1]
        self.say(f"{name} {first:.3f} at first, {last:.3f} at last")
        self.say(f"figures in {figures.path}")

    def _say(self, line: Text) -> None:
        stamp = f"{time.monotonic() - self._began:7.1f}s "
        self._add(Text.assemble((stamp, "dim"), line))

    def _add(self, line: Text) -> None:
        with self._lock:
            if len(self._lines) == _LINES_AT_MOST:
                self._lines.popleft()
                self._lost += 1
            self._lines.append(line)
        self._news.set()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._news.wait(_AGAIN_AFTER_S if self._screen.is_live else None)
            self._news.clear()
            # Asked first, so that what was said before the end is shown.
            is_last = self._is_closing
            try:
                self._draw(is_last)
            except Exception:
                self._screen.is_live = False
                _log.exception("the live region can't be drawn: plain lines from here on")
            if self._screen.is_live and not is_last:
                time.sleep(_FRAME_S)

    def _draw(self, is_last: bool) -> None:
        with self._lock:
            lines, lost = list(self._lines), self._lost
            self._lines.clear()
            self._lost = 0
            is_live = self._screen.is_live and not is_last
            seen = self._seen.snapshot() if is_live else None
        if lost:
            lines.insert(0, line_of(f"({lost} lines could not be shown in time)", "dim"))
        self._screen.show(lines, drawn(seen, time.time()) if seen is not None else None)


def _all_of(path: Path, *names: str) -> Figures | None:
    """All figures of the first of the names that a file has; None where it has none."""
    figures = Figures(path, "step", names)
    while figures.look():
        pass
    return figures if figures.points else None


def _curve(points: Sequence[Point], title: str, columns: int) -> str:
    """In Unicode, without colours; at least two points."""
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
#: A frame shall cost little, however many components there are.
_ROWS_AT_MOST = 50


def drawn(seen: RunSeen, now: float) -> Group:
    """The region; empty before there is anything to be seen.

    Args:
        now: UTC epoch seconds.
    """
    if not seen.has_begun:
        return Group()
    parts: list[RenderableType] = [_components(seen, now)]
    if seen.why:
        does = "waiting" if seen.is_waiting else "stopping"
        why = Text(f"{does}: {one_line(seen.why)}", style="yellow")
        parts.append(why)
    if seen.pace.step is not None and not seen.is_waiting:
        parts.append(_progress(seen.pace, seen.total, now))
    return Group(*parts)


def _components(seen: RunSeen, now: float) -> Table:
    """In the order of their start. While a run waits, nothing of an earlier attempt is left."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("component")
    table.add_column("state", min_width=8, no_wrap=True)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("")
    rows = [*seen.rows.values()]
    for row in rows[:_ROWS_AT_MOST]:
        row = Row(name=row.name) if seen.is_waiting else row
        age = "" if row.began_at is None else format_duration((row.ended_at or now) - row.began_at)
        # What is too long gives way to the others, in one line.
        name, note = (
            Text(one_line(said), style, no_wrap=True, overflow="ellipsis")
            for said, style in ((row.name, ""), (row.note, "dim"))
        )
        state = Text(row.stage.value, _STYLES[row.stage])
        table.add_row(name, state, str(row.pid or ""), age, note)
    if more := rows[_ROWS_AT_MOST:]:
        table.add_row(f"and {len(more)} more")
    return table


def _progress(pace: Pace, total: float | None, now: float) -> Table:
    step, rate, left_s = pace.step or 0.0, pace.per_second(now), pace.left_s(now)
    told = [f"{format_duration(1 / rate)} a step"] if rate else []
    told += [f"{format_duration(left_s)} left"] if left_s else []
    line = Table.grid(padding=(0, 2, 0, 0))
    if total:
        bar = ProgressBar(total=total, completed=step, width=_BAR_COLUMNS)
        line.add_row(f"step {step:g} of {total:g}", bar, f"{step / total:.0%}", *told)
    else:
        line.add_row(f"step {step:g}", *told)
    return line


def outlive_readers() -> None:
    """Go on when nobody reads any more what this process prints.

    Rich ends the thread then, by SystemExit. The reader of a flow process is its worker, which may
    be killed, and then the first line that Prefect logs would end the run as Crashed.
    """

    def on_broken_pipe(console: Console) -> None:
        console.quiet = True

    setattr(Console, "on_broken_pipe", on_broken_pipe)  # noqa: B010
