"""What can be told of one machine before a run is sent to it.

Sent to nodes by value, as `sweep`: the standard library only, plain data out. NVML is asked where
its bindings are there.
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

#: Where there is a driver of NVIDIA.
DRIVER = Path("/proc/driver/nvidia/version")


#: What a GPU needs after its last error, by its driver's own account of its Xids; one that a
#: process has met and that its end has cured is none. Drivers before 570 do not tell.
#: Source: nvml.h, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.
_RECOVERY_ACTION = 230


def gpus_seen() -> dict[str, Any]:
    """What NVIDIA's driver sees.

    Returns: `{"driver": bool, "problem": str, "gpus": [{"index", "uuid", "used_mib",
        "busy_percent", "problem"}], "processes": [{"uuid", "pid", "used_mib", "alive"}]}`. Without
        a driver, `driver` is false; with one that does not answer, `problem` says what it does. A
        GPU with a `problem` is to get no run. What the driver does not tell is None.
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
        # Fallen off the bus, for example: the others go on.
        return gpu | {"problem": str(error)}, []
    with suppress(nvml.NVMLError):
        gpu["busy_percent"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    gpu["problem"] = _problem(nvml, handle)
    return gpu, [
        {
            "uuid": uuid,
            "pid": one.pid,
            "used_mib": _mib(one.usedGpuMemory),
            "alive": Path(f"/proc/{one.pid}").exists(),
        }
        for one in running
    ]


def _problem(nvml: Any, handle: Any) -> str:
    """Why a GPU should get no run; empty for nothing. What its model does not know is none."""
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            return "MIG is on, and Muster gives whole GPUs only"
    with suppress(nvml.NVMLError):
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        if errors := nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile):
            return f"{errors} uncorrectable ECC errors since its driver was loaded"
    with suppress(nvml.NVMLError):
        *_, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if has_failed or is_pending:
            return "it has rows of memory to be remapped: reset it"
    with suppress(nvml.NVMLError):
        [found] = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION])
        if found.nvmlReturn == nvml.NVML_SUCCESS and found.value.uiVal:
            return "after an error its driver asks for a recovery, which `nvidia-smi -q` names"
    return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _mib(used_bytes: int | None) -> int | None:
    return None if used_bytes is None else used_bytes // 2**20


#: A network file system may show a new file so much later.
_SEEN_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.2
_PACKAGES = ("muster", "ray", "prefect")


def look(shared: str, folder: str, name: str, ray_dir: str) -> dict[str, Any]:
    """Everything about this machine that one look shows, and `name` left in the shared directory.

    Args:
        shared: The directory that is to be the same on every node.
        folder: In it, made by the caller, where each node leaves its name.
        name: This node's; the file has it as its name and its content.
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
    """`{"digest", "problem"}` of the package `tasks` as this interpreter would import it."""
    try:
        # One that needs packages of others, too.
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
    """`{"unseen": [...]}`: of the names that others have left, those that can't be read here."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while unseen := [name for name in names if _read(Path(folder, name)) != name]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    return {"unseen": unseen}


def forget(folder: str) -> dict[str, Any]:
    """Remove what `look` has left here."""
    shutil.rmtree(folder, ignore_errors=True)
    return {}


def _carriers() -> list[dict[str, Any]]:
    """This user's processes of runs that have no guardian of their run above them any more."""
    found: dict[int, dict[str, str]] = {}
    for pid in all_pids():
        with suppress(PermissionError):
            if is_of_own_user(pid):
                found[pid] = environment_of(pid)
    carriers = []
    for pid, variables in found.items():
        run_id, above = variables.get("MUSTER_RUN_ID"), pid
        guardian = {"MUSTER_RUN_ID": run_id, "MUSTER_ROLE": "guardian"}.items()
        while above and not guardian <= found.get(above, {}).items():
            above = parent_of(above)
        if run_id and not above:
            about = {"attempt": "MUSTER_ATTEMPT", "component": "MUSTER_COMPONENT"}
            known = {key: variables.get(name, "") for key, name in about.items()}
            carriers.append({"pid": pid, "run_id": run_id, **known})
    return carriers


def _write(shared: Path, folder: Path, name: str) -> str:
    """What stands in the way of writing; empty when it was done."""
    if not shared.is_dir():
        return f"there is no directory {shared}"
    try:
        # Where the directory is another one than the caller's, the folder is not there yet.
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
    """Bytes, of the nearest directory that exists."""
    place = Path(directory)
    while not place.exists() and place != place.parent:
        place = place.parent
    with suppress(OSError):
        return shutil.disk_usage(place).free
    return None


def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version(), "user": str(os.getuid())}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
