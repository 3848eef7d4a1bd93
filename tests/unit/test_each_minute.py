"""A host is reconciled again and again, whatever one look comes to, until the upkeep ends."""

from __future__ import annotations

import queue
import threading

from tasks.upkeep.reconcile import reconciled_each_minute

WITHIN_S = 30.0


def test_a_look_that_fails_is_followed_by_the_next() -> None:
    looks: queue.Queue[int] = queue.Queue()

    def look() -> None:
        looks.put(1)
        raise OSError("no space left on device")

    with reconciled_each_minute(every_s=0.01, look=look):
        seen = [looks.get(timeout=WITHIN_S) for _ in range(3)]

    assert seen == [1, 1, 1]


def test_with_the_upkeep_its_looks_end() -> None:
    begun = threading.Event()

    with reconciled_each_minute(every_s=0.01, look=begun.set):
        assert begun.wait(WITHIN_S)

    assert "reconcile" not in [thread.name for thread in threading.enumerate()]
