"""The GPUs that Muster may grant on this machine, and the leases on them, with a fake driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.processes import devices as module
from tasks.processes.devices import (
    BadDevices,
    DeviceHeld,
    DeviceLease,
    Devices,
    parse_devices,
    read_leases,
)
from tests.support.fake_nvml import FakeNvml, Gpu


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Install a fake GPU driver with four GPUs.

    Leases of these GPUs are separate from leases of real GPUs.
    """
    monkeypatch.setattr(module, "_PREFIX", f"muster/test-{os.getpid()}/")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeNvml.install(monkeypatch, [Gpu() for _ in range(4)])


@pytest.fixture
def numbers_without_gpus(monkeypatch: pytest.MonkeyPatch, muster_home: Path) -> None:
    """Simulate a machine without a GPU driver, on which MUSTER_GPUS defines four devices."""
    FakeNvml.install(monkeypatch, None)
    monkeypatch.setenv("MUSTER_GPUS", "0-3")


@pytest.mark.parametrize(
    ("text", "devices"),
    [("", ()), ("0,1,4-7", (0, 1, 4, 5, 6, 7)), (" 3 , 3 ", (3,)), ("2-2", (2,))],
)
def test_list_of_devices_is_parsed(text: str, devices: tuple[int, ...]) -> None:
    assert parse_devices(text, "MUSTER_GPUS") == devices


@pytest.mark.parametrize("text", ["a", "3-1", "-1", "0;1", "GPU-7f"])
def test_malformed_list_of_devices_is_rejected(text: str) -> None:
    with pytest.raises(BadDevices, match="Write MUSTER_GPUS=0,1,4-7"):
        parse_devices(text, "MUSTER_GPUS")


def test_all_gpus_of_the_driver_may_be_granted(nvml: FakeNvml) -> None:
    assert Devices.here().indices == (0, 1, 2, 3)


def test_muster_gpus_selects_gpus(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "2,1")

    assert Devices.here().indices == (1, 2)


def test_missing_gpu_in_muster_gpus_is_rejected(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "3,4")

    with pytest.raises(
        BadDevices, match=r"names GPU 4, which does not exist\. This machine has 4 GPUs"
    ):
        Devices.here()


@pytest.mark.parametrize("visible", ["1,3", "GPU-1,GPU-3"])
def test_only_gpus_that_an_outer_scheduler_makes_visible_may_be_granted(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert Devices.here().indices == (1, 3)


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        (Gpu(is_mig=True), "MIG is on"),
        (Gpu(ecc_errors=2), "2 uncorrectable ECC errors"),
        (Gpu(has_failed_rows=True), "rows of its memory"),
        (Gpu(is_lost=True), "GPU is lost"),
        # The driver cannot recover from the last error (Xid) by itself, so the GPU is not granted.
        (Gpu(recovery_action=1), "another recovery action"),
    ],
)
def test_only_the_gpu_with_a_problem_is_not_granted(nvml: FakeNvml, gpu: Gpu, problem: str) -> None:
    nvml.gpus[1] = gpu

    here = Devices.here()

    assert here.indices == (0, 2, 3)
    assert problem in here.problems[1]


def test_old_driver_without_recovery_actions_reports_no_problem(nvml: FakeNvml) -> None:
    nvml.gpus = [Gpu(recovery_action=None)]

    here = Devices.here()

    assert (here.indices, here.problems) == ((0,), {})


def test_driver_without_an_answer_raises_an_error(nvml: FakeNvml) -> None:
    nvml.is_silent = True

    with pytest.raises(OSError, match="can't be counted"):
        Devices.here()


def test_without_a_driver_only_muster_gpus_defines_devices(
    numbers_without_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Devices.here().indices == (0, 1, 2, 3)
    monkeypatch.delenv("MUSTER_GPUS")
    assert Devices.here().indices == ()


def test_leased_device_cannot_be_leased_again(numbers_without_gpus: None) -> None:
    here = Devices.here()
    first = DeviceLease(here, (1, 2), "run-a")

    with pytest.raises(DeviceHeld, match=r"device 2 of .* is already in use by run-a"):
        DeviceLease(here, (3, 2), "run-b")

    assert read_leases(here) == {1: "run-a", 2: "run-a"}
    first.close()
    assert read_leases(here) == {}
    DeviceLease(here, (3, 2), "run-b").close()


def test_lease_ends_with_its_process(numbers_without_gpus: None) -> None:
    code = (
        "import time\n"
        "from tasks.processes.devices import DeviceLease, Devices\n"
        "lease = DeviceLease(Devices.here(), (0,), 'other')\n"
        "print('has', flush=True)\n"
        "time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "has\n"
        assert read_leases(Devices.here()) == {0: "other"}
    finally:
        other.kill()
        other.wait()

    assert read_leases(Devices.here()) == {}


def test_lease_reports_a_gpu_that_the_driver_has_lost(nvml: FakeNvml) -> None:
    lease = DeviceLease(Devices.here(), (2, 3), "a-run")
    assert lease.why_unfit() == ""
    assert nvml.gpus is not None
    nvml.gpus.pop()

    assert lease.why_unfit().startswith("GPU 3 of ")

    nvml.is_silent = True
    assert "Driver Not Loaded" in lease.why_unfit()
    lease.close()


def test_leased_numbers_without_gpus_are_usable(numbers_without_gpus: None) -> None:
    lease = DeviceLease(Devices.here(), (1,), "a-run")

    assert lease.why_unfit() == ""

    lease.close()
