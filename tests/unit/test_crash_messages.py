"""Tests of the state message of a flow run whose process was killed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from uuid import uuid4

import anyio
import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.runner import _state_proposer
from prefect.runner._flow_run_executor import FlowRunExecutorContext
from prefect.runner._process_manager import ProcessHandle
from prefect.states import Pending

from tasks.queue.crash_messages import CrashReporter
from tasks.queue.worker import _NoHooks

SPEC = {"name": "tiny", "workload": "sft"}
RUN_ID = "tiny-sft-20260102-000000-bbbb91c2"


class ProgramStarter:
    """Starts a Python program as the process of a flow run."""

    def __init__(self, program: str) -> None:
        self._program = program

    async def start(self, flow_run: FlowRun, task_status: Any) -> None:
        process = await anyio.open_process([sys.executable, "-c", self._program])
        task_status.started(ProcessHandle(process))
        await process.wait()


def crash_message(
    program: str,
    entrypoint: str | None,
    spec: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Let Prefect run a program as a flow process, and return the message of the state Crashed."""
    messages: list[str] = []

    async def propose_state(_client: object, state: State[Any], **_options: object) -> State[Any]:
        messages.append(state.message or "")
        return state

    async def execute() -> None:
        flow_run = FlowRun(
            id=uuid4(), flow_id=uuid4(), name=RUN_ID, state=Pending(), parameters={"spec": spec}
        )
        client: Any = object()
        context = FlowRunExecutorContext()
        context._state_proposer = CrashReporter(client=client, entrypoint=entrypoint)
        context._cancellation_manager = type("Manager", (), {})()
        context.process_manager = type(
            "Processes", (), {"add": _do_nothing, "remove": _do_nothing}
        )()
        context.control_channel = type("Channel", (), {"get_conclusion": lambda *_: None})()
        executor = context.create_executor(
            flow_run, ProgramStarter(program), hook_runner=_NoHooks(), propose_submitting=False
        )
        async with anyio.create_task_group() as group:
            await group.start(lambda task_status: executor.submit(task_status=task_status))

    monkeypatch.setattr(_state_proposer, "propose_state", propose_state)
    asyncio.run(execute())
    [message] = messages
    return message


async def _do_nothing(*_: object) -> None: ...


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("program", "entrypoint", "spec", "parts"),
    [
        (KILLED, "flows.train.train", SPEC, ["was killed by SIGKILL", "muster retry tiny-sft-"]),
        (
            "raise SystemExit(3)",
            "flows.train.train",
            SPEC,
            ["ended with exit code 3", "muster retry tiny-sft-"],
        ),
        (
            KILLED,
            "flows.train.train",
            {**SPEC, "on_lost_flow": "adopt"},
            ["was killed by SIGKILL", "starts a new flow process"],
        ),
        (KILLED, "flows.pipeline.pipeline", {}, ["SIGKILL", "muster pipeline --resume"]),
        (KILLED, None, {}, ["was killed by SIGKILL"]),
    ],
)
def test_message_of_a_killed_flow_process_says_how_the_run_continues(
    program: str,
    entrypoint: str | None,
    spec: dict[str, Any],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = crash_message(program, entrypoint, spec, monkeypatch)

    assert message.startswith("The flow process of this run ")
    assert all(part in message for part in parts), message
    assert "status code" not in message
