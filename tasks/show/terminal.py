"""What a person at a terminal sees of a run: what happens, what runs, how far it is, how it ended.

Nothing of it holds up the run. Whoever has something to show leaves it here and goes on; one thread
writes. Where that is stuck, in a terminal that was stopped for example, the oldest lines are lost.
"""

from __future__ import annotations

import logging
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import plotext  # type: ignore[import-untyped]
from rich.console import Console
from rich.text import Text

from tasks.record.events import Event, event_listeners
from tasks.show.lines import end_block, failed_attempt, lines_of
from tasks.show.pictures import NAMES, Figures, Point
from tasks.show.screen import ForeignLines, Line, Screen, printable
from tasks.show.view import Row, RunSeen, Standing, rate_text
from tasks.spec.run import RunSpec
from tasks.spec.words import stopwatch

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
        self._seen = RunSeen.of(spec)
        self._shown_step = 0.0
        self._lock = threading.Lock()
        self._lines: deque[Line | Text] = deque()
        self._lost = 0
        self._news = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="terminal", daemon=True)
        self._foreign = ForeignLines(lambda text: self._add(Line(text=text)))

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
        self._say(Line(text=text, style=style))

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
                for line in failed_attempt(self._seen):
                    self._say(line)
        self._news.set()

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
        if figures is None:
            return
        points, name = figures.points, figures.name
        if len(points) < 2:
            return
        columns = min(_CURVE_COLUMNS, self._screen.size.columns - 1)
        if columns >= _CURVE_COLUMNS_AT_LEAST:
            for line in _curve(points, f"{name} by step", columns).splitlines():
                self._add(Line(text=line.rstrip()))
        first, last = points[0][1], points[-1][1]
        self.say(f"{name} {first:.3f} at first, {last:.3f} at last")
        self.say(f"figures in {figures.path}")

    def _say(self, line: Line) -> None:
        stamp = f"{time.monotonic() - self._began:7.1f}s "
        self._add(Text.assemble((stamp, "dim"), (printable(line.text), line.style)))

    def _add(self, line: Line | Text) -> None:
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
        now = time.time()
        with self._lock:
            lines, lost = list(self._lines), self._lost
            self._lines.clear()
            self._lost = 0
            is_live = self._screen.is_live and not is_last
            seen = self._seen.snapshot() if is_live else None
        if lost:
            lines.insert(0, Line(text=f"({lost} lines could not be shown in time)", style="dim"))
        region = []
        if seen is not None and (room := self._screen.region_lines):
            region = drawn(seen, columns=self._screen.size.columns, lines=room, now=now)
        self._screen.show(lines, region)


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


#: What is said of a component stands beside it where so many columns are left, else below it.
_NOTE_AT_LEAST = 24
_BAR_AT_LEAST, _BAR_AT_MOST = 8, 40
_STYLES = {
    Standing.WAITING: "dim",
    Standing.STARTING: "yellow",
    Standing.READY: "green",
    Standing.STOPPING: "yellow",
    Standing.ENDED: "dim",
}


def drawn(seen: RunSeen, *, columns: int, lines: int, now: float) -> list[Text]:
    """The region, no line wider and not more of them than there is room; nothing before there is
    anything to be seen.

    Args:
        now: UTC epoch seconds.
    """
    if not seen.has_begun:
        return []
    width = max(1, columns - 1)
    below = [*_message(seen, width), *_progress(seen, width, now)]
    table = list(_table(rows_of(seen), width, now))
    room = max(1, lines - len(below))
    if len(table) > room:
        hidden = len(table) - room + 1
        table = [*table[: room - 1], Text(f"  and {hidden} lines more", style="dim")]
    text = [*table, *below][:lines]
    for line in text:
        line.truncate(width, overflow="ellipsis")
    return text


def rows_of(seen: RunSeen) -> tuple[Row, ...]:
    """In the order of their start. While a run waits, nothing of an earlier attempt is left."""
    is_left = not seen.is_waiting
    return tuple(row if is_left else Row(name=name) for name, row in seen.rows.items())


def _table(rows: Sequence[Row], width: int, now: float) -> Iterator[Text]:
    names = max([len("component"), *(len(row.name) for row in rows)])
    # Of a long name in a narrow terminal some is given up for the state behind it.
    names = min(names, max(len("component"), width - len("  stopping  ")))
    pids = max([len("pid"), *(len(str(row.pid)) for row in rows if row.pid)])
    head = f"{'component':<{names}}  {'state':<8}  {'pid':>{pids}}  {'age':>7}"
    yield Text(head, style="dim")
    for row in rows:
        line = Text(f"{row.name[:names]:<{names}}  ")
        line.append(f"{row.stage.value:<8}", style=_STYLES[row.stage])
        line.append(f"  {row.pid or '':>{pids}}  {_age(row, now):>7}")
        note = " ".join(printable(row.note).split())
        if note and width - len(head) - 2 >= min(_NOTE_AT_LEAST, len(note)):
            line.append(f"  {note}", style="dim")
            yield line
        else:
            yield line
            if note:
                yield Text(f"  {note}", style="dim")


def _age(row: Row, now: float) -> str:
    """How long it has been there, or was."""
    if row.began_at is None:
        return ""
    return stopwatch((now if row.ended_at is None else row.ended_at) - row.began_at)


def _message(seen: RunSeen, width: int) -> Iterator[Text]:
    """Why it waits, over as many lines as that needs, up to a few."""
    does = "waiting" if seen.is_waiting else "stopping"
    text = " ".join(printable(f"{does}: {seen.why}" if seen.why else "").split())
    lines = textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    for line in lines[:4]:
        yield Text(line, style="yellow")


def _progress(seen: RunSeen, width: int, now: float) -> Iterator[Text]:
    step, total = seen.pace.step, seen.total
    if step is None or seen.is_waiting:
        return
    left = f"step {step:g}"
    parts = []
    share = None
    if total:
        share = min(1.0, max(0.0, step / total))
        left += f" of {total:g}"
        parts.append(f"{100 * share:.0f} %")
    if (per_second := seen.pace.per_second(now)) is not None:
        parts.append(rate_text(per_second))
    if (left_s := seen.pace.left_s(now)) is not None and (share is None or share < 1):
        parts.append(f"{stopwatch(left_s)} left")
    right = "  ".join(parts)
    line = Text(left)
    bar = min(_BAR_AT_MOST, width - len(left) - len(right) - 4)
    if share is not None and bar >= _BAR_AT_LEAST:
        done = round(share * bar)
        line.append("  ").append("━" * done, style="green")
        line.append("─" * (bar - done), style="dim")
    line.append(f"  {right}" if right else "")
    yield line


def outlive_readers() -> None:
    """Go on when nobody reads any more what this process prints.

    Rich ends the thread then, by SystemExit. The reader of a flow process is its worker, which may
    be killed, and then the first line that Prefect logs would end the run as Crashed.
    """

    def on_broken_pipe(console: Console) -> None:
        console.quiet = True

    setattr(Console, "on_broken_pipe", on_broken_pipe)  # noqa: B010
