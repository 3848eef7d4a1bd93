"""Another user of the machine can neither read the data of a run nor use its Prefect server.

The tests try both from a process that has changed its user.
"""

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

from tests.support.host_environment import wait_for, with_absolute_cwd
from tests.support.supervised_components import processes_with

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
SECRET = "a-key-to-the-bucket"
#: A training program that ends as soon as the file in its second argument exists.
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
#: Names of the files and folders that `TRAINER` writes.
OUTPUTS = ("checkpoints", "step-1", "metrics.jsonl")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


@pytest.fixture
def home() -> Iterator[Path]:
    """Yield a new MUSTER_HOME below a directory that every user may enter.

    During the test, the umask is 022, so new files are readable for all users by default.
    """
    old_umask = os.umask(0o022)
    directory = Path(tempfile.mkdtemp(prefix="muster-another-", dir="/tmp"))
    directory.chmod(0o755)
    (directory / "home").mkdir()
    yield directory / "home"
    os.umask(old_umask)
    shutil.rmtree(directory)


def call_as_another_user(ask: Callable[[], Any]) -> Any:
    """Call a function in a process of another user, and return the result of the function.

    The process sends the result as JSON. If the function raises an exception, the result is the
    text of the exception.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(())
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write_end, json.dumps(ask()).encode())
        except BaseException as error:
            os.write(write_end, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def filter_readable(paths: list[str]) -> list[str]:
    """Return those of the given paths that this process can read."""
    readable = []
    for path in paths:
        try:
            if os.path.isdir(path):
                os.listdir(path)
            else:
                Path(path).read_bytes()
            readable.append(path)
        except OSError:
            pass
    return readable


def request_status(url: str, body: Any = None, **headers: str) -> int:
    """Send a request without a password, and return the HTTP status of the response.

    The request is a POST request with the JSON of `body`, or a GET request if `body` is None.
    """
    data = None if body is None else json.dumps(body).encode()
    named_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        url, data, {"Content-Type": "application/json", **named_headers}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_another_user_can_neither_read_a_run_nor_use_its_server(home: Path) -> None:
    spec_file = home.parent / "spec.yaml"
    output = home.parent / "output.txt"
    end_file = home.parent / "end"
    spec = with_absolute_cwd(
        {
            "name": "private",
            "workload": "sft",
            "env": {"BUCKET_TOKEN": SECRET},
            "components": {
                "trainer": {
                    "command": [sys.executable, "-c", TRAINER, "${attempt.dir}", str(end_file)]
                }
            },
        }
    )
    spec_file.write_text(yaml.safe_dump(spec))
    spec_file.chmod(0o600)
    with output.open("w") as stdout:
        process = subprocess.Popen(
            (sys.executable, "-m", "flows.train", str(spec_file)),
            cwd=ROOT,
            env={**os.environ, "MUSTER_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
        )
    try:
        logs = wait_for(
            lambda: [path for path in home.rglob("trainer.log") if "training" in path.read_text()],
            "the trainer runs",
            within_s=300,
        )
        [api] = re.findall(r"Prefect server (\S+)", output.read_text())
        files = [str(home), *map(str, home.rglob("*"))]
        run_id = logs[0].parents[1].name
        environs = [f"/proc/{pid}/environ" for pid in processes_with("MUSTER_RUN_ID", run_id)]

        # Send a first request, so that this process imports all Python modules that a request
        # needs. The other user, who sends the next requests, may not be able to read the files of
        # these modules.
        assert request_status(f"{api}/health") == 200
        read_paths = call_as_another_user(lambda: filter_readable([*files, *environs]))
        query_status = call_as_another_user(lambda: request_status(f"{api}/flow_runs/filter", {}))
        submit_status = call_as_another_user(
            lambda: request_status(f"{api}/flow_runs/", {"flow_id": "any"})
        )

        assert len(environs) >= 2 and len(files) > 10
        assert filter_readable(files) == files
        assert read_paths == []
        assert (query_status, submit_status) == (401, 401)
        end_file.touch()
        assert process.wait(60) == 0, output.read_text()
    finally:
        process.terminate()
        process.wait(60)
    # Ignore the files of Prefect's web pages. Prefect copies the original modes of these files, but
    # other users cannot enter the folder that contains the files.
    pages = {path for folder in home.glob("cache/prefect-ui-*/*") for path in folder.rglob("*")}
    # The user's umask decides who may read the trainer's files. But other users cannot enter the
    # folder of the run, so they cannot read these files in any case.
    of_trainer = {path for path in home.rglob("*") if path.name in OUTPUTS}
    private = {home, *home.rglob("*")} - pages - of_trainer
    assert len(of_trainer) == len(OUTPUTS)
    assert [str(path) for path in private if path.stat().st_mode & 0o077] == []
