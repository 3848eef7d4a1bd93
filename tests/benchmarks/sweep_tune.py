"""Run the points of the benchmark `sweep` with Ray Tune.

Usage: `python -m tests.benchmarks.sweep_tune RAY_ADDRESS TRACE STORAGE POINT...`. A POINT is
NUMBER:SECONDS, and STORAGE is the folder for the files of Ray Tune.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune

_POINT_PROGRAM = Path(__file__).with_name("sweep_point.py")


def run_point(config: Mapping[str, Any], program: str, trace: str) -> dict[str, float]:
    """Run the program of one point of the sweep as a child process of a Ray worker.

    Ray Tune needs a result, so this function always returns the score 1.0.
    """
    command = (sys.executable, "-I", "-S", program, trace)
    subprocess.run(command, env={**os.environ, "POINT": config["point"]}, check=True)
    return {"score": 1.0}


def main(address: str, trace: str, storage: str, *points: str) -> None:
    ray.init(address, log_to_driver=False, logging_level=40)
    trainable = partial(run_point, program=str(_POINT_PROGRAM), trace=trace)
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"gpu": 1, "cpu": 1}),
        param_space={"point": tune.grid_search([*points])},
        run_config=tune.RunConfig(storage_path=storage, name="sweep", verbose=0),
    )
    results = tuner.fit()
    assert not results.errors, results.errors


if __name__ == "__main__":
    main(*sys.argv[1:])
