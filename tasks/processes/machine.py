"""Gather facts about one machine, before a run is started on it.

These functions also run on machines without Muster: Ray sends them to its nodes by value. So they
use only the standard library and return plain data. Facts about GPUs come from NVML, NVIDIA's
library, if its Python bindings are installed.

Source: NVML API Reference Guide, nvmlDeviceGet*.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.processes.tree import (
    all_pids,
    belongs_to_own_user,
    machine,
    read_environment,
    read_parent,
)

#: File of the proc file system that exists if NVIDIA's driver is loaded.
DRIVER = Path("/proc/driver/nvidia/version")


#: Id of the NVML field with the recovery action that a GPU needs after an error (Xid). The field is
#: 0 if no action is needed, for example after an error that affects only the process that caused
#: it. Drivers before 570 do not have this field.
#: Source: nvml.h, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.
_RECOVERY_ACTION = 230


def read_gpus() -> dict[str, Any]:
    """Return the GPUs of this machine and their processes, as NVIDIA's driver reports them.

    Returns:
        `{"driver": bool, "problem": str, "gpus": [{"index", "uuid", "used_mib", "busy_percent",
        "problem"}], "processes": [{"uuid", "pid", "used_mib", "alive"}]}`. `driver` is False if
        the machine has no driver. `problem` is the error of the driver; empty if it has answered.
        The `problem` of a GPU is the reason why no run may use it; empty if there is none. Unknown
        values are None.
    """
    answer: dict[str, Any] = {"driver": False, "problem": "", "gpus": [], "processes": []}
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        why = "NVIDIA's driver is loaded, but the Python package nvidia-ml-py is not installed"
        return answer | ({"driver": True, "problem": why} if DRIVER.exists() else {})
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        is_there = DRIVER.exists() or not isinstance(error, nvml.NVMLError_LibraryNotFound)
        return answer | ({"driver": True, "problem": f"NVML: {error}"} if is_there else {})
    answer["driver"] = True
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu, processes = _read_gpu(nvml, index)
            answer["gpus"].append(gpu)
            answer["processes"] += processes
    except nvml.NVMLError as error:
        answer["problem"] = f"NVML: {error}"
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return answer


def _read_gpu(nvml: Any, index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return one GPU and the list of its processes, in the format of `read_gpus`."""
    gpu: dict[str, Any] = {"index": index, "uuid": "", "problem": ""}
    gpu |= {"used_mib": None, "busy_percent": None}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu["uuid"] = uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        gpu["used_mib"] = _mib(memory.used)
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError as error:
        # This GPU does not answer; it may have fallen off the bus. Return the error as the problem
        # of this GPU, so that the other GPUs are still read.
        return gpu | {"problem": str(error)}, []
    with suppress(nvml.NVMLError):
        gpu["busy_percent"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    gpu["problem"] = _find_gpu_problem(nvml, handle)
    return gpu, [
        {
            "uuid": uuid,
            "pid": process.pid,
            "used_mib": _mib(process.usedGpuMemory),
            "alive": Path(f"/proc/{process.pid}").exists(),
        }
        for process in running
    ]


def _find_gpu_problem(nvml: Any, handle: Any) -> str:
    """Return the reason why no run may use a GPU; an empty string if there is none.

    A check that this type of GPU does not support is skipped.
    """
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            return "MIG is on, but Muster grants only whole GPUs"
    with suppress(nvml.NVMLError):
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        volatile = nvml.NVML_VOLATILE_ECC
        if errors := nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile):
            return f"the GPU has had {errors} uncorrectable ECC errors since the driver was loaded"
    with suppress(nvml.NVMLError):
        *_, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if has_failed or is_pending:
            return "the GPU must replace faulty rows of its memory: reset the GPU"
    with suppress(nvml.NVMLError):
        [field] = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION])
        if field.nvmlReturn == nvml.NVML_SUCCESS and field.value.uiVal:
            return (
                "after an error, the GPU needs a reset or another recovery action: `nvidia-smi -q` "
                "shows the action"
            )
    return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _mib(used_bytes: int | None) -> int | None:
    return None if used_bytes is None else used_bytes // 2**20


#: Seconds to wait until a network file system shows a file that another node has written.
_SEEN_WITHIN_S = 5.0
#: Seconds between two checks whether the files of the other nodes are visible.
_CHECK_EVERY_S = 0.2
#: Python packages whose versions are compared between nodes.
_PACKAGES = ("muster", "ray", "prefect")


def gather_facts(shared: str, folder: str, name: str, ray_dir: str) -> dict[str, Any]:
    """Gather facts about this machine, and write a test file into the shared directory.

    Other nodes then check that they can read the file (see `find_unreadable_files`).

    Args:
        shared: Directory that should be shared by all nodes.
        folder: Folder in `shared` for the test files. The caller has created it.
        name: Name of this node's test file. The same text is written into the file.
        ray_dir: Ray's session directory on this node.

    Returns:
        Mapping from the name of each fact to its value, as plain data.
    """
    return {
        "machine": machine(),
        "code": digest_code(),
        "versions": _read_versions(),
        "shared_problem": _write_test_file(Path(shared), Path(folder), name),
        "shared_free_bytes": _free_bytes(shared),
        "ray_free_bytes": _free_bytes(ray_dir),
        "carriers": _find_unguarded_processes(),
        "gpus": read_gpus(),
    }


def digest_code() -> dict[str, str]:
    """Return a digest of Muster's code on this machine, to compare it between nodes.

    Returns:
        `{"digest": str, "problem": str}`. The digest covers the package `tasks` as this interpreter
        imports it. If the import fails, the digest is empty and `problem` is the error.
    """
    try:
        # Import a module that needs installed packages, to notice if one of them is missing.
        importlib.import_module("tasks.spec.run")
        spec = importlib.util.find_spec("tasks")
    except Exception as error:
        return {"digest": "", "problem": f"{type(error).__name__}: {error}"}
    if spec is None or not spec.submodule_search_locations:
        return {
            "digest": "",
            "problem": "Python found no folder for this package",
        }
    digest = hashlib.sha256()
    root = Path(spec.submodule_search_locations[0])
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {"digest": digest.hexdigest()[:12], "problem": ""}


def find_unreadable_files(folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the names of the nodes whose test files cannot be read on this machine.

    Waits some seconds, because a network file system may show new files late.

    Args:
        folder: Folder with the test files, see `gather_facts`.
        names: Names of the nodes.

    Returns:
        `{"unseen": [...]}`, with the names of these nodes.
    """
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while unseen := [name for name in names if _read_text(Path(folder, name)) != name]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_CHECK_EVERY_S)
    return {"unseen": unseen}


def remove_test_files(folder: str) -> dict[str, Any]:
    """Remove the folder with the test files that `gather_facts` has written.

    Returns an empty dictionary, because a function that runs on another node must return a
    dictionary.
    """
    shutil.rmtree(folder, ignore_errors=True)
    return {}


def _find_unguarded_processes() -> list[dict[str, Any]]:
    """Return the processes of this user that belong to a run but have lost their guardian.

    Such a process has MUSTER_RUN_ID in its environment, but none of its ancestors is a guardian
    process of that run.

    Returns:
        `[{"pid", "run_id", "attempt", "component"}]`.
    """
    environments: dict[int, dict[str, str]] = {}
    for pid in all_pids():
        with suppress(PermissionError):
            if belongs_to_own_user(pid):
                environments[pid] = read_environment(pid)
    carriers = []
    for pid, variables in environments.items():
        run_id = variables.get("MUSTER_RUN_ID")
        guardian = {"MUSTER_RUN_ID": run_id, "MUSTER_ROLE": "guardian"}.items()
        ancestor = pid
        while ancestor and not guardian <= environments.get(ancestor, {}).items():
            ancestor = read_parent(ancestor)
        if run_id and not ancestor:
            names = {"attempt": "MUSTER_ATTEMPT", "component": "MUSTER_COMPONENT"}
            fields = {key: variables.get(name, "") for key, name in names.items()}
            carriers.append({"pid": pid, "run_id": run_id, **fields})
    return carriers


def _write_test_file(shared: Path, folder: Path, name: str) -> str:
    """Write this node's test file into the shared directory, see `gather_facts`.

    Returns:
        The reason if the file could not be written; otherwise an empty string.
    """
    if not shared.is_dir():
        return f"there is no directory {shared}"
    try:
        # If this node does not share the directory with the caller, the folder is missing here.
        # Create the folder nevertheless. It will not contain the test files of the other nodes,
        # which shows that the directory is not shared.
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    except OSError as error:
        return f"{shared} is not writable: {error.strerror}"
    return ""


def _read_text(path: Path) -> str:
    """Return the content of a file; an empty string if it cannot be read."""
    with suppress(OSError):
        return path.read_text()
    return ""


def _free_bytes(directory: str) -> int | None:
    """Return the free disk space for a directory in bytes; None if unknown.

    If the directory does not exist, its nearest existing parent directory is used.
    """
    place = Path(directory)
    while not place.exists() and place != place.parent:
        place = place.parent
    with suppress(OSError):
        return shutil.disk_usage(place).free
    return None


def _read_versions() -> Mapping[str, str]:
    """Return the versions of Python and of important packages, and the id of the user."""
    versions = {"python": platform.python_version(), "user": str(os.getuid())}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
