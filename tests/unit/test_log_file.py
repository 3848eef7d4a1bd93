"""Tests of reading a log that grows and is rotated: each line is returned exactly once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.record.log_file import LogFile

Script = list[tuple[str, ...]]


class Rotated:
    """A log with a program that writes to it, and with operations that rotate it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trainer.log"
        self._writer = self._open()
        self._before: int | None = None
        self._count = 0

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, text: str) -> None:
        os.write(self._writer, text.encode())

    def _free(self) -> Path:
        self._count += 1
        return self.path.with_name(f"{self.path.name}.{self._count}")

    def rename(self) -> None:
        """Rename the log; the program continues in a new file."""
        self.path.rename(self._free())
        if self._before is not None:
            os.close(self._before)
        self._before, self._writer = self._writer, self._open()

    def write_on(self, text: str) -> None:
        """Write to the renamed file, which another process still has open."""
        assert self._before is not None
        os.write(self._before, text.encode())

    def copy(self) -> None:
        """Copy the log, and truncate it."""
        shutil.copy(self.path, self._free())
        os.truncate(self.path, 0)

    def copy_begun(self, count: str) -> None:
        """Copy a number of bytes, as if the copy were not finished."""
        self._copied = self._free()
        self._copied.write_bytes(self.path.read_bytes()[: int(count)])

    def copy_ended(self) -> None:
        """Finish the copy, and truncate the log."""
        shutil.copy(self.path, self._copied)
        os.truncate(self.path, 0)

    def cut(self) -> None:
        """Truncate the log without a copy, so that unread lines are lost."""
        os.truncate(self.path, 0)

    def close(self) -> None:
        for fd in (self._writer, self._before):
            if fd is not None:
                os.close(fd)


def read(folder: Path, script: Script) -> list[str]:
    """Return the lines that the reads of a script and a last read return."""
    rotated = Rotated(folder)
    log = LogFile(rotated.path)
    found: list[str] = []
    for act, *words in script:
        if act == "look":
            found += log.read_new()
        else:
            getattr(rotated, act)(*words)
    found += log.read_new(is_last=True)
    rotated.close()
    return found


LOOK = ("look",)


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ([("write", "a\nb\n"), LOOK, ("write", "c\n"), LOOK], ["a", "b", "c"]),
        # a line is returned when it is complete
        ([("write", "a"), LOOK, LOOK, ("write", "b\nc"), LOOK, ("write", "d\n")], ["ab", "cd"]),
        # the last line needs no newline; an empty line counts
        ([("write", "a\n\nb")], ["a", "", "b"]),
        ([("write", "a\r\nb\r\n")], ["a", "b"]),
        ([LOOK], []),
        # renamed before a read, after it, and with unread lines
        ([("write", "a\n"), LOOK, ("rename",), ("write", "b\n")], ["a", "b"]),
        (
            [LOOK, ("write", "a\n"), LOOK, ("write", "b\n"), ("rename",), ("write", "c\n"), LOOK],
            ["a", "b", "c"],
        ),
        # before the first read
        ([("write", "a\n"), ("rename",), ("write", "b\n"), LOOK], ["a", "b"]),
        ([("write", "a\n"), ("copy",), ("write", "b\n"), LOOK, LOOK], ["a", "b"]),
        # after a read of the empty log
        ([LOOK, ("write", "a\n"), ("copy",), ("write", "b\n"), LOOK, LOOK], ["a", "b"]),
        # the copy is empty or incomplete, and the log is not truncated yet
        (
            [("write", "a\nb\n"), ("copy_begun", "0"), LOOK, ("copy_ended",), ("write", "c\n")],
            ["a", "b", "c"],
        ),
        (
            [("write", "a\nb\n"), ("copy_begun", "3"), LOOK, ("copy_ended",), ("write", "c\n")],
            ["a", "b", "c"],
        ),
        # another process still writes to the renamed file
        (
            [
                *(("write", "a\n"), LOOK, ("rename",), ("write", "b\n"), LOOK),
                *(("write_on", "c\n"), LOOK, ("write", "d\n"), ("write_on", "e\n")),
            ],
            ["a", "b", "c", "e", "d"],
        ),
        # a line continues in the same file, not in the new file
        (
            [
                *(("write", "a-"), LOOK, ("rename",), ("write", "b\n"), LOOK),
                *(("write_on", "z\n"), LOOK),
            ],
            ["b", "a-z"],
        ),
        (
            [("write", "a"), LOOK, ("rename",), ("write", "b\n"), LOOK],
            ["b", "a"],
        ),
        # copied and truncated after all lines were read
        ([("write", "a\nb\n"), LOOK, ("copy",), LOOK, ("write", "c\n")], ["a", "b", "c"]),
        # the unread bytes are only in the copy
        (
            [("write", "a\n"), LOOK, ("write", "b\n"), ("copy",), ("write", "c\n"), LOOK],
            ["a", "b", "c"],
        ),
        # the log has grown beyond its old length
        (
            [
                *(("write", "a\n"), LOOK, ("write", "b\n"), ("copy",)),
                *(("write", "c\nd\ne\nf\n"), LOOK, ("write", "g\n")),
            ],
            ["a", "b", "c", "d", "e", "f", "g"],
        ),
        # rotated in the middle of a line
        (
            [("write", "a\nb"), LOOK, ("write", "c"), ("copy",), ("write", "d\ne\n"), LOOK],
            ["a", "bcd", "e"],
        ),
        # rotated twice; the newest copy counts
        (
            [
                *(("write", "a\n"), LOOK, ("copy",), LOOK, ("write", "b\n"), LOOK),
                *(("write", "c\n"), ("copy",), ("write", "dd\n"), LOOK),
            ],
            ["a", "b", "c", "dd"],
        ),
        # truncated without a copy: only new lines are returned
        ([("write", "a\nb\n"), LOOK, ("cut",), ("write", "c\n"), LOOK], ["a", "b", "c"]),
        (
            [("write", "a\n"), LOOK, ("cut",), ("write", "c\nd\ne\n"), LOOK],
            ["a", "c", "d", "e"],
        ),
    ],
)
def test_each_line_is_returned_once(tmp_path: Path, script: Script, lines: list[str]) -> None:
    assert read(tmp_path, script) == lines


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("logs")


ACTS = st.lists(
    st.sampled_from(["line", "half", "look", "rename", "copy", "on"]), min_size=1, max_size=30
)


@settings(max_examples=150, deadline=None)
@given(acts=ACTS)
def test_random_rotations_lose_and_repeat_no_line(folders: Path, acts: list[str]) -> None:
    """The log is read once before each rotation, because a file that was never seen is unknown."""
    folder = folders / str(len(list(folders.iterdir())))
    folder.mkdir()
    script: Script = []
    written, moved_to = "", False
    for number, act in enumerate(acts):
        before: Script = []
        text = f"{act} {number}\n"
        match act:
            case "half":
                text = text.replace("\n", "-")
            case "look":
                text, before = "", [LOOK]
            case "rename":
                before, moved_to = [("write", text), LOOK, ("rename",)], True
            case "copy":
                # Some lines were not read.
                before = [("write", text), LOOK, ("write", text), ("copy",)]
                text += text
            case "on":
                before = [("write_on", text)] if moved_to else []
                text = ""
        script += before or ([("write", text)] if text else [])
        written += text
    late = [words[0] for act, *words in script if act == "write_on"]

    found = read(folder, script)

    assert [line for line in found if not line.startswith("on ")] == written.splitlines()
    assert [f"{line}\n" for line in found if line.startswith("on ")] == late


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    # The read splits a character of two bytes.
    path.write_bytes("ä".encode()[:1])
    log = LogFile(path)
    first = [*log.read_new()]
    with path.open("ab") as file:
        file.write("ä".encode()[1:] + b"\n\xff\n")

    second = [*log.read_new(is_last=True)]

    assert (first, second) == ([], ["ä", "\N{REPLACEMENT CHARACTER}"])
