"""Tests that the record decides how a run ended, even if the Prefect server was away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelling, Completed, Crashed, Failed

from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server.flow_process import get_exit_code
from tasks.train import command
from tasks.train.command import _run_to_end


def terminal_with_record(
    place: Path, state: RunState, message: str, *, flow_run_id: str = ""
) -> Any:
    """Return a fake terminal whose field `record` is the path of a new `run.json`.

    This file contains the given state and message.
    """
    record = RunJson(
        run_id="r", flow_run_id=flow_run_id, state=state, message=message, started_at=1.0
    )
    path = place / "run.json"
    path.write_text(record.model_dump_json())
    return SimpleNamespace(record=path)


def raising() -> State[Any]:
    """Flow that raises an error because the Prefect server does not answer."""
    raise httpx.ConnectError("All connection attempts failed")


def returning(state: State[Any]) -> Callable[[], State[Any]]:
    """Return a flow that ends in this state."""
    return lambda: state


@pytest.mark.parametrize(
    "flow",
    [
        raising,
        # the flow failed because the server did not accept the final state
        returning(Failed(message="Flow run encountered an exception: ConnectError")),
        returning(Crashed(message="Execution was interrupted")),
        returning(Completed(message="step 60 of 60")),
    ],
)
@pytest.mark.parametrize(
    ("state", "message", "code"),
    [
        (RunState.COMPLETED, "step 60 of 60", 0),
        (RunState.FAILED, "RUNTIME_ERROR: trainer killed by SIGSEGV", 1),
        (RunState.FAILED, "INFEASIBLE: the gang asks for 64 GPUs", 3),
        (RunState.CANCELLED, "interrupted by SIGINT", 130),
    ],
)
def test_final_state_of_the_record_is_returned(
    flow: Callable[[], State[Any]], state: RunState, message: str, code: int, tmp_path: Path
) -> None:
    final_state = _run_to_end(flow, terminal_with_record(tmp_path, state, message))

    assert (get_exit_code(final_state), final_state.message) == (code, message)


def test_state_of_the_flow_is_returned_if_the_record_has_no_final_state(tmp_path: Path) -> None:
    state = Failed(message="the flow did not begin")

    without_final_state = terminal_with_record(tmp_path, RunState.RUNNING, "")
    without_record: Any = SimpleNamespace(record=None)

    assert _run_to_end(returning(state), without_final_state) is state
    assert _run_to_end(returning(state), without_record) is state


def test_late_cancel_of_a_completed_run_is_replaced_by_the_result_on_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow_run_id = uuid4()
    cancelling: State[Any] = Cancelling()
    terminal = terminal_with_record(
        tmp_path, RunState.COMPLETED, "step 60 of 60", flow_run_id=str(flow_run_id)
    )
    proposals: list[tuple[object, ...]] = []
    monkeypatch.setattr(command, "propose_state", lambda _client, *call: proposals.append(call))
    monkeypatch.setattr(command, "connect_to_server", lambda _url: nullcontext())

    final_state = _run_to_end(returning(cancelling), terminal)

    assert final_state.is_completed()
    assert proposals == [(str(flow_run_id), cancelling, final_state)]


def test_error_of_the_flow_is_raised_if_there_is_no_record() -> None:
    with pytest.raises(httpx.ConnectError):
        _run_to_end(raising, SimpleNamespace(record=None))  # type: ignore[arg-type]
