"""Which entrypoint a request goes to."""

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


def picked(router: Router, sessions: Sequence[str | None]) -> list[int]:
    return [router.pick(session).rank for session in sessions]


def test_requests_without_a_session_go_round() -> None:
    router = router_of(0, 1, 2)

    assert picked(router, [None] * 6) == [0, 1, 2, 0, 1, 2]


def test_ties_go_round_even_when_each_request_is_done_at_once() -> None:
    router = router_of(0, 1, 2)
    ranks = []

    for _ in range(6):
        one = router.pick(None)
        ranks.append(one.rank)
        router.done(one)

    assert ranks == [0, 1, 2, 0, 1, 2]


def test_the_choice_is_always_one_with_the_least_outstanding() -> None:
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


def test_a_session_keeps_its_entrypoint_whatever_the_others_have_to_do() -> None:
    router = router_of(0, 1, 2)

    ranks = picked(router, ["a", "b", "a", "a", "b"])

    assert ranks == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    "left",
    [
        [entrypoint(1)],  # its entrypoint has left
        [entrypoint(0, 2), entrypoint(1)],  # ... and came back as another incarnation
        [entrypoint(0, is_preferred=False), entrypoint(1)],  # its last answers are missing
    ],
)
def test_a_session_whose_entrypoint_is_gone_stays_with_another(left: list[Entrypoint]) -> None:
    router = router_of(0, 1)
    router.done(router.pick("a"))
    router.pick(None)

    router.set(left)
    first = router.pick("a", exclude=[0])
    router.set([entrypoint(0, 3), entrypoint(1)])

    assert first.rank == 1
    assert picked(router, ["a", "a"]) == [1, 1]


def test_a_session_of_which_nobody_can_take_a_request_is_forgotten() -> None:
    router = router_of(0, 1)
    router.done(router.pick(None))
    assert router.pick("a").rank == 1

    router.set([])
    with pytest.raises(NoEntrypoint):
        router.pick("a")
    router.set([entrypoint(0), entrypoint(1)])

    assert router.pick("a").rank == 0


def test_the_session_used_least_recently_is_forgotten_first() -> None:
    router = Router(max_sessions=2)
    router.set([entrypoint(0), entrypoint(1), entrypoint(2)])

    assert picked(router, ["a", "b", "a"]) == [0, 1, 0]
    assert router.pick("c").rank == 2  # b is forgotten
    assert router.pick("a").rank == 0
    assert router.pick("b").rank == 1  # as a new one, where the least is outstanding


def test_what_was_tried_is_not_chosen_again() -> None:
    router = router_of(0, 1, 2)

    assert router.pick("a").rank == 0
    assert router.pick("a", exclude=[0]).rank == 1
    assert router.pick("a", exclude=[0, 1]).rank == 2
    with pytest.raises(NoEntrypoint, match="none is left besides rank 0, 1, 2"):
        router.pick("a", exclude=[0, 1, 2])


def test_one_that_is_not_preferred_is_chosen_only_when_no_other_is_left() -> None:
    router = Router()
    router.set([entrypoint(0, is_preferred=False), entrypoint(1)])

    assert picked(router, [None] * 3) == [1, 1, 1]
    assert router.pick(None, exclude=[1]).rank == 0
    router.set([entrypoint(0, is_preferred=False)])
    assert picked(router, [None, "a", "a"]) == [0, 0, 0]


def test_what_is_outstanding_is_kept_while_an_entrypoint_changes() -> None:
    router = router_of(0, 1)
    taken = [router.pick(None) for _ in range(4)]

    router.set([entrypoint(0, is_preferred=False), entrypoint(1)])
    router.done(taken[1])
    router.set([entrypoint(0), entrypoint(1)])

    assert (router.outstanding_of(0, 1), router.outstanding_of(1, 1)) == (2, 1)
    assert router.pick(None).rank == 1


def test_what_is_outstanding_where_nobody_is_sent_any_more_counts_until_it_is_done() -> None:
    router = router_of(0, 1)
    taken = [router.pick(None) for _ in range(3)]

    router.set([entrypoint(1)])
    before = router.outstanding
    router.done(taken[0])
    router.done(taken[2])

    assert (before, router.outstanding) == (3, 1)
    assert router.outstanding_of(0, 1) == 0


def test_a_request_cannot_be_done_twice() -> None:
    router = router_of(0)
    one = router.pick(None)
    router.done(one)

    with pytest.raises(ValueError, match="nothing is outstanding on rank 0"):
        router.done(one)


def test_a_fleet_with_nobody_active_says_why() -> None:
    router = router_of(0)

    router.set([], why_none="rank 0 is being started again: killed by SIGKILL")

    with pytest.raises(NoEntrypoint) as caught:
        router.pick(None)
    assert str(caught.value) == (
        "no active rollout worker: rank 0 is being started again: killed by SIGKILL"
    )


def test_a_closed_routing_lets_only_that_pass_which_generates_nothing() -> None:
    router = router_of(0, 1)

    router.close()
    with pytest.raises(MustWait):
        router.pick("a")
    asked = router.pick(None, generates=False)
    router.open()

    assert (asked.rank, router.pick("a").rank) == (0, 1)


@pytest.mark.asyncio
async def test_it_is_idle_once_nothing_is_outstanding() -> None:
    router = router_of(0, 1)
    taken = [router.pick(None), router.pick(None)]
    idle = asyncio.create_task(router.idle())
    router.set([entrypoint(1)])
    for one in taken:
        await asyncio.sleep(0)
        assert not idle.done()
        router.done(one)

    await idle
    await router.idle()


def test_listeners_are_told_what_has_left() -> None:
    router = router_of(0, 1, 2)
    told: list[tuple[Entrypoint, ...]] = []
    router.listen(told.append)

    router.set([entrypoint(0, is_preferred=False), entrypoint(1, 2)])
    router.open()
    router.abort()

    left = (entrypoint(0, is_preferred=False), entrypoint(1, 2))
    assert told == [(entrypoint(1), entrypoint(2)), (), left]


def test_entrypoints_at_their_limit_are_full_until_one_is_done() -> None:
    router = router_of(0, 1, limit=2)
    taken = [router.pick(None) for _ in range(4)]

    with pytest.raises(MustWait):
        router.pick(None)
    router.done(taken[1])

    assert router.pick(None).rank == 1


def test_a_session_spills_from_a_full_entrypoint_and_comes_back() -> None:
    router = router_of(0, 1, limit=1)
    own = router.pick("a")

    spilt = router.pick("a")
    with pytest.raises(MustWait):
        router.pick("a")
    router.done(spilt)
    router.done(own)

    assert (own.rank, spilt.rank, router.pick("a").rank) == (0, 1, 0)


def test_concurrency_follows_the_entrypoints() -> None:
    router = router_of(0, 1, 2, limit=8)

    before = router.concurrency
    router.set([entrypoint(0), entrypoint(2)])

    assert (before, router.concurrency) == (24, 16)
    assert router_of(0).concurrency is None
