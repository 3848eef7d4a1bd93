"""The private temporary folder of each process of Muster."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.runner import Runner

from tasks.processes.identity import host_name
from tasks.server.server import make_server_command

ROOT = Path(__file__).resolve().parents[2]
#: Program that prints its own temporary folder and the temporary folder of a child process, and
#: then waits for a line on stdin.
PROCESS = """
import subprocess, sys, tempfile
from tasks.processes.temporary import use_own_temporary_folder
assert use_own_temporary_folder() == use_own_temporary_folder()
child = subprocess.run(
    [sys.executable, "-S", "-c", "import tempfile; print(tempfile.gettempdir())"],
    capture_output=True, text=True,
)
print(tempfile.gettempdir(), flush=True)
print(child.stdout.strip(), flush=True)
sys.stdin.readline()
"""


class Process:
    """A process of Muster that uses its own temporary folder."""

    def __init__(self, home: Path, tmpdir: Path) -> None:
        self._popen = subprocess.Popen(
            (sys.executable, "-c", PROCESS),
            cwd=ROOT,
            env={**os.environ, "MUSTER_HOME": str(home), "TMPDIR": str(tmpdir)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._popen.stdout is not None
        self.folder = Path(self._popen.stdout.readline().strip())
        self.folder_of_child = Path(self._popen.stdout.readline().strip())

    def end(self) -> None:
        self._popen.communicate("end\n", timeout=30)

    def kill(self) -> None:
        self._popen.send_signal(signal.SIGKILL)
        self._popen.communicate(timeout=30)


@pytest.fixture
def processes(muster_home: Path, tmp_path: Path) -> Iterator[list[Process]]:
    (tmp_path / "tmp").mkdir()
    started = [Process(muster_home, tmp_path / "tmp") for _ in range(2)]
    yield started
    for process in started:
        process.kill()


def test_each_process_has_a_private_folder_and_its_children_use_tmpdir(
    processes: list[Process], muster_home: Path, tmp_path: Path
) -> None:
    here = muster_home / "temp" / host_name()
    folders = [process.folder for process in processes]

    assert [folder.parent for folder in folders] == [here, here]
    assert folders[0] != folders[1]
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders)
    assert [process.folder_of_child for process in processes] == [tmp_path / "tmp"] * 2


def test_folder_is_removed_at_the_end_of_its_process_or_by_the_next_process(
    processes: list[Process], muster_home: Path, tmp_path: Path
) -> None:
    here = muster_home / "temp" / host_name()
    ended, killed = (process.folder for process in processes)

    processes[0].end()
    processes[1].kill()
    left = [path for path in here.iterdir() if path.is_dir()]
    later = Process(muster_home, tmp_path / "tmp")
    found = [path for path in here.iterdir() if path.is_dir()]
    later.end()

    assert left == [killed]
    assert found == [later.folder]
    assert not ended.exists() and not killed.exists()


def test_prefect_keeps_the_files_of_its_runner_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prefect has no setting for its runner's folder, so Muster sets Python's temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert Runner(name="a")._tmp_dir.parent == tmp_path / "runner_storage"


def test_prefect_server_has_its_ui_files_in_the_home(muster_home: Path, tmp_path: Path) -> None:
    command = make_server_command(tmp_path, 4200)

    place = Path(command.env["PREFECT_SERVER_UI_STATIC_DIRECTORY"])
    assert place.parent == muster_home / "cache"
