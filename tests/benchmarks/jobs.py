"""A Ray job through Muster, and through Ray's own SDK on the same cluster.

Three times: from the submit until it is seen to run; from the driver's last line until its end is
seen; from the stop until the way says that the job is over; and what is left then of the processes
that its actors had started. The other way is the loop that most write: `submit_job`,
`get_job_status` each second, and `stop_job` until it is final, which says nothing of those.
"""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.report import Result, Row, say
from tests.support.ray_cluster import RAY_ENV, RayCluster

_ROUNDS, _QUICK_ROUNDS = 10, 1
_LIMIT_S = 120.0
_STOP, _LEFT = "stop until it is said to be over", "left then of its actors' processes"
#: How often the other way asks. Source: the example of Ray's own documentation of its SDK.
_ASK_EACH_S = 1.0
#: Says when it wrote its last line: CLOCK_MONOTONIC seconds, the same in every process here.
#: It lasts a random time, or the loop's questions would always come at the same distance.
_SHORT = "import time; time.sleep({lasts}); print('last', time.monotonic(), flush=True)"
_LASTS_S = (1.0, 2.0)
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
    chance = random.Random(0)
    with (
        RayCluster.started() as cluster,
        tempfile.TemporaryDirectory(prefix="muster-bench-") as directory,
    ):
        os.environ["MUSTER_HOME"] = directory
        for number in range(_QUICK_ROUNDS if quick else _ROUNDS):
            say(f"  round {number + 1}")
            short = _SHORT.format(lasts=chance.uniform(*_LASTS_S))
            for way, take in (("Muster", _muster), ("Ray's SDK", _sdk)):
                for what, value in take(cluster, Path(directory), short).items():
                    values.setdefault(what, {}).setdefault(way, []).append(value)
    notes = {"Ray's SDK": f"asked each {_ASK_EACH_S:g} s"}
    return Result(
        name="jobs",
        question="a Ray job: submit to RUNNING seen, last line to end seen, stop to its end, and "
        "the processes of its two actors that are left then",
        rows=[
            Row(
                way=f"{way}, {what}",
                values=took,
                group=what,
                unit="of 2" if what == _LEFT else "ms",
                is_detail=what == _LEFT,
                note=notes.get(way, "") if what != _LEFT else "",
            )
            for what, ways in values.items()
            for way, took in ways.items()
        ],
    )


def _muster(cluster: RayCluster, directory: Path, short_code: str) -> dict[str, float]:
    return asyncio.run(_muster_takes(cluster, directory, short_code))


async def _muster_takes(cluster: RayCluster, directory: Path, short_code: str) -> dict[str, float]:
    from tasks.processes.guarded import Command
    from tasks.ray.job import RayJob
    from tasks.ray.submission import JobPlan
    from tests.support.ray_jobs import make_job

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
            command=Command(
                argv=("python", "-c", code),
                env={},
                cwd=work,
                log=place / "trainer.log",
                grace_s=5.0,
            ),
            submission_file=place / "submission.json",
        )

        def emit(name: str, *of: object, **fields: object) -> None:
            return

        return plan, make_job(plan, emit)

    took: dict[str, float] = {}
    plan, short = job(short_code)
    began = time.monotonic()
    await short.launch()
    await short.until_running()
    took["submit to running"] = 1000 * (time.monotonic() - began)
    await asyncio.wait_for(short.exited, _LIMIT_S)
    seen = time.monotonic()
    await short.end()
    took["last line to end seen"] = 1000 * (seen - _last_line(plan.command.log.read_text()))
    mark = _mark()
    plan, long = job(_LONG.format(mark=mark))
    await long.launch()
    await long.until_running()
    while not plan.command.log.exists() or not _has_taken(plan.command.log.read_text()):
        await asyncio.sleep(0.05)
    began = time.monotonic()
    left = await long.end()
    took[_STOP] = 1000 * (time.monotonic() - began)
    assert not left, left
    took[_LEFT] = len(_sleepers(mark))
    return took


def _sdk(cluster: RayCluster, directory: Path, short_code: str) -> dict[str, float]:
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(cluster.address)
    final = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}

    def submit(code: str) -> str:
        return client.submit_job(
            entrypoint=shlex.join([sys.executable, "-c", code]),
            entrypoint_resources={"worker_node": 0.001},
        )

    def until(is_so: Callable[[], bool]) -> float:
        deadline = time.monotonic() + _LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, "not in time"
            time.sleep(_ASK_EACH_S)
        return time.monotonic()

    took: dict[str, float] = {}
    began = time.monotonic()
    job = submit(short_code)
    took["submit to running"] = 1000 * (
        until(lambda: client.get_job_status(job) is not JobStatus.PENDING) - began
    )
    seen = until(lambda: client.get_job_status(job) in final)
    took["last line to end seen"] = 1000 * (seen - _last_line(client.get_job_logs(job)))
    mark = _mark()
    job = submit(_LONG.format(mark=mark))
    until(lambda: _has_taken(client.get_job_logs(job)))
    began = time.monotonic()
    client.stop_job(job)
    took[_STOP] = 1000 * (until(lambda: client.get_job_status(job) in final) - began)
    sleepers = _sleepers(mark)
    took[_LEFT] = len(sleepers)
    for pid in sleepers:
        os.kill(pid, 9)
    return took


def _has_taken(log: str) -> bool:
    """Whether the job has its actors; Ray's own log begins with the whole code."""
    return any(line.startswith("taken [") for line in log.splitlines())


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
