"""Components that Ray runs: from a spec to a job, with its sweep of the nodes."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import Any

from tasks.processes.component import RemoteJob
from tasks.processes.guarded import Command
from tasks.ray.job import RayJob
from tasks.ray.nodes import sweep_of
from tasks.ray.submission import JobPlan, submission_file, submission_id
from tasks.record.places import AttemptPlace
from tasks.spec.run import RunSpec


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
