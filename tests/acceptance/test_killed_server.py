"""A training continues after the temporary Prefect server of `muster train` was killed.

The final state of the run is reported as usual.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.host_environment import wait_for
from tests.support.supervised_components import processes_with

#: Template of a training program. The program runs until the file `end_file` exists, and then exits
#: with the exit code `code`.
TRAINING = """
import os, sys, time
print("up", flush=True)
while not os.path.exists({end_file!r}):
    time.sleep(0.05)
print("step 1", flush=True)
sys.exit({code})
"""


def kill_server(directory: Path, *, for_good: bool) -> None:
    """Send SIGKILL to the temporary Prefect server whose files are below the directory.

    If `for_good` is true, delete the server's files, so that the server cannot start again.
    """
    [home] = directory.glob("muster-prefect-*")
    servers = processes_with("PREFECT_HOME", str(home))
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    if for_good:
        shutil.rmtree(home)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "for_good", "verdict"),
    [
        (0, True, "completed: trainer is done"),
        (3, True, "failed: UNKNOWN: trainer"),
        (0, False, "completed: trainer is done"),
    ],
)
def test_training_survives_its_temporary_server(
    code: int, for_good: bool, verdict: str, start_run: Callable, tmp_path: Path
) -> None:
    directory = tmp_path / "temporary"
    end_file = tmp_path / "goes-on"
    directory.mkdir()
    program = TRAINING.format(end_file=str(end_file), code=code)
    trainer = {"command": ["python", "-c", program], "ready": {"log": "^up"}}
    spec = {"name": "trial", "workload": "grpo", "components": {"trainer": trainer}}
    run = start_run(spec, server=None, TMPDIR=str(directory))
    run.until_event("component.ready", "trainer")

    kill_server(directory, for_good=for_good)
    end_file.touch()
    exit_code = run.wait()

    assert exit_code == (1 if code else 0), run.text()
    assert verdict in run.text()
    assert "Traceback" not in run.text()
    assert "EventsWorker" not in run.text()
    attempt = run.record()["attempts"][0]
    assert attempt["components"]["trainer"]["exit_code"] == code
    wait_for(lambda: not run.pids(), "no process of the run remains")
    assert processes_with("TMPDIR", str(directory)) == []
