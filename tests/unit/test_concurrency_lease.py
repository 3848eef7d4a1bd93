"""Tests of the lease that a run holds while its deployment has a concurrency limit."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Self, cast
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow_engine
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.concurrency import _leases
from prefect.states import Completed, Pending, Running

from tasks.server import concurrency_lease
from tasks.server.concurrency_lease import (
    exit_if_lease_was_lost,
    has_lost_lease,
    keep_lease,
    keep_runs_without_lease,
    renew_in_thread,
    renew_lease,
    set_state_and_release_lease,
)

LEASE = uuid4()


def answer(status: HTTPStatus) -> httpx.HTTPStatusError:
    """Return the error that Prefect's client raises for an answer with this status."""
    response = httpx.Response(status, request=httpx.Request("POST", "http://a/renew"))
    return httpx.HTTPStatusError("refused", request=response.request, response=response)


@dataclass
class Server:
    """A fake Prefect server that answers the renewals of a lease with the elements of `answers`.

    The run of the test ends after the last answer.
    """

    #: Result of each renewal of the lease: an error, or None if the renewal succeeds.
    answers: Sequence[Exception | None]
    #: Set when the last element of `answers` was used.
    is_over: threading.Event = field(default_factory=threading.Event)
    #: Requested duration of the lease in each renewal, in seconds.
    renewals: list[float] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self) -> SyncPrefectClient:
        return cast(SyncPrefectClient, self)

    def renew_concurrency_lease(self, lease_id: UUID, lease_duration: float) -> None:
        assert lease_id == LEASE
        self.renewals.append(lease_duration)
        if len(self.renewals) == len(self.answers):
            self.is_over.set()
        error = self.answers[len(self.renewals) - 1]
        if error is not None:
            raise error


@dataclass
class ServerWithFlowRun(Server):
    """A fake Prefect server with one flow run, which may hold a lease."""

    state: State[Any] = field(default_factory=Pending)
    lease_id: UUID | None = LEASE
    #: Concurrency limit of the deployment of the flow run, or None for no limit.
    limit: int | None = 1

    def read_flow_run(self, flow_run_id: UUID) -> SimpleNamespace:
        self.state.state_details.deployment_concurrency_lease_id = self.lease_id
        return SimpleNamespace(state=self.state, deployment_id=uuid4())

    def read_deployment(self, deployment_id: UUID) -> SimpleNamespace:
        return SimpleNamespace(global_concurrency_limit=self.limit)


def renew(server: Server) -> None:
    """Renew the lease without pauses, until the run has ended or the lease is lost."""
    renew_lease(
        server.is_over, lease_id=LEASE, connect=server.connect, every_s=0.0, retry_every_s=0.0
    )


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("connection refused"),
        httpx.ReadTimeout("no answer"),
        answer(HTTPStatus.INTERNAL_SERVER_ERROR),
        answer(HTTPStatus.SERVICE_UNAVAILABLE),
    ],
)
def test_failed_renewals_are_repeated_until_the_run_is_over(failure: Exception) -> None:
    server = Server([None, failure, failure, failure, failure, None])

    renew(server)

    assert len(server.renewals) == 6


def test_lost_lease_is_not_renewed_again() -> None:
    server = Server([None, answer(HTTPStatus.GONE), None])

    renew(server)

    assert len(server.renewals) == 2


def test_lease_survives_an_outage_of_hours() -> None:
    server = Server([None])

    renew(server)

    # The lease was renewed for one day, the longest duration that Prefect accepts.
    assert server.renewals == [24 * 60 * 60.0]


def test_run_goes_on_after_its_lease_is_lost() -> None:
    server = Server([answer(HTTPStatus.GONE), None])
    has_ended = threading.Event()

    def renew_once(is_over: threading.Event) -> None:
        renew_lease(is_over, lease_id=LEASE, connect=server.connect)
        has_ended.set()

    steps = 0
    with renew_in_thread(renew_once):
        assert has_ended.wait(30.0)
        for _ in range(1000):
            steps += 1

    assert steps == 1000


def test_engine_of_prefect_uses_the_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that Prefect's engine still calls the function that Muster replaces.

    Otherwise, Prefect would end a run after the loss of the run's concurrency lease.
    """
    engine_globals = vars(flow_engine)
    name = "maintain_concurrency_lease"
    monkeypatch.setitem(engine_globals, name, engine_globals[name])
    engine = inspect.getsource(flow_engine.FlowRunEngine.setup_run_context)

    keep_runs_without_lease()

    assert f"{name}(" in engine
    assert engine_globals[name] is keep_lease
    expected = inspect.signature(_leases.maintain_concurrency_lease).parameters
    assert [*inspect.signature(concurrency_lease.keep_lease).parameters] == [*expected]


@pytest.mark.parametrize(
    ("server", "is_lost"),
    [
        (ServerWithFlowRun([None]), False),
        (ServerWithFlowRun([answer(HTTPStatus.GONE)]), True),
        (ServerWithFlowRun([answer(HTTPStatus.GONE)], state=Running()), False),
        (ServerWithFlowRun([answer(HTTPStatus.GONE)], lease_id=None), False),
        (ServerWithFlowRun([answer(HTTPStatus.GONE)], limit=None), False),
    ],
    ids=["renewed", "lost", "running", "never limited", "no longer limited"],
)
def test_lease_is_lost_if_the_server_cannot_renew_it_for_a_pending_run(
    server: ServerWithFlowRun, is_lost: bool
) -> None:
    assert has_lost_lease(uuid4(), server.connect) is is_lost


def test_process_of_a_run_continues_if_the_server_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency_lease, "has_lost_lease", raise_no_answer)

    exit_if_lease_was_lost(str(uuid4()))


def raise_no_answer(_flow_run_id: UUID) -> bool:
    raise httpx.ConnectError("connection refused")


@dataclass
class ServerWithLease:
    """A fake Prefect server that rejects new states of a flow run until the lease is released."""

    #: Id of the lease in the state of the flow run. None if the run has no lease.
    lease_id: UUID | None
    #: HTTP status with which the server rejects new states until the lease is released.
    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    is_released: bool = False
    states: list[str] = field(default_factory=list)

    def set_flow_run_state(
        self, flow_run_id: UUID, state: State[Any], *, force: bool = False
    ) -> str:
        if not self.is_released:
            raise answer(self.status)
        self.states.append(state.type.value)
        return "accepted"

    def read_flow_run(self, flow_run_id: UUID) -> SimpleNamespace:
        state: State[Any] = Running()
        state.state_details.deployment_concurrency_lease_id = self.lease_id
        return SimpleNamespace(state=state)

    def release_concurrency_slots_with_lease(self, lease_id: UUID) -> None:
        assert lease_id == self.lease_id
        self.is_released = True


def set_completed(server: ServerWithLease) -> object:
    state: State[Any] = Completed()
    return set_state_and_release_lease(cast(SyncPrefectClient, server), uuid4(), state)


def test_run_whose_limit_was_removed_ends_after_its_lease_is_released() -> None:
    server = ServerWithLease(lease_id=LEASE)

    result = set_completed(server)

    assert result == "accepted"
    assert server.states == ["COMPLETED"]


@pytest.mark.parametrize(
    ("lease_id", "status"),
    [(None, HTTPStatus.INTERNAL_SERVER_ERROR), (LEASE, HTTPStatus.NOT_FOUND)],
    ids=["no lease", "another error"],
)
def test_state_that_is_refused_for_another_reason_releases_no_lease(
    lease_id: UUID | None, status: HTTPStatus
) -> None:
    server = ServerWithLease(lease_id=lease_id, status=status)

    with pytest.raises(httpx.HTTPStatusError):
        set_completed(server)

    assert not server.is_released
