"""Format counts, lists and times for users."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from datetime import UTC, datetime

#: Largest number of names that `suggest_name` suggests.
_MAX_SUGGESTIONS = 4


def format_count(count: float, noun: str) -> str:
    """Return a count with its noun in singular or plural: `1 node`, `2 nodes`."""
    number = f"{count:g}" if isinstance(count, float) else str(count)
    ending = "" if count == 1 else "s"
    return f"{number} {noun}{ending}"


def join_words(items: Iterable[object], last: str = "and", *, at_most: int | None = None) -> str:
    """Return a phrase that lists the items: `a, b and c`.

    Args:
        items: At least one item.
        last: Word before the last item.
        at_most: Largest number of items in the phrase, or None for no limit. The phrase for more
            items ends with the number of omitted items: `a, b and 7 more`.
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
    """Return the date and time of a number of UTC epoch seconds: `2026-01-02 14:20:03 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def format_date_minute(at: float) -> str:
    """Return a time in UTC epoch seconds as date and minute: `2026-01-02 14:20 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def format_minute(at: float, now: float) -> str:
    """Return a time as `14:20`. If the day of the time is not today, add the date.

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
    """Return a duration in whole minutes, or in whole seconds if it is below one minute.

    Use this function in a text that Muster updates after each change. With whole minutes, the text
    changes only once a minute.

    Args:
        duration: The duration in seconds.
    """
    if duration < 60:
        return f"{max(0.0, duration):.0f} s"
    return format_duration(duration // 60 * 60).removesuffix(" 00 s")


def suggest_name(name: object, allowed: Iterable[str]) -> str:
    """Return advice that suggests the allowed names most similar to a wrong name.

    Upper and lower case are treated as equal.

    Args:
        name: The wrong name.
        allowed: The allowed names.

    Returns:
        The advice, such as ``did you mean `trainer`?``, or an empty string if no name is similar.
        If the wrong name is a word in several names, all of them are suggested: ``did you mean
        `HOST_OOM` or `CUDA_OOM`?``.
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
