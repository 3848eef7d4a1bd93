"""Benchmark of a sweep: many short points share the GPUs of a Ray cluster.

The same points run in three ways, on the same Prefect server and the same Ray cluster:

- Muster: a pipeline whose only stage is a matrix of steps on Ray;
- a loop with the command `prefect deployment run` for each point. A process worker of Prefect
  starts the flow runs, at most one for each GPU at a time. Each flow run is a Ray task with a GPU;
- Ray Tune, with a trial for each point.

The programs of the points write when they begin and end, and which GPU they use. The idle times of
the GPUs are computed only from these lines.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen

from tests.benchmarks.harness import wait_until
from tests.benchmarks.report import Missing, Result, Row, say
from tests.benchmarks.sweep_trace import Work, count_ends, list_idle_ns, read_trace
from tests.support.gang_pool import GangPool, gang_pool
from tests.support.host_environment import ROOT
from tests.support.prefect_api import send_request
from tests.support.ray_cluster import RAY_ENV, RayCluster

_POINTS, _QUICK_POINTS = 200, 16
#: Environment variable that overrides the number of points of the sweep. The name has no prefix
#: MUSTER_, because the benchmarks remove such variables from their environment.
_POINTS_VARIABLE = "SWEEP_POINTS"
#: Number of GPUs of the Ray cluster.
_GPUS = 8
#: Mean duration of a point, in seconds. A point is one of the short programs that the sweep runs.
#: Each point lasts between 0.5 and 1.5 times this mean.
_MEAN_S = 2.0
#: Environment variable that overrides the mean duration of a point.
_MEAN_VARIABLE = "SWEEP_POINT_S"
#: Time limit of a sweep, in seconds: a fixed part, and a part for each point.
_LIMIT_S, _LIMIT_PER_POINT_S = 120.0, 15.0
#: Seconds between two polls of Muster's worker. `muster up` sets the same value.
_MUSTER_POLL_S = "10"
#: Seconds between two polls of Prefect's worker. Prefect's default is 10.
_PLAIN_POLL_S = 1
_POINT_PROGRAM = Path(__file__).with_name("sweep_point.py")
_PLAIN_POOL = "plain"
_MUSTER, _PLAIN, _TUNE = "Muster", "loop of `prefect deployment run`", "Ray Tune"
#: Packages that Ray Tune needs in addition to Ray.
_TUNE_PACKAGES = ("pandas", "pyarrow", "tensorboardX")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Cluster, work pool and files of the sweep, the same for Muster, Prefect and Ray Tune."""

    pool: GangPool
    cluster: RayCluster
    #: Folder for the output files of the points, and for the project of Muster's pipeline.
    directory: Path
    #: The points of the sweep, each as NUMBER:SECONDS: the number of the point, and the duration of
    #: its work.
    points: Sequence[str]
    #: Mean duration of the points of the sweep, in seconds. A point is one short program.
    mean_s: float

    @property
    def limit_s(self) -> float:
        """Time limit of a sweep, in seconds."""
        return _LIMIT_S + (_LIMIT_PER_POINT_S + self.mean_s) * len(self.points)


#: Function that runs all points of the sweep. The second argument is the path of the file in which
#: each point records its start and its end.
_Way = Callable[[_Stage, Path], None]


def measure(*, quick: bool) -> Result:
    """Measure the idle time of the GPUs, and the duration of a whole sweep.

    The same sweep runs with Muster, as a loop of `prefect deployment run`, and with Ray Tune.
    """
    os.environ.update(RAY_ENV)
    count = int(os.environ.get(_POINTS_VARIABLE, _QUICK_POINTS if quick else _POINTS))
    mean_s = float(os.environ.get(_MEAN_VARIABLE, _MEAN_S))
    points = draw_points(count, mean_s)
    ways: dict[str, _Way] = {_MUSTER: _run_muster, _PLAIN: _run_plain_loop}
    missing = [name for name in _TUNE_PACKAGES if find_spec(name) is None]
    if not missing:
        ways[_TUNE] = _run_tune
    rows: dict[str, list[Row]] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        cluster = stack.enter_context(RayCluster.run(nodes=1, gpus_per_node=_GPUS))
        clusters = [{"address": cluster.address}]
        pool = stack.enter_context(gang_pool(directory / "pool", nodes={}, clusters=clusters))
        stage = _Stage(
            pool=pool, cluster=cluster, directory=directory, points=points, mean_s=mean_s
        )
        for name, run in ways.items():
            say(f"  {name}: {len(points)} points")
            trace = directory / f"trace-{len(rows)}"
            began_ns = time.monotonic_ns()
            run(stage, trace)
            rows[name] = [*_list_rows(name, read_trace(trace), began_ns, stage)]
    by_figure = [row for figure_rows in zip(*rows.values(), strict=True) for row in figure_rows]
    return Result(
        name="sweep",
        question=f"A sweep of {len(points)} points on {_GPUS} logical GPUs of one Ray node. Each "
        f"point is a program that runs for {mean_s / 2:g} to {mean_s * 1.5:g} s on one GPU, and "
        "records its start and its end. The rows *a GPU is idle* show how long a GPU has no point "
        "while other points wait for a GPU. The overhead per point is the idle time of all GPUs "
        "from the start of the sweep to the start of the last point, divided by the number of "
        "points",
        rows=[*by_figure, _make_ideal_row(points)],
        missing=[
            Missing(way=_TUNE, why=f"{', '.join(missing)} not installed: `make bench` does it")
        ]
        if missing
        else [],
    )


def draw_points(count: int, mean_s: float = _MEAN_S) -> list[str]:
    """Return the points of a sweep, each as NUMBER:SECONDS.

    SECONDS is the duration of the point. The durations are random, but the same in each call.

    Args:
        count: Number of points.
        mean_s: Mean duration of a point, in seconds.
    """
    generator = random.Random(0)
    return [
        f"{number}:{generator.uniform(mean_s / 2, mean_s * 1.5):.3f}"
        for number in range(1, count + 1)
    ]


def _list_rows(name: str, works: Sequence[Work], began_ns: int, stage: _Stage) -> list[Row]:
    """Return the rows of the results for one program that ran the sweep, for example Ray Tune.

    Args:
        name: Name of the program.
        works: GPU, start and end of each point of the sweep, from the function `read_trace`.
        began_ns: Time at which the sweep was started, in nanoseconds of CLOCK_MONOTONIC.
        stage: The environment of the sweep, with its points.
    """
    assert len(works) == len(stage.points), works
    idle_ns = list_idle_ns(works, _GPUS)
    waiting_ns = works[-1].began_ns - works[0].began_ns
    start_ns = works[0].began_ns - began_ns
    overhead_ns = (sum(idle_ns) + _GPUS * start_ns) / len(works)
    total_ns = max(work.ended_ns for work in works) - began_ns
    note = f"the worker asks every {_PLAIN_POLL_S} s" if name == _PLAIN else ""
    return [
        Row(
            way=f"{name}, a GPU is idle",
            values=[interval_ns / 1e6 for interval_ns in idle_ns],
            group="idle",
            note=note,
        ),
        Row(
            way=f"{name}, idle share of all GPUs",
            values=[100 * sum(idle_ns) / (_GPUS * waiting_ns)],
            unit="%",
            group="share",
        ),
        Row(way=f"{name}, first point", values=[start_ns / 1e6], group="first"),
        Row(way=f"{name}, overhead per point", values=[overhead_ns / 1e6], group="overhead"),
        Row(way=f"{name}, whole sweep", values=[total_ns / 1e9], unit="s", group="total"),
    ]


def _make_ideal_row(points: Sequence[str]) -> Row:
    """Return a row with the shortest possible duration of the sweep: no GPU is ever idle."""
    work_s = sum(float(point.partition(":")[2]) for point in points)
    return Row(
        way="no overhead, whole sweep",
        values=[work_s / _GPUS],
        unit="s",
        group="total",
        how="computed",
        samples=0,
    )


def _run_muster(stage: _Stage, trace: Path) -> None:
    """Run the sweep as a pipeline of Muster. Each point of the sweep is a step of the pipeline."""
    project = stage.directory / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text("")
    grid = {
        "name": "grid",
        "command": [sys.executable, "-I", "-S", str(_POINT_PROGRAM), str(trace)],
        "resources": {"gpus": 1},
        "matrix": {"env.POINT": [*stage.points]},
    }
    spec = project / "pipeline.yaml"
    spec.write_text(json.dumps({"name": "sweep", "stages": [grid]}))
    host_env = stage.pool.host_env
    host_env.extra_env["PREFECT_WORKER_QUERY_SECONDS"] = _MUSTER_POLL_S
    deployment = {
        "name": "any",
        "flow_id": host_env.post("/flows/", name="train")["id"],
        "work_pool_name": stage.pool.name,
        "entrypoint": "flows.train.train",
        "pull_steps": [],
    }
    send_request("POST", f"{host_env.api}/deployments/", deployment)
    # Start Muster's agents on the Ray node. In production, the upkeep process starts the agents.
    host_env.run_module(
        "tasks.command", "cleanup", "--address", stage.cluster.address, "--run-id", "none"
    )
    with ExitStack() as stack:
        worker = stage.pool.start_worker()
        stack.callback(_stop, worker)
        pipeline = host_env.start("-m", "flows.pipeline", str(spec), log="pipeline")
        stack.callback(_stop, pipeline)
        _wait_for_success(stage, pipeline, "pipeline")


def _run_plain_loop(stage: _Stage, trace: Path) -> None:
    """Run each point of the sweep as a flow run of one deployment.

    The flow runs are executed by a Prefect worker of type "process", without Muster.
    """
    host_env = stage.pool.host_env
    host_env.extra_env["PREFECT_WORKER_QUERY_SECONDS"] = str(_PLAIN_POLL_S)
    plain = GangPool(
        host_env=host_env, server=stage.pool.server, type="process", name=_PLAIN_POOL, nodes={}
    )
    plain.set_up(limit=_GPUS)
    names = ("point", "trace", "ray_address")
    properties = {name: {"title": name, "type": "string"} for name in names}
    deployment = {
        "name": _PLAIN_POOL,
        "flow_id": host_env.post("/flows/", name="point")["id"],
        "work_pool_name": _PLAIN_POOL,
        "entrypoint": "tests/benchmarks/sweep_flow.py:run_point_flow",
        "path": str(ROOT),
        "parameters": {"trace": str(trace), "ray_address": stage.cluster.gcs_address},
        # `prefect deployment run` accepts only parameters of this schema.
        "parameter_openapi_schema": {"type": "object", "properties": properties},
        "pull_steps": [
            {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        ],
    }
    send_request("POST", f"{host_env.api}/deployments/", deployment)
    with ExitStack() as stack:
        command = ("-m", "prefect", "worker", "start", "--pool", _PLAIN_POOL)
        worker = host_env.start(*command, log="plain-worker")
        stack.callback(_stop, worker)
        wait_until(lambda: "started!" in host_env.log("plain-worker"), "Prefect's worker")
        for point in stage.points:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "prefect", "deployment", "run"),
                    *(f"point/{_PLAIN_POOL}", "--param", f"point={point}"),
                ],
                cwd=ROOT,
                env=host_env.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=stage.limit_s,
            )
            if done.returncode != 0:
                raise RuntimeError(f"prefect deployment run: {done.stdout}{done.stderr}")
        _wait_for_all(stage, trace)


def _run_tune(stage: _Stage, trace: Path) -> None:
    """Run the sweep with Ray Tune. Each point of the sweep is a trial."""
    storage = stage.directory / "tune"
    arguments = (stage.cluster.gcs_address, str(trace), str(storage), *stage.points)
    program = stage.pool.host_env.start("-m", "tests.benchmarks.sweep_tune", *arguments, log="tune")
    try:
        _wait_for_success(stage, program, "tune")
    finally:
        _stop(program)


def _wait_for_success(stage: _Stage, program: Popen[bytes], log: str) -> None:
    """Wait until a program has ended with exit code 0.

    Args:
        stage: The environment of the sweep. Its attribute `limit_s` is the time limit.
        program: The program.
        log: Name of the program's log file.

    Raises:
        RuntimeError: The program failed, or did not end within the time limit of the sweep. The
            message has the end of the log.
    """
    try:
        code: int | None = program.wait(stage.limit_s)
    except subprocess.TimeoutExpired:
        code = None
    if code != 0:
        end = "still runs" if code is None else f"exit code {code}"
        raise RuntimeError(f"{log}: {end}\n{stage.pool.host_env.log(log)[-3000:]}")


def _wait_for_all(stage: _Stage, trace: Path) -> None:
    """Wait until all points of the sweep have ended.

    Raises:
        TimeoutError: A point did not end within the time limit of the sweep.
    """
    wait_until(
        lambda: count_ends(trace) == len(stage.points), "the end of all points", stage.limit_s
    )


def _stop(process: Popen[bytes]) -> None:
    """Stop a program if it still runs: send SIGTERM, and 30 s later SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
