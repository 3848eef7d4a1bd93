"""Signals that end a run, and what holds them up."""

from __future__ import annotations

import os
import queue
import signal
import threading
from uuid import uuid4

import pytest

from tasks.server.flow_process import ended_from_outside


class Locked:
    """A session that needs a lock to be interrupted."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.told = queue.SimpleQueue[str]()

    def interrupt(self, why: str) -> None:
        with self.lock:
            self.told.put(why)

    def let_go(self, why: str) -> None:
        raise AssertionError(why)


@pytest.mark.timeout(30)
def test_a_signal_that_lands_while_a_lock_is_held_is_heard_once_it_is_free() -> None:
    session = Locked()

    with ended_from_outside(session, uuid4(), may_be_left=False):
        with session.lock:
            # Handled here, before the next line.
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        heard = [session.told.get(timeout=10), session.told.get(timeout=10)]

    assert heard == ["interrupted by SIGTERM", "interrupted by SIGINT"]


def test_handlers_are_as_they_were_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with ended_from_outside(Locked(), uuid4(), may_be_left=False):
        assert signal.getsignal(signal.SIGTERM) is not before

    assert signal.getsignal(signal.SIGTERM) is before
    assert "signals" not in {thread.name for thread in threading.enumerate()}
