"""Says what a Ray cluster does with processes that lose their owner, and what to set on it.

`python -m deployments.cluster_check --address URL [--node IP]...`, from a node of the cluster, be
it one that runs no work. It starts a few `sleep`s on each node, and ends what leaks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import io
import logging
import os
import sys
import time
from collections.abc import Sequence

import ray
from ray import cloudpickle
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.job_submission import JobStatus, JobSubmissionClient

import tasks
from deployments import node_shapes
from deployments.node_shapes import SHAPES, ShapeEnding, exit_code_in_worker, try_shape
from deployments.stack.state import to_reach_stack
from tasks.processes.trusted_server import require_trusted_url
from tasks.ray.dashboard import Dashboard, Denied, LiveNode, NoAnswer, prepare_driver
from tasks.show.output import guard_output

EXIT_HOLDS, EXIT_LEAKS, EXIT_INVALID = 0, 1, 2
#: The deprecated subreaper takes 13 s for a grandchild.
_LEAKED_AFTER_S = 20.0
_JOB_WITHIN_S = 120.0
_EXIT_CODE = 7
_FINAL = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every shape on every node, and print what became of it.

    Returns: 0 nothing that Ray can hold leaks, 1 something does or an exit code is lost, 2 the
    cluster can't be asked.
    """
    options = _parser().parse_args(arguments)
    os.environ.update(to_reach_stack(None))
    # Ray has read its environment already.
    Config.initialize("")
    try:
        nodes, gcs_address = asyncio.run(_cluster(options.address))
    except (NoAnswer, Denied) as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    chosen = [node for node in nodes if not options.node or node.ip in options.node]
    if not chosen:
        known = ", ".join(sorted({node.ip for node in nodes}))
        print(f"no such node; there are {known}", file=sys.stderr)
        return EXIT_INVALID
    prepare_driver(gcs_address)
    for sent in (tasks, node_shapes):
        cloudpickle.register_pickle_by_value(sent)  # type: ignore[no-untyped-call]
    ray.init(gcs_address, log_to_driver=False, logging_level=logging.ERROR)
    endings: list[ShapeEnding] = []
    codes: list[int] = []
    say = functools.partial(print, file=sys.stdout, flush=True)
    # Ray prints, at length, that a worker was killed, which is what is done here.
    with contextlib.redirect_stdout(io.StringIO()):
        for node in chosen:
            say(f"node {node.ip} ({node.node_id[:8]})")
            for shape in SHAPES:
                endings.append(try_shape(node.node_id, shape, options.within_s))
                say(f"  {shape:24} {_words(endings[-1])}")
            codes.append(exit_code_in_worker(node.node_id))
            say(f"  {'exit 7, in a worker':24} {_code_words(codes[-1])}")
    ray.shutdown()
    codes.append(_exit_code_in_job(options.address))
    print(f"a job's driver\n  {'exit 7':24} {_code_words(codes[-1])}")
    for line in advice(endings, codes):
        print(f"- {line}")
    simple = [ending for ending in endings if ending.shape in _HELD_BY_GROUPS]
    is_lost = any(code != _EXIT_CODE for code in codes)
    return EXIT_LEAKS if is_lost or any(e.gone_after_s is None for e in simple) else EXIT_HOLDS


#: The shapes that stay in their worker's process group, so that Ray can be expected to end them.
_HELD_BY_GROUPS = tuple(SHAPES)[:2]


def advice(endings: Sequence[ShapeEnding], codes: Sequence[int]) -> list[str]:
    """What to set on the cluster, by what was seen."""
    leaks = {ending.shape for ending in endings if ending.gone_after_s is None}
    lines = []
    if leaks & {*_HELD_BY_GROUPS}:
        lines.append(
            "Children of killed workers leak: set RAY_process_group_cleanup_enabled=true in the "
            "environment of every `ray start` (the default of Ray 2.60), and restart it."
        )
    if leaks - {*_HELD_BY_GROUPS}:
        lines.append(
            "What leaves its process group leaks, as it does without the subreaper. Leave that "
            "off, since it is deprecated: Muster sweeps every node when a job has ended."
        )
    if any(code != _EXIT_CODE for code in codes):
        lines.append(
            "Exit codes are lost, so that crashes look like success: take "
            "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper out of the environment "
            "of `ray start`, or set SIGCHLD back in what runs there: "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL). Muster does, for a job's driver."
        )
    if not lines:
        lines.append("Nothing to set: everything was ended, and exit codes are seen.")
    return lines


def _words(ending: ShapeEnding) -> str:
    if ending.gone_after_s is None:
        return f"leaks (ended by this check: pid {', '.join(map(str, ending.leaked))})"
    return f"gone after {ending.gone_after_s:.2f} s"


def _code_words(code: int) -> str:
    return f"seen as {code}" + ("" if code == _EXIT_CODE else ": SIGCHLD is ignored")


def _exit_code_in_job(address: str) -> int:
    """Of `exit 7`, as the driver of a job sees it. Raises: TimeoutError, UntrustedListener."""
    require_trusted_url(address)
    client = JobSubmissionClient(address)
    code = "import subprocess; print('saw', subprocess.run('exit 7', shell=True).returncode)"
    job = client.submit_job(entrypoint=f'python -c "{code}"')
    deadline = time.monotonic() + _JOB_WITHIN_S
    while client.get_job_status(job) not in _FINAL:
        if time.monotonic() > deadline:
            client.stop_job(job)
            raise TimeoutError(f"job {job} has not ended within {_JOB_WITHIN_S:g} s")
        time.sleep(0.2)
    seen = [line for line in client.get_job_logs(job).splitlines() if line.startswith("saw ")]
    return int(seen[-1].split()[1]) if seen else -1


async def _cluster(address: str) -> tuple[list[LiveNode], str]:
    dashboard = Dashboard(address)
    try:
        return await dashboard.nodes(), await dashboard.gcs_address()
    finally:
        await dashboard.aclose()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deployments.cluster_check",
        description="Say what a Ray cluster does with processes whose owner was killed, and what "
        "to set on it. Starts a few sleeps on each node and ends what leaks.",
        epilog="Exit: 0 what Ray can hold is held and exit codes are seen, 1 not so, 2 the cluster "
        "can't be asked, or the arguments are wrong.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--address", required=True, metavar="URL", help="of the Ray dashboard")
    parser.add_argument(
        "--node", action="append", default=[], metavar="IP", help="only this one; repeatable"
    )
    parser.add_argument(
        "--within-s",
        type=float,
        default=_LEAKED_AFTER_S,
        metavar="S",
        help="what lives so long after its actor is a leak",
    )
    return parser


if __name__ == "__main__":
    with guard_output():
        raise SystemExit(main())
