"""The documents of the project as tests see them: blocks, links, headings, commands."""

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
#: Letters and what GitHub keeps of a heading for its anchor.
_DROPPED = re.compile(r"[^\w\- ]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    #: `yaml run-spec`: the language, and what tests are to make of it.
    info: str
    text: str
    #: Of its first line, in the document.
    line: int

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A command of a document."""

    command: str
    line: int


@dataclass(frozen=True)
class Document:
    """One Markdown file."""

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
        """Its lines outside of blocks, with their numbers."""
        return tuple(self._read()[1])

    @cached_property
    def links(self) -> tuple[tuple[int, str], ...]:
        """The targets of its links and pictures, with their lines."""
        return tuple(
            (number, match.group(1))
            for number, line in self.prose
            for match in _LINK.finditer(_CODE.sub(lambda m: "`" * len(m.group(0)), line))
        )

    @cached_property
    def codes(self) -> tuple[tuple[int, str], ...]:
        """What stands in backticks, with its lines."""
        return tuple(
            (number, match.group(2).strip())
            for number, line in self.prose
            for match in _CODE.finditer(line)
        )

    @cached_property
    def anchors(self) -> frozenset[str]:
        """Those of its headings, as GitHub makes them."""
        seen: dict[str, int] = {}
        found = set()
        for _, line in self.prose:
            if (match := _HEADING.match(line)) is None:
                continue
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match.group(2))
            anchor = _DROPPED.sub("", title.strip().lower()).replace(" ", "-")
            count = seen.get(anchor, 0)
            seen[anchor] = count + 1
            found.add(f"{anchor}-{count}" if count else anchor)
        return frozenset(found)

    def commands(self, *languages: str) -> tuple[Said, ...]:
        """What its blocks of these languages tell to type; of `console`, what stands after `$ `."""
        found = []
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
                        found.append(Said(command=joined.strip(), line=number))
                    joined = ""
        return tuple(found)

    def _read(self) -> tuple[list[Block], list[tuple[int, str]]]:
        blocks, prose = [], []
        fence: re.Match[str] | None = None
        began, inside = 0, list[str]()
        for number, line in enumerate(self.text.splitlines(), start=1):
            match = _FENCE.match(line)
            if fence is None and match is None:
                prose.append((number, line))
            elif fence is None:
                fence, began, inside = match, number, []
            elif match and match["fence"] == fence["fence"] and not match["info"].strip():
                text = "\n".join(one.removeprefix(fence["indent"]) for one in inside)
                blocks.append(Block(info=fence["info"].strip(), text=text, line=began))
                fence = None
            else:
                inside.append(line)
        assert fence is None, f"{self}: the block of line {began} is never closed"
        return blocks, prose


def _is_open(command: str) -> bool:
    """Whether a quotation goes on in the next line."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def documents() -> list[Document]:
    """Every Markdown file that git tracks or would add."""
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
