"""Generate the documentation of the JSON output of `muster ls`, from its classes."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from tasks.show.markdown import markdown_table
from tasks.train.run_progress import RunProgress
from tasks.train.runs import Run

#: Mapping from the name of a Python type to the name that the documentation uses for this type.
_TYPE_NAMES = {
    "str": "text",
    "float": "number",
    "int": "whole number",
    "None": "null",
    "tuple[str, ...]": "list of texts",
}


def list_keys() -> str:
    """Return a table of the JSON keys of `muster ls`, with the type and meaning of each key."""
    rows = []
    for shown_class in (Run, RunProgress):
        meanings = _read_meanings(shown_class)
        rows += [
            (f"`{field.name}`", _describe_type(str(field.type)), meanings[field.name])
            for field in fields(shown_class)
        ]
    return markdown_table(("key", "type", "meaning"), rows)


def _describe_type(annotation: str) -> str:
    """Return the name that the documentation uses for a Python type."""
    return " or ".join(_TYPE_NAMES[part] for part in annotation.split(" | "))


def _read_meanings(shown_class: type) -> dict[str, str]:
    """Return a mapping from the name of each field to the text of its `#:` comment."""
    meanings: dict[str, str] = {}
    comment_lines: list[str] = []
    for line in inspect.getsource(shown_class).splitlines():
        if comment := re.fullmatch(r" +#: (.*)", line):
            comment_lines.append(comment[1])
        elif field := re.match(r"    (\w+): ", line):
            meanings[field[1]] = " ".join(comment_lines).replace("None", "null")
            comment_lines = []
    return meanings
