"""Facts about one machine, gathered before a run is sent to it.

Like `sweep`, these functions are sent to Ray nodes by value. So they use only the standard library
and return plain data. NVML is asked if its Python bindings are installed.

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

from tasks.processes.tree import all_pids, environment_of, is_of_own_user, machine, parent_of

#: This file exists if NVIDIA's driver is loaded.
DRIVER = Path("/proc/driver/nvidia/version")


#: NVML field with the recovery that a GPU needs after its last error (Xid), according to its
#: driver. Errors that end with the process that caused them need none. Drivers before 570 do not
#: have this field.
#: Source: nvml.h, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.
_RECOVERY_ACTION = 230


def gpus_seen() -> dict[str, Any]:
    """Return the GPUs and their processes as NVIDIA's driver shows them.

    Returns:
        `{"driver": bool, "problem": str, "gpus": [{"index", "uuid", "used_mib", "busy_percent",
        "problem"}], "processes": [{"uuid", "pid", "used_mib", "alive"}]}`. `driver` is False if
        there is no driver. `problem` is the error of a driver that does not answer. A GPU with a
        `problem` must not get a run. Unknown values are None.
    """
    answer: dict[str, Any] = {"driver": False, "problem": "", "gpus": [], "processes": []}
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        why = "there is a driver, and no nvidia-ml-py to ask it with"
        return answer | ({"driver": True, "problem": why} if DRIVER.exists() else {})
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        is_there = DRIVER.exists() or not isinstance(error, nvml.NVMLError_LibraryNotFound)
        return answer | ({"driver": True, "problem": f"NVML: {error}"} if is_there else {})
    answer["driver"] = True
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu, processes = _gpu(nvml, index)
            answer["gpus"].append(gpu)
            answer["processes"] += processes
    except nvml.NVMLError as error:
        answer["problem"] = f"NVML: {error}"
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return answer


def _gpu(nvml: Any, index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    gpu: dict[str, Any] = {"index": index, "uuid": "", "problem": ""}
    gpu |= {"used_mib": None, "busy_percent": None}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu["uuid"] = uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        gpu["used_mib"] = _mib(memory.used)
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError as error:
        # The GPU may have fallen off the bus, for example. The others are still read.
        return gpu | {"problem": str(error)}, []
    with suppress(nvml.NVMLError):
        gpu["busy_percent"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    gpu["problem"] = _problem(nvml, handle)
    return gpu, [
        {
            "uuid": uuid,
            "pid": process.pid,
            "used_mib": _mib(process.usedGpuMemory),
            "alive": Path(f"/proc/{process.pid}").exists(),
        }
        for process in running
    ]


def _problem(nvml: Any, handle: Any) -> str:
    """Return the reason why a GPU should get no run; an empty string if there is none.

    Checks that the GPU's model does not support are skipped.
    """
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            return "MIG is on, and Muster gives whole GPUs only"
    with suppress(nvml.NVMLError):
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        volatile = nvml.NVML_VOLATILE_ECC
        if errors := nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile):
            return f"{errors} uncorrectable ECC errors since its driver was loaded"
    with suppress(nvml.NVMLError):
        *_, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if has_failed or is_pending:
            return "it has rows of memory to be remapped: reset it"
    with suppress(nvml.NVMLError):
        [field] = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION])
        if field.nvmlReturn == nvml.NVML_SUCCESS and field.value.uiVal:
            return "after an error its driver asks for a recovery, which `nvidia-smi -q` names"
    return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _mib(used_bytes: int | None) -> int | None:
    return None if used_bytes is None else used_bytes // 2**20


#: Seconds until a network file system must show a new file.
_SEEN_WITHIN_S = 5.0
#: Seconds between two checks for new files.
_CHECK_EVERY_S = 0.2
#: Packages whose versions are reported.
_PACKAGES = ("muster", "ray", "prefect")


def look(shared: str, folder: str, name: str, ray_dir: str) -> dict[str, Any]:
    """Gather the facts about this machine, and write a file `name` into the shared directory.

    Args:
        shared: Directory that should be the same on every node.
        folder: Folder in `shared`, made by the caller, into which each node writes its file.
        name: Name of this node, used as the file's name and as its content.
        ray_dir: Ray's session directory on this node.
    """
    return {
        "machine": machine(),
        "code": code_here(),
        "versions": _versions(),
        "shared_problem": _write(Path(shared), Path(folder), name),
        "shared_free_bytes": _free(shared),
        "ray_free_bytes": _free(ray_dir),
        "carriers": _carriers(),
        "gpus": gpus_seen(),
    }


def code_here() -> dict[str, str]:
    """Return `{"digest", "problem"}` of the package `tasks` as this interpreter would import it."""
    try:
        # This module also needs installed packages of other projects.
        importlib.import_module("tasks.spec.run")
        spec = importlib.util.find_spec("tasks")
    except Exception as error:
        return {"digest": "", "problem": f"{type(error).__name__}: {error}"}
    if spec is None or not spec.submodule_search_locations:
        return {"digest": "", "problem": "`tasks` is no package of files here"}
    digest = hashlib.sha256()
    root = Path(spec.submodule_search_locations[0])
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {"digest": digest.hexdigest()[:12], "problem": ""}


def names_unseen(folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Return `{"unseen": [...]}`: the names of other nodes whose files cannot be read here."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while unseen := [name for name in names if _read(Path(folder, name)) != name]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_CHECK_EVERY_S)
    return {"unseen": unseen}


def forget(folder: str) -> dict[str, Any]:
    """Remove the folder into which `look` wrote its file."""
    shutil.rmtree(folder, ignore_errors=True)
    return {}


def _carriers() -> list[dict[str, Any]]:
    """Return this user's processes of runs that have no guardian of their run as an ancestor."""
    environments: dict[int, dict[str, str]] = {}
    for pid in all_pids():
        with suppress(PermissionError):
            if is_of_own_user(pid):
                environments[pid] = environment_of(pid)
    carriers = []
    for pid, variables in environments.items():
        run_id = variables.get("MUSTER_RUN_ID")
        guardian = {"MUSTER_RUN_ID": run_id, "MUSTER_ROLE": "guardian"}.items()
        ancestor = pid
        while ancestor and not guardian <= environments.get(ancestor, {}).items():
            ancestor = parent_of(ancestor)
        if run_id and not ancestor:
            names = {"attempt": "MUSTER_ATTEMPT", "component": "MUSTER_COMPONENT"}
            fields = {key: variables.get(name, "") for key, name in names.items()}
            carriers.append({"pid": pid, "run_id": run_id, **fields})
    return carriers


def _write(shared: Path, folder: Path, name: str) -> str:
    """Write the file `name`. Return the problem; an empty string if the file was written."""
    if not shared.is_dir():
        return f"there is no directory {shared}"
    try:
        # If `shared` is not the caller's directory, the folder does not exist here yet.
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    except OSError as error:
        return f"{shared} is not writable: {error.strerror}"
    return ""


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def _free(directory: str) -> int | None:
    """Return the free bytes of the nearest existing parent directory; None if unknown."""
    place = Path(directory)
    while not place.exists() and place != place.parent:
        place = place.parent
    with suppress(OSError):
        return shutil.disk_usage(place).free
    return None


def _versions() -> Mapping[str, str]:
    versions = {"python": platform.python_version(), "user": str(os.getuid())}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
