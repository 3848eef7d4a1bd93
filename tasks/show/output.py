"""Make text from outside harmless before it reaches standard output or standard error.

Messages, logs, names, tags and paths are written by programs and by other people. A terminal obeys
the control characters in such text: it moves the cursor, changes the title, writes to the clipboard
or draws text from right to left. Rich interprets markup in the text: `[/path]` closes a style,
`[red]` disappears, and `:smile:` becomes a picture.

Only this module handles these dangers:

- `guard_output` removes control characters from the output of a verb.
- `SafeConsole` is the only Rich console of Muster. It ignores markup, emoji codes and links, and
  removes control characters from everything that it draws.
- `raw_stdout` is for component logs. A pipe receives these logs unchanged.
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

#: Escape sequences: colours, cursor moves, titles, links, access to the clipboard. If a sequence
#: that carries text is not terminated, only its first two characters match, because the text after
#: them may be part of the message.
_SEQUENCES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_](?:[^\x07\x1b\n]*(?:\x07|\x1b\\))?|[ -/]*[0-~])"
)
#: The control characters of C0 and C1 except tab and end of line, the separators of lines and
#: paragraphs, and the characters that change the direction of text.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
#: Lone surrogates. Python uses them for the bytes of a path that are not UTF-8.
_SURROGATES = re.compile(r"[\ud800-\udfff]")
#: A sequence that changes only colours and weight.
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def strip_controls(text: str) -> str:
    """Remove escape sequences and control characters. Newlines and tabs stay.

    A line that overwrites itself with carriage returns, as progress bars do, is reduced to the text
    after the last carriage return.
    """
    text = _SEQUENCES.sub("", text).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_last_state(line) for line in text.split("\n"))
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", _CONTROLS.sub("", text))


def printable(text: str) -> str:
    """Remove control characters as `strip_controls` does, and replace tabs by spaces.

    Without tabs, the width of the text on a screen can be computed.
    """
    return strip_controls(text).expandtabs(4)


def line_of(text: str, style: str = "") -> Text:
    """Return text from outside as safe Rich text.

    Args:
        style: Rich style, such as `bold red`.
    """
    return Text(printable(text), style=style)


def one_line(text: str) -> str:
    """Return text from outside as one line without control characters."""
    return " ".join(printable(text).split())


def coloured_line(line: str) -> Text:
    """Return a log line as Rich text. Its colours are kept, other control characters removed."""
    parts: list[str] = []
    end = 0
    line = _last_state(line)
    for match in _COLOURS.finditer(line):
        parts.append(printable(line[end : match.start()]))
        parts.append(match.group())
        end = match.end()
    parts.append(printable(line[end:]))
    return Text.from_ansi("".join(parts))


def _last_state(line: str) -> str:
    """Return the text after the last carriage return, as a terminal would finally show it."""
    return line.rstrip("\r").rpartition("\r")[2]


class SafeConsole(Console):
    """A Rich console for text from outside: without markup, emoji codes, links and highlighting.

    Everything that the console draws passes through `render`. Widgets of Rich and cyclopts that
    contain text from outside are therefore safe, too.
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
    """A text stream that removes control characters and passes the text to another stream.

    Everything else, such as `fileno` and `isatty`, comes from the other stream.
    """

    def __init__(self, stream: TextIO) -> None:
        #: The stream that receives the cleaned text.
        self.raw_stream = stream

    def write(self, text: str) -> int:
        encoding = self.raw_stream.encoding or "utf-8"
        # A character that the stream cannot encode must not abort the verb.
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
    """Remove control characters from standard output and standard error inside the `with` block."""
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream: TextIO | None = getattr(sys, name)
            # A stream is None if it was closed before this process started.
            if stream is not None:
                replace_stream(name, GuardedStream(unguarded(stream)), stack)
        yield


def replace_stream(name: str, replacement: Any, stack: ExitStack) -> None:
    """Replace `sys.stdout` or `sys.stderr`, and the same stream in all log handlers.

    Args:
        name: `stdout` or `stderr`.
        replacement: The object that takes the place of the stream.
        stack: Closing this stack restores the original stream.
    """
    stream: TextIO = getattr(sys, name)
    _set_until_closed(sys, name, replacement, stack)
    for handler in _log_handlers():
        # A handler keeps the stream that `sys` had when the handler was created.
        if handler.stream in (stream, unguarded(stream)):
            _set_until_closed(handler, "stream", replacement, stack)
            if (console := getattr(handler, "console", None)) is not None:
                _set_until_closed(console, "file", replacement, stack)


def _set_until_closed(owner: Any, name: str, value: object, stack: ExitStack) -> None:
    """Set an attribute. Closing the stack restores the previous value."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _log_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yield the stream handlers of all loggers."""
    names = list(logging.root.manager.loggerDict)
    for logger in (logging.root, *map(logging.getLogger, names)):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                yield handler


def unguarded(stream: TextIO) -> TextIO:
    """Return the original stream of a `GuardedStream`; any other stream is returned unchanged."""
    return stream.raw_stream if isinstance(stream, GuardedStream) else stream


def raw_stdout() -> TextIO:
    """Return standard output without the guard, for logs that are written to a file or a pipe."""
    return unguarded(sys.stdout)


def is_on_terminal() -> bool:
    """Return True if standard output is a terminal.

    Rich is not asked: if an environment variable such as FORCE_COLOR is set, Rich also treats a
    pipe as a terminal.
    """
    return sys.stdout is not None and sys.stdout.isatty()


def console_of(stream: TextIO | None) -> SafeConsole:
    """Return a console that writes to standard output or error, bypassing the guard.

    The colours that Rich itself adds therefore reach the terminal.
    """
    return SafeConsole(file=unguarded(stream) if stream is not None else None)
