"""Read the end of a file in which each line is a JSON object.

Event logs and metrics files have this format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Number of bytes at the end of a file that are read.
_TAIL_BYTES = 65_536


def read_last_objects(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects in the last lines of a file, the last line first.

    Other lines, such as an incomplete last line, are skipped. Yield nothing if the file cannot be
    read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict):
                yield content
