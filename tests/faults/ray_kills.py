"""Kill flow processes of Ray jobs at random: `python -m tests.faults.ray_kills [--runs N]`.

Real runs use a real Ray cluster and a real Prefect server, several at once. A worker starts three
quarters of the runs, the others are started directly. In half of the runs, the next flow process
adopts the running Ray job. In the other runs, a reconcile stops the job. The flow process of each
run is killed with SIGKILL at a random moment, while another process reconciles all the time.

At the end, the program asks Ray, the records of the jobs and the kernel, and checks that:

- each run has the same final state in `run.json` and on the Prefect server;
- each attempt has at most one Ray job;
- no process remains.

The seed is printed. The same seed draws the same runs, but the timing of the machine differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import httpx
import yaml

from tests.support.help import HelpFormatter
from tests.support.host_environment import (
    FINAL,
    HostEnvironment,
    Server,
    wait_for,
    with_absolute_cwd,
)
from tests.support.ray_cluster import RAY_ENV, RayCluster
from tests.support.supervised_components import becomes_true, processes_with

#: Program of the Ray job. The program counts steps, and appends the number of its attempt to the
#: file in its first argument. The program also starts a helper process. If Muster does not end the
#: helper process, the helper process survives the job.
TRAINER = """
import os, subprocess, sys, time
with open(sys.argv[1], "a") as attempts_file:
    print(os.environ["MUSTER_ATTEMPT"], file=attempts_file)
subprocess.Popen(["sleep", "3600"], start_new_session=True)
for step in range(int(sys.argv[2])):
    print("step", step, flush=True)
    time.sleep(0.1)
print("done", flush=True)
"""
#: Time limit, in seconds, for each of two waits: until the flow process exists, and then until the
#: phase of the run begins in which the flow process is killed.
_COMES_WITHIN_S = 150.0
#: Time limit, in seconds, from the kill of the flow process to the correct final state of the run.
_TRUE_WITHIN_S = 240.0
#: Mapping from a state in `run.json` to the equivalent states on the Prefect server.
_AGREE = {"completed": {"COMPLETED"}, "failed": {"FAILED", "CRASHED"}, "cancelled": {"CANCELLED"}}
_FINAL_AT_RAY = {"SUCCEEDED", "FAILED", "STOPPED"}
#: Ways to start and to recover a run, as `Trial.way` describes them. The runs use the elements in
#: turn. The list contains "adopt" twice, so half of the runs use "adopt".
_WAYS = ("adopt", "stop", "adopt", "direct")
#: Program that closes the records of lost runs every two seconds, as `muster reconcile` does.
_RECONCILE_REPEATEDLY = """
import time
from tasks.upkeep.reconcile import publish, reconcile_host
while True:
    publish(reconcile_host())
    time.sleep(2)
"""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One run, and the moment in which its flow process is killed."""

    #: Number of the run, from 0.
    number: int
    #: Host with MUSTER_HOME, the worker and the Prefect server.
    host_env: HostEnvironment
    #: Ray cluster that runs the job.
    cluster: RayCluster
    #: Way to start the run, and to recover the run after the kill of the flow process:
    #:
    #: - "adopt": a worker starts the run. The run's next flow process continues the job.
    #: - "stop": a worker starts the run. `muster reconcile` stops the job.
    #: - "direct": the test starts the run without a worker. `muster reconcile` stops the job.
    way: str
    #: Phase of the run in which the flow process is killed, a key of `_MOMENTS`.
    moment: str
    #: Time of the kill within the phase that the field `moment` names: 0 is the start of the phase,
    #: and 1 is the end.
    share: float
    #: Number of training steps of the Ray job. A step takes 0.1 s.
    steps: int
    #: Id of the flow run, or an empty string if it is not known yet.
    flow_run_id: str = ""
    #: Process id of the flow process, if the test starts the run without a worker. Otherwise 0. A
    #: tag of the flow run contains this id, so that the test can find the flow run.
    pid: int = 0
    #: Last event of the run before the kill.
    met: str = "not killed"
    #: Errors in the final state of the run.
    faults: list[str] = field(default_factory=list)
    #: State in `run.json`, state on the Prefect server, and Ray jobs, as text.
    outcome: str = ""

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"kill{self.number}"

    @property
    def starts_path(self) -> Path:
        """File to which the Ray job appends the number of the attempt whenever the job starts."""
        return self.host_env.home / f"began-{self.number}"

    def spec(self) -> dict[str, Any]:
        """Return the run spec."""
        code = self.host_env.home / "code"
        command = ["python", "train.py", str(self.starts_path), str(self.steps)]
        return {
            "name": self.name,
            "workload": "sft",
            "cwd": str(code),
            "ray": {"address": self.cluster.address},
            "on_lost_flow": "adopt" if self.way == "adopt" else "stop",
            "components": {
                "trainer": {
                    "launcher": "ray_job",
                    "command": command,
                    "ready": {"log": "step 1", "within_s": 120},
                    "stop": {"grace_s": 1},
                }
            },
        }

    @property
    def directory(self) -> Path | None:
        """Directory of the run, or None if the run has not begun."""
        return next(iter((self.host_env.home / "runs").glob(f"{self.name}-*")), None)

    @property
    def attempt(self) -> Path:
        """Directory of the first attempt. The directory may not exist yet."""
        return (self.directory or self.host_env.home / "nowhere") / "attempt-01"

    def record(self) -> dict[str, Any]:
        """Return the content of `run.json`, or an empty dict."""
        return read_json((self.directory or self.host_env.home / "nowhere") / "run.json")

    def submission(self) -> dict[str, Any]:
        """Return the content of `submission.json` of the first attempt, or an empty dict."""
        return read_json(self.attempt / "submission.json")

    def events(self) -> list[str]:
        """Return the names of the run's events.

        For an event about the state of the Ray job, the string also contains the state, for example
        `job.state RUNNING`.
        """
        names = []
        for line in text_of(self.attempt / "events.jsonl").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                names.append(f"{event['event']} {event.get('status', '')}".strip())
        return names

    def log(self) -> list[str]:
        """Return the lines of the log that the Ray job itself has printed."""
        lines = text_of(self.attempt / "trainer.log").splitlines()
        return [line for line in lines if line.startswith(("step ", "done"))]

    def flow_run(self) -> dict[str, Any] | None:
        """Return the flow run on the Prefect server, or None if there is none yet."""
        if self.flow_run_id:
            flow_run: dict[str, Any] = self.host_env.get(f"/flow_runs/{self.flow_run_id}")
            return flow_run
        for run in self.host_env.flow_runs():
            if any(f":{self.pid}:" in tag for tag in run["tags"]):
                self.flow_run_id = run["id"]
                return run
        return None

    def jobs(self) -> dict[str, str]:
        """Return a mapping from submission id to the status of a Ray job of this run."""
        response = httpx.get(f"{self.cluster.address}/api/jobs/", trust_env=False, timeout=30)
        response.raise_for_status()
        jobs = {job["submission_id"] or "": job["status"] for job in response.json()}
        return {id_: status for id_, status in jobs.items() if id_.startswith(f"{self.name}-")}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, or an empty dict for a missing or incomplete file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return content
    except (OSError, ValueError):
        return {}


def text_of(path: Path) -> str:
    """Return the text of a file, or an empty string if the file cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


#: Mapping from the name of a phase to two functions. The first function returns a true value as
#: soon as the phase has begun. The second function returns the length of the phase, in seconds. The
#: flow process is killed during the phase.
_MOMENTS: dict[str, tuple[Callable[[Trial], object], Callable[[Trial], float]]] = {
    "start": (lambda trial: True, lambda trial: 8.0),
    "submission.json": (lambda trial: trial.submission(), lambda trial: 0.1),
    "submit": (lambda trial: trial.submission().get("submit_began_at"), lambda trial: 0.4),
    "pending": (lambda trial: "job.submitted" in trial.events(), lambda trial: 1.5),
    "running": (
        lambda trial: "job.state RUNNING" in trial.events(),
        lambda trial: trial.steps * 0.1,
    ),
    "end": (lambda trial: "done" in trial.log(), lambda trial: 0.8),
    "teardown": (lambda trial: "teardown.begun" in trial.events(), lambda trial: 2.5),
}


def run_trial(trial: Trial) -> Trial:
    """Start the run, kill its flow process, and wait until the final state is correct."""
    begin(trial)
    kill_at_its_moment(trial)
    deadline = time.monotonic() + _TRUE_WITHIN_S
    while (faults := find_record_errors(trial)) and time.monotonic() < deadline:
        time.sleep(1.0)
    trial.faults += faults
    return trial


def begin(trial: Trial) -> None:
    """Submit the run to the worker, or start the run without a worker."""
    if trial.way != "direct":
        trial.flow_run_id = trial.host_env.submit(trial.spec()).flow_run_id
        return
    path = trial.host_env.home / f"spec-{trial.number}.yaml"
    path.write_text(yaml.safe_dump(with_absolute_cwd(trial.spec()), sort_keys=False))
    process = trial.host_env.start("-m", "flows.train", str(path), log=f"train-{trial.number}")
    trial.pid = process.pid


def kill_at_its_moment(trial: Trial) -> None:
    """Kill the flow process of a run at the moment that was chosen for this run.

    If the flow process ends before this moment, the function kills no process.
    """
    is_due, length_s = _MOMENTS[trial.moment]
    if not becomes_true(lambda: flow_pid(trial), _COMES_WITHIN_S):
        trial.faults.append("its flow process never began")
        return
    pid = flow_pid(trial)

    def is_over() -> bool:
        return not Path(f"/proc/{pid}/exe").exists()

    becomes_true(lambda: is_over() or is_due(trial), _COMES_WITHIN_S)
    is_late: Callable[[], object] = is_over
    if trial.moment == "start":
        # The phase "start" ends when the file `submission.json` appears. Kill the flow process at
        # this time at the latest.
        is_late = trial.submission
    becomes_true(is_late, trial.share * length_s(trial))
    events = trial.events()
    last_event = events[-1] if events else "before its first attempt"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        trial.met = last_event


def flow_pid(trial: Trial) -> int:
    """Return the process id of the run's flow process, or 0 if there is none."""
    if trial.pid:
        return trial.pid
    pids = processes_with("PREFECT__FLOW_RUN_ID", trial.flow_run_id)
    return min(pids, key=started_ticks, default=0)


def started_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or 0 if it has exited."""
    return int((text_of(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split() or ["0"] * 20)[19])


def find_record_errors(trial: Trial) -> list[str]:
    """Return the errors in the final state of the run, or an empty list for a correct state."""
    try:
        flow_run, record, jobs = trial.flow_run(), trial.record(), trial.jobs()
    except (httpx.HTTPError, KeyError) as error:
        return [f"could not be asked: {error!r}"]
    kind = flow_run["state"]["type"] if flow_run else "no flow run"
    trial.outcome = f"{record.get('state', 'no record')}, {kind}, {jobs or 'no job'}"
    return [*_wrong_states(kind, record), *_wrong_jobs(trial, record, jobs), *_leftovers(trial)]


def _wrong_states(kind: str, record: dict[str, Any]) -> list[str]:
    """Return an error if the run's state on the server is not final, or contradicts `run.json`.

    Args:
        kind: Type of the state on the Prefect server, or "no flow run".
        record: Content of `run.json`, or an empty dict if the run has no record.
    """
    state = record.get("state")
    if kind not in FINAL and (kind != "no flow run" or state):
        return [f"no final state on the server: {kind}"]
    if state and kind not in _AGREE.get(state, ()):
        return [f"the record says {state}, the server {kind}"]
    return []


def _wrong_jobs(trial: Trial, record: dict[str, Any], jobs: dict[str, str]) -> list[str]:
    """Return a message for each error in the Ray jobs of the run, for example a second job.

    Args:
        trial: The run.
        record: Content of the run's `run.json`.
        jobs: Mapping from submission id to the status that Ray reports for the job.
    """
    errors = [f"{job} is {status}" for job, status in jobs.items() if status not in _FINAL_AT_RAY]
    attempts = record.get("attempts", [])
    if unknown := set(jobs) - {f"{record.get('run_id')}--a{a['number']:02d}" for a in attempts}:
        errors.append(f"jobs of no attempt: {sorted(unknown)}")
    starts = Counter(text_of(trial.starts_path).split())
    if any(count > 1 for count in starts.values()):
        errors.append(f"begun more than once: {dict(starts)}")
    log = trial.log()
    complete_log = [*(f"step {step}" for step in range(trial.steps)), "done"]
    if log != complete_log[: len(log)]:
        errors.append(f"the log has gaps or repeats: {log}")
    has_succeeded = log == complete_log and [*jobs.values()] == ["SUCCEEDED"]
    if record.get("state") == "completed" and not has_succeeded:
        errors.append(f"completed, but {jobs}, and the log ends {log[-2:]}")
    if trial.way == "adopt" and jobs:
        numbers = [attempt["number"] for attempt in attempts]
        if record.get("state") != "completed" or numbers != [1]:
            errors.append(f"not adopted: {record.get('state')}, attempts {numbers}")
    return errors


def _leftovers(trial: Trial) -> list[str]:
    """Return messages about leftover processes and registry entries of the run."""
    messages = []
    if pids := processes_with("MUSTER_RUN_ID", f"{trial.name}-", begins=True):
        messages.append(f"processes of the job left: {pids}")
    if trial.flow_run_id and (
        pids := processes_with("PREFECT__FLOW_RUN_ID", f"{trial.flow_run_id}")
    ):
        messages.append(f"processes of the flow left: {pids}")
    if entries := list((trial.host_env.home / "live").glob(f"{trial.name}-*")):
        messages.append(f"still in the registry: {[entry.name for entry in entries]}")
    return messages


def drawn(runs: int, seed: int, host_env: HostEnvironment, cluster: RayCluster) -> list[Trial]:
    """Return the runs of the test, in random order and with random durations.

    Each way to start a run is combined with each moment of the kill about equally often.
    """
    random = Random(seed)
    moments = list(_MOMENTS)
    pairs = []
    for number in range(runs):
        way = _WAYS[number % len(_WAYS)]
        pairs.append((way, moments[(number // 2 + number % 2 * 3) % len(moments)]))
    random.shuffle(pairs)
    return [
        Trial(
            number=number,
            host_env=host_env,
            cluster=cluster,
            way=way,
            moment=moment,
            share=random.random(),
            steps=random.randint(20, 300 if _is_stopped_early(way, moment) else 40),
        )
        for number, (way, moment) in enumerate(pairs)
    ]


def _is_stopped_early(way: str, moment: str) -> bool:
    """Return True if `muster reconcile` usually stops the run's Ray job before the job's end.

    The test does not wait for the last step of such a job, so the job may have many steps.

    Args:
        way: Way to start and to recover the run; see `Trial.way`.
        moment: Phase of the run in which the flow process is killed.
    """
    return way != "adopt" and moment not in ("end", "teardown")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.ray_kills",
        description=__doc__,
        epilog="Exit: 0 each run has a single correct end and no process remains; 1 otherwise; "
        "2 the arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=20, help="how many in all")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; else a new one")
    parser.add_argument("--at-once", type=int, default=3, help="runs at the same time")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {options.runs} runs, {options.at_once} at once", flush=True)
    for foreign in ("PREFECT_API_URL", "RAY_ADDRESS"):
        os.environ.pop(foreign, None)
    os.environ.update(RAY_ENV)
    directory = Path(tempfile.mkdtemp(prefix="muster-kills-"))
    server = Server(directory / "server")
    host_env = HostEnvironment(home=directory / "home", api=server.api)
    began = time.monotonic()
    try:
        with RayCluster.run() as cluster:
            prepare(server, host_env)
            trials = drawn(options.runs, seed, host_env, cluster)
            with ThreadPoolExecutor(options.at_once) as pool:
                for trial in pool.map(run_trial, trials):
                    print(line_of(trial), flush=True)
            is_faulty = summary(trials, seed, time.monotonic() - began)
    finally:
        host_env.clear()
        server.kill()
    if is_faulty:
        print(f"all of it is kept in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return int(is_faulty)


def prepare(server: Server, host_env: HostEnvironment) -> None:
    """Start the Prefect server, a worker, and a process that runs `muster reconcile` repeatedly."""
    server.start()
    (host_env.home / "code").mkdir(parents=True)
    (host_env.home / "code" / "train.py").write_text(TRAINER)
    host_env.set_up()
    host_env.start_worker()
    host_env.start("-c", _RECONCILE_REPEATEDLY, log="reconcile")


def line_of(trial: Trial) -> str:
    """Return one line with the moment of the kill and the result of the run."""
    after_s = trial.share * _MOMENTS[trial.moment][1](trial)
    return (
        f"{trial.number:3} {trial.way:6} job of {trial.steps * 0.1:.1f} s, {trial.moment} + "
        f"{after_s:.2f} s ({trial.met}): "
        f"{trial.outcome}; {'; '.join(trial.faults) or 'true'}"
    )


def summary(trials: Sequence[Trial], seed: int, took_s: float) -> bool:
    """Check all runs once more, print the results, and return True if there is any error."""
    # Check the final states again when `muster reconcile` has nothing more to do.
    host_env = trials[0].host_env
    with contextlib.suppress(AssertionError):
        wait_for(
            lambda: host_env.reconcile_without_flow() == "nothing to do", "nothing to reconcile"
        )
    for trial in trials:
        trial.faults += [
            f"later: {fault}" for fault in find_record_errors(trial) if not trial.faults
        ]
    faulty = [trial for trial in trials if trial.faults]
    for (way, outcome), count in sorted(
        Counter((trial.way, trial.outcome.split(", {")[0]) for trial in trials).items()
    ):
        print(f"{count:5}  {way}: {outcome}")
    killed = sum(trial.met != "not killed" for trial in trials)
    print(
        f"{len(trials)} runs in {took_s:.0f} s, seed {seed}: {killed} killed, "
        f"{len(faulty)} with any fault"
    )
    for trial in faulty:
        print(f"fault: {line_of(trial)}")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
