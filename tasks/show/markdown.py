"""Escape texts for Markdown, and compose Markdown.

The Markdown works in both versions of the Prefect UI. Both versions interpret HTML anywhere in a
text, so this module escapes HTML.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

#: Matches characters that Markdown interprets as markup.
_MARKS = re.compile(r"([\\`*_\[\]|~])")
#: Matches URLs and e-mail addresses. Markdown turns them into links even without markup.
_ADDRESS = re.compile(
    r"(?:(?:https?|ftp)://|www\.)\S*[^\s.,;:!?)\]'\">]|[-.\w+]{1,64}@[-\w]+(?:\.[-\w]+)+",
    re.IGNORECASE,
)
#: Matches a `#` at the beginning of a text. Markdown would show the text as a heading.
_HEADING = re.compile(r"^#")
#: Matches the characters that are escaped in the cell of a table artifact: Markdown's markup, the
#: start of HTML tags and entities, and an underscore at the edge of a word. In a URL or e-mail
#: address, one escaped character (the first slash, the dot of `www.`, or the `@`) is enough to
#: prevent a link.
_CELL_MARKS = re.compile(
    r"[\\`*\[\]|~<]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])|(?<=:)/(?=/)|(?<=www)\.|@(?=[-\w]+\.)",
    re.IGNORECASE,
)
#: Matches one or more consecutive backquotes.
_TICKS = re.compile("`+")
#: Matches the line of backquotes that begins or ends a code block.
_FENCE = re.compile(r"^ {0,3}(`{3,})", re.MULTILINE)
#: Characters that are not percent-encoded in the URL of a link. All other characters are encoded,
#: because some of them, such as `)`, would end the link.
_IN_URL = ":/?#[]@!$&*+,;=%~"
#: Matches a vertical bar that is not escaped. In a Markdown table, the bar would begin a new cell.
_BAR = re.compile(r"(?<!\\)\|")


def escape_markdown(content: object) -> str:
    """Return any text as one line of Markdown that shows exactly that text.

    No character acts as markup, HTML, a link or an image. URLs and e-mail addresses become inline
    code, because the Prefect UI would turn them into links.
    """
    words = " ".join(str(content).split())
    parts: list[str] = []
    end = 0
    for address in _ADDRESS.finditer(words):
        parts += [_escape_markup(words[end : address.start()]), inline_code(address.group())]
        end = address.end()
    parts.append(_escape_markup(words[end:]))
    return _HEADING.sub(r"\\#", "".join(parts))


def _escape_markup(words: str) -> str:
    """Return a text in which the markup characters of Markdown and HTML are escaped."""
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKS.sub(r"\\\1", words)


def escape_cell(content: object) -> object:
    """Return the content of a cell of a Prefect table artifact, escaped if it is text.

    The older version of the Prefect UI renders a cell as Markdown. The newer version shows the text
    of the cell unchanged, with every backslash. So a backslash is added only before a character
    that could create a link, an image, HTML or formatting.
    """
    if not isinstance(content, str):
        return content
    words = _CELL_MARKS.sub(r"\\\g<0>", " ".join(content.split()))
    return _HEADING.sub(r"\\#", words)


def inline_code(content: object) -> str:
    """Return any text as inline code in Markdown, or an empty string if the text is blank."""
    words = " ".join(str(content).split())
    if not words:
        return ""
    longest_run = max(map(len, _TICKS.findall(words)), default=0)
    ticks = "`" * (longest_run + 1)
    padding = " " if "`" in words else ""
    return f"{ticks}{padding}{words}{padding}{ticks}"


def code_block(content: str) -> str:
    """Return several lines as a code block in Markdown."""
    # Replace carriage returns. Markdown treats a carriage return as the end of a line, so
    # backquotes after it would close the code block.
    content = content.replace("\r\n", "\n").replace("\r", "\n")
    longest = max((len(fence) for fence in _FENCE.findall(content)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{content}\n{fence}"


def markdown_link(label: str, url: str) -> str:
    """Return a link in Markdown. The label is plain text, which is escaped."""
    return f"[{escape_markdown(label)}]({quote(url, safe=_IN_URL)})"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Args:
        head: Titles of the columns.
        rows: Cells of each row, as Markdown. Cells may contain vertical bars and line breaks.
    """
    # Escape vertical bars even within inline code, because Markdown first splits a row into cells.
    lines = (
        [_BAR.sub(r"\\|", " ".join(cell.split())) for cell in line]
        for line in (head, ["---"] * len(head), *rows)
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_image(svg: str, description: str) -> str:
    """Return an image in Markdown, with its SVG embedded and a description for screen readers.

    A Prefect artifact of type `image` is not suitable: the Prefect UI prints the URL below the
    image, and the URL of an embedded image contains the whole SVG document.
    """
    data = base64.b64encode(svg.encode()).decode()
    words = " ".join(description.split()).replace("[", "(").replace("]", ")")
    return f"![{words}](data:image/svg+xml;base64,{data})"
