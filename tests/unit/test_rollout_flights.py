"""Running requests are cancelled when their entrypoint leaves the routing."""

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
from tests.support.fleet_fakes import make_settings

pytestmark = pytest.mark.asyncio


def make_entrypoint(rank: int, epoch: int) -> Entrypoint:
    return Entrypoint(rank=rank, epoch=epoch, url=f"http://10.0.0.{rank}:80")


_RANK_0 = make_entrypoint(0, 2)


class FakeRequest(HttpRequest):
    """A request without a body. The request keeps its response in the attribute `sent`."""

    sent: Answer

    async def read_up_to(self, most: int) -> tuple[bytes, bool]:
        return b"", True

    def send(self, answer: Answer) -> int:
        self.sent = answer
        return answer.status


class RequestSetup:
    """A `Forwarder`, which sends requests to fake servers.

    The servers answer when the test calls `let_server_answer`.
    """

    def __init__(self) -> None:
        self.router = Router()
        self.failures: list[tuple[int, int, str]] = []
        fleet = SimpleNamespace(
            router=self.router,
            settings=make_settings(),
            note_failure=lambda *failure: self.failures.append(failure),
        )
        self.forwarder = Forwarder(fleet, is_token_own=False)  # type: ignore[arg-type]
        self.forwarder.client.request = self._wait_for_answer  # type: ignore[method-assign,assignment]
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.router.set([_RANK_0])

    async def _wait_for_answer(self, *_: Any, **__: Any) -> Any:
        return await asyncio.shield(self.answer)

    async def start_request(self) -> tuple[asyncio.Task[int], FakeRequest]:
        request = FakeRequest(wire=None, method="GET", target="/v1/models", content=None)  # type: ignore[arg-type]
        task = asyncio.create_task(self.forwarder.forward(request))
        await asyncio.sleep(0)
        return task, request

    def remove_entrypoints(self) -> None:
        self.router.set([], why_none="all are down")

    def let_server_answer(self) -> None:
        async def body(most: int) -> tuple[bytes, bool]:
            return b"answered", True

        self.answer.set_result(
            SimpleNamespace(
                status=200,
                reason="OK",
                headers=CIMultiDict(),
                content_length=8,
                content=SimpleNamespace(read_up_to=body),
                close=lambda: None,
            )
        )


async def test_requests_to_a_retired_entrypoint_end_with_a_retryable_error() -> None:
    request_setup = RequestSetup()
    started = [await request_setup.start_request() for _ in range(3)]

    request_setup.remove_entrypoints()

    assert await asyncio.gather(*(task for task, _ in started)) == [503] * 3
    for _, request in started:
        assert (
            "earlier failure: the gateway no longer sends requests to the server of rank 0"
            in request.sent.text
        )
    assert request_setup.router.outstanding == 0
    assert not request_setup.failures


@pytest.mark.parametrize(("rank", "epoch"), [(0, 1), (0, 3), (1, 2)])
async def test_end_of_another_server_or_epoch_cancels_no_request(rank: int, epoch: int) -> None:
    request_setup = RequestSetup()
    task, request = await request_setup.start_request()
    request_setup.router.set([_RANK_0, make_entrypoint(rank, epoch)])

    request_setup.router.set([_RANK_0])
    request_setup.let_server_answer()

    assert (await task, request.sent.text) == (200, "answered")


@pytest.mark.parametrize("first", ["cancel", "abort"])
async def test_client_may_leave_at_the_moment_of_an_abort(first: str) -> None:
    request_setup = RequestSetup()
    task, _ = await request_setup.start_request()

    if first == "cancel":
        task.cancel()
    request_setup.remove_entrypoints()
    if first == "abort":
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert request_setup.router.outstanding == 0


async def test_answer_at_the_moment_of_an_abort_is_discarded() -> None:
    request_setup = RequestSetup()
    task, request = await request_setup.start_request()

    # Between these two calls, the event loop does not run the task of the request.
    request_setup.let_server_answer()
    request_setup.remove_entrypoints()

    assert await task == 503
    assert (
        "earlier failure: the gateway no longer sends requests to the server of rank 0"
        in request.sent.text
    )


async def test_error_at_the_moment_of_an_abort_is_no_failure_of_the_server() -> None:
    request_setup = RequestSetup()

    async def reset_connection(*_: Any, **__: Any) -> None:
        try:
            await request_setup.answer
        except asyncio.CancelledError:
            raise BrokenOff("reset") from None

    request_setup.forwarder.client.request = reset_connection  # type: ignore[method-assign,assignment]
    task, request = await request_setup.start_request()
    request_setup.remove_entrypoints()

    assert await task == 503
    assert "earlier failure: no answer: reset" in request.sent.text
    assert not task.cancelling()
    assert not request_setup.failures
