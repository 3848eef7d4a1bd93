"""The flow `preflight`, which checks which nodes of a Ray cluster are fit for runs."""

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
    """Check every node of a Ray cluster. If a node is unfit for runs, fail and report the remedies.

    Args:
        address: URL of the Ray dashboard.
        shared: Path of the directory that must be the same on every node. Default: MUSTER_HOME.
        limits: Requirements that a node must meet.
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
    """Check which nodes of a Ray cluster are fit for runs.

    A node is fit if it has Muster's code, the same shared directory as this machine, enough free
    disk, a correct clock, no leftover processes of ended runs, and all of its GPUs present and
    free.

    Exit: 0 every node is fit; 1 a node is unfit, or the cluster does not answer; 2 the arguments
    are wrong; 130 interrupted.

    Args:
        address: URL of the Ray dashboard, for example http://10.0.0.1:8265.
        shared: Path of the directory that must be the same on every node. Default: MUSTER_HOME.
        within_s: Deadline of each step, in seconds.
    """
    return run_preflight(preflight, address, shared, limits, within_s)
