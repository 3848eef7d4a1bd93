"""Tests of `Screen`: the text that a terminal shows after its writes."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Group
from rich.text import Text

from tasks.show.output import line_of, printable
from tasks.show.screen import Screen, can_draw, make_writer
from tests.support.emulator import Emulator


class Terminal(io.StringIO):
    """A fake terminal with a given size. Its `emulator` shows the text that is on the screen."""

    def __init__(self, columns: int = 40, lines: int = 10) -> None:
        super().__init__()
        self.columns = columns
        self.lines = lines
        self.emulator = Emulator(columns)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        self.emulator.write(text)
        return len(text)

    def screen(self, *, is_live: bool = True) -> Screen:
        return Screen(
            self.write, is_live=is_live, size=lambda: os.terminal_size((self.columns, self.lines))
        )


def region(*texts: str) -> Text:
    return Text("\n".join(texts))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, with Umlauts: äöü ━", "plain, with Umlauts: äöü ━"),
        # control sequences for colours are removed
        ("\x1b[1;31mred\x1b[0m", "red"),
        # sequences that move the cursor and erase a line are removed
        ("up\x1b[2A\x1b[K", "up"),
        # sequences that set the title of the window and make a link are removed
        ("\x1b]0;title\x07after \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "after link"),
        # sequences that choose a character set and reset the terminal are removed
        ("\x1b(Bwords\x1bc", "words"),
        # a progress bar overwrites its line, so only the last text remains
        ("10 %\r50 %\r100 %", "100 %"),
        ("100 %\r", "100 %"),
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("bell\x07, backspace\x08, null\x00, C1 \x9b31m", "bell, backspace, null, C1 31m"),
        ("a\tb", "a   b"),
        # an incomplete control sequence at the end of the text is removed
        ("end \x1b", "end "),
    ],
)
def test_control_sequences_are_removed(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("is_terminal", "environ", "expected"),
    [
        (True, {"TERM": "xterm-256color"}, True),
        # a pipe or a file gets no colours, even if an environment variable forces colours
        (False, {"TERM": "xterm-256color", "FORCE_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        # an empty NO_COLOR counts as not set: https://no-color.org
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (True, {"TERM": "xterm", "CI": "true"}, False),
        (True, {"TERM": "xterm", "CI": "false"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
    ],
)
def test_region_is_drawn_only_on_capable_terminals(
    is_terminal: bool, environ: dict[str, str], expected: bool
) -> None:
    assert can_draw(is_terminal, environ) is expected


def test_lines_scroll_above_the_region() -> None:
    terminal = Terminal()
    screen = terminal.screen()

    screen.show([line_of("first")], region("api  starting", "step 1"))
    screen.show([line_of("second", "green")], region("api  ready", "step 2"))

    assert terminal.emulator.text == "first\nsecond\napi  ready\nstep 2\n"
    assert terminal.emulator.unknown == []


def test_smaller_or_removed_region_leaves_no_text() -> None:
    terminal = Terminal()
    screen = terminal.screen()

    screen.show([line_of("first")], region("a", "b", "c"))
    screen.show([], region("d"))
    shrunk = terminal.emulator.text
    screen.show([line_of("last")])

    assert shrunk == "first\nd\n"
    assert terminal.emulator.text == "first\nlast\n"


def test_line_longer_than_the_terminal_is_not_cut() -> None:
    terminal = Terminal(columns=10)
    screen = terminal.screen()

    screen.show([line_of("/a/path/that/somebody/copies")], region("below"))
    screen.show([], region("below"))

    assert terminal.emulator.text == "/a/path/th\nat/somebod\ny/copies\nbelow\n"


def test_region_is_replaced_after_the_terminal_became_narrower() -> None:
    terminal = Terminal(columns=20)
    screen = terminal.screen()
    screen.show([line_of("first")], region("a" * 15, "b" * 5))
    # The terminal becomes narrower. Many terminals then wrap long lines that are already on the
    # screen.
    terminal.columns = 10
    terminal.emulator = Emulator(10)
    terminal.emulator.write(f"first\n{'a' * 15}\n{'b' * 5}\n")

    screen.show([], region("c"))

    assert terminal.emulator.text == "first\nc\n"


def test_markup_in_foreign_text_is_printed_literally() -> None:
    terminal = Terminal()

    terminal.screen().show([line_of("[bold]not bold[/] :smile: [/]")])

    assert terminal.emulator.text == "[bold]not bold[/] :smile: [/]\n"


def test_plain_output_has_neither_region_nor_colours() -> None:
    output = io.StringIO()

    Screen(output.write, is_live=False).show([line_of("\x1b[31mred", "bold red")], region("a"))

    assert output.getvalue() == "red\n"


@pytest.mark.parametrize(
    ("columns", "height", "shown"),
    [
        (40, 4, ""),  # too few lines for the live region
        (40, 5, "...\n3 4 5\n6 7 8\n"),
        (40, 24, "0\n1 2\n3 4 5\n6 7 8\n"),
        # each line is cut, so that it is shorter than the width of the terminal
        (5, 24, "0\n1 2\n3 4\n6 7\n"),
    ],
)
def test_region_fits_into_the_terminal(columns: int, height: int, shown: str) -> None:
    terminal = Terminal(columns=columns, lines=height)
    texts = [Text(text, no_wrap=True) for text in ("0", "1 2", "3 4 5", "6 7 8")]

    terminal.screen().show([], Group(*texts))

    assert terminal.emulator.text == shown


def test_screen_survives_a_closed_output() -> None:
    reader, writer = os.pipe()
    screen = Screen(make_writer(writer), is_live=False)
    os.close(reader)

    screen.show([line_of("nobody reads this")])
    screen.show([line_of("nor this")])

    assert screen.is_gone
    os.close(writer)


def test_long_text_is_written_completely_to_a_non_blocking_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text = "x" * 200_000
    child = os.fork()
    if child == 0:
        os.close(writer)
        received = 0
        while data := os.read(reader, 65536):
            received += len(data)
        os._exit(0 if received == len(text) else 1)
    os.close(reader)

    make_writer(writer)(text)
    os.close(writer)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_characters_missing_in_the_encoding_are_replaced() -> None:
    reader, writer = os.pipe()

    Screen(make_writer(writer, "ascii"), is_live=False).show([line_of("0.98 ⡠⠊ …")])

    assert os.read(reader, 100) == b"0.98 ?? ?\n"
    os.close(reader)
    os.close(writer)
