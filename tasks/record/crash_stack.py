"""Find the place in the user's own code at which a Python process crashed.

Python's faulthandler, which Muster enables for all components, writes the call stacks of a process
into the log before a signal such as SIGSEGV ends the process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Texts of faulthandler for the signals that end a process after an error in its code. Source:
#: CPython, Modules/faulthandler.c.
_ERRORS = {
    "SIGSEGV": "Segmentation fault",
    "SIGABRT": "Aborted",
    "SIGBUS": "Bus error",
    "SIGFPE": "Floating[- ]point exception",
    "SIGILL": "Illegal instruction",
}
#: Matches the line above the call stack of the thread that crashed.
_CRASHED_THREAD = re.compile(
    r"(?:Current thread 0x[0-9a-f]+[^\n]*|Stack) \(most recent call first\):"
)
#: Matches the lines that follow the call stack of the thread that crashed.
_END_OF_STACK = re.compile(r"$|Thread 0x|Current thread|Extension modules:|Fatal Python error")
#: Matches a line of a call stack that faulthandler has written.
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$')
#: Matches a line of the log. The content is empty if faulthandler has not written the line. A
#: launcher may have added the prefix.
_LINE = re.compile(
    r"(?P<prefix>.{0,80}?)"
    r'(?P<content>(?:  File "|Current thread|Thread 0x|Stack \(|Extension modules:|Fatal Python).*'
    r"|)"
)
#: Matches the end of a line. A terminal adds carriage returns.
_LINE_END = re.compile(r"\r+\n?|\n")
#: If this expression matches a part of the path of a source file, the file is library code and not
#: the program's own code. The standard library is in a folder such as `/usr/lib/python3.11`, or in
#: a file such as `python311.zip`.
_NOT_OWN = re.compile(r"/lib(?:64)?/python\d+(?:\.\d+\w*|\w*\.zip)/|-packages/|<frozen|\.pyx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One function call in a call stack that faulthandler has written."""

    path: str
    line: int
    function: str


def is_own_code(path: str) -> bool:
    """Return True if a source file is the program's own code and not that of a library."""
    return _NOT_OWN.search(path) is None


def read_frame(line: str) -> Frame | None:
    """Return the function call that a log line describes.

    Returns:
        None if the line does not belong to a call stack of faulthandler."""
    # A terminal ends each line with a carriage return and a line feed.
    match = _FRAME.match(line.rstrip("\r"))
    if match is None:
        return None
    return Frame(path=match["path"], line=int(match["line"]), function=match["function"])


def find_crash_place(text: str, signal: str, folder: Path | None = None) -> str:
    """Return the innermost line of the user's own code at which a process crashed.

    Args:
        text: The end of a log. Several processes may have written the log.
        signal: Name of the signal that ended the process, such as `SIGSEGV`.
        folder: Working directory of the program. A path in this folder is shown relative to the
            folder. None if unknown.

    Returns:
        A text such as `step (model/block.py:31)`. An empty string if the log contains no stack of a
        process with this signal, if the stack contains no code of the user, or if several processes
        crashed at different places.
    """
    if signal not in _ERRORS:
        return ""
    places = set()
    for frames in _read_stacks(text, f"Fatal Python error: {_ERRORS[signal]}"):
        own_frames = [frame for frame in frames if is_own_code(frame.path)]
        places.add(_format_place(own_frames, folder))
    return places.pop() if len(places) == 1 else ""


def _read_stacks(text: str, error: str) -> Iterator[list[Frame]]:
    """Yield the call stacks of the threads that crashed, the innermost call of each stack first.

    Each line of the log is read only once, because the log may contain thousands of fatal errors.

    Args:
        text: The log. Lines of other processes may be between the lines of a stack.
        error: Regular expression for the line with the fatal error.
    """
    is_error = re.compile(error).fullmatch
    #: Mapping from the prefix of a crashed process to the calls that were read. The value is None
    #: if the stack of the thread that crashed has not begun.
    stacks: dict[str, list[Frame] | None] = {}
    for line in _LINE_END.split(text):
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            continue
        prefix = match["prefix"].rstrip()
        content = match["content"]
        stack = stacks.get(prefix)
        if prefix in stacks:
            if frame := read_frame(content):
                if stack is not None:
                    stack.append(frame)
            elif _CRASHED_THREAD.match(content):
                stacks[prefix] = stack or []
            elif stack is not None and _END_OF_STACK.match(content):
                del stacks[prefix]
                yield stack
        if is_error(content):
            stacks.setdefault(prefix, None)
    for stack in stacks.values():
        yield stack or []


def _format_place(frames: Sequence[Frame], folder: Path | None) -> str:
    """Return the first of several calls as text, or an empty string if there are no calls.

    Args:
        frames: Calls of the user's own code.
        folder: See `find_crash_place`. If the source file of the first call is not in this folder,
            its path is shown relative to the common folder of all files in `frames`.
    """
    if not frames:
        return ""
    folders = {os.path.dirname(frame.path) for frame in frames}
    path = frames[0].path
    base = str(folder)
    is_inside = folder is not None and path.startswith(f"{base.rstrip('/')}/")
    if not is_inside and all(map(os.path.isabs, folders)):
        base = os.path.commonpath(folders)
        is_inside = True
    if is_inside:
        path = os.path.relpath(path, base)
    return f"{frames[0].function} ({path}:{frames[0].line})"
