"""Lines of a log that grows, and is rotated in one of the ways there are: each comes, once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.record.growing import LogFile

Script = list[tuple[str, ...]]


class Rotated:
    """A log, its writer, which keeps its file open, and what rotates it."""

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
        """Moved away, and another one begun; the writer goes on with that."""
        self.path.rename(self._free())
        if self._before is not None:
            os.close(self._before)
        self._before, self._writer = self._writer, self._open()

    def write_on(self, text: str) -> None:
        """By whoever has the one that was moved away still open."""
        assert self._before is not None
        os.write(self._before, text.encode())

    def copy(self) -> None:
        """Copied, and cut."""
        shutil.copy(self.path, self._free())
        os.truncate(self.path, 0)

    def copy_begun(self, count: str) -> None:
        """So many bytes of it are copied."""
        self._copied = self._free()
        self._copied.write_bytes(self.path.read_bytes()[: int(count)])

    def copy_ended(self) -> None:
        """All of it is, and it is cut."""
        shutil.copy(self.path, self._copied)
        os.truncate(self.path, 0)

    def cut(self) -> None:
        """Cut, and copied nowhere: what was not read is gone."""
        os.truncate(self.path, 0)

    def close(self) -> None:
        for fd in (self._writer, self._before):
            if fd is not None:
                os.close(fd)


def read(folder: Path, script: Script) -> list[str]:
    """The lines that were read by the looks of a script, and by a last one."""
    rotated = Rotated(folder)
    log = LogFile(rotated.path)
    found: list[str] = []
    for act, *words in script:
        if act == "look":
            found += log.look()
        else:
            getattr(rotated, act)(*words)
    found += log.look(is_last=True)
    rotated.close()
    return found


LOOK = ("look",)


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ([("write", "a\nb\n"), LOOK, ("write", "c\n"), LOOK], ["a", "b", "c"]),
        # a line comes whole, however many looks it takes
        ([("write", "a"), LOOK, LOOK, ("write", "b\nc"), LOOK, ("write", "d\n")], ["ab", "cd"]),
        # the last one needs no end; an empty one is one
        ([("write", "a\n\nb")], ["a", "", "b"]),
        ([("write", "a\r\nb\r\n")], ["a", "b"]),
        ([LOOK], []),
        # moved away, and another one begun: before a look, after it, with some not read yet
        ([("write", "a\n"), LOOK, ("rename",), ("write", "b\n")], ["a", "b"]),
        (
            [LOOK, ("write", "a\n"), LOOK, ("write", "b\n"), ("rename",), ("write", "c\n"), LOOK],
            ["a", "b", "c"],
        ),
        # before anybody has looked
        ([("write", "a\n"), ("rename",), ("write", "b\n"), LOOK], ["a", "b"]),
        ([("write", "a\n"), ("copy",), ("write", "b\n"), LOOK, LOOK], ["a", "b"]),
        # and the log that was looked at had nothing yet
        ([LOOK, ("write", "a\n"), ("copy",), ("write", "b\n"), LOOK, LOOK], ["a", "b"]),
        # it is being copied, and not cut yet: nothing of the copy is there, or some of it
        (
            [("write", "a\nb\n"), ("copy_begun", "0"), LOOK, ("copy_ended",), ("write", "c\n")],
            ["a", "b", "c"],
        ),
        (
            [("write", "a\nb\n"), ("copy_begun", "3"), LOOK, ("copy_ended",), ("write", "c\n")],
            ["a", "b", "c"],
        ),
        # whoever has the old one open writes it to its end
        (
            [
                *(("write", "a\n"), LOOK, ("rename",), ("write", "b\n"), LOOK),
                *(("write_on", "c\n"), LOOK, ("write", "d\n"), ("write_on", "e\n")),
            ],
            ["a", "b", "c", "e", "d"],
        ),
        # a line that was begun in it is ended there, not by what stands in the new one
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
        # copied and cut, all of it read
        ([("write", "a\nb\n"), LOOK, ("copy",), LOOK, ("write", "c\n")], ["a", "b", "c"]),
        # with bytes that were not read: they are in the copy
        (
            [("write", "a\n"), LOOK, ("write", "b\n"), ("copy",), ("write", "c\n"), LOOK],
            ["a", "b", "c"],
        ),
        # and it has grown beyond its old length
        (
            [
                *(("write", "a\n"), LOOK, ("write", "b\n"), ("copy",)),
                *(("write", "c\nd\ne\nf\n"), LOOK, ("write", "g\n")),
            ],
            ["a", "b", "c", "d", "e", "f", "g"],
        ),
        # a line was being written
        (
            [("write", "a\nb"), LOOK, ("write", "c"), ("copy",), ("write", "d\ne\n"), LOOK],
            ["a", "bcd", "e"],
        ),
        # twice; the copy that counts is the youngest
        (
            [
                *(("write", "a\n"), LOOK, ("copy",), LOOK, ("write", "b\n"), LOOK),
                *(("write", "c\n"), ("copy",), ("write", "dd\n"), LOOK),
            ],
            ["a", "b", "c", "dd"],
        ),
        # cut for good: what is new comes, nothing comes again
        ([("write", "a\nb\n"), LOOK, ("cut",), ("write", "c\n"), LOOK], ["a", "b", "c"]),
        (
            [("write", "a\n"), LOOK, ("cut",), ("write", "c\nd\ne\n"), LOOK],
            ["a", "c", "d", "e"],
        ),
    ],
)
def test_each_line_comes_once(tmp_path: Path, script: Script, lines: list[str]) -> None:
    assert read(tmp_path, script) == lines


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("logs")


ACTS = st.lists(
    st.sampled_from(["line", "half", "look", "rename", "copy", "on"]), min_size=1, max_size=30
)


@settings(max_examples=150, deadline=None)
@given(acts=ACTS)
def test_no_line_is_lost_or_repeated_however_it_is_rotated(folders: Path, acts: list[str]) -> None:
    """A file is looked at before it is moved, or copied and cut: of one that was never seen nothing
    is known."""
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
                # Some of it was not read.
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


def test_bytes_that_are_no_text_are_shown_as_well_as_they_can(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    # A sign of two bytes is torn by the look.
    path.write_bytes("ä".encode()[:1])
    log = LogFile(path)
    first = [*log.look()]
    with path.open("ab") as file:
        file.write("ä".encode()[1:] + b"\n\xff\n")

    second = [*log.look(is_last=True)]

    assert (first, second) == ([], ["ä", "\N{REPLACEMENT CHARACTER}"])
