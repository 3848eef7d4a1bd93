"""Ending what a run has left on the nodes of a Ray cluster.

As a command, for what a preflight has found:
`python -m tasks.ray.sweeping --address URL --run-id ID`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.ray.dashboard import Dashboard, Denied, NoAnswer
from tasks.ray.nodes import NotVisited, visiting
from tasks.show.help import HelpFormatter

SWEEP_WITHIN_S = 60.0
EXIT_CLEAN, EXIT_LEFT = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """One process that carried the run's id."""

    #: The node that found it first, of those that share its machine.
    node: str
    pid: int
    #: Its command line, shortened.
    command: str

    def __str__(self) -> str:
        return f"node {self.node}: pid {self.pid} ({self.command})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep of a cluster came to."""

    killed: tuple[Swept, ...] = ()
    #: They outlived SIGKILL.
    left: tuple[Swept, ...] = ()
    #: `why[node]`; the control store's address in the place of a node where none could be asked.
    unreached: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Every node was asked, and nothing is left on any."""
        return not self.left and not self.unreached


async def sweep(
    gcs_address: str,
    *,
    run_id: str,
    attempt: int | None = None,
    component: str | None = None,
    within_s: float = SWEEP_WITHIN_S,
) -> SweepReport:
    """End, on every living node, what was started with MUSTER_RUN_ID of this run and lives.

    Ray's own workers of the run's jobs carry it too: sweep only what has ended. Where this machine
    is a node, so do the run's local components: name the component. A process that has scrubbed
    its environment before its program began is not found. Idempotent. This process does not become
    a Ray driver, and nothing of the sweep outlives a cancel.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store.
        attempt: Only what also has this MUSTER_ATTEMPT.
        component: Only what also has this MUSTER_COMPONENT.
        within_s: For all of it. What has not answered by then is `unreached`.

    Raises: nothing of its own.
    """
    wanted = {"MUSTER_RUN_ID": run_id}
    if attempt is not None:
        wanted["MUSTER_ATTEMPT"] = str(attempt)
    if component is not None:
        wanted["MUSTER_COMPONENT"] = component
    deadline = time.monotonic() + within_s
    try:
        async with visiting(gcs_address, within_s=within_s) as visitor:
            each = {node.node_id: {"wanted": wanted} for node in visitor.alive}
            left_s = max(1.0, deadline - time.monotonic())
            visited = await visitor.visit("sweep", each, left_s)
            names = {node.node_id: node.name for node in visitor.nodes}
    except NotVisited as error:
        return SweepReport(unreached={gcs_address: str(error)})
    answers = {names[node]: answer for node, answer in sorted(visited.answers.items())}
    return SweepReport(
        killed=_once(answers, "killed"),
        left=_once(answers, "left"),
        unreached={names[node]: why for node, why in visited.unreached.items()},
    )


def _once(answers: Mapping[str, Any], key: str) -> tuple[Swept, ...]:
    """Each process once, though several nodes may share its machine."""
    found: dict[tuple[str, int, int], Swept] = {}
    for node, answer in answers.items():
        for one in answer[key]:
            swept = Swept(node=node, pid=one["pid"], command=one["command"])
            found.setdefault((answer["machine"], one["pid"], one["start"]), swept)
    return tuple(found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep after one run, and say what was found.

    Returns: 0, or 1 where something is left or could not be asked.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tasks.ray.sweeping",
        description="End what a run that has ended has left on the nodes of a Ray cluster: every "
        "process that was started with its MUSTER_RUN_ID, by SIGKILL. The run must have ended.",
        epilog="Exit: 0 nothing is left; 1 something is, or a node could not be asked; 2 the "
        "arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--address", required=True, metavar="URL", help="of the Ray dashboard")
    parser.add_argument("--run-id", required=True, metavar="ID", help="of the run")
    parser.add_argument(
        "--within-s", type=float, default=SWEEP_WITHIN_S, metavar="S", help="for all of it"
    )
    options = parser.parse_args(arguments)
    try:
        report = asyncio.run(_sweep_at(options.address, options.run_id, options.within_s))
    except (NoAnswer, Denied) as error:
        print(error, file=sys.stderr)
        return EXIT_LEFT
    for swept in report.killed:
        print(f"ended: {swept}")
    for swept in report.left:
        print(f"outlived SIGKILL: {swept}")
    for node, why in report.unreached.items():
        print(f"not reached: {node}: {why}")
    if report.is_clean and not report.killed:
        print("nothing was there")
    return EXIT_CLEAN if report.is_clean else EXIT_LEFT


async def _sweep_at(address: str, run_id: str, within_s: float) -> SweepReport:
    gcs_address = await gcs_address_of(address)
    return await sweep(gcs_address, run_id=run_id, within_s=within_s)


async def gcs_address_of(address: str) -> str:
    """`HOST:PORT` of a cluster's control store, by its dashboard. Raises: NoAnswer, Denied."""
    dashboard = Dashboard(address)
    try:
        return await dashboard.gcs_address()
    finally:
        await dashboard.close()


if __name__ == "__main__":
    raise SystemExit(main())


def sweep_of(
    run_id: str, attempt: int, component: str, *, emit: Callable[..., None]
) -> Callable[[str], Awaitable[tuple[str, ...]]]:
    """The sweep after a job: told the address of a cluster's control store, it ends what is left
    of the job on every node, and returns what can't be ended, by node and pid.

    Args:
        emit: told what was found.
    """
    context = contextvars.copy_context()

    async def swept(gcs_address: str) -> tuple[str, ...]:
        sweeping = sweep(gcs_address, run_id=run_id, attempt=attempt, component=component)
        return _told(await asyncio.create_task(sweeping, context=context), emit)

    return swept


def _told(report: SweepReport, emit: Callable[..., None]) -> tuple[str, ...]:
    """What is left, once all that was found is told.

    A node that could not be asked is told and does not count as left: it may be any of the
    cluster's, and one that was lost with the job is out of reach for good.
    """
    if report.killed or not report.is_clean:
        emit(
            "job.swept",
            killed=[str(swept) for swept in report.killed],
            left=[str(swept) for swept in report.left],
            unreached=dict(report.unreached),
        )
    return tuple(f"{swept}, which outlived SIGKILL" for swept in report.left)
