"""What can be told of one machine before a run is sent to it, its NVIDIA GPUs among it: how many
there are, and who has memory of them.

Sent to nodes by value, as `sweep`: the standard library only, plain data out.
Source: nvidia-smi --help-query-gpu and --help-query-compute-apps.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.processes.ending import environments, shown_command
from tasks.processes.tree import machine, parent_of

_WITHIN_S = 20.0
_DRIVER = Path("/proc/driver/nvidia/version")


def gpus_seen() -> dict[str, Any]:
    """What the driver sees.

    Returns: `{"driver": bool, "problem": str, "gpus": [{"uuid", "used_mib"}], "processes":
    [{"uuid", "pid", "used_mib", "alive"}]}`. Without a driver, `driver` is false; with one that
    does not answer, `problem` says what it does. `used_mib` is None where the driver does not tell.
    """
    answer: dict[str, Any] = {"driver": False, "problem": "", "gpus": [], "processes": []}
    program = shutil.which("nvidia-smi")
    if program is None:
        if _DRIVER.exists():
            answer |= {"driver": True, "problem": "there is a driver, but no nvidia-smi on PATH"}
        return answer
    answer["driver"] = True
    try:
        gpus = _query(program, "--query-gpu=uuid,memory.used")
        processes = _query(program, "--query-compute-apps=gpu_uuid,pid,used_gpu_memory")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return answer | {"problem": _why(error)}
    answer["gpus"] = [{"uuid": uuid, "used_mib": _mib(used)} for uuid, used in gpus]
    answer["processes"] = [
        {"uuid": uuid, "pid": int(pid), "used_mib": _mib(used), "alive": _is_alive(pid)}
        for uuid, pid, used in processes
    ]
    return answer


def _query(program: str, query: str) -> list[list[str]]:
    """Rows of what the driver tells.

    Raises: OSError, CalledProcessError, TimeoutExpired.
    """
    done = subprocess.run(
        [program, query, "--format=csv,noheader,nounits"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        # Ray's workers may ignore SIGCHLD, and every exit code is 0 then; what went wrong is
        # told from the output too.
        check=True,
        start_new_session=True,
    )
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]
    width = query.count(",") + 1
    if any(len(row) != width for row in rows):
        raise subprocess.SubprocessError(f"nvidia-smi: {done.stdout.strip()[:200]}")
    return rows


def _mib(text: str) -> int | None:
    """None for `[N/A]`, `[Not Supported]` and the like."""
    return int(text) if text.isdigit() else None


def _is_alive(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        words = " ".join(f"{error.stdout} {error.stderr}".split())[:300]
        return f"nvidia-smi failed (exit {error.returncode}): {words}"
    return f"nvidia-smi: {error}"


#: A network file system may show a new file so much later.
_SEEN_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.2
_PREFIX = "MUSTER_"
_PACKAGES = ("muster", "ray", "prefect", "prefect-ray")


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
    """The processes of runs for which no guardian of their run answers any more."""
    found = environments(_PREFIX)
    guarded = {
        pid: variables.get(f"{_PREFIX}RUN_ID", "")
        for pid, variables in found.items()
        if variables.get(f"{_PREFIX}ROLE") == "guardian"
    }
    carriers = []
    for pid, variables in found.items():
        run_id = variables.get(f"{_PREFIX}RUN_ID")
        above = pid
        while above and guarded.get(above) != run_id:
            above = parent_of(above)
        if run_id and not above:
            attempt = variables.get(f"{_PREFIX}ATTEMPT", "")
            command = shown_command(pid)
            carriers.append({"pid": pid, "run_id": run_id, "attempt": attempt, "command": command})
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
