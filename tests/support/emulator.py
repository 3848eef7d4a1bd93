"""A small terminal emulator: it shows the text that a real terminal would show."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)|(\x1b)")


class Emulator:
    """Interprets the characters and escape sequences that Muster writes to a terminal.

    The emulator executes newline, carriage return, cursor up, and "erase everything below the
    cursor". The emulator ignores colours. Every other escape sequence is added to the list
    `unknown`. Lines that have scrolled out of the screen are kept.
    """

    def __init__(self, columns: int = 80) -> None:
        self._columns = columns
        self._lines = [""]
        self._row = 0
        self._column = 0
        #: Escape sequences and unprintable characters that the emulator does not know.
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
                # The kernel's terminal driver turns a newline into newline and carriage return.
                self._move_down()
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
            self._move_down()
            self._column = 0
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
        self._column += 1

    def _move_down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")
