"""Tests that Markdown texts are plain text in a pipe or a file."""

from __future__ import annotations

import pytest

from tasks.show.markdown import code_block, escape_markdown, inline_code, markdown_table
from tasks.show.markdown_output import print_markdown, render_plain

#: Texts with characters that Markdown or HTML interprets.
HOSTILE = [
    "run_a_b *now* [x] `y` ~z~ a|b",
    r"C:\temp\new",
    "<urlopen error 111> & more",
    "# 3 is no heading",
    "see https://example.com/a_b and me@example.com",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("as_markdown", [escape_markdown, inline_code, code_block])
def test_plain_text_shows_exactly_the_escaped_text(text: str, as_markdown: object) -> None:
    assert callable(as_markdown)

    assert render_plain(as_markdown(text)).strip() == text


def test_rows_of_tables_and_long_lines_stay_on_one_line() -> None:
    path = "/data/" + "directory/" * 60 + "run_json"
    markdown = f"### Failed\n\n- **Record**: {inline_code(path)}\n\n" + markdown_table(
        ("component", "state"), [("trainer", f"exit code 1 {path}"), ("api", "a")]
    )

    lines = render_plain(markdown).splitlines()

    assert lines[0] == "Failed"
    assert f"Record: {path}" in lines[2]
    assert [
        line.split(maxsplit=1) for line in lines if line.startswith(("trainer", " trainer"))
    ] == [["trainer", f"exit code 1 {path}"]]
    assert all(line == line.rstrip() for line in lines)


def test_pipe_gets_no_markdown_and_no_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")

    print_markdown([f"### Run\n\n- **Message**: {escape_markdown('my_run_a')}", "second"])

    output = capsys.readouterr().out
    assert "my_run_a" in output and "second" in output
    assert not {"\\", "*", "#", "\x1b"} & {*output}
