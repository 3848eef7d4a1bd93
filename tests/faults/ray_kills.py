"""Flow processes of Ray jobs, killed at random: `python -m tests.faults.ray_kills [--runs N]`.

Real runs on a real Ray cluster and a real Prefect server, some at once: half of them under a worker
and to be adopted by their next process, a quarter under a worker and a quarter started directly and
to be ended. The flow process of each gets SIGKILL at a random moment of its job's life, while
another process reconciles all the time. In the end, by the words of Ray, of the job itself and of
the kernel, each run has one final state on both sides, one job for each attempt and nothing left.

The seed is printed, and repeats the draw; the machine's timing can't be repeated.
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

from tests.support.ground import FINAL, Ground, Server, in_checkout, until
from tests.support.help import HelpFormatter
from tests.support.ray_cluster import RAY_ENV, RayCluster
from tests.support.stage import came, processes_with

#: Counts, and has a helper that outlives it unless somebody ends it. Says elsewhere that it began.
TRAINER = """
import os, subprocess, sys, time
with open(sys.argv[1], "a") as began:
    print(os.environ["MUSTER_ATTEMPT"], file=began)
subprocess.Popen(["sleep", "3600"], start_new_session=True)
for step in range(int(sys.argv[2])):
    print("step", step, flush=True)
    time.sleep(0.1)
print("done", flush=True)
"""
_COMES_WITHIN_S = 150.0
#: In which a run whose flow process was killed must have come to its one end.
_TRUE_WITHIN_S = 240.0
_AGREE = {"completed": {"COMPLETED"}, "failed": {"FAILED", "CRASHED"}, "cancelled": {"CANCELLED"}}
_FINAL_AT_RAY = {"SUCCEEDED", "FAILED", "STOPPED"}
_WAYS = ("adopt", "stop", "adopt", "direct")
_RECONCILE_FOR_EVER = """
import time
from tasks.upkeep.reconcile import publish, reconcile_host
while True:
    publish(reconcile_host())
    time.sleep(2)
"""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One run, and when its flow process is killed."""

    number: int
    ground: Ground
    cluster: RayCluster
    #: adopt, stop: under a worker; direct: without one.
    way: str
    #: The key of `_MOMENTS`.
    moment: str
    #: How much of the moment's length passes before the kill.
    share: float
    #: Of the job, 0.1 s each.
    steps: int
    #: Under a worker, its id; else the pid of its process, by which its flow run is tagged.
    flow_run_id: str = ""
    pid: int = 0
    #: The last event before the kill.
    met: str = "not killed"
    faults: list[str] = field(default_factory=list)
    outcome: str = ""

    @property
    def name(self) -> str:
        return f"kill{self.number}"

    @property
    def began(self) -> Path:
        """Where each start of the job notes its attempt."""
        return self.ground.home / f"began-{self.number}"

    def spec(self) -> dict[str, Any]:
        code = self.ground.home / "code"
        command = ["python", "train.py", str(self.began), str(self.steps)]
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
        """The run's own, once it is there."""
        return next(iter((self.ground.home / "runs").glob(f"{self.name}-*")), None)

    @property
    def attempt(self) -> Path:
        return (self.directory or self.ground.home / "nowhere") / "attempt-01"

    def record(self) -> dict[str, Any]:
        return read_json((self.directory or self.ground.home / "nowhere") / "run.json")

    def submission(self) -> dict[str, Any]:
        return read_json(self.attempt / "submission.json")

    def events(self) -> list[str]:
        """Their names; that of a state of the job with the state."""
        found = []
        for line in text_of(self.attempt / "events.jsonl").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                found.append(f"{event['event']} {event.get('status', '')}".strip())
        return found

    def log(self) -> list[str]:
        """What the job itself has said."""
        lines = text_of(self.attempt / "trainer.log").splitlines()
        return [line for line in lines if line.startswith(("step ", "done"))]

    def flow_run(self) -> dict[str, Any] | None:
        """As its server has it."""
        if self.flow_run_id:
            found: dict[str, Any] = self.ground.get(f"/flow_runs/{self.flow_run_id}")
            return found
        for run in self.ground.flow_runs():
            if any(f":{self.pid}:" in tag for tag in run["tags"]):
                self.flow_run_id = run["id"]
                return run
        return None

    def jobs(self) -> dict[str, str]:
        """`status[submission id]`, by Ray's own word."""
        answer = httpx.get(f"{self.cluster.address}/api/jobs/", trust_env=False, timeout=30)
        answer.raise_for_status()
        jobs = {job["submission_id"] or "": job["status"] for job in answer.json()}
        return {id_: status for id_, status in jobs.items() if id_.startswith(f"{self.name}-")}


def read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return content
    except (OSError, ValueError):
        return {}


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


#: When the kill is due: what must have happened, and for how many seconds it may come after that.
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
    """Start the run, kill its flow process, and wait until all that is said of it is true."""
    begin(trial)
    kill_at_its_moment(trial)
    deadline = time.monotonic() + _TRUE_WITHIN_S
    while (faults := untruths(trial)) and time.monotonic() < deadline:
        time.sleep(1.0)
    trial.faults += faults
    return trial


def begin(trial: Trial) -> None:
    if trial.way != "direct":
        trial.flow_run_id = trial.ground.submit(trial.spec()).flow_run_id
        return
    path = trial.ground.home / f"spec-{trial.number}.yaml"
    path.write_text(yaml.safe_dump(in_checkout(trial.spec()), sort_keys=False))
    process = trial.ground.start("-m", "flows.train", str(path), log=f"train-{trial.number}")
    trial.pid = process.pid


def kill_at_its_moment(trial: Trial) -> None:
    is_due, length_s = _MOMENTS[trial.moment]
    if not came(lambda: flow_pid(trial), _COMES_WITHIN_S):
        trial.faults.append("its flow process never began")
        return
    pid = flow_pid(trial)

    def is_over() -> bool:
        return not Path(f"/proc/{pid}/exe").exists()

    came(lambda: is_over() or is_due(trial), _COMES_WITHIN_S)
    is_late: Callable[[], object] = is_over
    if trial.moment == "start":
        # Anywhere before the submission.
        is_late = trial.submission
    came(is_late, trial.share * length_s(trial))
    events = trial.events()
    met = events[-1] if events else "before its first attempt"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        trial.met = met


def flow_pid(trial: Trial) -> int:
    """The process that supervises the run; 0 while there is none."""
    if trial.pid:
        return trial.pid
    pids = processes_with("PREFECT__FLOW_RUN_ID", trial.flow_run_id)
    return min(pids, key=started_ticks, default=0)


def started_ticks(pid: int) -> int:
    return int((text_of(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split() or ["0"] * 20)[19])


def untruths(trial: Trial) -> list[str]:
    """What is not as it must be in the end; empty where all is."""
    try:
        flow_run, record, jobs = trial.flow_run(), trial.record(), trial.jobs()
    except (httpx.HTTPError, KeyError) as error:
        return [f"could not be asked: {error!r}"]
    kind = flow_run["state"]["type"] if flow_run else "no flow run"
    trial.outcome = f"{record.get('state', 'no record')}, {kind}, {jobs or 'no job'}"
    return [*_wrong_states(trial, kind, record), *_wrong_jobs(trial, record, jobs), *_left(trial)]


def _wrong_states(trial: Trial, kind: str, record: dict[str, Any]) -> list[str]:
    state = record.get("state")
    if kind not in FINAL and (kind != "no flow run" or state):
        return [f"no final state on the server: {kind}"]
    if state and kind not in _AGREE.get(state, ()):
        return [f"the record says {state}, the server {kind}"]
    return []


def _wrong_jobs(trial: Trial, record: dict[str, Any], jobs: dict[str, str]) -> list[str]:
    wrong = [f"{job} is {status}" for job, status in jobs.items() if status not in _FINAL_AT_RAY]
    attempts = record.get("attempts", [])
    if unknown := set(jobs) - {f"{record.get('run_id')}--a{a['number']:02d}" for a in attempts}:
        wrong.append(f"jobs of no attempt: {sorted(unknown)}")
    starts = Counter(text_of(trial.began).split())
    if any(count > 1 for count in starts.values()):
        wrong.append(f"begun more than once: {dict(starts)}")
    log = trial.log()
    whole = [*(f"step {step}" for step in range(trial.steps)), "done"]
    if log != whole[: len(log)]:
        wrong.append(f"the log has gaps or repeats: {log}")
    if record.get("state") == "completed" and (log != whole or [*jobs.values()] != ["SUCCEEDED"]):
        wrong.append(f"completed, but {jobs}, and the log ends {log[-2:]}")
    if trial.way == "adopt" and jobs:
        numbers = [attempt["number"] for attempt in attempts]
        if record.get("state") != "completed" or numbers != [1]:
            wrong.append(f"not adopted: {record.get('state')}, attempts {numbers}")
    return wrong


def _left(trial: Trial) -> list[str]:
    left = []
    if pids := processes_with("MUSTER_RUN_ID", f"{trial.name}-", begins=True):
        left.append(f"processes of the job left: {pids}")
    if trial.flow_run_id and (
        pids := processes_with("PREFECT__FLOW_RUN_ID", f"{trial.flow_run_id}")
    ):
        left.append(f"processes of the flow left: {pids}")
    if entries := list((trial.ground.home / "live").glob(f"{trial.name}-*")):
        left.append(f"still in the registry: {[entry.name for entry in entries]}")
    return left


def drawn(runs: int, seed: int, ground: Ground, cluster: RayCluster) -> list[Trial]:
    """Each way meets each moment about as often."""
    # Of its own: whoever looks for a free port draws from the shared one.
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
            ground=ground,
            cluster=cluster,
            way=way,
            moment=moment,
            share=random.random(),
            steps=random.randint(20, 300 if _is_cut_short(way, moment) else 40),
        )
        for number, (way, moment) in enumerate(pairs)
    ]


def _is_cut_short(way: str, moment: str) -> bool:
    """Reconcile ends the job, where that has not ended by itself first."""
    return way != "adopt" and moment not in ("end", "teardown")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.ray_kills",
        description=__doc__,
        epilog="Exit: 0 each run came to one true end and nothing is left; 1 not so; 2 the "
        "arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=20, help="how many in all")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; else a new one")
    parser.add_argument("--at-once", type=int, default=3, help="runs beside each other")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {options.runs} runs, {options.at_once} at once", flush=True)
    for foreign in ("PREFECT_API_URL", "RAY_ADDRESS"):
        os.environ.pop(foreign, None)
    os.environ.update(RAY_ENV)
    directory = Path(tempfile.mkdtemp(prefix="muster-kills-"))
    server = Server(directory / "server")
    ground = Ground(home=directory / "home", api=server.api)
    began = time.monotonic()
    try:
        with RayCluster.started() as cluster:
            prepare(server, ground)
            trials = drawn(options.runs, seed, ground, cluster)
            with ThreadPoolExecutor(options.at_once) as pool:
                for trial in pool.map(run_trial, trials):
                    print(line_of(trial), flush=True)
            is_faulty = summary(trials, seed, time.monotonic() - began)
    finally:
        ground.clear()
        server.kill()
    if is_faulty:
        print(f"all of it is kept in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return int(is_faulty)


def prepare(server: Server, ground: Ground) -> None:
    server.start()
    (ground.home / "code").mkdir(parents=True)
    (ground.home / "code" / "train.py").write_text(TRAINER)
    ground.set_up()
    ground.start_worker()
    ground.start("-c", _RECONCILE_FOR_EVER, log="reconcile")


def line_of(trial: Trial) -> str:
    after_s = trial.share * _MOMENTS[trial.moment][1](trial)
    return (
        f"{trial.number:3} {trial.way:6} job of {trial.steps * 0.1:.1f} s, {trial.moment} + "
        f"{after_s:.2f} s ({trial.met}): "
        f"{trial.outcome}; {'; '.join(trial.faults) or 'true'}"
    )


def summary(trials: Sequence[Trial], seed: int, took_s: float) -> bool:
    """Says what came of all; whether anything is wrong."""
    # Whoever was slow to say something would have said it by now: an end that came is the end.
    last = trials[0].ground
    with contextlib.suppress(AssertionError):
        until(lambda: last.reconcile_without_flow() == "nothing to do", "nothing to reconcile")
    for trial in trials:
        trial.faults += [f"later: {fault}" for fault in untruths(trial) if not trial.faults]
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
