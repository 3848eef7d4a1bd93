"""Kill the programs around a pipeline at random: `python -m tests.faults.pipeline_kills`.

Real pipelines run on a real Prefect server, a real worker and a real Ray cluster with three nodes,
which have logical GPUs. A pipeline has a step on this host, a matrix of steps on Ray, and two
further steps. In each trial, SIGKILL ends one program at a random moment of the pipeline:

- `pipeline`: the process of the pipeline. The pipeline is then resumed.
- `worker`: the worker of the work pool. Another worker is then started.
- `server`: the Prefect server. The server is started again after up to five seconds.
- `ray`: a worker process of Ray that supervises the job of a step, or else the step itself.

Each step appends a line to a file when it begins, and another line when it has done its work. These
lines must show that each step and each point of the matrix was done exactly once. If no step was
killed, each must also have begun exactly once. The Prefect server must show that the pipeline and
all its steps are completed, and no process may remain.

The seed is printed. The same seed draws the same moments, but the timing of the machine differs.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from subprocess import Popen, TimeoutExpired
from typing import Any

import yaml

from tests.support.gang_pool import GangPool, gang_pool
from tests.support.help import HelpFormatter
from tests.support.host_environment import HostEnvironment, wait_for
from tests.support.prefect_api import send_request
from tests.support.ray_cluster import RAY_ENV, RayCluster
from tests.support.supervised_components import becomes_true, processes_with

TARGETS = ("pipeline", "worker", "server", "ray")
#: Number of points of the step `grid`: combinations of parameters, each with a run of its own. Each
#: point needs all GPUs of a node. There are more points than nodes, so some points wait for GPUs,
#: and some start early.
_POINTS = 6
#: Time limit of one pipeline, in seconds.
_ENDS_WITHIN_S = 900.0
#: After the end of a pipeline, its processes must be gone within this number of seconds.
_GONE_WITHIN_S = 120.0
#: Longest downtime of the Prefect server, in seconds.
_SERVER_DOWN_S = 5.0
#: Python code with the functions that the steps of the pipeline call. One call of `os.write` writes
#: a whole line to the trace, so that the lines of parallel steps never mix.
_STEPS = """
import os
import time


def note(trace, text):
    descriptor = os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, (text + "\\n").encode())
    os.close(descriptor)


def work(trace, name, number=0, value=None):
    unit = f"{name}{number or ''}"
    note(trace, f"begin {unit}")
    time.sleep(1.5)
    note(trace, f"done {unit}")
    return {"number": number, "score": number / 10}
"""
#: Names that the steps write to a file. The step `grid` has a name for each combination of its
#: parameters.
_UNITS = ("prepare", *(f"grid{number}" for number in range(1, _POINTS + 1)), "score", "export")


@dataclass(slots=True, kw_only=True)
class Trial:
    """One pipeline, and the program that is killed while the pipeline runs."""

    #: Number of the trial, from 0.
    number: int
    #: Name of the killed program, one of `TARGETS`. Empty for the pipeline without a kill.
    target: str
    #: Time before the kill, as a share of the duration of an undisturbed pipeline.
    share: float
    #: Downtime of the Prefect server, in seconds.
    down_s: float
    #: Id of the pipeline's flow run.
    flow_run_id: str = ""
    #: Description of the killed program, or an empty string if nothing was killed.
    killed: str = ""
    faults: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def line(self) -> str:
        """The result of the trial as one line."""
        killed = self.killed or "nothing killed"
        faults = "; ".join(self.faults) or "each done once"
        return (
            f"{self.number:3} {self.target or 'none':8} at {self.share:.2f}: {killed}; "
            f"{self.took_s:.0f} s; {faults}"
        )


class Stage:
    """The pool, the worker, the Ray cluster and the files that all trials use."""

    def __init__(self, pool: GangPool, cluster: RayCluster, directory: Path) -> None:
        self.pool = pool
        self.cluster = cluster
        self.project = directory / "project"
        self.worker: Popen[bytes] | None = None

    @property
    def host_env(self) -> HostEnvironment:
        return self.pool.host_env

    def prepare(self) -> None:
        """Write the project, create the deployment of the steps, and start the worker."""
        self.project.mkdir()
        (self.project / "pyproject.toml").write_text("")
        (self.project / "steps.py").write_text(_STEPS)
        deployment = {
            "name": "any",
            "flow_id": self.host_env.post("/flows/", name="train")["id"],
            "work_pool_name": self.pool.name,
            "entrypoint": "flows.train.train",
            "pull_steps": [],
        }
        send_request("POST", f"{self.host_env.api}/deployments/", deployment)
        self.worker = self.pool.start_worker()

    def trace(self, trial: Trial) -> Path:
        """Return the path of the file that the steps of a trial write."""
        return self.project.parent / f"trace-{trial.number}"

    def write_pipeline(self, trial: Trial) -> Path:
        """Write the spec of a trial's pipeline, and return its path."""
        trace = str(self.trace(trial))
        step: dict[str, Any] = {"call": "steps:work", "retries": 3}
        stages = [
            {"name": "prepare", **step, "on": "host", "args": {"trace": trace, "name": "prepare"}},
            {
                "name": "grid",
                **step,
                "needs": ["prepare"],
                "resources": {"gpus": 8},
                "args": {
                    "trace": trace,
                    "name": "grid",
                    "value": "${stage.prepare.result.score}",
                },
                "matrix": {"number": [*range(1, _POINTS + 1)]},
                "best": {"by": "score"},
            },
            {
                "name": "score",
                **step,
                "needs": ["prepare"],
                "args": {"trace": trace, "name": "score"},
            },
            {
                "name": "export",
                **step,
                "on": "host",
                "needs": ["grid", "score"],
                "when": f"${{stage.grid.best.result.number}} == {_POINTS}",
                "args": {"trace": trace, "name": "export"},
            },
        ]
        path = self.project / f"pipeline-{trial.number}.yaml"
        content = {"name": f"kills{trial.number}", "stages": stages}
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def find_flow_run(self, trial: Trial) -> str:
        """Return the id of the flow run of a trial's pipeline, or an empty string."""
        flow_runs = self.host_env.post(
            "/flow_runs/filter",
            flows={"name": {"any_": ["pipeline"]}},
            flow_runs={"tags": {"all_": [f"pipeline:kills{trial.number}"]}},
        )
        return str(flow_runs[0]["id"]) if flow_runs else ""

    def run_names(self, trial: Trial) -> list[str]:
        """Return the names of the runs that a trial's pipeline has created."""
        children = {"parent_flow_run_id": {"any_": [trial.flow_run_id]}}
        return [run["name"] for run in self.host_env.post("/flow_runs/filter", flow_runs=children)]


def run_trial(stage: Stage, trial: Trial, undisturbed_s: float) -> None:
    """Run a pipeline, kill the program of the trial, and check the result.

    Args:
        stage: The pool, the worker and the cluster.
        trial: The program to kill, and the moment of the kill as a share of the duration.
        undisturbed_s: Duration of a pipeline without a kill, in seconds.
    """
    began = time.monotonic()
    path = stage.write_pipeline(trial)
    log = f"pipeline-{trial.number}"
    process = stage.host_env.start("-m", "flows.pipeline", str(path), log=log)
    trial.flow_run_id = wait_for(
        lambda: stage.find_flow_run(trial), f"a flow run:\n{stage.host_env.log(log)}", 300.0
    )
    if trial.target:
        with contextlib.suppress(TimeoutExpired):
            process.wait(trial.share * undisturbed_s)
    if trial.target and process.poll() is None:
        process = _KILLERS[trial.target](stage, trial, process)
    try:
        code = process.wait(_ENDS_WITHIN_S)
        if code != 0:
            trial.faults.append(f"the pipeline ended with exit code {code}")
    except TimeoutExpired:
        trial.faults.append(f"the pipeline did not end within {_ENDS_WITHIN_S:g} s")
        process.kill()
        process.wait()
    trial.took_s = time.monotonic() - began
    trial.faults += find_faults(stage, trial)


def kill_pipeline(stage: Stage, trial: Trial, process: Popen[bytes]) -> Popen[bytes]:
    """Kill the process of the pipeline, resume the pipeline, and return its new process."""
    process.kill()
    process.wait()
    trial.killed = f"process {process.pid} of the pipeline"
    arguments = ("-m", "flows.pipeline", "--resume", trial.flow_run_id)
    return stage.host_env.start(*arguments, log=f"pipeline-{trial.number}")


def kill_worker(stage: Stage, trial: Trial, process: Popen[bytes]) -> Popen[bytes]:
    """Kill the worker, and start a new worker.

    Returns:
        `process`, the process of the pipeline.
    """
    assert stage.worker is not None
    stage.worker.kill()
    stage.worker.wait()
    trial.killed = f"worker {stage.worker.pid}"
    stage.worker = stage.pool.start_worker()
    return process


def kill_server(stage: Stage, trial: Trial, process: Popen[bytes]) -> Popen[bytes]:
    """Kill the Prefect server, and start it again after `trial.down_s` seconds.

    Returns:
        `process`, the process of the pipeline.
    """
    stage.pool.server.kill()
    time.sleep(trial.down_s)
    stage.pool.server.start()
    trial.killed = f"server, down for {trial.down_s:.1f} s"
    return process


def kill_ray_worker(stage: Stage, trial: Trial, process: Popen[bytes]) -> Popen[bytes]:
    """Kill a random Ray process: either the supervisor of a job or the process of a step.

    Returns:
        `process`, the process of the pipeline.
    """

    def find_victims() -> list[tuple[int, str]]:
        victims = []
        for pid in stage.cluster.pids():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_supervisor = command.startswith("ray::") and "JobSupervisor" in command
                if is_supervisor or "steps:work" in command:
                    victims.append((pid, command.strip()))
        return victims

    # Wait until there is a process to kill: the supervisor of a job, or the process of a step. Also
    # end the wait if the pipeline has ended.
    becomes_true(lambda: process.poll() is not None or find_victims(), _ENDS_WITHIN_S)
    victims = find_victims()
    if victims:
        pid, command = Random(trial.share).choice(victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            kind = "supervisor of a job" if command.startswith("ray::") else "process of a step"
            trial.killed = f"{kind} {pid}"
    return process


_KILLERS: dict[str, Callable[[Stage, Trial, Popen[bytes]], Popen[bytes]]] = {
    "pipeline": kill_pipeline,
    "worker": kill_worker,
    "server": kill_server,
    "ray": kill_ray_worker,
}


def find_faults(stage: Stage, trial: Trial) -> list[str]:
    """Return the errors of a pipeline that has ended.

    Errors are steps that did not run or ran too often, wrong states on the Prefect server, and
    processes that still run.
    """
    faults = []
    trace = stage.trace(trial)
    lines = Counter(trace.read_text().splitlines() if trace.exists() else [])
    for unit in _UNITS:
        if lines[f"done {unit}"] != 1:
            faults.append(f"{unit} was done {lines[f'done {unit}']} times")
        begun = lines[f"begin {unit}"]
        if begun != 1 and trial.target != "ray":
            faults.append(f"{unit} has begun {begun} times")
    host_env = stage.host_env
    state = host_env.get(f"/flow_runs/{trial.flow_run_id}")["state"]
    if state["type"] != "COMPLETED":
        faults.append(f"the pipeline is {state['type']}: {state['message']}")
    task_runs = host_env.post("/task_runs/filter", flow_runs={"id": {"any_": [trial.flow_run_id]}})
    faults += [
        f"the task run {task_run['name']} is {task_run['state_type']}"
        for task_run in task_runs
        if task_run["state_type"] != "COMPLETED"
    ]
    keys = {"flow_run_id": {"any_": [trial.flow_run_id]}, "key": {"any_": ["points-grid"]}}
    tables = [json.loads(one["data"]) for one in host_env.post("/artifacts/filter", artifacts=keys)]
    states = [[row["state"] for row in table] for table in tables]
    if states != [["Completed"] * _POINTS]:
        faults.append(f"the table of the points shows {states}")
    names = stage.run_names(trial)
    if len(names) != len(_UNITS):
        faults.append(f"the pipeline has {len(names)} runs for {len(_UNITS)} steps")

    def list_remaining() -> list[int]:
        return [pid for name in names for pid in processes_with("MUSTER_RUN_ID", name)]

    if not becomes_true(lambda: not list_remaining(), _GONE_WITHIN_S):
        faults.append(f"processes remain: {list_remaining()}")
    return faults


def draw_trials(targets: Sequence[str], kills: int, seed: int) -> list[Trial]:
    """Return trials in random order.

    Args:
        targets: Programs to kill.
        kills: Number of trials for each program.
        seed: Seed of the random draws.
    """
    random = Random(seed)
    drawn = [target for target in targets for _ in range(kills)]
    random.shuffle(drawn)
    return [
        Trial(
            number=number,
            target=target,
            share=random.random(),
            down_s=random.uniform(0, _SERVER_DOWN_S),
        )
        for number, target in enumerate(drawn, start=1)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.pipeline_kills",
        description=__doc__,
        epilog="Exit: 0 each step was done exactly once; 1 otherwise; 2 the arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=10, help="kills of each program")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; else a new one")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of the Ray cluster")
    parser.add_argument(
        "--minutes", type=float, default=600.0, help="time after which no further trial begins"
    )
    parser.add_argument("--only", choices=TARGETS, action="append", help="kill only this program")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    for foreign in ("PREFECT_API_URL", "RAY_ADDRESS"):
        os.environ.pop(foreign, None)
    os.environ.update(RAY_ENV)
    directory = Path(tempfile.mkdtemp(prefix="muster-pipelines-"))
    ends_at = time.monotonic() + 60 * options.minutes
    trials: list[Trial] = []
    with RayCluster.run(nodes=options.nodes) as cluster:
        clusters = [{"address": cluster.address}]
        with gang_pool(directory / "pool", nodes={}, clusters=clusters) as pool:
            stage = Stage(pool, cluster, directory)
            stage.prepare()
            run = partial(run_trial, stage)
            undisturbed = Trial(number=0, target="", share=0.0, down_s=0.0)
            run(undisturbed, 0.0)
            trials.append(undisturbed)
            print(undisturbed.line, flush=True)
            for trial in draw_trials(options.only or TARGETS, options.kills, seed):
                if time.monotonic() > ends_at:
                    break
                # The kill happens after a random fraction of the given duration. Use the shortest
                # duration so far, because the first pipeline takes longer than the others. With
                # the duration of the first pipeline, many pipelines would end before the kill.
                run(trial, min(trial.took_s for trial in trials))
                trials.append(trial)
                print(trial.line, flush=True)
    return report(trials, seed, directory)


def report(trials: Sequence[Trial], seed: int, directory: Path) -> int:
    """Print the number of kills and faults of each target, and return the exit code."""
    for target in TARGETS:
        of_target = [trial for trial in trials if trial.target == target]
        killed = sum(bool(trial.killed) for trial in of_target)
        faulty = sum(bool(trial.faults) for trial in of_target)
        print(f"{target:8} {len(of_target):3} pipelines, {killed:3} killed, {faulty:3} with faults")
    is_faulty = any(trial.faults for trial in trials)
    print(f"seed {seed}: {'faults' if is_faulty else 'each step was done exactly once'}")
    if is_faulty:
        print(f"all files are kept in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return int(is_faulty)


if __name__ == "__main__":
    sys.exit(main())
