"""A Ray job through Muster, and through Ray's own SDK on the same cluster.

Three times: from the submit until it is seen to run; from the driver's last line until its end is
seen; from the stop until everything is free, by Ray's list of actors and the processes of the
machine. The other way is the loop that most write: `submit_job`, `get_job_status` each second, and
`stop_job` until it is final, which says nothing of what the job's actors and their children hold.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.report import Result, Row, say
from tests.support.ray_cluster import RAY_ENV, RayCluster

_ROUNDS, _QUICK_ROUNDS = 5, 1
_LIMIT_S = 120.0
#: How often the other way asks. Source: the example of Ray's own documentation of its SDK.
_ASK_EACH_S = 1.0
#: Says when it wrote its last line: CLOCK_MONOTONIC seconds, the same in every process here.
_SHORT = "import time; time.sleep(1.5); print('last', time.monotonic(), flush=True)"
#: Two GPUs, each held by an actor that has a child in a session of its own.
_LONG = """
import subprocess, time
import ray
ray.init(log_to_driver=False)
@ray.remote(num_gpus=1, num_cpus=0)
class Worker:
    def begin(self):
        return subprocess.Popen(["sleep", "{mark}"], start_new_session=True).pid
workers = [Worker.remote() for _ in range(2)]
print("taken", ray.get([worker.begin.remote() for worker in workers]), flush=True)
time.sleep(7000)
"""


def measure(*, quick: bool) -> Result:
    os.environ.update(RAY_ENV)
    values: dict[str, dict[str, list[float]]] = {}
    with (
        RayCluster.started() as cluster,
        tempfile.TemporaryDirectory(prefix="muster-bench-") as directory,
    ):
        for number in range(_QUICK_ROUNDS if quick else _ROUNDS):
            say(f"  round {number + 1}")
            for way, take in (("Muster", _muster), ("Ray's SDK", _sdk)):
                for what, took_ms in take(cluster, Path(directory)).items():
                    values.setdefault(what, {}).setdefault(way, []).append(took_ms)
    notes = {"Ray's SDK": f"asked each {_ASK_EACH_S:g} s"}
    return Result(
        name="jobs",
        question="a Ray job: submit to RUNNING seen, last line to end seen, stop to all free",
        rows=[
            Row(way=f"{way}, {what}", values=took, group=what, note=notes.get(way, ""))
            for what, ways in values.items()
            for way, took in ways.items()
        ],
    )


def _muster(cluster: RayCluster, directory: Path) -> dict[str, float]:
    return asyncio.run(_muster_takes(cluster, directory))


async def _muster_takes(cluster: RayCluster, directory: Path) -> dict[str, float]:
    from tasks.jobs import sweep_of
    from tasks.rayjobs.job import RayJob
    from tasks.rayjobs.plan import JobPlan

    def job(code: str) -> tuple[JobPlan, RayJob]:
        run_id = f"bench-{uuid.uuid4().hex[:8]}"
        place = directory / run_id
        work = directory / "code"
        work.mkdir(exist_ok=True)
        plan = JobPlan(
            address=cluster.address,
            submission_id=f"{run_id}--a01",
            run_id=run_id,
            attempt=1,
            component="trainer",
            argv=("python", "-c", code),
            env={},
            working_dir=work,
            log=place / "trainer.log",
            stop_signal=15,
            grace_s=5.0,
            submission_file=place / "submission.json",
        )

        def emit(name: str, **fields: object) -> None:
            return

        return plan, RayJob(plan, sweep=sweep_of(run_id, 1, "trainer", emit=emit), emit=emit)

    took: dict[str, float] = {}
    plan, short = job(_SHORT)
    began = time.monotonic()
    await short.launch()
    took["submit to running"] = 1000 * (time.monotonic() - began)
    await asyncio.wait_for(short.exited, _LIMIT_S)
    seen = time.monotonic()
    await short.end()
    took["last line to end seen"] = 1000 * (seen - _last_line(plan.log.read_text()))
    mark = _mark()
    plan, long = job(_LONG.format(mark=mark))
    await long.launch()
    while not plan.log.exists() or "taken" not in plan.log.read_text():
        await asyncio.sleep(0.05)
    began = time.monotonic()
    left = await long.end()
    took["stop to all free"] = 1000 * (time.monotonic() - began)
    assert not left and not _sleepers(mark), (left, _sleepers(mark))
    return took


def _sdk(cluster: RayCluster, directory: Path) -> dict[str, float]:
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(cluster.address)
    final = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}

    def submit(code: str) -> str:
        quoted = code.replace("'", "'\"'\"'")
        return client.submit_job(
            entrypoint=f"python -c '{quoted}'",
            entrypoint_resources={"worker_node": 0.001},
            runtime_env={"env_vars": {"PATH": cluster.env.get("PATH", os.environ["PATH"])}},
        )

    def until(is_so: Callable[[], bool]) -> float:
        deadline = time.monotonic() + _LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, "not in time"
            time.sleep(_ASK_EACH_S)
        return time.monotonic()

    took: dict[str, float] = {}
    began = time.monotonic()
    job = submit(_SHORT)
    took["submit to running"] = 1000 * (
        until(lambda: client.get_job_status(job) is not JobStatus.PENDING) - began
    )
    seen = until(lambda: client.get_job_status(job) in final)
    took["last line to end seen"] = 1000 * (seen - _last_line(client.get_job_logs(job)))
    mark = _mark()
    job = submit(_LONG.format(mark=mark))
    until(lambda: "taken" in client.get_job_logs(job))
    began = time.monotonic()
    client.stop_job(job)
    took["stop to all free"] = 1000 * (until(lambda: client.get_job_status(job) in final) - began)
    # It says that all is well; what it has left is ended here.
    for pid in _sleepers(mark):
        os.kill(pid, 9)
    return took


def _mark() -> str:
    """An odd number of seconds, by which the children of a job are known."""
    return f"{7000 + uuid.uuid4().int % 1_000_000 / 1_000_000:.6f}"


def _sleepers(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes() == f"sleep\0{mark}\0".encode():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _last_line(log: str) -> float:
    lines = [line.split() for line in log.splitlines()]
    return next(float(words[1]) for words in reversed(lines) if words[:1] == ["last"])
