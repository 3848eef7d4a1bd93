"""The list of runs on a terminal, at any width.

The run id is never cut, because people copy it. State, age and host are never dropped. The message
takes what room is left, and is cut there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from tasks.show.output import one_line

#: A message with less room than this, in columns, gets a line of its own.
_MESSAGE_COLUMNS = 20
_GAP = "  "
_HEAD = ("run", "state", "age", "host", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run of the list, in words."""

    run_id: str
    state: str
    #: Time since it was created: `3 h 12 min`. Empty if unknown.
    age: str
    #: Name of the host of its process. Empty if it has had none.
    host: str
    message: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The fields in the order of the columns, each in one line without control characters."""
        fields = (self.run_id, self.state, self.age, self.host, self.message)
        return tuple(map(one_line, fields))


def list_runs(runs: Sequence[ListedRun], width: int) -> Iterator[Text]:
    """Yield the lines of the list.

    A run takes one line if the message has room there, else two, and three on a narrow terminal.
    A line may be wider than the terminal only if one cell alone is.

    Args:
        width: Columns of the terminal.
    """
    rows = [run.cells for run in runs]
    widths = [max(map(cell_len, column)) for column in zip(_HEAD, *rows, strict=True)]
    whole_width = sum(widths[:4]) + 4 * len(_GAP)
    if whole_width + min(widths[4], _MESSAGE_COLUMNS) <= width:
        yield _line(_HEAD, widths[:4], width, "bold")
        for row in rows:
            yield _line(row, widths[:4], width)
    elif sum(widths[:3]) + 2 * len(_GAP) <= width:
        yield Text(_GAP.join(_padded(_HEAD[:3], widths)), style="bold")
        for row in rows:
            yield Text(_GAP.join(_padded(row[:3], widths)).rstrip())
            yield from _below(_join(row[3:]), width)
    else:
        for run_id, state, age, host, message in rows:
            yield Text(run_id)
            facts = _GAP + _join((state, age, host))
            if cell_len(facts) <= width:
                yield Text(facts)
                yield from _below(message, width)
            else:
                yield Text(_GAP + _join((state, age)))
                yield from _below(_join((host, message)), width)


def _line(row: Sequence[str], widths: Sequence[int], width: int, style: str = "") -> Text:
    """Return a row whose last cell, the message, is cut at the width."""
    line = Text(_GAP.join([*_padded(row[:4], widths), row[4]]).rstrip(), style=style)
    line.truncate(width, overflow="ellipsis")
    return line


def _below(said: str, width: int) -> Iterator[Text]:
    """Yield a cut line below a run, or nothing for no words."""
    if said:
        line = Text(_GAP + said, style="dim")
        line.truncate(max(width, len(_GAP) + 1), overflow="ellipsis")
        yield line


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=False)
    ]


def _join(cells: Sequence[str]) -> str:
    return _GAP.join(filter(None, cells))
