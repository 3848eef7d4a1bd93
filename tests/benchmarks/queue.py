"""Replay a trace of a real cluster through the queue's policy, and measure scheduling passes.

    python -m tests.benchmarks.queue --trace FILE --nodes N --gpus-per-node G
                                     --policy fifo|backfill [--compress C] --out starts.csv

This command replays the trace in virtual time. It writes the start time of each job to a CSV file
with the columns `job_id,start_s`, and prints the waiting times of the jobs.

The benchmark `python -m tests.benchmarks queue` measures scheduling passes over long queues.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.ray.usage import ClusterNode
from tests.benchmarks.queue_passes import measure
from tests.benchmarks.queue_replay import Replay, replay
from tests.benchmarks.queue_trace import BadTrace, read_trace
from tests.benchmarks.report import Row
from tests.support.help import HelpFormatter

__all__ = ["main", "measure"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a trace, write the start times, and print the waiting times.

    Returns:
        The exit code: 0, or 2 if the trace cannot be read or the start times cannot be written.

    Raises:
        SystemExit: The arguments are wrong. The exit code is 2.
    """
    options = _parser().parse_args(arguments)
    cluster = [
        ClusterNode(name=f"node-{i}", gpus=options.gpus_per_node) for i in range(options.nodes)
    ]
    try:
        jobs = read_trace(
            options.trace, gpus_per_node=options.gpus_per_node, compress=options.compress
        )
        result = replay(jobs, cluster, options.policy)
        fifo = result if options.policy == "fifo" else replay(jobs, cluster, "fifo")
        _write_starts(options.out, result)
    except BadTrace as error:
        print(f"The trace can't be replayed. {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{options.out} can't be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{options.policy}, {options.nodes} nodes with {options.gpus_per_node} GPUs each")
    print("\n".join(_figures(result, fifo)))
    return 0


def _write_starts(path: Path, result: Replay) -> None:
    """Write the start time of each job to a CSV file."""
    with path.open("w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(("job_id", "start_s"))
        writer.writerows((job.id, result.starts_s[job.id]) for job in result.jobs)


def _figures(result: Replay, fifo: Replay) -> list[str]:
    """Return the lines that the command prints about the simulation of a trace.

    Args:
        result: Replay with the policy that the user chose.
        fifo: Replay of the same trace with the policy `fifo`.
    """
    job_counts = f"{len(result.jobs)}; {len(result.infeasible)} can never fit and are left out"
    if not result.jobs:
        return [_line("jobs", job_counts)]
    # The quantiles are computed by `Row`, as in all benchmarks.
    waits = Row(way="", values=result.waits_s)
    passes = Row(way="", values=[1000 * took_s for took_s in result.passes_s])
    delays = {job.id: result.starts_s[job.id] - fifo.starts_s[job.id] for job in result.jobs}
    worst = max(delays, key=lambda id: delays[id])
    delayed = f" ({worst})" if delays[worst] > 0 else ""
    return [
        _line("jobs", job_counts),
        _line("mean wait", _time(statistics.fmean(waits.values))),
        _line("p95 wait", _time(waits.quantile(0.95))),
        _line("maximum wait", _time(max(waits.values))),
        _line("utilisation", f"{100 * result.utilisation:.1f} %"),
        _line("worst delay against FIFO", f"{_time(delays[worst])}{delayed}"),
        _line(
            "time of a pass",
            f"mean {statistics.fmean(passes.values):.2f} ms, maximum {max(passes.values):.2f} ms "
            f"({len(passes.values)} passes)",
        ),
    ]


def _line(name: str, figure: str) -> str:
    """Return the line that this command prints for a figure: the figure's name and its value."""
    return f"{name:<26}{figure}"


def _time(seconds: float) -> str:
    """Return a duration as text, in hours and in seconds."""
    return f"{seconds / 3600:.1f} h ({seconds:.0f} s)"


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _parse_factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return factor


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.queue",
        description="Replay a trace through the queue's policy in virtual time.",
        epilog="Exit: 0 written; 2 the arguments are wrong, or the trace can't be read.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="CSV: job_id, submit_s, ..."
    )
    parser.add_argument(
        "--nodes", type=_parse_count, required=True, metavar="N", help="of the cluster"
    )
    parser.add_argument(
        "--gpus-per-node", type=_parse_count, required=True, metavar="G", help="of each of them"
    )
    parser.add_argument(
        "--policy",
        choices=("fifo", "backfill"),
        required=True,
        help="order in which runs may start",
    )
    parser.add_argument(
        "--compress",
        type=_parse_factor,
        default=1.0,
        metavar="C",
        help="divide the times of submission by this: a busier cluster",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="CSV to write: job_id,start_s"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
