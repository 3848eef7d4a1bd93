"""Waits of a fleet end when they should, whatever they wait for does."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tasks.rollout.clock import within
from tests.support.fleet_clock import now_s, run


def test_an_answer_in_time_is_the_answer() -> None:
    async def answer() -> str:
        await asyncio.sleep(1.0)
        return "yes"

    assert run(within(2.0, answer())) == "yes"


def test_what_puts_off_its_end_is_left_to_itself() -> None:
    async def deaf() -> None:
        while now_s() < 2000.0:
            try:
                await asyncio.sleep(100.0)
            except asyncio.CancelledError:
                continue

    async def asked() -> float:
        began_s = now_s()
        with pytest.raises(TimeoutError, match="no end after 2 s"):
            await within(2.0, deaf())
        return now_s() - began_s

    assert run(asked()) == 2.0


def test_an_error_at_the_moment_of_the_callers_cancel_is_no_complaint_of_asyncios() -> None:
    complaints: list[dict[str, Any]] = []

    async def fail(failed: asyncio.Event) -> None:
        await failed.wait()
        raise OSError("gone")

    async def history() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        failed = asyncio.Event()
        caller = asyncio.ensure_future(within(5.0, fail(failed)))
        await asyncio.sleep(1.0)
        failed.set()
        # The question fails in the next step of the loop, in which its caller is cancelled.
        asyncio.get_running_loop().call_soon(caller.cancel)
        await asyncio.wait({caller})
        assert caller.cancelled()
        del caller
        gc.collect()

    run(history())

    assert complaints == []
