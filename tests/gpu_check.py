"""Check two promises of Muster on a real GPU: `python -m tests.gpu_check`.

- A run sees only the GPUs that were granted to it.
- Before the state of a run is final, the GPU memory of its components is free. This holds after a
  stop, and after SIGKILL of the flow process, even for a process in its own session.

NVML reports the used memory. The checks call the CUDA driver through ctypes and need no CUDA
toolkit.

Exit code: 0 if both promises hold or the machine has no GPU; 1 if a promise is broken.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.processes.machine import read_gpus
from tasks.record.states import RunState
from tests.support.host_environment import ROOT, wait_for, with_absolute_cwd

#: Code of the component. The component starts a process in its own session. This process prints the
#: number of visible GPUs and holds memory of the first GPU. The argument of the component is the
#: size of the memory in bytes.
PROGRAM = """
import ctypes, os, sys, time
size = int(sys.argv[1])
if os.fork() == 0:
    os.setsid()
    cuda = ctypes.CDLL("libcuda.so.1")
    def call(name, *arguments):
        if code := getattr(cuda, name)(*arguments):
            raise SystemExit(f"{name}: CUDA error {code}")
    count, device = ctypes.c_int(), ctypes.c_int()
    context, memory = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    print("sees", count.value, os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    time.sleep(600)
time.sleep(600)
"""
#: GPU memory that the component allocates, in MiB.
_HELD_MIB = 1024
#: GPU memory, in MiB, that the driver may still use after a process has ended.
_SLACK_MIB = 64
#: Final states of a run, as in `run.json`.
_FINAL = {state.value for state in RunState if state.is_final}


def used_mib() -> dict[int, int]:
    """Return a mapping from the number of a GPU to its used memory in MiB, as NVML reports it."""
    return {gpu["index"]: gpu["used_mib"] or 0 for gpu in read_gpus()["gpus"]}


class Training:
    """A run with one GPU, with its own MUSTER_HOME and its own Prefect server."""

    def __init__(self, home: Path) -> None:
        """Start `muster train` with a spec that needs one GPU.

        Args:
            home: Path of the folder MUSTER_HOME for the run. The folder must not exist yet.
        """
        self.home = home
        self._env = {**os.environ, "MUSTER_HOME": str(home), "PREFECT_HOME": str(home / "prefect")}
        self._env.pop("PREFECT_API_URL", None)
        command = [sys.executable, "-c", PROGRAM, str(_HELD_MIB * 2**20)]
        trainer = {"command": command, "ready": {"log": "sees", "within_s": 120}}
        spec = {
            "name": "gpu-check",
            "workload": "sft",
            "gang": {"gpus_per_node": 1, "cpus_per_gpu": 1},
            "components": {"trainer": trainer},
        }
        home.mkdir(parents=True)
        path = home / "spec.json"
        path.write_text(json.dumps(with_absolute_cwd(spec)))
        self.log = (home / "run.log").open("wb")
        self.process = self._muster("train", str(path))

    def _muster(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a `muster` command with these arguments, and return its process."""
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.command", *words],
            cwd=ROOT,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def record(self) -> dict[str, Any]:
        """Return the content of `run.json`, or an empty dict if it does not exist yet."""
        paths = list(self.home.glob("runs/*/run.json"))
        record: dict[str, Any] = json.loads(paths[0].read_text()) if paths else {}
        return record

    def seen(self) -> list[str]:
        """Wait until the component holds GPU memory, and return its output about its GPUs.

        Returns:
            Two texts: the number of visible GPUs, and the value of CUDA_VISIBLE_DEVICES.
        """

        def read_words() -> list[str]:
            logs = list(self.home.glob("runs/*/attempt-01/trainer.log"))
            lines = logs[0].read_text().splitlines() if logs else []
            return next((line.split()[1:] for line in lines if line.startswith("sees")), [])

        return wait_for(read_words, f"the program holds memory; see {self.log.name}")

    def reconcile(self) -> None:
        """Start `muster reconcile`, which ends the lost run."""
        self._muster("reconcile")

    def clear(self) -> None:
        """End the run if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        self.log.close()


def stop(training: Training) -> None:
    """Stop a run with SIGINT, as Ctrl-C does."""
    training.process.send_signal(signal.SIGINT)


def kill(training: Training) -> None:
    """Kill the flow process of a run, and start a reconcile."""
    training.process.kill()
    training.process.wait()
    training.reconcile()


def check(home: Path, end: Callable[[Training], None]) -> list[str]:
    """Run a training, end it, and return the violated requirements.

    Args:
        home: MUSTER_HOME of the run, which does not exist yet.
        end: Function that ends the run.
    """
    used_before = used_mib()
    training = Training(home)
    try:
        count, devices = training.seen()
        [device] = [int(device_text) for device_text in devices.split(",")]
        faults = [] if count == "1" else [f"it was given one device, and sees {count}"]
        used_during = used_mib()
        if used_during[device] < used_before[device] + _HELD_MIB:
            faults.append(f"device {device} has {used_during[device]} MiB in use: nothing holds it")
        for other, used in used_during.items():
            if other != device and used > used_before[other] + _SLACK_MIB:
                faults.append(f"device {other} is in use too")

        began = time.monotonic()
        end(training)
        wait_for(lambda: training.record().get("state") in _FINAL, "its state is final")
        used_after = used_mib()
        took_s = time.monotonic() - began
        if used_after[device] > used_before[device] + _SLACK_MIB:
            held_mib = used_after[device] - used_before[device]
            faults.append(f"its state is final, and {held_mib} MiB of device {device} are held")
        print(f"  {end.__name__}: device {device}, final after {took_s:.1f} s", flush=True)
        return faults
    finally:
        training.clear()


def main() -> int:
    """Run all checks on a GPU, and print the violated requirements.

    Returns:
        The exit code: 1 if a requirement was violated, otherwise 0. Also 0 without a GPU.
    """
    if not read_gpus()["gpus"]:
        print("no GPU here")
        return 0
    faults = []
    with tempfile.TemporaryDirectory(prefix="muster-gpu-") as directory:
        for end in (stop, kill):
            home = Path(directory) / end.__name__
            faults += [f"{end.__name__}: {fault}" for fault in check(home, end)]
    for fault in faults:
        print(f"  fault: {fault}")
    print("FAULTS" if faults else "all is well")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
