"""Replace the generated blocks of a Markdown document. A block is between two comments:

    <!-- made: NAME -->
    ...
    <!-- end -->

The text outside of the blocks is written by hand, and never changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_BLOCK = re.compile(r"(<!-- made: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def list_block_names(text: str) -> tuple[str, ...]:
    """Return the names of the generated blocks of a document, in order."""
    return tuple(match.group(2) for match in _BLOCK.finditer(text))


def fill_blocks(text: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """Return the text of a document with newly generated blocks.

    Args:
        text: The Markdown of the document.
        makers: Mapping from the name of a block to the function that generates the block.

    Raises:
        KeyError: The document has a block whose name is not in `makers`.
    """

    def fill_block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}\n{makers[name]().strip()}\n\n{end}"

    return _BLOCK.sub(fill_block, text)
