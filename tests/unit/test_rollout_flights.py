"""Requests that are under way are ended with the entrypoint that they are with."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from tasks.rollout.forwarding import Forwarder
from tasks.rollout.http1 import Answer, HttpRequest
from tasks.rollout.router import Entrypoint, Router
from tasks.rollout.upstream import BrokenOff
from tests.support.fleet_fakes import settings_of

pytestmark = pytest.mark.asyncio


def entrypoint(rank: int, epoch: int) -> Entrypoint:
    return Entrypoint(rank=rank, epoch=epoch, url=f"http://10.0.0.{rank}:80")


_RANK_0 = entrypoint(0, 2)


class Request(HttpRequest):
    """Has no body, and keeps its answer."""

    sent: Answer

    async def upto(self, most: int) -> tuple[bytes, bool]:
        return b"", True

    def send(self, answer: Answer) -> int:
        self.sent = answer
        return answer.status


class Air:
    """A forwarder before servers whose answers come when a test says so."""

    def __init__(self) -> None:
        self.router = Router()
        self.failures: list[tuple[int, int, str]] = []
        fleet = SimpleNamespace(
            router=self.router,
            settings=settings_of(),
            note_failure=lambda *failure: self.failures.append(failure),
        )
        self.forwarder = Forwarder(fleet, is_token_own=False)  # type: ignore[arg-type]
        self.forwarder.client.request = self._asked  # type: ignore[method-assign,assignment]
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.router.set([_RANK_0])

    async def _asked(self, *_: Any, **__: Any) -> Any:
        return await asyncio.shield(self.answer)

    async def fly(self) -> tuple[asyncio.Task[int], Request]:
        request = Request(wire=None, method="GET", target="/v1/models", content=None)  # type: ignore[arg-type]
        task = asyncio.create_task(self.forwarder.forward(request))
        await asyncio.sleep(0)
        return task, request

    def leave(self) -> None:
        """The entrypoint goes, and nobody is left."""
        self.router.set([], why_none="all are down")

    def answers(self) -> None:
        async def body(most: int) -> tuple[bytes, bool]:
            return b"answered", True

        self.answer.set_result(
            SimpleNamespace(
                status=200,
                reason="OK",
                headers=CIMultiDict(),
                content_length=8,
                content=SimpleNamespace(upto=body),
                close=lambda: None,
            )
        )


async def test_the_requests_of_one_that_leaves_end_with_it_and_are_tried_elsewhere() -> None:
    air = Air()
    flying = [await air.fly() for _ in range(3)]

    air.leave()

    assert await asyncio.gather(*(task for task, _ in flying)) == [503] * 3
    for _, request in flying:
        assert "before: rank 0 has left the routing" in request.sent.text
    assert air.router.outstanding == 0 and not air.failures


@pytest.mark.parametrize(("rank", "epoch"), [(0, 1), (0, 3), (1, 2)])
async def test_the_end_of_another_incarnation_ends_nothing(rank: int, epoch: int) -> None:
    air = Air()
    task, request = await air.fly()
    air.router.set([_RANK_0, entrypoint(rank, epoch)])

    air.router.set([_RANK_0])
    air.answers()

    assert (await task, request.sent.text) == (200, "answered")


@pytest.mark.parametrize("first", ["cancel", "abort"])
async def test_a_client_that_leaves_at_the_same_time_has_left(first: str) -> None:
    air = Air()
    task, _ = await air.fly()

    if first == "cancel":
        task.cancel()
    air.leave()
    if first == "abort":
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert air.router.outstanding == 0


async def test_an_answer_of_the_same_moment_is_void_and_the_abort_does_not_strike_later() -> None:
    air = Air()
    task, request = await air.fly()

    air.answers()  # the request has not run since
    air.leave()

    assert await task == 503
    assert "before: rank 0 has left the routing" in request.sent.text


async def test_an_error_of_the_same_moment_is_kept_and_is_no_failure_of_the_server() -> None:
    air = Air()

    async def resets(*_: Any, **__: Any) -> None:
        try:
            await air.answer
        except asyncio.CancelledError:
            raise BrokenOff("reset") from None

    air.forwarder.client.request = resets  # type: ignore[method-assign,assignment]
    task, request = await air.fly()
    air.leave()

    assert await task == 503
    assert "before: no answer: reset" in request.sent.text
    assert not task.cancelling() and not air.failures
