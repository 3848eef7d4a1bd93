"""Print the documents that are installed with Muster: the command `muster docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.markdown import Markdown

from tasks.show.output import console_of, is_on_terminal
from tasks.spec.documents import list_documents
from tasks.spec.errors import BadArgument, MusterError
from tasks.spec.formatting import join_commas, suggest_name


def docs(name: str = "", /) -> None:
    """List the documents with their titles and paths, or print one document.

    Exit: 0 printed; 1 no documents are installed; 2 there is no such document.

    Args:
        name: Name of the document, such as run-spec. Default: list all documents.
    """
    documents = {path.stem: path for path in list_documents()}
    if not documents:
        raise MusterError(
            "the documents of Muster are not installed: install Muster again from its wheel"
        )
    if not name:
        width = max(map(len, documents))
        for stem, path in documents.items():
            print(f"{stem.ljust(width)}  {_read_title(path)}")
        if is_on_terminal():
            folder = next(iter(documents.values())).parent
            print(f"\nTo print a document: muster docs NAME. The files are in {folder}")
        return
    document = documents.get(Path(name).name.removesuffix(".md"))
    if document is None:
        suggestion = suggest_name(name, documents) or f"choose from {join_commas(documents)}"
        raise BadArgument(f"there is no document {name}: {suggestion}")
    text = document.read_text(encoding="utf-8")
    if is_on_terminal():
        console = console_of(sys.stdout)
        console.print(Markdown(text))
        if len(text.splitlines()) > console.height:
            print(f"\nTo read this document page by page: muster docs {document.stem} | less")
    else:
        print(text, end="")


def _read_title(path: Path) -> str:
    """Return the first heading of a document, or an empty string."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            return line.removeprefix("# ")
    return ""
