"""The JSON of a run in a list, from the class that it is written from."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from tasks.spec.formatting import markdown_table
from tasks.train.finding_runs import Run

_WORDS = {
    "str": "text",
    "float": "number",
    "int": "whole number",
    "None": "null",
    "tuple[str, ...]": "list of texts",
}


def keys() -> str:
    """Each key with its type and its meaning."""
    meanings = _meanings()
    rows = [(f"`{one.name}`", _type(str(one.type)), meanings[one.name]) for one in fields(Run)]
    return markdown_table(("key", "type", "meaning"), rows)


def _type(annotation: str) -> str:
    return " or ".join(_WORDS[part] for part in annotation.split(" | "))


def _meanings() -> dict[str, str]:
    """What the comments `#:` above the fields say."""
    found: dict[str, str] = {}
    said: list[str] = []
    for line in inspect.getsource(Run).splitlines():
        if comment := re.fullmatch(r" +#: (.*)", line):
            said.append(comment[1])
        elif field := re.match(r"    (\w+): ", line):
            found[field[1]] = " ".join(said).replace("None", "null")
            said = []
    return found
