"""A log, line by line, as far as finding a cause needs it.

For each line: what its program said, without the marks in front; which process said it; whether it
only mentions something; the traceback it belongs to. And for the whole: up to where training is
known to have gone on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
    readers: dict[str, _Tracebacks] = {}
    newest: dict[str, int] = {}
    count = 0
    lines: list[LogLine] = []
    for raw in _COLOURS.sub("", text).splitlines():
        if len(raw) < _SHORTEST or raw.isspace():
            continue
        found = _MARKS.match(raw)
        marks = found.group() if found else ""
        said = raw[len(marks) :]
        process = _PROCESS.search(marks) if marks else None
        name = process.group() if process else ""
        reader = readers.setdefault(name, _Tracebacks())
        traceback, said, count = reader.follow(said, count)
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


class _Tracebacks:
    """Follows the tracebacks that one process prints."""

    def __init__(self) -> None:
        self.is_caught = False
        self._number = 0
        self._is_inside = False
        self._is_linked = False
        self._is_next_caught = False

    def follow(self, said: str, count: int) -> tuple[int, str, int]:
        """The traceback whose error this line is or 0; what it says; how many there are by now."""
        if _TRACEBACK in said:
            if not self._is_linked:
                count += 1
                self._number, self.is_caught = count, self._is_next_caught
            self._is_inside, self._is_linked, self._is_next_caught = True, False, False
            return self._number, said, count
        if said[:1] in ("│", "╭", "╰", "❱"):  # rich's frames around code
            return 0, "", count
        if self._is_inside:
            if said.startswith(("  ", "\t", "File ", "^")):
                return 0, "", count
            self._is_inside = False
            return self._number, said, count
        if _LINK.match(said):
            self._is_linked = True
        elif _CAUGHT.search(said, 0, 200):
            self._is_next_caught = True
        return 0, said, count


def survived_until(lines: list[LogLine]) -> int:
    """The number of lines at the log's beginning after which training is known to have gone on."""
    advances = []
    last = -1
    for index, line in enumerate(lines):
        found = _BAR.match(line.text) if "%|" in line.text else _STEP.search(line.text, 0, 300)
        if found is None:
            continue
        step = int(found.group(1))
        if step > last >= 0:
            advances.append(index)
        last = step
    return advances[-STEPS_OF_SURVIVAL] if len(advances) >= STEPS_OF_SURVIVAL else 0
