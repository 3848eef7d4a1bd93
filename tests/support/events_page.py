"""Read the tables of docs/events.md, which list the events of Muster and their fields."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "events.md"


def read_table(head: str) -> list[list[str]]:
    """Return the cells of a table in docs/events.md, as `rows[row][column]`.

    Args:
        head: Header line of the table in the Markdown source.
    """
    below = PAGE.read_text(encoding="utf-8").partition(f"{head}\n")[2].splitlines()[1:]
    rows = itertools.takewhile(lambda line: line.startswith("| "), below)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]


def find_code_words(cell: str) -> tuple[str, ...]:
    """Return the words in backquotes in a cell of a table."""
    return tuple(re.findall(r"`(\w+)`", cell))


#: Mapping from the name of an event to the names of the event's fields in events.jsonl.
CATALOGUE: Mapping[str, tuple[str, ...]] = {
    event.strip("`"): find_code_words(fields)
    for event, fields in read_table("| event of an attempt | fields |")
}
