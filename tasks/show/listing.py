"""Format the list of runs that `muster ls` prints, for a terminal of any width.

The run id is never cut, because people copy it. The state, the age and the host are always shown.
The columns for the step and the metric are omitted if they are empty for all runs. A terminal that
is too narrow for all columns shows the host, the step, the metric and the message on a second line.
The message gets the remaining columns and is cut at the right edge of the terminal. A note about
further problems of the run, such as `(and 1 more)`, stays visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from tasks.show.output import one_line

#: Smallest width, in terminal columns, for the message of a run. If fewer columns remain beside the
#: other cells, the message is printed on the next line.
_MESSAGE_COLUMNS = 20
_GAP = "  "
_HEAD = ("run", "state", "age", "host", "step", "metric", "message")
#: Columns that are omitted if they are empty for all runs.
_OPTIONAL = ("step", "metric")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """Texts that the list of runs shows about a run."""

    run_id: str
    state: str
    #: Time since the run was created, such as `3 h 12 min`, or an empty string if it is unknown.
    age: str
    #: Name of the host on which the flow process runs, or an empty string before the run starts.
    host: str
    #: Current training step, such as `12/60`, or an empty string if it is unknown.
    step: str = ""
    #: Last reward or loss, such as `reward 0.83`, or an empty string if it is unknown.
    metric: str = ""
    message: str
    #: Number of problems of the run that are not in `message`.
    omitted_problems: int = 0

    @property
    def note(self) -> str:
        """Text at the end of the message, such as `(and 1 more)`, or an empty string."""
        return f"(and {self.omitted_problems} more)" if self.omitted_problems else ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of this run's row in the list of runs, in column order, each as one line."""
        fields = (
            self.run_id,
            self.state,
            self.age,
            self.host,
            self.step,
            self.metric,
            self.message,
        )
        return _clean(*fields)


def list_runs(runs: Sequence[ListedRun], width: int) -> Iterator[Text]:
    """Yield the lines of the list of runs.

    If the terminal is wide enough for all columns, each run takes one line. Otherwise each run
    takes two lines, or three lines on a narrow terminal.

    Args:
        width: Width of the terminal in columns.
    """
    rows = [run.cells for run in runs]
    notes = [run.note for run in runs]
    shown = [
        index
        for index, name in enumerate(_HEAD)
        if name not in _OPTIONAL or any(row[index] for row in rows)
    ]
    head = tuple(_HEAD[index] for index in shown)
    rows = [tuple(row[index] for index in shown) for row in rows]
    *widths, message_width = (
        max(map(cell_len, column)) for column in zip(head, *rows, strict=True)
    )
    note_width = max(map(len, notes), default=0)
    whole_width = sum(widths) + len(widths) * len(_GAP)
    if whole_width + min(message_width, _MESSAGE_COLUMNS) + note_width <= width:
        yield _line(head, widths, width, "bold")
        for row, note in zip(rows, notes, strict=True):
            yield _line(row, widths, width, note=note)
    elif sum(widths[:3]) + 2 * len(_GAP) <= width:
        yield Text(_GAP.join(_pad_cells(head[:3], widths)), style="bold")
        for run, row in zip(runs, rows, strict=True):
            yield Text(_GAP.join(_pad_cells(row[:3], widths)).rstrip())
            facts = _join(_clean(run.host, run.step, run.metric, run.message))
            yield from _indented_line(facts, width, run.note)
    else:
        for run in runs:
            run_id, state, age, host, step, metric, message = run.cells
            yield Text(run_id)
            facts = _GAP + _join((state, age, host, step))
            if cell_len(facts) <= width:
                yield Text(facts)
                yield from _indented_line(_join((metric, message)), width, run.note)
            else:
                yield Text(_GAP + _join((state, age)))
                yield from _indented_line(_join((host, message)), width, run.note)


def _clean(*texts: str) -> tuple[str, ...]:
    """Return each text as one line without control codes."""
    return tuple(map(one_line, texts))


def _line(
    row: Sequence[str], widths: Sequence[int], width: int, style: str = "", note: str = ""
) -> Text:
    """Return a row of the list of runs as one line, which is cut after `width` columns.

    Args:
        row: The cells of a run, or the headings. The last cell is not padded.
        widths: Widths of the columns before the last column.
        width: Width of the terminal in columns.
        style: Rich style of the line.
        note: Text after the last cell. This text is not cut.
    """
    cells = [*_pad_cells(row[:-1], widths), row[-1]]
    return _cut(_GAP.join(cells).rstrip(), width, style, note)


def _indented_line(text: str, width: int, note: str = "") -> Iterator[Text]:
    """Yield the text as an indented line, cut after `width` columns. Skip an empty text."""
    if text:
        yield _cut(_GAP + text, max(width, len(_GAP) + 1), "dim", note)


def _cut(text: str, width: int, style: str, note: str) -> Text:
    """Return a line that is cut after `width` columns.

    Args:
        text: Text of the line.
        width: Largest width of the line in columns.
        style: Rich style of the line.
        note: Text after the line, or an empty string. A long `text` is shortened so that the whole
            note stays visible. In a very narrow terminal, the note is cut, too.
    """
    line = Text(text, style=style)
    if note:
        line.truncate(max(width - len(note) - 1, 1), overflow="ellipsis")
        line.append(f" {note}")
    line.truncate(width, overflow="ellipsis")
    return line


def _pad_cells(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=False)
    ]


def _join(cells: Sequence[str]) -> str:
    """Return the cells that are not empty, joined with two spaces."""
    return _GAP.join(filter(None, cells))
