"""Benchmark of the resources of a server, worker, scheduler, flow process and gateway under load.

Each series is a group of rows that differ in their load: the field `at` is the number of runs,
components, requests or servers. docs/limits.md fits a straight line through each series.
"""

from __future__ import annotations

from tests.benchmarks import limits_gateway, limits_queue, limits_runs
from tests.benchmarks.report import Result, say


def measure(*, quick: bool) -> Result:
    """Measure time, CPU and memory of Muster under growing loads.

    The result has a row for each measured quantity and each load.
    """
    say("  the queue")
    rows, missing = limits_queue.rows(quick=quick)
    say("  runs")
    rows += limits_runs.rows(quick=quick)
    say("  gateways")
    rows += limits_gateway.rows(quick=quick)
    return Result(
        name="limits",
        question="Time, CPU and memory that the Prefect server, a worker, the scheduler of the "
        "queue, a flow process and the gateway of inference servers use under a growing load",
        rows=rows,
        missing=missing,
    )
