"""The temporary Prefect server of `muster train` is killed: the training goes on, and its verdict
is told as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ground import until
from tests.support.stage import processes_with

#: Trains until it is told to go on, and ends with the given exit code.
TRAINING = """
import os, sys, time
print("up", flush=True)
while not os.path.exists({goes_on!r}):
    time.sleep(0.05)
print("step 1", flush=True)
sys.exit({code})
"""


def kill_server(place: Path, *, for_good: bool) -> None:
    """SIGKILL the temporary server whose files are below `place`."""
    [home] = place.glob("muster-prefect-*")
    servers = processes_with("PREFECT_HOME", str(home))
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    if for_good:
        shutil.rmtree(home)


@pytest.mark.parametrize(
    ("code", "for_good", "verdict"),
    [
        (0, True, "completed: trainer is done"),
        pytest.param(3, True, "failed: UNKNOWN: trainer", marks=pytest.mark.thorough),
        pytest.param(0, False, "completed: trainer is done", marks=pytest.mark.thorough),
    ],
)
def test_a_training_outlives_its_temporary_server(
    code: int, for_good: bool, verdict: str, start_run: Callable, tmp_path: Path
) -> None:
    place, goes_on = tmp_path / "temporary", tmp_path / "goes-on"
    place.mkdir()
    program = TRAINING.format(goes_on=str(goes_on), code=code)
    trainer = {"command": ["python", "-c", program], "ready": {"log": "^up"}}
    spec = {"name": "trial", "workload": "grpo", "components": {"trainer": trainer}}
    run = start_run(spec, server=None, TMPDIR=str(place))
    run.until_event("component.ready", "trainer")

    kill_server(place, for_good=for_good)
    goes_on.touch()
    ended = run.wait()

    assert ended == (1 if code else 0), run.text()
    assert verdict in run.text()
    assert "Traceback" not in run.text()
    assert "EventsWorker" not in run.text()
    attempt = run.record()["attempts"][0]
    assert attempt["components"]["trainer"]["exit_code"] == code
    until(lambda: not run.pids(), "nothing is left of the run")
    assert processes_with("TMPDIR", str(place)) == []
