"""The parts of a document that are made from the code, between two comments:

    <!-- made: NAME -->
    ...
    <!-- end -->

What stands outside them is written by hand, and left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_BLOCK = re.compile(r"(<!-- made: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def names_in(text: str) -> tuple[str, ...]:
    """The names of the blocks of a document, in order."""
    return tuple(match.group(2) for match in _BLOCK.finditer(text))


def filled(text: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """The document with each block made anew.

    Args:
        makers: What stands in a block, by its name.

    Raises:
        KeyError: A block of the document has no maker.
    """

    def one(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}\n{makers[name]().strip()}\n\n{end}"

    return _BLOCK.sub(one, text)
