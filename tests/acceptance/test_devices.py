"""Which GPUs the programs of a run see; MUSTER_GPUS stands in for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.processes.devices import DeviceLease, Devices, leased
from tests.acceptance.conftest import Run
from tests.support.ground import ROOT, in_checkout, until

pytestmark = pytest.mark.slow

SHOWS = "echo sees $CUDA_VISIBLE_DEVICES of $MUSTER_NODES; exec sleep 600"


def spec(gpus: int, **components: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "trial",
        "workload": "sft",
        "gang": {"gpus_per_node": gpus, "cpus_per_gpu": 1},
        "components": components,
    }


def program(text: str = SHOWS, **more: Any) -> dict[str, Any]:
    return {"command": ["sh", "-c", text], "ready": {"log": "sees"}, **more}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Four devices, of this process and of the run that a test starts first."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home-0"))
    monkeypatch.setenv("MUSTER_GPUS", "0-3")
    return Devices.here()


def seen(run: Run, component: str) -> str:
    log = run.directory / "attempt-01" / f"{component}.log"
    words: list[str] = until(lambda: log.exists() and log.read_text().split(), "it says")
    return words[1]


def test_a_run_sees_what_nobody_else_has_and_its_programs_share_it(
    start_run: Callable[..., Run], here: Devices
) -> None:
    other = DeviceLease(here, (1,), "somebody else")
    run = start_run(spec(3, api=program(gpus=1), trainer=program()))
    run.until_event("attempt.ready")

    assert (seen(run, "api"), seen(run, "trainer")) == ("0", "2,3")
    assert sorted(leased(here)) == [0, 1, 2, 3]

    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert leased(here) == {1: "somebody else"}
    other.close()


@pytest.mark.parametrize(
    "command", [("flows.train",), ("tasks.command", "train")], ids=["flows.train", "muster"]
)
def test_devices_that_nobody_can_name_end_a_direct_run_before_anything_starts(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    path, home = tmp_path / "spec.yaml", tmp_path / "home"
    path.write_text(yaml.safe_dump(in_checkout(spec(1, trainer=program()))))
    env = os.environ | {"MUSTER_GPUS": "0;1", "MUSTER_HOME": str(home)}

    done = subprocess.run(
        [sys.executable, "-m", *command, str(path)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 2, done.stdout + done.stderr
    assert "MUSTER_GPUS=0;1: '0;1' is no device: write MUSTER_GPUS=0,1,4-7" in done.stderr
    assert not home.exists()


def test_a_run_waits_for_devices_that_another_one_has(
    start_run: Callable[..., Run], here: Devices
) -> None:
    other = DeviceLease(here, (0, 1), "somebody else")
    run = start_run(spec(3, trainer=program()))
    until(lambda: "others than the runs of this queue have 2 GPUs" in run.text(), "it says why")

    other.close()

    run.until_event("attempt.ready")
    assert seen(run, "trainer") == "0,1,2"


def test_devices_of_a_killed_run_are_held_until_its_last_process_has_gone(
    start_run: Callable[..., Run], here: Devices
) -> None:
    stubborn = "trap '' TERM; echo sees $CUDA_VISIBLE_DEVICES; while :; do sleep 0.1; done"
    run = start_run(spec(2, trainer=program(stubborn, stop={"grace_s": 2})))
    pid = run.until_event("component.spawned", "trainer")["pid"]
    run.until_event("attempt.ready")

    run.process.send_signal(signal.SIGKILL)

    while True:
        has, is_alive = leased(here), os.path.exists(f"/proc/{pid}")
        assert has or not is_alive
        if not has:
            break
    until(lambda: run.pids() == [], "nothing is left")
