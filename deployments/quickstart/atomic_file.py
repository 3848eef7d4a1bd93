"""Replace files atomically."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of a file. Readers see either the complete old or the complete new
    content.

    A crash of this process during the call never leaves a partly written file at `path`.

    Raises:
        OSError: The file could not be written. The old content is unchanged.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
