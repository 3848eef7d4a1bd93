"""What only a real GPU can show: `python -m tests.gpu_check`.

A granted run sees its devices only; what a component holds of a GPU in a session of its own is
free, by NVML, before the run's state is final: after a stop, and after SIGKILL of its flow process.
No toolkit is needed: the programs ask CUDA's driver through ctypes.

Exit: 0 all of it holds, or there is no GPU here; 1 something does not.
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

from tasks.processes.machine import gpus_seen
from tasks.record.states import RunState
from tests.support.ground import ROOT, in_checkout, until

#: Counts the devices that it sees, and has a process in a session of its own hold memory on one.
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
_HELD_MIB = 1024
#: What a driver keeps of a context that has gone is less.
_SLACK_MIB = 64
_FINAL = {state.value for state in RunState if state.is_final}


def used_mib() -> dict[int, int]:
    """By device, by NVML."""
    return {gpu["index"]: gpu["used_mib"] or 0 for gpu in gpus_seen()["gpus"]}


class Training:
    """One run of its own, with a MUSTER_HOME and a Prefect server of its own."""

    def __init__(self, home: Path) -> None:
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
        path.write_text(json.dumps(in_checkout(spec)))
        self.log = (home / "run.log").open("wb")
        self.process = self._muster("train", str(path))

    def _muster(self, *words: str) -> subprocess.Popen[bytes]:
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
        found = list(self.home.glob("runs/*/run.json"))
        record: dict[str, Any] = json.loads(found[0].read_text()) if found else {}
        return record

    def seen(self) -> list[str]:
        """What its program said: how many devices, and which."""

        def words() -> list[str]:
            logs = list(self.home.glob("runs/*/attempt-01/trainer.log"))
            lines = logs[0].read_text().splitlines() if logs else []
            return next((line.split()[1:] for line in lines if line.startswith("sees")), [])

        return until(words, f"the program holds memory; see {self.log.name}")

    def reconcile(self) -> None:
        self._muster("reconcile")

    def clear(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        self.log.close()


def stop(training: Training) -> None:
    training.process.send_signal(signal.SIGINT)


def kill(training: Training) -> None:
    training.process.kill()
    training.process.wait()
    training.reconcile()


def check(home: Path, end: Callable[[Training], None]) -> list[str]:
    """The faults of one run that is ended so."""
    before = used_mib()
    training = Training(home)
    try:
        count, devices = training.seen()
        [device] = [int(one) for one in devices.split(",")]
        faults = [] if count == "1" else [f"it was given one device, and sees {count}"]
        held = used_mib()
        if held[device] < before[device] + _HELD_MIB:
            faults.append(f"device {device} has {held[device]} MiB in use: nothing holds it")
        others = [one for one in held if one != device and held[one] > before[one] + _SLACK_MIB]
        faults += [f"device {one} is in use too" for one in others]
        began = time.monotonic()
        end(training)
        until(lambda: training.record().get("state") in _FINAL, "its state is final")
        after = used_mib()
        took_s = time.monotonic() - began
        if after[device] > before[device] + _SLACK_MIB:
            more = after[device] - before[device]
            faults.append(f"its state is final, and {more} MiB of device {device} are held")
        print(f"  {end.__name__}: device {device}, final after {took_s:.1f} s", flush=True)
        return faults
    finally:
        training.clear()


def main() -> int:
    if not gpus_seen()["gpus"]:
        print("no GPU here")
        return 0
    faults = []
    with tempfile.TemporaryDirectory(prefix="muster-gpu-") as directory:
        for end in (stop, kill):
            faults += [
                f"{end.__name__}: {one}" for one in check(Path(directory) / end.__name__, end)
            ]
    for fault in faults:
        print(f"  fault: {fault}")
    print("FAULTS" if faults else "all is well")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
