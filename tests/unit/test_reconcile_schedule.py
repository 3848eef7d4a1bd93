"""A host is reconciled repeatedly until its upkeep, or the waiting run on it, ends."""

from __future__ import annotations

import queue
import threading

import pytest

from tasks.upkeep import reconcile
from tasks.upkeep.report import Report

WITHIN_S = 30.0


@pytest.fixture(autouse=True)
def each_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "_EVERY_S", 0.01)
    monkeypatch.setattr(reconcile, "_EVERY_S_WHILE_WAITING", 0.01)


def test_failed_reconcile_is_followed_by_the_next_reconcile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: queue.Queue[int] = queue.Queue()

    def look() -> None:
        looks.put(1)
        raise OSError("no space left on device")

    monkeypatch.setattr(reconcile, "reconcile_host", look)
    with reconcile.reconcile_every_minute():
        seen = [looks.get(timeout=WITHIN_S) for _ in range(3)]

    assert seen == [1, 1, 1]


def test_reconciling_ends_with_the_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    monkeypatch.setattr(reconcile, "reconcile_host", begun.set)
    with reconcile.reconcile_every_minute():
        assert begun.wait(WITHIN_S)

    assert "reconcile" not in [thread.name for thread in threading.enumerate()]


def test_waiting_run_reconciles_its_host_until_the_wait_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: queue.Queue[int] = queue.Queue()

    def fail_first() -> Report:
        calls.put(1)
        if calls.qsize() == 1:
            raise OSError("no space left on device")
        return Report(host="here", runs=())

    monkeypatch.setattr(reconcile, "reconcile_host", fail_first)
    with reconcile.reconcile_while_waiting():
        seen = [calls.get(timeout=WITHIN_S) for _ in range(3)]

    assert seen == [1, 1, 1]
    assert "reconcile" not in [thread.name for thread in threading.enumerate()]
