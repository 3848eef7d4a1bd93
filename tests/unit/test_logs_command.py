"""Tests of `muster logs`: which modules and which bytes of the logs the command reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.record import tail
from tasks.record.log_file import LogFile
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.spec.errors import BadArgument
from tasks.train.local_runs import find_local_run
from tasks.train.logs_command import logs
from tests.support.documents import ROOT

RUN = "trial-sft-20260102-000000-bbbbbbbb"
#: Packages that take long to import. `muster logs` must not import them.
SLOW_PACKAGES = ("prefect", "ray", "httpx", "fastapi", "sqlalchemy", "plotext", "yaml")


@pytest.fixture
def log(muster_home: Path) -> Path:
    """Create the first attempt of a run, and return the path of the trainer's log file."""
    place = RunPlace.of(RUN).attempt(1)
    place.directory.mkdir(parents=True)
    return place.log("trainer")


def write_record(run_id: str, *, started_at: float) -> None:
    """Write the `run.json` of a run that began at `started_at`, in UTC epoch seconds."""
    place = RunPlace.of(run_id)
    place.directory.mkdir(parents=True, exist_ok=True)
    record = RunJson(run_id=run_id, state=RunState.RUNNING, started_at=started_at)
    place.record.write_text(record.model_dump_json())


class CountedReads:
    """Counts the bytes that `os.pread` returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes_read = 0
        self._pread = os.pread
        monkeypatch.setattr(os, "pread", self._read)

    def _read(self, fd: int, length: int, offset: int) -> bytes:
        content = self._pread(fd, length, offset)
        self.bytes_read += len(content)
        return content


@pytest.mark.parametrize(
    ("name", "options", "unneeded"),
    [
        (RUN, [], (*SLOW_PACKAGES, "pydantic")),
        (RUN[:-5], ["trainer"], (*SLOW_PACKAGES, "pydantic")),
        (RUN, ["--tail", "2"], (*SLOW_PACKAGES, "pydantic")),
        # To find the latest run, `muster logs` must read records, and therefore import pydantic.
        ("latest", ["trainer"], SLOW_PACKAGES),
    ],
)
def test_log_of_a_local_run_is_printed_without_slow_imports_and_without_server(
    log: Path, name: str, options: list[str], unneeded: tuple[str, ...]
) -> None:
    log.write_text("step 1\nstep 2\n")
    write_record(RUN, started_at=2.0)
    write_record("older-sft-20260103-000000-cccccccc", started_at=1.0)
    program = (
        "import sys\n"
        "from tasks.command import main\n"
        "code = main(sys.argv[1:])\n"
        f"print([name for name in {unneeded} if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    # Nothing listens at this address, so any request to the Prefect server would print a warning.
    server = {"PREFECT_API_URL": "http://127.0.0.1:9/api" if name != "latest" else ""}

    done = subprocess.run(
        [sys.executable, "-c", program, "logs", name, *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | server,
    )

    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout == "step 1\nstep 2\n"


def test_last_lines_are_read_from_the_end_of_the_log(
    log: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with log.open("wb") as file:
        file.truncate(100 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast but one\nlast\n")
    reads = CountedReads(monkeypatch)

    logs(RUN, "trainer", tail=2)

    assert capfdbinary.readouterr().out == b"last but one\nlast\n"
    assert reads.bytes_read < 4 * tail.BLOCK_BYTES


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("block_bytes", [7, 64, 1 << 18])
def test_whole_log_is_printed_unchanged_with_a_newline_at_its_end(
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    block_bytes: int,
    end: bytes,
) -> None:
    content = b"".join(b"step %d\tloss \xff\r\n" % step for step in range(200)) + b"end"
    log.write_bytes(content + end)
    monkeypatch.setattr(tail, "BLOCK_BYTES", block_bytes)

    logs(RUN, "trainer")

    assert capfdbinary.readouterr().out == content + b"\n"


def test_lines_of_a_run_with_one_component_have_no_name(
    log: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log.write_bytes(b"step 1\nstep 2\n")

    logs(RUN)

    assert capfdbinary.readouterr().out == b"step 1\nstep 2\n"


@pytest.mark.parametrize(
    ("components", "prefix"), [(["trainer"], b""), (["trainer", "api"], b"trainer | ")]
)
def test_followed_lines_have_a_name_if_the_spec_has_several_components(
    log: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    components: list[str],
    prefix: bytes,
) -> None:
    log.write_bytes(b"step 1\n")
    spec = {"components": {name: {"command": ["true"]} for name in components}}
    RunPlace.of(RUN).attempt(1).spec.write_text(json.dumps(spec))
    record = RunJson(run_id=RUN, state=RunState.COMPLETED, started_at=1.0, ended_at=2.0)
    RunPlace.of(RUN).record.write_text(record.model_dump_json())

    logs(RUN, follow=True)

    assert capfdbinary.readouterr().out == prefix + b"step 1\n"


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 18])
def test_each_line_begins_with_the_name_of_its_component(
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    block_bytes: int,
    end: bytes,
) -> None:
    lines = [b"step %d\tloss \xff\r" % step for step in range(20)] + [b"", b"end"]
    log.write_bytes(b"\n".join(lines) + end)
    log.with_name("api.log").write_bytes(b"one\ntwo" + end)
    log.with_name("empty.log").touch()
    monkeypatch.setattr(tail, "BLOCK_BYTES", block_bytes)

    logs(RUN)

    api_lines = b"api     | one\napi     | two\n"
    trainer_lines = b"".join(b"trainer | %s\n" % line for line in lines)
    assert capfdbinary.readouterr().out == api_lines + trainer_lines


def test_rest_of_rotated_logs_is_read_in_order(log: Path) -> None:
    log.with_name("trainer.log.1").write_bytes(b"first\nsecond")
    log.write_bytes(b"third\nfourth")

    rest = b"".join(LogFile(log).read_rest())

    assert rest == b"first\nsecond\nthird\nfourth\n"


def test_whole_log_is_read_in_blocks_of_limited_size(log: Path) -> None:
    size = 5 * tail.BLOCK_BYTES
    log.write_bytes(b"x" * size)

    blocks = [len(block) for block in LogFile(log).read_rest()]

    assert sum(blocks) == size + 1
    # The first block may be larger than the others, because it is also used to find rotated files.
    assert max(blocks) <= 2 * tail.BLOCK_BYTES


@pytest.mark.parametrize(
    ("name", "is_found"),
    [
        (RUN, True),
        (RUN[:-1], True),
        # A text must begin with the name, the workload and the complete time of the run. These
        # texts do not, so the search must find nothing.
        ("trial", False),
        ("trial-sft-20260102-0000", False),
        ("latest", False),
        ("../runs/" + RUN, False),
        ("", False),
    ],
)
def test_local_run_is_found_by_its_id(log: Path, name: str, is_found: bool) -> None:
    place = find_local_run(name)

    assert (place is not None) == is_found


@pytest.mark.parametrize(
    ("variables", "files", "is_local"),
    [
        ({}, {}, True),
        ({}, {"pyproject.toml": "[project]\ndependencies = ['prefect']", ".env": "A=b"}, True),
        # A server is configured, which may know a newer run of another machine. So the latest run
        # on this machine must not be used.
        ({"PREFECT_API_URL": "http://server/api"}, {}, False),
        ({"PREFECT_PROFILES_PATH": "profiles.toml"}, {}, False),
        ({}, {"prefect.toml": '[api]\nurl = "http://server/api"'}, False),
        ({}, {"pyproject.toml": "[tool.prefect.api]"}, False),
        ({}, {".env": "PREFECT_API_URL=http://server/api"}, False),
    ],
)
def test_latest_run_is_local_if_no_server_is_configured(
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    files: dict[str, str],
    is_local: bool,
) -> None:
    write_record(RUN, started_at=1.0)
    project = tmp_path / "project"
    project.mkdir()
    for name, text in files.items():
        (project / name).write_text(text)
    monkeypatch.chdir(project)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "no-prefect"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    place = find_local_run("latest")

    assert (place is not None) is is_local


def test_two_local_runs_with_the_same_beginning_are_ambiguous(log: Path) -> None:
    RunPlace.of(RUN[:-1] + "c").attempt(1).directory.mkdir(parents=True)

    assert find_local_run(RUN[:-1]) is None
    assert find_local_run(RUN) is not None


def test_unknown_run_is_rejected(log: Path) -> None:
    with pytest.raises(BadArgument):
        logs("other-sft-20260102-000000-bbbbbbbb")
