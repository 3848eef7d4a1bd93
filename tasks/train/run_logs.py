"""Print the logs of a run's components, and follow them until the run has ended."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle

from tasks.record.log_file import LogFile
from tasks.record.places import AttemptPlace, RunPlace
from tasks.show.output import coloured_line, console_of, is_on_terminal, line_of, raw_stdout
from tasks.spec.errors import BadArgument
from tasks.spec.formatting import join_commas
from tasks.train.local_runs import read_local_record

#: Seconds between two reads of the log files.
_READ_EVERY_S = 0.2
#: Colours of the component names on a terminal. Each log gets the next colour in this list.
_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Criteria that select the log lines to print."""

    #: Name of the component whose log is printed. Empty to print the logs of all components.
    component: str = ""
    #: Text that each printed line contains. Empty to print all lines.
    text: str = ""
    #: Number of last lines of each log that are printed at first. None to print all lines.
    last_lines: int | None = None


def print_logs(run: RunPlace, number: int, selection: Selection, *, follow: bool) -> None:
    """Print the logs of an attempt. With `follow`, also print new lines until the run has ended.

    If the logs of several components are printed, each line begins with the name of its component.

    Args:
        run: Paths of the run's files.
        number: Number of the first attempt to print.
        selection: Criteria for the printed lines.
        follow: True to wait for new lines, and to continue with the logs of later attempts.

    Raises:
        BadArgument: The attempt or the log does not exist on this machine.
    """
    if not follow:
        select_logs(run, number, selection.component)
    while True:
        place = run.attempt(number)
        open_logs: dict[str, LogFile] = {}
        names = not selection.component and _has_several_components(place, is_growing=follow)
        while follow and not _is_attempt_over(run, number):
            _print_new_lines(place, selection, open_logs, names=names)
            time.sleep(_READ_EVERY_S)
        _print_new_lines(place, selection, open_logs, names=names, is_last=True)
        number += 1
        if not follow or not run.attempt(number).directory.exists():
            return
        print(f"attempt {number}", file=sys.stderr)


def list_logs(place: AttemptPlace) -> list[str]:
    """Return the names of the components that have a log in an attempt's directory."""
    return sorted({path.name.partition(".log")[0] for path in place.directory.glob("*.log*")})


def select_logs(run: RunPlace, number: int, component: str) -> list[str]:
    """Return the names of the components whose logs are shown.

    Args:
        run: Paths of the run's files.
        number: Number of the attempt.
        component: Name of the component that the user selected, or an empty string to return all
            components with a log.

    Raises:
        BadArgument: This machine has no such log.
    """
    names = list_logs(run.attempt(number))
    if not names or (component and component not in names):
        of_component = f" of {component}" if component else ""
        existing = join_commas(names) or "none"
        raise BadArgument(
            f"attempt {number} of {run.run_id} has no log{of_component} on this machine; "
            f"existing logs: {existing}"
        )
    return [component] if component else names


def _has_several_components(place: AttemptPlace, *, is_growing: bool) -> bool:
    """Return True if an attempt has the logs of several components, or will have them later.

    Args:
        place: Paths of the attempt's files.
        is_growing: True if the attempt may still start further components.
    """
    has_several_logs = len(list_logs(place)) > 1
    if has_several_logs or not is_growing:
        return has_several_logs
    # Import the YAML parser only here, because the import takes long.
    import yaml

    with suppress(OSError, yaml.YAMLError, AttributeError, TypeError):
        return len(yaml.safe_load(place.spec.read_text(encoding="utf-8")).get("components")) > 1
    return True


def _print_new_lines(
    place: AttemptPlace,
    selection: Selection,
    open_logs: dict[str, LogFile],
    *,
    names: bool,
    is_last: bool = False,
) -> None:
    """Print the lines that were added to the logs of an attempt since the last call.

    Args:
        selection: Criteria for the printed lines.
        open_logs: Mapping from component names to open log files. New log files are added.
        names: True to begin each line with the name of its component.
        is_last: True if the attempt is over. A last line without a newline is then printed, too.
    """
    new_names = [
        name
        for name in ([selection.component] if selection.component else list_logs(place))
        if name not in open_logs
    ]
    open_logs |= {name: LogFile(place.log(name)) for name in new_names}
    width = max(map(len, open_logs), default=0)
    for color, (name, log) in zip(cycle(_COLORS), open_logs.items()):
        prefix = f"{name:{width}} | " if names else ""
        if name in new_names and selection.last_lines is not None:
            blocks = _read_last_lines(log, selection, selection.last_lines, is_last=is_last)
        else:
            blocks = _read_log(log, selection, is_last=is_last)
        if is_on_terminal():
            _print_lines(blocks, prefix, color)
        else:
            _write_blocks(blocks, prefix)
    sys.stdout.flush()


def _read_log(log: LogFile, selection: Selection, *, is_last: bool) -> Iterator[bytes]:
    """Yield the lines that were added to a log since the last call, in blocks.

    Each block consists of complete lines. There is one exception: a block can begin or end within a
    line if all lines of a finished log are printed, and stdout is not a terminal.

    Args:
        log: The log.
        selection: Criteria for the printed lines.
        is_last: True if the log will not grow any more.
    """
    if is_last and not selection.text and not is_on_terminal():
        # Return the bytes without searching for line ends. A log may have many gigabytes, and the
        # search would take long.
        return log.read_rest()
    return _select_lines(log.read_blocks(is_last=is_last), selection.text)


def _read_last_lines(
    log: LogFile, selection: Selection, count: int, *, is_last: bool
) -> Iterator[bytes]:
    """Yield the last lines of a log that has not been read yet.

    Args:
        log: The log.
        selection: Criteria for the printed lines.
        count: Number of lines.
        is_last: True if the log will not grow any more.
    """
    if not selection.text and log.skip_to_last_lines(count):
        yield from _select_lines(log.read_blocks(is_last=is_last), "")
        return
    last_lines: deque[bytes] = deque(maxlen=count)
    for block in _select_lines(log.read_blocks(is_last=is_last), selection.text):
        lines = block.removesuffix(b"\n").split(b"\n")
        last_lines.extend(line + b"\n" for line in lines)
    yield b"".join(last_lines)


def _select_lines(blocks: Iterable[bytes], text: str) -> Iterator[bytes]:
    """Yield blocks that contain only the lines with a certain text.

    Each yielded block ends with a newline.

    Args:
        blocks: Blocks of lines. Each line ends with a newline, apart from the last line of the last
            block.
        text: The text, or an empty string to keep all lines.
    """
    searched = text.encode("utf-8", errors="surrogateescape")
    for block in blocks:
        if not searched:
            yield block if block.endswith(b"\n") else block + b"\n"
        elif searched in block:
            lines = block.split(b"\n")
            yield b"".join(line + b"\n" for line in lines if searched in line)


def _print_lines(blocks: Iterable[bytes], prefix: str, color: str) -> None:
    """Print lines on a terminal with a prefix. Control characters in the lines are removed.

    Args:
        blocks: Blocks of complete lines.
        prefix: Text that is printed before each line.
        color: Rich style of the prefix.
    """
    console = console_of(sys.stdout)
    for block in filter(None, blocks):
        for line in block.removesuffix(b"\n").split(b"\n"):
            text = line.removesuffix(b"\r").decode("utf-8", errors="replace")
            console.print(line_of(prefix, color) + coloured_line(text), soft_wrap=True)


def _write_blocks(blocks: Iterable[bytes], prefix: str) -> None:
    """Write lines with a prefix to a file or a pipe. The bytes of the lines are not changed.

    Args:
        blocks: Blocks of bytes that together form complete lines. A block may begin or end within a
            line.
        prefix: Text that is written before each line.
    """
    stream = raw_stdout()
    stream.flush()
    output = stream.buffer
    start = prefix.encode()
    if not start:
        output.writelines(blocks)
        return
    is_line_start = True
    for block in filter(None, blocks):
        if is_line_start:
            output.write(start)
        prefixed = memoryview(block.replace(b"\n", b"\n" + start))
        is_line_start = block.endswith(b"\n")
        # If the block ends with a newline, `replace` has added a prefix after this newline. Remove
        # this prefix: if there is a next block, the prefix is written at the start of that block.
        output.write(prefixed[: -len(start)] if is_line_start else prefixed)


def _is_attempt_over(place: RunPlace, number: int) -> bool:
    """Return True if a later attempt of the run has started, or if the run has ended.

    The result is False between the end of the attempt and the start of the next attempt.
    """
    record = read_local_record(place.run_id)
    has_next = place.attempt(number + 1).directory.exists()
    return has_next or (record is not None and record.ended_at is not None)
