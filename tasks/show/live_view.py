"""The live region under the lines of a run: its components, its probes, its progress, as rich's
text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from tasks.show.screen import printable
from tasks.show.view import Row, RunSeen, Standing, rate_text
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


def drawn(
    seen: RunSeen, *, columns: int, lines: int, now: float, has_unicode: bool = True
) -> list[Text]:
    """The region, no line wider and not more of them than there is room; nothing before there is
    anything to be seen.

    Args:
        now: UTC epoch seconds.
    """
    if not seen.has_begun:
        return []
    width = max(1, columns - 1)
    below = [*_message(seen, width), *_progress(seen, width, now, has_unicode)]
    table = list(_table(rows_of(seen), width, now))
    room = max(1, lines - len(below))
    if len(table) > room:
        hidden = len(table) - room + 1
        table = [*table[: room - 1], Text(f"  and {hidden} lines more", style="dim")]
    text = [*table, *below][:lines]
    for line in text:
        line.truncate(width, overflow="ellipsis" if has_unicode else "crop")
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


def _progress(seen: RunSeen, width: int, now: float, has_unicode: bool) -> Iterator[Text]:
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
        full, empty = ("━", "─") if has_unicode else ("#", "-")
        done = round(share * bar)
        line.append("  ").append(full * done, style="green")
        line.append(empty * (bar - done), style="dim")
    line.append(f"  {right}" if right else "")
    yield line
