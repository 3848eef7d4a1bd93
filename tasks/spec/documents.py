"""Find Muster's documents on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

#: Folders that may contain the documents: one in the source checkout, and one in the Python
#: environment of an installed wheel.
_FOLDERS = (
    Path(__file__).parents[2] / "docs",
    Path(sys.prefix) / "share" / "doc" / "muster" / "docs",
)


def list_documents() -> list[Path]:
    """Return the paths of the installed documents, sorted by name."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    documents = folder.glob("*.md") if folder is not None else ()
    return sorted(documents, key=lambda path: path.stem)


def find_document(name: str) -> str:
    """Return the path of a document such as `run-spec.md`.

    If the document is not installed, return a relative path such as `docs/run-spec.md`.
    """
    paths = (folder / name for folder in _FOLDERS)
    return next((str(path) for path in paths if path.is_file()), f"docs/{name}")
