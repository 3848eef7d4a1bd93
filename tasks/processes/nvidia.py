"""What NVIDIA's driver says of this machine's GPUs: how many there are, and who holds memory.

Sent to nodes by value, as `sweep`: the standard library only, plain data out.

Source: nvidia-smi --help-query-gpu and --help-query-compute-apps.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

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
