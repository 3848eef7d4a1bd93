"""Find the cause of a failure in the log of a component.

The rules in `cause_rules.toml` recognise error messages. If several rules match, the role of each
rule decides: an error with the role CAUSE is preferred to its consequences. The position in the log
decides only between rules with the same role, because several processes write into one log.

Errors that the training survived are ignored: warnings, retried operations, errors followed by
further training steps, and errors followed by a later traceback of the same process.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tasks.record.log_bound import ZEROS
from tasks.spec.failure_kinds import FailureKind


class Role(IntEnum):
    """Position of an error message in a chain of failures, from the cause to its consequences.

    If rules match several lines of a log, the line whose rule has the lowest role names the cause.
    """

    #: Message about the failure that caused all others, such as full memory, a full disk, a broken
    #: device or missing GPUs.
    CAUSE = 0
    #: Message about a specific error, which may be the consequence of another error.
    ERROR = 1
    #: Message of any exception at the end of a traceback.
    EXCEPTION = 2
    #: Message in which a process reports that another process died or does not respond.
    CASCADE = 3
    #: General message that only says that another program, or another part of the same program,
    #: failed.
    WRAPPER = 4
    #: Rule that is used only if no other rule matches.
    LAST = 5


def _compile_alternatives(patterns: object) -> object:
    if not isinstance(patterns, list):
        raise TypeError("the key `patterns` of a cause rule must be a list")
    return re.compile("|".join(patterns), re.MULTILINE)


class Rule(BaseModel):
    """Rule that recognises an error message in a log and assigns a kind of failure to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Name of the rule's table in the TOML file.
    id: str
    kind: FailureKind
    role: Annotated[Role, BeforeValidator(Role.__members__.get)]
    #: Pattern of the error message. The search in a log line skips the time, log level and process
    #: name at the beginning of the line. The pattern must not match across lines. The time for a
    #: search must be proportional to the length of the line.
    pattern: Annotated[re.Pattern[str], BeforeValidator(_compile_alternatives)] = Field(
        alias="patterns"
    )
    #: Advice for the user, or an empty string.
    hint: str = ""
    #: Origin of the error message: a source file, an issue, or a document.
    source: str
    #: Version of the program that prints the error message. "any" if the message is the same in all
    #: recent versions.
    seen_in: str
    #: True if the rule also applies to log lines with the level WARNING. Example: Ray and the
    #: kernel report dead processes and nodes at this level.
    at_any_level: bool = False


def read_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules in a TOML text. Each table in the text is a rule.

    Raises:
    ValueError: A rule is invalid. The message names the rule.
    """
    rules = []
    for name, row in tomllib.loads(text).items():
        try:
            rules.append(Rule.model_validate({"id": name, **row}))
        except (ValidationError, TypeError, re.error) as error:
            raise ValueError(f"cause rule {name}: {error}") from error
    return tuple(rules)


#: All rules. If two rules with the same role match in the same log line, the earlier rule names the
#: cause.
RULES = read_rules(Path(__file__).with_name("cause_rules.toml").read_text(encoding="utf-8"))

#: Length of the shortest error message, "Killed", in characters. Shorter log lines are skipped.
_SHORTEST_LINE = 6
#: An error was not fatal if at least this number of training steps are completed after the error.
#: Fewer steps prove nothing: other processes may complete a few steps after a fatal error.
STEPS_OF_SURVIVAL = 5

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Matches the times, log levels and process names at the beginning of a log line.
_PREFIX = re.compile(
    r"""(?:
      \((?=[^()\n]{0,80}(?:pid=|ip=|raylet|autoscaler))[^()\n]{1,160}\)\ ?  # Ray's, vLLM's
    | \[[^\[\]\n]{1,160}\]:?\ ?                                  # [rank3]: [E602 11:17:52 x.cpp:7]
    | \d[\d:.,TZ/+-]{3,40}(?:\ *(?=[\[(|A-Z-])|\ ?)             # 2025-04-01 05:53:13,120
    | (?:DEBUG|INFO|NOTICE|SUCCESS|WARNING|WARN|ERROR|CRITICAL|FATAL|stderr|stdout)
      (?=[\ :|]):?\ {0,4}
    | [|-]\ +
    | [\w.-]{1,60}\ +\|\                                             # compose: vllm-1  |
    | (?![\w.]*(?:Error|Exception):)[\w.-]{1,60}:\                  # srun -l, pdsh: node1:
      (?=\[rank|Traceback|\ \ |[\w.]{1,120}Error:)
    )+""",
    re.VERBOSE,
)
_QUIET = re.compile(r"\b(?:DEBUG|INFO|NOTICE|SUCCESS|WARNING|WARN)\b|\[[IW]\d{0,4} |[\[,] ?[IW] \d")
_LOUD = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")
#: Matches lines that report no failure, such as NCCL information, a Python warning, or an operation
#: that is being retried. The pattern must not match "Max retries exceeded" and "after 5 retries",
#: because these messages do report a failure.
_HARMLESS = re.compile(
    r"NCCL INFO|\b\w{0,40}Warning: |^wandb: WARNING|^\+ "
    r"|(?i:\bretrying\b|\bwill (?:be )?retr|\bretry loop\b|\breconnecting\b|\bfalling back\b"
    r"|\btrying (?:port|the next|another)\b|\bnon-fatal\b)"
)
_PROCESS = re.compile(r"pid=\d+|\[rank\d+\]|\bTP\d+\b")
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = re.compile(r"^(?:During handling of the above|The above) exception")
#: Matches a line before the traceback of an exception that was caught. The process continues after
#: such an exception.
_CAUGHT = re.compile(
    r"^Exception ignored in|exception was never retrieved|^--- Logging error ---"
    r"|^Exception in (?:ASGI application|callback|thread)"
)
_STEP = re.compile(
    r"(?:^|[\s{'\"\[(|/,])(?:global_?step|train(?:ing)?[ _]step|step|iteration|iter)['\"]?"
    r"\s{0,3}[:= ]\s{0,9}(\d{1,9})\b",
    re.IGNORECASE,
)
#: Matches a progress bar of the training, or a progress bar without a name. Progress bars for
#: loading or generation do not show that the training continues.
_BAR = re.compile(
    r"^\s{0,9}(?:\S{0,20}(?:train|epoch|step|progress)[^|\n]{0,40})?\d{1,3}%\|[^|\n]{0,300}\|\s{0,5}(\d+)/\d",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log."""

    #: The line as it was printed, without colour codes.
    raw: str
    #: The line without the times, log levels and process names at its beginning. Empty if the line
    #: is source code in a traceback.
    text: str
    #: Process that printed the line, such as `pid=812` or `[rank3]`, or an empty string.
    process: str
    #: True if the line reports no failure, but only information, a warning or a retried operation.
    is_mention: bool
    #: Serial number of a traceback in the log, if this line is the first line of the traceback or
    #: contains the exception message. Any other line has the number 0. All tracebacks of a chain of
    #: exceptions have the same number.
    traceback: int = 0
    #: True if the line belongs to a traceback of an exception that was caught.
    is_caught: bool = False


def read_lines(text: str) -> list[LogLine]:
    """Return the lines of a log, without lines that are too short for an error message.

    A progress bar is printed many times in one line. Each printed state counts as a line of its
    own.
    """
    parsers: defaultdict[str, _TracebackParser] = defaultdict(partial(_TracebackParser, count(1)))
    #: Mapping from a process to the index, in `lines`, of the last line that the process printed.
    last_index: dict[str, int] = {}
    lines: list[LogLine] = []
    for raw in _COLOURS.sub("", text).splitlines():
        if len(raw) < _SHORTEST_LINE or raw.isspace():
            continue
        prefix, message = _split_prefix(raw)
        process_match = _PROCESS.search(prefix) if prefix else None
        process = process_match.group() if process_match else ""
        parser = parsers[process]
        traceback, message = parser.parse_line(message)

        # If a process prints "Retrying ..." after an error, the error was not fatal. So set
        # `is_mention` for the line with the error.
        previous = lines[last_index[process]] if process in last_index else None
        is_retry = message.startswith(("Retrying", "retrying"))
        if is_retry and previous and not previous.traceback:
            lines[last_index[process]] = replace(previous, is_mention=True)

        last_index[process] = len(lines)
        is_quiet = bool(prefix) and bool(_QUIET.search(prefix)) and not _LOUD.search(prefix)
        lines.append(
            LogLine(
                raw=raw,
                text=message,
                process=process,
                is_mention=is_quiet or bool(_HARMLESS.search(message, 0, 2000)),
                traceback=traceback,
                is_caught=bool(traceback) and parser.is_caught,
            )
        )
    return lines


def _split_prefix(raw: str) -> tuple[str, str]:
    """Split a log line into its prefix and its message.

    The prefix contains times, log levels and process names.
    """
    match = _PREFIX.match(raw)
    end = match.end() if match else 0
    return raw[:end], raw[end:]


class _TracebackParser:
    """Finds tracebacks in the log lines of one process.

    The lines are passed to `parse_line` one after the other.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        """
        Args:
            numbers: Yields the number for each new traceback. The parsers of all processes whose
                lines are in the same log share this iterator.
        """
        #: True if the exception of the last traceback was caught.
        self.is_caught = False
        self._numbers = numbers
        self._number = 0
        self._is_inside = False
        #: True if the next traceback belongs to the same chain of exceptions as the last traceback.
        self._is_chained = False
        #: True if an earlier line says that the next traceback belongs to a caught exception.
        self._is_next_caught = False

    def parse_line(self, message: str) -> tuple[int, str]:
        """Read the next line of the process.

        Args:
            message: The line without the times, log levels and process names at its beginning.

        Returns:
            A pair:

            - Serial number of a traceback, if this line is the first line of the traceback or
              contains the exception message. 0 for any other line.
            - The line. An empty string if the line is source code in a traceback.
        """
        if _TRACEBACK in message:
            if not self._is_chained:
                self._number = next(self._numbers)
                self.is_caught = self._is_next_caught
            self._is_inside = True
            self._is_chained = False
            self._is_next_caught = False
            return self._number, message
        # Skip source code, because it is no message. Rich draws a frame around the source code in a
        # traceback.
        if message[:1] in ("│", "╭", "╰", "❱"):
            return 0, ""
        if self._is_inside:
            if message.startswith(("  ", "\t", "File ", "^")):
                return 0, ""
            self._is_inside = False
            return self._number, message
        if _CHAINED.match(message):
            self._is_chained = True
        elif _CAUGHT.search(message, 0, 200):
            self._is_next_caught = True
        return 0, message


def _end_of_survived_part(steps: Iterable[tuple[int, int | None]]) -> int:
    """Return the first position in a log at which an error may have been fatal.

    Each earlier error was not fatal, because the training completed at least STEPS_OF_SURVIVAL
    steps after the error.

    Args:
        steps: Position and training step of each log line. The last line of the log comes first.
            The step is None if the line reports no step.

    Returns:
        The position, or 0 if the log reports fewer than STEPS_OF_SURVIVAL completed steps.
    """
    advances = 0
    later_position = 0
    later_step = -1
    for position, step in steps:
        if step is None:
            continue
        if later_step > step:
            advances += 1
        if advances == STEPS_OF_SURVIVAL:
            return later_position
        later_position = position
        later_step = step
    return 0


def _step_in(message: str) -> int | None:
    """Return the training step that a log line reports, or None if it reports no step.

    Args:
        message: The line without the times, log levels and process names at its beginning.
    """
    match = _BAR.match(message) if "%|" in message else _STEP.search(message, 0, 300)
    return int(match.group(1)) if match is not None else None


#: Number of bytes at the end of a log that are always searched for an error message.
LOOKBACK_BYTES = 200_000
#: Number of bytes at the end of a log that are searched for the last training steps.
_STEPS_WITHIN_BYTES = 32 << 20
#: The search for the last training steps stops after this number of lines that may report a step.
_MAX_STEPS = 50_000
_CHUNK_BYTES = 1 << 20
#: Largest number of bytes that are kept from the middle part of a log. The middle part begins at
#: the lines with the last training steps. The middle part ends `LOOKBACK_BYTES` before the end of
#: the log.
_MIDDLE_BYTES = 600_000
#: Largest number of similar log lines that are kept. Lines are similar if they differ only in their
#: numbers.
_MAX_SIMILAR_LINES = 100
#: Length in characters after which a log line is cut.
_LINE_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Cause:
    """A log line that matches a rule and may show the cause of a failure."""

    rule: Rule
    #: Position of the rule in the list of rules.
    order: int
    #: Index of the line in the log.
    index: int
    #: Position of the match in the text of the line.
    position: int
    #: The line that the rule matched.
    log_line: LogLine

    @property
    def line(self) -> str:
        """The log line as it was printed. Of a long line, only the part around the match is
        returned.
        """
        raw = self.log_line.raw
        match_position = len(raw) - len(self.log_line.text) + self.position
        begin = 0
        if match_position >= _LINE_LENGTH // 2:
            begin = match_position - _LINE_LENGTH // 5
        return raw[begin : begin + _LINE_LENGTH].strip()

    @property
    def weight(self) -> tuple[bool, bool, int, int, int]:
        """Sort key: among all matches in a log, the match with the lowest key names the cause."""
        role = self.rule.role
        return (role >= Role.CASCADE, self.log_line.is_caught, role, self.index, self.order)


def find_cause(
    text: str,
    rules: Sequence[Rule] = RULES,
    *,
    is_consequence: Callable[[str], bool] | None = None,
) -> Cause | None:
    """Return the log line that best explains why a component failed, or None if no rule matches.

    Args:
        text: The end of the component's log.
        rules: Rules in the order of their priority.
        is_consequence: Function that returns True if a line only reports a consequence of the
            failure. Such a line and its traceback are ignored, unless a rule with the role CAUSE
            matches the line. If None, no line is ignored.
    """
    matches = [*_find_matches(read_lines(text), rules)]
    if is_consequence is not None:
        matches = _drop_consequences(matches, is_consequence)
    matches = [*_drop_survived_errors(matches)]
    return min(_drop_wrappers(matches), key=lambda cause: cause.weight, default=None)


def _find_matches(lines: list[LogLine], rules: Sequence[Rule]) -> Iterator[Cause]:
    """Yield the matches of all rules. A rule has at most one match in each line.

    If the training continued after an error, the part of the log up to this error is skipped.
    """
    # Search the whole text once for each rule. In a log with many short lines, searching each line
    # separately would take seconds.
    text = "\n".join(line.text for line in lines)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.text) + 1)

    steps = ((index, _step_in(lines[index].text)) for index in reversed(range(len(lines))))
    search_from = starts[_end_of_survived_part(steps)]
    for order, rule in enumerate(rules):
        previous_index = -1
        for match in rule.pattern.finditer(text, search_from):
            index = bisect_right(starts, match.start()) - 1
            line = lines[index]
            if index == previous_index or (line.is_mention and not rule.at_any_level):
                continue
            previous_index = index
            yield Cause(rule, order, index, match.start() - starts[index], line)


def _drop_consequences(matches: list[Cause], is_consequence: Callable[[str], bool]) -> list[Cause]:
    """Return the matches without those that only report a consequence of the failure.

    Matches of rules with the role CAUSE are always kept. Any other match is omitted if its line, or
    another matching line of its traceback, only reports a consequence.

    Args:
        matches: The log lines that match a rule.
        is_consequence: Function that returns True if a line only reports a consequence.
    """
    lines: set[int] = set()
    tracebacks: set[int] = set()
    for match in matches:
        if match.rule.role is not Role.CAUSE and is_consequence(match.log_line.raw):
            lines.add(match.index)
            tracebacks.add(match.log_line.traceback)
    tracebacks.discard(0)
    return [
        match
        for match in matches
        if match.rule.role is Role.CAUSE
        or (match.index not in lines and match.log_line.traceback not in tracebacks)
    ]


def _drop_survived_errors(matches: list[Cause]) -> Iterator[Cause]:
    """Yield the matches, except errors after which the process continued.

    A process has continued after an error if it prints another traceback later. For example, a
    worker often logs an error, continues, and later fails with another error. Matches of rules with
    the role CAUSE are always kept.
    """
    #: Mapping from a process and a role to the serial number of the last traceback that the process
    #: printed and that matches a rule with this role. Tracebacks of caught exceptions do not count.
    last_tracebacks: dict[tuple[str, Role], int] = {}
    for match in matches:
        line = match.log_line
        role = match.rule.role
        is_error = role in (Role.ERROR, Role.EXCEPTION)
        if is_error and line.traceback and not line.is_caught:
            key = (line.process, role)
            last_tracebacks[key] = max(last_tracebacks.get(key, 0), line.traceback)

    #: Mapping from the number of a traceback to the index of its first matching line.
    first_lines: dict[int, int] = {}
    for match in matches:
        number = match.log_line.traceback
        first_lines[number] = min(first_lines.get(number, match.index), match.index)

    for match in matches:
        last_traceback = last_tracebacks.get((match.log_line.process, match.rule.role))
        if last_traceback is None or match.index >= first_lines[last_traceback]:
            yield match


def _drop_wrappers(matches: list[Cause]) -> Iterator[Cause]:
    """Yield the matches, except general exceptions that only report another failure.

    An exception is omitted if its line or traceback also matches a rule with the role CASCADE or
    WRAPPER.
    """
    consequences = [match for match in matches if match.rule.role in (Role.CASCADE, Role.WRAPPER)]
    lines = {match.index for match in consequences}
    tracebacks = {match.log_line.traceback for match in consequences} - {0}
    for match in matches:
        is_wrapper = match.index in lines or match.log_line.traceback in tracebacks
        if not (match.rule.role is Role.EXCEPTION and is_wrapper):
            yield match


def read_tail(log: Path, limit_bytes: int = LOOKBACK_BYTES) -> str:
    """Return the last bytes of a log as text, or an empty string if the log cannot be read.

    Bytes that are not valid UTF-8 are replaced.
    """
    try:
        with log.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - limit_bytes))
            return _decode(f.read())
    except OSError:
        return ""


def read_since_step(log: Path, *, since: int = 0, until: int | None = None) -> str:
    """Return the part of a log that may show the cause of a failure.

    This part begins at the last training steps and ends at the end of the log. If this part is
    long, only some of many similar lines are returned.

    If the log shows no training steps, only the end of the log is returned. Earlier lines are added
    if the end shows only consequences of another failure.

    Args:
        log: The log file.
        since: Size of the log in bytes at the time of one of the last training steps, or 0 if
            unknown.
        until: Position in bytes at which reading ends, or None for the end of the log.

    Returns:
        At least the end of the log, or an empty string if the log cannot be read. Bytes that are
        not valid UTF-8 are replaced.
    """
    try:
        with log.open("rb") as f:
            size = f.seek(0, 2)
            end = size if until is None else min(size, until)
            tail_start = max(0, end - LOOKBACK_BYTES)
            f.seek(tail_start)
            tail = f.read(end - tail_start)

            limit = max(0, end - _STEPS_WITHIN_BYTES)
            steps = islice(_steps_backwards(f, end, limit), _MAX_STEPS)
            begin = max(since, _end_of_survived_part(steps))

            middle = b""
            if begin < tail_start:
                cause = None if begin else find_cause(tail.decode("utf-8", errors="replace"))
                has_only_consequences = bool(
                    cause and cause.rule.role in (Role.CASCADE, Role.WRAPPER)
                )
                if begin or has_only_consequences:
                    middle = _read_dissimilar_lines(f, max(begin, limit), tail_start)
            return _decode(middle + tail)
    except OSError:
        return ""


def _decode(data: bytes) -> str:
    """Return a part of a log as text, without the zero bytes that replace deleted lines."""
    return ZEROS.sub(b"\n", data).decode("utf-8", errors="replace")


#: Matches the part of a line that may contain a training step. This part begins with a word such as
#: `step`, or with the characters `%|` of a progress bar. The part continues to the end of the line.
_STEP_MARK = re.compile(rb"(?:(?i:step|iter)|%\|)[^\r\n]*")
_LINE_OF_TEXT = re.compile(rb"[^\r\n]{%d,}" % _SHORTEST_LINE)
_NUMBER = re.compile(rb"0x[0-9a-fA-F]+|\d+")


def _steps_backwards(f: BinaryIO, end: int, begin: int) -> Iterator[tuple[int, int | None]]:
    """Search a part of a log backwards, and yield each line that may report a training step.

    Args:
        f: The log file.
        end: Offset in bytes of the end of the searched part.
        begin: Offset in bytes of the beginning of the searched part.

    Yields:
        The offset of the line, and the training step in the line. The step is None if the line
        reports no step.
    """
    while end > begin:
        chunk_start = max(begin, end - _CHUNK_BYTES)
        f.seek(chunk_start)
        chunk = f.read(end - chunk_start)
        # Read chunks from the end of the file to its beginning. A chunk may begin in the middle of
        # a line, so skip the first line of the chunk. The chunk that is read next extends to the
        # end of the skipped line, and contains the complete line. If a line is longer than a chunk,
        # each chunk of the line counts as a line of its own.
        first_line = chunk.find(b"\n", 0, -1) + 1 if chunk_start > begin else 0

        lines: dict[int, bytes] = {}
        line_start = first_line
        searched = first_line
        for mark in _STEP_MARK.finditer(chunk, first_line):
            line_ends = (chunk.rfind(newline, searched, mark.start()) for newline in (b"\n", b"\r"))
            line_start = max(line_start, *(line_end + 1 for line_end in line_ends))
            searched = mark.start()
            lines[line_start] = chunk[line_start : min(mark.end(), line_start + _LINE_LENGTH)]

        for line_start, line in reversed(lines.items()):
            text = _COLOURS.sub("", line.decode("utf-8", "replace"))
            _, message = _split_prefix(text)
            yield chunk_start + line_start, _step_in(message)
        end = chunk_start + first_line if first_line else chunk_start


def _read_dissimilar_lines(f: BinaryIO, begin: int, end: int) -> bytes:
    """Return the last lines of a part of a log, with at most 100 lines of each group of similar
    lines.

    Lines are similar if they differ only in their numbers.
    """
    similar_lines: Counter[int] = Counter()
    kept: deque[bytes] = deque()
    kept_bytes = 0
    f.seek(begin)
    incomplete_line = b""
    while begin < end and (chunk := f.read(min(_CHUNK_BYTES, end - begin))):
        begin += len(chunk)
        data = incomplete_line + chunk
        if b"\n" in chunk:
            complete, _, incomplete_line = data.rpartition(b"\n")
        else:
            # The chunk contains no newline, so it is part of a line that is longer than a chunk.
            # Treat each chunk of such a line as a line of its own.
            complete = data
            incomplete_line = b""

        for match in _LINE_OF_TEXT.finditer(complete):
            line = match.group()[:_MIDDLE_BYTES]
            shape = hash(_NUMBER.sub(b"0", line[:_LINE_LENGTH]))
            similar_lines[shape] += 1
            if similar_lines[shape] <= _MAX_SIMILAR_LINES:
                kept.append(line + b"\n")
                kept_bytes += len(line) + 1
            while kept_bytes > _MIDDLE_BYTES:
                kept_bytes -= len(kept.popleft())
    # Return the incomplete last line, too. The caller then appends the part of the log that begins
    # at `end`. That part begins with the rest of the line.
    return b"".join(kept) + incomplete_line


#: Matches a line with one state of a progress bar, as tqdm writes it. The group in the pattern
#: matches the name of the bar, which is the text before the percentage. Example: `Epoch 1:  45%|###
#: | 9/20 [00:03<00:04]`
_PROGRESS_BAR = re.compile(r"([^%]{0,120}?)\d{1,3}(?:\.\d+)?%.{0,200}\d+/\d+ *\[")


def last_lines(text: str, count: int = 20, line_length: int = 400) -> str:
    """Return the last lines of a text that are not blank.

    If successive lines show states of the same progress bar, only the last state is returned.

    Args:
        text: The text.
        count: Largest number of lines.
        line_length: Each line is cut after this many characters.
    """
    lines: list[str] = []
    name_of_later_bar: str | None = None
    for line in reversed(text.splitlines()):
        if not line.strip():
            continue
        bar = _PROGRESS_BAR.match(line)
        name_of_bar = bar[1].strip() if bar is not None else None
        if name_of_bar is None or name_of_bar != name_of_later_bar:
            lines.append(line.rstrip()[:line_length])
        name_of_later_bar = name_of_bar
        if len(lines) == count:
            break
    return "\n".join(reversed(lines))
