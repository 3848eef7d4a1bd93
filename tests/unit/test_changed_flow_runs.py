"""Reaction of a run's process to changes of its flow run that a person makes on the server."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound

from tasks.server import interruption
from tasks.server.flow_runs import CANCELLING_NOW
from tasks.server.interruption import Change, ForwardedRequests, observe_flow_run

FLOW_RUN = uuid4()


class ScriptedServer:
    """Fake of a Prefect server with one flow run, and of the client for this server."""

    def __init__(self) -> None:
        #: State of the flow run, or None after the flow run was deleted.
        self.state: State[Any] | None = State(type=StateType.RUNNING)
        #: Text of the server's error for a missing flow run.
        self.refusal = "Flow run not found"

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_flow_run(self, id: UUID) -> FlowRun:
        if self.state is not None:
            return FlowRun(id=id, flow_id=uuid4(), state=self.state)
        request = httpx.Request("GET", "http://server/api")
        response = httpx.Response(404, json={"detail": self.refusal}, request=request)
        error = httpx.HTTPStatusError("404", request=request, response=response)
        raise ObjectNotFound(http_exc=error)

    def set_flow_run_state(self, id: UUID, state: State[Any], *, force: bool) -> None:
        assert force, "the server's rules do not allow this change"
        self.state = state

    @property
    def state_type(self) -> StateType | None:
        return self.state.type if self.state is not None else None


class RecordingSession:
    """Fake session of a run. The session records the reason of each interrupt of the run."""

    def __init__(self) -> None:
        self.is_handing_over = False
        self.reasons: list[str] = []
        self.is_hurried = False

    def interrupt(self, why: str) -> None:
        self.reasons.append(why)

    def hurry(self) -> None:
        self.is_hurried = True

    def hand_over(self, why: str) -> None:
        raise AssertionError("the run must not be handed over")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ScriptedServer:
    server = ScriptedServer()
    monkeypatch.setattr(interruption, "get_client", lambda **_options: server)
    monkeypatch.setattr(interruption, "find_worker_flow_run", lambda: None)
    return server


def observe(session: RecordingSession, times: int = 1) -> None:
    """Check the state of the flow run on the server, as the run's own process does regularly.

    Args:
        session: Session of the run.
        times: Number of checks.
    """
    requests = ForwardedRequests(session, FLOW_RUN, may_be_left=False)
    for _ in range(times):
        requests.take_observation(observe_flow_run(FLOW_RUN))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, Change.NONE),
        (State(type=StateType.RUNNING), Change.NONE),
        (State(type=StateType.RUNNING, name="PendingResources"), Change.NONE),
        (State(type=StateType.CANCELLING), Change.CANCELLED),
        (State(type=StateType.CANCELLED), Change.CANCELLED),
        (State(type=StateType.CANCELLING, name=CANCELLING_NOW), Change.CANCELLED_NOW),
        (State(type=StateType.COMPLETED), Change.ENDED),
        (State(type=StateType.FAILED), Change.ENDED),
        (State(type=StateType.FAILED, name="TimedOut"), Change.ENDED),
        (State(type=StateType.CRASHED), Change.ENDED),
        (State(type=StateType.SCHEDULED), Change.SET_BACK),
        (State(type=StateType.SCHEDULED, name="AwaitingRetry"), Change.SET_BACK),
        (State(type=StateType.PENDING), Change.SET_BACK),
        (State(type=StateType.PAUSED), Change.SET_BACK),
    ],
)
def test_state_of_a_flow_run_gives_the_change(state: State[Any] | None, expected: Change) -> None:
    assert Change.of_state(state) is expected


@pytest.mark.parametrize(
    "state_type",
    [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED],
)
def test_run_with_a_final_state_set_by_a_person_becomes_cancelling_and_ends(
    server: ScriptedServer, state_type: StateType
) -> None:
    session = RecordingSession()
    server.state = State(type=state_type)

    observe(session)

    assert len(session.reasons) == 1
    assert server.state_type is StateType.CANCELLING


def test_reason_names_the_state_that_a_person_has_set(server: ScriptedServer) -> None:
    session = RecordingSession()
    server.state = State(type=StateType.COMPLETED)

    observe(session)

    assert "set the flow run to Completed" in session.reasons[0]
    assert server.state is not None and "set the flow run to Completed" in (
        server.state.message or ""
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "stopped early: reward 1 is too low",
            "cancelled from Prefect: stopped early: reward 1 is too low",
        ),
        ("cancelled by ada with `muster cancel`", "cancelled by ada with `muster cancel`"),
        ("", "cancelled from Prefect"),
        (None, "cancelled from Prefect"),
    ],
)
def test_reason_of_a_cancelled_run_has_the_message_of_the_cancellation(
    server: ScriptedServer, message: str | None, reason: str
) -> None:
    session = RecordingSession()
    server.state = State(type=StateType.CANCELLING, message=message)

    observe(session)

    assert session.reasons == [reason]


@pytest.mark.parametrize("state_type", [StateType.SCHEDULED, StateType.PENDING, StateType.PAUSED])
def test_run_that_was_set_back_continues_and_is_running_again(
    server: ScriptedServer, state_type: StateType
) -> None:
    session = RecordingSession()
    server.state = State(type=state_type)

    observe(session)

    assert session.reasons == []
    assert server.state_type is StateType.RUNNING


@pytest.mark.parametrize("state_type", [StateType.SCHEDULED, StateType.CANCELLED])
def test_run_that_is_handed_over_keeps_its_state(
    server: ScriptedServer, state_type: StateType
) -> None:
    session = RecordingSession()
    session.is_handing_over = True
    server.state = State(type=state_type)

    observe(session)

    assert server.state_type is state_type


def test_run_with_a_deleted_flow_run_ends(server: ScriptedServer) -> None:
    session = RecordingSession()
    server.state = None

    observe(session, times=4)

    assert session.reasons and "deleted" in session.reasons[0]


@pytest.mark.parametrize(
    ("refusal", "times"),
    [
        # A Prefect server whose database is being restored may give this answer a few times, so the
        # run continues.
        ("Flow run not found", 3),
        # A proxy or another program gave this answer, not the Prefect server. The answer does not
        # show that the flow run was deleted, so the run continues.
        ("Not Found", 20),
    ],
)
def test_run_continues_if_its_flow_run_may_exist(
    server: ScriptedServer, refusal: str, times: int
) -> None:
    session = RecordingSession()
    server.state = None
    server.refusal = refusal

    observe(session, times)

    assert session.reasons == []


def test_newer_state_is_not_replaced(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = RecordingSession()
    server.state = State(type=StateType.SCHEDULED)
    observed = observe_flow_run(FLOW_RUN)
    server.state = State(type=StateType.CANCELLING)

    ForwardedRequests(session, FLOW_RUN, may_be_left=False).take_observation(observed)

    assert server.state_type is StateType.CANCELLING
