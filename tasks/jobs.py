"""Components that Ray runs: from a spec to a job, with its sweep of the nodes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.nodes.sweeping import SweepReport, sweep
from tasks.rayjobs.job import RayJob
from tasks.rayjobs.plan import JobPlan
from tasks.run.layout import AttemptPlace
from tasks.run.spec.run import RunSpec
from tasks.supervise.process import Command
from tasks.supervise.remote import RemoteJob


def job_maker(
    spec: RunSpec,
    name: str,
    command: Command,
    run_id: str,
    place: AttemptPlace,
    adopted: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., None]], RemoteJob]:
    """Makes the job of a component, told where to say what happens to it.

    Args:
        spec: with its placeholders filled in; it names a cluster.
        command: what the job runs; its directory is sent along.
        adopted: the attempt in the run's record, where it was begun by another process.
    """
    assert spec.ray is not None
    jobs = [other for other, c in spec.processes.items() if c.launcher == "ray_job"]
    is_only = len(jobs) == 1
    takes_all = is_only and spec.fleet is None
    gang = spec.gang
    plan = JobPlan(
        address=spec.ray.address,
        submission_id=submission_id(run_id, place.number, name, is_only=is_only),
        run_id=run_id,
        attempt=place.number,
        component=name,
        argv=command.argv,
        env=command.env,
        working_dir=command.cwd,
        log=command.log,
        stop_signal=command.stop_signal,
        grace_s=command.grace_s,
        entrypoint_resources=spec.ray.entrypoint_resources or {},
        entrypoint_label_selector=spec.ray.entrypoint_label_selector or {},
        # Of several jobs, or beside a fleet, nobody knows which takes how many.
        gpus=gang.nodes * gang.gpus_per_node if gang and takes_all else 0,
        start_within_s=spec.ray.start_within_s,
        submission_file=submission_file(place, name, is_only=is_only),
        may_be_submitted_since=adopted["started_at"] if adopted is not None else None,
    )
    # By it the sweep's task runs belong to the flow run; supervision has a thread of its own.
    context = contextvars.copy_context()

    def make(emit: Callable[..., None]) -> RemoteJob:
        sweeping = context.run(sweep_of, run_id, place.number, name, emit=emit)
        return RayJob(plan, sweep=sweeping, emit=emit)

    return make


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


def submission_id(run_id: str, attempt: int, component: str, *, is_only: bool) -> str:
    """`<run id>--aNN`, the same each time; that of one among several jobs ends with its name."""
    return f"{run_id}--a{attempt:02d}" + ("" if is_only else f"-{component}")


def submission_file(place: AttemptPlace, component: str, *, is_only: bool) -> Path:
    """Where the attempt keeps what is known of the job."""
    return place.submission if is_only else place.directory / f"submission-{component}.json"
