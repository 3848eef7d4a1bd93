"""The tables of docs/events.md, which say what is told and written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "events.md"


def rows_of(head: str) -> list[list[str]]:
    """The rows below this head, a text each cell."""
    below = PAGE.read_text(encoding="utf-8").partition(f"{head}\n")[2].splitlines()[1:]
    rows = itertools.takewhile(lambda line: line.startswith("| "), below)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]


def names_in(cell: str) -> tuple[str, ...]:
    """What stands in it as code."""
    return tuple(re.findall(r"`(\w+)`", cell))


#: The fields of each line of events.jsonl, by its event.
CATALOGUE: Mapping[str, tuple[str, ...]] = {
    event.strip("`"): names_in(fields)
    for event, fields in rows_of("| event of an attempt | fields |")
}
