"""Make text from programs and other people harmless before a terminal shows it.

Messages, logs, names, tags and paths are written by programs and by other people. A terminal obeys
the control characters in such text: it moves the cursor, changes the title, writes to the clipboard
or draws text from right to left. Rich interprets markup in the text: `[/path]` closes a style,
`[red]` disappears, and `:smile:` becomes a picture.

This module protects the user's terminal from such text:

- `guard_output` removes control characters from the whole output of a `muster` command.
- `SafeConsole` is the only Rich console of Muster. It ignores markup, emoji codes and links, and
  removes control characters from everything that it draws.
- `raw_stdout` returns the unprotected standard output. Component logs are written to it unchanged
  if it is a pipe or a file.
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

#: Matches the escape sequences for colours, cursor moves, titles, links and the clipboard. Some of
#: these sequences contain text, such as a title. Without a terminator, only the first two
#: characters match, because the following text may be part of the message.
_SEQUENCES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_](?:[^\x07\x1b\n]*(?:\x07|\x1b\\))?|[ -/]*[0-~])"
)
#: Matches control characters (C0 and C1) except tab and newline. Also matches Unicode's separators
#: of lines and paragraphs, and the characters that change the direction of text.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
#: Matches lone surrogates, with which Python represents bytes of a path that are not valid UTF-8.
_SURROGATES = re.compile(r"[\ud800-\udfff]")
#: Matches an escape sequence that only changes the colour or the weight of text.
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def strip_controls(text: str) -> str:
    """Return the text without escape sequences and control characters. Newlines and tabs stay.

    A carriage return lets a progress bar overwrite its line. So only the text after the last
    carriage return of a line is kept.
    """
    text = _SEQUENCES.sub("", text).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_last_state(line) for line in text.split("\n"))
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", _CONTROLS.sub("", text))


def make_encodable(text: str, encoding: str) -> str:
    """Return the text with a question mark for each character that an encoding lacks.

    Otherwise printing the text would fail on a terminal with this encoding.
    """
    return text if text.isascii() else text.encode(encoding, "replace").decode(encoding)


def printable(text: str) -> str:
    """Return the text without control characters, and with spaces in place of tabs.

    Tabs are replaced because their width on the screen depends on their position.
    """
    return strip_controls(text).expandtabs(4)


def line_of(text: str, style: str = "") -> Text:
    """Return untrusted text as a Rich text without control characters and without markup.

    Args:
        style: Rich style, such as `bold red`.
    """
    return Text(printable(text), style=style)


def one_line(text: str) -> str:
    """Return the text as one line: without control characters, and with single spaces only."""
    return " ".join(printable(text).split())


def coloured_line(line: str) -> Text:
    """Return a log line as Rich text with its colours, but without other control characters."""
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
    """Return the text of a line after its last carriage return, as a terminal finally shows it."""
    return line.rstrip("\r").rpartition("\r")[2]


class SafeConsole(Console):
    """A Rich console for untrusted text, which interprets no markup, no emoji codes and no links.

    The method `render` removes control characters from all output, including tables and panels of
    Rich and cyclopts. `render` also replaces characters that the encoding of the stream lacks.
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
                text = make_encodable(strip_controls(segment.text), self.encoding)
                yield Segment(text, _without_link(segment.style))


def _without_link(style: Style | None) -> Style | None:
    return style.update_link(None) if style is not None and style.link else style


class GuardedStream:
    """A text stream that removes control characters and writes the rest to another stream.

    Attributes such as `fileno` and `isatty` are those of the other stream.
    """

    def __init__(self, stream: TextIO) -> None:
        #: The stream that receives the cleaned text.
        self.raw_stream = stream

    def write(self, text: str) -> int:
        encoding = self.raw_stream.encoding or "utf-8"
        self.raw_stream.write(make_encodable(strip_controls(text), encoding))
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
            # `sys.stdout` is None if the parent process started this process with a closed standard
            # output.
            if stream is not None:
                replace_stream(name, GuardedStream(unguarded(stream)), stack)
        yield


def replace_stream(name: str, replacement: Any, stack: ExitStack) -> None:
    """Replace `sys.stdout` or `sys.stderr`, including in log handlers that write to this stream.

    Args:
        name: `stdout` or `stderr`.
        replacement: The object that takes the place of the stream.
        stack: Closing this stack restores the original stream.
    """
    stream: TextIO = getattr(sys, name)
    _set_until_closed(sys, name, replacement, stack)
    for handler in _log_handlers():
        # A log handler keeps the stream with which it was created, even after `sys.stdout` or
        # `sys.stderr` was replaced. So replace the stream in the handler, too.
        if handler.stream in (stream, unguarded(stream)):
            _set_until_closed(handler, "stream", replacement, stack)
            if (console := getattr(handler, "console", None)) is not None:
                _set_until_closed(console, "file", replacement, stack)


def _set_until_closed(owner: Any, name: str, value: object, stack: ExitStack) -> None:
    """Set an attribute of an object. Closing the exit stack restores the old value."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _log_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yield all log handlers that write to a stream."""
    names = list(logging.root.manager.loggerDict)
    for logger in (logging.root, *map(logging.getLogger, names)):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                yield handler


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream that a `GuardedStream` wraps. Any other stream is returned unchanged."""
    return stream.raw_stream if isinstance(stream, GuardedStream) else stream


def raw_stdout() -> TextIO:
    """Return a standard output that does not remove control characters from the text.

    Use the result for logs that are written to a file or a pipe.
    """
    return unguarded(sys.stdout)


def is_on_terminal() -> bool:
    """Return True if standard output is a terminal.

    Rich has a similar function, but Rich treats a pipe as a terminal if an environment variable
    such as FORCE_COLOR is set.
    """
    return sys.stdout is not None and sys.stdout.isatty()


def console_of(stream: TextIO | None) -> SafeConsole:
    """Return a safe Rich console that writes to standard output or standard error.

    If the stream is a `GuardedStream`, the console writes directly to the wrapped stream, because a
    `GuardedStream` would remove Rich's colours. The console itself removes control characters.

    Args:
        stream: `sys.stdout` or `sys.stderr`. None for a closed stream.
    """
    return SafeConsole(file=unguarded(stream) if stream is not None else None)
