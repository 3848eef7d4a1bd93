"""Run many trainings and inject random faults: `python -m tests.faults.soak [--runs N] [--seed S]`.

Real runs of `python -m flows.train` use a real Prefect server, two at a time. Each run has
components that are hard to end. At a random moment, a random fault hits the run. Two processes
reconcile at the same time during the whole test.

The program counts three kinds of errors:

- a run that is alive, but recorded as dead;
- a run that is dead, but recorded as alive two minutes after its end;
- leftover processes.

The seed is printed. The same seed draws the same faults, but the timing of the machine differs.
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

from tests.support.help import HelpFormatter
from tests.support.host_environment import with_absolute_cwd
from tests.support.prefect_api import send_request
from tests.support.supervised_components import becomes_true, processes_with

ROOT = Path(__file__).resolve().parents[2]
#: Time limit, in seconds, on the start of a run, and on its end after the fault.
_BEGIN_WITHIN_S = 120.0
#: Time limit, in seconds, from the end of a run until its record must be correct.
_TRUE_WITHIN_S = 120.0
#: Pause between two checks of a running run, in seconds.
_CHECK_EVERY_S = 0.1
#: Mapping from a state in `run.json` to the equivalent states on the Prefect server.
_AGREE = {"completed": {"COMPLETED"}, "failed": {"FAILED", "CRASHED"}, "cancelled": {"CANCELLED"}}
#: Mapping from a description to the shell script of a component. Except for `polite`, each script
#: starts processes that are hard to end.
_STUBBORN = {
    "polite": "echo up; exec sleep 600",
    "ignores SIGTERM": "trap '' TERM; echo up; sleep 600 & wait; wait",
    "daemon": "(setsid env -i /bin/sh -c '/bin/sleep 600 & exit' &); echo up; exec sleep 600",
    "setsid child": "trap '' TERM; setsid sleep 600 & echo up; exec sleep 600",
}


@dataclass(slots=True)
class Trial:
    """One run, and the fault that is injected into this run."""

    #: Number of the run, from 0.
    number: int
    #: MUSTER_HOME of all runs.
    home: Path
    #: Name of the injected fault, a key of `_INJECTIONS`.
    injection: str
    #: Kind of the components, a key of `_STUBBORN`.
    shape: str
    #: Running time of the trainer without a fault, in seconds.
    lasts_s: float
    #: Time of the fault, in seconds after the start of the first component.
    after_s: float
    #: Errors that the test has found in the run.
    faults: list[str] = field(default_factory=list)
    #: State in `run.json` at the end of the run, or "no record" if this file does not exist. "never
    #: begun" until the test has read the state.
    outcome: str = "never begun"
    #: Flow process of the run.
    process: subprocess.Popen[bytes] = None  # type: ignore[assignment]

    def spec(self) -> dict[str, Any]:
        """Return the run spec."""
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
        """File that the trainer creates as its last action."""
        return self.home / f"done-{self.number}"

    @property
    def directory(self) -> Path | None:
        """Directory of the run, or None if the run has not begun."""
        return next(iter((self.home / "runs").glob(f"soak{self.number}-*")), None)

    def record(self) -> dict[str, Any]:
        """Return the content of `run.json`, or an empty dict if the file cannot be read."""
        try:
            assert self.directory is not None
            content: dict[str, Any] = json.loads((self.directory / "run.json").read_text())
            return content
        except (AssertionError, OSError, ValueError):
            return {}

    def entries(self) -> list[dict[str, Any]]:
        """Return the registry entries of the run's components."""
        entries = []
        for path in (self.home / "live").glob(f"soak{self.number}-*/component-*.json"):
            with contextlib.suppress(OSError, ValueError):
                entries.append(json.loads(path.read_text()))
        return entries


def sh(script: str) -> list[str]:
    """Return the command that runs a shell script."""
    return ["sh", "-c", script]


def kill_flow(trial: Trial) -> None:
    """Kill the flow process."""
    trial.process.kill()


def kill_component(trial: Trial) -> None:
    """Kill the first process of a random component."""
    kill(choice(trial, "process"))


def kill_guardian(trial: Trial) -> None:
    """Kill the guardian of a random component.

    A guardian is the process that starts and ends a component.
    """
    kill(choice(trial, "guardian"))


def kill_flow_and_guardians(trial: Trial) -> None:
    """Kill the flow process, and the guardian processes that own the components."""
    entries = trial.entries()
    trial.process.kill()
    for entry in entries:
        kill(entry["guardian"]["pid"])


def suspend_flow(trial: Trial) -> None:
    """Suspend the flow process for 2 to 8 seconds, as a busy machine might do."""
    trial.process.send_signal(signal.SIGSTOP)
    becomes_true(lambda: trial.process.poll() is not None, random.uniform(2, 8))
    trial.process.send_signal(signal.SIGCONT)


def interrupt(trial: Trial) -> None:
    """Send SIGTERM to the flow process."""
    trial.process.terminate()


def interrupt_and_kill(trial: Trial) -> None:
    """Send SIGTERM to the flow process, and SIGKILL within one second."""
    trial.process.terminate()
    becomes_true(lambda: trial.process.poll() is not None, random.uniform(0, 1))
    trial.process.kill()


def nothing(trial: Trial) -> None:
    """Inject no fault."""


#: Mapping from the name of a fault to two values: the function that injects the fault, and the
#: weight of the fault in the random choice.
_INJECTIONS: dict[str, tuple[Callable[[Trial], None], int]] = {
    "nothing": (nothing, 3),
    "SIGKILL of the flow": (kill_flow, 3),
    "SIGKILL of a component": (kill_component, 2),
    "SIGKILL of a guardian": (kill_guardian, 2),
    "SIGKILL of flow and guardians": (kill_flow_and_guardians, 4),
    "SIGSTOP, later SIGCONT of the flow": (suspend_flow, 3),
    "SIGTERM of the flow": (interrupt, 1),
    "SIGTERM, then SIGKILL of the flow": (interrupt_and_kill, 2),
}


def choice(trial: Trial, kind: str) -> int:
    """Return the process id of a random component, or of its guardian process.

    Args:
        trial: The run.
        kind: "process" for the component's first process. "guardian" for its guardian, the process
            that starts and ends the component.

    Returns:
        0 if no component is registered.
    """
    entries = trial.entries()
    return random.choice(entries)[kind]["pid"] if entries else 0


def kill(pid: int) -> None:
    """Send SIGKILL to a process, unless it has exited.

    The function ignores the ids 0 and 1. The id 0 stands for no process, and process 1 is the init
    process of the machine.
    """
    if pid > 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_trial(trial: Trial, api_url: str) -> Trial:
    """Start the run, inject its fault, and check the record during the run and after its end."""
    spec = trial.home / f"spec-{trial.number}.yaml"
    spec.write_text(yaml.safe_dump(with_absolute_cwd(trial.spec()), sort_keys=False))
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
    began = becomes_true(
        lambda: trial.entries() or trial.process.poll() is not None, _BEGIN_WITHIN_S
    )
    if not began or (trial.process.poll() is not None and not trial.record()):
        trial.faults.append("it did not begin")
        trial.process.kill()
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch_running_run, trial, api_url)
        becomes_true(lambda: trial.process.poll() is not None, trial.after_s)
        _INJECTIONS[trial.injection][0](trial)
        if not becomes_true(lambda: trial.process.poll() is not None, _BEGIN_WITHIN_S):
            trial.faults.append("its process did not end")
            trial.process.kill()
        trial.process.wait()
        trial.faults += watching.result()
    trial.faults += check_final_state(trial, api_url)
    return trial


def watch_running_run(trial: Trial, api_url: str) -> list[str]:
    """Check the record until the flow process exits.

    Returns:
        An error if the record says that a living flow process is dead.
    """
    while True:
        record = trial.record()
        state = state_on(api_url, trial)
        # The record was read before this check. If the flow process is still alive now, the flow
        # process was also alive at that time. So the record must not say that the flow process was
        # lost.
        if trial.process.poll() is not None:
            return []
        rules = [(attempt["failure"] or {}).get("rule") for attempt in record.get("attempts", [])]
        if "flow-lost" in rules or state == "CRASHED":
            return [f"alive, and called dead: {record.get('state')}, {state}, {rules}"]
        time.sleep(_CHECK_EVERY_S)


def check_final_state(trial: Trial, api_url: str) -> list[str]:
    """Check a run that has ended, and return the errors.

    The function first waits until the run has its final state, or until a time limit. Errors are a
    wrong final state, a remaining registry entry and leftover processes.
    """

    def is_final() -> bool:
        state = state_on(api_url, trial)
        return state in _AGREE.get(trial.record().get("state", ""), ())

    is_true = becomes_true(is_final, _TRUE_WITHIN_S)
    record = trial.record()
    state = state_on(api_url, trial)
    trial.outcome = record.get("state", "no record")
    faults = []
    if not is_true:
        faults.append(f"dead, and called {trial.outcome} ({state} on the server)")
    if trial.outcome == "completed" and not trial.done.exists():
        faults.append("completed, though its trainer was not done")
    is_harmless = trial.injection in ("nothing", "SIGSTOP, later SIGCONT of the flow")
    if is_harmless and trial.outcome != "completed":
        faults.append(f"nothing happened to it, and it {trial.outcome}: {record}")
    if not becomes_true(lambda: not trial.entries(), _TRUE_WITHIN_S):
        faults.append(f"still in the registry: {trial.entries()}")
    leftover_pids = processes_with("MUSTER_RUN_ID", record.get("run_id", "?"))
    if leftover_pids:
        faults.append(f"processes left: {leftover_pids}")
    return faults


def state_on(api_url: str, trial: Trial) -> str:
    """Return the state type of the flow run on the Prefect server, or an empty string."""
    flow_run_id = trial.record().get("flow_run_id")
    if flow_run_id is None:
        return ""
    with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
        return str(send_request("GET", f"{api_url}/flow_runs/{flow_run_id}")["state_type"])
    return ""


def drawn(runs: int, home: Path) -> list[Trial]:
    """Return the runs of the test, each with a random fault."""
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


#: Program that closes the records of lost runs every two seconds, as `muster reconcile` does. Two
#: processes run this program during the whole test.
_RECONCILE_REPEATEDLY = """
import time
from tasks.upkeep.reconcile import reconcile_host
while True:
    reconcile_host()
    time.sleep(2)
"""


@contextlib.contextmanager
def reconciling(home: Path, api_url: str) -> Iterator[None]:
    """Run two processes that call `muster reconcile` repeatedly, until the context ends."""
    env = {**os.environ, "MUSTER_HOME": str(home), "PREFECT_API_URL": api_url}
    with (home / "reconcile.txt").open("wb") as log, contextlib.ExitStack() as stack:
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", _RECONCILE_REPEATEDLY],
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
    """Return process id and command of each orphaned process that is now a child of this process.

    This process is a subreaper: orphaned descendants become its children. Zombies are reaped.
    """
    processes = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, ChildProcessError):
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            if int(fields[1]) != os.getpid():
                continue
            if fields[0] == "Z":
                os.waitpid(int(entry.name), os.WNOHANG)
            else:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                processes.append(f"{entry.name} {command}")
    return processes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.soak",
        description=__doc__,
        epilog="Exit: 0 each record is correct and no process remains; 1 otherwise; 2 the "
        "arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=200, help="how many in all")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; else a new one")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    random.seed(seed)
    print(f"seed {seed}, {options.runs} runs, {options.at_once} at once", flush=True)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    os.environ.pop("PREFECT_API_URL", None)
    with tempfile.TemporaryDirectory(prefix="muster-soak-") as directory:
        home = Path(directory)
        os.environ["MUSTER_HOME"] = directory
        # Prefect reads the environment when it is imported, so the import must be here.
        from tasks.server.server import prefect_server

        began = time.monotonic()
        with (
            prefect_server(password="") as api_url,
            reconciling(home, api_url),
            ThreadPoolExecutor(options.at_once) as pool,
        ):
            trials = drawn(options.runs, home)
            for trial in pool.map(lambda trial: run_trial(trial, api_url), trials):
                errors = "; ".join(trial.faults) or "true"
                print(
                    f"{trial.number:4} {trial.injection} after {trial.after_s:.1f} of "
                    f"{trial.lasts_s:.1f} s ({trial.shape}): {trial.outcome}; {errors}",
                    flush=True,
                )
        becomes_true(lambda: not orphans(), 10.0)
        leftovers = orphans()
    return summary(trials, leftovers, seed, time.monotonic() - began)


def summary(trials: Sequence[Trial], leftovers: Sequence[str], seed: int, took_s: float) -> int:
    """Print the results, and return the exit code: 0, or 1 if there are errors or leftovers.

    Args:
        trials: All runs.
        leftovers: Process id and command of each leftover process.
        seed: Seed of the draws.
        took_s: Duration of the test, in seconds.
    """
    counts = Counter((trial.injection, trial.outcome) for trial in trials)
    for (injection, outcome), count in sorted(counts.items()):
        print(f"{count:5}  {injection}: {outcome}")
    called_dead = sum(any("called dead" in f for f in trial.faults) for trial in trials)
    called_alive = sum(any(f.startswith("dead, and") for f in trial.faults) for trial in trials)
    faulty = [trial for trial in trials if trial.faults]
    print(
        f"{len(trials)} runs in {took_s:.0f} s, seed {seed}: {called_dead} alive and called dead, "
        f"{called_alive} dead and called alive, {len(leftovers)} processes left, "
        f"{len(faulty)} runs with any fault"
    )
    for process in leftovers:
        print(f"left: {process}")
    return 1 if faulty or leftovers else 0


if __name__ == "__main__":
    sys.exit(main())
