"""The flow of the plain Prefect loop in the benchmark `sweep`: a flow run for each point.

A user without Muster would write such a flow. Ray chooses a free GPU for the point.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ray
from prefect import flow

_POINT_PROGRAM = Path(__file__).with_name("sweep_point.py")


@ray.remote(num_gpus=1, num_cpus=1, max_retries=0)
def run_point(program: str, trace: str, point: str) -> None:
    """Run the program of one point of the sweep as a child process of a Ray worker."""
    command = (sys.executable, "-I", "-S", program, trace)
    subprocess.run(command, env={**os.environ, "POINT": point}, check=True)


@flow(name="point", log_prints=False)
def run_point_flow(point: str, trace: str, ray_address: str) -> None:
    """Run a point as a Ray task with one GPU.

    Args:
        point: Number of the point and its duration in seconds, as NUMBER:SECONDS.
        trace: Output file of the point's program.
        ray_address: HOST:PORT of Ray's control store.
    """
    ray.init(ray_address, log_to_driver=False, logging_level=40)
    ray.get(run_point.remote(str(_POINT_PROGRAM), trace, point))
