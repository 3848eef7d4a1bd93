"""Keep the concurrency limit of a deployment without ending a run that has lost its lease.

The Prefect server counts the active runs of a deployment with a concurrency limit in its database.
In addition, each active run has a lease, which the server keeps in memory by default. The server
gives the slot of an expired lease to another run.

Prefect's engine ends a run whose lease cannot be renewed. After a restart of the server, this would
end every run with a lease, although the server still counts these runs. A training must not end
for this reason, so `keep_runs_without_lease` replaces this part of the engine.

If the limit of the deployment is removed while a run has a lease, the server cannot release the
lease, and refuses each state in which the run has no process. `set_state_and_release_lease` sets
such a state.

A run gets its lease with the state Pending. If the lease is lost before the state Running, and no
slot is free, the server would cancel the run. `has_lost_lease` finds such a run, so that it can
wait in the queue again.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import UUID

import httpx
from prefect import flow_engine
from prefect.client.orchestration import PrefectClient, SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import OrchestrationResult
from prefect.exceptions import PrefectException

_log = logging.getLogger(__name__)

#: Time, in seconds, after which a concurrency lease expires if it is not renewed. This is the
#: longest time that the server accepts, so that the lease survives an outage of the network. At the
#: end of a run, the server releases the lease at once, so that the next run can start.
#: Source: prefect/server/api/concurrency_limits_v2.py, renew_concurrency_lease.
_LEASE_S = 24 * 60 * 60.0
#: Time, in seconds, between two renewals of a concurrency lease.
_RENEW_EVERY_S = 300.0
#: Time, in seconds, from a failed renewal of a concurrency lease to the next renewal.
_RETRY_EVERY_S = 10.0


def keep_runs_without_lease() -> None:
    """Make Prefect's engine in this process continue a run whose concurrency lease was lost."""
    vars(flow_engine)["maintain_concurrency_lease"] = keep_lease


def keep_lease(
    lease_id: UUID,
    lease_duration: float,
    raise_on_lease_renewal_failure: bool = False,
    suppress_warnings: bool = False,
) -> AbstractContextManager[None]:
    """Return a context manager whose thread renews a concurrency lease of the Prefect server.

    After a loss of the lease, the code in the context continues. Prefect's own function would end
    the code.

    The arguments are those of `prefect.concurrency._leases.maintain_concurrency_lease`. Only
    `lease_id` is used.
    """
    return renew_in_thread(partial(renew_lease, lease_id=lease_id))


@contextmanager
def renew_in_thread(renew: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call a function in a thread while the context is open.

    Args:
        renew: Function that renews a lease until an event is set. The argument of the function is
            this event. The event is set at the end of the context.
    """
    is_over = threading.Event()
    # The thread needs the context variables, because they contain Prefect's settings.
    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(renew, is_over), name="concurrency-lease", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()


def renew_lease(
    is_over: threading.Event,
    *,
    lease_id: UUID,
    connect: Callable[[], SyncPrefectClient] = lambda: get_client(sync_client=True),
    every_s: float = _RENEW_EVERY_S,
    retry_every_s: float = _RETRY_EVERY_S,
) -> None:
    """Renew a concurrency lease until the run is over or the server no longer knows the lease.

    Args:
        is_over: Event that is set when the run is over.
        lease_id: Id of the lease.
        connect: Function that returns a client of the Prefect server.
        every_s: Seconds between two renewals.
        retry_every_s: Seconds from a failed renewal to the next renewal.
    """
    while not is_over.is_set():
        pause_s = every_s
        try:
            with connect() as client:
                client.renew_concurrency_lease(lease_id=lease_id, lease_duration=_LEASE_S)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == HTTPStatus.GONE:
                _log.info(
                    "The Prefect server no longer counts this run for the concurrency limit of "
                    "its deployment (the server has lost the lease %s). The run continues, so "
                    "more runs than the limit may run at the same time.",
                    lease_id,
                )
                return
            pause_s = retry_every_s
        except (httpx.HTTPError, PrefectException):
            pause_s = retry_every_s
        is_over.wait(pause_s)


def has_lost_lease(
    flow_run_id: UUID,
    connect: Callable[[], SyncPrefectClient] = lambda: get_client(sync_client=True),
) -> bool:
    """Return True if a Pending flow run has a concurrency lease that the server no longer knows.

    If the server knows the lease, the function renews the lease. If the deployment has no
    concurrency limit any more, the result is False, because the flow run needs no lease.

    Args:
        flow_run_id: Id of the flow run.
        connect: Function that returns a client of the Prefect server.

    Raises:
        httpx.HTTPError, PrefectException: The server did not answer.
    """
    with connect() as client:
        flow_run = client.read_flow_run(flow_run_id)
        state = flow_run.state
        lease_id = _get_lease_id(state)
        if state is None or not state.is_pending() or lease_id is None:
            return False
        try:
            client.renew_concurrency_lease(lease_id=lease_id, lease_duration=_LEASE_S)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.GONE:
                raise
            if flow_run.deployment_id is None:
                return False
            deployment = client.read_deployment(flow_run.deployment_id)
            return deployment.global_concurrency_limit is not None
    return False


def exit_if_lease_was_lost(flow_run_id: str) -> None:
    """Exit with code 0 if the server has lost the concurrency lease of a flow run.

    Call this before the process of the flow run sets the state Running. After the exit, the worker
    returns the flow run to the queue. If the server does not answer or the id is no UUID, the
    function returns normally.
    """
    try:
        run_uuid = UUID(flow_run_id)
    except ValueError:
        return
    with suppress(httpx.HTTPError, PrefectException):
        if has_lost_lease(run_uuid):
            raise SystemExit(0)


def set_state_and_release_lease(
    client: SyncPrefectClient, flow_run_id: UUID, state: State[Any], *, force: bool = False
) -> OrchestrationResult[Any]:
    """Set a state in which a flow run has no process, and release its concurrency lease if needed.

    Normally, the server itself releases the lease. But if a user has removed the concurrency limit
    of the deployment, the server answers the request with status 500. The function then
    releases the lease by its id, and sets the state again.

    Args:
        client: client of the Prefect server.
        flow_run_id: id of the flow run.
        state: new state.
        force: True if the server must accept the state even if its rules forbid the change.

    Raises:
        httpx.HTTPError: The server did not answer, or refused the state for another reason.

    Source: prefect/server/orchestration/core_policy.py, _release_concurrency_lease.
    """
    try:
        return client.set_flow_run_state(flow_run_id, state, force=force)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        lease_id = _get_lease_id(client.read_flow_run(flow_run_id).state)
        if lease_id is None:
            raise
        client.release_concurrency_slots_with_lease(lease_id)
        return client.set_flow_run_state(flow_run_id, state, force=force)


async def set_state_and_release_lease_async(
    client: PrefectClient, flow_run_id: UUID, state: State[Any], *, force: bool = False
) -> OrchestrationResult[Any]:
    """Do the same as `set_state_and_release_lease`, with an asynchronous client."""
    try:
        return await client.set_flow_run_state(flow_run_id, state, force=force)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        lease_id = _get_lease_id((await client.read_flow_run(flow_run_id)).state)
        if lease_id is None:
            raise
        await client.release_concurrency_slots_with_lease(lease_id)
        return await client.set_flow_run_state(flow_run_id, state, force=force)


def _get_lease_id(state: State[Any] | None) -> UUID | None:
    """Return the id of the concurrency lease in a state, or None if the state has no lease."""
    details = state.state_details if state is not None else None
    return details.deployment_concurrency_lease_id if details is not None else None
