"""Benchmark of a Ray job through Muster, and through Ray's own SDK on the same cluster.

The benchmark measures:

- the time from the submit until the way reports the state RUNNING;
- the time from the last line of the driver until the way reports the end of the job;
- the time from the stop request until the way reports the end of the job;
- the number of child processes of the job's actors that have not ended then.

The other way is a common loop: `submit_job`, `get_job_status` each second, and `stop_job` until the
state is final. A final state does not mean that the actors' child processes have ended.
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
_STOP, _LEFT = "stop until it is reported as ended", "remaining processes of its actors"
#: Seconds between two polls of the loop that uses Ray's SDK. Source: example in the documentation
#: of Ray's SDK.
_ASK_EACH_S = 1.0
#: Program of a short job. At the end, the program prints the time in seconds of CLOCK_MONOTONIC, a
#: clock that all processes of this machine share. The job lasts a random time, so that it ends at a
#: random moment between two polls of its status.
_SHORT = "import time; time.sleep({lasts}); print('last', time.monotonic(), flush=True)"
#: Shortest and longest duration of the short job, in seconds.
_LASTS_S = (1.0, 2.0)
#: Program of a job with two actors. Each actor has a GPU, and starts a child process in a new
#: session.
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
    """Measure the delays at the start and the end of Ray jobs, with Muster and with Ray's SDK."""
    os.environ.update(RAY_ENV)
    values: dict[str, dict[str, list[float]]] = {}
    random_draws = random.Random(0)
    with (
        RayCluster.run() as cluster,
        tempfile.TemporaryDirectory(prefix="muster-bench-") as directory,
    ):
        os.environ["MUSTER_HOME"] = directory
        for number in range(_QUICK_ROUNDS if quick else _ROUNDS):
            say(f"  round {number + 1}")
            short = _SHORT.format(lasts=random_draws.uniform(*_LASTS_S))
            for way, take in (("Muster", _muster), ("Ray's SDK", _sdk)):
                for figure, value in take(cluster, Path(directory), short).items():
                    values.setdefault(figure, {}).setdefault(way, []).append(value)
    notes = {"Ray's SDK": f"asked every {_ASK_EACH_S:g} s"}
    return Result(
        name="jobs",
        question="Three times of a Ray job are measured: from its submission to its state RUNNING, "
        "from its last line of output until its end is noticed, and from the request to stop it "
        "until its end. Two rows count the processes of the job's actors that are still alive "
        "after the end of the job",
        rows=[
            Row(
                way=f"{way}, {figure}",
                values=samples,
                group=figure,
                unit="of 2" if figure == _LEFT else "ms",
                is_detail=figure == _LEFT,
                note=notes.get(way, "") if figure != _LEFT else "",
            )
            for figure, ways in values.items()
            for way, samples in ways.items()
        ],
    )


def _muster(cluster: RayCluster, directory: Path, short_code: str) -> dict[str, float]:
    """Run a short and a long Ray job through Muster, and return the measured values.

    The result is a mapping from the name of a measured quantity to its value.
    """
    return asyncio.run(_measure_muster(cluster, directory, short_code))


async def _measure_muster(
    cluster: RayCluster, directory: Path, short_code: str
) -> dict[str, float]:
    from tasks.processes.guarded import Command
    from tasks.ray.job import RayJob
    from tasks.ray.submission import JobPlan
    from tests.support.ray_jobs import make_job

    def job(code: str) -> tuple[JobPlan, RayJob]:
        run_id = f"bench-{uuid.uuid4().hex[:8]}"
        run_directory = directory / run_id
        working_directory = directory / "code"
        working_directory.mkdir(exist_ok=True)
        plan = JobPlan(
            address=cluster.address,
            submission_id=f"{run_id}--a01",
            run_id=run_id,
            attempt=1,
            component="trainer",
            command=Command(
                argv=("python", "-c", code),
                env={},
                cwd=working_directory,
                log=run_directory / "trainer.log",
                grace_s=5.0,
            ),
            submission_file=run_directory / "submission.json",
        )

        def emit(name: str, *of: object, **fields: object) -> None:
            return

        return plan, make_job(plan, emit)

    figures: dict[str, float] = {}
    plan, short = job(short_code)
    began = time.monotonic()
    await short.launch()
    await short.until_running()
    figures["submit to running"] = 1000 * (time.monotonic() - began)
    await asyncio.wait_for(short.exited, _LIMIT_S)
    end_reported = time.monotonic()
    await short.end()
    last_line = _time_of_last_line(plan.command.log.read_text())
    figures["last line to detected end"] = 1000 * (end_reported - last_line)

    mark = _mark()
    plan, long = job(_LONG.format(mark=mark))
    await long.launch()
    await long.until_running()
    while not plan.command.log.exists() or not _has_taken(plan.command.log.read_text()):
        await asyncio.sleep(0.05)
    began = time.monotonic()
    leftovers = await long.end()
    figures[_STOP] = 1000 * (time.monotonic() - began)
    assert not leftovers, leftovers
    figures[_LEFT] = len(_find_sleepers(mark))
    return figures


def _sdk(cluster: RayCluster, directory: Path, short_code: str) -> dict[str, float]:
    """Run a short and a long Ray job through Ray's SDK, and return the measured values.

    The result is a mapping from the name of a measured quantity to its value.
    """
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(cluster.address)
    final = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}

    def submit(code: str) -> str:
        return client.submit_job(
            entrypoint=shlex.join([sys.executable, "-c", code]),
            entrypoint_resources={"worker_node": 0.001},
        )

    def until(condition: Callable[[], bool]) -> float:
        """Poll until the condition holds; return the monotonic time of that moment in seconds."""
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, "not in time"
            time.sleep(_ASK_EACH_S)
        return time.monotonic()

    figures: dict[str, float] = {}
    began = time.monotonic()
    job = submit(short_code)
    figures["submit to running"] = 1000 * (
        until(lambda: client.get_job_status(job) is not JobStatus.PENDING) - began
    )
    end_reported = until(lambda: client.get_job_status(job) in final)
    last_line = _time_of_last_line(client.get_job_logs(job))
    figures["last line to detected end"] = 1000 * (end_reported - last_line)

    mark = _mark()
    job = submit(_LONG.format(mark=mark))
    until(lambda: _has_taken(client.get_job_logs(job)))
    began = time.monotonic()
    client.stop_job(job)
    figures[_STOP] = 1000 * (until(lambda: client.get_job_status(job) in final) - began)
    sleepers = _find_sleepers(mark)
    figures[_LEFT] = len(sleepers)
    for pid in sleepers:
        os.kill(pid, 9)
    return figures


def _has_taken(log: str) -> bool:
    """Return True if the log shows that the job has started its actors.

    The job then prints a line that begins with `taken [`. Other lines of Ray's log, such as the
    source code of the job, never begin with this text.
    """
    return any(line.startswith("taken [") for line in log.splitlines())


def _mark() -> str:
    """Return a random duration, as text, for the `sleep` processes of one job.

    The benchmark finds the job's child processes by this duration in their command lines.
    """
    return f"{7000 + uuid.uuid4().int % 1_000_000 / 1_000_000:.6f}"


def _find_sleepers(mark: str) -> list[int]:
    """Return the process ids of all `sleep` processes whose argument is `mark`."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes() == f"sleep\0{mark}\0".encode():
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


def _time_of_last_line(log: str) -> float:
    """Return the time that the measured Ray job printed in its last line."""
    lines = [line.split() for line in log.splitlines()]
    return next(float(words[1]) for words in reversed(lines) if words[:1] == ["last"])
