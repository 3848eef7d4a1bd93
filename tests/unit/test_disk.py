"""Tests that a full or hanging disk delays only the thread that writes to it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.record.disk import DiskThread
from tasks.record.events import Event, EventLog
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tests.support.supervised_components import DEADLINE_S


@pytest.fixture
def disk() -> DiskThread:
    """The thread that writes files for the rest of the program."""
    return DiskThread("disk")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Directory of a very small file system, which a test can fill."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> Path:
    """Create a file that fills the file system."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as f, pytest.raises(OSError, match="No space left"):
        while True:
            f.write(b"x" * 4096)
    return filler


def block(disk: DiskThread) -> threading.Event:
    """Block the disk thread, as a hanging file server does, until the returned event is set."""
    may_continue = threading.Event()
    is_blocked = threading.Event()

    def wait() -> None:
        is_blocked.set()
        may_continue.wait(DEADLINE_S)

    disk.do(wait)
    assert is_blocked.wait(DEADLINE_S)
    return may_continue


def test_appended_lines_keep_their_order(disk: DiskThread, tmp_path: Path) -> None:
    path = tmp_path / "lines"

    for number in range(1000):
        disk.append(path, str(number))

    assert disk.flush(DEADLINE_S)
    assert path.read_text().split() == [str(number) for number in range(1000)]


def test_only_the_last_of_many_replacements_is_written(disk: DiskThread, tmp_path: Path) -> None:
    path = tmp_path / "file"
    may_continue = block(disk)
    built: list[int] = []

    for number in range(1000):
        disk.replace(path, lambda number=number: built.append(number) or str(number))
    may_continue.set()

    assert disk.flush(DEADLINE_S)
    assert path.read_text() == "999"
    assert built == [999]


def test_future_has_the_result_or_the_error(disk: DiskThread) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert disk.do(lambda: 4).result(DEADLINE_S) == 4
    with pytest.raises(OSError, match="No space left"):
        disk.do(full).result(DEADLINE_S)


def test_failed_writes_are_retried_when_there_is_room(
    disk: DiskThread, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = small / "lines"
    whole = small / "whole"
    lines.write_text("first\n")
    filler = fill(small)

    for number in range(2000):
        disk.append(lines, f"{number:08}")
    disk.replace(whole, lambda: "all of it")
    assert not disk.flush(0.2)
    filler.unlink()

    assert disk.flush(DEADLINE_S)
    assert lines.read_text().split() == ["first", *(f"{number:08}" for number in range(2000))]
    assert whole.read_text() == "all of it"
    assert caplog.text.count(f"{whole} could not be written") == 1


def test_listeners_get_events_while_the_disk_hangs(disk: DiskThread, tmp_path: Path) -> None:
    heard: list[Event] = []
    record = RunRecord(tmp_path / "run.json", run_id="r", flow_run_id="f", disk=disk)
    log = EventLog(tmp_path / "events.jsonl", (record.observe, heard.append), disk=disk)
    record.begin_attempt(1)
    record.move(RunState.ADMITTED)
    assert disk.flush(DEADLINE_S)
    may_continue = block(disk)

    for name in ("attempt.begun", "component.spawned", "component.exited"):
        log.emit(name, "trainer", pid=7, exit_code=1)

    assert [event.name for event in heard] == [
        "attempt.begun",
        "component.spawned",
        "component.exited",
    ]
    assert record.state is RunState.STARTING
    assert RunJson.read(tmp_path / "run.json").state is RunState.ADMITTED
    may_continue.set()
    assert disk.flush(DEADLINE_S)
    assert RunJson.read(tmp_path / "run.json") == record.content
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [event.name for event in heard]
