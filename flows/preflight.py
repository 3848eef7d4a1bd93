"""The flow `preflight`: which nodes of a Ray cluster a run may be sent to."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.upkeep.preflight import (
    DEFAULT_LIMITS,
    LOOK_WITHIN_S,
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
    within_s: float = LOOK_WITHIN_S,
) -> State[PreflightVerdict]:
    """Look at every node, and fail where one is not fit, with its name and the remedy.

    Args:
        address: The URL of the Ray dashboard.
        shared: The directory that has to be the same on every node; MUSTER_HOME by default.
        limits: What a node has to keep to.
        within_s: For each step of the look, in seconds.
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
    within_s: float = LOOK_WITHIN_S,
) -> int:
    """Look at every node of a Ray cluster.

    Is Muster's code there, is the shared directory the same everywhere, is there disk, is the clock
    right, is something left of runs that have ended, are the GPUs there and free.

    Exit: 0 every node is fit; 1 one is not, or the cluster can't be asked; 2 the arguments are
    wrong; 130 interrupted.

    Args:
        address: The URL of the Ray dashboard.
        shared: The shared directory; else MUSTER_HOME.
        within_s: For each step, in seconds.
    """
    return run_preflight(preflight, address, shared, limits, within_s)
