"""The flow `preflight`: find out which nodes of a Ray cluster are fit for runs."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.upkeep.preflight import (
    DEFAULT_LIMITS,
    STEP_TIMEOUT_S,
    LimitOptions,
    Limits,
    PreflightVerdict,
    conclude_preflight,
    judge_nodes,
    publish_verdict,
    run_preflight,
    survey_cluster,
)


@flow(name="preflight", persist_result=False)
def preflight(
    address: str,
    shared: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    within_s: float = STEP_TIMEOUT_S,
) -> State[PreflightVerdict]:
    """Check every node, and fail with the node and the remedy if a node is not fit.

    Args:
        address: The URL of the Ray dashboard.
        shared: The directory that must be the same on every node; MUSTER_HOME by default.
        limits: The requirements that a node must meet.
        within_s: Deadline of each step, in seconds.
    """
    survey = survey_cluster(address, shared, within_s)
    verdict = judge_nodes(survey, limits)
    publish_verdict(verdict)
    return conclude_preflight(verdict)


def command(
    *,
    address: str,
    shared: str | None = None,
    limits: LimitOptions = DEFAULT_LIMITS,
    within_s: float = STEP_TIMEOUT_S,
) -> int:
    """Check every node of a Ray cluster.

    A node is fit if it has Muster's code, the same shared directory as this machine, enough free
    disk, a correct clock, no leftovers of ended runs, and all of its GPUs present and free.

    Exit: 0 every node is fit; 1 a node is not fit, or the cluster can't be asked; 2 the arguments
    are wrong; 130 interrupted.

    Args:
        address: The URL of the Ray dashboard.
        shared: The shared directory; MUSTER_HOME by default.
        within_s: Deadline of each step, in seconds.
    """
    return run_preflight(preflight, address, shared, limits, within_s)
