"""Text from outside on standard output and error: nothing in it is a command for the terminal.

Messages, logs, names, tags and paths are written by programs and by other people. A terminal obeys
the control characters in such text: it moves the cursor, changes the title, writes to the clipboard
or draws text from right to left. Rich obeys markup in it: `[/path]` closes a style, `[red]` is
swallowed, and `:smile:` becomes a picture.

Three rules keep that away, and this module is the only place that knows them:

- `guard_output` removes control characters from all that a verb prints.
- `SafeConsole` is the only Rich console of Muster. It knows no markup, no emoji codes and no links,
  and removes control characters from all that it draws.
- `raw_stdout` is for the logs of components, which a pipe gets as they were written.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

#: Escape sequences: colours, moves of the cursor, titles, links, access to the clipboard. Of one
#: that carries text and has no end, only the beginning: what follows may be the message itself.
_SEQUENCES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_](?:[^\x07\x1b\n]*(?:\x07|\x1b\\))?|[ -/]*[0-~])"
)
#: The control characters of C0 and C1 except tab and end of line, the separators of lines and
#: paragraphs, and the characters that change the direction of text.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
#: Half a character, which stands for a byte of a path that is not UTF-8.
_SURROGATES = re.compile(r"[\ud800-\udfff]")
#: A sequence that changes only colours and weight.
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def strip_controls(text: str) -> str:
    """Remove what a terminal would obey. Ends of lines and tabs stay.

    Of a line that overwrites itself, as progress bars do, the last state is left.
    """
    text = _SEQUENCES.sub("", text).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_last_state(line) for line in text.split("\n"))
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", _CONTROLS.sub("", text))


def printable(text: str) -> str:
    """Do the same, and write tabs as spaces, so that each character has its width on a screen."""
    return strip_controls(text).expandtabs(4)


def line_of(text: str, style: str = "") -> Text:
    """Return text from outside for a console.

    Args:
        style: In Rich's words: `bold red`.
    """
    return Text(printable(text), style=style)


def one_line(text: str) -> str:
    """Return text from outside as one line without control characters."""
    return " ".join(printable(text).split())


def coloured_line(line: str) -> Text:
    """Return a line of a log for a console. It keeps its colours and nothing else of its control
    characters."""
    kept: list[str] = []
    end = 0
    line = _last_state(line)
    for found in _COLOURS.finditer(line):
        kept += [printable(line[end : found.start()]), found.group()]
        end = found.end()
    kept.append(printable(line[end:]))
    return Text.from_ansi("".join(kept))


def _last_state(line: str) -> str:
    """Return what a terminal shows in the end of a line that returns to its start."""
    return line.rstrip("\r").rpartition("\r")[2]


class SafeConsole(Console):
    """A Rich console for text from outside: without markup, emoji codes, links and highlighting.

    All that it draws goes through `render`, so that a widget of Rich or of cyclopts that is handed
    such text is safe as well.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(strip_controls(segment.text), _without_link(segment.style))


def _without_link(style: Style | None) -> Style | None:
    return style.update_link(None) if style is not None and style.link else style


class GuardedStream:
    """A text stream that removes control characters from what is written to it.

    Everything else, such as `fileno` and `isatty`, is that of the stream behind it.
    """

    def __init__(self, stream: TextIO) -> None:
        #: The stream behind this one.
        self.raw_stream = stream

    def write(self, text: str) -> int:
        encoding = self.raw_stream.encoding or "utf-8"
        # A character that the terminal can't show must not end the verb.
        shown = strip_controls(text).encode(encoding, "backslashreplace").decode(encoding)
        self.raw_stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


@contextmanager
def guard_output() -> Iterator[None]:
    """Guard standard output and error of this process while the context is open."""
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream: TextIO | None = getattr(sys, name)
            # A stream that was closed before this process started is None.
            if stream is not None:
                replace_stream(name, GuardedStream(unguarded(stream)), stack)
        yield


def replace_stream(name: str, replacement: Any, stack: ExitStack) -> None:
    """Put something in the place of standard output or error, also for the handlers of logs.

    Args:
        name: `stdout` or `stderr`.
        stack: Restores everything when it is closed.
    """
    stream: TextIO = getattr(sys, name)
    _set(sys, name, replacement, stack)
    for handler in _log_handlers():
        # A handler keeps the stream that was there when it was made.
        if handler.stream in (stream, unguarded(stream)):
            _set(handler, "stream", replacement, stack)
            if (console := getattr(handler, "console", None)) is not None:
                _set(console, "file", replacement, stack)


def _set(holder: Any, name: str, value: object, stack: ExitStack) -> None:
    stack.callback(setattr, holder, name, getattr(holder, name))
    setattr(holder, name, value)


def _log_handlers() -> Iterator[logging.StreamHandler[Any]]:
    names = list(logging.root.manager.loggerDict)
    for logger in (logging.root, *map(logging.getLogger, names)):
        yield from (one for one in logger.handlers if isinstance(one, logging.StreamHandler))


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream behind a guarded one, or the stream itself."""
    return stream.raw_stream if isinstance(stream, GuardedStream) else stream


def raw_stdout() -> TextIO:
    """Return standard output without the guard, for logs that go to a file or a pipe."""
    return unguarded(sys.stdout)


def is_on_terminal() -> bool:
    """Return True if standard output is a terminal.

    Rich would also say so of a pipe, where a variable such as FORCE_COLOR is set.
    """
    return sys.stdout is not None and sys.stdout.isatty()


def console_of(stream: TextIO | None) -> SafeConsole:
    """Return a console on standard output or error. Its own colours reach the terminal."""
    return SafeConsole(file=unguarded(stream) if stream is not None else None)
