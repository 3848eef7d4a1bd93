"""What one server, worker, gate, flow process and gateway take, by how much they carry.

docs/limits.md draws its lines through these figures; each series is a group of rows that differ in
`at`, what is counted.
"""

from __future__ import annotations

from tests.benchmarks import limits_gateway, limits_queue, limits_runs
from tests.benchmarks.report import Result, say


def measure(*, quick: bool) -> Result:
    say("  the queue")
    rows, missing = limits_queue.rows(quick=quick)
    say("  runs")
    rows += limits_runs.rows(quick=quick)
    say("  gateways")
    rows += limits_gateway.rows(quick=quick)
    return Result(
        name="limits",
        question="what a server, a worker, a gate, a flow process and a gateway take, by how much "
        "they carry",
        rows=rows,
        missing=missing,
    )
