"""GPUs that the programs of a run see. The variable MUSTER_GPUS replaces real GPUs."""

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

from tasks.processes.devices import DeviceLease, Devices, read_leases
from tests.acceptance.conftest import Run
from tests.support.host_environment import ROOT, wait_for, with_absolute_cwd

pytestmark = pytest.mark.slow

#: A shell script that prints its visible GPUs, and then runs until Muster stops the script.
PRINT_GPUS = "echo sees $CUDA_VISIBLE_DEVICES of $MUSTER_NODES; exec sleep 600"


def build_spec(gpus: int, **components: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a run with this number of GPUs and these components."""
    return {
        "name": "trial",
        "workload": "sft",
        "gang": {"gpus_per_node": gpus, "cpus_per_gpu": 1},
        "components": components,
    }


def build_component(text: str = PRINT_GPUS, **further_keys: Any) -> dict[str, Any]:
    """Return the spec of a component that is ready after its shell script has printed "sees".

    Args:
        text: The shell script.
        **further_keys: Further keys of the component.
    """
    return {"command": ["sh", "-c", text], "ready": {"log": "sees"}, **further_keys}


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Simulate four GPUs for the first run of a test, and return the GPUs.

    The run cannot use GPUs that the test leases for another program.
    """
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home-0"))
    monkeypatch.setenv("MUSTER_GPUS", "0-3")
    return Devices.here()


def read_visible_gpus(run: Run, component: str) -> str:
    """Return the GPUs that the component printed, such as "0,1"."""
    log = run.directory / "attempt-01" / f"{component}.log"
    output_words: list[str] = wait_for(
        lambda: log.exists() and log.read_text().split(), "the component has printed its GPUs"
    )
    return output_words[1]


def test_components_of_a_run_share_the_devices_that_are_free(
    start_run: Callable[..., Run], devices: Devices
) -> None:
    other_lease = DeviceLease(devices, (1,), "another program")
    run = start_run(build_spec(3, api=build_component(gpus=1), trainer=build_component()))
    run.until_event("attempt.ready")

    assert (read_visible_gpus(run, "api"), read_visible_gpus(run, "trainer")) == ("0", "2,3")
    assert sorted(read_leases(devices)) == [0, 1, 2, 3]

    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert read_leases(devices) == {1: "another program"}
    other_lease.close()


@pytest.mark.parametrize(
    "command", [("flows.train",), ("tasks.command", "train")], ids=["flows.train", "muster"]
)
def test_invalid_list_of_devices_is_reported_before_the_start(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "spec.yaml"
    home = tmp_path / "home"
    path.write_text(yaml.safe_dump(with_absolute_cwd(build_spec(1, trainer=build_component()))))
    env = os.environ | {"MUSTER_GPUS": "0;1", "MUSTER_HOME": str(home)}

    result = subprocess.run(
        [sys.executable, "-m", *command, str(path)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 2, result.stdout + result.stderr
    fault = (
        "MUSTER_GPUS=0;1 is not valid: '0;1' is neither the number of a device nor a range. "
        "Write MUSTER_GPUS=0,1,4-7"
    )
    assert fault in result.stderr
    assert not home.exists()


def test_run_waits_for_devices_that_another_program_uses(
    start_run: Callable[..., Run], devices: Devices
) -> None:
    other_lease = DeviceLease(devices, (0, 1), "another program")
    run = start_run(build_spec(3, trainer=build_component()))
    wait_for(
        lambda: "programs that are not in this queue use 2 GPUs" in run.text(),
        "the run names the reason for its wait",
    )

    other_lease.close()

    run.until_event("attempt.ready")
    assert read_visible_gpus(run, "trainer") == "0,1,2"


def test_devices_of_a_killed_run_stay_leased_until_its_last_process_has_ended(
    start_run: Callable[..., Run], devices: Devices
) -> None:
    stubborn = "trap '' TERM; echo sees $CUDA_VISIBLE_DEVICES; while :; do sleep 0.1; done"
    run = start_run(build_spec(2, trainer=build_component(stubborn, stop={"grace_s": 2})))
    pid = run.until_event("component.spawned", "trainer")["pid"]
    run.until_event("attempt.ready")

    run.process.send_signal(signal.SIGKILL)

    while True:
        leases = read_leases(devices)
        is_alive = os.path.exists(f"/proc/{pid}")
        assert leases or not is_alive
        if not leases:
            break
    wait_for(lambda: run.pids() == [], "no process of the run remains")
