"""Format the list of runs that `muster ls` prints, for a terminal of any width.

The run id is never cut, because people copy it. The state, the age and the host are always shown.
The message gets the remaining columns and is cut at the right edge of the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from tasks.show.output import one_line

#: The message of a run is printed next to the other cells of the run only if at least this number
#: of columns remains for it. Otherwise it is printed on the next line.
_MESSAGE_COLUMNS = 20
_GAP = "  "
_HEAD = ("run", "state", "age", "host", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """Texts that the list of runs shows about a run."""

    run_id: str
    state: str
    #: Time since the run was created, such as `3 h 12 min`, or an empty string if it is unknown.
    age: str
    #: Name of the host on which the flow process runs, or an empty string before the run starts.
    host: str
    message: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The five texts in the order of the columns, without line breaks or control codes."""
        fields = (self.run_id, self.state, self.age, self.host, self.message)
        return tuple(map(one_line, fields))


def list_runs(runs: Sequence[ListedRun], width: int) -> Iterator[Text]:
    """Yield the lines of the list of runs.

    A run takes one line if the message fits next to the other columns. Otherwise it takes two
    lines, and on a narrow terminal three. A line is wider than the terminal only if a single cell
    is wider than the terminal.

    Args:
        width: Width of the terminal in columns.
    """
    rows = [run.cells for run in runs]
    widths = [max(map(cell_len, column)) for column in zip(_HEAD, *rows, strict=True)]
    whole_width = sum(widths[:4]) + 4 * len(_GAP)
    if whole_width + min(widths[4], _MESSAGE_COLUMNS) <= width:
        yield _line(_HEAD, widths[:4], width, "bold")
        for row in rows:
            yield _line(row, widths[:4], width)
    elif sum(widths[:3]) + 2 * len(_GAP) <= width:
        yield Text(_GAP.join(_pad_cells(_HEAD[:3], widths)), style="bold")
        for row in rows:
            yield Text(_GAP.join(_pad_cells(row[:3], widths)).rstrip())
            yield from _indented_line(_join(row[3:]), width)
    else:
        for run_id, state, age, host, message in rows:
            yield Text(run_id)
            facts = _GAP + _join((state, age, host))
            if cell_len(facts) <= width:
                yield Text(facts)
                yield from _indented_line(message, width)
            else:
                yield Text(_GAP + _join((state, age)))
                yield from _indented_line(_join((host, message)), width)


def _line(row: Sequence[str], widths: Sequence[int], width: int, style: str = "") -> Text:
    """Return a row of the list as one line. It is cut after `width` columns.

    Args:
        row: The five cells of a run, or the five headings.
        widths: Widths of the first four columns.
        width: Width of the terminal in columns.
    """
    line = Text(_GAP.join([*_pad_cells(row[:4], widths), row[4]]).rstrip(), style=style)
    line.truncate(width, overflow="ellipsis")
    return line


def _indented_line(text: str, width: int) -> Iterator[Text]:
    """Yield the text as an indented line, cut after `width` columns, or nothing if it is empty."""
    if text:
        line = Text(_GAP + text, style="dim")
        line.truncate(max(width, len(_GAP) + 1), overflow="ellipsis")
        yield line


def _pad_cells(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=False)
    ]


def _join(cells: Sequence[str]) -> str:
    """Return the cells that are not empty, joined with two spaces."""
    return _GAP.join(filter(None, cells))
