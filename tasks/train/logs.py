"""The verb `muster logs`: what a run's components have written, side by side, and as it grows."""

from __future__ import annotations

import gzip
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from tasks.processes.identity import host_name
from tasks.record.places import AttemptPlace, RunPlace
from tasks.record.run_json import RunJson
from tasks.show.arguments import EXIT_DONE, EXIT_INVALID, RunName
from tasks.spec.errors import MusterError
from tasks.spec.words import commas
from tasks.train.runs import ENDED, Run, find

_LOOK_EVERY_S, _ASK_EVERY_S = 0.2, 5.0
_PIECE_BYTES, _TAIL_BYTES = 1 << 20, 64
_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class NoLog(MusterError):
    """There is no such log here: the message says where it is, or which there are."""

    exit_code = EXIT_INVALID


class _Lines:
    """Lines of what comes piece by piece."""

    def __init__(self) -> None:
        self._begun = b""

    def of(self, data: bytes, *, is_last: bool) -> list[str]:
        *lines, self._begun = (self._begun + data).split(b"\n")
        if is_last and self._begun:
            lines.append(self._begun)
            self._begun = b""
        return [line.removesuffix(b"\r").decode("utf-8", errors="replace") for line in lines]


class _Opened:
    """One file, whatever it is called by now; of it the bytes that were not read yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("rb", buffering=0)
        self.lines = _Lines()
        self._at = 0
        #: What was read last: a file that was cut and has grown beyond it reads otherwise there.
        self._tail = b""

    def look(self) -> bytes:
        rest = b""
        fd = self.file.fileno()
        before = os.pread(fd, len(self._tail), self._at - len(self._tail))
        if before != self._tail:
            rest, self._at, self._tail = self._copied(), 0, b""
        read = [rest]
        while data := os.pread(fd, _PIECE_BYTES, self._at):
            self._at += len(data)
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            read.append(data)
        return b"".join(read)

    def _copied(self) -> bytes:
        """What the file got between the last look and the moment it was copied and cut: it is in
        the copy, the youngest file beside it that is long enough and reads the same there."""
        for copy in _copies(self.path):
            with suppress(OSError), copy.open("rb") as f:
                f.seek(self._at - len(self._tail))
                if f.read(len(self._tail)) == self._tail:
                    return f.read()
        return b""


def _number(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _copies(log: Path) -> list[Path]:
    """What a log was rotated to: `trainer.log.1`, `trainer.log-20260102`; the youngest first."""
    found = {}
    for path in log.parent.glob(f"{log.name}[.-]*"):
        with suppress(OSError):
            if path.suffix != ".gz":
                found[path] = path.stat().st_mtime
    return sorted(found, key=lambda path: -found[path])


class LogFile:
    """Reads the lines that a log has got since the last look; none is lost or comes twice when it
    is rotated, be it moved away, and another one begun, or copied and cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: dict[tuple[int, int], _Opened] = {}
        self._unpacked: _Lines | None = None

    def look(self, *, is_last: bool = False) -> Iterator[str]:
        """
        Args:
            is_last: nothing more is written, so that the last line needs no end.
        """
        if not self._opened:
            # What was rotated before the first look.
            for older in reversed(_copies(self._path)):
                self._open(older)
        self._open(self._path)
        # Whoever wrote to one that was moved may still do so, and end a line that is begun there.
        for opened in self._opened.values():
            yield from opened.lines.of(opened.look(), is_last=is_last)
        if self._opened:
            return
        data = b""
        if self._unpacked is None:
            # As `muster prune` leaves it.
            with suppress(OSError), gzip.open(f"{self._path}.gz", "rb") as f:
                data, self._unpacked = f.read(), _Lines()
        if self._unpacked is not None:
            yield from self._unpacked.of(data, is_last=is_last)

    def _open(self, path: Path) -> None:
        with suppress(OSError):
            if _number(path.stat()) not in self._opened:
                opened = _Opened(path)
                # It may be another one by now.
                number = _number(os.fstat(opened.file.fileno()))
                if self._opened.setdefault(number, opened) is not opened:
                    opened.file.close()

    def close(self) -> None:
        for opened in self._opened.values():
            opened.file.close()


class _AttemptLogs:
    """The logs of one attempt, or of one component of it, and how their lines are shown."""

    def __init__(self, place: AttemptPlace, component: str, console: Console) -> None:
        self._place, self._component, self._console = place, component, console
        self._logs: dict[str, LogFile] = {}

    def names(self) -> list[str]:
        found = self._place.directory.glob("*.log*")
        return sorted({path.name.partition(".log")[0] for path in found})

    def look(self, *, is_last: bool = False) -> None:
        for name in [self._component] if self._component else self.names():
            if name not in self._logs:
                self._logs[name] = LogFile(self._place.log(name))
        width = max(map(len, self._logs), default=0)
        for index, (name, log) in enumerate(self._logs.items()):
            for line in log.look(is_last=is_last):
                self._show(name.ljust(width), _COLORS[index % len(_COLORS)], line)
            if is_last:
                log.close()

    def _show(self, name: str, color: str, line: str) -> None:
        if not self._console.is_terminal:
            print(line if self._component else f"{name} | {line}")
            return
        head = Text() if self._component else Text(f"{name} | ", style=color)
        self._console.print(head + Text.from_ansi(line), soft_wrap=True)


def logs(
    run: RunName = "latest",
    component: str = "",
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative=())] = False,
    attempt: int | None = None,
) -> int:
    """Show what a run's components have written in its last attempt, side by side.

    Exit: 0 shown; 2 there is no such run, or no such log here.

    Args:
        component: Only this one's.
        follow: Go on with what is written, over all further attempts, until the run has ended.
        attempt: Of this one; left out, the last.
    """
    meant = find(run)
    place, console = RunPlace.of(meant.run_id), Console(highlight=False)
    try:
        number = attempt or _wait_for_attempt(meant, place, follow=follow)
        while True:
            shown = _AttemptLogs(place.attempt(number), component, console)
            if not follow and component and component not in shown.names():
                there = commas(shown.names()) or "none"
                raise NoLog(
                    f"attempt {number} of {meant.run_id} has no log of {component}: {there}"
                )
            while follow and not _has_ended(meant, place, number):
                shown.look()
                sys.stdout.flush()
                time.sleep(_LOOK_EVERY_S)
            shown.look(is_last=True)
            if not follow or not place.attempt(number + 1).directory.exists():
                return EXIT_DONE
            number += 1
            print(f"attempt {number}", file=sys.stderr)
    except KeyboardInterrupt:
        # The way out of --follow.
        return EXIT_DONE


def _attempts(place: RunPlace) -> int:
    numbers = (path.name.removeprefix("attempt-") for path in place.directory.glob("attempt-*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _wait_for_attempt(run: Run, place: RunPlace, *, follow: bool) -> int:
    """The number of its last attempt; where it is followed, once it has one.

    Raises: NoLog.
    """
    said = ""
    while not (number := _attempts(place)):
        if run.host not in ("", host_name()) and run.started_at is not None:
            raise NoLog(
                f"the logs of {run.run_id} are on {run.host}: {place.directory}/attempt-*/*.log "
                f"there, if its MUSTER_HOME is {place.directory.parents[1]}"
            )
        if not follow or run.state in ENDED:
            raise NoLog(f"{run.run_id} has no logs: it is {run.state}, {run.message or 'no more'}")
        if run.state != said:
            print(f"{run.run_id} has not begun: {run.state} {run.message}", file=sys.stderr)
            said = run.state
        time.sleep(_ASK_EVERY_S if said else _LOOK_EVERY_S)
        run = find(run.run_id)
    return number


def _has_ended(run: Run, place: RunPlace, number: int) -> bool:
    """The attempt has, or its run."""
    with suppress(OSError, ValueError):
        record = RunJson.read(place.record)
        attempts = [one for one in record.attempts if one.number == number]
        if any(one.ended_at is not None for one in attempts):
            # What follows it is decided after its end.
            return record.ended_at is not None or place.attempt(number + 1).directory.exists()
        return record.ended_at is not None
    return False
