"""Tests of the router's choice of an entrypoint for each request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from tasks.rollout.router import Entrypoint, MustWait, NoEntrypoint, Router


def entrypoint(rank: int, epoch: int = 1, *, is_preferred: bool = True) -> Entrypoint:
    url = f"http://10.0.0.{rank}:80"
    return Entrypoint(rank=rank, epoch=epoch, url=url, is_preferred=is_preferred)


def router_of(*ranks: int, limit: int | None = None) -> Router:
    router = Router(limit=limit)
    router.set(entrypoint(rank) for rank in ranks)
    return router


def pick_ranks(router: Router, sessions: Sequence[str | None]) -> list[int]:
    return [router.pick(session).rank for session in sessions]


def test_requests_without_a_session_go_to_each_entrypoint_in_turn() -> None:
    router = router_of(0, 1, 2)

    assert pick_ranks(router, [None] * 6) == [0, 1, 2, 0, 1, 2]


def test_idle_entrypoints_are_chosen_in_turn() -> None:
    router = router_of(0, 1, 2)
    ranks = []

    for _ in range(6):
        chosen = router.pick(None)
        ranks.append(chosen.rank)
        router.done(chosen)

    assert ranks == [0, 1, 2, 0, 1, 2]


def test_entrypoint_with_the_fewest_outstanding_requests_is_chosen() -> None:
    dice = random.Random(7)
    router = router_of(*range(9))
    taken: list[Entrypoint] = []

    for _ in range(3000):
        if taken and dice.random() < 0.48:
            router.done(taken.pop(dice.randrange(len(taken))))
            continue
        least = min(router.outstanding_of(rank, 1) for rank in range(9))
        taken.append(router.pick(None))
        assert router.outstanding_of(taken[-1].rank, 1) == least + 1

    assert router.outstanding == len(taken)


def test_session_keeps_its_entrypoint_even_if_other_entrypoints_have_fewer_requests() -> None:
    router = router_of(0, 1, 2)

    ranks = pick_ranks(router, ["a", "b", "a", "a", "b"])

    assert ranks == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    "left",
    [
        [entrypoint(1)],  # entrypoint 0, which the session uses, was removed
        [entrypoint(0, 2), entrypoint(1)],  # entrypoint 0 was restarted
        # entrypoint 0 still exists, but did not answer the last requests
        [entrypoint(0, is_preferred=False), entrypoint(1)],
    ],
)
def test_session_moves_to_another_entrypoint_if_its_entrypoint_leaves(
    left: list[Entrypoint],
) -> None:
    router = router_of(0, 1)
    router.done(router.pick("a"))
    router.pick(None)

    router.set(left)
    first = router.pick("a", exclude=[0])
    router.set([entrypoint(0, 3), entrypoint(1)])

    assert first.rank == 1
    assert pick_ranks(router, ["a", "a"]) == [1, 1]


def test_session_is_forgotten_if_no_entrypoint_is_active() -> None:
    router = router_of(0, 1)
    router.done(router.pick(None))
    assert router.pick("a").rank == 1

    router.set([])
    with pytest.raises(NoEntrypoint):
        router.pick("a")
    router.set([entrypoint(0), entrypoint(1)])

    assert router.pick("a").rank == 0


def test_least_recently_used_session_is_forgotten_first() -> None:
    router = Router(max_sessions=2)
    router.set([entrypoint(0), entrypoint(1), entrypoint(2)])

    assert pick_ranks(router, ["a", "b", "a"]) == [0, 1, 0]
    assert router.pick("c").rank == 2  # session b is forgotten
    assert router.pick("a").rank == 0
    assert router.pick("b").rank == 1  # the entrypoint with the fewest requests


def test_excluded_ranks_are_not_chosen() -> None:
    router = router_of(0, 1, 2)

    assert router.pick("a").rank == 0
    assert router.pick("a", exclude=[0]).rank == 1
    assert router.pick("a", exclude=[0, 1]).rank == 2
    with pytest.raises(NoEntrypoint, match=r"tried all servers without success \(ranks 0, 1, 2\)"):
        router.pick("a", exclude=[0, 1, 2])


def test_entrypoint_that_is_not_preferred_is_the_last_choice() -> None:
    router = Router()
    router.set([entrypoint(0, is_preferred=False), entrypoint(1)])

    assert pick_ranks(router, [None] * 3) == [1, 1, 1]
    assert router.pick(None, exclude=[1]).rank == 0
    router.set([entrypoint(0, is_preferred=False)])
    assert pick_ranks(router, [None, "a", "a"]) == [0, 0, 0]


def test_outstanding_requests_are_kept_when_an_entrypoint_changes() -> None:
    router = router_of(0, 1)
    taken = [router.pick(None) for _ in range(4)]

    router.set([entrypoint(0, is_preferred=False), entrypoint(1)])
    router.done(taken[1])
    router.set([entrypoint(0), entrypoint(1)])

    assert (router.outstanding_of(0, 1), router.outstanding_of(1, 1)) == (2, 1)
    assert router.pick(None).rank == 1


def test_outstanding_requests_of_a_removed_entrypoint_count_until_they_end() -> None:
    router = router_of(0, 1)
    taken = [router.pick(None) for _ in range(3)]

    router.set([entrypoint(1)])
    before = router.outstanding
    router.done(taken[0])
    router.done(taken[2])

    assert (before, router.outstanding) == (3, 1)
    assert router.outstanding_of(0, 1) == 0


def test_request_cannot_end_twice() -> None:
    router = router_of(0)
    taken = router.pick(None)
    router.done(taken)

    with pytest.raises(ValueError, match="no request is in progress on the server of rank 0"):
        router.done(taken)


def test_error_without_active_entrypoints_names_the_reason() -> None:
    router = router_of(0)

    router.set([], why_none="rank 0 is being started again: killed by SIGKILL")

    with pytest.raises(NoEntrypoint) as caught:
        router.pick(None)
    assert str(caught.value) == (
        "no inference server can take the request: rank 0 is being started again: killed by SIGKILL"
    )


def test_closed_router_accepts_only_requests_that_do_not_generate() -> None:
    router = router_of(0, 1)

    router.close()
    with pytest.raises(MustWait):
        router.pick("a")
    asked = router.pick(None, generates=False)
    router.open()

    assert (asked.rank, router.pick("a").rank) == (0, 1)


@pytest.mark.asyncio
async def test_router_is_idle_when_no_request_is_outstanding() -> None:
    router = router_of(0, 1)
    taken = [router.pick(None), router.pick(None)]
    idle = asyncio.create_task(router.idle())
    router.set([entrypoint(1)])
    for entrypoint_of_request in taken:
        await asyncio.sleep(0)
        assert not idle.done()
        router.done(entrypoint_of_request)

    await idle
    await router.idle()


def test_listeners_receive_the_removed_entrypoints() -> None:
    router = router_of(0, 1, 2)
    received: list[tuple[Entrypoint, ...]] = []
    router.listen(received.append)

    router.set([entrypoint(0, is_preferred=False), entrypoint(1, 2)])
    router.open()
    router.abort()

    left = (entrypoint(0, is_preferred=False), entrypoint(1, 2))
    assert received == [(entrypoint(1), entrypoint(2)), (), left]


def test_entrypoints_at_their_limit_take_no_request_until_one_ends() -> None:
    router = router_of(0, 1, limit=2)
    taken = [router.pick(None) for _ in range(4)]

    with pytest.raises(MustWait):
        router.pick(None)
    router.done(taken[1])

    assert router.pick(None).rank == 1


def test_session_leaves_a_full_entrypoint_and_returns() -> None:
    router = router_of(0, 1, limit=1)
    first = router.pick("a")

    second = router.pick("a")
    with pytest.raises(MustWait):
        router.pick("a")
    router.done(second)
    router.done(first)

    assert (first.rank, second.rank, router.pick("a").rank) == (0, 1, 0)


def test_concurrency_follows_the_entrypoints() -> None:
    router = router_of(0, 1, 2, limit=8)

    before = router.concurrency
    router.set([entrypoint(0), entrypoint(2)])

    assert (before, router.concurrency) == (24, 16)
    assert router_of(0).concurrency is None
