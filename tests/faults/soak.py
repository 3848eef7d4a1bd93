"""Many runs, killed at random: `python -m tests.faults.soak [--runs N] [--seed S]`.

Real runs of `python -m flows.train` on a real Prefect server, two at a time. Each gets components
that are hard to end and, at a random moment, one of the injections below, while two processes
reconcile beside each other all the time. Counted are the two lies: a run that is alive and called
dead, and a run that is dead and called alive (two minutes after its end); and processes left.

The seed is printed, and repeats the draw; the machine's timing can't be repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.ground import in_checkout
from tests.support.help import HelpFormatter
from tests.support.prefect_api import ask
from tests.support.stage import came, processes_with

ROOT = Path(__file__).resolve().parents[2]
_BEGIN_WITHIN_S = 120.0
#: In which the record of a run that has ended must have become true.
_TRUE_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.1
_AGREE = {"completed": {"COMPLETED"}, "failed": {"FAILED", "CRASHED"}, "cancelled": {"CANCELLED"}}
#: Components that are hard to end, by what is said of them.
_STUBBORN = {
    "polite": "echo up; exec sleep 600",
    "ignores SIGTERM": "trap '' TERM; echo up; sleep 600 & wait; wait",
    "daemon": "(setsid env -i /bin/sh -c '/bin/sleep 600 & exit' &); echo up; exec sleep 600",
    "setsid child": "trap '' TERM; setsid sleep 600 & echo up; exec sleep 600",
}


@dataclass(slots=True)
class Trial:
    """One run, and what is done to it."""

    number: int
    home: Path
    injection: str
    shape: str
    #: How long the trainer takes, seconds.
    lasts_s: float
    #: When the injection comes, seconds after the first component was started.
    after_s: float
    faults: list[str] = field(default_factory=list)
    outcome: str = "never begun"
    process: subprocess.Popen[bytes] = None  # type: ignore[assignment]

    def spec(self) -> dict[str, Any]:
        stop = {"grace_s": 0.5}
        trainer = f"echo up; sleep {self.lasts_s:.2f}; touch {self.done}"
        sleeper = {"command": sh(_STUBBORN[self.shape]), "ready": {"log": "up"}, "stop": stop}
        return {
            "name": f"soak{self.number}",
            "workload": "grpo",
            "components": {
                "api": sleeper,
                "trainer": {"command": sh(trainer), "ready": {"log": "up"}, "stop": stop},
                "environment": sleeper,
            },
        }

    @property
    def done(self) -> Path:
        """Written by the trainer with its last breath."""
        return self.home / f"done-{self.number}"

    @property
    def directory(self) -> Path | None:
        """The run's own, once it is there."""
        return next(iter((self.home / "runs").glob(f"soak{self.number}-*")), None)

    def record(self) -> dict[str, Any]:
        try:
            assert self.directory is not None
            content: dict[str, Any] = json.loads((self.directory / "run.json").read_text())
            return content
        except (AssertionError, OSError, ValueError):
            return {}

    def entries(self) -> list[dict[str, Any]]:
        """What the registry has of its components."""
        found = []
        for path in (self.home / "live").glob(f"soak{self.number}-*/component-*.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        return found


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def kill_flow(trial: Trial) -> None:
    trial.process.kill()


def kill_component(trial: Trial) -> None:
    kill(choice(trial, "process"))


def kill_guardian(trial: Trial) -> None:
    kill(choice(trial, "guardian"))


def kill_flow_and_guardians(trial: Trial) -> None:
    entries = trial.entries()
    trial.process.kill()
    for entry in entries:
        kill(entry["guardian"]["pid"])


def stop_and_go_on(trial: Trial) -> None:
    """A machine so slow that the flow process gets no time at all."""
    trial.process.send_signal(signal.SIGSTOP)
    came(lambda: trial.process.poll() is not None, random.uniform(2, 8))
    trial.process.send_signal(signal.SIGCONT)


def interrupt(trial: Trial) -> None:
    trial.process.terminate()


def interrupt_and_kill(trial: Trial) -> None:
    trial.process.terminate()
    came(lambda: trial.process.poll() is not None, random.uniform(0, 1))
    trial.process.kill()


def nothing(trial: Trial) -> None:
    """It runs to its end."""


#: What is done, and how often in comparison.
_INJECTIONS: dict[str, tuple[Callable[[Trial], None], int]] = {
    "nothing": (nothing, 3),
    "SIGKILL of the flow": (kill_flow, 3),
    "SIGKILL of a component": (kill_component, 2),
    "SIGKILL of a guardian": (kill_guardian, 2),
    "SIGKILL of flow and guardians": (kill_flow_and_guardians, 4),
    "SIGSTOP, later SIGCONT of the flow": (stop_and_go_on, 3),
    "SIGTERM of the flow": (interrupt, 1),
    "SIGTERM, then SIGKILL of the flow": (interrupt_and_kill, 2),
}


def choice(trial: Trial, what: str) -> int:
    entries = trial.entries()
    return random.choice(entries)[what]["pid"] if entries else 0


def kill(pid: int) -> None:
    if pid > 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_trial(trial: Trial, api_url: str) -> Trial:
    """Start the run, do to it what was drawn, and hold its record against the truth."""
    spec = trial.home / f"spec-{trial.number}.yaml"
    spec.write_text(yaml.safe_dump(in_checkout(trial.spec()), sort_keys=False))
    env = {**os.environ, "MUSTER_HOME": str(trial.home), "PREFECT_API_URL": api_url}
    with (trial.home / f"output-{trial.number}.txt").open("wb") as output:
        trial.process = subprocess.Popen(
            [sys.executable, "-m", "flows.train", str(spec)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    began = came(lambda: trial.entries() or trial.process.poll() is not None, _BEGIN_WITHIN_S)
    if not began or (trial.process.poll() is not None and not trial.record()):
        trial.faults.append("it did not begin")
        trial.process.kill()
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch_the_living, trial, api_url)
        came(lambda: trial.process.poll() is not None, trial.after_s)
        _INJECTIONS[trial.injection][0](trial)
        if not came(lambda: trial.process.poll() is not None, _BEGIN_WITHIN_S):
            trial.faults.append("its process did not end")
            trial.process.kill()
        trial.process.wait()
        trial.faults += watching.result()
    trial.faults += hold_against_the_truth(trial, api_url)
    return trial


def watch_the_living(trial: Trial, api_url: str) -> list[str]:
    """While its process lives, nobody may say that it is lost."""
    while True:
        record, state = trial.record(), state_on(api_url, trial)
        # Looked at before the process: what was said then, was said of a living one.
        if trial.process.poll() is not None:
            return []
        rules = [(attempt["failure"] or {}).get("rule") for attempt in record.get("attempts", [])]
        if "flow-lost" in rules or state == "CRASHED":
            return [f"alive, and called dead: {record.get('state')}, {state}, {rules}"]
        time.sleep(_LOOK_EVERY_S)


def hold_against_the_truth(trial: Trial, api_url: str) -> list[str]:
    def is_final() -> bool:
        state = state_on(api_url, trial)
        return state in _AGREE.get(trial.record().get("state", ""), ())

    is_true = came(is_final, _TRUE_WITHIN_S)
    record, state = trial.record(), state_on(api_url, trial)
    trial.outcome = record.get("state", "no record")
    faults = []
    if not is_true:
        faults.append(f"dead, and called {trial.outcome} ({state} on the server)")
    if trial.outcome == "completed" and not trial.done.exists():
        faults.append("completed, though its trainer was not done")
    is_harmless = trial.injection in ("nothing", "SIGSTOP, later SIGCONT of the flow")
    if is_harmless and trial.outcome != "completed":
        faults.append(f"nothing happened to it, and it {trial.outcome}: {record}")
    if not came(lambda: not trial.entries(), _TRUE_WITHIN_S):
        faults.append(f"still in the registry: {trial.entries()}")
    if left := processes_with("MUSTER_RUN_ID", record.get("run_id", "?")):
        faults.append(f"processes left: {left}")
    return faults


def state_on(api_url: str, trial: Trial) -> str:
    flow_run_id = trial.record().get("flow_run_id")
    if flow_run_id is None:
        return ""
    with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
        return str(ask("GET", f"{api_url}/flow_runs/{flow_run_id}")["state_type"])
    return ""


def drawn(runs: int, home: Path) -> list[Trial]:
    names = list(_INJECTIONS)
    weights = [weight for _, weight in _INJECTIONS.values()]
    trials = []
    for number in range(runs):
        lasts_s = random.uniform(0.2, 4.0)
        [injection] = random.choices(names, weights)
        shape = random.choice(list(_STUBBORN))
        after_s = random.uniform(0, lasts_s + 0.5)
        trials.append(Trial(number, home, injection, shape, lasts_s, after_s))
    return trials


#: Two of these beside each other, for the whole time.
_RECONCILE_FOR_EVER = """
import time
from tasks.upkeep.reconcile import reconcile_host
while True:
    reconcile_host()
    time.sleep(2)
"""


@contextlib.contextmanager
def reconciling(home: Path, api_url: str) -> Iterator[None]:
    env = {**os.environ, "MUSTER_HOME": str(home), "PREFECT_API_URL": api_url}
    with (home / "reconcile.txt").open("wb") as log, contextlib.ExitStack() as stack:
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", _RECONCILE_FOR_EVER],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def orphans() -> list[str]:
    """What came to this process, a subreaper, and still lives."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, ChildProcessError):
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            if int(fields[1]) != os.getpid():
                continue
            if fields[0] == "Z":
                os.waitpid(int(entry.name), os.WNOHANG)
            else:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{entry.name} {command}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.soak",
        description=__doc__,
        epilog="Exit: 0 no lie was told and nothing is left; 1 not so; 2 the arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=200, help="how many in all")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; else a new one")
    parser.add_argument("--at-once", type=int, default=2, help="runs beside each other")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    random.seed(seed)
    print(f"seed {seed}, {options.runs} runs, {options.at_once} at once", flush=True)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    os.environ.pop("PREFECT_API_URL", None)
    with tempfile.TemporaryDirectory(prefix="muster-soak-") as directory:
        home = Path(directory)
        os.environ["MUSTER_HOME"] = directory
        # Imported now: Prefect reads the environment when it is imported.
        from tasks.server.server import prefect_server

        began = time.monotonic()
        with (
            prefect_server(password="") as api_url,
            reconciling(home, api_url),
            ThreadPoolExecutor(options.at_once) as pool,
        ):
            trials = drawn(options.runs, home)
            for trial in pool.map(lambda trial: run_trial(trial, api_url), trials):
                said = "; ".join(trial.faults) or "true"
                print(
                    f"{trial.number:4} {trial.injection} after {trial.after_s:.1f} of "
                    f"{trial.lasts_s:.1f} s ({trial.shape}): {trial.outcome}; {said}",
                    flush=True,
                )
        came(lambda: not orphans(), 10.0)
        left = orphans()
    return summary(trials, left, seed, time.monotonic() - began)


def summary(trials: Sequence[Trial], left: Sequence[str], seed: int, took_s: float) -> int:
    counts = Counter((trial.injection, trial.outcome) for trial in trials)
    for (injection, outcome), count in sorted(counts.items()):
        print(f"{count:5}  {injection}: {outcome}")
    called_dead = sum(any("called dead" in f for f in trial.faults) for trial in trials)
    called_alive = sum(any(f.startswith("dead, and") for f in trial.faults) for trial in trials)
    faulty = [trial for trial in trials if trial.faults]
    print(
        f"{len(trials)} runs in {took_s:.0f} s, seed {seed}: {called_dead} alive and called dead, "
        f"{called_alive} dead and called alive, {len(left)} processes left, "
        f"{len(faulty)} runs with any fault"
    )
    for line in left:
        print(f"left: {line}")
    return 1 if faulty or left else 0


if __name__ == "__main__":
    sys.exit(main())
