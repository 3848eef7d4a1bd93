"""The live region under the lines of a run: its components, its probes, its progress.

A frozen picture of the run at one moment, and rich's text of it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from tasks.show.screen import printable
from tasks.show.view import Pace, Row, RunSeen, Standing, rate_text
from tasks.spec.words import stopwatch

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A run at one moment."""

    #: In the order of their start.
    rows: tuple[Row, ...]
    #: Why it waits, or that it stops; empty while there is nothing to say.
    message: str = ""
    step: float | None = None
    total: float | None = None
    #: Steps; None while nobody can say.
    per_second: float | None = None
    left_s: float | None = None


def picture_of(seen: RunSeen, now: float) -> Picture | None:
    """The run as it is now; None before there is anything to be seen.

    Args:
        now: UTC epoch seconds.
    """
    if not seen.has_begun:
        return None
    if seen.is_waiting:
        # No component of an earlier attempt is left.
        rows, pace = tuple(Row(name=name) for name in seen.names), Pace(seen.total)
    else:
        rows, pace = tuple(seen.rows.values()), seen.pace
    does = "waiting" if seen.is_waiting else "stopping"
    return Picture(
        rows=rows,
        message=f"{does}: {seen.why}" if seen.why else "",
        step=pace.step,
        total=seen.total,
        per_second=pace.per_second(now),
        left_s=pace.left_s(now),
    )


def drawn(
    picture: Picture, *, columns: int, lines: int, now: float, has_unicode: bool = True
) -> list[Text]:
    """The region, no line wider and not more of them than there is room.

    Args:
        now: UTC epoch seconds.
    """
    width = max(1, columns - 1)
    below = [*_message(picture, width), *_progress(picture, width, has_unicode)]
    table = list(_table(picture, width, now))
    room = max(1, lines - len(below))
    if len(table) > room:
        hidden = len(table) - room + 1
        table = [*table[: room - 1], Text(f"  and {hidden} lines more", style="dim")]
    text = [*table, *below][:lines]
    for line in text:
        line.truncate(width, overflow="ellipsis" if has_unicode else "crop")
    return text


def _table(picture: Picture, width: int, now: float) -> Iterator[Text]:
    names = max([len("component"), *(len(row.name) for row in picture.rows)])
    # Of a long name in a narrow terminal some is given up for the state behind it.
    names = min(names, max(len("component"), width - len("  stopping  ")))
    pids = max([len("pid"), *(len(str(row.pid)) for row in picture.rows if row.pid)])
    head = f"{'component':<{names}}  {'state':<8}  {'pid':>{pids}}  {'age':>7}"
    yield Text(head, style="dim")
    for row in picture.rows:
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


def _message(picture: Picture, width: int) -> Iterator[Text]:
    """Why it waits, over as many lines as that needs, up to a few."""
    text = " ".join(printable(picture.message).split())
    lines = textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    for line in lines[:4]:
        yield Text(line, style="yellow")


def _progress(picture: Picture, width: int, has_unicode: bool) -> Iterator[Text]:
    if picture.step is None:
        return
    left = f"step {picture.step:g}"
    parts = []
    share = None
    if picture.total:
        share = min(1.0, max(0.0, picture.step / picture.total))
        left += f" of {picture.total:g}"
        parts.append(f"{100 * share:.0f} %")
    if picture.per_second is not None:
        parts.append(rate_text(picture.per_second))
    if picture.left_s is not None and (share is None or share < 1):
        parts.append(f"{stopwatch(picture.left_s)} left")
    right = "  ".join(parts)
    line = Text(left)
    bar = min(_BAR_AT_MOST, width - len(left) - len(right) - 4)
    if share is not None and bar >= _BAR_AT_LEAST:
        full, empty = ("━", "─") if has_unicode else ("#", "-")
        done = round(share * bar)
        line.append("  ").append(full * done, style="green")
        line.append(empty * (bar - done), style="dim")
    line.append(f"  {right}" if right else "")
    yield line
