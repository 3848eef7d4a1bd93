"""What a run that waits in its own process says of its wait, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from tasks.queue.admission import _Line
from tasks.queue.reasons import Message


class Server:
    """Takes states."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    async def set_flow_run_state(self, flow_run_id: UUID, state: Any) -> None:
        self.messages.append(state.message)


def look(of: UUID, *, place: int, line: int, reason: str) -> Any:
    ids = [uuid4() for _ in range(line)]
    ids[place - 1] = of
    message = Message(text=f"asks for 1 GPU; {reason}", key=reason, reason=reason)
    return SimpleNamespace(messages={of: message}, line=[SimpleNamespace(id=one) for one in ids])


@pytest.mark.parametrize(
    ("second", "said", "states"),
    [
        # nothing has changed
        ({"place": 3, "line": 3, "reason": "waits"}, [], 0),
        # somebody has come behind it
        ({"place": 3, "line": 4, "reason": "waits"}, [], 0),
        # the line moves: its state's message, which does not have the place, stays as it is
        (
            {"place": 2, "line": 2, "reason": "waits"},
            ["place 2 of 2 in line; asks for 1 GPU; waits"],
            0,
        ),
        # it waits for something else
        (
            {"place": 3, "line": 3, "reason": "is first"},
            ["place 3 of 3 in line; asks for 1 GPU; is first"],
            1,
        ),
    ],
)
def test_its_place_and_its_reason_are_said_whenever_they_change(
    second: dict[str, Any], said: list[str], states: int
) -> None:
    me, server, told = uuid4(), Server(), []
    line = _Line(me, True, False, told.append, lambda seconds: True)
    asyncio.run(line._show(server, look(me, place=3, line=3, reason="waits")))
    first = list(told)

    asyncio.run(line._show(server, look(me, **second)))

    assert first == ["place 3 of 3 in line; asks for 1 GPU; waits"]
    assert told[1:] == said
    assert len(server.messages) == 1 + states
