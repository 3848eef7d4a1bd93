"""Tests of flow runs whose parameters do not fit their flow."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Self, cast
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow_engine
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State

from flows.pipeline import pipeline
from flows.train import train
from tasks.server.flow_parameters import describe_wrong_names, fail_on_wrong_names


@dataclass
class Server:
    """Fake client of a Prefect server that has one flow run."""

    #: Parameters of the flow run.
    parameters: dict[str, Any]
    #: True if the server refuses connections.
    is_away: bool = False
    #: States that the flow run was set to, in order.
    states: list[State[Any]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self) -> SyncPrefectClient:
        if self.is_away:
            raise httpx.ConnectError("connection refused")
        return cast(SyncPrefectClient, self)

    def read_flow_run(self, id: UUID) -> FlowRun:
        return FlowRun(id=id, name="a-run", flow_id=uuid4(), parameters=self.parameters)

    def set_flow_run_state(self, id: UUID, state: State[Any], **_: Any) -> None:
        self.states.append(state)


def run_engine(server: Server, flow: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let Prefect's engine check the parameters of a flow run. Return the engine's exit code."""
    monkeypatch.setattr(flow_engine, "load_flow", lambda flow_run: flow)
    flow_run_id = uuid4()
    context = fail_on_wrong_names(str(flow_run_id), connect=server.connect)
    with pytest.raises(SystemExit) as process_exit, context:
        try:
            flow_run = server.read_flow_run(flow_run_id)
            flow_engine._flow_parameters(flow=flow, flow_run=flow_run, parameters=None)
        except Exception:
            sys.exit(1)
    return cast(int, process_exit.value.code)


@pytest.mark.parametrize(
    ("flow", "parameters", "message"),
    [
        (
            train,
            {"spec": {}, "seed": 1},
            "USER_ERROR: unknown parameter seed: the flow train accepts only the parameter spec. ",
        ),
        (train, {}, "USER_ERROR: missing parameter spec: the flow train accepts only "),
        (train, {"Spec": {}}, "USER_ERROR: unknown parameter Spec and missing parameter spec: "),
        (pipeline, {"spec": {}, "a": 1, "b": 2}, "USER_ERROR: unknown parameters a and b: "),
    ],
)
def test_flow_run_with_wrong_parameter_names_fails_with_their_names(
    flow: Any, parameters: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(parameters)

    exit_code = run_engine(server, flow, monkeypatch)

    [state] = server.states
    assert state.is_failed()
    assert (state.message or "").startswith(message)
    assert exit_code == 0


def test_worker_reports_the_exit_code_if_the_server_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server({}, is_away=True)

    assert run_engine(server, train, monkeypatch) == 1


def test_other_exits_of_the_engine_are_kept() -> None:
    server = Server({})

    context = fail_on_wrong_names(str(uuid4()), connect=server.connect)
    with pytest.raises(SystemExit) as process_exit, context:
        raise SystemExit(3)

    assert process_exit.value.code == 3
    assert server.states == []


def test_message_for_a_flow_without_parameters_says_that_the_flow_accepts_none() -> None:
    message = describe_wrong_names("tidy", ["force"], accepted=[], required=[])

    assert message.startswith("unknown parameter force: the flow tidy accepts no parameters.")


def test_correct_parameters_are_no_fault() -> None:
    assert describe_wrong_names("train", ["spec"], accepted=["spec"], required=["spec"]) == ""
