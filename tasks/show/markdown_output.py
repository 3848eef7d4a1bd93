"""Print Markdown texts: rendered on a terminal, and as plain text into a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from io import StringIO

from rich.markdown import Markdown

from tasks.show.output import SafeConsole, console_of, is_on_terminal

#: Width in columns of the text for a pipe or a file. With this large value, no line is wrapped, so
#: programs such as grep find a whole message or path in one line.
_PIPE_WIDTH = 10_000


def print_markdown(texts: Iterable[str]) -> None:
    """Print Markdown texts on standard output.

    A terminal shows the texts with colours, wrapped at its width. A pipe or a file gets the same
    text without colours, without wrapped lines and without the escapes of Markdown.
    """
    console = console_of(sys.stdout)
    for text in texts:
        if is_on_terminal():
            console.print(_parse_markdown(text))
        else:
            print(render_plain(text), end="\n\n")


def render_plain(text: str) -> str:
    """Return a Markdown text as a very wide terminal without colours would show it."""
    file = StringIO()
    # Without a colour system, Rich writes no escape sequences, even if FORCE_COLOR is set.
    console = SafeConsole(file=file, width=_PIPE_WIDTH, color_system=None)
    console.print(_parse_markdown(text))
    # Remove the spaces with which Rich pads the lines of tables and code blocks.
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(lines).strip("\n")


def _parse_markdown(text: str) -> Markdown:
    """Return a Markdown text for a Rich console.

    Each link is printed with its address, so that a user can check and copy the address.
    """
    return Markdown(text, hyperlinks=False)
