"""Tests of reading a log that grows and is rotated: each line is returned exactly once."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.record import tail
from tasks.record.log_file import LogFile

#: List of operations on a log. Each operation is a tuple: its name, for example rename, and its
#: arguments.
Script = list[tuple[str, ...]]


class RotatedLog:
    """A log file, with methods that write to the file and methods that rotate the file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trainer.log"
        self._writer = self._open()
        self._renamed: int | None = None
        self._count = 0

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, text: str) -> None:
        os.write(self._writer, text.encode())

    def _next_name(self) -> Path:
        """Return the path of the next rotated file."""
        self._count += 1
        return self.path.with_name(f"{self.path.name}.{self._count}")

    def rename(self) -> None:
        """Rename the log file. The program then writes to a new file."""
        self.path.rename(self._next_name())
        if self._renamed is not None:
            os.close(self._renamed)
        self._renamed = self._writer
        self._writer = self._open()

    def write_on(self, text: str) -> None:
        """Write to the renamed file, like a process that opened the file before the rename."""
        assert self._renamed is not None
        os.write(self._renamed, text.encode())

    def copy(self) -> None:
        """Copy the log to a new file, and then truncate the log."""
        shutil.copy(self.path, self._next_name())
        os.truncate(self.path, 0)

    def copy_begun(self, count: str) -> None:
        """Begin to copy the log: copy only the first `count` bytes."""
        self._copied = self._next_name()
        self._copied.write_bytes(self.path.read_bytes()[: int(count)])

    def copy_ended(self) -> None:
        """Copy the rest of the log, and then truncate the log."""
        shutil.copy(self.path, self._copied)
        os.truncate(self.path, 0)

    def cut(self) -> None:
        """Truncate the log without a copy, so that unread lines are lost."""
        os.truncate(self.path, 0)

    def close(self) -> None:
        for fd in (self._writer, self._renamed):
            if fd is not None:
                os.close(fd)


def read(folder: Path, script: Script) -> list[str]:
    """Execute operations on a log file, and return all lines that the log's reader returns.

    After the last operation, the log is read once more.
    """
    rotated = RotatedLog(folder)
    log = LogFile(rotated.path)
    lines: list[str] = []
    for act, *words in script:
        if act == "read":
            lines += log.read_new()
        else:
            getattr(rotated, act)(*words)
    lines += log.read_new(is_last=True)
    rotated.close()
    return lines


READ = ("read",)


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ([("write", "a\nb\n"), READ, ("write", "c\n"), READ], ["a", "b", "c"]),
        # a line is returned only when its newline has been written
        ([("write", "a"), READ, READ, ("write", "b\nc"), READ, ("write", "d\n")], ["ab", "cd"]),
        # the last line is returned even without a newline; an empty line is returned, too
        ([("write", "a\n\nb")], ["a", "", "b"]),
        ([("write", "a\r\nb\r\n")], ["a", "b"]),
        ([READ], []),
        # a rotation renames the log. First case: all lines were read. Second case: some lines are
        # unread
        ([("write", "a\n"), READ, ("rename",), ("write", "b\n")], ["a", "b"]),
        (
            [READ, ("write", "a\n"), READ, ("write", "b\n"), ("rename",), ("write", "c\n"), READ],
            ["a", "b", "c"],
        ),
        # the log is renamed before it is read for the first time
        ([("write", "a\n"), ("rename",), ("write", "b\n"), READ], ["a", "b"]),
        ([("write", "a\n"), ("copy",), ("write", "b\n"), READ, READ], ["a", "b"]),
        # the first read finds an empty log; then a line is written, and the log is copied and
        # truncated
        ([READ, ("write", "a\n"), ("copy",), ("write", "b\n"), READ, READ], ["a", "b"]),
        # logrotate (`copytruncate`) is copying the log during the first read, and then truncates
        # the log
        (
            [("write", "a\nb\n"), ("copy_begun", "0"), READ, ("copy_ended",), ("write", "c\n")],
            ["a", "b", "c"],
        ),
        (
            [("write", "a\nb\n"), ("copy_begun", "3"), READ, ("copy_ended",), ("write", "c\n")],
            ["a", "b", "c"],
        ),
        # after the rename, lines are written to the new log file and to the renamed file: the
        # reader returns the lines of both files
        (
            [
                ("write", "a\n"),
                READ,
                ("rename",),
                ("write", "b\n"),
                READ,
                ("write_on", "c\n"),
                READ,
                ("write", "d\n"),
                ("write_on", "e\n"),
            ],
            ["a", "b", "c", "e", "d"],
        ),
        # a process writes the first part of a line before the rename, and the rest of the line to
        # the renamed file
        (
            [
                ("write", "a-"),
                READ,
                ("rename",),
                ("write", "b\n"),
                READ,
                ("write_on", "z\n"),
                READ,
            ],
            ["b", "a-z"],
        ),
        (
            [("write", "a"), READ, ("rename",), ("write", "b\n"), READ],
            ["b", "a"],
        ),
        # the log is copied and truncated after all lines were read
        ([("write", "a\nb\n"), READ, ("copy",), READ, ("write", "c\n")], ["a", "b", "c"]),
        # the log is truncated before all bytes were read: the unread bytes are only in the copy
        (
            [("write", "a\n"), READ, ("write", "b\n"), ("copy",), ("write", "c\n"), READ],
            ["a", "b", "c"],
        ),
        # after the truncation, the log has grown beyond its earlier length
        (
            [
                ("write", "a\n"),
                READ,
                ("write", "b\n"),
                ("copy",),
                ("write", "c\nd\ne\nf\n"),
                READ,
                ("write", "g\n"),
            ],
            ["a", "b", "c", "d", "e", "f", "g"],
        ),
        # the log is rotated while a line is incomplete: the parts of the line are joined
        (
            [("write", "a\nb"), READ, ("write", "c"), ("copy",), ("write", "d\ne\n"), READ],
            ["a", "bcd", "e"],
        ),
        # the log is rotated twice between two reads; the unread lines are in the newest copy
        (
            [
                ("write", "a\n"),
                READ,
                ("copy",),
                READ,
                ("write", "b\n"),
                READ,
                ("write", "c\n"),
                ("copy",),
                ("write", "dd\n"),
                READ,
            ],
            ["a", "b", "c", "dd"],
        ),
        # the log is truncated without a copy: unread lines are lost, and new lines are returned
        ([("write", "a\nb\n"), READ, ("cut",), ("write", "c\n"), READ], ["a", "b", "c"]),
        (
            [("write", "a\n"), READ, ("cut",), ("write", "c\nd\ne\n"), READ],
            ["a", "c", "d", "e"],
        ),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 20])
def test_each_line_is_returned_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
    lines: list[str],
    block_bytes: int,
) -> None:
    monkeypatch.setattr(tail, "BLOCK_BYTES", block_bytes)

    assert read(tmp_path, script) == lines


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder for the logs of all examples that Hypothesis generates."""
    yield tmp_path_factory.mktemp("logs")


ACTS = st.lists(
    st.sampled_from(["line", "half", "read", "rename", "copy", "on"]), min_size=1, max_size=30
)


@settings(max_examples=150, deadline=None)
@given(acts=ACTS)
def test_random_rotations_lose_and_repeat_no_line(folders: Path, acts: list[str]) -> None:
    """Apply random operations to a log file. The reader must return each line exactly once.

    Before each rename, the log is read. The reader cannot follow a renamed file that it never read.
    """
    folder = folders / str(len(list(folders.iterdir())))
    folder.mkdir()
    script: Script = []
    written = ""
    is_renamed = False
    for number, act in enumerate(acts):
        operations: Script = []
        text = f"{act} {number}\n"
        match act:
            case "half":
                text = text.replace("\n", "-")
            case "read":
                text = ""
                operations = [READ]
            case "rename":
                operations = [("write", text), READ, ("rename",)]
                is_renamed = True
            case "copy":
                # Write the line twice, and read only the first of the two lines. Then copy the log
                # file and truncate it, as logrotate does. The reader must find the second line in
                # the copy.
                operations = [("write", text), READ, ("write", text), ("copy",)]
                text += text
            case "on":
                operations = [("write_on", text)] if is_renamed else []
                text = ""
        if not operations and text:
            operations = [("write", text)]
        script += operations
        written += text
    written_after_rename = [words[0] for act, *words in script if act == "write_on"]

    lines = read(folder, script)

    assert [line for line in lines if not line.startswith("on ")] == written.splitlines()
    assert [f"{line}\n" for line in lines if line.startswith("on ")] == written_after_rename


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    # The first read finds only the first byte of the character `ä`, which has two bytes.
    path.write_bytes("ä".encode()[:1])
    log = LogFile(path)
    first = list(log.read_new())
    with path.open("ab") as file:
        file.write("ä".encode()[1:] + b"\n\xff\n")

    second = list(log.read_new(is_last=True))

    assert (first, second) == ([], ["ä", "\N{REPLACEMENT CHARACTER}"])


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("block_bytes", [1, 4, 1 << 20])
def test_all_lines_but_the_last_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, end: str, block_bytes: int
) -> None:
    monkeypatch.setattr(tail, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "trainer.log"
    path.write_text(f"a\nbb\n\nlast{end}")
    log = LogFile(path)

    assert log.skip_to_last_lines(count)

    lines = ["a", "bb", "", "last"]
    assert [*log.read_new(), *log.read_new(is_last=True)] == (lines[-count:] if count else [])


def test_lines_of_older_files_are_not_skipped_if_the_log_is_short(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("b\n")
    path.with_name("trainer.log.1").write_text("a\n")
    log = LogFile(path)

    assert not log.skip_to_last_lines(3)

    assert [*log.read_new(is_last=True)] == ["a", "b"]


def test_memory_for_reading_does_not_depend_on_the_size_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    block = b"a line of the trainer\n" * 50_000
    with path.open("wb") as file:
        for _ in range(200):
            file.write(block)
    program = (
        "import sys; from pathlib import Path;"
        "from tasks.record.log_file import LogFile;"
        "log = LogFile(Path(sys.argv[1]));"
        "print(sum(map(len, log.read_blocks(is_last=True))));"
        "status = Path('/proc/self/status').read_text();"
        "print(status.partition('VmHWM:')[2].split()[0])"
    )

    output = subprocess.check_output([sys.executable, "-c", program, str(path)], text=True)

    read_bytes, used_kib = map(int, output.split())
    assert read_bytes == 200 * len(block)
    assert used_kib < 100_000


@pytest.mark.parametrize("is_read_before", [False, True])
def test_hole_at_the_read_position_of_a_log_is_skipped(
    tmp_path: Path, is_read_before: bool
) -> None:
    path = tmp_path / "trainer.log"
    log = LogFile(path)
    path.write_bytes(b"first\n")
    lines = [*log.read_new()] if is_read_before else []
    with path.open("ab") as f:
        f.write(b"x" * (1 << 20) + b"\nlast\n")

    _punch_hole(path, 0, 1 << 20)
    lines += log.read_new()

    # The first 1 MiB of the file is now a hole, which the reader skips. Only the last six
    # characters of the long line and the line `last` are left in the file.
    assert lines == ["first"] * is_read_before + ["x" * len("first\n"), "last"]


def _punch_hole(path: Path, start: int, length: int) -> None:
    """Remove bytes from the middle of a file with fallocate(2). The size stays the same."""
    keep_size_and_punch_hole = 0x01 | 0x02
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as f:
        arguments = (ctypes.c_long(start), ctypes.c_long(length))
        if libc.fallocate(f.fileno(), keep_size_and_punch_hole, *arguments) != 0:
            pytest.skip(f"no holes in files of this file system: {os.strerror(ctypes.get_errno())}")
