"""Tests that a terminal and Rich print foreign text literally and execute nothing in it."""

from __future__ import annotations

import ast
import io
import logging
import sys
from contextlib import redirect_stderr
from dataclasses import replace
from typing import TextIO, cast

import pytest
from rich.markdown import Markdown
from rich.panel import Panel
from rich.table import Table

from tasks.show.listing import ListedRun, list_runs
from tasks.show.output import (
    GuardedStream,
    SafeConsole,
    coloured_line,
    guard_output,
    line_of,
    raw_stdout,
    strip_controls,
)
from tests.support.emulator import Emulator
from tests.support.house import ROOT, files

#: Texts that the library Rich could interpret as markup, as an emoji or as a link.
HOSTILE = {
    "closing markup": "[/__w/x/unbound_buffer.cc:78] Timed out",
    "opening markup": "[enforce fail at alloc_cpu.cpp:127] [red]posix_memalign[/red]",
    "escaped markup": r"\[bold] and \\[/]",
    "emoji code": ":smile: :warning:",
    "link markup": "[link=http://evil]here[/link]",
}
#: Mapping from a description to a pair: a text with control characters that terminals execute, and
#: the harmless text that must be shown instead.
OBEYED = {
    "clear the screen": ("a\x1b[2Jb", "ab"),
    "colours": ("a\x1b[31mb\x1b[0m", "ab"),
    "title": ("a\x1b]0;owned\x07b", "ab"),
    "clipboard": ("a\x1b]52;c;aGk=\x07b", "ab"),
    "link": ("a\x1b]8;;http://evil\x1b\\b\x1b]8;;\x1b\\", "ab"),
    "device control": ("a\x1bP+q544e\x1b\\b", "ab"),
    "C1 sequence": ("a\x9b2Jb", "a2Jb"),
    "backspaces": ("a\x08\x08b", "ab"),
    "bell": ("a\x07b", "ab"),
    "right to left": ("a\u202eb\u2066c\u2069", "abc"),
    "half an escape": ("a\x1b", "a"),
    "half a title": ("a\x1b]b", "ab"),
    "half a character": ("a\udc9bb", "a\N{REPLACEMENT CHARACTER}b"),
}


class TerminalFile(io.StringIO):
    """A file in memory that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def out() -> io.StringIO:
    """The output of a fake terminal."""
    return TerminalFile()


@pytest.fixture
def console(out: io.StringIO) -> SafeConsole:
    """A console with colours that prints to the fake terminal."""
    return SafeConsole(file=out, width=100, force_terminal=True, color_system="truecolor")


def shown(out: io.StringIO, columns: int = 100) -> str:
    """Return the text on the terminal after all writes.

    The test fails if the output contains a control sequence that the function does not know.
    """
    emulator = Emulator(columns)
    emulator.write(out.getvalue())
    assert emulator.unknown == []
    return emulator.text


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_markup_and_emoji_codes_are_shown_literally(
    text: str, console: SafeConsole, out: io.StringIO
) -> None:
    table = Table("head", title=text)
    table.add_row(text)

    for renderable in (text, line_of(text), Panel(text), table):
        console.print(renderable)

    assert shown(out).count(text) == 5


@pytest.mark.parametrize(("text", "printed"), OBEYED.values(), ids=OBEYED)
def test_control_characters_never_reach_the_terminal(
    text: str, printed: str, console: SafeConsole, out: io.StringIO
) -> None:
    guarded = GuardedStream(cast(TextIO, out))

    # The same text is printed in five ways.
    console.print(line_of(text))
    console.print(text)
    console.print(Panel(text))
    console.print(Markdown(text))
    print(text, file=cast(TextIO, guarded))

    lines = shown(out).splitlines()
    assert (lines[0], lines[-1]) == (printed, printed)
    assert "evil" not in out.getvalue()


def test_links_in_markdown_show_their_address(console: SafeConsole, out: io.StringIO) -> None:
    console.print(Markdown("[bank](http://evil/x)", hyperlinks=False))
    console.print(Markdown("[bank](http://evil/x)"))

    assert shown(out).splitlines()[0].startswith("bank (http://evil/x)")
    assert "\x1b]8" not in out.getvalue()


def test_log_line_keeps_only_its_colours(console: SafeConsole, out: io.StringIO) -> None:
    line = "10 %\r\x1b[31mred\x1b[0m\x1b[2J \x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\ [/x]"

    console.print(coloured_line(line))

    assert out.getvalue() == "\x1b[31mred\x1b[0m link [/x]\n"
    assert coloured_line(line).plain == "red link [/x]"


def test_guard_replaces_characters_missing_in_the_encoding() -> None:
    raw = io.BytesIO()
    ascii_stream = io.TextIOWrapper(raw, encoding="ascii")

    print("a → b \x1b[2J", file=cast(TextIO, GuardedStream(ascii_stream)), flush=True)

    assert raw.getvalue() == b"a ? b \n"


@pytest.mark.parametrize(
    ("encoding", "shown_text"), [("ascii", b"a ? b?"), ("latin-1", b"a ? b\xe4"), ("utf-8", None)]
)
def test_console_replaces_characters_missing_in_the_encoding(
    encoding: str, shown_text: bytes | None
) -> None:
    raw = io.BytesIO()
    console = SafeConsole(file=io.TextIOWrapper(raw, encoding=encoding, write_through=True))

    console.print("a → bä")

    assert raw.getvalue() == (shown_text or "a → bä".encode()) + b"\n"


def test_guard_filters_stdout_and_stderr_but_not_the_raw_stream(
    capsys: pytest.CaptureFixture[str],
) -> None:
    original_streams = (sys.stdout, sys.stderr)

    with guard_output(), guard_output():
        print("out\x1b[2J\tcell")
        print("err\x1b[2J", file=sys.stderr)
        print("log\x1b[2J", file=raw_stdout())

    assert capsys.readouterr() == ("out\tcell\nlog\x1b[2J\n", "err\n")
    assert (sys.stdout, sys.stderr) == original_streams


def test_guard_covers_existing_log_handlers() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("tests.guard")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)

    with redirect_stderr(stream):
        with guard_output():
            logger.error("failed: \x1b[2Jno")
        logger.error("raw: \x1b[2Jno")
    logger.removeHandler(handler)

    assert stream.getvalue() == "failed: no\nraw: \x1b[2Jno\n"


def test_progress_bar_is_shown_in_its_last_state() -> None:
    assert strip_controls("10 %\r50 %\r100 %\r\nnext\r\n") == "100 %\nnext\n"


RUN_ID = "quickstart-grpo-20260102-130530-0a1b2c3d"
RUNS = [
    ListedRun(
        run_id=RUN_ID,
        state="pending_resources",
        age="3 h 12 min",
        host="node-17.cluster",
        step="1200/60000",
        metric="critic/rewards/mean 0.8321",
        message="NODE_LOST: [/x] " + "and much more " * 1000,
    ),
    ListedRun(run_id="x", state="queued", age="", host="", message=""),
    ListedRun(run_id="模型-訓練", state="failed", age="2 s", host="h", message="\x1b[2J模型" * 99),
]


@pytest.mark.parametrize("width", [1, 20, 40, 69, 70, 80, 100, 112, 113, 114, 200])
def test_long_message_does_not_hide_other_columns(width: int) -> None:
    out = TerminalFile()
    console = SafeConsole(file=out, width=width, color_system=None)

    for line in list_runs(RUNS, width):
        console.print(line, soft_wrap=True)

    written = out.getvalue()
    assert "\x1b" not in written
    for run in RUNS:
        assert all(cell in written for cell in (run.run_id, run.state, run.age))
        assert width < 20 or run.host in written
        assert width < 70 or run.step in written
        assert width < 70 or run.metric in written
    # The output consists of a heading, and at most three lines for each run.
    assert len(written.splitlines()) <= 1 + 3 * len(RUNS)
    if width >= 40:
        assert "NODE_LOST: [/x]" in written


@pytest.mark.parametrize(("width", "lines"), [(200, 1), (100, 2), (80, 2), (40, 3)])
def test_run_takes_more_lines_on_a_narrower_terminal(width: int, lines: int) -> None:
    listed = [line for line in list_runs(RUNS[:1], width) if not line.plain.startswith("run ")]

    assert len(listed) == lines
    assert all(line.cell_len <= width for line in listed)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_note_about_further_problems_stays_visible_after_a_cut_message(width: int) -> None:
    message = "warning: trainer ended with exit code 0, but " + "its step is unknown " * 20
    run = replace(RUNS[0], message=message, omitted_problems=1)

    lines = [line.plain for line in list_runs([run], width)]

    [line] = [line for line in lines if "warning" in line]
    assert line.endswith("… (and 1 more)")
    assert len(line) <= width


def test_note_stands_directly_after_a_short_message() -> None:
    run = ListedRun(
        run_id="x", state="completed", age="", host="", message="warning: a", omitted_problems=2
    )

    *_, line = list_runs([run], 100)

    assert line.plain.endswith("warning: a (and 2 more)")


def risky_calls(source: str) -> list[str]:
    """Return the calls and imports in a Python source that could print a text in an unsafe way.

    Unsafe functions interpret the text as markup, or print its control characters.
    """
    risks = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=function):
                name = ast.unparse(function)
                if name.endswith(("Console", "get_console", "from_markup", "render_str")):
                    risks.append(f"{node.lineno} calls {name}")
            case ast.ImportFrom(module=("rich" | "rich.markup" | "rich.logging") as module):
                risks.append(f"{node.lineno} imports from {module}")
    return risks


def test_only_one_module_makes_consoles_or_turns_text_into_markup() -> None:
    calls_by_path = {
        path: risky_calls((ROOT / path).read_text(encoding="utf-8"))
        for path in files(ROOT, "tasks", "flows", "deployments")
    }

    risky = {path: calls for path, calls in calls_by_path.items() if calls}
    # Besides output.py, only two modules may create consoles. Each of these modules may create only
    # one console, a `SafeConsole` that writes into memory.
    in_memory = {"tasks/show/markdown_output.py", "tasks/show/screen.py"}
    assert set(risky) == {"tasks/show/output.py", *in_memory}
    for path in in_memory:
        assert [call.split()[-1] for call in risky[path]] == ["SafeConsole"], path


@pytest.mark.parametrize(
    "source",
    [
        "Console().print(f'{message}')",
        "rich.get_console().print(message)",
        "Text.from_markup(message)",
        "from rich import print",
        "from rich.markup import escape",
    ],
)
def test_risky_calls_are_found(source: str) -> None:
    assert len(risky_calls(source)) == 1
