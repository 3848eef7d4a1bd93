"""Build the documents as a web site: `make site`.

MkDocs reads a single folder. So the documents, their pictures and the files that they link to are
first copied to `build/site-source`, with the paths that they have in the checkout. MkDocs then
builds `build/site` from `mkdocs.yml`, and fails if a link or an anchor leads nowhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.documents import ROOT, Document, list_documents

#: Folder from which MkDocs reads the documents. The key `docs_dir` of `mkdocs.yml` has the same
#: value.
SOURCE = ROOT / "build" / "site-source"
#: Matches the first line of a code block if this line has two words, for example `yaml run-spec`.
#: The first word is the language. Only Muster's tests use the second word.
_MARKED_FENCE = re.compile(r"^( *```\w+) [\w-]+$", re.MULTILINE)


def copy_sources(target: Path, sources: Iterable[Document], root: Path = ROOT) -> None:
    """Copy documents, and the files that they link to, into a new folder.

    Args:
        target: Folder to create. An existing folder is deleted first.
        sources: The documents.
        root: Root of the checkout. Files outside of the checkout are not copied.
    """
    shutil.rmtree(target, ignore_errors=True)
    for document in sources:
        page = target / document.path.relative_to(root)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_MARKED_FENCE.sub(r"\1", document.text), encoding="utf-8")
        for file in _linked_files(document):
            copy = target / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def _linked_files(document: Document) -> list[Path]:
    """Return the files of the checkout that a document links to, except Markdown files."""
    urls = [urlsplit(link) for _, link in document.links]
    paths = [
        (document.path.parent / unquote(url.path)).resolve()
        for url in urls
        if url.path and not url.scheme
    ]
    return [path for path in paths if path.is_file() and path.suffix != ".md"]


def main(arguments: Sequence[str]) -> int:
    """Build the site, and return MkDocs' exit code: 0 for a complete site without broken links.

    Args:
        arguments: Further arguments of `mkdocs build`.
    """
    copy_sources(SOURCE, list_documents())
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", *arguments)
    # Without this variable, the theme of the site prints an advertisement.
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, check=False)
    if result.returncode == 0:
        print("The site is in build/site: open build/site/index.html.")
    return result.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
