"""Words for people, the same in all rooms: counts, lists, sizes, times, and Markdown.

Markdown is written as both of the Prefect UIs render it: they take HTML for HTML, wherever it
stands.
"""

from __future__ import annotations

import base64
import difflib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from urllib.parse import quote

_MARKS = re.compile(r"([\\`*_\[\]|~])")
_TICKS = re.compile("`+")
_FENCE = re.compile(r"^ {0,3}(`{3,})", re.MULTILINE)
#: All else in an address is percent-encoded, as a `)` or a tag would end the link.
_IN_URL = ":/?#[]@!$&*+,;=%~"
_BAR = re.compile(r"(?<!\\)\|")


def counted(count: float, what: str) -> str:
    """`1 node`, `2 nodes`."""
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {what}{'' if count == 1 else 's'}"


def listed(items: Iterable[object], last: str = "and", *, at_most: int | None = None) -> str:
    """`a, b and c`; of many the first ones, and how many more there are."""
    shown = [str(item) for item in items]
    if at_most is not None and len(shown) > at_most:
        shown = [*shown[: at_most - 1], f"{len(shown) - at_most + 1} more"]
    *before, end = shown
    return f"{', '.join(before)} {last} {end}" if before else end


def commas(items: Iterable[object]) -> str:
    """`0, 1, 2`."""
    return ", ".join(map(str, items))


def clock(at: float) -> str:
    """`14:20:03 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def moment(at: float) -> str:
    """`2026-01-02 14:20:03 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def minute(at: float) -> str:
    """`2026-01-02 14:20 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def minute_seen(at: float, now: float) -> str:
    """`14:20`, in UTC; with the day where that is not today's."""
    time, today = (datetime.fromtimestamp(one, UTC) for one in (at, now))
    return f"{time:%H:%M}" if time.date() == today.date() else f"{time:%Y-%m-%d %H:%M}"


def seconds(duration: float) -> str:
    """`0.42 s`, `7.5 s`, `42 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    duration = max(0.0, duration)
    if duration < 59.5:
        digits = 2 if duration < 1 else 1 if duration < 9.95 else 0
        return f"{duration:.{digits}f} s"
    whole = round(duration)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def lasting(duration: float) -> str:
    """`3 h 12 min`: in whole minutes from one on, for what is told again as it changes."""
    if duration < 60:
        return f"{max(0.0, duration):.0f} s"
    return seconds(duration // 60 * 60).removesuffix(" 00 s")


def text(said: object) -> str:
    """Words of programs in Markdown, in one line, as they are: nothing in them is markup."""
    words = " ".join(str(said).split())
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKS.sub(r"\\\1", words)


def code(said: object) -> str:
    """The same in the type of code; empty for nothing."""
    words = " ".join(str(said).split())
    if not words:
        return ""
    ticks = "`" * (max(map(len, _TICKS.findall(words)), default=0) + 1)
    pad = " " if "`" in words else ""
    return f"{ticks}{pad}{words}{pad}{ticks}"


def block(said: str) -> str:
    """Several lines as they are."""
    # As Markdown counts lines: a fence after a carriage return would end the block.
    said = said.replace("\r\n", "\n").replace("\r", "\n")
    longest = max((len(found) for found in _FENCE.findall(said)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{said}\n{fence}"


def link(said: str, url: str) -> str:
    return f"[{text(said)}]({quote(url, safe=_IN_URL)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are Markdown already; a bar or an end of line in one is made safe."""
    # Of code, too: a row is cut at its bars before anything else.
    lines = (
        [_BAR.sub(r"\\|", " ".join(cell.split())) for cell in line]
        for line in (head, ["---"] * len(head), *rows)
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(svg: str, said: str) -> str:
    """A line that shows a picture, with what it says to who can't see it.

    An `image` artifact would show its address below it, which here is the whole picture as text.
    """
    data = base64.b64encode(svg.encode()).decode()
    words = " ".join(said.split()).replace("[", "(").replace("]", ")")
    return f"![{words}](data:image/svg+xml;base64,{data})"


def did_you_mean(found: object, allowed: Iterable[str]) -> str:
    """A remedy: the nearest of what is allowed, or nothing where none is much like it."""
    near = difflib.get_close_matches(str(found), list(allowed), n=1, cutoff=0.65)
    return f"did you mean `{near[0]}`?" if near else ""
