"""`muster docs` lists and prints the installed documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.command import do
from tasks.show import docs_command
from tests.support.host_environment import ROOT


def test_list_has_the_name_and_title_of_each_document(capsys: pytest.CaptureFixture[str]) -> None:
    code = do(["docs"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == sorted(
        path.stem for path in (ROOT / "docs").glob("*.md")
    )
    assert any(line.split(maxsplit=1) == ["schedules", "Run on a schedule"] for line in lines)


@pytest.mark.parametrize("name", ["schedules", "schedules.md", "docs/schedules.md"])
def test_document_is_printed_unchanged_to_a_pipe(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = do(["docs", name])

    assert code == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "schedules.md").read_text()


@pytest.mark.parametrize(("name", "is_long"), [("run-spec", True), ("limits", False)])
def test_long_document_on_a_terminal_ends_with_the_command_that_pages_it(
    name: str,
    is_long: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(docs_command, "is_on_terminal", lambda: True)
    monkeypatch.setenv("LINES", "300")

    code = do(["docs", name])

    assert code == 0
    assert (f"muster docs {name} | less" in capsys.readouterr().out) == is_long


def test_unknown_document_is_refused_with_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = do(["docs", "schedule"])

    assert code == 2
    assert "there is no document schedule: did you mean `schedules`?" in capsys.readouterr().err


def test_installation_without_documents_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tasks.spec.documents._FOLDERS", (tmp_path / "none",))

    code = do(["docs"])

    assert code == 1
    assert "the documents of Muster are not installed" in capsys.readouterr().err
