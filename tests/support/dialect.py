"""Find phrases of the obscure dialect in which Muster's texts were once written.

    python -m tests.support.dialect tasks/spec docs/queue.md

prints each phrase found with a plainer form, and how often such phrases occur per 1,000 words.

Every construction of the list is frequent in Muster's old texts, with 50 to 70 findings per 1,000
words. It is rare in Prefect, anyio, httpx, Ray and Rich: about 1 finding per 1,000 words. A text
without findings is not yet a clear text. The list only keeps the commonest old habits from coming
back; `tests/unit/test_plain_english.py` applies it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from tests.support.house import ROOT

#: Maximum number of findings per 1,000 words. A text with more findings is not plain.
LIMIT = 2.0


class Kind(Enum):
    """Kind of text in the project. Unclear phrases are counted separately for each kind."""

    #: Docstrings and comments of Python files, comments of TOML and YAML files.
    CODE = "docstrings and comments"
    #: String constants that are sentences: messages, descriptions of spec keys, help texts.
    MESSAGE = "messages"
    #: Markdown files.
    DOCUMENT = "documents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One docstring, comment, message or paragraph."""

    kind: Kind
    #: File, relative to the root of the project.
    path: str
    #: Line of the file in which the passage begins.
    line: int
    #: Text of the passage in one line; code in backquotes is replaced by `CODE`.
    text: str
    #: True for a heading of a document and for a cell in the first row of a table.
    is_heading: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A phrase of a passage that a stranger would have to read twice."""

    passage: Passage
    phrase: str
    hint: str

    def __str__(self) -> str:
        place = f"{self.passage.path}:{self.passage.line}"
        return f"{place}: {self.phrase!r}: {self.hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of the search for unclear phrases in some passages."""

    #: Number of words searched.
    words: int
    findings: tuple[Finding, ...]

    @property
    def rate(self) -> float:
        """Number of unclear phrases per 1,000 words."""
        return 1000 * len(self.findings) / max(1, self.words)

    @property
    def is_plain(self) -> bool:
        """True if the text has at most one unclear phrase, or at most LIMIT per 1,000 words."""
        return len(self.findings) <= 1 or self.rate <= LIMIT


#: Words that follow "what" in an unclear clause. A noun should replace such a clause, for example
#: "leftovers" instead of "what is left".
_CLAUSE = (
    r"(?:is|are|was|were|has|had|have|may|must|can|will|would|does|did|stands?|lies?|waits?|runs?"
    r"|follows|comes?|came|goes|became|becomes|remains|failed|fails|ends?|ended|serves|says?|said"
    r"|reads?|writes?|wrote|asks?|names|holds|makes?|made|needs?|gives?|takes?|starts?|started"
    r"|it|they|he|we|its|their|an?|the|this|that|no|nobody|somebody|one|each|some|every|people"
    r"|Muster|Prefect|Ray)"
)
#: The beginning of a passage or of a sentence.
_START = r"(?:^|(?<=[.;:!?] ))"

#: Question words. A heading may begin with a question word, such as "Why a run waits". In other
#: texts, a clause that begins with a question word is reported as unclear.
_QUESTION_WORDS = frozenset({"what", "why", "who", "whose", "where", "how", "which"})

#: Pattern of each unclear construction, and advice on a plainer form. The patterns have no
#: capturing groups. If several patterns match at one place, only the pattern that comes first in
#: this list counts.
CONSTRUCTIONS: tuple[tuple[str, str], ...] = (
    # Clauses that stand for a noun
    (
        rf"{_START}What {_CLAUSE}\b(?![^.]*\?)",
        'begin with a noun or a verb: not "What is left", but "Leftover processes"',
    ),
    (
        rf"\b[Ww]hat {_CLAUSE}\b(?![^.]*\?)",
        'use a noun: not "what was asked", but "the request"; not "what waits", but "queued runs"',
    ),
    (
        r"\b(?:of|by|in|on|to|with|from|for|and|but|than|at|over|beside) what\b(?! (?:if|about)\b)",
        'use a noun instead of "what ..."',
    ),
    (
        r"\ball that (?:is|are|was|were|has|had|it|they|a|an|can|may|must|runs?|waits?|stands?|goes"
        r"|comes?|follows|nobody|needs?|\w+ed)\b",
        'name the things: not "all that runs", but "all running components"',
    ),
    (
        r"^(?:That|Whether) (?:its?|no|nobody|something|somebody|one|this|there)\b"
        r"|^That (?:an?|the)\b|^(?:Why|Who|Whose) \w+",
        'begin with a noun or a verb: "Reason for ...", "True if ..."',
    ),
    (
        r"^(?:Where|How|Which) (?:its?|they|their|that|those|one|to|such|nobody|somebody|something"
        r"|nothing|an?|the)\b(?![^.]*\?)",
        'begin with the noun that the reader looks for: "Address of ...", "True if ..."',
    ),
    # Conditions
    (
        r"\b(?:None|[Ee]mpty|[Nn]one|[Nn]othing|True|False|zero) where\b",
        'write "None if ...", "an empty string if ..."',
    ),
    (
        r"\b[Ww]here (?:its?|that|there|they|one|none|nobody|no|nothing|some|something|somebody|he"
        r"|an?|another|this|the \w+ (?:is|has|are|was|does|can|ends|says|waits|runs))\b",
        'write "if" for a condition',
    ),
    (
        r"\b(?:so|as) (?:long|many|often|much|few)\b(?! as (?:possible|needed|you))",
        "name the number, the time or the condition",
    ),
    (r"\b[Ll]eft out: ", 'write "Default: ..." or "If omitted, ..."'),
    (r"\bbe (?:it|they)\b|\b[Bb]ut for\b|\bsave for\b", 'write "except", "even if" or "whether"'),
    # Pronouns
    (
        r"\b(?:[Nn]obody|[Ss]omebody|[Aa]nybody|[Ee]verybody)(?:'s)?\b",
        "name the person, process or host",
    ),
    (r"\b(?:[Ww]hoever|[Ww]hatever|[Ww]hichever)\b", 'write "any ...", "even if ..." or a name'),
    (
        r"\bwho (?:has|have|had|can|waits?|was|asks?|reads?|comes?|knows?|sees?|holds?|may"
        r"|needs?)\b",
        'name the person or the process: not "who waits", but "waiting runs"',
    ),
    (
        r"\b(?:[Oo]nes?|[Tt]hose|[Nn]one|[Ss]ome|[Ss]uch|[Aa]ll|[Aa]ny|[Mm]any)"
        r" (?:that|which|whose|who)\b",
        'repeat the noun: not "one that waits", but "a waiting run"',
    ),
    (
        r"\b(?:[Aa]nother|such an?|no such|last|next|other|older|newer|own|same|good|old|real"
        r"|earlier|later|former|living|whole|big|small|long|short) ones?\b(?! (?:of|or)\b)",
        'repeat the noun instead of "one"',
    ),
    (
        rf"{_START}(?:One|Those|Such|None|Nothing) (?:is|are|was|has|where|may|can|goes|in|on|at"
        r"|with|without)\b",
        "repeat the noun instead of a pronoun",
    ),
    (
        r"\b(?:of|by|for|in|than|to|with|from|as|and|or|but|if|where|when|after|that) one"
        r"(?= ?[.,;:)]|$| (?:is|has|was|may|can|does)\b)",
        'repeat the noun instead of "one"',
    ),
    (r"\b(?:has|have|had) (?:none|one)\b(?! (?:of|or|more)\b)", "repeat the noun"),
    (
        r"\b(?:[Nn]othing|[Nn]one|[Mm]uch|[Ll]ittle|[Ee]verything|[Hh]alf)"
        r" of (?:it|them|that|this|these|those)\b",
        "name the thing",
    ),
    (
        r"\b(?:said|known|asked|thought|seen|told|made|heard|left) of\b",
        'say it directly: not "is known of a run", but "the state of a run"',
    ),
    # Relative and inverted clauses
    (
        r"\b(?:of|by|for|to|after|under|upon|beside|without|than) (?:which|whom)\b",
        "make two sentences",
    ),
    (
        rf"{_START}(?:Of|By|Among|Upon|To) (?:its|their|an?|the|which|those|all|each|one|that)"
        r"\b[^.]{0,50},",
        "put the subject first",
    ),
    (
        r"^Of \w+",
        'begin with the noun: not "Of the flow process", but "Process id of the flow process"',
    ),
    (
        r"\b(?:is|are|was|were) to (?:be|have|go|run|end|leave|come|do|start|wait|say|stay|take)\b",
        'write "must", "should" or "will"',
    ),
    (
        r"\bas (?:it|they) (?:(?:was|were)(?= ?[.,;:)]|$)|(?:lies|stands|comes|goes)\b)",
        'write "unchanged" or name the state',
    ),
    # Worn verbs
    (
        r"\b(?:is|are|was|were|be|being|been) told\b|\btells (?!apart\b|the difference\b|you\b)",
        'write "notify", "report" or "distinguish"',
    ),
    (r"\b(?:hear|hears|heard|hearing) (?:of|from|that)\b", 'write "notice" or "receive"'),
    (r"\bha(?:s|ve|d) it that\b", "name the source and the fact"),
    (r"\b(?:go|goes|going|went|gone) on\b", 'write "continue" or "resume"'),
    (r"\btried (?:again|anew)\b", 'write "retry"'),
    (
        r"\b(?:looks?|looked|looking) (?:at|after)\b|\bask(?:s|ed) (?:for|after)\b",
        'write "check", "read", "request"',
    ),
    (r"\b(?:a|each|next|last|one|two|first|every) looks?\b", 'write "pass", "check" or "sample"'),
    (
        r"\b(?:is|are|was|were|has|have|been) left\b"
        r"(?! (?:out|side|behind|empty|blank|with|over|open))",
        'write "remains", "leftover" or "unchanged"',
    ),
    (r"\b(?:stands|stood|lies)\b(?! for\b)", 'write "is"'),
    (r"\b(?:comes?|came) (?:to|of|upon)\b", 'write "becomes", "results from" or "reaches"'),
    (r"\bsa(?:y|ys|id) (?:so|nothing|no)\b", "state the fact"),
    (r"\b(?:be|is|are|was|were) had\b", 'write "is available"'),
    # Worn words
    (
        r"\b(?:anew|nought|upon|thereof|therein|whence|hence|thence|lest|wherever|meanwhile|beside)\b",
        "write the everyday word",
    ),
    (r"\b(?:[Ii]n words|for ever|under way|on (?:its|their) way)\b", "write the everyday word"),
    (r"\bof (?:its|their) own\b", 'write "its own ..."; not "a session of its own"'),
)


@cache
def _any_construction() -> re.Pattern[str]:
    """Return a pattern that matches any phrase of CONSTRUCTIONS.

    Group 1 of the pattern matches the first construction, group 2 the second, and so on.
    """
    return re.compile("|".join(f"({pattern})" for pattern, _ in CONSTRUCTIONS))


def find_phrases(passage: Passage) -> list[Finding]:
    """Return the phrases of a passage that match CONSTRUCTIONS, in the order of the text.

    In headings, phrases that begin with a question word are not reported.
    """
    findings = []
    for match in _any_construction().finditer(passage.text):
        assert match.lastindex is not None
        if passage.is_heading and not _QUESTION_WORDS.isdisjoint(match[0].lower().split()):
            continue
        _, hint = CONSTRUCTIONS[match.lastindex - 1]
        findings.append(Finding(passage=passage, phrase=match[0].strip(), hint=hint))
    return findings


def examine(passages: Iterable[Passage]) -> Report:
    """Count the words of passages, and find the unclear phrases that match CONSTRUCTIONS."""
    words = 0
    findings: list[Finding] = []
    for passage in passages:
        words += len(re.findall(r"[A-Za-z][\w'-]*", passage.text))
        findings += find_phrases(passage)
    return Report(words=words, findings=tuple(findings))


def read_passages(place: Path) -> list[Passage]:
    """Return all docstrings, comments, messages and paragraphs of a file or of a folder's files."""
    paths = [place] if place.is_file() else sorted(place.rglob("*"))
    return [passage for path in paths if path.is_file() for passage in _passages_of(path)]


def _passages_of(path: Path) -> Iterator[Passage]:
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    match path.suffix:
        case ".py":
            texts = _texts_of_python(path.read_text(encoding="utf-8"))
        case ".toml" | ".yaml":
            texts = _texts_of_config(path.read_text(encoding="utf-8"))
        case ".md":
            for line, text, is_heading in _texts_of_markdown(path.read_text(encoding="utf-8")):
                yield Passage(
                    kind=Kind.DOCUMENT,
                    path=name,
                    line=line,
                    text=_without_code(text),
                    is_heading=is_heading,
                )
            return
        case _:
            return
    for kind, line, text in texts:
        yield Passage(kind=kind, path=name, line=line, text=_without_code(text))


def _without_code(text: str) -> str:
    """Join the lines of a text, and replace each piece of code with the word `CODE`."""
    return " ".join(re.sub(r"``?[^`]*``?", "CODE", text).split())


def _texts_of_python(source: str) -> Iterator[tuple[Kind, int, str]]:
    tree = ast.parse(source)
    docstrings = {id(node): node for node in _docstrings(tree)}
    for node in docstrings.values():
        yield Kind.CODE, node.lineno, node.value
    for line, text in _comments(source):
        yield Kind.CODE, line, text

    parts_of_fstrings = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=parts):
                text = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts
                )
            case ast.Constant(value=str(text)):
                if id(node) in docstrings or id(node) in parts_of_fstrings:
                    continue
            case _:
                continue
        if _is_sentence(text):
            yield Kind.MESSAGE, node.lineno, text


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.Module(body=[ast.Expr(value=ast.Constant(value=str()) as docstring), *_])
                | ast.ClassDef(body=[ast.Expr(value=ast.Constant(value=str()) as docstring), *_])
                | ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str()) as docstring), *_])
                | ast.AsyncFunctionDef(
                    body=[ast.Expr(value=ast.Constant(value=str()) as docstring), *_]
                )
            ):
                yield docstring


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment as a pair: the number of its first line, and its text.

    Comments on consecutive lines count as one comment.
    """
    first = last = 0
    words: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_directive = re.match(r"#!|# ?(?:noqa|type:|pragma|ruff|mypy|fmt)", token.string)
        if token.type != tokenize.COMMENT or is_directive:
            continue
        if words and token.start[0] != last + 1:
            yield first, " ".join(words)
            words = []
        if not words:
            first = token.start[0]
        last = token.start[0]
        words.append(token.string.lstrip("#: "))
    if words:
        yield first, " ".join(words)


def _is_sentence(text: str) -> bool:
    """Return True if a string constant is prose rather than code, a path or a pattern."""
    prose = re.sub(r"`[^`]*`|\$\{[^}]*\}", "", text)
    plain = len(re.findall(r"[A-Za-z ,.']", prose))
    return text.strip().count(" ") >= 3 and plain >= 0.88 * len(prose)


def _texts_of_config(source: str) -> Iterator[tuple[Kind, int, str]]:
    first = 0
    words: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        match = re.match(r"\s*#+ ?(.*)", line) or re.search(r" # (.*)", line)
        if match is not None:
            first = first if words else number
            words.append(match[1])
        elif words:
            yield Kind.CODE, first, " ".join(words)
            words = []
        for text in re.findall(r'"([^"]+)"', line):
            if match is None and _is_sentence(text):
                yield Kind.MESSAGE, number, text


def _texts_of_markdown(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the paragraphs, headings, list items and table cells outside of code blocks.

    Yields:
        Number of the first line, the text, and a flag. The flag is True for headings and for the
        first row of a table.
    """
    is_code = False
    first = 0
    words: list[str] = []
    lines = [*source.splitlines(), ""]
    for number, line in enumerate(lines, start=1):
        is_fence = line.lstrip().startswith(("```", "~~~"))
        is_end = is_fence or not line.strip() or re.match(r"\s*(?:[-*#|>]|\d+\.) ?", line)
        if words and is_end:
            yield first, " ".join(words), lines[first - 1].startswith("#")
            words = []
        if is_fence:
            is_code = not is_code
        elif line.lstrip().startswith("|"):
            is_first_row = number < len(lines) and lines[number].lstrip().startswith("| ---")
            for cell in line.strip().strip("|").split("|"):
                yield number, cell, is_first_row
        elif line.strip() and not is_code:
            first = first if words else number
            words.append(re.sub(r"^\s*(?:[-*#>]+|\d+\.) ", "", line))


def main(places: list[str]) -> None:
    """Print the unclear phrases in each folder or file, and their number per 1,000 words.

    Args:
        places: Paths of the folders and files. If empty, the current directory.
    """
    for place in places or ["."]:
        passages = read_passages(Path(place).resolve())
        for kind in Kind:
            report = examine(passage for passage in passages if passage.kind is kind)
            if not report.words:
                continue
            for finding in report.findings:
                print(finding)
            print(
                f"{place}, {kind.value}: {len(report.findings)} in {report.words} words,"
                f" {report.rate:.1f} per 1,000"
            )
            for hint, count in Counter(finding.hint for finding in report.findings).most_common(5):
                print(f"  {count:4} {hint}")


if __name__ == "__main__":
    main(sys.argv[1:])
