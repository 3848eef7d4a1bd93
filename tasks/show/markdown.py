"""Markdown as both of the Prefect UIs render it: they take HTML for HTML, wherever it stands."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence

_MARKS = re.compile(r"([\\`*_\[\]|~])")
_FENCE = re.compile(r"^ {0,3}(`{3,})", re.MULTILINE)


def text(said: object) -> str:
    """Words of programs, in one line, as they are: nothing in them is markup."""
    words = " ".join(str(said).split())
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKS.sub(r"\\\1", words)


def code(said: object) -> str:
    """The same in the type of code; empty for nothing."""
    words = " ".join(str(said).split())
    if not words:
        return ""
    ticks = "``" if "`" in words else "`"
    pad = " " if "`" in words else ""
    return f"{ticks}{pad}{words}{pad}{ticks}"


def block(said: str) -> str:
    """Several lines as they are."""
    longest = max((len(found) for found in _FENCE.findall(said)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{said}\n{fence}"


def link(said: str, url: str) -> str:
    return f"[{text(said)}](<{url}>)" if " " in url else f"[{text(said)}]({url})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def picture(svg: str, said: str) -> str:
    """A line that shows a picture, with what it says to who can't see it.

    An `image` artifact would show its address below it, which here is the whole picture as text.
    """
    data = base64.b64encode(svg.encode()).decode()
    words = " ".join(said.split()).replace("[", "(").replace("]", ")")
    return f"![{words}](data:image/svg+xml;base64,{data})"


def _cell(content: str) -> str:
    # Of code, too: a row is cut at its bars before anything else.
    return re.sub(r"(?<!\\)\|", r"\\|", content)
