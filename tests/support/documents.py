"""Parse the Markdown documents of the project: code blocks, links, headings and commands."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^`]*)$")
_HEADING = re.compile(r"^(#{1,6}) (.*)$")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()]*\))?)(?:\s+\"[^\"]*\")?\)")
_CODE = re.compile(r"(`+)(.+?)\1")
#: Matches each character that GitHub removes from a heading to make the heading's anchor.
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced code block of a document."""

    #: Words after the opening fence (three backquotes), for example `yaml run-spec`. The first word
    #: is the language of the block. The second word says how tests check the block.
    info: str
    #: Text of the code block, without its fences.
    text: str
    #: Line number of the opening fence in the document.
    line: int

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentCommand:
    """A shell command in a code block of a document."""

    #: The command. A line that ends with a backslash is joined with the next line.
    command: str
    #: Number of the last line of the command in the document.
    line: int


@dataclass(frozen=True)
class Document:
    """One Markdown file of the project."""

    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(self._read()[0])

    @cached_property
    def prose(self) -> tuple[tuple[int, str], ...]:
        """Line number and text of each line outside of code blocks."""
        return tuple(self._read()[1])

    @cached_property
    def links(self) -> tuple[tuple[int, str], ...]:
        """Line number and target of each link and picture."""
        return tuple(
            (number, match.group(1))
            for number, line in self.prose
            for match in _LINK.finditer(_CODE.sub(lambda m: "`" * len(m.group(0)), line))
        )

    @cached_property
    def codes(self) -> tuple[tuple[int, str], ...]:
        """Line number and content of each pair of backquotes outside of code blocks."""
        return tuple(
            (number, match.group(2).strip())
            for number, line in self.prose
            for match in _CODE.finditer(line)
        )

    @cached_property
    def anchors(self) -> frozenset[str]:
        """Anchors that GitHub makes for the headings. Links name an anchor after `#`."""
        counts: dict[str, int] = {}
        anchors = set()
        for _, line in self.prose:
            if (match := _HEADING.match(line)) is None:
                continue
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match.group(2))
            anchor = _NOT_IN_ANCHORS.sub("", title.strip().lower()).replace(" ", "-")
            count = counts.get(anchor, 0)
            counts[anchor] = count + 1
            anchors.add(f"{anchor}-{count}" if count else anchor)
        return frozenset(anchors)

    def commands(self, *languages: str) -> tuple[DocumentCommand, ...]:
        """Return the commands in all code blocks with one of these languages.

        In blocks of the language `console`, only lines that begin with `$ ` are commands. The other
        lines are output.
        """
        commands = []
        for block in self.blocks:
            if block.language not in languages:
                continue
            joined = ""
            for number, line in enumerate(block.text.split("\n"), start=block.line + 1):
                if block.language == "console" and not joined and not line.startswith("$ "):
                    continue
                joined = f"{joined}{line}" if joined else line.removeprefix("$ ")
                if joined.endswith("\\"):
                    joined = joined.removesuffix("\\").rstrip() + " "
                elif _is_open(joined):
                    joined += "\n"
                else:
                    if joined.strip() and not joined.lstrip().startswith("#"):
                        commands.append(DocumentCommand(command=joined.strip(), line=number))
                    joined = ""
        return tuple(commands)

    def _read(self) -> tuple[list[Block], list[tuple[int, str]]]:
        """Return the code blocks, and the number and text of each line outside of code blocks."""
        blocks = []
        prose = []
        #: Match of the opening fence of the current code block. None outside of code blocks.
        fence: re.Match[str] | None = None
        fence_line = 0
        block_lines: list[str] = []
        for number, line in enumerate(self.text.splitlines(), start=1):
            match = _FENCE.match(line)
            if fence is None and match is None:
                prose.append((number, line))
            elif fence is None:
                fence = match
                fence_line = number
                block_lines = []
            elif match and match["fence"] == fence["fence"] and not match["info"].strip():
                text = "\n".join(
                    block_line.removeprefix(fence["indent"]) for block_line in block_lines
                )
                blocks.append(Block(info=fence["info"].strip(), text=text, line=fence_line))
                fence = None
            else:
                block_lines.append(line)
        assert fence is None, f"{self}: the block of line {fence_line} is never closed"
        return blocks, prose


def _is_open(command: str) -> bool:
    """Return True if a command has an opening quotation mark without a closing one."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def list_documents() -> list[Document]:
    """Return every Markdown file that git tracks or does not ignore, in the order of the paths."""
    listing = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    paths = sorted({ROOT / name for name in listing.stdout.split("\0") if name})
    return [Document(path) for path in paths if path.is_file()]
