"""Flow runs of a schedule that have become one: what was due while nobody could take it.

A flow that looks at how things are does in one run what all that were due before it would have
done. Without this, days in which a work pool is full would end with hundreds of them in front of
what people wait for.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled

from tasks.server.flow_runs import ServerAway, talking_to

_log = logging.getLogger(__name__)


def dismiss_overdue() -> int:
    """Cancel the other runs of this flow run's deployment that its schedule has made, that are due
    by now, and that nobody has taken.

    Best effort: a server that is away is asked by the next run.

    Returns: how many.
    """
    context, api_url = FlowRunContext.get(), PREFECT_API_URL.value()
    flow_run = context.flow_run if context is not None else None
    if flow_run is None or flow_run.deployment_id is None or not api_url:
        return 0
    count = 0
    try:
        with talking_to(api_url) as client:
            waiting = client.read_flow_runs(
                deployment_filter=DeploymentFilter(
                    id=DeploymentFilterId(any_=[flow_run.deployment_id])
                ),
                flow_run_filter=FlowRunFilter(
                    state=FlowRunFilterState(
                        type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])
                    ),
                    expected_start_time=FlowRunFilterExpectedStartTime(before_=datetime.now(UTC)),
                ),
            )
            state: State[None] = Cancelled(message=f"not needed any more: {flow_run.name} did it")
            for one in waiting:
                # What somebody has asked for by hand is done.
                if one.id != flow_run.id and one.auto_scheduled:
                    client.set_flow_run_state(one.id, state)
                    count += 1
    except ServerAway as error:
        _log.warning("flow runs that are overdue stay: %s", error)
    return count
