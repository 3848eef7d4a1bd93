"""A fake of the module `pynvml`, with the functions and constants that Muster uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    """Fake of the base class of all errors of NVML."""


class NVMLError_LibraryNotFound(NVMLError):
    """Fake of the error that NVML raises on a machine without an NVIDIA driver."""


@dataclass(kw_only=True)
class Gpu:
    """One GPU of the fake driver."""

    used_mib: int = 3
    is_mig: bool = False
    ecc_errors: int = 0
    has_failed_rows: bool = False
    is_lost: bool = False
    #: Repair that the driver recommends for the GPU, as a number of NVML's enum
    #: `nvmlDeviceGpuRecoveryAction_t`. None if the driver is too old to recommend repairs.
    recovery_action: int | None = 0
    #: Process id and used GPU memory in MiB of each process. The memory is None if unknown.
    processes: Sequence[tuple[int, int | None]] = ()


@dataclass
class FakeNvml:
    """A fake NVIDIA driver, which takes the place of the module `pynvml`."""

    #: GPUs of the machine. None stands for a machine without a driver.
    gpus: list[Gpu] | None
    #: True if the driver is installed but does not answer requests.
    is_silent: bool = False
    NVMLError: type = field(default=NVMLError, init=False)
    NVMLError_LibraryNotFound: type = field(default=NVMLError_LibraryNotFound, init=False)
    NVML_DEVICE_MIG_ENABLE: int = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED: int = 1
    NVML_VOLATILE_ECC: int = 0
    nvmlMemory_v2: int = 2
    NVML_SUCCESS: int = 0

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu] | None) -> FakeNvml:
        """Replace the module `pynvml` by a fake driver until the test ends; return the driver."""
        nvml = FakeNvml(gpus)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
        return nvml

    def nvmlInit(self) -> None:
        if self.gpus is None:
            raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
        if self.is_silent:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus or ())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[int, Gpu]:
        gpu = (self.gpus or [])[index]
        if gpu.is_lost:
            raise NVMLError("GPU is lost")
        return index, gpu

    def nvmlDeviceGetUUID(self, handle: tuple[int, Gpu]) -> str:
        return f"GPU-{handle[0]}"

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[int, Gpu], version: int) -> Any:
        return SimpleNamespace(used=handle[1].used_mib * 2**20)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: tuple[int, Gpu]) -> list[Any]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * 2**20)
            for pid, mib in handle[1].processes
        ]

    def nvmlDeviceGetUtilizationRates(self, handle: tuple[int, Gpu]) -> Any:
        return SimpleNamespace(gpu=100 if handle[1].processes else 0)

    def nvmlDeviceGetMigMode(self, handle: tuple[int, Gpu]) -> list[int]:
        return [int(handle[1].is_mig)] * 2

    def nvmlDeviceGetTotalEccErrors(self, handle: tuple[int, Gpu], kind: int, which: int) -> int:
        return handle[1].ecc_errors

    def nvmlDeviceGetRemappedRows(self, handle: tuple[int, Gpu]) -> tuple[int, int, int, int]:
        return 0, 0, 0, int(handle[1].has_failed_rows)

    def nvmlDeviceGetFieldValues(self, handle: tuple[int, Gpu], fields: list[int]) -> list[Any]:
        assert fields == [230]
        action = handle[1].recovery_action
        not_supported = 3
        return [
            SimpleNamespace(
                nvmlReturn=self.NVML_SUCCESS if action is not None else not_supported,
                value=SimpleNamespace(uiVal=action or 0),
            )
        ]
