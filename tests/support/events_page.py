"""Read the tables of docs/events.md, which list the events of Muster and their fields."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "events.md"


def rows_of(head: str) -> list[list[str]]:
    """Return the rows of the table with this header line: `rows[row][column]`."""
    below = PAGE.read_text(encoding="utf-8").partition(f"{head}\n")[2].splitlines()[1:]
    rows = itertools.takewhile(lambda line: line.startswith("| "), below)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]


def names_in(cell: str) -> tuple[str, ...]:
    """Return the words in backquotes in a cell of a table."""
    return tuple(re.findall(r"`(\w+)`", cell))


#: Names of the fields that a line of events.jsonl has, by the name of the event.
CATALOGUE: Mapping[str, tuple[str, ...]] = {
    event.strip("`"): names_in(fields)
    for event, fields in rows_of("| event of an attempt | fields |")
}
