"""The web site of the documents: its source folder, and its navigation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.documents.site import copy_sources
from tests.support.documents import ROOT, Document, list_documents


def read_settings() -> dict[str, Any]:
    """Return the settings in `mkdocs.yml`, without the values that name a Python function."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    settings: dict[str, Any] = yaml.safe_load(re.sub(r"!!python/\S+ .*", "null", text))
    return settings


def read_index() -> dict[str, list[str]]:
    """Return a mapping from each section title in `docs/README.md` to the pages in its table.

    Each page is a path relative to the root of the checkout.
    """
    groups: dict[str, list[str]] = {}
    for part in (ROOT / "docs" / "README.md").read_text("utf-8").split("\n## ")[1:]:
        title, _, table = part.partition("\n")
        links = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", table, re.MULTILINE)
        pages = [(ROOT / "docs" / link).resolve() for link in links]
        groups[title] = [str(page.relative_to(ROOT)) for page in pages]
    return groups


def test_navigation_has_the_groups_of_the_index() -> None:
    groups = {
        title: [path for page in pages for path in page.values()]
        for entry in read_settings()["nav"]
        for title, pages in entry.items()
        if isinstance(pages, list)
    }

    assert groups == read_index()
    assert len(groups) == 4


def test_navigation_names_every_document_outside_the_tests() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")

    missing = [
        str(document)
        for document in list_documents()
        if not str(document).startswith("tests/") and f": {document}\n" not in text
    ]

    assert missing == []


def test_paragraphs_below_a_list_item_are_indented_by_four_spaces() -> None:
    # MkDocs ends a list before a paragraph that is indented by only one to three spaces.
    wrong = []
    for document in list_documents():
        lines = ["", *document.text.splitlines()]
        starts = [number for number, _ in document.prose]
        starts += [block.line for block in document.blocks]
        wrong += [
            f"{document}:{number}"
            for number in starts
            if not lines[number - 1] and re.match(r" {1,3}\S", lines[number])
        ]

    assert wrong == []


def test_documents_are_copied_with_the_files_that_they_link_to(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / "server.env").write_text("A=1\n")
    (root / "unused.env").write_text("A=1\n")
    page = root / "docs" / "page.md"
    page.write_text("See [settings](../server.env) and [a site](https://example.org/a.env).\n")

    copy_sources(tmp_path / "site", [Document(page)], root=root)

    copied = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.*")}
    assert copied == {"docs/page.md", "server.env"}


def test_marks_of_code_blocks_are_removed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```yaml run-spec\nname: a\n```\n\n```sh\nls\n```\n")

    copy_sources(tmp_path / "site", [Document(page)], root=tmp_path)

    text = (tmp_path / "site" / "page.md").read_text()
    assert text == "```yaml\nname: a\n```\n\n```sh\nls\n```\n"


def test_files_of_an_older_copy_are_deleted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A page.\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "old.md").write_text("An old page.\n")

    copy_sources(tmp_path / "site", [Document(page)], root=tmp_path)

    assert [path.name for path in (tmp_path / "site").iterdir()] == ["page.md"]
