"""What runs a component, by its plan: a process of this machine, or a job of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import httpx

from tasks.processes.component import Emit, Member
from tasks.processes.holds import Holds
from tasks.processes.job_component import JobMember
from tasks.processes.plan import ComponentPlan
from tasks.processes.ports import PortsReserved
from tasks.processes.process_component import ProcessMember


def make_member(
    plan: ComponentPlan,
    *,
    holds: Holds,
    ports: PortsReserved,
    client: httpx.AsyncClient,
    emit: Emit,
    own_pids: Callable[[], set[int]],
    mask: Callable[[str], str],
) -> Member:
    """A component that is ready to start.

    Args:
        own_pids: every process of the attempt on this machine.
        mask: takes secrets out of a text.

    Raises: OSError, when its guardian can't be started.
    """
    if plan.make_job is not None:
        job = plan.make_job(partial(emit, component=plan.name))
        return JobMember(plan, job, holds=holds, ports=ports, client=client, emit=emit)
    return ProcessMember(
        plan,
        holds.prepare(plan),
        holds=holds,
        ports=ports,
        client=client,
        emit=emit,
        own_pids=own_pids,
        mask=mask,
    )
