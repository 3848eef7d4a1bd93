"""Format counts, lists, times and Markdown for users.

The Markdown works in both versions of the Prefect UI. Both versions interpret HTML anywhere in a
text, so this module escapes HTML.
"""

from __future__ import annotations

import base64
import difflib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
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
#: Characters that are escaped in the cell of a table artifact: Markdown's markup, the start of HTML
#: tags and entities, and an underscore at the edge of a word. In a URL or e-mail address, escaping
#: one character is enough to prevent a link: the first slash, the dot of `www.`, or the `@`.
_CELL_MARKS = re.compile(
    r"[\\`*\[\]|~<]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])|(?<=:)/(?=/)|(?<=www)\.|@(?=[-\w]+\.)",
    re.IGNORECASE,
)
#: Matches one or more consecutive backquotes.
_TICKS = re.compile("`+")
#: Matches the line of backquotes that begins or ends a code block.
_FENCE = re.compile(r"^ {0,3}(`{3,})", re.MULTILINE)
#: Characters of a link's URL that stay unchanged. All others are percent-encoded: a `)` or an HTML
#: tag, for example, would end the link.
_IN_URL = ":/?#[]@!$&*+,;=%~"
#: Largest number of names that `suggest_name` suggests.
_MAX_SUGGESTIONS = 4
#: Matches a vertical bar that is not escaped. In a Markdown table, the bar would begin a new cell.
_BAR = re.compile(r"(?<!\\)\|")


def format_count(count: float, noun: str) -> str:
    """Return a count with its noun in singular or plural: `1 node`, `2 nodes`."""
    number = f"{count:g}" if isinstance(count, float) else str(count)
    ending = "" if count == 1 else "s"
    return f"{number} {noun}{ending}"


def join_words(items: Iterable[object], last: str = "and", *, at_most: int | None = None) -> str:
    """Return the items as a phrase: `a, b and c`.

    Args:
        items: At least one item.
        last: Word before the last item.
        at_most: Largest number of items in the phrase, or None for no limit. If there are more, the
            last item of the phrase is the number of omitted items: `a, b and 7 more`.
    """
    shown = [str(item) for item in items]
    if at_most is not None and len(shown) > at_most:
        shown = [*shown[: at_most - 1], f"{len(shown) - at_most + 1} more"]
    *before, end = shown
    return f"{', '.join(before)} {last} {end}" if before else end


def join_commas(items: Iterable[object]) -> str:
    """Return the items separated by commas: `0, 1, 2`."""
    return ", ".join(map(str, items))


def format_time(at: float) -> str:
    """Return a time in UTC epoch seconds as time of day: `14:20:03 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def format_datetime(at: float) -> str:
    """Return a time in UTC epoch seconds as date and time: `2026-01-02 14:20:03 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def format_date_minute(at: float) -> str:
    """Return a time in UTC epoch seconds as date and minute: `2026-01-02 14:20 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def format_minute(at: float, now: float) -> str:
    """Return a time as `14:20`, or with its date if the date differs from that of `now`.

    Args:
        at: The time, in UTC epoch seconds.
        now: The present time, in UTC epoch seconds.
    """
    time = datetime.fromtimestamp(at, UTC)
    today = datetime.fromtimestamp(now, UTC)
    return f"{time:%H:%M}" if time.date() == today.date() else f"{time:%Y-%m-%d %H:%M}"


def format_duration(duration: float) -> str:
    """Return a duration in readable units.

    Examples: `0.42 s`, `7.5 s`, `42 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`.

    Args:
        duration: The duration in seconds.
    """
    duration = max(0.0, duration)
    if duration < 1:
        return f"{duration:.2f} s"
    if duration < 9.95:
        return f"{duration:.1f} s"
    if duration < 59.5:
        return f"{duration:.0f} s"

    whole = round(duration)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_minutes(duration: float) -> str:
    """Return a duration as whole minutes, or as whole seconds if it is below one minute.

    Use this for a text that Muster writes again whenever the text changes. With whole minutes, such
    a text changes only once a minute.

    Args:
        duration: The duration in seconds.
    """
    if duration < 60:
        return f"{max(0.0, duration):.0f} s"
    return format_duration(duration // 60 * 60).removesuffix(" 00 s")


def escape_markdown(content: object) -> str:
    """Return any text as one line of Markdown that shows exactly that text.

    No character acts as markup, HTML, a link or an image. The Prefect UI would turn a URL or e-mail
    address into a link, so it is shown as inline code.
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

    The older version of the Prefect UI renders a cell as Markdown; the newer version shows it
    unchanged. So a backslash is added only before a character that could create a link, an image,
    HTML or formatting.
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
    # For Markdown, a carriage return also ends a line. Backquotes after a carriage return would
    # close the code block.
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
        rows: Cells of each row, as Markdown. They may contain vertical bars and line breaks.
    """
    # A vertical bar must be escaped even within inline code, because Markdown splits a row into
    # cells first.
    lines = (
        [_BAR.sub(r"\\|", " ".join(cell.split())) for cell in line]
        for line in (head, ["---"] * len(head), *rows)
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_image(svg: str, description: str) -> str:
    """Return an image in Markdown, with its SVG embedded and a description for screen readers.

    A Prefect artifact of type `image` cannot be used instead: the Prefect UI prints the URL of the
    image below the image, and the URL of an embedded image contains the whole SVG document.
    """
    data = base64.b64encode(svg.encode()).decode()
    words = " ".join(description.split()).replace("[", "(").replace("]", ")")
    return f"![{words}](data:image/svg+xml;base64,{data})"


def suggest_name(name: object, allowed: Iterable[str]) -> str:
    """Return a remedy that suggests the allowed names most similar to a wrong name.

    Upper and lower case count as equal.

    Args:
        name: The wrong name.
        allowed: The allowed names.

    Returns:
        The remedy, ``did you mean `trainer`?``, or an empty string if no allowed name is similar.
        If the wrong name is a word of several allowed names, all of them are suggested:
        ``did you mean `HOST_OOM` or `CUDA_OOM`?``.
    """
    written = str(name).lower()
    by_lower_case = {allowed_name.lower(): allowed_name for allowed_name in allowed}
    similar = difflib.get_close_matches(written, by_lower_case, n=1, cutoff=0.65)
    if written not in by_lower_case:
        words_of_names = {lower: re.split(r"[-_.\s]", lower) for lower in by_lower_case}
        containing = [lower for lower, words in words_of_names.items() if written in words]
        similar = containing[:_MAX_SUGGESTIONS] or similar
    if not similar:
        return ""
    suggestions = join_words((f"`{by_lower_case[lower]}`" for lower in similar), "or")
    return f"did you mean {suggestions}?"
