"""Which devices of this machine may be given, and who has them; the driver is a stand-in."""

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
    """A driver with four GPUs, and leases of the test's own."""
    monkeypatch.setattr(module, "_PREFIX", f"muster/test-{os.getpid()}/")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeNvml.installed(monkeypatch, [Gpu() for _ in range(4)])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, muster_home: Path) -> None:
    """No driver, and MUSTER_GPUS."""
    FakeNvml.installed(monkeypatch, None)
    monkeypatch.setenv("MUSTER_GPUS", "0-3")


@pytest.mark.parametrize(
    ("text", "found"), [("", ()), ("0,1,4-7", (0, 1, 4, 5, 6, 7)), (" 3 , 3 ", (3,)), ("2-2", (2,))]
)
def test_devices_are_listed_and_ranged(text: str, found: tuple[int, ...]) -> None:
    assert parse_devices(text, "MUSTER_GPUS") == found


@pytest.mark.parametrize("text", ["a", "3-1", "-1", "0;1", "GPU-7f"])
def test_what_is_no_device_is_named(text: str) -> None:
    with pytest.raises(BadDevices, match="Write MUSTER_GPUS=0,1,4-7"):
        parse_devices(text, "MUSTER_GPUS")


def test_all_of_the_driver_s_may_be_given(nvml: FakeNvml) -> None:
    assert Devices.here().indices == (0, 1, 2, 3)


def test_muster_gpus_says_which(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "2,1")

    assert Devices.here().indices == (1, 2)


def test_one_that_is_not_there_is_named(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "3,4")

    with pytest.raises(BadDevices, match=r"there is no GPU 4\. This machine has 4 GPUs"):
        Devices.here()


@pytest.mark.parametrize("seen", ["1,3", "GPU-1,GPU-3"])
def test_what_an_outer_scheduler_gave_is_all_there_is(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)

    assert Devices.here().indices == (1, 3)


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        (Gpu(is_mig=True), "MIG is on"),
        (Gpu(ecc_errors=2), "2 uncorrectable ECC errors"),
        (Gpu(has_failed_rows=True), "rows of memory"),
        (Gpu(is_lost=True), "GPU is lost"),
        # by an Xid that its driver does not recover from
        (Gpu(recovery_action=1), "requests a recovery"),
    ],
)
def test_an_unfit_one_is_not_given_and_the_others_are(nvml: FakeNvml, gpu: Gpu, why: str) -> None:
    nvml.gpus[1] = gpu

    here = Devices.here()

    assert here.indices == (0, 2, 3)
    assert why in here.problems[1]


def test_a_driver_too_old_to_say_what_a_gpu_needs_gives_all(nvml: FakeNvml) -> None:
    nvml.gpus = [Gpu(recovery_action=None)]

    here = Devices.here()

    assert (here.indices, here.problems) == ((0,), {})


def test_a_driver_that_does_not_answer_is_said(nvml: FakeNvml) -> None:
    nvml.is_silent = True

    with pytest.raises(OSError, match="can't be counted"):
        Devices.here()


def test_without_a_driver_nothing_is_given_but_stand_ins(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Devices.here().indices == (0, 1, 2, 3)
    monkeypatch.delenv("MUSTER_GPUS")
    assert Devices.here().indices == ()


def test_a_device_is_leased_to_one_at_a_time(stand_ins: None) -> None:
    here = Devices.here()
    first = DeviceLease(here, (1, 2), "run-a")

    with pytest.raises(DeviceHeld, match=r"device 2 of .* is held by run-a"):
        DeviceLease(here, (3, 2), "run-b")

    assert read_leases(here) == {1: "run-a", 2: "run-a"}
    first.close()
    assert read_leases(here) == {}
    DeviceLease(here, (3, 2), "run-b").close()


def test_a_lease_dies_with_its_owner(stand_ins: None) -> None:
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


def test_a_lease_says_what_its_driver_shows_no_more(nvml: FakeNvml) -> None:
    lease = DeviceLease(Devices.here(), (2, 3), "a-run")
    assert lease.why_unfit() == ""
    assert nvml.gpus is not None
    nvml.gpus.pop()

    assert lease.why_unfit().startswith("GPU 3 of ")

    nvml.is_silent = True
    assert "Driver Not Loaded" in lease.why_unfit()
    lease.close()


def test_a_lease_of_stand_ins_is_fit(stand_ins: None) -> None:
    lease = DeviceLease(Devices.here(), (1,), "a-run")

    assert lease.why_unfit() == ""

    lease.close()
