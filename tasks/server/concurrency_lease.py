"""Keep the concurrency limit of a deployment without ending a run that has lost its lease.

The Prefect server counts the active runs of a deployment with a concurrency limit in its database.
In addition, each active run has a lease, which the server keeps in memory by default. The server
gives the slot of an expired lease to another run.

Prefect's engine ends a run whose lease cannot be renewed. After a restart of the server, this would
end every run with a lease, although the server still counts these runs. A training must not end
for this reason, so `keep_runs_without_lease` replaces this part of the engine.

If the limit of the deployment is removed while a run has a lease, the server cannot release the
lease, and refuses each state in which the run is over. `set_state_and_release_lease` sets such a
state.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import UUID

import httpx
from prefect import flow_engine
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import OrchestrationResult
from prefect.exceptions import PrefectException

_log = logging.getLogger(__name__)

#: Time, in seconds, after which a concurrency lease expires if it is not renewed. This is the
#: longest time that the server accepts, because an outage of the network must not end the lease.
#: When a run ends, the server releases its concurrency slot at once, even if `muster reconcile`
#: sets the final state.
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

    If the lease is lost, the code in the context continues.

    The arguments are those of `prefect.concurrency._leases.maintain_concurrency_lease`. Only
    `lease_id` is used.
    """
    return renew_in_thread(partial(renew_lease, lease_id=lease_id))


@contextmanager
def renew_in_thread(renew: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call a function in a thread while the context is open.

    Args:
        renew: Function that renews a lease until its argument, an event, is set. The event is set
            at the end of the context.
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
                    "The server has lost the lease %s of this run. The run continues.", lease_id
                )
                return
            pause_s = retry_every_s
        except (httpx.HTTPError, PrefectException):
            pause_s = retry_every_s
        is_over.wait(pause_s)


def set_state_and_release_lease(
    client: SyncPrefectClient, flow_run_id: UUID, state: State[Any]
) -> OrchestrationResult[Any]:
    """Set a state in which a flow run has no process, even if its lease cannot be released.

    If a person removes the concurrency limit of a deployment, the server keeps the leases of its
    runs. For each state that ends or requeues such a run, the server then answers with status 500.
    After such an answer, this function releases the lease by its id and sets the state again.

    Args:
        client: client of the Prefect server.
        flow_run_id: id of the flow run.
        state: new state.

    Raises:
        httpx.HTTPError: The server did not answer, or refused the state for another reason.

    Source: prefect/server/orchestration/core_policy.py, _release_concurrency_lease.
    """
    try:
        return client.set_flow_run_state(flow_run_id, state)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        present_state = client.read_flow_run(flow_run_id).state
        details = present_state.state_details if present_state is not None else None
        lease_id = details.deployment_concurrency_lease_id if details is not None else None
        if lease_id is None:
            raise
        client.release_concurrency_slots_with_lease(lease_id)
        return client.set_flow_run_state(flow_run_id, state)
