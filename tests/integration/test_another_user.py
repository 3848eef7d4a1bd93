"""What another user of the machine gets of a run that is under way: nothing. Tried as one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ground import in_checkout, until
from tests.support.stage import processes_with

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
SECRET = "a-key-to-the-bucket"
#: It goes on until it is told to end.
TRAINER = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
(place / "checkpoints").mkdir()
(place / "checkpoints" / "step-1").write_text("weights")
(place / "metrics.jsonl").write_text('{"step": 1}\\n')
print("training", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


@pytest.fixture
def home() -> Iterator[Path]:
    """As somebody has it whose umask is the usual one, in a place that everybody can enter."""
    before = os.umask(0o022)
    place = Path(tempfile.mkdtemp(prefix="muster-another-", dir="/tmp"))
    place.chmod(0o755)
    (place / "home").mkdir()
    yield place / "home"
    os.umask(before)
    shutil.rmtree(place)


def as_another_user(asked: Callable[[], Any]) -> Any:
    """What a function returns, as JSON, in a process of somebody else."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(())
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(there, json.dumps(asked()).encode())
        except BaseException as error:
            os.write(there, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(there)
    with os.fdopen(here) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def readable(paths: list[str]) -> list[str]:
    found = []
    for path in paths:
        try:
            if os.path.isdir(path):
                os.listdir(path)
            else:
                Path(path).read_bytes()
            found.append(path)
        except OSError:
            pass
    return found


def answer(url: str, content: Any = None, **headers: str) -> int:
    """The status of an answer to somebody who has no password."""
    data = None if content is None else json.dumps(content).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **named})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_another_user_gets_nothing_of_a_run(home: Path) -> None:
    file, output, end = (home.parent / name for name in ("spec.yaml", "output.txt", "end"))
    spec = in_checkout(
        {
            "name": "private",
            "workload": "sft",
            "env": {"BUCKET_TOKEN": SECRET},
            "components": {
                "trainer": {"command": [sys.executable, "-c", TRAINER, "${attempt.dir}", str(end)]}
            },
        }
    )
    file.write_text(yaml.safe_dump(spec))
    file.chmod(0o600)
    with output.open("w") as stdout:
        process = subprocess.Popen(
            (sys.executable, "-m", "flows.train", str(file)),
            cwd=ROOT,
            env={**os.environ, "MUSTER_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
        )
    try:
        logs = until(
            lambda: [path for path in home.rglob("trainer.log") if "training" in path.read_text()],
            "the run is under way",
            within_s=300,
        )
        [api] = re.findall(r"Prefect server (\S+)", output.read_text())
        files = [str(home), *map(str, home.rglob("*"))]
        run_id = logs[0].parents[1].name
        environs = [f"/proc/{pid}/environ" for pid in processes_with("MUSTER_RUN_ID", run_id)]

        # Also loads what a process of somebody else could not: Python's own files may be closed.
        assert answer(f"{api}/health") == 200
        read = as_another_user(lambda: readable([*files, *environs]))
        asked = as_another_user(lambda: answer(f"{api}/flow_runs/filter", {}))
        submitted = as_another_user(lambda: answer(f"{api}/flow_runs/", {"flow_id": "any"}))

        assert len(environs) >= 2 and len(files) > 10
        assert readable(files) == files
        assert read == []
        assert (asked, submitted) == (401, 401)
        end.touch()
        assert process.wait(60) == 0, output.read_text()
    finally:
        process.terminate()
        process.wait(60)
    # Prefect copies its public pages with their modes. The folder around them is closed.
    pages = {path for folder in home.glob("cache/prefect-ui-*/*") for path in folder.rglob("*")}
    private = {home, *home.rglob("*")} - pages
    assert [str(path) for path in private if path.stat().st_mode & 0o077] == []
