"""Check whether a Ray cluster ends the processes of killed actors, and recommend settings.

Run `python -m deployments.cluster_check --address URL [--node IP]...` on any node of the cluster.
The check starts a few `sleep` processes on each node, and ends the processes that leak.
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

#: Exit status if Ray ended all processes in the process groups of its killed workers, and no exit
#: code was lost.
EXIT_HOLDS = 0
#: Exit status if a process in the process group of a killed Ray worker kept running, or if an exit
#: code was lost. An exit code is lost if a parent process in a Ray job sees 0 instead of the exit
#: code of its child.
EXIT_LEAKS = 1
#: Exit status if the cluster cannot be queried or the arguments are wrong.
EXIT_INVALID = 2
#: Seconds from the end of an actor until its running descendants count as leaked. Ray's deprecated
#: subreaper ends some descendants only after 13 s. These descendants are not leaked, so the value
#: is larger than 13 s.
_LEAKED_AFTER_S = 20.0
#: Longest time, in seconds, that the Ray job for the test of exit codes may take.
_JOB_WITHIN_S = 120.0
#: Exit code of each child process in the test of exit codes. The parent process must see this
#: code.
_EXIT_CODE = 7
#: States in which a Ray job has ended.
_FINAL_STATES = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)
#: The first two keys of `SHAPES`: kinds of child processes that stay in the process group of their
#: Ray worker. Ray should end these processes together with the worker.
_HELD_BY_GROUPS = tuple(SHAPES)[:2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check on every node whether Ray ends the child processes of a killed actor.

    The check tries several kinds of child processes, for example a daemon (see `SHAPES`), and
    prints the results.

    Returns:
        0 if Ray ended all processes in the process groups of the killed actors, and all parent
        processes of the check saw the exit codes of their children. 2 if the cluster cannot be
        queried. Otherwise 1.
    """
    options = _parser().parse_args(arguments)
    os.environ.update(to_reach_stack(None))
    # Make Ray read its environment variables again. Ray has read the variables during its import,
    # before the previous line set some of them.
    Config.initialize("")
    try:
        nodes, gcs_address = asyncio.run(_read_cluster(options.address))
    except (NoAnswer, Denied) as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    selected_nodes = [node for node in nodes if not options.node or node.ip in options.node]
    if not selected_nodes:
        addresses = ", ".join(sorted({node.ip for node in nodes}))
        print(
            f"no node of the cluster has an address in --node ({', '.join(options.node)}). The "
            f"nodes have these addresses: {addresses or 'none'}",
            file=sys.stderr,
        )
        return EXIT_INVALID
    prepare_driver(gcs_address)
    for package in (tasks, node_shapes):
        cloudpickle.register_pickle_by_value(package)  # type: ignore[no-untyped-call]
    ray.init(gcs_address, log_to_driver=False, logging_level=logging.ERROR)
    endings: list[ShapeEnding] = []
    codes: list[int] = []
    say = functools.partial(print, file=sys.stdout, flush=True)
    # Hide the long messages that Ray prints about the workers that this check kills.
    with contextlib.redirect_stdout(io.StringIO()):
        for node in selected_nodes:
            say(f"node {node.ip} ({node.node_id[:8]})")
            for shape in SHAPES:
                endings.append(try_shape(node.node_id, shape, options.within_s))
                say(f"  {shape:24} {_describe_ending(endings[-1])}")
            codes.append(exit_code_in_worker(node.node_id))
            say(f"  {'exit 7, in a worker':24} {_describe_code(codes[-1])}")
    ray.shutdown()
    codes.append(_exit_code_in_job(options.address))
    print(f"a job's driver\n  {'exit 7':24} {_describe_code(codes[-1])}")
    for line in advice(endings, codes):
        print(f"- {line}")
    is_code_lost = any(code != _EXIT_CODE for code in codes)
    has_leak = any(
        ending.gone_after_s is None for ending in endings if ending.shape in _HELD_BY_GROUPS
    )
    return EXIT_LEAKS if is_code_lost or has_leak else EXIT_HOLDS


def advice(endings: Sequence[ShapeEnding], codes: Sequence[int]) -> list[str]:
    """Return the recommended settings of the cluster, one string for each setting.

    Args:
        endings: Results of the check for each kind of child process on each node.
        codes: Exit codes of child processes, as their parent processes in Ray saw them. Each child
            ended with code 7, so any other code means that the cluster loses exit codes.
    """
    leaks = {ending.shape for ending in endings if ending.gone_after_s is None}
    lines = []
    if leaks & {*_HELD_BY_GROUPS}:
        lines.append(
            "Child processes of killed Ray workers keep running. Set "
            "RAY_process_group_cleanup_enabled=true in the environment of every `ray start` "
            "(this is the default of Ray 2.60), and restart Ray."
        )
    if leaks - {*_HELD_BY_GROUPS}:
        lines.append(
            "Processes that leave the process group of their Ray worker keep running. You need not "
            "change a setting: Muster searches every node for such processes after each job, and "
            "ends them. Do not enable Ray's subreaper, which Ray has deprecated."
        )
    if any(code != _EXIT_CODE for code in codes):
        lines.append(
            "Programs in this Ray cluster do not see the exit codes of their child processes, so a "
            "crash looks like success. Remove the variable "
            "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper from the environment of "
            "`ray start`. Or call signal.signal(signal.SIGCHLD, signal.SIG_DFL) in your programs, "
            "as Muster does in the driver of each job."
        )
    if not lines:
        lines.append(
            "No setting needs a change: Ray ended all child processes, and exit codes are correct."
        )
    return lines


def _describe_ending(ending: ShapeEnding) -> str:
    """Return a text with the time until the child processes ended, or with the pids of the child
    processes that kept running.
    """
    if ending.gone_after_s is None:
        return (
            "did not end by itself, so this check ended the process (pid "
            f"{', '.join(map(str, ending.leaked))})"
        )
    return f"ended after {ending.gone_after_s:.2f} s"


def _describe_code(code: int) -> str:
    """Return a text about the result of the test of exit codes, such as `seen as 7`.

    In this test, a parent process starts a child process that exits with code 7.

    Args:
        code: Exit code that the parent process saw. The parent process sees another code than 7 if
            it ignores SIGCHLD.
    """
    return f"seen as {code}" + (
        "" if code == _EXIT_CODE else " instead of 7, because SIGCHLD is ignored"
    )


def _exit_code_in_job(address: str) -> int:
    """Return the exit code that the driver of a Ray job sees for a child that runs `exit 7`.

    Returns:
        7 if exit codes are kept, 0 if they are lost, or -1 if the job printed no exit code.

    Raises:
        TimeoutError: The job did not end in time.
        UntrustedListener: Another user listens at the address.
    """
    require_trusted_url(address)
    client = JobSubmissionClient(address)
    code = "import subprocess; print('saw', subprocess.run('exit 7', shell=True).returncode)"
    job = client.submit_job(entrypoint=f'python -c "{code}"')
    deadline = time.monotonic() + _JOB_WITHIN_S
    while client.get_job_status(job) not in _FINAL_STATES:
        if time.monotonic() > deadline:
            client.stop_job(job)
            raise TimeoutError(f"job {job} has not ended within {_JOB_WITHIN_S:g} s")
        time.sleep(0.2)
    code_lines = [line for line in client.get_job_logs(job).splitlines() if line.startswith("saw ")]
    return int(code_lines[-1].split()[1]) if code_lines else -1


async def _read_cluster(address: str) -> tuple[list[LiveNode], str]:
    """Return the living nodes of a cluster, and the address of its control store.

    Args:
        address: URL of the Ray dashboard.

    Raises:
        NoAnswer, Denied: The dashboard did not answer, or refused the request.
    """
    dashboard = Dashboard(address)
    try:
        return await dashboard.nodes(), await dashboard.gcs_address()
    finally:
        await dashboard.aclose()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deployments.cluster_check",
        description="Check whether a Ray cluster ends the child processes of killed Ray workers, "
        "and print the settings to change. The check starts a few `sleep` processes on each "
        "node, and ends those that Ray does not end.",
        epilog="Exit: 0 child processes end and exit codes are correct; 1 child processes "
        "keep running, or exit codes are lost; 2 the cluster does not answer, or the "
        "arguments are wrong.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--address", required=True, metavar="URL", help="URL of the Ray dashboard")
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="IP",
        help="Check only this node. May be repeated",
    )
    parser.add_argument(
        "--within-s",
        type=float,
        default=_LEAKED_AFTER_S,
        metavar="S",
        help="Seconds that a process may run after the end of its Ray actor. After this "
        "time, the process counts as a leak",
    )
    return parser


if __name__ == "__main__":
    with guard_output():
        raise SystemExit(main())
