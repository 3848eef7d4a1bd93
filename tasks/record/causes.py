"""Causes of failure, recognised by the text a component leaves.

What is a cause is believed before what follows from it, wherever the two stand, since the lines of
processes interleave; among causes the first in the text. What was survived is no cause: a warning,
something that was tried again, an error after which training went on, an error that the same
process outlived to end with another one.

The texts themselves are rows of `cause_rules.toml`. A log is read line by line, as far as finding
a cause needs it. What the process of a fleet was doing when it was lost, its events tell.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tasks.record.events import Event
from tasks.record.outcome import Verdict
from tasks.record.places import AttemptPlace
from tasks.record.states import SERVING, GroupState
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import FLEET
from tasks.spec.words import commas


class Role(IntEnum):
    """What a text tells of the order of events; the lower one is believed, wherever it stands."""

    #: Nothing else brings it about: memory or a disk ran out, a device broke, GPUs were missing.
    CAUSE = 0
    #: An error that has a name, though it may follow from something else.
    ERROR = 1
    #: Any error that a traceback ends with.
    EXCEPTION = 2
    #: It follows from the death or the silence of something else.
    CASCADE = 3
    #: It only says that something else has failed.
    WRAPPER = 4
    #: All that there is to say where nothing else was recognised.
    LAST = 5


def _any_of(patterns: object) -> object:
    if not isinstance(patterns, list):
        raise TypeError("patterns must be a list")
    return re.compile("|".join(patterns), re.MULTILINE)


class Rule(BaseModel):
    """One text and what it means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    kind: FailureKind
    role: Annotated[Role, BeforeValidator(Role.__members__.get)]
    #: Searched in what each line says, without the marks of time, level and process before it.
    #: It must never cross lines, and take time in proportion to a line's length.
    pattern: Annotated[re.Pattern[str], BeforeValidator(_any_of)] = Field(alias="patterns")
    #: What the user can do.
    hint: str = ""
    #: Where the text comes from: a file of a project, an issue, a page of ours.
    source: str
    #: The version whose text was seen; "any" where it has been the same for many years.
    seen_in: str
    #: Believed even in a line that is marked as a warning: Ray and the kernel warn of deaths.
    at_any_level: bool = False


def read_rules(text: str) -> tuple[Rule, ...]:
    """The rules of a TOML text, a table each. Raises: ValueError, names the faulty one."""
    rules = []
    for name, row in tomllib.loads(text).items():
        try:
            rules.append(Rule.model_validate({"id": name, **row}))
        except (ValidationError, TypeError, re.error) as error:
            raise ValueError(f"cause rule {name}: {error}") from error
    return tuple(rules)


#: Where two rules of a role match in the same line, the one that stands first is believed.
RULES = read_rules(Path(__file__).with_name("cause_rules.toml").read_text(encoding="utf-8"))

#: No text of interest is shorter ("Killed"); dots and the remains of progress bars are.
_SHORTEST = 6
#: So many times the step must still advance after an error for it to count as survived. Other
#: processes, and batches that are queued, carry a run on for a few steps after a fatal one.
STEPS_OF_SURVIVAL = 5

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MARKS = re.compile(
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
#: Said in passing: a level inside the line, a Python warning, something that is being tried again.
#: "Max retries exceeded" and "after 5 retries" are the opposite: the last try has failed.
_MENTION = re.compile(
    r"NCCL INFO|\b\w{0,40}Warning: |^wandb: WARNING|^\+ "
    r"|(?i:\bretrying\b|\bwill (?:be )?retr|\bretry loop\b|\breconnecting\b|\bfalling back\b"
    r"|\btrying (?:port|the next|another)\b|\bnon-fatal\b)"
)
_PROCESS = re.compile(r"pid=\d+|\[rank\d+\]|\bTP\d+\b")
_TRACEBACK = "Traceback (most recent call last)"
_LINK = re.compile(r"^(?:During handling of the above|The above) exception")
#: A traceback after one of these did not end its process.
_CAUGHT = re.compile(
    r"^Exception ignored in|exception was never retrieved|^--- Logging error ---"
    r"|^Exception in (?:ASGI application|callback|thread)"
)
_STEP = re.compile(
    r"(?:^|[\s{'\"\[(|/,])(?:global_?step|train(?:ing)?[ _]step|step|iteration|iter)['\"]?"
    r"\s{0,3}[:= ]\s{0,9}(\d{1,9})\b",
    re.IGNORECASE,
)
#: A bar without a name, or of the training; bars of loading or generation prove nothing.
_BAR = re.compile(
    r"^\s{0,9}(?:\S{0,20}(?:train|epoch|step|progress)[^|\n]{0,40})?\d{1,3}%\|[^|\n]{0,300}\|\s{0,5}(\d+)/\d",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    #: As it stands there, without colours.
    raw: str
    #: Without dates, levels and names of processes in front; empty for the code in a traceback.
    text: str
    #: Which process said it, where marks tell; empty: unknown.
    process: str
    #: Only mentioned: information, a warning, something that is tried again.
    is_mention: bool
    #: The traceback, with all that it is chained to, whose error this is; 0: none.
    traceback: int = 0
    #: The traceback was printed by someone who caught it, and went on.
    is_caught: bool = False


def read_lines(text: str) -> list[LogLine]:
    """The lines that say something; each state of a progress bar is a line of its own."""
    readers: defaultdict[str, _Tracebacks] = defaultdict(partial(_Tracebacks, count(1)))
    newest: dict[str, int] = {}
    lines: list[LogLine] = []
    for raw in _COLOURS.sub("", text).splitlines():
        if len(raw) < _SHORTEST or raw.isspace():
            continue
        marks, said = _split_marks(raw)
        process = _PROCESS.search(marks) if marks else None
        name = process.group() if process else ""
        reader = readers[name]
        traceback, said = reader.follow(said)
        before = lines[newest[name]] if name in newest else None
        if said.startswith(("Retrying", "retrying")) and before and not before.traceback:
            lines[newest[name]] = replace(before, is_mention=True)
        newest[name] = len(lines)
        is_quiet = bool(marks) and bool(_QUIET.search(marks)) and not _LOUD.search(marks)
        lines.append(
            LogLine(
                raw=raw,
                text=said,
                process=name,
                is_mention=is_quiet or bool(_MENTION.search(said, 0, 2000)),
                traceback=traceback,
                is_caught=bool(traceback) and reader.is_caught,
            )
        )
    return lines


def _split_marks(raw: str) -> tuple[str, str]:
    """The dates, levels and names of processes in front of a line, and what it says."""
    found = _MARKS.match(raw)
    end = found.end() if found else 0
    return raw[:end], raw[end:]


class _Tracebacks:
    """Follows the tracebacks that one process prints, which are numbered for all of them."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.is_caught = False
        self._numbers = numbers
        self._number = 0
        self._is_inside = False
        self._is_linked = False
        self._is_next_caught = False

    def follow(self, said: str) -> tuple[int, str]:
        """The traceback whose error this line is, or 0; what it says."""
        if _TRACEBACK in said:
            if not self._is_linked:
                self._number, self.is_caught = next(self._numbers), self._is_next_caught
            self._is_inside, self._is_linked, self._is_next_caught = True, False, False
            return self._number, said
        if said[:1] in ("│", "╭", "╰", "❱"):  # rich's frames around code
            return 0, ""
        if self._is_inside:
            if said.startswith(("  ", "\t", "File ", "^")):
                return 0, ""
            self._is_inside = False
            return self._number, said
        if _LINK.match(said):
            self._is_linked = True
        elif _CAUGHT.search(said, 0, 200):
            self._is_next_caught = True
        return 0, said


def _survived_at(steps: Iterable[tuple[int, int | None]]) -> int:
    """Where the step advanced for the last time but so many, by `(where, step or None)` of each
    line from the last one back; 0 where it did so less often."""
    advances, later = 0, (0, -1)
    for at, step in steps:
        if step is None:
            continue
        advances += later[1] > step
        if advances == STEPS_OF_SURVIVAL:
            return later[0]
        later = at, step
    return 0


def _step_of(said: str) -> int | None:
    """The step of the training that a line says, without its marks; None where it says none."""
    found = _BAR.match(said) if "%|" in said else _STEP.search(said, 0, 300)
    return int(found.group(1)) if found is not None else None


#: So much of a log's end is looked at as it stands.
LOOKBACK_BYTES = 200_000
#: For the last steps before that it is looked through so far back, ...
_STEPS_WITHIN_BYTES = 32 << 20
_STEPS_AT_MOST = 50_000
_PIECE_BYTES = 1 << 20
#: ... and of what was said since then, lines that repeat but for their numbers are left out, and of
#: the rest its last part is read.
_BETWEEN_BYTES = 600_000
_ALIKE_AT_MOST = 100
#: How much of a line is kept.
_LINE_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Cause:
    """A rule that matched, and the line it matched in."""

    rule: Rule
    #: Of the rule, in its table.
    order: int
    #: Of the line, in the text.
    index: int
    #: Where in what the line says.
    at: int
    said: LogLine

    @property
    def line(self) -> str:
        """As it stands there, cut around what matched."""
        raw = self.said.raw
        at = len(raw) - len(self.said.text) + self.at
        begin = 0 if at < _LINE_LENGTH // 2 else at - _LINE_LENGTH // 5
        return raw[begin : begin + _LINE_LENGTH].strip()

    @property
    def weight(self) -> tuple[bool, bool, int, int, int]:
        """The least is believed."""
        role = self.rule.role
        return (role >= Role.CASCADE, self.said.is_caught, role, self.index, self.order)


def find_cause(text: str, rules: Sequence[Rule] = RULES) -> Cause | None:
    """The rule that explains the end that the text tells of, and its line; None: nothing does."""
    found = [*_without_outlived([*_evidence(read_lines(text), rules)])]
    return min(_without_wrapped(found), key=lambda cause: cause.weight, default=None)


def _evidence(lines: list[LogLine], rules: Sequence[Rule]) -> Iterator[Cause]:
    # One search of the whole per rule: a search of each line by each rule takes seconds where a
    # log is all short lines.
    whole = "\n".join(line.text for line in lines)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.text) + 1)
    # Training is known to have gone on after what stands before that.
    steps = ((index, _step_of(lines[index].text)) for index in reversed(range(len(lines))))
    survived = starts[_survived_at(steps)]
    for order, rule in enumerate(rules):
        seen = -1
        for match in rule.pattern.finditer(whole, survived):
            index = bisect_right(starts, match.start()) - 1
            line = lines[index]
            if index == seen or (line.is_mention and not rule.at_any_level):
                continue
            seen = index
            yield Cause(rule, order, index, match.start() - starts[index], line)


def _without_outlived(found: list[Cause]) -> Iterator[Cause]:
    """Leaves out errors, but not causes, of a process that went on to end with another traceback: a
    worker often logs what it died of, and then raises something else."""
    last: dict[tuple[str, Role], int] = {}
    errors = (Role.ERROR, Role.EXCEPTION)
    for evidence in found:
        line, role = evidence.said, evidence.rule.role
        if role in errors and line.traceback and not line.is_caught:
            key = (line.process, role)
            last[key] = max(last.get(key, 0), line.traceback)
    starts: dict[int, int] = {}
    for evidence in found:
        number = evidence.said.traceback
        starts[number] = min(starts.get(number, evidence.index), evidence.index)
    for evidence in found:
        # Only errors have a last traceback.
        end = last.get((evidence.said.process, evidence.rule.role))
        if end is None or evidence.index >= starts[end]:
            yield evidence


def _without_wrapped(found: list[Cause]) -> Iterator[Cause]:
    """Leaves out errors without a name that only pass on what follows from something else."""
    cascades = [e for e in found if e.rule.role in (Role.CASCADE, Role.WRAPPER)]
    lines = {e.index for e in cascades}
    tracebacks = {e.said.traceback for e in cascades} - {0}
    for e in found:
        is_wrapper = e.index in lines or e.said.traceback in tracebacks
        if not (e.rule.role is Role.EXCEPTION and is_wrapper):
            yield e


def read_tail(log: Path, limit_bytes: int = LOOKBACK_BYTES) -> str:
    """The end of a log, empty when it can't be read; bytes that are not UTF-8 are replaced."""
    try:
        with log.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - limit_bytes))
            return f.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def read_since_step(log: Path, *, since: int = 0, until: int | None = None) -> str:
    """What a log says since the last steps of the training, as far as a cause may stand in it: the
    traces of many ranks, one like the other, may follow it.

    Where no steps are known, only what names no cause itself, but its consequences, has more read
    than the end.

    Args:
        since: how long the log was when the training had its last steps ahead, as far as is known.
        until: so many bytes of the log are read; None: all there are.

    Returns: at least the end of the log; empty when it can't be read. Bytes that are not UTF-8 are
    replaced.
    """
    try:
        with log.open("rb") as f:
            size = f.seek(0, 2)
            end = size if until is None else min(size, until)
            tail_at = max(0, end - LOOKBACK_BYTES)
            f.seek(tail_at)
            tail = f.read(end - tail_at)
            limit = max(0, end - _STEPS_WITHIN_BYTES)
            steps = islice(_steps_back(f, end, limit), _STEPS_AT_MOST)
            begin = max(since, _survived_at(steps))
            between = b""
            if begin < tail_at:
                cause = None if begin else find_cause(tail.decode("utf-8", errors="replace"))
                if begin or (cause and cause.rule.role in (Role.CASCADE, Role.WRAPPER)):
                    between = _unlike(f, max(begin, limit), tail_at)
            return (between + tail).decode("utf-8", errors="replace")
    except OSError:
        return ""


#: What a line that says a step has in it.
_STEP_MARK = re.compile(rb"(?:(?i:step|iter)|%\|)[^\r\n]*")
_LINE_OF_TEXT = re.compile(rb"[^\r\n]{%d,}" % _SHORTEST)
_NUMBER = re.compile(rb"0x[0-9a-fA-F]+|\d+")


def _steps_back(f: BinaryIO, end: int, begin: int) -> Iterator[tuple[int, int | None]]:
    """`(offset, step)` of the lines that say a step, from the last one back."""
    while end > begin:
        at = max(begin, end - _PIECE_BYTES)
        f.seek(at)
        piece = f.read(end - at)
        # Of a line that begins before it, only that it ends here; one that fills it is none.
        whole = piece.find(b"\n", 0, -1) + 1 if at > begin else 0
        found, starts, seen = {}, whole, whole
        for mark in _STEP_MARK.finditer(piece, whole):
            ends = (piece.rfind(end_of_line, seen, mark.start()) for end_of_line in (b"\n", b"\r"))
            starts, seen = max(starts, *(at + 1 for at in ends)), mark.start()
            found[starts] = piece[starts : min(mark.end(), starts + _LINE_LENGTH)]
        for starts, line in reversed(found.items()):
            said = _COLOURS.sub("", line.decode("utf-8", "replace"))
            yield at + starts, _step_of(_split_marks(said)[1])
        end = at + whole if whole else at


def _unlike(f: BinaryIO, begin: int, end: int) -> bytes:
    """The last lines of a part of a log that don't just repeat others."""
    seen: Counter[int] = Counter()
    kept: deque[bytes] = deque()
    kept_bytes = 0
    f.seek(begin)
    rest = b""
    while begin < end and (piece := f.read(min(_PIECE_BYTES, end - begin))):
        begin += len(piece)
        # A line that never ends is cut.
        whole, _, rest = (
            (rest + piece).rpartition(b"\n") if b"\n" in piece else (rest + piece, b"", b"")
        )
        for found in _LINE_OF_TEXT.finditer(whole):
            line = found.group()[:_BETWEEN_BYTES]
            shape = hash(_NUMBER.sub(b"0", line[:_LINE_LENGTH]))
            seen[shape] += 1
            if seen[shape] <= _ALIKE_AT_MOST:
                kept.append(line + b"\n")
                kept_bytes += len(line) + 1
            while kept_bytes > _BETWEEN_BYTES:
                kept_bytes -= len(kept.popleft())
    # The last line goes on in what comes next.
    return b"".join(kept) + rest


def last_lines(text: str, count: int = 20, line_length: int = 400) -> str:
    """The last lines that are not blank, long ones cut."""
    lines = [line.rstrip()[:line_length] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])


#: What a fleet says last that ends by itself. Source: tasks/rollout/process.py, _say_last.
_OWN_REASON = re.compile(r"^FleetError: ", re.MULTILINE)
#: Why engines and syncs end with their fleet. Source: tasks/rollout/{fleet,sync}.py.
_STOPPED = "the fleet is stopped"


def with_fleet_lost(verdict: Verdict, place: AttemptPlace, engines: int) -> Verdict:
    """The verdict, as FLEET_LOST where it blames the fleet's own process, which was killed or has
    crashed; the same where that gave a reason of its own, or ran out of memory.

    Nothing of the attempt is left.
    """
    failure = verdict.failure
    if failure is None or failure.component != FLEET or failure.kind is FailureKind.HOST_OOM:
        return verdict
    # Of one that ended with its guardian nobody knows how.
    has_ended = failure.has_ended or failure.rule == "exit"
    if not has_ended or _OWN_REASON.search(read_tail(place.log(FLEET))):
        return verdict
    doing = doing_of(events_in(place.fleet_events), engines)
    lost = failure.but(
        kind=FailureKind.FLEET_LOST,
        rule="fleet-lost",
        message=f"{failure.message}; at its end {doing}",
    )
    return replace(verdict, message=str(lost), failure=lost)


def doing_of(events: Iterable[Event], engines: int) -> str:
    """What a fleet was doing by its last events, as a part of a sentence: `2 of 3 engines served,
    recovering: 2, weights were being synced`."""
    states, is_syncing = dict.fromkeys(range(engines), GroupState.STARTING), False
    for event in events:
        if (event.cause or event.message).endswith(_STOPPED):
            # From here on it was ending.
            break
        match event.name:
            case "rollout.group.state":
                states[event.group] = event.after
            case "rollout.sync.begun":
                is_syncing = True
            case "rollout.sync.ended":
                is_syncing = False
    said = [f"{sum(state in SERVING for state in states.values())} of {engines} engines served"]
    for state in GroupState:
        found = [engine for engine, its in states.items() if its is state]
        if found and state not in SERVING:
            said.append(f"{state.value}: {commas(found)}")
    return ", ".join([*said, *(["weights were being synced"] if is_syncing else [])])


def events_in(path: Path) -> Iterator[Event]:
    """Those of a file of an attempt; none where there is no such file."""
    with suppress(OSError), path.open("rb") as f:
        for line in f:
            # The last one may be cut short.
            with suppress(ValueError):
                yield Event.of_line(line)
