"""Causes of failure, recognised by the text a component leaves.

What is a cause is believed before what follows from it, wherever the two stand, since the lines of
processes interleave; among causes the first in the text. What was survived is no cause: a warning,
something that was tried again, an error after which training went on, an error that the same
process outlived to end with another one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.record.cause_rules import Role, Rule
from tasks.record.log_lines import LogLine, read_lines, survived_until
from tasks.record.rules_machines import MACHINES
from tasks.record.rules_programs import PROGRAMS

#: How much of a log's end is looked at.
LOOKBACK_BYTES = 200_000
#: How much of a line is kept.
_LINE_LENGTH = 500

#: Where two rules of a role match in the same line, the one that stands first is believed.
RULES: tuple[Rule, ...] = (*MACHINES, *PROGRAMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The rule that matched, and the line it matched in."""

    rule: Rule
    line: str


@dataclass(frozen=True, slots=True)
class _Evidence:
    rule: Rule
    #: Of the rule, in its table.
    order: int
    #: Of the line, in the text.
    index: int
    #: Where in what the line says.
    at: int
    line: LogLine

    @property
    def weight(self) -> tuple[bool, bool, int, int, int]:
        """The least is believed."""
        role = self.rule.role
        return (role >= Role.CASCADE, self.line.is_caught, role, self.index, self.order)


def find_cause(text: str, rules: Sequence[Rule] = RULES) -> Cause | None:
    """The rule that explains the end that the text tells of, and its line; None: nothing does."""
    found = [*_evidence(read_lines(text), rules)]
    found = [*_without_wrapped(_without_outlived(found))]
    if not found:
        return None
    first = min(found, key=lambda evidence: evidence.weight)
    return Cause(rule=first.rule, line=_excerpt(first))


def _evidence(lines: list[LogLine], rules: Sequence[Rule]) -> Iterator[_Evidence]:
    # One search of the whole per rule: a search of each line by each rule takes seconds where a
    # log is all short lines.
    whole = "\n".join(line.text for line in lines)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.text) + 1)
    survived = starts[survived_until(lines)]
    for order, rule in enumerate(rules):
        seen = -1
        for match in rule.pattern.finditer(whole, survived):
            index = bisect_right(starts, match.start()) - 1
            line = lines[index]
            if index == seen or (line.is_mention and not rule.at_any_level):
                continue
            seen = index
            yield _Evidence(rule, order, index, match.start() - starts[index], line)


def _without_outlived(found: list[_Evidence]) -> Iterator[_Evidence]:
    """Leaves out errors of a process that went on to end with another traceback.

    Not causes: a worker often logs what it died of, and then raises something else.
    """
    last: dict[tuple[str, Role], int] = {}
    errors = (Role.ERROR, Role.EXCEPTION)
    for evidence in found:
        line, role = evidence.line, evidence.rule.role
        if role in errors and line.traceback and not line.is_caught:
            key = (line.process, role)
            last[key] = max(last.get(key, 0), line.traceback)
    starts: dict[int, int] = {}
    for evidence in found:
        number = evidence.line.traceback
        starts[number] = min(starts.get(number, evidence.index), evidence.index)
    for evidence in found:
        line = evidence.line
        end = last.get((line.process, evidence.rule.role))
        if evidence.rule.role in errors and end is not None and evidence.index < starts[end]:
            continue
        yield evidence


def _without_wrapped(evidence: Iterator[_Evidence]) -> Iterator[_Evidence]:
    """Leaves out errors without a name that only pass on what follows from something else."""
    found = [*evidence]
    cascades = [e for e in found if e.rule.role in (Role.CASCADE, Role.WRAPPER)]
    lines = {e.index for e in cascades}
    tracebacks = {e.line.traceback for e in cascades} - {0}
    for e in found:
        is_wrapper = e.index in lines or e.line.traceback in tracebacks
        if not (e.rule.role is Role.EXCEPTION and is_wrapper):
            yield e


def _excerpt(evidence: _Evidence) -> str:
    raw = evidence.line.raw
    at = len(raw) - len(evidence.line.text) + evidence.at
    begin = 0 if at < _LINE_LENGTH // 2 else at - _LINE_LENGTH // 5
    return raw[begin : begin + _LINE_LENGTH].strip()


def read_tail(log: Path, limit_bytes: int = LOOKBACK_BYTES) -> str:
    """The end of a log, empty when it can't be read; bytes that are not UTF-8 are replaced."""
    try:
        with log.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - limit_bytes))
            return f.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def last_lines(text: str, count: int = 20, line_length: int = 400) -> str:
    """The last lines that are not blank, long ones cut."""
    lines = [line.rstrip()[:line_length] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])


_ERROR_LINE = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)\b.*)$")


def last_error(text: str) -> str:
    """The line with which Python's last traceback ends; empty where there is none."""
    lines = reversed(read_lines(text))
    return next((line.text[:_LINE_LENGTH] for line in lines if _ERROR_LINE.match(line.text)), "")
