"""A terminal as far as Muster uses one: what would stand there after what was written."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)|(\x1b)")


class Emulator:
    """Lines as they stand, the scrolled ones included. It knows the end of a line, the start of
    it, the cursor up, erasing below and colours, and refuses everything else.
    """

    def __init__(self, columns: int = 80) -> None:
        self._columns = columns
        self._lines = [""]
        self._row = 0
        self._column = 0
        #: Whatever was written that is not in its list.
        self.unknown: list[str] = []

    def write(self, text: str) -> None:
        for piece in _PIECE.finditer(text):
            numbers, command, start, end, words, escape = piece.groups()
            if command == "A":
                self._row = max(0, self._row - int(numbers or 1))
            elif command == "J" and numbers in ("", "0"):
                self._lines[self._row] = self._lines[self._row][: self._column]
                del self._lines[self._row + 1 :]
            elif start:
                self._column = 0
            elif end:
                # As a terminal's driver does, which sends both.
                self._down()
                self._column = 0
            elif words:
                for character in words:
                    self._put(character)
            elif escape or command not in (None, "m"):
                self.unknown.append(piece.group())

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines)

    def _put(self, character: str) -> None:
        if not character.isprintable():
            self.unknown.append(character)
            return
        if self._column == self._columns:
            self._down()
            self._column = 0
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")
