"""Texts are written in plain English: the constructions of `tests/support/dialect.py` are rare."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.dialect import (
    LIMIT,
    Kind,
    Passage,
    examine,
    find_phrases,
    main,
    read_passages,
)
from tests.support.house import ROOT

#: Folders and files whose docstrings and comments are not yet in plain English. Remove a path when
#: its texts are rewritten.
CODE_NOT_REWRITTEN: set[str] = set()
#: Folders and files whose messages are not yet in plain English. Remove a path when its messages
#: are rewritten.
MESSAGES_NOT_REWRITTEN = {
    "tests/support",
}
#: Documents that are not yet in plain English. Remove a document when it is rewritten.
DOCUMENTS_NOT_REWRITTEN: set[str] = set()

#: Files that may contain the forbidden phrases, because these files list the phrases.
_EXAMPLES = {"tests/support/dialect.py", "tests/unit/test_plain_english.py"}


def _places_of_code() -> list[str]:
    """Return the folders and files whose code is checked, relative to the root of the project.

    These are `flows`, `deployments`, and the folders and files with Python code directly in
    `tasks/` and `tests/`.
    """
    places = [
        path
        for parent in ("tasks", "tests")
        for path in sorted((ROOT / parent).iterdir())
        if path.suffix == ".py" or any(path.rglob("*.py"))
    ]
    places += [ROOT / "flows", ROOT / "deployments"]
    return [str(path.relative_to(ROOT)) for path in places]


def _documents() -> list[str]:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    documents += (ROOT / "deployments").rglob("*.md")
    return sorted(str(path.relative_to(ROOT)) for path in documents)


@cache
def _passages(place: str) -> list[Passage]:
    passages = read_passages(ROOT / place)
    return [passage for passage in passages if passage.path not in _EXAMPLES]


def _check(place: str, kind: Kind, not_rewritten: set[str]) -> None:
    """Check that the texts of a folder or file are in plain English.

    `not_rewritten` lists the exceptions. An exception that is no longer needed fails the check.

    Args:
        place: Path of the folder or file, relative to the root of the project.
        kind: Kind of the texts to check.
        not_rewritten: Paths of the folders and files that are not yet in plain English.
    """
    report = examine(passage for passage in _passages(place) if passage.kind is kind)

    if place in not_rewritten:
        assert not report.is_plain, f"{place} is plain now: remove it from the list of {kind.value}"
    else:
        findings = "\n".join(map(str, report.findings))
        assert report.is_plain, f"{report.rate:.1f} per 1,000 words, limit {LIMIT}:\n{findings}"


@pytest.mark.parametrize("place", _places_of_code())
def test_docstrings_and_comments_are_plain(place: str) -> None:
    _check(place, Kind.CODE, CODE_NOT_REWRITTEN)


@pytest.mark.parametrize("place", _places_of_code())
def test_messages_are_plain(place: str) -> None:
    _check(place, Kind.MESSAGE, MESSAGES_NOT_REWRITTEN)


@pytest.mark.parametrize("place", _documents())
def test_documents_are_plain(place: str) -> None:
    _check(place, Kind.DOCUMENT, DOCUMENTS_NOT_REWRITTEN)


def test_lists_name_existing_places() -> None:
    code = CODE_NOT_REWRITTEN | MESSAGES_NOT_REWRITTEN

    assert not code - set(_places_of_code())
    assert not DOCUMENTS_NOT_REWRITTEN - set(_documents())


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("What waits has no process.", "What waits"),
        ("The report names what is left.", "what is"),
        ("It decides by what Slurm reports.", "by what"),
        ("Of the flow process.", "Of the"),
        ("Of its cluster, by node, the share", "Of its cluster, by node,"),
        ("Empty where it has none.", "Empty where"),
        ("A run is refused where nobody knows which.", "where nobody"),
        ("The server is told to end.", "is told"),
        ("It goes on with the next one.", "next one"),
        ("nobody passes anybody, but for a first run", "but for"),
        ("The record of a run that nothing of it is known", "nothing of it"),
        ("Why this process leaves the run.", "Why this"),
        ("A queue, by which it decides,", "by which"),
    ],
)
def test_obscure_constructions_are_found(text: str, phrase: str) -> None:
    findings = find_phrases(Passage(kind=Kind.CODE, path="a.py", line=1, text=text))

    assert phrase in [finding.phrase for finding in findings]


@pytest.mark.parametrize(
    "text",
    [
        "Process id of the flow process that was killed.",
        "Return True if another process will resume the run.",
        "If Ray places the run on other nodes, the run holds the GPUs there.",
        "What does this command do?",
        "The folder where checkpoints are stored, or None if unknown.",
        "Name of the worker on another host, or an empty string.",
        "One of the nodes of the run is drained.",
    ],
)
def test_plain_sentences_are_not_reported(text: str) -> None:
    assert find_phrases(Passage(kind=Kind.CODE, path="a.py", line=1, text=text)) == []


def test_texts_of_a_python_file_are_separated_by_kind(tmp_path: Path) -> None:
    source = (
        '"""A module."""\n\n#: A field.\nFIELD = "not a sentence"\n# First line,\n# second line.\n'
    )
    source += 'raise ValueError(f"The file {FIELD} cannot be read.")  # noqa: TRY003\n'
    file = tmp_path / "a.py"
    file.write_text(source)

    texts = [(passage.kind, passage.line, passage.text) for passage in read_passages(file)]

    assert texts == [
        (Kind.CODE, 1, "A module."),
        (Kind.CODE, 3, "A field."),
        (Kind.CODE, 5, "First line, second line."),
        (Kind.MESSAGE, 7, "The file X cannot be read."),
    ]


def test_code_blocks_of_a_document_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("# Title\n\nFirst line\nsecond line.\n\n```sh\nls\n```\n\n- item `code`\n")

    texts = [(passage.line, passage.text) for passage in read_passages(file)]

    assert texts == [(1, "Title"), (3, "First line second line."), (10, "item CODE")]


def test_headings_of_a_document_may_ask_questions(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text(
        "# Why a run waits\n\n## What you need\n\n"
        "| who may connect | what is kept |\n| --- | --- |\n| what is left | who waits |\n\n"
        "What is kept.\n"
    )

    phrases = [
        (passage.line, finding.phrase)
        for passage in read_passages(file)
        for finding in find_phrases(passage)
    ]

    assert phrases == [(7, "what is"), (7, "who waits"), (9, "What is")]


def test_other_phrases_of_a_heading_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("# A run that nobody knows\n")

    [passage] = read_passages(file)

    assert [finding.phrase for finding in find_phrases(passage)] == ["nobody"]


def test_report_names_the_place_the_phrase_and_the_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_text("# A run that nobody knows.\n")

    main([str(file)])

    printed = capsys.readouterr().out
    assert f"{file}:1: 'nobody'" in printed
    assert "1 in 5 words, 200.0 per 1,000" in printed
