"""Requests that are under way are ended with the entrypoint that they are with."""

from __future__ import annotations

import asyncio

import pytest

from tasks.rollout.forwarding import EntrypointGone, Flights
from tasks.rollout.router import Entrypoint

pytestmark = pytest.mark.asyncio

_RANK_0 = Entrypoint(rank=0, epoch=2, url="http://10.0.0.1:80")


async def flies(flights: Flights, until: asyncio.Future[str]) -> str:
    """What became of a request, and that nothing is left of the abort after it."""
    try:
        with flights.to(_RANK_0):
            found = await until
    except EntrypointGone as error:
        found = str(error)
    await asyncio.sleep(0)  # where an abort that came too late would strike
    return found


async def airborne(flights: Flights) -> tuple[asyncio.Task[str], asyncio.Future[str]]:
    until: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(flies(flights, until))
    await asyncio.sleep(0)
    return task, until


async def test_an_abort_ends_every_request_with_that_incarnation() -> None:
    flights = Flights()
    tasks = [(await airborne(flights))[0] for _ in range(3)]

    aborted = flights.abort(0, 2)

    assert aborted == 3
    assert await asyncio.gather(*tasks) == ["rank 0 has left the routing"] * 3
    assert flights.abort(0, 2) == 0


@pytest.mark.parametrize(("rank", "epoch"), [(0, 1), (0, 3), (1, 2)])
async def test_an_abort_of_another_incarnation_ends_nothing(rank: int, epoch: int) -> None:
    flights = Flights()
    task, until = await airborne(flights)

    aborted = flights.abort(rank, epoch)
    until.set_result("answered")

    assert (aborted, await task) == (0, "answered")


@pytest.mark.parametrize("first", ["cancel", "abort"])
async def test_a_client_that_leaves_at_the_same_time_has_left(first: str) -> None:
    flights = Flights()
    task, _ = await airborne(flights)

    if first == "cancel":
        task.cancel()
    flights.abort(0, 2)
    if first == "abort":
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_answer_of_the_same_moment_is_void_and_the_abort_does_not_strike_later() -> None:
    flights = Flights()
    task, until = await airborne(flights)

    until.set_result("answered")  # the request has not run since
    flights.abort(0, 2)

    assert await task == "rank 0 has left the routing"


async def test_an_error_of_the_same_moment_is_kept() -> None:
    flights = Flights()
    begun = asyncio.Event()

    async def fails() -> None:
        with flights.to(_RANK_0):
            begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                raise OSError("reset") from None

    task = asyncio.create_task(fails())
    await begun.wait()
    flights.abort(0, 2)

    with pytest.raises(OSError, match="reset"):
        await task
    assert not task.cancelling()


async def test_whoever_aborts_is_not_ended_by_it() -> None:
    flights = Flights()

    with flights.to(_RANK_0):
        aborted = flights.abort_all()
        await asyncio.sleep(0)

    assert aborted == 0
