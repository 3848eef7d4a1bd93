"""Tests that a file lock is not used if its file was replaced.

A lock on a removed file excludes no other process. In each test, the file is replaced after a
program has opened it and before the program locks it.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.stack.state import StackError, StackPlace
from tasks.processes.registry import RunRegistration
from tasks.queue.lease import HostLock


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that takes the path of a file, and simulates a race for this file.

    Just before a program locks the file for the first time, the file is deleted and created again.
    """

    def arrange(path: Path) -> None:
        left = [path]

        def before(lock: Callable[..., Any]) -> Callable[..., Any]:
            def locking(*given: Any) -> Any:
                if left:
                    left.pop().unlink()
                    path.touch()
                return lock(*given)

            return locking

        for name in ("flock", "lockf"):
            monkeypatch.setattr(fcntl, name, before(getattr(fcntl, name)))

    return arrange


def test_scheduler_lock_is_exclusive_if_its_file_is_replaced(
    tmp_path: Path, replaced: Callable[[Path], None]
) -> None:
    path = tmp_path / "gate.lock"
    replaced(path)
    first, second = HostLock(path), HostLock(path)

    assert first.try_lock()
    assert not second.try_lock()
    first.unlock()


def test_scheduler_lock_is_lost_if_its_file_is_replaced_while_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "gate.lock"
    first, second = HostLock(path), HostLock(path)
    assert first.try_lock()

    path.unlink()
    taken = second.try_lock()

    assert taken and not first.try_lock()
    assert first.lock_id is None
    second.unlock()


def test_lock_of_a_run_is_exclusive_if_its_file_is_replaced(
    muster_home: Path, replaced: Callable[[Path], None]
) -> None:
    other = "from tasks.processes.registry import RunRegistration; RunRegistration.opened('a-run')"
    replaced(muster_home / "live" / "a-run" / "lock")
    register = RunRegistration.opened("a-run")

    refused = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)

    assert "RunHeld" in refused.stderr
    register.close()


def test_lock_of_the_stack_is_exclusive_if_its_file_is_replaced(
    tmp_path: Path, replaced: Callable[[Path], None]
) -> None:
    place = StackPlace(directory=tmp_path)
    replaced(tmp_path / "lock")

    with (
        place.locked(lambda: None, 5.0),
        pytest.raises(StackError, match="has locked"),
        place.locked(lambda: None, 0.0),
    ):
        pass
